//! SIGTERM to every role, whatever it is doing, while new requests come: it says first that
//! it is not ready, what runs on it ends as if nothing had happened, new work goes elsewhere
//! or is refused, and the process ends once nothing is left, long before its time is over.
//!
//! Grace times are a minute here, so that a process that waits them out is found.
//!
//! Seen to fail: while a router closed its doors at once, while a process that loaded its model
//! did not listen, while workers waited for the streams on which routers follow them, with a
//! drain that is always waited out, with a router that does not end what is late, with a
//! prefill worker that does not see its transfers out, and with no grace.

mod hangup;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use baton_membership::{Etcd, Membership as _, WorkerState};
use baton_proto::status::from_status;
use baton_proto::v1;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::{Error, WorkerId};
use baton_tests::client::{self, Collector};
use baton_tests::http::{Event, EventStream};
use baton_tests::link::{Link, Pace};
use baton_tests::models;
use baton_tests::pace::Stopwatch;
use baton_tests::process::{
    Launcher, Pool, Process, RouterProcess, Worker, baton_binary, fixture_path, free_port,
    wait_listed,
};
use baton_tests::transcript::{Transcript, demanding};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::{Known, RELEASED_WITHIN, SPLIT, Traffic, ask, known};

const SOON: Duration = Duration::from_secs(20);
/// What a process says when it has waited in vain, for whom it need not wait.
const WAITED: [&str; 5] = [
    "did not acknowledge",
    "the grace time is over",
    "did not end in time",
    "end what still runs",
    "nobody took the rest over",
];
/// Far below every grace time.
const ENDS_WITHIN: Duration = Duration::from_secs(20);
/// Who asks for something new all the time, and who for something long.
const CLIENTS: usize = 3;
const LONG_CLIENTS: usize = 6;
const GRACE: &str = "--drain-grace-s=60";
/// A record that goes within [`SOON`] was taken back.
const LEASE: &str = "--etcd-ttl-s=60";
/// No timer may end what is looked at.
const PATIENT: [&str; 3] = [
    "--local-prefill-tokens-max=0",
    "--handoff-timeout-ms=60000",
    "--drain-ms=60000",
];

/// Expects a good end, and that nobody was waited for who need not be.
async fn ends(process: &mut Process) {
    let watch = Stopwatch::start();
    assert_eq!(process.exit_code().await, 0, "`{}`", process.name);
    let took = watch.elapsed();
    println!("`{}` ended after {took:?}", process.name);
    assert!(took < ENDS_WITHIN, "`{}` took {took:?}", process.name);
    let log = process.log();
    for waited in WAITED {
        assert!(!log.contains(waited), "`{}`: {waited}", process.name);
    }
}

/// Streams that run, each compared with the oracle at its end.
struct Streams {
    begun: Arc<AtomicUsize>,
    count: usize,
    running: JoinSet<()>,
}

impl Streams {
    /// Starts one for each case over a connection of their own. With `window`, a stream's
    /// client takes no more than that many bytes until `slow` is over.
    fn start(router: &RouterProcess, cases: &[Known], window: Option<(u32, Arc<Gate>)>) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://{}", router.grpc)).unwrap();
        let endpoint = match &window {
            Some((bytes, _)) => endpoint.initial_stream_window_size(*bytes),
            None => endpoint,
        };
        let channel = endpoint.connect_lazy();
        let begun = Arc::<AtomicUsize>::default();
        let mut running = JoinSet::new();
        for one in cases {
            let one = one.clone();
            let (client, begun) = (InferenceClient::new(channel.clone()), Arc::clone(&begun));
            let gate = window.as_ref().map(|(_, gate)| Arc::clone(gate));
            running.spawn(async move { stream(client, &one, &begun, gate.as_deref()).await });
        }
        Self {
            begun,
            count: cases.len(),
            running,
        }
    }

    /// Waits until all have a token.
    async fn wait_begun(&self) {
        let waited = Stopwatch::start();
        while self.begun.load(Ordering::Relaxed) < self.count {
            assert!(waited.elapsed() < SOON, "not all streams have begun");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// How many have not ended.
    fn left(&mut self) -> usize {
        while let Some(ended) = self.running.try_join_next() {
            ended.expect("a right answer");
        }
        self.running.len()
    }

    /// Reads all to their ends.
    async fn finish(mut self) {
        while let Some(ended) = self.running.join_next().await {
            ended.expect("a right answer");
        }
    }
}

/// Lets readers go on once it is opened.
#[derive(Default)]
struct Gate(tokio_util::sync::CancellationToken);

async fn stream(
    mut client: InferenceClient<Channel>,
    (case, right): &Known,
    begun: &AtomicUsize,
    gate: Option<&Gate>,
) {
    let request = client::request(case);
    let mut stream = client.generate(request).await.expect("taken").into_inner();
    let mut collector = Collector::new(case.sampling.n);
    while let Some(event) = stream.message().await.expect("no failure") {
        let before = collector.tokens();
        collector.take(event);
        if before == 0 && collector.tokens() > 0 {
            begun.fetch_add(1, Ordering::Relaxed);
            if let Some(gate) = gate {
                gate.0.cancelled().await;
            }
        }
    }
    let answer = collector.finish();
    for (got, right) in answer.choices.iter().zip(right) {
        assert_eq!(got.tokens, right.tokens);
        assert_eq!(got.finish, right.finish);
    }
}

/// Cases that run long: `tokens` of output each.
fn long(count: usize, tokens: u32) -> Arc<Vec<Known>> {
    known(&models::fixture("rand"), 0x7e1a, count, tokens)
}

/// Waits until a worker that cannot end is marked as leaving where routers look, says so itself,
/// and the router knows.
async fn wait_draining(view: &Etcd, router: &RouterProcess, worker: &Worker) {
    let id = WorkerId(worker.process.name.clone());
    let mut seen = view.watch();
    let marked = async {
        loop {
            let state = seen.borrow_and_update().workers.get(&id).map(|w| w.state);
            match state {
                Some(WorkerState::Draining) => return,
                None => panic!("the record went before its worker"),
                Some(_) => seen.changed().await.unwrap(),
            }
        }
    };
    tokio::time::timeout(SOON, marked).await.expect("marked");
    let ready = worker.admin().get("/readyz").await;
    let said = String::from_utf8_lossy(&ready.body).into_owned();
    assert_eq!(ready.status, 503, "{said}");
    assert!(said.contains("draining"), "{said}");
    let draining =
        |role| format!("baton_pool_members{{worker_role=\"{role}\",state=\"draining\"}}");
    let waited = Stopwatch::start();
    while router.metric(&draining("prefill")).await + router.metric(&draining("decode")).await
        == 0.0
    {
        assert!(waited.elapsed() < SOON, "the router is not told");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// What is asked for while another worker leaves is all done by this one.
async fn assert_serves(worker: &Worker, router: &RouterProcess, cases: &Arc<Vec<Known>>) {
    let before = worker.load().await.handoffs_total;
    let new = Traffic::start(&router.grpc(), "rand", cases, CLIENTS);
    new.wait_answered(12).await;
    let failures = new.stop().await;
    assert!(failures.is_empty(), "{failures:?}");
    let waited = Stopwatch::start();
    // A sender counts a handoff once its receiver has thanked for it.
    while worker.load().await.handoffs_total < before + 12 {
        assert!(waited.elapsed() < SOON, "new work went elsewhere");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// No stream had to move and nothing failed. Of the requests that are always on their way, at
/// most `late` were refused by a worker that had just begun to leave, and went elsewhere.
async fn assert_undisturbed(router: &RouterProcess, late: f64) {
    let metrics = router.http().get("/metrics").await;
    let text = String::from_utf8_lossy(&metrics.body).into_owned();
    let counted = |name: &str, label: &str| -> f64 {
        let of_name = text
            .lines()
            .filter(|line| line.starts_with(name) && line.contains(label));
        of_name
            .filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok())
            .sum()
    };
    for (name, label) in [
        ("baton_migrations_total", ""),
        ("baton_token_conflicts_total", ""),
        ("baton_retries_total", "when=\"mid_stream\""),
        ("baton_retries_total", "result=\"failed\""),
    ] {
        assert_eq!(counted(name, label), 0.0, "{name} {label}");
    }
    let retries = counted("baton_retries_total", "");
    assert!(retries <= late, "{retries} requests went elsewhere");
}

async fn two_and_two(launcher: &Launcher) -> [Worker; 4] {
    let flags = [GRACE, LEASE, "--kv-transport=tcp"];
    let start = |pool, id| launcher.worker(pool, id, "rand", &flags);
    let (p0, p1, d0, d1) = tokio::join!(
        start(Pool::Prefill, "p0"),
        start(Pool::Prefill, "p1"),
        start(Pool::Decode, "d0"),
        start(Pool::Decode, "d1"),
    );
    [p0, p1, d0, d1]
}

/// The router, over both doors, with a client that follows its health.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_refuses_what_comes_until_what_runs_has_ended() {
    let launcher = Launcher::start().await;
    let workers = two_and_two(&launcher).await;
    let mut router = launcher.router(&PATIENT).await;
    router.wait_workers("rand", (2, 2), SOON).await;
    let body = json!({ "model": "rand", "prompt": (30..90).collect::<Vec<u32>>(),
        "max_tokens": 3000, "ignore_eos": true, "temperature": 0, "stream": true });
    let alone = router.http().stream("/v1/completions", &body).await;
    let alone = alone.collect().await;

    let gate = Arc::<Gate>::default();
    let cases = long(10, 1_200);
    let mut streams = Streams::start(&router, &cases, Some((1 << 10, Arc::clone(&gate))));
    streams.wait_begun().await;
    let mut events = router.http().stream("/v1/completions", &body).await;
    let first = events.next().await.expect("an event");
    let (mut connection, mut health) = (router.grpc(), HealthClient::new(channel(&router)));
    let asked = connection.list_models(v1::ListModelsRequest {}).await;
    asked.expect("a connection");
    let whole = HealthCheckRequest::default();
    let follows = health.watch(whole.clone()).await.unwrap().into_inner();

    router.process.terminate();
    let waited = Stopwatch::start();
    while router.http().get("/readyz").await.status != 503 {
        assert!(waited.elapsed() < SOON, "it is still ready");
    }
    let ready = router.http().get("/readyz").await;
    assert!(String::from_utf8_lossy(&ready.body).contains("draining"));
    assert_eq!(router.http().get("/livez").await.status, 200);
    // New work, over connections that are there and new ones.
    for _ in 0..3 {
        let short = json!({ "model": "rand", "prompt": [5, 6], "max_tokens": 2 });
        let refused = router.http().post("/v1/completions", &short).await;
        assert_eq!(refused.error(503)["code"], "draining");
        for client in [connection.clone(), InferenceClient::new(channel(&router))] {
            let error = ask(client, "rand", &cases[0]).await.unwrap_err();
            assert_eq!(error.reason, "DRAINING", "{error:?}");
        }
    }
    while health
        .check(whole.clone())
        .await
        .unwrap()
        .into_inner()
        .status()
        != ServingStatus::NotServing
    {
        assert!(waited.elapsed() < SOON, "its health says that it serves");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(streams.left(), 10, "nothing ran any more");
    gate.0.cancel();
    streams.finish().await;
    // The id and the time are the request's own; the text is not.
    let rest = events.collect().await;
    let texts = |events: &[Event]| -> String {
        let text = |event: &Event| match event {
            Event::Json(chunk) => chunk["choices"][0]["text"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
            Event::Done => "[DONE]".to_owned(),
        };
        events.iter().map(text).collect()
    };
    let whole: Vec<_> = std::iter::once(first).chain(rest).collect();
    assert_eq!(texts(&whole), texts(&alone));
    ends(&mut router.process).await;
    drop(follows);
    for worker in &workers {
        worker.wait_released(RELEASED_WITHIN).await;
    }
}

fn channel(router: &RouterProcess) -> Channel {
    let endpoint = Endpoint::from_shared(format!("http://{}", router.grpc)).unwrap();
    endpoint.connect_lazy()
}

/// A decode worker with streams on it, then a prefill worker with prompts on it. The engine of
/// the one that leaves stands still until everything was seen of it that is over when it goes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_ends_what_it_has_and_takes_nothing_new() {
    let launcher = Launcher::start().await;
    let view = launcher.etcd.follow();
    let [mut p0, p1, mut d0, d1] = two_and_two(&launcher).await;
    let router = launcher.router(&PATIENT).await;
    router.wait_workers("rand", (2, 2), SOON).await;
    let short = known(&models::fixture("rand"), 0x5047, 16, 8);
    let traffic = Traffic::start(&router.grpc(), "rand", &short, CLIENTS);

    // In decode, then in prefill; both are spread over both workers.
    let streams = long(LONG_CLIENTS, 400);
    let prompts = Arc::new(prompts(LONG_CLIENTS as u32, 1_500));
    for (leaving, stays, cases, left) in [
        (&mut d0, &d1, streams, &["d1", "p0", "p1"][..]),
        (&mut p0, &p1, prompts, &["d1", "p1"]),
    ] {
        let running = Traffic::start(&router.grpc(), "rand", &cases, LONG_CLIENTS);
        running.wait_answered(LONG_CLIENTS).await;
        let held = leaving.hold_busy_engine().await;
        leaving.process.terminate();
        wait_draining(&view, &router, leaving).await;
        let had = &leaving.process.logged("draining").await["left"];
        println!("`{}` had {had}", leaving.process.name);
        assert!(had.as_u64().expect("a number") > 0);
        assert_serves(stays, &router, &short).await;
        held.release().await;
        ends(&mut leaving.process).await;
        wait_listed(&view, left, SOON).await;
        let failures = running.stop().await;
        assert!(failures.is_empty(), "{failures:?}");
    }
    let failures = traffic.stop().await;
    assert!(failures.is_empty(), "{failures:?}");
    // Whoever was on the way to one that left was refused there once.
    assert_undisturbed(&router, 2.0 * (CLIENTS + LONG_CLIENTS) as f64).await;
    for worker in [&p1, &d1] {
        worker.wait_released(RELEASED_WITHIN).await;
    }
}

/// Cases with long prompts and short answers.
fn prompts(count: u32, length: u32) -> Vec<Known> {
    let mut cases: Vec<Known> = known(&models::fixture("rand"), 0x9e0, count as usize, 4).to_vec();
    let mut oracle = baton_tests::oracle::Oracle::new(
        &models::fixture("rand"),
        baton_proto::kv_layout::KvDtype::F32,
    );
    for (index, (case, right)) in (0..).zip(&mut cases) {
        case.prompt = (0..length)
            .map(|at| 6 + (at * 7 + index * 31) % 290)
            .collect();
        *right = oracle.run(case);
    }
    cases
}

/// A prefill worker whose blocks are on their way over a slow link: it keeps them, and stays,
/// until the receiver has them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_worker_stays_until_its_receiver_has_everything() {
    let launcher = Launcher::start().await;
    let view = launcher.etcd.follow();
    let port = free_port();
    let link = Link::to(([127, 0, 0, 1], port).into()).await;
    let listen = format!("--data-listen=127.0.0.1:{port}");
    let advertise = format!("--data-advertise={}", link.address());
    let tcp = "--kv-transport=tcp";
    let (of_prefill, of_decode) = ([GRACE, tcp], [tcp, &listen, &advertise]);
    let (p0, d0) = tokio::join!(
        launcher.worker(Pool::Prefill, "p0", "rand", &of_prefill),
        launcher.worker(Pool::Decode, "d0", "rand", &of_decode),
    );
    let router = launcher.router(&PATIENT).await;
    router.wait_workers("rand", (1, 1), SOON).await;
    let prompts = prompts(2, 640);
    ask(router.grpc(), "rand", &prompts[0]).await.unwrap();
    let bytes = d0.tcp_bytes().await as u64;
    assert!(bytes > 100_000, "{bytes}");

    // In a minute.
    link.set(Pace::Bytes(bytes / 60));
    let mut streams = Streams::start(&router, &prompts[1..], None);
    // The first token is there before its blocks are.
    streams.wait_begun().await;
    let mut leaving = p0;
    leaving.process.terminate();
    wait_draining(&view, &router, &leaving).await;
    let fresh = launcher.worker(Pool::Prefill, "p1", "rand", &[tcp]).await;
    router.wait_workers("rand", (1, 1), SOON).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let held = leaving.load().await;
    let blocks = &held.blocks[0];
    assert!(blocks.pinned + blocks.referenced > 0, "{held:?}");
    assert_eq!(streams.left(), 1);
    // New requests are computed by the other one.
    let (case, right) = &known(&models::fixture("rand"), 0x5048, 1, 8)[0];
    let new = Streams::start(&router, &[(case.clone(), right.clone())], None);
    new.wait_begun().await;
    link.set(Pace::Free);
    streams.finish().await;
    ends(&mut leaving.process).await;
    new.finish().await;
    assert_eq!(d0.load().await.handoffs_total, 3);
    assert_undisturbed(&router, 0.0).await;
    for worker in [&fresh, &d0] {
        worker.wait_released(RELEASED_WITHIN).await;
    }
    assert_eq!(fresh.load().await.handoffs_total, 1);
}

/// Nothing runs: nothing is waited for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_processes_end_at_once() {
    let launcher = Launcher::start().await;
    let view = launcher.etcd.follow();
    let workers = two_and_two(&launcher).await;
    let mut router = launcher.router(&PATIENT).await;
    router.wait_workers("rand", (2, 2), SOON).await;
    // Connections without a call on them.
    router
        .grpc()
        .list_models(v1::ListModelsRequest {})
        .await
        .unwrap();
    let [mut p0, p1, mut d0, d1] = workers;
    for process in [&mut router.process, &mut p0.process, &mut d0.process] {
        process.terminate();
        ends(process).await;
    }
    wait_listed(&view, &["d1", "p1"], SOON).await;
    let up = baton_tests::process::up("rand", &["--drain-ms=60000"], launcher.folder());
    let mut up = up.await;
    up.process.terminate();
    ends(&mut up.process).await;
    drop((p1, d1));
}

/// All roles in one process: streams end as they would have.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_in_one_process_lets_its_streams_end() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--drain-ms=60000", "--kv-tokens=16384"];
    let up = baton_tests::process::up("rand", &flags, folder.path());
    let mut up = up.await;
    let gate = Arc::<Gate>::default();
    let window = Some((1 << 10, Arc::clone(&gate)));
    let streams = Streams::start(&up, &long(10, 500), window);
    streams.wait_begun().await;
    up.process.terminate();
    let waited = Stopwatch::start();
    while up.http().get("/readyz").await.status != 503 {
        assert!(waited.elapsed() < SOON, "it is still ready");
    }
    let error = ask(up.grpc(), "", &long(1, 4)[0]).await.unwrap_err();
    assert_eq!(error.reason, "DRAINING", "{error:?}");
    gate.0.cancel();
    streams.finish().await;
    ends(&mut up.process).await;
}

/// The model never comes: nobody waits for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_waits_for_its_model_ends_at_once() {
    let launcher = Launcher::start().await;
    let view = launcher.etcd.follow();
    let hub = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("HF_ENDPOINT=http://{}", hub.local_addr().unwrap());
    let cache = format!("--cache-dir={}", launcher.folder().display());
    let model = "--model=hf:owner/model";
    let etcd = format!("--etcd={}", launcher.etcd.url());
    let roles: [&[&str]; 3] = [
        &["prefill", &etcd, model, &cache],
        &["decode", &etcd, model, &cache],
        &[
            "up",
            model,
            &cache,
            "--http=127.0.0.1:0",
            "--grpc=127.0.0.1:0",
        ],
    ];
    for args in roles {
        let binary = baton_binary();
        let mut line = vec![endpoint.clone(), binary.to_str().unwrap().to_owned()];
        line.extend(args.iter().map(|arg| (*arg).to_owned()));
        // `env` becomes the program it is given.
        let mut process =
            Process::start(args[0], Path::new("/usr/bin/env"), &line, launcher.folder());
        let asked = tokio::time::timeout(SOON, hub.accept()).await;
        let asked = asked.expect("the model is asked for").unwrap();
        process.terminate();
        ends(&mut process).await;
        assert!(process.log().contains("before the model was loaded"));
        drop(asked);
    }
    assert!(view.watch().borrow().workers.is_empty());
}

/// The store takes connections and says nothing: no role has joined anything yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_waits_for_etcd_ends_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let store = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let etcd = format!("--etcd=http://{}", store.local_addr().unwrap());
    let held = tokio::spawn(async move {
        let mut held = Vec::new();
        while let Ok((connection, _)) = store.accept().await {
            held.push(connection);
        }
    });
    let model = format!("--model={}", fixture_path("rand").display());
    let roles: [&[&str]; 3] = [
        &["prefill", &etcd, &model, GRACE],
        &["decode", &etcd, &model, GRACE],
        &["router", &etcd, "--http=127.0.0.1:0", "--grpc=127.0.0.1:0"],
    ];
    for args in roles {
        let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        let mut process = Process::start(&args[0], &baton_binary(), &args, folder.path());
        process
            .line(|line| line.starts_with("baton ").then_some(()))
            .await;
        process.terminate();
        ends(&mut process).await;
        assert_eq!(process.told("draining could not be published"), 0);
    }
    held.abort();
}

/// Another SIGTERM, later than an echo of the first: the process ends with what runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_signal_ends_a_process_at_once() {
    let launcher = Launcher::start().await;
    let port = free_port();
    let link = Link::to(([127, 0, 0, 1], port).into()).await;
    let listen = format!("--data-listen=127.0.0.1:{port}");
    let advertise = format!("--data-advertise={}", link.address());
    let tcp = "--kv-transport=tcp";
    let (of_prefill, of_decode) = ([tcp], [GRACE, tcp, &listen, &advertise]);
    let (p0, mut d0) = tokio::join!(
        launcher.worker(Pool::Prefill, "p0", "rand", &of_prefill),
        launcher.worker(Pool::Decode, "d0", "rand", &of_decode),
    );
    let mut router = launcher.router(&PATIENT).await;
    router.wait_workers("rand", (1, 1), SOON).await;
    let again = async |process: &mut Process| {
        // Once more within half a second is the same wish.
        process.terminate();
        process.terminate();
        process.logged("signal received: draining").await;
        tokio::time::sleep(Duration::from_millis(700)).await;
        assert!(process.runs(), "`{}` took an echo for a wish", process.name);
        process.terminate();
        assert_eq!(process.exit_code().await, 130, "`{}`", process.name);
    };
    // A decode worker whose blocks take a minute to come: its stream goes on at another.
    let prompts = prompts(2, 640);
    ask(router.grpc(), "rand", &prompts[0]).await.unwrap();
    link.set(Pace::Bytes(d0.tcp_bytes().await as u64 / 60));
    let streams = Streams::start(&router, &prompts[1..], None);
    streams.wait_begun().await;
    let d1 = launcher.worker(Pool::Decode, "d1", "rand", &[tcp]).await;
    router.wait_workers("rand", (1, 2), SOON).await;
    again(&mut d0.process).await;
    streams.finish().await;

    // A router: clients see a connection that breaks.
    let (_, request) = demanding(3_500).remove(0);
    let endpoint = Endpoint::from_shared(format!("http://{}", router.grpc)).unwrap();
    let channel = endpoint.initial_stream_window_size(1 << 10).connect_lazy();
    let mut client = InferenceClient::new(channel);
    let mut stream = client.generate(request).await.unwrap().into_inner();
    let mut seen = Transcript::new(1);
    while seen.tokens() == 0 {
        seen.take(stream.message().await.unwrap().expect("it goes on"));
    }
    again(&mut router.process).await;
    let broken = loop {
        match stream.message().await {
            Ok(Some(event)) => seen.take(event),
            Ok(None) => panic!("the stream ended well"),
            Err(status) => break status,
        }
    };
    assert!(seen.completed.is_none(), "{broken}");
    for worker in [&p0, &d1] {
        worker.wait_released(RELEASED_WITHIN).await;
    }
}

/// A stream that is longer than the time it gets ends with an error that says why: at a
/// router when its time is over, at a worker when nobody takes it over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_longer_than_its_time_ends_with_the_reason() {
    let launcher = Launcher::start().await;
    let (p0, mut d0) = tokio::join!(
        launcher.worker(Pool::Prefill, "p0", "rand", &[]),
        launcher.worker(Pool::Decode, "d0", "rand", &["--drain-grace-s=1"]),
    );
    let mut router = launcher
        .router(&[SPLIT[0], SPLIT[1], "--drain-ms=500"])
        .await;
    router.wait_workers("rand", (1, 1), SOON).await;
    let body = json!({ "model": "rand", "prompt": [5, 6, 7, 8], "max_tokens": 3900, "n": 16,
        "ignore_eos": true, "stream": true, "logprobs": 20 });
    let (_, request) = demanding(3_900).remove(3);
    let mut events = router.http().stream("/v1/completions", &body).await;
    events.next().await.expect("an event");
    let mut client = router.grpc();
    let mut stream = client.generate(request).await.unwrap().into_inner();
    stream.message().await.unwrap();
    router.process.terminate();
    assert_eq!(last_error(&mut events).await["code"], "draining");
    let error = until_error(&mut stream).await;
    assert_eq!(error.reason, "DRAINING", "{error:?}");
    assert_eq!(router.process.exit_code().await, 0);
    for worker in [&p0, &d0] {
        worker.wait_released(RELEASED_WITHIN).await;
    }

    let router = launcher.router(&SPLIT).await;
    router.wait_workers("rand", (1, 1), SOON).await;
    let mut events = router.http().stream("/v1/completions", &body).await;
    events.next().await.expect("an event");
    let held = d0.hold_busy_engine().await;
    d0.process.terminate();
    d0.process.wait_told("nobody took the rest over", 1).await;
    held.release().await;
    assert_eq!(d0.process.exit_code().await, 0);
    let error = last_error(&mut events).await;
    println!("{error}");
    assert_eq!(error["type"], "server_error");
    p0.wait_released(RELEASED_WITHIN).await;
}

/// Reads to the end, which must be an error.
async fn last_error(events: &mut EventStream) -> Value {
    let mut last = None;
    while let Some(event) = events.next().await {
        last = Some(event);
    }
    match last {
        Some(Event::Json(last)) if last["error"].is_object() => last["error"].clone(),
        last => panic!("no error at the end: {last:?}"),
    }
}

async fn until_error(stream: &mut tonic::Streaming<v1::GenerateEvent>) -> Error {
    loop {
        match stream.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the stream ended well"),
            Err(status) => return from_status(&status),
        }
    }
}
