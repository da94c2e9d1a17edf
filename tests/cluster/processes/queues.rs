//! More requests than a decode worker takes: they wait there, before anything of theirs is
//! computed, and the clock of a handoff does not run while they do; past the queue's end they
//! are refused with a hint when to come back.
//!
//! Seen to fail: with a handoff's clock that runs in the queue, with a decode worker that takes
//! 32 at a time (the prefill worker then holds more than four), and with a queue that is never
//! full.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use baton_proto::ErrorKind;
use baton_proto::kv_layout::KvDtype;
use baton_tests::models;
use baton_tests::oracle::Oracle;
use baton_tests::pace::Stopwatch;
use baton_tests::process::{Launcher, Pool, Worker};
use futures::future::join_all;
use serde_json::json;

use super::probe::probe;
use super::{Known, ask, greedy};

const SOON: Duration = Duration::from_secs(20);
/// Longer than a machine stands still.
const HANDOFF: Duration = Duration::from_millis(1_200);
const FLAGS: [&str; 2] = ["--local-prefill-tokens-max=0", "--handoff-timeout-ms=1200"];
const AT_ONCE: usize = 4;
const BURST: u32 = 32;

fn burst(oracle: &mut Oracle, count: u32, tokens: u32) -> Vec<Known> {
    let one = |salt: u32| {
        let at = |at: u32| 6 + (at * 7 + salt * 23 + at * salt) % 290;
        greedy(oracle, (0..33).map(at).collect(), tokens)
    };
    (0..count).map(one).collect()
}

/// The most requests and blocks a worker held at a time while `work` ran.
async fn most_held<T>(worker: &Worker, work: impl Future<Output = T>) -> (T, u32, u32) {
    let done = AtomicBool::new(false);
    let watch = async {
        let (mut requests, mut blocks) = (0, 0);
        while !done.load(Ordering::Relaxed) {
            let load = worker.load().await;
            requests = requests.max(load.requests_running + load.requests_waiting);
            let held = load
                .blocks
                .iter()
                .map(|one| one.referenced + one.reserved + one.pinned);
            blocks = blocks.max(held.sum());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        (requests, blocks)
    };
    let work = async {
        let result = work.await;
        done.store(true, Ordering::Relaxed);
        result
    };
    let (result, (requests, blocks)) = tokio::join!(work, watch);
    (result, requests, blocks)
}

/// 32 requests at a time, 4 of which run at a time: the last ones wait for many times the handoff
/// timeout, and all are right.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_beyond_the_decode_window_only_waits() {
    let model = models::fixture("rand");
    let mut oracle = Oracle::new(&model, KvDtype::F32);
    let launcher = Launcher::start().await;
    let (prefill, decode) = tokio::join!(
        launcher.worker(Pool::Prefill, "p", "rand", &["--kv-tokens=4096"]),
        launcher.worker(
            Pool::Decode,
            "d",
            "rand",
            &["--kv-tokens=4096", "--sequences-max=4"]
        ),
    );
    let router = launcher.router(&FLAGS).await;
    router.wait_workers("rand", (1, 1), SOON).await;
    // A faster machine is given larger bursts, until the last ones waited for long: half of the
    // requests wait for half of the time.
    let (mut handed, mut longest) = (0, Duration::ZERO);
    for (count, tokens) in [(BURST, 600), (BURST, 980), (4 * BURST, 980)] {
        let burst = burst(&mut oracle, count, tokens);
        let watch = Stopwatch::start();
        let all = join_all(burst.iter().map(|one| ask(router.grpc(), "rand", one)));
        let (answers, requests, blocks) = most_held(&prefill, all).await;
        let took = watch.elapsed();
        println!("{count} of {tokens}: {took:?}, at most {requests} requests and {blocks} blocks");
        for answer in answers {
            answer.unwrap();
        }
        handed += u64::from(count);
        assert_eq!(decode.load().await.handoffs_total, handed);
        // What waits at the decode worker has not been sent to the prefill worker, which may
        // hear a little late of those that are through.
        assert!(requests as usize <= 2 * AT_ONCE, "{requests}");
        assert!(blocks as usize <= 3 * 2 * AT_ONCE, "{blocks}");
        longest = longest.max(took);
        if longest > 2 * HANDOFF {
            break;
        }
    }
    assert!(longest > 2 * HANDOFF, "nobody waited: {longest:?}");
    for worker in [&prefill, &decode] {
        let failed = worker.metric("baton_kv_transfer_failures_total").await;
        assert_eq!(failed, 0.0, "{}", worker.process.name);
    }
    for when in ["before_first_token", "mid_stream"] {
        for result in ["ok", "failed"] {
            let name = format!("baton_retries_total{{when=\"{when}\",result=\"{result}\"}}");
            assert_eq!(router.metric(&name).await, 0.0);
        }
    }
    probe(&router, &model, &[&prefill, &decode], 4096).await;
}

/// The decode pool is full, and so is the queue before it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_pool_lets_wait_or_refuses_and_never_hangs() {
    let model = models::fixture("rand");
    let mut oracle = Oracle::new(&model, KvDtype::F32);
    // 13 blocks each in the end, of 64.
    let burst = burst(&mut oracle, BURST, 170);
    let launcher = Launcher::start().await;
    let (prefill, decode) = tokio::join!(
        launcher.worker(Pool::Prefill, "p", "rand", &["--kv-tokens=1024"]),
        launcher.worker(
            Pool::Decode,
            "d",
            "rand",
            &["--kv-tokens=1024", "--queue-requests-max=4"]
        ),
    );
    let router = launcher.router(&FLAGS).await;
    router.wait_workers("rand", (1, 1), SOON).await;
    let http = router.http();
    let body = json!({
        "model": "rand", "prompt": burst[0].0.prompt, "max_tokens": 170, "ignore_eos": true,
        "temperature": 0,
    });
    // All of them ask again and again until somebody was refused at each door, and once more.
    let (refused, told) = (AtomicU32::new(0), AtomicU32::new(0));
    let answered = AtomicU32::new(0);
    let go_on = || {
        [&refused, &told]
            .iter()
            .any(|n| n.load(Ordering::Relaxed) == 0)
    };
    let over_grpc = burst.iter().map(|one| async {
        loop {
            let last = !go_on();
            match ask(router.grpc(), "rand", one).await {
                Ok(()) => answered.fetch_add(1, Ordering::Relaxed),
                Err(error) => {
                    assert_eq!(error.kind, ErrorKind::Overloaded, "{error:?}");
                    assert!(error.retry_after.is_some(), "{error:?}");
                    refused.fetch_add(1, Ordering::Relaxed)
                }
            };
            if last {
                return;
            }
        }
    });
    let over_http = (0..12).map(|_| async {
        loop {
            let last = !go_on();
            let reply = http.post("/v1/completions", &body).await;
            if reply.status != 200 {
                assert_eq!(reply.error(reply.status)["code"], "overloaded");
                assert!(matches!(reply.status, 429 | 503), "{}", reply.status);
                let wait = reply.headers["retry-after"].to_str().unwrap();
                assert!(wait.parse::<u32>().unwrap() >= 1, "{wait}");
                told.fetch_add(1, Ordering::Relaxed);
            }
            if last {
                return;
            }
        }
    });
    let both = async { tokio::join!(join_all(over_grpc), join_all(over_http)) };
    let both = tokio::time::timeout(Duration::from_secs(60), both).await;
    both.expect("no hang, and refusals at both doors");
    println!("{answered:?} answered, {refused:?} refused, {told:?} told over HTTP");
    assert!(answered.into_inner() > 0);
    probe(&router, &model, &[&prefill, &decode], 1024).await;
}
