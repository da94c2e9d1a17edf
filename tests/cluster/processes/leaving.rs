//! Workers that leave while streams run on them: what their grace time does not see the
//! end of goes on elsewhere, and no client can tell.
//!
//! Seen to fail: with a router that does not hear that a worker leaves, and ends a stream
//! with its worker.

use std::time::Duration;

use baton_proto::v1;
use baton_proto::v1::decode_worker_client::DecodeWorkerClient;
use baton_tests::models;
use baton_tests::pace::Stopwatch;
use baton_tests::process::{Launcher, Pool, RouterProcess, Worker};
use baton_tests::transcript::{Transcript, demanding, with_stop};
use tonic::transport::Endpoint;

use super::{SPLIT, Traffic, known, whole};

const SOON: Duration = Duration::from_secs(20);
const TOKENS: u32 = 1_500;
/// Nothing is let run.
const NO_GRACE: &str = "--drain-grace-s=0";

/// Nothing counted as a failure, and so many requests moved.
async fn assert_moved(router: &RouterProcess, moves: f64) {
    let moved = router.metric("baton_migrations_total{result=\"ok\"}").await;
    assert_eq!(moved, moves);
    for name in [
        "baton_migrations_total{result=\"failed\"}",
        "baton_retries_total{when=\"mid_stream\",result=\"failed\"}",
        "baton_token_conflicts_total",
    ] {
        assert_eq!(router.metric(name).await, 0.0, "{name}");
    }
}

async fn busy(workers: &[Worker]) -> usize {
    for (index, worker) in workers.iter().enumerate() {
        if worker.load().await.requests_running > 0 {
            return index;
        }
    }
    panic!("no decode worker has the request any more");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_that_outlast_the_grace_time_go_on_elsewhere() {
    let launcher = Launcher::start().await;
    let decode = |name: String| {
        let launcher = &launcher;
        async move {
            launcher
                .worker(Pool::Decode, &name, "rand", &[NO_GRACE])
                .await
        }
    };
    let (_prefill, d0, d1) = tokio::join!(
        launcher.worker(Pool::Prefill, "p0", "rand", &[]),
        decode("d0".to_owned()),
        decode("d1".to_owned()),
    );
    let mut workers = vec![d0, d1];
    let router = launcher.router(&SPLIT).await;
    router.wait_workers("rand", (1, 2), SOON).await;
    let mut cases = demanding(TOKENS);
    cases.retain(|(name, _)| *name != "a seed of the router's");
    let text = whole(&router, &cases[1].1, 1).await.choices[0].text.clone();
    cases.push(("stop strings", with_stop(&cases[1].1, &text)));
    for (round, (name, request)) in cases.iter().enumerate() {
        let n = request.sampling.as_ref().unwrap().n.unwrap_or(1);
        let right = whole(&router, request, n).await;
        let mut seen = Transcript::new(n);
        let mut client = router.grpc();
        let mut stream = client.generate(request.clone()).await.unwrap().into_inner();
        let mut left = None;
        while let Some(event) = stream.message().await.unwrap() {
            seen.take(event);
            if left.is_none() && seen.tokens() >= 10 + 23 * round {
                let index = busy(&workers).await;
                workers[index].process.terminate();
                left = Some(index);
            }
        }
        seen.assert_same(&right, name);
        assert_moved(&router, (round + 1) as f64).await;
        let index = left.expect("left");
        let worker = &mut workers[index];
        assert_eq!(worker.process.exit_code().await, 0);
        let log = worker.process.log();
        for part in ["the grace time is over", "WORKER_DRAINING"] {
            assert!(log.contains(part), "{part}: {log}");
        }
        assert!(!log.contains("nobody took the rest over"), "{log}");
        workers[index] = decode(format!("d{}", round + 2)).await;
        router.wait_workers("rand", (1, 2), SOON).await;
    }
    let log = router.process.log();
    assert!(log.contains("the decode worker leaves"), "{log}");
    for worker in &workers {
        worker.wait_released(Duration::from_secs(1)).await;
    }
}

/// `Drain` without SIGTERM, and nobody there to take over: the stream runs on, and moves
/// when somebody comes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_nobody_takes_over_stays_until_somebody_comes() {
    let launcher = Launcher::start().await;
    let going = launcher
        .worker(Pool::Decode, "d0", "rand", &[NO_GRACE])
        .await;
    let router = launcher.router(&SPLIT).await;
    router.wait_workers("rand", (0, 1), SOON).await;
    let (_, request) = demanding(3_500).remove(0);
    let right = whole(&router, &request, 1).await;

    let mut seen = Transcript::new(1);
    let mut client = router.grpc();
    let mut stream = client.generate(request).await.unwrap().into_inner();
    while seen.tokens() < 20 {
        seen.take(stream.message().await.unwrap().expect("it goes on"));
    }
    let channel = Endpoint::from_shared(format!("http://{}", going.control))
        .unwrap()
        .connect()
        .await
        .unwrap();
    let drained = DecodeWorkerClient::new(channel)
        .drain(v1::DrainRequest {})
        .await
        .unwrap();
    assert_eq!(drained.into_inner().requests_left, 1);
    let waited = Stopwatch::start();
    while router.http().get("/readyz").await.status != 503 {
        assert!(waited.elapsed() < SOON, "the router is not told");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // What is sent is read slowly, so that the stream does not end before the other comes.
    while seen.tokens() < 200 {
        seen.take(stream.message().await.unwrap().expect("it goes on"));
    }
    assert_moved(&router, 0.0).await;
    let coming = launcher.worker(Pool::Decode, "d1", "rand", &[]).await;
    router.wait_workers("rand", (0, 1), SOON).await;
    while let Some(event) = stream.message().await.unwrap() {
        seen.take(event);
    }
    seen.assert_same(&right, "moved late");
    assert_moved(&router, 1.0).await;
    // The one that drained is there, with nothing to do.
    going.wait_released(Duration::from_secs(1)).await;
    assert_eq!(going.load().await.requests_running, 0);
    coming.wait_released(Duration::from_secs(1)).await;
}

/// What a prefill worker has computed is kept until its receiver has it; what it has not
/// is computed elsewhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_of_a_prefill_worker_without_grace_are_computed_elsewhere() {
    let cases = known(&models::fixture("rand"), 0x9ace, 16, 24);
    let launcher = Launcher::start().await;
    let prefill = |name: String| {
        let launcher = &launcher;
        async move {
            launcher
                .worker(Pool::Prefill, &name, "rand", &[NO_GRACE])
                .await
        }
    };
    let (p0, mut p1, d0) = tokio::join!(
        prefill("p0".to_owned()),
        prefill("p1".to_owned()),
        launcher.worker(Pool::Decode, "d0", "rand", &[]),
    );
    let router = launcher.router(&SPLIT).await;
    router.wait_workers("rand", (2, 1), SOON).await;
    let traffic = Traffic::start(&router.grpc(), "rand", &cases, 8);
    for round in 0..4 {
        traffic.wait_answered(8).await;
        p1.process.terminate();
        assert_eq!(p1.process.exit_code().await, 0);
        p1 = prefill(format!("p{}", round + 2)).await;
        router.wait_workers("rand", (2, 1), SOON).await;
    }
    let failures = traffic.stop().await;
    assert!(failures.is_empty(), "{failures:?}");
    assert_eq!(router.metric("baton_token_conflicts_total").await, 0.0);
    for worker in [&p0, &p1, &d0] {
        worker.wait_released(Duration::from_secs(2)).await;
    }
}
