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
use baton_tests::transcript::{demanding, with_stop};
use tonic::transport::Endpoint;

use super::{Midway, RELEASED_WITHIN, SPLIT, Traffic, known, read_on, whole};

const SOON: Duration = Duration::from_secs(20);
const TOKENS: u32 = 1_500;
/// Nothing is let run.
const NO_GRACE: &str = "--drain-grace-s=0";
const MOVES: &str = "the decode worker leaves; moving the request";
/// Nothing counted as a failure, and so many requests moved.
async fn assert_moved(router: &RouterProcess, moves: f64) {
    let moved = "baton_migrations_total{result=\"ok\"}";
    router.wait_metric(moved, moves).await;
    for name in [
        "baton_migrations_total{result=\"failed\"}",
        "baton_retries_total{when=\"mid_stream\",result=\"failed\"}",
        "baton_token_conflicts_total",
    ] {
        assert_eq!(router.metric(name).await, 0.0, "{name}");
    }
}

/// Asks it to leave without ending it; how many requests it has.
async fn drain(worker: &Worker) -> u32 {
    let endpoint = Endpoint::from_shared(format!("http://{}", worker.control)).unwrap();
    let channel = endpoint.connect().await.unwrap();
    let drained = DecodeWorkerClient::new(channel)
        .drain(v1::DrainRequest {})
        .await;
    drained.unwrap().into_inner().requests_left
}

/// Requests that a decode worker has begun to decode.
async fn taken(worker: &Worker) -> u64 {
    let load = worker.load().await;
    load.handoffs_total + load.local_prefills_total
}

async fn wait_unready(router: &RouterProcess) {
    let waited = Stopwatch::start();
    while router.http().get("/readyz").await.status != 503 {
        assert!(waited.elapsed() < SOON, "the router is not told");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
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
        let Midway {
            mut seen,
            mut stream,
            at,
            held,
        } = Midway::start(&router, request, 10 + 23 * round, &workers).await;
        workers[at].process.terminate();
        let other = &workers[1 - at];
        let before = taken(other).await;
        {
            let reading = read_on(&mut stream, &mut seen);
            tokio::pin!(reading);
            // The one that goes decodes on until the other one has it all, and may be done before
            // that: it stands still until then, and no longer than others are waited for.
            let takes_over = async {
                while taken(other).await == before {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                tokio::time::sleep(Duration::from_secs(2)).await;
            };
            tokio::select! {
                () = &mut reading => held.release().await,
                () = takes_over => {
                    held.release().await;
                    reading.await;
                }
            }
        }
        seen.assert_same(&right, name);
        assert_moved(&router, (round + 1) as f64).await;
        let worker = &mut workers[at];
        assert_eq!(worker.process.exit_code().await, 0);
        let log = worker.process.log();
        for part in ["the grace time is over", "WORKER_DRAINING"] {
            assert!(log.contains(part), "{part}: {log}");
        }
        assert!(!log.contains("nobody took the rest over"), "{log}");
        workers[at] = decode(format!("d{}", round + 2)).await;
        router.wait_workers("rand", (1, 2), SOON).await;
    }
    router.process.wait_told(MOVES, cases.len()).await;
    for worker in &workers {
        worker.wait_released(RELEASED_WITHIN).await;
    }
}

/// `Drain` without SIGTERM, and nobody there to take over: a stream runs on to its end, and
/// another one moves when somebody comes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_nobody_takes_over_stays_until_somebody_comes() {
    let launcher = Launcher::start().await;
    let worker = async |id| [launcher.worker(Pool::Decode, id, "rand", &[NO_GRACE]).await];
    let first = worker("d0").await;
    let router = launcher.router(&SPLIT).await;
    router.wait_workers("rand", (0, 1), SOON).await;
    let (_, request) = demanding(TOKENS).remove(0);
    let right = whole(&router, &request, 1).await;
    let mut stays = Midway::start(&router, &request, 20, &first).await;
    assert_eq!(drain(&first[0]).await, 1);
    wait_unready(&router).await;
    stays.held.release().await;
    read_on(&mut stays.stream, &mut stays.seen).await;
    stays.seen.assert_same(&right, "stayed");
    assert_moved(&router, 0.0).await;

    let second = worker("d1").await;
    router.wait_workers("rand", (0, 1), SOON).await;
    let mut moves = Midway::start(&router, &request, 20, &second).await;
    assert_eq!(drain(&second[0]).await, 1);
    wait_unready(&router).await;
    let coming = launcher.worker(Pool::Decode, "d2", "rand", &[]).await;
    router.wait_workers("rand", (0, 1), SOON).await;
    read_on(&mut moves.stream, &mut moves.seen).await;
    moves.held.release().await;
    moves.seen.assert_same(&right, "moved late");
    assert_moved(&router, 1.0).await;
    // Those that drained are there, with nothing to do.
    for worker in [&first[0], &second[0], &coming] {
        worker.wait_released(RELEASED_WITHIN).await;
    }
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
        worker.wait_released(RELEASED_WITHIN).await;
    }
}
