//! More requests than a decode worker takes: they wait there, before anything of theirs is
//! computed, and the clock of a handoff does not run while they do; past the queue's end they
//! are refused with a hint when to come back.
//!
//! Seen to fail: with a handoff's clock that runs in the queue, with a decode worker that takes
//! 32 at a time (the prefill worker then holds more than four), and with a queue that is never
//! full.

use std::sync::atomic::{AtomicBool, Ordering};
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
const HANDOFF: Duration = Duration::from_millis(500);
const FLAGS: [&str; 2] = ["--local-prefill-tokens-max=0", "--handoff-timeout-ms=500"];
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

/// 32 requests, 4 of which run at a time: the last ones wait for many times the handoff
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
    // A very fast machine makes twice as many tokens, so that its queue is long as well.
    let watch = Stopwatch::start();
    ask(router.grpc(), "rand", &burst(&mut oracle, 1, 500)[0])
        .await
        .unwrap();
    let fast = watch.elapsed() * BURST / (AT_ONCE as u32) < 2 * HANDOFF;
    let burst = burst(&mut oracle, BURST, if fast { 990 } else { 500 });
    let before = decode.load().await.handoffs_total;

    let watch = Stopwatch::start();
    let all = join_all(burst.iter().map(|one| ask(router.grpc(), "rand", one)));
    let (answers, requests, blocks) = most_held(&prefill, all).await;
    let took = watch.elapsed();
    println!("{took:?}, at most {requests} requests and {blocks} blocks at the prefill worker");
    for answer in answers {
        answer.unwrap();
    }
    assert!(took > 2 * HANDOFF, "nobody waited: {took:?}");
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
    // What waits at the decode worker has not been sent to the prefill worker.
    assert!(requests as usize <= AT_ONCE, "{requests}");
    assert!(blocks as usize <= 3 * AT_ONCE, "{blocks}");
    let handed = decode.load().await.handoffs_total - before;
    assert_eq!(handed, u64::from(BURST));
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
    let all = join_all(burst.iter().map(|one| ask(router.grpc(), "rand", one)));
    let over_http = async {
        tokio::time::sleep(Duration::from_millis(10)).await;
        join_all((0..12).map(|_| http.post("/v1/completions", &body))).await
    };
    let both = async { tokio::join!(all, over_http) };
    let (answers, replies) = tokio::time::timeout(SOON, both).await.expect("no hang");
    let mut refused = 0;
    for error in answers.into_iter().filter_map(Result::err) {
        assert_eq!(error.kind, ErrorKind::Overloaded, "{error:?}");
        assert!(error.retry_after.is_some(), "{error:?}");
        refused += 1;
    }
    println!("{refused} of {BURST} refused");
    assert!((1..BURST - 4).contains(&refused), "{refused}");
    let mut told = 0;
    for reply in &replies {
        if reply.status != 200 {
            assert_eq!(reply.error(reply.status)["code"], "overloaded");
            assert!(matches!(reply.status, 429 | 503), "{}", reply.status);
            let wait = reply.headers["retry-after"].to_str().unwrap();
            assert!(wait.parse::<u32>().unwrap() >= 1, "{wait}");
            told += 1;
        }
    }
    println!("{told} of {} told over HTTP", replies.len());
    assert!(told > 0);
    probe(&router, &model, &[&prefill, &decode], 1024).await;
}
