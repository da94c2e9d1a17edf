//! SIGSTOP: a worker whose sockets are open and that does nothing. Its pool alone is
//! blamed, its requests move, and it is back when it goes on.

use std::time::Duration;

use baton_proto::v1;
use baton_tests::models;
use baton_tests::pace::Stopwatch;
use baton_tests::process::{Launcher, Pool, RouterProcess, Worker};
use baton_tests::transcript::demanding;
use futures::future::join_all;

use super::{Midway, RELEASED_WITHIN, SPLIT, Traffic, ask, known, read_on, whole};

const SOON: Duration = Duration::from_secs(20);
/// No lease ends while its worker stands still.
const LEASE: &str = "--etcd-ttl-s=60";

async fn cluster(prefill: u32, decode: u32) -> (Launcher, Vec<Worker>, RouterProcess) {
    let launcher = Launcher::start().await;
    let names: Vec<(Pool, String)> = (0..prefill)
        .map(|index| (Pool::Prefill, format!("p{index}")))
        .chain((0..decode).map(|index| (Pool::Decode, format!("d{index}"))))
        .collect();
    let workers = names
        .iter()
        .map(|(pool, name)| launcher.worker(*pool, name, "rand", &[LEASE]));
    let workers = join_all(workers).await;
    let router = launcher.router(&SPLIT).await;
    router.wait_workers("rand", (prefill, decode), SOON).await;
    (launcher, workers, router)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_decode_workers_streams_move_and_it_comes_back() {
    let (_launcher, workers, router) = cluster(1, 2).await;
    let decode = &workers[1..];
    let (_, request) = demanding(3_000).remove(0);
    let right = whole(&router, &request, 1).await;
    let Midway {
        mut seen,
        mut stream,
        at,
        held,
    } = Midway::start(&router, &request, 20, decode).await;
    let busy = &decode[at];
    busy.process.freeze();
    read_on(&mut stream, &mut seen).await;
    seen.assert_same(&right, "over a frozen decode worker");
    let moved = "baton_migrations_total{result=\"ok\"}";
    router.wait_metric(moved, 1.0).await;
    // The decode pool is blamed, and it alone: new requests go through the prefill pool.
    router.wait_workers("rand", (1, 1), SOON).await;
    let lost = |role: &str| format!("baton_pool_members{{worker_role=\"{role}\",state=\"lost\"}}");
    router.wait_metric(&lost("decode"), 1.0).await;
    assert_eq!(router.metric(&lost("prefill")).await, 0.0);
    let cases = known(&models::fixture("rand"), 0xf0, 6, 16);
    for one in cases.iter() {
        ask(router.grpc(), "rand", one).await.unwrap();
    }
    assert_eq!(workers[0].load().await.local_prefills_total, 0);
    busy.process.thaw();
    held.release().await;
    router.wait_workers("rand", (1, 2), SOON).await;
    for worker in &workers {
        worker.wait_released(RELEASED_WITHIN).await;
    }
    for one in cases.iter() {
        ask(router.grpc(), "rand", one).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_prefill_worker_costs_time_and_no_request() {
    let (_launcher, workers, router) = cluster(2, 1).await;
    let cases = known(&models::fixture("rand"), 0xf1, 24, 24);
    let traffic = Traffic::start(&router.grpc(), "rand", &cases, 4);
    traffic.wait_answered(4).await;
    workers[0].process.freeze();
    traffic.wait_answered(12).await;
    router.wait_workers("rand", (1, 1), SOON).await;
    let lost = |role: &str| format!("baton_pool_members{{worker_role=\"{role}\",state=\"lost\"}}");
    router.wait_metric(&lost("prefill"), 1.0).await;
    assert_eq!(router.metric(&lost("decode")).await, 0.0);
    // Nothing was taken from the decode worker.
    for result in ["ok", "failed"] {
        let moved = format!("baton_migrations_total{{result=\"{result}\"}}");
        assert_eq!(router.metric(&moved).await, 0.0);
    }
    workers[0].process.thaw();
    router.wait_workers("rand", (2, 1), SOON).await;
    let before = workers[0].load().await.handoffs_total;
    let waited = Stopwatch::start();
    while workers[0].load().await.handoffs_total == before {
        assert!(waited.elapsed() < SOON, "it gets no work");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let failures = traffic.stop().await;
    assert!(failures.is_empty(), "{failures:?}");
    for worker in &workers {
        worker.wait_released(RELEASED_WITHIN).await;
    }
}

/// With nobody to take its work over, a short silence is waited out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_only_worker_may_stand_still_for_a_moment() {
    let (_launcher, workers, router) = cluster(0, 1).await;
    let (_, request) = demanding(3_000).remove(0);
    let mut midway = Midway::start(&router, &request, 20, &workers).await;
    workers[0].process.freeze();
    // Out of rotation, and not given up.
    let waited = Stopwatch::start();
    loop {
        let models = router.grpc().list_models(v1::ListModelsRequest {}).await;
        if models.unwrap().into_inner().models.is_empty() {
            break;
        }
        assert!(waited.elapsed() < SOON, "its silence is not heard");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    workers[0].process.thaw();
    midway.held.release().await;
    read_on(&mut midway.stream, &mut midway.seen).await;
    assert_eq!(midway.seen.tokens(), 3_000);
    let moved = "baton_migrations_total{result=\"ok\"}";
    assert_eq!(router.metric(moved).await, 0.0);
}
