//! A pool is empty, for a while or for longer.

use std::time::Duration;

use baton_proto::ErrorKind;
use baton_tests::models;
use baton_tests::process::{Launcher, Pool};
use tokio::task::JoinSet;

use super::{SPLIT, ask, known};

const SOON: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_wait_for_a_decode_worker_to_be_there() {
    let cases = known(&models::fixture("rand"), 0x9001, 6, 16);
    let launcher = Launcher::start().await;
    let prefill = launcher.worker(Pool::Prefill, "p0", "rand", &[]).await;
    let mut leaves = launcher.worker(Pool::Decode, "d0", "rand", &[]).await;
    let patient = [SPLIT[0], SPLIT[1], "--pool-timeout-ms=20000"];
    let patient = launcher.router(&patient).await;
    let hasty = [SPLIT[0], SPLIT[1], "--pool-timeout-ms=0"];
    let hasty = launcher.router(&hasty).await;
    for router in [&patient, &hasty] {
        router.wait_workers("rand", (1, 1), SOON).await;
    }
    leaves.process.terminate();
    assert_eq!(leaves.process.exit_code().await, 0);
    for router in [&patient, &hasty] {
        while router.http().get("/readyz").await.status != 503 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    let refused = ask(hasty.grpc(), "rand", &cases[0]).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Unavailable);
    assert_eq!(refused.reason, "NO_DECODE_WORKER");
    assert!(refused.retry_after.is_some());

    let mut waiting = JoinSet::new();
    for index in 0..cases.len() {
        let (door, cases) = (patient.grpc(), std::sync::Arc::clone(&cases));
        waiting.spawn(async move { ask(door, "rand", &cases[index]).await });
    }
    // All of them wait: none is refused, and none could have been answered.
    while patient.metric("baton_requests_in_flight").await < 6.0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(waiting.try_join_next().is_none());
    let decode = launcher.worker(Pool::Decode, "d1", "rand", &[]).await;
    while let Some(answered) = waiting.join_next().await {
        answered.unwrap().unwrap();
    }
    for router in [&patient, &hasty] {
        router.wait_workers("rand", (1, 1), SOON).await;
        ask(router.grpc(), "rand", &cases[0]).await.unwrap();
    }
    drop((prefill, decode));
}
