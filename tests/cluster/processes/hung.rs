//! A worker whose process answers everything while its engine does not move: its thread is
//! stopped by a tracer, as a device that hangs would stop it.

use std::time::Duration;

use baton_tests::pace::Stopwatch;
use baton_tests::process::{Launcher, Pool, Worker};
use baton_tests::transcript::{Transcript, demanding};

use super::{SPLIT, whole};

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

    let mut client = router.grpc();
    let mut seen = Transcript::new(1);
    let mut stream = client.generate(request).await.unwrap().into_inner();
    while seen.tokens() < 20 {
        seen.take(stream.message().await.unwrap().unwrap());
    }
    let mut busy = 0;
    for (index, worker) in decode.iter().enumerate() {
        if worker.load().await.requests_running > 0 {
            busy = index;
        }
    }
    assert_eq!(probes(&decode[busy]).await, [200, 200]);
    let held = decode[busy].hold_engine().await;
    while let Some(event) = stream.message().await.unwrap() {
        seen.take(event);
    }
    seen.assert_same(&right, "over an engine that does not move");
    let moved = "baton_migrations_total{result=\"ok\"}";
    assert_eq!(router.metric(moved).await, 1.0);
    // It says so itself: to whoever would restart it, and to the router, which blames
    // nobody else.
    assert_eq!(probes(&decode[busy]).await, [503, 503]);
    let lost = |role: &str| format!("baton_pool_members{{worker_role=\"{role}\",state=\"lost\"}}");
    assert_eq!(router.metric(&lost("decode")).await, 1.0);
    assert_eq!(router.metric(&lost("prefill")).await, 0.0);
    assert!(router.process.log().contains("its engine does not move"));

    drop(held);
    router.wait_workers("rand", (1, 2), SOON).await;
    assert_eq!(probes(&decode[busy]).await, [200, 200]);
    for worker in [&prefill, &decode[0], &decode[1]] {
        worker.wait_released(Duration::from_secs(3)).await;
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
