//! A request is two halves, a reservation at a decode worker and a prefill. When one half
//! fails, the other one is let go at once, and whoever comes next is served as before.
//!
//! No timer is short enough to help: handoffs may take a minute here. Seen to fail: with a
//! router that does not place a request anew when its prefill failed, and with one that gives
//! every request one try.

use std::time::Duration;

use baton_proto::kv_layout::KvDtype;
use baton_tests::client::Collector;
use baton_tests::front::PrefillFront;
use baton_tests::link::Link;
use baton_tests::oracle::Oracle;
use baton_tests::process::{Launcher, Pool, RouterProcess, free_port};
use baton_tests::{client, models};
use futures::future::join_all;

use super::probe::probe;
use super::{Known, PATIENT, ask, greedy};

const SOON: Duration = Duration::from_secs(20);
const POOL_TOKENS: u32 = 1024;
const POOL: &str = "--kv-tokens=1024";
/// A prompt that begins with it is refused by the prefill workers.
const REFUSED: u32 = 7;

fn known(oracle: &mut Oracle, first: u32, salt: u32, tokens: u32) -> Known {
    let rest = (0..39).map(|at| 8 + (at * 13 + salt * 29 + at * salt) % 290);
    greedy(oracle, std::iter::once(first).chain(rest).collect(), tokens)
}

/// Runs them all at once. They are answered within a third of what the shortest timer takes.
async fn run(router: &RouterProcess, cases: &[Known]) {
    let asked = cases.iter().map(|one| ask(router.grpc(), "rand", one));
    let answers = tokio::time::timeout(SOON, join_all(asked)).await;
    for answer in answers.expect("nobody waits for what has failed") {
        answer.expect("an answer");
    }
}

/// Both prefill workers fail these prompts. The decode worker that had reserved for them
/// computes them itself: they are answered, and nobody behind them waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_that_prefill_workers_fail_hold_nobody_up() {
    let model = models::fixture("rand");
    let mut oracle = Oracle::new(&model, KvDtype::F32);
    let launcher = Launcher::start().await;
    let front = async |id: &str| {
        let port = free_port();
        let after = Duration::from_millis(100);
        let front = PrefillFront::to(([127, 0, 0, 1], port).into(), REFUSED, after).await;
        let listen = format!("--listen=127.0.0.1:{port}");
        let advertise = format!("--advertise={}", front.address());
        let flags = [POOL, &listen, &advertise];
        let worker = launcher.worker(Pool::Prefill, id, "rand", &flags).await;
        (front, worker)
    };
    let few = [POOL, "--sequences-max=4"];
    let ((_front0, p0), (_front1, p1), d0, d1) = tokio::join!(
        front("p0"),
        front("p1"),
        launcher.worker(Pool::Decode, "d0", "rand", &few),
        launcher.worker(Pool::Decode, "d1", "rand", &few),
    );
    let router = launcher.router(&PATIENT).await;
    router.wait_workers("rand", (2, 2), SOON).await;
    let mut cases = |first: u32, salt: u32, tokens: u32| -> Vec<Known> {
        (0..8)
            .map(|one| known(&mut oracle, first, salt + one, tokens))
            .collect()
    };
    let healthy = [cases(8, 0, 100), cases(8, 10, 100)];
    run(&router, &healthy[0]).await;
    let local = async || {
        let loads = [d0.load().await, d1.load().await];
        loads
            .map(|load| load.local_prefills_total)
            .iter()
            .sum::<u64>()
    };
    assert_eq!(local().await, 0);
    let handed = |load: baton_proto::v1::Load| load.handoffs_total;
    let before = handed(d0.load().await) + handed(d1.load().await);

    let bad = cases(REFUSED, 20, 4);
    tokio::join!(run(&router, &bad), async {
        tokio::time::sleep(Duration::from_millis(10)).await;
        run(&router, &healthy[1]).await;
    });
    // None of the bad ones was handed over, and each of the others.
    let after = handed(d0.load().await) + handed(d1.load().await);
    assert_eq!(after - before, 8);
    assert_eq!(local().await, bad.len() as u64);
    for decode in [&d0, &d1] {
        decode.wait_released(Duration::from_secs(1)).await;
    }
    probe(&router, &model, &[&p0, &p1, &d0, &d1], POOL_TOKENS).await;
}

/// A decode worker refuses every connection from now on, while requests run there: those go
/// on at the other one, and those that come are served by it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decode_worker_that_refuses_connections_costs_no_request() {
    let model = models::fixture("rand");
    let mut oracle = Oracle::new(&model, KvDtype::F32);
    let launcher = Launcher::start().await;
    let port = free_port();
    let link = Link::to(([127, 0, 0, 1], port).into()).await;
    let listen = format!("--listen=127.0.0.1:{port}");
    let advertise = format!("--advertise={}", link.address());
    let behind = [POOL, &listen, &advertise];
    let (p, d0, d1) = tokio::join!(
        launcher.worker(Pool::Prefill, "p", "rand", &[POOL]),
        launcher.worker(Pool::Decode, "d0", "rand", &behind),
        launcher.worker(Pool::Decode, "d1", "rand", &[POOL]),
    );
    let router = launcher.router(&PATIENT).await;
    router.wait_workers("rand", (1, 2), SOON).await;
    let cases: Vec<Known> = (0..8).map(|salt| known(&mut oracle, 8, salt, 60)).collect();
    run(&router, &cases).await;
    assert!(d0.load().await.handoffs_total > 0);

    // Some are between their two halves when it happens.
    let mut running = Vec::new();
    for (case, right) in cases.iter().take(4) {
        let request = baton_proto::v1::GenerateRequest {
            model: "rand".to_owned(),
            use_cache: Some(false),
            ..client::request(case)
        };
        let stream = router.grpc().generate(request).await.unwrap();
        running.push((stream.into_inner(), Collector::new(1), right));
    }
    drop(link);
    run(&router, &cases).await;
    for (mut stream, mut collector, right) in running {
        let rest = async {
            while let Some(event) = stream.message().await.unwrap() {
                collector.take(event);
            }
        };
        let rest = tokio::time::timeout(SOON, rest).await;
        rest.expect("it goes on at the other one");
        assert_eq!(collector.finish().choices[0].tokens, right[0].tokens);
    }
    p.wait_released(Duration::from_secs(1)).await;
    d0.wait_released(Duration::from_secs(1)).await;
    router.wait_workers("rand", (1, 1), SOON).await;
    probe(&router, &model, &[&p, &d1], POOL_TOKENS).await;
}
