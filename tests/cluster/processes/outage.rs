//! etcd is gone: routers serve on what they know, and start on what they knew.

use std::time::Duration;

use baton_tests::models;
use baton_tests::pace::Stopwatch;
use baton_tests::process::{Launcher, Pool, RouterProcess, wait_listed};
use futures::future::join_all;

use super::{RELEASED_WITHIN, SPLIT, Traffic, ask, known};

const SOON: Duration = Duration::from_secs(20);

async fn wait_stale(router: &RouterProcess, stale: f64) {
    let waited = Stopwatch::start();
    while router.metric("baton_membership_stale").await != stale {
        assert!(waited.elapsed() < SOON, "stale is not {stale}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until its readiness is this, with this in the reason.
async fn wait_readiness(router: &RouterProcess, status: u16, part: &str) {
    let waited = Stopwatch::start();
    loop {
        let reply = router.http().get("/readyz").await;
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        if reply.status == status && text.contains(part) {
            return;
        }
        assert!(waited.elapsed() < SOON, "{} {text}", reply.status);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routers_serve_and_start_while_etcd_is_gone() {
    let cases = known(&models::fixture("rand"), 0xe7cd, 16, 20);
    let mut launcher = Launcher::start().await;
    let workers = join_all([
        launcher.worker(Pool::Prefill, "p0", "rand", &["--etcd-ttl-s=2"]),
        launcher.worker(Pool::Decode, "d0", "rand", &["--etcd-ttl-s=2"]),
    ])
    .await;
    let state = launcher.folder().join("state");
    let keep = format!("--state-dir={}", state.display());
    let mut first = launcher.router(&[SPLIT[0], SPLIT[1], &keep]).await;
    first.wait_workers("rand", (1, 1), SOON).await;
    wait_readiness(&first, 200, "ready\n").await;
    wait_stale(&first, 0.0).await;

    // The outage outlives every lease.
    let traffic = Traffic::start(&first.grpc(), "rand", &cases, 3);
    traffic.wait_answered(3).await;
    launcher.etcd.kill().await;
    wait_stale(&first, 1.0).await;
    wait_readiness(&first, 200, "last known").await;
    traffic.wait_answered(12).await;
    let failures = traffic.stop().await;
    assert!(failures.is_empty(), "{failures:?}");

    // A router that starts now: from the file, from seeds, and from neither.
    first.process.terminate();
    assert_eq!(first.process.exit_code().await, 0);
    let from_file = launcher.router(&[SPLIT[0], SPLIT[1], &keep]).await;
    let seeds = [
        format!("--worker=prefill={}", workers[0].control),
        format!("--worker=decode={}", workers[1].control),
    ];
    let from_seeds = launcher
        .router(&[SPLIT[0], SPLIT[1], &seeds[0], &seeds[1]])
        .await;
    let damaged = launcher.folder().join("damaged");
    std::fs::create_dir(&damaged).unwrap();
    let whole = std::fs::read(state.join("workers.json")).unwrap();
    std::fs::write(damaged.join("workers.json"), &whole[..whole.len() / 2]).unwrap();
    let damaged = format!("--state-dir={}", damaged.display());
    let from_nothing = launcher.router(&[SPLIT[0], SPLIT[1], &damaged]).await;
    for router in [&from_file, &from_seeds] {
        router.wait_workers("rand", (1, 1), SOON).await;
        wait_stale(router, 1.0).await;
        wait_readiness(router, 200, "last known").await;
        for one in cases.iter().take(5) {
            ask(router.grpc(), "rand", one).await.unwrap();
        }
    }
    wait_readiness(&from_nothing, 503, "no worker").await;
    let damaged = "ignore the last view";
    from_nothing.process.wait_told(damaged, 1).await;

    // etcd is back; nobody loses a request over it, and everybody is listed again.
    let traffic = Traffic::start(&from_file.grpc(), "rand", &cases, 3);
    traffic.wait_answered(3).await;
    launcher.restart_etcd();
    let view = launcher.etcd.follow();
    wait_listed(&view, &["d0", "p0"], SOON).await;
    for router in [&from_file, &from_seeds, &from_nothing] {
        wait_stale(router, 0.0).await;
        router.wait_workers("rand", (1, 1), SOON).await;
    }
    traffic.wait_answered(12).await;
    let failures = traffic.stop().await;
    assert!(failures.is_empty(), "{failures:?}");
    for worker in &workers {
        worker.wait_released(RELEASED_WITHIN).await;
        assert!(worker.load().await.handoffs_total > 0);
    }
}
