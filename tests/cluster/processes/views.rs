//! What a router knows of its workers' prefix caches: a new one as much as the old one.
//!
//! Seen to fail: with the index filled by a router's own placements alone, a new router
//! finds about half of the prompts' workers, by luck.

use std::time::Duration;

use baton_proto::v1;
use baton_tests::pace::Stopwatch;
use baton_tests::process::{Launcher, Pool, RouterProcess};
use tokio::time::sleep;

use super::{PATIENT, RELEASED_WITHIN};

const SOON: Duration = Duration::from_secs(20);
const PROMPTS: u32 = 12;
const PROMPT_TOKENS: u32 = 400;

/// A prompt that shares nothing with another's.
fn prompt(number: u32, tokens: u32) -> Vec<u32> {
    let first = 6 + number * 20;
    let rest = (1..tokens).map(|i| 6 + (i * 13 + number * 101 + i * i * number) % 290);
    std::iter::once(first).chain(rest).collect()
}

async fn cached(router: &RouterProcess, ids: Vec<u32>) -> u32 {
    let request = v1::GenerateRequest {
        prompt: Some(v1::generate_request::Prompt::TokenIds(v1::TokenIds { ids })),
        sampling: Some(v1::SamplingParams {
            max_tokens: Some(2),
            ignore_eos: Some(true),
            ..v1::SamplingParams::default()
        }),
        ..v1::GenerateRequest::default()
    };
    let mut stream = router.grpc().generate(request).await.unwrap().into_inner();
    let mut usage = None;
    while let Some(event) = stream.message().await.unwrap() {
        if let Some(v1::generate_event::Event::Completed(completed)) = event.event {
            usage = completed.usage;
        }
    }
    usage.expect("usage").cached_tokens
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_router_knows_within_two_seconds_which_worker_has_which_prefix() {
    let launcher = Launcher::start().await;
    // Blocks of two spans at one of them: it names its prefixes more coarsely.
    let (p0, p1, _d0) = tokio::join!(
        launcher.worker(Pool::Prefill, "p0", "rand", &["--block-size=32"]),
        launcher.worker(Pool::Prefill, "p1", "rand", &[]),
        launcher.worker(Pool::Decode, "d0", "rand", &[]),
    );
    let mut old = launcher.router(&PATIENT).await;
    old.wait_workers("rand", (2, 1), SOON).await;
    for number in 0..PROMPTS {
        assert_eq!(cached(&old, prompt(number, PROMPT_TOKENS)).await, 0);
    }
    // What a worker has computed is in its cache once it is released.
    for worker in [&p0, &p1] {
        worker.wait_released(RELEASED_WITHIN).await;
    }
    old.process.kill().await;
    let started = Stopwatch::start();
    let new = launcher.router(&PATIENT).await;
    new.wait_workers("rand", (2, 1), SOON).await;
    println!("a new router serves after {:?}", started.elapsed());
    sleep(Duration::from_secs(2).saturating_sub(started.elapsed())).await;
    for number in 0..PROMPTS {
        // The same beginning, another end: of 400 tokens 384 are whole blocks.
        let ids = [prompt(number, PROMPT_TOKENS), vec![7; 40]].concat();
        let found = cached(&new, ids).await;
        assert!(found >= 384, "prompt {number}: {found} tokens were cached");
    }
}
