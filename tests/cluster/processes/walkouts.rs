//! Clients that close their socket while nobody writes to it, and while four choices do: the
//! work ends with them, and the router keeps nothing of them.
//!
//! Seen to fail: with a router that runs a request to its end whoever is there, and with one
//! that keeps a KiB of every request.

use std::time::Duration;

use baton_tests::http::Http;
use baton_tests::models;
use baton_tests::pace::Stopwatch;
use baton_tests::process::{Launcher, Pool};
use futures::future::join_all;
use serde_json::json;

use super::SPLIT;
use super::probe::probe;

const SOON: Duration = Duration::from_secs(20);
/// From the last close to the last token computed.
const STOPS_WITHIN: Duration = Duration::from_secs(1);
const RELEASED_WITHIN: Duration = Duration::from_secs(5);
const REPEATS: u32 = 1000;
/// Hundreds of repeats after which buffers and caches have their size.
const BEFORE: u32 = 8;
/// With 200 repeats: less for each than a prompt and the records of four choices take. What is
/// kept of every request shows each time; what an allocator takes at a time does not.
const GROWS_AT_MOST_KIB: u64 = 128;
const POOL_TOKENS: u32 = 4096;
const POOL: &str = "--kv-tokens=4096";

fn prompt(length: u32, salt: u32) -> Vec<u32> {
    (0..length)
        .map(|at| 6 + (at * 7 + salt * 31 + at * salt) % 290)
        .collect()
}

/// Four choices, left with the third event.
async fn leave_four(http: &Http, salt: u32) {
    let body = json!({
        "model": "rand", "prompt": prompt(40, salt), "max_tokens": 2000, "ignore_eos": true,
        "n": 4, "stream": true,
    });
    let mut stream = http.stream("/v1/completions", &body).await;
    for _ in 0..3 {
        stream.next().await.expect("it runs");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_computes_for_clients_that_left() {
    let launcher = Launcher::start().await;
    let (prefill, decode) = tokio::join!(
        launcher.worker(Pool::Prefill, "p", "rand", &[POOL]),
        launcher.worker(Pool::Decode, "d", "rand", &[POOL]),
    );
    let router = launcher.router(&SPLIT).await;
    router.wait_workers("rand", (1, 1), SOON).await;
    let http = router.http();
    for round in 0..10 {
        let left = (0..5).map(|client| {
            let (http, salt) = (&http, round * 5 + client);
            async move {
                let long =
                    json!({ "model": "rand", "prompt": prompt(4000, salt), "max_tokens": 1 });
                let whole = json!({
                    "model": "rand", "prompt": prompt(20, salt), "max_tokens": 2000,
                    "ignore_eos": true,
                });
                tokio::join!(
                    http.abandon("/v1/completions", &long, Duration::from_millis(100)),
                    http.abandon("/v1/completions", &whole, Duration::from_millis(200)),
                    leave_four(http, salt),
                );
            }
        });
        join_all(left).await;
    }
    for worker in [&prefill, &decode] {
        worker.wait_released(STOPS_WITHIN).await;
    }
    let rows = "baton_batch_tokens_sum";
    let now = [prefill.settled(rows).await, decode.settled(rows).await];
    println!("{now:?} rows");
    // What 50 of each would have been.
    let whole = [50.0 * 4000.0, 50.0 * 9.0 * 2000.0];
    for (rows, whole) in now.iter().zip(whole) {
        assert!(*rows > 0.0 && *rows < whole / 2.0, "{rows} of {whole}");
    }
    let model = models::fixture("rand");
    probe(&router, &model, &[&prefill, &decode], POOL_TOKENS).await;
}

/// Memory of a process that is its own, in KiB.
fn resident_kib(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("it runs");
    let line = status.lines().find(|line| line.starts_with("RssAnon:"));
    let value = line.and_then(|line| line.split_whitespace().nth(1));
    value.and_then(|value| value.parse().ok()).expect("RssAnon")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_clients_that_left_are_forgotten() {
    let launcher = Launcher::start().await;
    let (prefill, decode) = tokio::join!(
        launcher.worker(Pool::Prefill, "p", "rand", &[]),
        launcher.worker(Pool::Decode, "d", "rand", &[]),
    );
    // What it remembers of prefixes is bounded, and its bound is soon reached.
    let few = [SPLIT[0], SPLIT[1], "--prefix-spans-max=64"];
    let router = launcher.router(&few).await;
    router.wait_workers("rand", (1, 1), SOON).await;
    let http = router.http();
    let mut seen = Vec::new();
    for round in 0..BEFORE + REPEATS / 100 {
        for batch in 0..10 {
            let left = (0..10).map(|client| leave_four(&http, round * 100 + batch * 10 + client));
            join_all(left).await;
        }
        for worker in [&prefill, &decode] {
            worker.wait_released(RELEASED_WITHIN).await;
        }
        seen.push(resident_kib(router.process.id()));
    }
    println!("{seen:?}");
    let settled: Vec<u64> = seen[BEFORE as usize - 1..]
        .iter()
        .copied()
        .step_by(2)
        .collect();
    let grown = settled.windows(2).map(|two| two[1].saturating_sub(two[0]));
    let mut grown: Vec<u64> = grown.collect();
    grown.sort_unstable();
    let median = grown[grown.len() / 2];
    assert!(median < GROWS_AT_MOST_KIB, "{grown:?} KiB: {seen:?}");
    // The workers may let go a moment before the router does.
    let waited = Stopwatch::start();
    while router.metric("baton_requests_in_flight").await > 0.0 {
        assert!(waited.elapsed() < SOON, "the router keeps requests");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
