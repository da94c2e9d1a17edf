//! A pool is empty, for a while or for longer.

use std::time::Duration;

use baton_proto::ErrorKind;
use baton_tests::client::{self, Collector};
use baton_tests::models;
use baton_tests::process::{Launcher, Pool};
use tokio::task::JoinSet;

use super::{SPLIT, ask, known};

const SOON: Duration = Duration::from_secs(20);

/// Waits for what stays once it has come.
async fn until(what: &str, has_come: impl AsyncFn() -> bool) {
    let waiting = async {
        while !has_come().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let waited = tokio::time::timeout(SOON, waiting).await;
    waited.unwrap_or_else(|_| panic!("not within {SOON:?}: {what}"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_wait_for_a_decode_worker_to_be_there() {
    let cases = known(&models::fixture("rand"), 0x9001, 6, 16);
    let launcher = Launcher::start().await;
    let prefill = launcher.worker(Pool::Prefill, "p0", "rand", &[]).await;
    let mut leaves = launcher.worker(Pool::Decode, "d0", "rand", &[]).await;
    let patient = launcher.router(&SPLIT).await;
    let hasty = [SPLIT[0], SPLIT[1], "--pool-timeout-ms=0"];
    let hasty = launcher.router(&hasty).await;
    let short = [SPLIT[0], SPLIT[1], "--request-timeout-ms=700"];
    let short = launcher.router(&short).await;
    for router in [&patient, &hasty, &short] {
        router.wait_workers("rand", (1, 1), SOON).await;
    }
    leaves.process.terminate();
    assert_eq!(leaves.process.exit_code().await, 0);
    for router in [&patient, &hasty, &short] {
        let known = async || router.http().get("/readyz").await.status == 503;
        until("a router knows that nobody decodes", known).await;
    }
    let refused = ask(hasty.grpc(), "rand", &cases[0]).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Unavailable);
    assert_eq!(refused.reason, "NO_DECODE_WORKER");
    assert!(refused.retry_after.is_some());
    let late = ask(short.grpc(), "rand", &cases[0]).await.unwrap_err();
    assert_eq!(late.kind, ErrorKind::Deadline, "{late:?}");
    assert_eq!(late.reason, "NO_DECODE_WORKER");

    let mut waiting = JoinSet::new();
    for index in 0..cases.len() {
        let (door, cases) = (patient.grpc(), std::sync::Arc::clone(&cases));
        waiting.spawn(async move { ask(door, "rand", &cases[index]).await });
    }
    // All of them wait: none is refused, and none could have been answered.
    let all = async || patient.metric("baton_requests_in_flight").await >= 6.0;
    until("six requests wait", all).await;
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

/// The only decode worker dies while prompts are computed for it: nobody has a token yet, so
/// all of them are answered by its next life.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_outlive_the_only_decode_worker() {
    let cases = known(&models::fixture("rand"), 0x9002, 4, 16);
    let launcher = Launcher::start().await;
    let prefill = launcher.worker(Pool::Prefill, "p0", "rand", &[]).await;
    let mut dies = launcher.worker(Pool::Decode, "d0", "rand", &[]).await;
    // Long enough for no stage to end before the worker does.
    let router = launcher
        .router(&[SPLIT[0], "--handoff-timeout-ms=60000"])
        .await;
    router.wait_workers("rand", (1, 1), SOON).await;
    // Prompts that are not computed: accepted by both workers, no token made. The prefill
    // worker as a whole goes on, or the decode worker would soon compute them.
    let held = prefill.hold_engine().await;
    let mut waiting = JoinSet::new();
    for index in 0..cases.len() {
        let (door, cases) = (router.grpc(), std::sync::Arc::clone(&cases));
        waiting.spawn(async move { ask(door, "rand", &cases[index]).await });
    }
    let all = async || dies.load().await.requests_running >= cases.len() as u32;
    until("the decode worker has taken all of them", all).await;
    assert!(waiting.try_join_next().is_none(), "nobody computes them");
    dies.process.kill().await;
    drop(held);
    let decode = launcher.worker(Pool::Decode, "d0", "rand", &[]).await;
    while let Some(answered) = waiting.join_next().await {
        answered.unwrap().unwrap();
    }
    for worker in [&prefill, &decode] {
        worker.wait_released(Duration::from_secs(2)).await;
    }
}

/// The only decode worker dies under a stream, and another life of it comes before the stream's
/// gap is too long: the client sees one answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_outlives_its_only_decode_worker() {
    let (case, right) = &known(&models::fixture("rand"), 0x9004, 1, 500)[0];
    let launcher = Launcher::start().await;
    let prefill = launcher.worker(Pool::Prefill, "p0", "rand", &[]).await;
    let mut dies = launcher.worker(Pool::Decode, "d0", "rand", &[]).await;
    let router = launcher.router(&SPLIT).await;
    router.wait_workers("rand", (1, 1), SOON).await;
    // It is not through before it dies, whoever stands still meanwhile.
    let slow = dies.slow_engine(Duration::from_millis(10)).await;
    let request = client::request(case);
    let stream = router.grpc().generate(request).await;
    let mut stream = stream.expect("taken").into_inner();
    let mut collector = Collector::new(case.sampling.n);
    while collector.tokens() < 3 {
        let event = stream.message().await.expect("no failure");
        collector.take(event.expect("more"));
    }
    dies.process.kill().await;
    drop(slow);
    let (decode, _) = tokio::join!(launcher.worker(Pool::Decode, "d0", "rand", &[]), async {
        while let Some(event) = stream.message().await.expect("no failure") {
            collector.take(event);
        }
    });
    let answer = collector.finish();
    for (got, right) in answer.choices.iter().zip(right) {
        assert_eq!(got.tokens, right.tokens);
        assert_eq!(got.finish, right.finish);
    }
    let taken = decode.load().await;
    assert!(
        taken.handoffs_total + taken.local_prefills_total > 0,
        "nothing moved"
    );
    for worker in [&prefill, &decode] {
        worker.wait_released(Duration::from_secs(2)).await;
    }
}

/// Who computes a prompt while no prefill worker is there is the operator's choice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_prefill_worker_prompts_are_computed_or_refused() {
    let cases = known(&models::fixture("rand"), 0x9003, 2, 8);
    let launcher = Launcher::start().await;
    let decode = launcher.worker(Pool::Decode, "d0", "rand", &[]).await;
    let serving = launcher.router(&SPLIT).await;
    let refusing = [SPLIT[0], SPLIT[1], "--refuse-without-prefill"];
    let refusing = launcher.router(&refusing).await;
    for router in [&serving, &refusing] {
        router.wait_workers("rand", (0, 1), SOON).await;
    }
    ask(serving.grpc(), "rand", &cases[0]).await.unwrap();
    let refused = ask(refusing.grpc(), "rand", &cases[0]).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Unavailable, "{refused:?}");
    assert_eq!(refused.reason, "NO_PREFILL_WORKER");
    assert!(refused.retry_after.is_some());
    let counted = r#"baton_requests_total{code="UNAVAILABLE",reason="no_prefill"}"#;
    let once = async || refusing.metric(counted).await == 1.0;
    until("it is counted, once", once).await;
    let prefill = launcher.worker(Pool::Prefill, "p0", "rand", &[]).await;
    refusing.wait_workers("rand", (1, 1), SOON).await;
    ask(refusing.grpc(), "rand", &cases[1]).await.unwrap();
    drop((prefill, decode));
}
