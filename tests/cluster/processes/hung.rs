//! A worker whose process answers everything while its engine does not move: its thread is
//! stopped by a tracer, as a device that hangs would stop it.

use std::time::Duration;

use baton_tests::pace::Stopwatch;
use baton_tests::process::{Launcher, Pool, Worker};
use baton_tests::transcript::demanding;

use super::{Midway, RELEASED_WITHIN, SPLIT, read_on, whole};

const SOON: Duration = Duration::from_secs(20);

/// The status of its liveness and of its readiness.
async fn probes(worker: &Worker) -> [u16; 2] {
    let admin = worker.admin();
    [
        admin.get("/livez").await.status,
        admin.get("/readyz").await.status,
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_leave_an_engine_that_does_not_move() {
    let launcher = Launcher::start().await;
    let prefill = launcher.worker(Pool::Prefill, "p0", "rand", &[]).await;
    let mut decode = [
        launcher.worker(Pool::Decode, "d0", "rand", &[]).await,
        launcher.worker(Pool::Decode, "d1", "rand", &[]).await,
    ];
    let router = launcher.router(&SPLIT).await;
    router.wait_workers("rand", (1, 2), SOON).await;
    let (_, request) = demanding(3_000).remove(0);
    let right = whole(&router, &request, 1).await;

    for worker in &decode {
        assert_eq!(probes(worker).await, [200, 200]);
    }
    let midway = Midway::start(&router, &request, 20, &decode).await;
    let (mut seen, mut stream, busy) = (midway.seen, midway.stream, midway.at);
    read_on(&mut stream, &mut seen).await;
    seen.assert_same(&right, "over an engine that does not move");
    let moved = "baton_migrations_total{result=\"ok\"}";
    router.wait_metric(moved, 1.0).await;
    // It says so itself: to whoever would restart it, and to the router, which blames
    // nobody else.
    assert_eq!(probes(&decode[busy]).await, [503, 503]);
    let lost = |role: &str| format!("baton_pool_members{{worker_role=\"{role}\",state=\"lost\"}}");
    assert_eq!(router.metric(&lost("decode")).await, 1.0);
    assert_eq!(router.metric(&lost("prefill")).await, 0.0);
    assert!(router.process.log().contains("its engine does not move"));

    midway.held.release().await;
    router.wait_workers("rand", (1, 2), SOON).await;
    assert_eq!(probes(&decode[busy]).await, [200, 200]);
    for worker in [&prefill, &decode[0], &decode[1]] {
        worker.wait_released(RELEASED_WITHIN).await;
    }

    // One that is told to stop ends all the same, and says that it did not end well.
    let _held = decode[busy].hold_engine().await;
    decode[busy].process.terminate();
    let waited = Stopwatch::start();
    assert_ne!(decode[busy].process.exit_code().await, 0);
    assert!(waited.elapsed() < SOON);
    let log = decode[busy].process.log();
    assert!(log.contains("it does not move"), "{log}");
}
