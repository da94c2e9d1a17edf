//! Workers that are there for their health checks and not for work: stopped, or with a data
//! address that nobody can reach. Requests go on elsewhere, soon, and the logs name the
//! address.
//!
//! Seen to fail: with a router that bears a minute of silence, with one that asks such a decode
//! worker again and again, and with senders that said only that no lane came up.

use std::net::SocketAddr;
use std::time::Duration;

use baton_proto::kv_layout::KvDtype;
use baton_proto::sampling::SamplingParams;
use baton_tests::link::{Link, Pace};
use baton_tests::models;
use baton_tests::oracle::{Case, Oracle};
use baton_tests::pace::{Stopwatch, crowded};
use baton_tests::process::{Launcher, Pool, RouterProcess, Worker, free_port};
use futures::future::join_all;
use tokio::net::{TcpSocket, TcpStream};

use super::probe::probe;
use super::{Known, RELEASED_WITHIN, SPLIT, ask};

const SOON: Duration = Duration::from_secs(20);
/// The handoff timeout of [`SPLIT`] and one second more. Far below a minute of silence.
const ENDS_WITHIN: Duration = crowded(Duration::from_secs(3));
const POOL_TOKENS: u32 = 2048;
const POOL: &str = "--kv-tokens=2048";

/// Ten requests with prompts of this length.
fn ten(oracle: &mut Oracle, length: u32, salt: u32) -> Vec<Known> {
    let one = |salt: u32| {
        let case = Case {
            prompt: (0..length)
                .map(|at| 6 + (at * 7 + salt * 23 + at * salt) % 290)
                .collect(),
            sampling: SamplingParams {
                temperature: 0.0,
                max_tokens: 16,
                ignore_eos: true,
                ..SamplingParams::default()
            },
        };
        let right = oracle.run(&case);
        (case, right)
    };
    (salt..salt + 10).map(one).collect()
}

/// Runs them all at once; the longest time one of them took.
async fn run(router: &RouterProcess, cases: &[Known]) -> Duration {
    let asked = cases.iter().map(|one| async {
        let watch = Stopwatch::start();
        ask(router.grpc(), "rand", one).await.unwrap();
        watch.elapsed()
    });
    let times = join_all(asked).await;
    times.into_iter().max().expect("there are some")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_worker_that_stops_over_its_prompts_is_left() {
    let model = models::fixture("rand");
    let mut oracle = Oracle::new(&model, KvDtype::F32);
    let launcher = Launcher::start().await;
    let (p0, p1, d0, d1) = tokio::join!(
        launcher.worker(Pool::Prefill, "p0", "rand", &[POOL]),
        launcher.worker(Pool::Prefill, "p1", "rand", &[POOL]),
        launcher.worker(Pool::Decode, "d0", "rand", &[POOL]),
        launcher.worker(Pool::Decode, "d1", "rand", &[POOL]),
    );
    let router = launcher.router(&SPLIT).await;
    router.wait_workers("rand", (2, 2), SOON).await;
    let usual = run(&router, &ten(&mut oracle, 700, 0)).await;
    let cases = ten(&mut oracle, 700, 10);
    p1.wait_released(SOON).await;
    let before = p1.load().await.handoffs_total;
    // It gets its share of them, does not come to an end with any, and then stops.
    let held = p0.hold_engine().await;
    let (took, ()) = tokio::join!(run(&router, &cases), async {
        let watch = Stopwatch::start();
        while p1.load().await.handoffs_total == before {
            assert!(watch.elapsed() < SOON, "the other one has none");
        }
        p0.process.freeze();
    });
    println!("usually {usual:?}, now {took:?}");
    let again = "baton_retries_total{when=\"before_first_token\",result=\"ok\"}";
    assert!(router.metric(again).await > 0.0, "it stopped over nothing");
    assert!(took < ENDS_WITHIN, "{took:?}");
    router.wait_workers("rand", (1, 2), SOON).await;
    run(&router, &ten(&mut oracle, 100, 20)).await;
    // What it does now is of the past.
    p0.process.thaw();
    held.release().await;
    router.wait_workers("rand", (2, 2), SOON).await;
    run(&router, &ten(&mut oracle, 100, 30)).await;
    probe(&router, &model, &[&p0, &p1, &d0, &d1], POOL_TOKENS).await;
}

/// A port of this host whose backlog is full: whoever connects is not answered. Lasts as long
/// as what is returned with it.
async fn black_hole() -> (SocketAddr, impl Sized) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    let mut taken = Vec::new();
    for _ in 0..16 {
        let connecting = TcpStream::connect(address);
        match tokio::time::timeout(Duration::from_millis(200), connecting).await {
            Ok(stream) => taken.push(stream.unwrap()),
            Err(_) => return (address, (listener, taken)),
        }
    }
    panic!("the backlog takes everything");
}

async fn unreachable(launcher: &Launcher, id: &str, address: SocketAddr) -> Worker {
    let advertise = format!("--data-advertise={address}");
    let flags = [POOL, "--kv-transport=tcp", &advertise];
    launcher.worker(Pool::Decode, id, "rand", &flags).await
}

/// A prefill worker finds out within a second that it cannot hand over. Its request is
/// computed where it has its blocks, later ones go to the decode worker that can be reached,
/// and the logs say which address it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_data_address_that_nobody_reaches_is_named_and_left() {
    let model = models::fixture("rand");
    let mut oracle = Oracle::new(&model, KvDtype::F32);
    let (silent, _held) = black_hole().await;
    let refusing = SocketAddr::from(([127, 0, 0, 1], free_port()));
    for (salt, address) in [(100, refusing), (200, silent)] {
        let launcher = Launcher::start().await;
        let flags = [POOL, "--kv-transport=tcp"];
        let (p0, p1, bad, mut good) = tokio::join!(
            launcher.worker(Pool::Prefill, "p0", "rand", &flags),
            launcher.worker(Pool::Prefill, "p1", "rand", &flags),
            unreachable(&launcher, "d0", address),
            launcher.worker(Pool::Decode, "d1", "rand", &flags),
        );
        let router = launcher.router(&SPLIT).await;
        router.wait_workers("rand", (2, 2), SOON).await;
        // Until both prefill workers have found out.
        let mut batch = 0;
        while router.metric("baton_lanes_cut").await < 2.0 {
            assert!(batch < 5, "it is not left");
            let cases = ten(&mut oracle, 100, salt + 10 * batch);
            let took = run(&router, &cases).await;
            println!("ten at once {took:?}");
            assert!(took < ENDS_WITHIN, "{took:?}");
            batch += 1;
        }
        // Whoever asks it ends up there with the whole prompt.
        let asked = bad.load().await.local_prefills_total;
        assert!(asked > 0);

        let took = run(&router, &ten(&mut oracle, 100, salt + 50)).await;
        println!("ten more {took:?}");
        assert_eq!(router.metric("baton_lanes_cut").await, 2.0);
        let now = bad.load().await.local_prefills_total;
        assert_eq!(asked, now, "it is still asked");
        assert_eq!(bad.load().await.handoffs_total, 0);
        let logs = [p0.process.log(), p1.process.log(), router.process.log()].concat();
        for what in [
            "a data lane cannot be opened",
            "prefill ended early",
            "the decode worker cannot be reached",
        ] {
            let line = logs.lines().find(|line| line.contains(what));
            let line = line.unwrap_or_else(|| panic!("`{what}` is not in {logs}"));
            assert!(line.contains(&address.to_string()), "{line}");
        }
        for worker in [&p0, &p1, &bad, &good] {
            worker.wait_released(RELEASED_WITHIN).await;
        }

        // Nobody else is there any more.
        good.process.kill().await;
        router.wait_workers("rand", (2, 1), SOON).await;
        let took = run(&router, &ten(&mut oracle, 100, salt + 90)[..1]).await;
        println!("alone {took:?}");
        assert!(took < ENDS_WITHIN, "{took:?}");
        for worker in [&p0, &p1, &bad] {
            worker.wait_released(RELEASED_WITHIN).await;
        }
    }
}

/// A data port that swallows what it is sent costs one round of requests. It is tried without
/// requests then, and gets KV again soon after it can be reached.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_data_port_is_used_again_once_it_is_reached() {
    let model = models::fixture("rand");
    let mut oracle = Oracle::new(&model, KvDtype::F32);
    let port = free_port();
    let link = Link::to(([127, 0, 0, 1], port).into()).await;
    let listen = format!("--data-listen=127.0.0.1:{port}");
    let advertise = format!("--data-advertise={}", link.address());
    let tcp = "--kv-transport=tcp";
    let launcher = Launcher::start().await;
    let flags = [POOL, tcp];
    let of_d0 = [POOL, tcp, &listen, &advertise];
    let (p0, d0, d1) = tokio::join!(
        launcher.worker(Pool::Prefill, "p0", "rand", &flags),
        launcher.worker(Pool::Decode, "d0", "rand", &of_d0),
        launcher.worker(Pool::Decode, "d1", "rand", &flags),
    );
    let router = launcher.router(&SPLIT).await;
    router.wait_workers("rand", (1, 2), SOON).await;
    link.set(Pace::Held);
    run(&router, &ten(&mut oracle, 100, 300)).await;
    router.wait_metric("baton_lanes_cut", 1.0).await;
    let own = d0.load().await.local_prefills_total;
    assert!(own > 0, "it was not asked");
    // Tried more than once meanwhile, and not by requests.
    let (watch, before) = (Stopwatch::start(), link.connections());
    while link.connections() < before + 2 {
        assert!(watch.elapsed() < SOON, "nobody tries it");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    run(&router, &ten(&mut oracle, 100, 310)).await;
    let now = d0.load().await;
    assert_eq!((now.local_prefills_total, now.handoffs_total), (own, 0));

    link.set(Pace::Free);
    let watch = Stopwatch::start();
    while router.metric("baton_lanes_cut").await > 0.0 {
        assert!(watch.elapsed() < SOON, "it is not used again");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    run(&router, &ten(&mut oracle, 100, 320)).await;
    let now = d0.load().await;
    assert_eq!(now.local_prefills_total, own);
    assert!(now.handoffs_total > 0, "nothing is handed over to it");
    for worker in [&p0, &d0, &d1] {
        worker.wait_released(RELEASED_WITHIN).await;
    }
}
