//! Random arrivals, cancels, pauses, forks, resumes, handoffs and tight pools; every
//! token equals the oracle's, and every block is accounted for after every step.

use std::cell::RefCell;
use std::sync::atomic::Ordering;
use std::time::Duration;

use baton_engine::api::{RequestKey, Submission, Work};
use baton_proto::sampling::SamplingParams;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::fake::ORDINARY;
use crate::machine::Sizes;
use crate::world::World;

/// A request as the generator describes it.
#[derive(Clone, Debug)]
struct Arrival {
    family: u32,
    shared: u32,
    own: u32,
    handoff: bool,
    sampling: SamplingParams,
    forced: Vec<usize>,
    salt: u8,
    use_cache: bool,
    itl_target: Option<Duration>,
    lazy: bool,
    delay: u32,
}

#[derive(Clone, Debug)]
enum Op {
    Arrive(Arrival),
    Rounds(u32),
    /// The request that many before the last one.
    Cancel(u64),
    CancelChoice(u64, u32),
    Pause(u64, u32, bool),
    ClearCache,
}

fn sampling() -> impl Strategy<Value = SamplingParams> {
    (
        prop::sample::select(vec![0.0_f32, 0.0, 0.7, 1.3]),
        prop::sample::select(vec![1_u32, 1, 2, 3, 4]),
        1_u32..28,
        0_u32..6,
        any::<bool>(),
        (any::<u64>(), any::<bool>(), any::<bool>(), 0_u32..6),
    )
        .prop_map(
            |(temperature, n, max_tokens, min_tokens, ignore_eos, (seed, stop, penalty, top))| {
                SamplingParams {
                    temperature,
                    n,
                    max_tokens,
                    min_tokens: min_tokens.min(max_tokens),
                    ignore_eos,
                    seed,
                    stop_token_ids: if stop { vec![4, 9, 13] } else { Vec::new() },
                    repetition_penalty: if penalty { 1.3 } else { 1.0 },
                    frequency_penalty: if penalty { 0.4 } else { 0.0 },
                    top_p: if penalty { 0.9 } else { 1.0 },
                    logprobs: (top > 3).then(|| top - 3),
                    ..SamplingParams::default()
                }
            },
        )
}

fn arrival() -> impl Strategy<Value = Arrival> {
    (
        (0_u32..3, 0_u32..90, 1_u32..40),
        any::<bool>(),
        sampling(),
        prop_oneof![3 => Just(Vec::new()), 1 => prop::collection::vec(0_usize..12, 1..4)],
        (
            0_u8..2,
            prop::bool::weighted(0.8),
            any::<bool>(),
            0_u32..12,
            prop::option::weighted(0.2, itl_target()),
        ),
    )
        .prop_map(
            |(
                (family, shared, own),
                handoff,
                sampling,
                forced,
                (salt, use_cache, lazy, delay, itl_target),
            )| {
                Arrival {
                    family,
                    shared,
                    own,
                    handoff,
                    sampling,
                    forced,
                    salt,
                    use_cache,
                    itl_target,
                    lazy,
                    delay,
                }
            },
        )
}

/// From one that no batch can meet to one that never binds; steps take a second per token.
fn itl_target() -> impl Strategy<Value = Duration> {
    prop::sample::select(vec![500_u64, 1_100, 2_500, 6_000, 20_000, 60_000])
        .prop_map(Duration::from_millis)
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => arrival().prop_map(Op::Arrive),
        8 => (1_u32..12).prop_map(Op::Rounds),
        3 => (0_u64..4).prop_map(Op::Cancel),
        1 => (1_u64..20, 0_u32..4).prop_map(|(key, choice)| Op::CancelChoice(key, choice)),
        1 => (1_u64..20, 0_u32..4, any::<bool>()).prop_map(|(k, c, paused)| Op::Pause(k, c, paused)),
        1 => Just(Op::ClearCache),
    ]
}

fn sizes() -> impl Strategy<Value = Sizes> {
    (
        prop::sample::select(vec![16_u32, 32]),
        prop::sample::select(vec![7_u32, 16, 33, 64]),
        11_u32..28,
        0_u32..12,
        4_u32..9,
        (
            prop::bool::weighted(0.8),
            prop::option::weighted(0.4, itl_target()),
        ),
    )
        .prop_map(
            |(block_size, chunk_tokens, blocks, spare, sequences_max, (prefix_cache, target))| {
                let unit = (32 + chunk_tokens).div_ceil(block_size) + 1;
                Sizes {
                    block_size,
                    full_blocks: blocks * 16 / block_size,
                    window_blocks: unit * 4 + spare,
                    chunk_tokens,
                    sequences_max,
                    prefix_cache,
                    itl_target: target,
                }
            },
        )
}

/// Tokens that depend on the family up to `shared` and on the request after it.
fn prompt(arrival: &Arrival, key: u64) -> Vec<u32> {
    let token = |x: u64| (x.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as u32 % (ORDINARY - 2) + 2;
    let shared =
        (0..arrival.shared).map(|at| token(u64::from(arrival.family) * 1000 + u64::from(at)));
    let own = (0..arrival.own).map(|at| token(1_000_000 + key * 1000 + u64::from(at)));
    shared.chain(own).collect()
}

/// What the runs exercised, to prove that they did.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    preemptions: u64,
    hits: u64,
    copies: u64,
    handoffs: u64,
    late_writes: u64,
    served: u64,
    refused: u64,
    delayed: u64,
    cut: u64,
}

fn play(sizes: &Sizes, prefill: &Sizes, ops: &[Op]) -> Seen {
    let mut world = World::new(sizes, prefill);
    for (at, op) in ops.iter().enumerate() {
        match op {
            Op::Arrive(arrival) => {
                let submission = Submission {
                    key: RequestKey(0),
                    request_id: format!("r{at}").into(),
                    work: if arrival.handoff {
                        Work::Receive
                    } else {
                        Work::Local
                    },
                    prompt: prompt(arrival, at as u64),
                    forced: Vec::new(),
                    sampling: arrival.sampling.clone(),
                    cache_salt: vec![arrival.salt],
                    priority: 0,
                    use_cache: arrival.use_cache,
                    itl_target: arrival.itl_target,
                };
                world.arrive(submission, &arrival.forced, arrival.lazy, arrival.delay);
            }
            Op::Rounds(count) => {
                for _ in 0..*count {
                    world.round();
                }
            }
            Op::Cancel(back) => world.cancel_recent(*back),
            Op::CancelChoice(key, choice) => world.cancel_choice(*key, *choice),
            Op::Pause(key, choice, paused) => world.pause(*key, *choice, *paused),
            Op::ClearCache => {
                world.decode.send(baton_engine::api::Command::ClearCache);
                world.prefill.send(baton_engine::api::Command::ClearCache);
            }
        }
    }
    world.finish();
    for client in world.clients.values() {
        if let Some(rejection) = &client.rejected {
            assert!(
                ["POOL_TOO_SMALL", "INVALID_ARGUMENT"].contains(&rejection.error.reason.as_str()),
                "{rejection:?}"
            );
        }
    }
    let load = world.decode.load();
    let refused = world
        .clients
        .values()
        .filter(|client| client.rejected.is_some())
        .count() as u64;
    Seen {
        preemptions: load.preemptions_total,
        hits: load.prefix_hits_tokens_total + world.prefill.load().prefix_hits_tokens_total,
        copies: world.decode.tally.copies.load(Ordering::Relaxed)
            + world.prefill.tally.copies.load(Ordering::Relaxed),
        handoffs: u64::from(world.handoffs),
        late_writes: u64::from(world.late_writes),
        served: world.clients.len() as u64 - refused,
        refused,
        delayed: load.slo_delayed_total,
        cut: load.slo_cut_steps_total,
    }
}

#[test]
fn every_token_equals_the_oracle_under_any_traffic() {
    let seen = RefCell::new(Seen::default());
    let mut runner = TestRunner::new(Config {
        cases: 250,
        failure_persistence: None,
        ..Config::default()
    });
    let strategy = (sizes(), sizes(), prop::collection::vec(op(), 1..60));
    runner
        .run(&strategy, |(decode, prefill, ops)| {
            let prefill = Sizes {
                block_size: decode.block_size,
                ..prefill
            };
            let unit = (32 + prefill.chunk_tokens).div_ceil(prefill.block_size) + 1;
            let prefill = Sizes {
                window_blocks: unit * 5,
                itl_target: None,
                ..prefill
            };
            let run = play(&decode, &prefill, &ops);
            let mut seen = seen.borrow_mut();
            seen.preemptions += run.preemptions;
            seen.hits += run.hits;
            seen.copies += run.copies;
            seen.handoffs += run.handoffs;
            seen.late_writes += run.late_writes;
            seen.served += run.served;
            seen.refused += run.refused;
            seen.delayed += run.delayed;
            seen.cut += run.cut;
            Ok(())
        })
        .unwrap();
    let seen = seen.into_inner();
    println!("{seen:?}");
    assert!(
        seen.preemptions > 0 && seen.hits > 0 && seen.copies > 0,
        "{seen:?}"
    );
    assert!(seen.handoffs > 0 && seen.late_writes > 0, "{seen:?}");
    assert!(seen.delayed > 0 && seen.cut > 0, "{seen:?}");
    assert!(seen.served > 10 * seen.refused, "{seen:?}");
}
