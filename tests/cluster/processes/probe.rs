//! The leak probe: what metrics say, and then whole pools asked for.
//!
//! A request that needs 95 % of a pool by itself is never admitted to one that has lost more
//! blocks than that, whatever its books say.

use std::sync::Arc;
use std::time::Duration;

use baton_engine::model::Model;
use baton_proto::kv_layout::KvDtype;
use baton_proto::sampling::SamplingParams;
use baton_tests::oracle::{Case, Oracle};
use baton_tests::process::{RouterProcess, Worker};
use futures::future::join_all;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::{Known, ask};

/// Two handoff timeouts of these tests' routers at the most.
const RELEASED_WITHIN: Duration = Duration::from_secs(4);
const ANSWERED_WITHIN: Duration = Duration::from_secs(60);
const BLOCK: u32 = 16;
/// Requests that fill a pool together; no more than the shortest queue of these tests takes.
const SHARES: u32 = 4;

fn case(random: &mut StdRng, prompt: u32, tokens: u32) -> Case {
    Case {
        prompt: (0..prompt).map(|_| random.random_range(6..300)).collect(),
        sampling: SamplingParams {
            temperature: 0.0,
            max_tokens: tokens,
            ignore_eos: true,
            ..SamplingParams::default()
        },
    }
}

/// Every worker holds nothing; then each pool of `kv_tokens` is filled to 95 % by one request,
/// and by several at once, all of them answered as the oracle does.
pub async fn probe(
    router: &RouterProcess,
    model: &Arc<Model>,
    workers: &[&Worker],
    kv_tokens: u32,
) {
    for worker in workers {
        worker.wait_released(RELEASED_WITHIN).await;
        for blocks in worker.load().await.blocks {
            assert_eq!(blocks.free + blocks.cached, blocks.total, "{blocks:?}");
            assert_eq!(blocks.total, kv_tokens / BLOCK);
        }
    }
    let mut random = StdRng::seed_from_u64(0x1ea4);
    let mut oracle = Oracle::new(model, KvDtype::F32);
    let mut known = |case: Case| -> Known {
        let right = oracle.run(&case);
        (case, right)
    };
    let most = kv_tokens / BLOCK * 95 / 100 + 1;
    let mut untouched: Vec<&Worker> = workers.to_vec();
    let mut before = Vec::new();
    for worker in workers {
        before.push(worker.load().await.handoffs_total);
    }
    for _ in 0..40 {
        // As many at once as there may be workers of a kind, so that each gets one.
        let alone: Vec<Known> = (0..workers.len().div_ceil(2))
            .map(|_| known(case(&mut random, most * BLOCK - 8, 8)))
            .collect();
        run(router, &alone).await;
        let mut left = Vec::new();
        for (worker, before) in workers.iter().zip(&before) {
            if worker.load().await.handoffs_total == *before {
                left.push(*worker);
            }
        }
        untouched = left;
        if untouched.is_empty() {
            break;
        }
    }
    let names: Vec<&str> = untouched.iter().map(|w| w.process.name.as_str()).collect();
    assert!(names.is_empty(), "no whole pool was asked of {names:?}");
    let share = |one: u32| most / SHARES + u32::from(one < most % SHARES);
    let many: Vec<Known> = (0..SHARES * workers.len().div_ceil(2) as u32)
        .map(|one| known(case(&mut random, share(one % SHARES) * BLOCK - 14, 14)))
        .collect();
    run(router, &many).await;
    for worker in workers {
        worker.wait_released(RELEASED_WITHIN).await;
    }
}

async fn run(router: &RouterProcess, cases: &[Known]) {
    let asked = cases.iter().map(|one| ask(router.grpc(), "rand", one));
    let answers = tokio::time::timeout(ANSWERED_WITHIN, join_all(asked)).await;
    for answer in answers.expect("a whole pool is there again") {
        answer.expect("a whole pool is there again");
    }
}
