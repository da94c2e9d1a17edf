//! Ten times what a cluster can take, in virtual time: it goes on doing what it can, tells
//! the others when to come back, and is itself again at once.
//!
//! Seen to fail: with requests let in whatever their target, up to the queues' bounds: a
//! seventh of the goodput is left then.

use std::time::Duration;

use baton_proto::sampling::SamplingParams;
use baton_simulator::client::{Ending, Served};
use baton_simulator::scenario::{Mood, RequestPlan, Scenario};
use baton_simulator::{Run, run_scenario};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

/// What each request expects of its first token.
const TARGET: Duration = Duration::from_millis(500);
const SECOND: Duration = Duration::from_secs(1);

/// A cluster of one prefill and two decode workers, without faults.
fn quiet(seed: u64, requests: Vec<RequestPlan>) -> Scenario {
    // Any storm: only in one may requests be refused.
    let mut scenario = (0..)
        .map(|n| Scenario::new(seed * 1000 + n))
        .find(|scenario| scenario.mood == Mood::Storm)
        .expect("most seeds are storms");
    scenario.routers = 1;
    scenario.prefill = 1;
    scenario.decode = 2;
    scenario.worker.pool_tokens = 64 * 16;
    scenario.worker.chunk_tokens = 64;
    scenario.worker.sequences_max = 8;
    scenario.worker.queue_requests_max = 64;
    scenario.worker.prefix_cache = false;
    scenario.worker.block_sizes = (16, 16);
    scenario.worker.step = Duration::from_millis(5);
    scenario.worker.token = Duration::from_micros(100);
    scenario.router.local_prefill_tokens_max = 0;
    scenario.router.pending_requests_max = 1024;
    scenario.faults = Vec::new();
    scenario.requests = requests;
    scenario
}

/// Requests that come at random, so many a second in each span.
fn arrivals(seed: u64, spans: &[(Duration, f64)], ttft: Option<Duration>) -> Vec<RequestPlan> {
    let rng = &mut StdRng::seed_from_u64(seed);
    let (mut at, mut begin, mut plans) = (Duration::ZERO, Duration::ZERO, Vec::new());
    for (length, rate) in spans {
        let end = begin + *length;
        loop {
            let gap = -rng.random_range(1e-9_f64..1.0).ln() / rate;
            at += Duration::from_secs_f64(gap);
            if at >= end {
                break;
            }
            let length = rng.random_range(40..160);
            plans.push(RequestPlan {
                number: plans.len() as u32,
                router: 0,
                keeps_ids: true,
                at,
                prompt: (0..length).map(|_| rng.random_range(2..64)).collect(),
                sampling: SamplingParams {
                    seed: rng.random(),
                    max_tokens: rng.random_range(1..=24),
                    ignore_eos: true,
                    ..SamplingParams::default()
                },
                stop: None,
                use_cache: true,
                tenant: "a",
                deadline: Duration::from_secs(60),
                priority: 0,
                ttft,
                cancel: None,
                slow: Duration::ZERO,
            });
        }
        (at, begin) = (end, end);
    }
    plans
}

fn whole(scenario: Scenario) -> Run {
    let run = run_scenario(scenario, None);
    assert!(run.violations.is_empty(), "{:?}", run.violations);
    run
}

/// Requests, and their prompts' tokens: a cluster that takes short ones only does not do more.
#[derive(Clone, Copy, Debug, Default)]
struct Amount {
    requests: f64,
    tokens: f64,
}

impl Amount {
    fn per_second(run: &Run, time: Duration, counts: impl Fn(&Served) -> bool) -> Self {
        let mut amount = Self::default();
        for served in run.served.iter().filter(|served| counts(served)) {
            let plan = &run.scenario.requests[served.number as usize];
            amount.requests += 1.0 / time.as_secs_f64();
            amount.tokens += plan.prompt.len() as f64 / time.as_secs_f64();
        }
        amount
    }
}

/// Whether a request got its first token in time, and its end.
fn is_good(served: &Served) -> bool {
    served.ending == Ending::Completed && served.first.is_some_and(|first| first <= TARGET)
}

/// First tokens a second while there is always something to do, and nobody is refused.
fn capacity(seed: u64) -> Amount {
    let run = whole(quiet(seed, arrivals(seed, &[(4 * SECOND, 100.0)], None)));
    let (from, to) = (SECOND, 4 * SECOND);
    Amount::per_second(&run, to - from, |served| {
        served
            .first
            .is_some_and(|first| (from..to).contains(&(served.at + first)))
    })
}

#[test]
fn ten_times_the_load_costs_no_goodput_and_is_forgotten_at_once() {
    for seed in [1, 2] {
        let capacity = capacity(seed);
        // Two seconds to learn in, three of too much, and what comes after.
        let (flood, after) = (2 * SECOND, 5 * SECOND);
        let spans = [
            (2 * SECOND, capacity.requests / 2.0),
            (3 * SECOND, capacity.requests * 10.0),
            (4 * SECOND, capacity.requests / 2.0),
        ];
        let requests = arrivals(seed + 50, &spans, Some(TARGET));
        let run = whole(quiet(seed, requests));
        let goodput = Amount::per_second(&run, after - flood, |served| {
            (flood..after).contains(&served.at) && is_good(served)
        });
        let in_flood = run
            .served
            .iter()
            .filter(|served| (flood..after).contains(&served.at));
        let late = in_flood
            .clone()
            .filter(|served| served.first.is_some_and(|first| first > TARGET))
            .count();
        let refused: Vec<&Served> = in_flood
            .filter(|served| served.ending == Ending::Refused)
            .collect();
        println!(
            "seed {seed}: capacity {capacity:.1?}/s, goodput {goodput:.1?}/s, {late} late, {} refused",
            refused.len()
        );
        assert!(goodput.requests >= 0.9 * capacity.requests, "{goodput:?}");
        assert!(goodput.tokens >= 0.9 * capacity.tokens, "{goodput:?}");
        assert!(
            refused.iter().all(|served| served.retry_after.is_some()),
            "a refusal says when to come back"
        );
        // At once: nobody is kept to be refused later.
        assert!(refused.iter().all(|served| served.first.is_none()));

        // Two seconds after the flood it is as if nothing had been.
        let calm = after + 2 * SECOND;
        let sent: Vec<&Served> = run.served.iter().filter(|s| s.at >= calm).collect();
        assert!(sent.len() > 20, "{}", sent.len());
        assert!(sent.iter().all(|served| is_good(served)), "seed {seed}");
    }
}
