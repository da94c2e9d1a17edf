//! A client's deadline passes in each stage of a request: it hears so in time, and every
//! worker lets go.
//!
//! Seen to fail: with a router that keeps a request's deadline to its front door.

use std::time::{Duration, Instant};

use baton_proto::sampling::SamplingParams;
use baton_proto::v1;
use baton_tests::link::{Link, Pace};
use baton_tests::oracle::Case;
use baton_tests::pace::Stopwatch;
use baton_tests::process::{Launcher, Pool, RouterProcess, Worker, free_port};
use baton_tests::{client, models};
use tonic::{Code, Request, Status};

use super::PATIENT;
use super::probe::probe;
use crate::grpc_api::ended_at;

const SOON: Duration = Duration::from_secs(20);
const POOL_TOKENS: u32 = 2048;
/// 50 ms are promised on an idle machine of four cores; every other timer here is a minute.
const LATE: Duration = Duration::from_secs(2);
/// Deadlines that are tried until one passes in the stage that is looked for.
const TRIES: u32 = 16;
/// A token's KV takes half a second; pings and their answers pass in between.
const CRAWL: Pace = Pace::Bytes(1_000);

/// The stages of a request in their order, as an error names them.
const STAGES: [&str; 7] = [
    "reserving blocks at a decode worker",
    "waiting in a decode worker's queue",
    "asking a prefill worker",
    "waiting in a prefill worker's queue",
    "computing the prompt",
    "handing over to the decode worker",
    "decoding",
];
const QUEUED: usize = 1;
const COMPUTING: usize = 4;
const HANDING_OVER: usize = 5;
const DECODING: usize = 6;

fn request(prompt: u32, salt: u32) -> v1::GenerateRequest {
    let case = Case {
        prompt: (0..prompt)
            .map(|at| 6 + (at * 13 + salt * 31 + at * salt) % 290)
            .collect(),
        sampling: SamplingParams {
            temperature: 0.0,
            max_tokens: 2000 - prompt,
            ignore_eos: true,
            ..SamplingParams::default()
        },
    };
    v1::GenerateRequest {
        model: "rand".to_owned(),
        ..client::request(&case)
    }
}

/// How it ended: by its deadline, and in time. `None` if it was answered before.
async fn late(
    router: &RouterProcess,
    request: v1::GenerateRequest,
    timeout: Duration,
) -> Option<Status> {
    let mut request = Request::new(request);
    let value = format!("{}u", timeout.as_micros());
    let metadata = request.metadata_mut();
    metadata.insert("grpc-timeout", value.parse().unwrap());
    let (watch, started) = (Stopwatch::start(), Instant::now());
    let status = ended_at(router.grpc, request).await?;
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    assert!(started.elapsed() >= timeout, "{status}");
    let took = watch.elapsed();
    assert!(took < timeout + LATE, "{took:?} of {timeout:?}: {status}");
    Some(status)
}

/// Nothing is held, and nothing is computed.
async fn at_rest(workers: [&Worker; 2]) {
    for worker in workers {
        worker.wait_released(Duration::from_secs(1)).await;
        worker.settled("baton_batch_tokens_sum").await;
    }
}

/// Requests, their deadlines longer or shorter, until one passes in this stage.
struct Search<'a> {
    router: &'a RouterProcess,
    salt: u32,
}

impl Search<'_> {
    async fn passes_in(&mut self, stage: usize, prompt: u32, first: Duration) {
        let mut timeout = first;
        let mut seen = Vec::new();
        for _ in 0..TRIES {
            self.salt += 1;
            let status = late(self.router, request(prompt, self.salt), timeout).await;
            let at = status.as_ref().map_or(STAGES.len(), |status| {
                let named = |stage: &&str| status.message().ends_with(&format!("while {stage}"));
                // Before it was placed anywhere.
                STAGES.iter().position(named).unwrap_or(0)
            });
            if at == stage {
                return;
            }
            seen.push((timeout, at));
            if at < stage {
                timeout *= 2;
            } else {
                timeout = timeout * 2 / 3;
            }
        }
        panic!("no deadline passed while {}: {seen:?}", STAGES[stage]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadline_passes_in_every_stage() {
    let launcher = Launcher::start().await;
    let port = free_port();
    let data = Link::to(([127, 0, 0, 1], port).into()).await;
    let pool = format!("--kv-tokens={POOL_TOKENS}");
    let flags = [
        pool.clone(),
        "--kv-transport=tcp".to_owned(),
        "--sequences-max=1".to_owned(),
        format!("--data-listen=127.0.0.1:{port}"),
        format!("--data-advertise={}", data.address()),
    ];
    let of_decode = flags.each_ref().map(String::as_str);
    let (prefill, decode) = tokio::join!(
        launcher.worker(Pool::Prefill, "p", "rand", &of_decode[..2]),
        launcher.worker(Pool::Decode, "d", "rand", &of_decode),
    );
    let both = [&prefill, &decode];
    let router = launcher.router(&PATIENT).await;
    router.wait_workers("rand", (1, 1), SOON).await;

    let mut search = Search {
        router: &router,
        salt: 0,
    };
    let half_a_second = Duration::from_millis(500);
    search.passes_in(DECODING, 40, half_a_second).await;
    at_rest(both).await;
    let short = Duration::from_millis(100);
    search.passes_in(COMPUTING, 1500, short).await;
    at_rest(both).await;
    data.set(CRAWL);
    search.passes_in(HANDING_OVER, 40, half_a_second).await;
    at_rest(both).await;

    // In the queue, behind one whose prompt is not computed before its client leaves.
    data.set(Pace::Free);
    let held = prefill.hold_engine().await;
    let ahead = router.grpc().generate(request(40, 100)).await;
    let mut ahead = ahead.unwrap().into_inner();
    ahead.message().await.unwrap().expect("accepted");
    search.passes_in(QUEUED, 40, half_a_second).await;
    drop((ahead, held));
    at_rest(both).await;

    // On arrival: nobody is asked.
    let asked = async || {
        let of_prefill = prefill.metric("vllm:prompt_tokens_total").await;
        let of_decode = decode.metric("vllm:prompt_tokens_total").await;
        let of_router = router.metric("baton_prompt_tokens_total").await;
        [of_prefill, of_decode, of_router]
    };
    let before = asked().await;
    let status = late(&router, request(40, 101), Duration::ZERO).await;
    assert!(status.is_some());
    assert_eq!(asked().await, before);
    probe(&router, &models::fixture("rand"), &both, POOL_TOKENS).await;
}
