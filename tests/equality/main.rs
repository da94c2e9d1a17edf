//! Promise 1: a request's tokens are the oracle's, whatever the cluster does.
//!
//! Every cell of the matrix proves from the workers' counters that its path was
//! really taken. On RAND all combinations run; on a real model a pairwise covering
//! set does. Seen to fail: with the blocks of a sequence sent in the wrong order,
//! and with the first draw's position off by one.

use std::time::Duration;

use baton_proto::kv_layout::KvDtype;
use baton_proto::sampling::SamplingParams;
use baton_tests::client::{self, Answer};
use baton_tests::cluster::{Counters, Setup, TestCluster};
use baton_tests::models;
use baton_tests::oracle::{Case, Oracle, Output};
use futures::future::join_all;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

const SEED: u64 = 0x5eed_0001;

/// A random request: greedy or seeded, 1 to 3 choices, all penalties now and then.
fn random_case(random: &mut StdRng, vocab: u32, prompt_max: usize, tokens_max: u32) -> Case {
    let length = random.random_range(1..=prompt_max);
    let prompt = (0..length).map(|_| random.random_range(6..vocab)).collect();
    let greedy = random.random_bool(0.5);
    let max_tokens = random.random_range(1..=tokens_max);
    let mut sampling = SamplingParams {
        temperature: if greedy { 0.0 } else { 0.9 },
        seed: random.random(),
        max_tokens,
        n: if random.random_bool(0.25) {
            random.random_range(2..=3)
        } else {
            1
        },
        ignore_eos: random.random_bool(0.5),
        ..SamplingParams::default()
    };
    if random.random_bool(0.3) {
        sampling.repetition_penalty = 1.3;
        sampling.presence_penalty = 0.5;
        sampling.frequency_penalty = 0.25;
    }
    if !greedy && random.random_bool(0.5) {
        sampling.top_p = 0.9;
        sampling.top_k = 40;
        sampling.min_p = 0.01;
    }
    if random.random_bool(0.2) {
        sampling.min_tokens = random.random_range(0..=max_tokens);
    }
    Case { prompt, sampling }
}

/// Requests whose output outgrows their prompt by several blocks: admission keeps one
/// block back for each running sequence, so only such requests make a tight pool preempt.
fn growing_cases(random: &mut StdRng, vocab: std::ops::Range<u32>, tokens: u32) -> Vec<Case> {
    (0..16)
        .map(|index| Case {
            prompt: (0..random.random_range(20..60))
                .map(|_| random.random_range(vocab.clone()))
                .collect(),
            sampling: SamplingParams {
                temperature: if index % 2 == 0 { 0.0 } else { 0.9 },
                seed: random.random(),
                max_tokens: tokens,
                ignore_eos: true,
                ..SamplingParams::default()
            },
        })
        .collect()
}

fn with_answers(oracle: &mut Oracle, cases: &[Case]) -> Vec<(Case, Vec<Output>)> {
    cases
        .iter()
        .map(|case| (case.clone(), oracle.run(case)))
        .collect()
}

fn assert_equal(answer: &Answer, right: &[Output], case: &Case, cell: &str) {
    for (choice, (got, want)) in answer.choices.iter().zip(right).enumerate() {
        assert_eq!(
            got.tokens,
            want.tokens,
            "{cell}: choice {choice} of a prompt of {} tokens, {:?}",
            case.prompt.len(),
            case.sampling
        );
        assert_eq!(got.finish, want.finish, "{cell}: {:?}", case.sampling);
    }
    let made: usize = right.iter().map(|output| output.tokens.len()).sum();
    assert_eq!(answer.usage.completion_tokens as usize, made, "{cell}");
    assert_eq!(
        answer.usage.prompt_tokens as usize,
        case.prompt.len(),
        "{cell}"
    );
}

async fn run_one(cluster: &TestCluster, case: &Case, right: &[Output], cell: &str) {
    let answer = client::run(&cluster.frontend(), client::request(case))
        .await
        .unwrap_or_else(|error| panic!("{cell}: {error}"));
    assert_equal(&answer, right, case, cell);
}

/// Runs cases `width` at a time.
async fn run_beside(
    cluster: &TestCluster,
    cases: &[(Case, Vec<Output>)],
    width: usize,
    cell: &str,
) {
    for batch in cases.chunks(width) {
        join_all(
            batch
                .iter()
                .map(|(case, right)| run_one(cluster, case, right, cell)),
        )
        .await;
    }
}

/// One cell: what is varied and what must be seen of it.
struct Cell {
    dtype: KvDtype,
    block_size: u32,
    chunk_tokens: u32,
    split: bool,
    preempt: bool,
}

impl Cell {
    fn setup(&self, tight_tokens: u32) -> Setup {
        let base = Setup::default();
        Setup {
            block_size: self.block_size,
            kv_dtype: self.dtype,
            chunk_tokens: self.chunk_tokens,
            local_prefill_tokens_max: if self.split { 0 } else { u32::MAX },
            decode_kv_tokens: if self.preempt {
                tight_tokens
            } else {
                base.decode_kv_tokens
            },
            growth_blocks: if self.preempt { 0 } else { base.growth_blocks },
            ..base
        }
    }

    fn name(&self) -> String {
        format!(
            "kv {} block {} chunk {} {} {}",
            self.dtype,
            self.block_size,
            self.chunk_tokens,
            if self.split { "split" } else { "local" },
            if self.preempt { "preempted" } else { "roomy" },
        )
    }

    fn prove(&self, before: Counters, after: Counters, requests: u64) {
        let cell = self.name();
        if self.split {
            let handoffs = after.handoffs - before.handoffs;
            assert!(
                handoffs > requests / 2,
                "{cell}: {handoffs} handoffs of {requests}"
            );
        } else {
            let local = after.local_prefills - before.local_prefills;
            assert!(
                local >= requests,
                "{cell}: {local} local prefills of {requests}"
            );
            assert_eq!(after.handoffs, before.handoffs, "{cell}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_random_requests_equal_the_oracle_in_every_combination() {
    let model = models::fixture("rand");
    let mut random = StdRng::seed_from_u64(SEED);
    println!("seed {SEED:#x}");
    let cases: Vec<Case> = (0..200)
        .map(|_| random_case(&mut random, 300, 160, 24))
        .collect();
    let growing = growing_cases(&mut random, 6..300, 130);
    for dtype in [KvDtype::F32, KvDtype::F16] {
        let mut oracle = Oracle::new(&model, dtype);
        let cases = with_answers(&mut oracle, &cases);
        let growing = with_answers(&mut oracle, &growing);
        for block_size in [16, 32] {
            for chunk_tokens in [16, 64, 512] {
                for split in [true, false] {
                    for preempt in [false, true] {
                        let cell = Cell {
                            dtype,
                            block_size,
                            chunk_tokens,
                            split,
                            preempt,
                        };
                        run_cell(&model, &cell, &cases, &growing).await;
                    }
                }
            }
        }
    }
}

async fn run_cell(
    model: &std::sync::Arc<baton_engine::model::Model>,
    cell: &Cell,
    cases: &[(Case, Vec<Output>)],
    growing: &[(Case, Vec<Output>)],
) {
    let name = cell.name();
    // Room for about two of the longest requests at a time, if it is tight.
    let cluster = cell.setup(384).start(model).await;
    let before = cluster.counters();
    // Cold, 16 beside each other, then the same prompts warm, then alone.
    run_beside(&cluster, cases, 16, &format!("{name}, cold, 16 beside")).await;
    let cold = cluster.counters();
    run_beside(&cluster, cases, 16, &format!("{name}, warm, 16 beside")).await;
    let warm = cluster.counters();
    run_beside(&cluster, cases, 1, &format!("{name}, alone")).await;
    cell.prove(before, cold, cases.len() as u64);
    // A tight pool has no room to remember what ended.
    let hit = warm.prefix_hits_tokens > cold.prefix_hits_tokens;
    assert!(hit || cell.preempt, "{name}: no cache hit");
    if cell.preempt {
        run_beside(&cluster, growing, 16, &format!("{name}, growing")).await;
        assert!(cluster.counters().preemptions > 0, "{name}: no preemption");
    }
    cluster.wait_released(Duration::from_secs(2)).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sliding_windows_equal_the_oracle_split_and_local() {
    let model = models::fixture("rand-swa");
    let mut random = StdRng::seed_from_u64(SEED + 1);
    let mut oracle = Oracle::new(&model, KvDtype::F32);
    let mut cases: Vec<(Case, Vec<Output>)> = Vec::new();
    for length in [1, 16, 31, 32, 33, 47, 64, 100, 200] {
        let mut case = random_case(&mut random, 300, 1, 24);
        case.prompt = (0..length).map(|_| random.random_range(6..300)).collect();
        let right = oracle.run(&case);
        cases.push((case, right));
    }
    for chunk_tokens in [16, 24, 512] {
        for split in [true, false] {
            let cell = Cell {
                dtype: KvDtype::F32,
                block_size: 16,
                chunk_tokens,
                split,
                preempt: false,
            };
            let name = format!("windows, {}", cell.name());
            let cluster = cell.setup(0).start(&model).await;
            let before = cluster.counters();
            run_beside(&cluster, &cases, 4, &name).await;
            run_beside(&cluster, &cases, 16, &format!("{name}, warm")).await;
            let after = cluster.counters();
            cell.prove(before, after, cases.len() as u64);
            assert!(after.prefix_hits_tokens > 0, "{name}: no cache hit");
            cluster.wait_released(Duration::from_secs(2)).await;
            cluster.stop().await;
        }
    }
}

/// K and V as codes: pieces of the matrix above that take every path with each.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fewer_bits_of_kv_equal_the_oracle_split_and_local() {
    let model = models::fixture("rand");
    let mut random = StdRng::seed_from_u64(SEED + 4);
    let cases: Vec<Case> = (0..60)
        .map(|_| random_case(&mut random, 300, 160, 24))
        .collect();
    let growing = growing_cases(&mut random, 6..300, 130);
    for dtype in [KvDtype::Int8, KvDtype::Int4] {
        let mut oracle = Oracle::new(&model, dtype);
        let cases = with_answers(&mut oracle, &cases);
        let growing = with_answers(&mut oracle, &growing);
        for (block_size, chunk_tokens, split, preempt) in [
            (16, 16, true, true),
            (32, 64, true, false),
            (16, 512, false, true),
            (64, 24, false, false),
        ] {
            let cell = Cell {
                dtype,
                block_size,
                chunk_tokens,
                split,
                preempt,
            };
            run_cell(&model, &cell, &cases, &growing).await;
        }
    }
}

/// Pairwise cover of (dtype, block, chunk, path, pool, beside), 12 rows.
const COVER: [(KvDtype, u32, u32, bool, bool, usize); 12] = [
    (KvDtype::F32, 16, 16, true, false, 1),
    (KvDtype::F32, 32, 64, true, true, 16),
    (KvDtype::F32, 16, 512, false, true, 16),
    (KvDtype::F32, 32, 16, false, true, 1),
    (KvDtype::F32, 16, 64, false, false, 1),
    (KvDtype::F32, 32, 512, true, false, 16),
    (KvDtype::F16, 16, 16, false, true, 16),
    (KvDtype::F16, 32, 64, false, false, 16),
    (KvDtype::F16, 16, 512, true, true, 1),
    (KvDtype::F16, 32, 16, true, false, 16),
    (KvDtype::F16, 16, 64, true, true, 1),
    (KvDtype::F16, 32, 512, false, false, 1),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_real_model_equals_the_oracle_in_a_covering_set() {
    let model = models::real("smollm2-135m-instruct");
    let mut random = StdRng::seed_from_u64(SEED + 2);
    let cases: Vec<Case> = (0..20)
        .map(|index| {
            let length = [5, 16, 17, 33, 70, 129][index % 6];
            Case {
                prompt: (0..length)
                    .map(|_| random.random_range(100..40_000))
                    .collect(),
                sampling: SamplingParams {
                    temperature: if index % 2 == 0 { 0.0 } else { 0.8 },
                    seed: random.random(),
                    max_tokens: 32,
                    ignore_eos: true,
                    ..SamplingParams::default()
                },
            }
        })
        .collect();
    let growing = growing_cases(&mut random, 100..40_000, 110);
    for dtype in [KvDtype::F32, KvDtype::F16] {
        let mut oracle = Oracle::new(&model, dtype);
        let cases = with_answers(&mut oracle, &cases);
        let growing = with_answers(&mut oracle, &growing);
        for (_, block_size, chunk_tokens, split, preempt, width) in
            COVER.into_iter().filter(|row| row.0 == dtype)
        {
            let cell = Cell {
                dtype,
                block_size,
                chunk_tokens,
                split,
                preempt,
            };
            let name = format!("smollm2, {}", cell.name());
            let cluster = cell.setup(256).start(&model).await;
            let before = cluster.counters();
            // Alone is a pass over a few: every prompt is beside others elsewhere.
            let taken = if width == 1 { &cases[..6] } else { &cases[..] };
            run_beside(&cluster, taken, width, &name).await;
            let cold = cluster.counters();
            run_beside(&cluster, &taken[..6], width, &format!("{name}, warm")).await;
            cell.prove(before, cold, taken.len() as u64);
            let warm = cluster.counters();
            let hit = warm.prefix_hits_tokens > cold.prefix_hits_tokens;
            assert!(hit || preempt, "{name}: no cache hit");
            if preempt {
                run_beside(&cluster, &growing[..8], 8, &format!("{name}, growing")).await;
                assert!(cluster.counters().preemptions > 0, "{name}: no preemption");
            }
            cluster.wait_released(Duration::from_secs(2)).await;
            cluster.stop().await;
        }
    }
}
