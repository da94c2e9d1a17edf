//! What a seed means: a cluster, its clients, and everything that goes wrong.
//!
//! All of it is drawn before the run begins, so that a run's own events cannot change
//! what comes later.

use std::time::Duration;

use baton_kv_transfer::codec::Kind;
use baton_kv_transfer::mem::{Direction, Fault as LaneFault, Frame, Hurt};
use baton_proto::TokenId;
use baton_proto::sampling::SamplingParams;
use baton_router::RouterConfig;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng, SeedableRng as _};

use crate::model::{CONTEXT_MAX, EOS, VOCAB};
use crate::process::{Pool, Slot, WorkerPlan};
use crate::wire::Pace;

/// One request of one client.
#[derive(Clone, Debug)]
pub struct RequestPlan {
    pub number: u32,
    /// Whom it asks first.
    pub router: u32,
    /// When it goes on with a stream it gives the ids back that it has.
    pub keeps_ids: bool,
    pub at: Duration,
    pub prompt: Vec<TokenId>,
    pub sampling: SamplingParams,
    /// A token whose text is a stop string.
    pub stop: Option<TokenId>,
    pub use_cache: bool,
    pub tenant: &'static str,
    pub deadline: Duration,
    pub priority: i32,
    /// Its target on the time to the first token.
    pub ttft: Option<Duration>,
    pub cancel: Option<Cancel>,
    /// The client waits this long after each event.
    pub slow: Duration,
}

/// When a client leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancel {
    After(Duration),
    /// When it has so many tokens.
    Tokens(usize),
}

/// Something that goes wrong.
#[derive(Clone, Debug)]
pub struct FaultPlan {
    pub at: Duration,
    pub fault: Fault,
}

/// What goes wrong.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The process dies and another life starts at its address.
    Kill {
        worker: Slot,
        machine: bool,
        back_after: Duration,
    },
    /// The process leaves in order, and another life starts.
    Drain { worker: Slot, back_after: Duration },
    /// Its engine stands still.
    Stall { worker: Slot, time: Duration },
    /// Its device loses a step.
    LoseStep { worker: Slot },
    /// Nothing passes between a router and the worker.
    Dark {
        router: u32,
        worker: Slot,
        time: Duration,
    },
    /// The connection between them breaks.
    Reset { router: u32, worker: Slot },
    /// Everything between them takes longer.
    Slow {
        router: u32,
        worker: Slot,
        pace: Pace,
        time: Duration,
    },
    /// Frames of the lanes to a decode worker are hurt.
    Lane {
        worker: Slot,
        faults: Vec<LaneFault>,
    },
    /// The lanes to a decode worker break.
    LaneCut { worker: Slot },
    /// Nothing passes over the lanes to a decode worker.
    LaneDark { worker: Slot, time: Duration },
    /// A router dies, and another life of it starts.
    KillRouter { router: u32, back_after: Duration },
    /// The membership store cannot be reached.
    StoreDown { time: Duration },
    /// The store has forgotten what watches have seen.
    StoreCompacted,
}

/// All that a seed means.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub seed: u64,
    pub routers: u32,
    pub prefill: u32,
    pub decode: u32,
    pub worker: WorkerPlan,
    pub router: RouterConfig,
    pub pace: Pace,
    pub lease: Duration,
    pub requests: Vec<RequestPlan>,
    pub faults: Vec<FaultPlan>,
    pub mood: Mood,
}

/// How bad it gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    /// Nothing goes wrong, or the membership store alone.
    Quiet,
    /// One worker with a peer dies or drains.
    OneLoss,
    /// Anything goes wrong, at any time and at once; clients hurry, leave and crowd.
    Storm,
}

impl Mood {
    /// Whether a request may fail for want of workers, room or time.
    pub const fn may_fail(self) -> bool {
        matches!(self, Self::Storm)
    }
}

fn between(rng: &mut StdRng, low: u64, high: u64) -> Duration {
    Duration::from_millis(rng.random_range(low..=high))
}

impl Scenario {
    /// Draws the scenario of a seed.
    pub fn new(seed: u64) -> Self {
        let rng = &mut StdRng::seed_from_u64(seed ^ 0x5eed);
        let mood = match rng.random_range(0..10) {
            0 => Mood::Quiet,
            1 => Mood::OneLoss,
            _ => Mood::Storm,
        };
        let calm = !mood.may_fail();
        let decode_least = if mood == Mood::OneLoss { 2 } else { 1 };
        let (prefill, decode) = (rng.random_range(1..=2), rng.random_range(decode_least..=3));
        let routers = if rng.random_bool(0.4) { 2 } else { 1 };
        // Beside the other draws, so that a seed goes on meaning what it meant.
        let own = &mut StdRng::seed_from_u64(seed ^ 0xd4a1);
        let worker = WorkerPlan {
            pool_tokens: rng.random_range(24..=64) * 16,
            chunk_tokens: *[16, 32, 64].choose(rng).expect("not empty"),
            sequences_max: rng.random_range(4..=8),
            queue_requests_max: if calm { 64 } else { rng.random_range(4..=64) },
            prefix_cache: rng.random_bool(0.8),
            step: between(rng, 3, 9),
            token: Duration::from_micros(rng.random_range(20..=300)),
            handoff_deadline: between(rng, 2000, 5000),
            block_sizes: *[(16, 16), (16, 16), (16, 32), (32, 16)]
                .choose(own)
                .expect("not empty"),
            drain_grace: match own.random_bool(0.5) {
                true => Duration::ZERO,
                false => between(own, 0, 2000),
            },
        };
        let router = RouterConfig {
            pending_requests_max: if calm { 1024 } else { rng.random_range(8..=64) },
            local_prefill_tokens_max: *[0, 16, 32].choose(rng).expect("not empty"),
            attempts_max: rng.random_range(3..=6),
            request_timeout_ms: 60_000,
            answer_timeout_ms: 2_000,
            queue_timeout_ms: 20_000,
            prefill_timeout_ms: 10_000,
            handoff_timeout_ms: 5_000,
            stall_timeout_ms: 8_000,
            worker_silence_ms: rng.random_range(800..=1_500),
            worker_lost_ms: rng.random_range(1_500..=4_000),
            slow_client_timeout_ms: 5_000,
            stream_buffer_events: *[4, 64].choose(rng).expect("not empty"),
            drain_ms: 1_000,
            resume_keys: vec!["simulated".repeat(8)],
            ..RouterConfig::default()
        };
        let pace = Pace {
            latency: Duration::from_micros(rng.random_range(100..=3_000)),
            jitter: Duration::from_micros(rng.random_range(0..=2_000)),
        };
        let mut requests = requests(rng, calm, routers);
        for request in &mut requests {
            request.priority = *[0, 0, -3, 5].choose(own).expect("not empty");
            let hurried = !calm && own.random_bool(0.15);
            request.ttft = hurried.then(|| between(own, 20, 1500));
        }
        let last = requests.iter().map(|request| request.at).max();
        let span = last.unwrap_or_default() + Duration::from_millis(500);
        let counts = [routers, prefill, decode];
        let faults = match mood {
            Mood::Quiet => store_faults(rng, span),
            Mood::OneLoss => vec![FaultPlan {
                at: between(rng, 0, span.as_millis() as u64),
                fault: loss(rng, counts),
            }],
            Mood::Storm => faults(rng, counts, span),
        };
        Self {
            seed,
            routers,
            prefill,
            decode,
            worker,
            router,
            pace,
            lease: between(rng, 1000, 5000),
            requests,
            faults,
            mood,
        }
    }

    /// In a line.
    pub fn summary(&self) -> String {
        format!(
            "{}R {}P {}D, {} requests, {} faults, {:?}",
            self.routers,
            self.prefill,
            self.decode,
            self.requests.len(),
            self.faults.len(),
            self.mood
        )
    }
}

fn requests(rng: &mut StdRng, calm: bool, routers: u32) -> Vec<RequestPlan> {
    let ordinary = |rng: &mut StdRng| rng.random_range(EOS + 1..VOCAB);
    let prefixes: Vec<Vec<TokenId>> = (0..3)
        .map(|_| {
            let len = rng.random_range(8..=70);
            (0..len).map(|_| ordinary(rng)).collect()
        })
        .collect();
    let count = rng.random_range(6..=20);
    // Now and then all at once.
    let burst = !calm && rng.random_bool(0.25);
    let gap_ms = rng.random_range(5..=120);
    let mut at = Duration::ZERO;
    (0..count)
        .map(|number| {
            if !burst {
                at += between(rng, 0, 2 * gap_ms);
            }
            let mut prompt: Vec<TokenId> = Vec::new();
            if rng.random_bool(0.7) {
                prompt.extend(prefixes.choose(rng).expect("not empty"));
            }
            let tail = rng.random_range(1..=40);
            prompt.extend((0..tail).map(|_| ordinary(rng)));
            let n = if rng.random_bool(0.15) { 2 } else { 1 };
            let max_tokens = rng.random_range(1..=32);
            assert!(prompt.len() as u32 + max_tokens <= CONTEXT_MAX);
            let hurried = !calm && rng.random_bool(0.1);
            let cancel = (!calm && rng.random_bool(0.15)).then(|| match rng.random_bool(0.5) {
                true => Cancel::After(between(rng, 0, 600)),
                false => Cancel::Tokens(rng.random_range(1..=10)),
            });
            RequestPlan {
                number,
                router: rng.random_range(0..routers),
                keeps_ids: rng.random_bool(0.5),
                at,
                prompt,
                sampling: SamplingParams {
                    temperature: *[0.0, 0.8, 1.0].choose(rng).expect("not empty"),
                    repetition_penalty: *[1.0, 1.2].choose(rng).expect("not empty"),
                    seed: rng.random(),
                    n,
                    max_tokens,
                    min_tokens: rng.random_range(0..=max_tokens.min(4)),
                    ignore_eos: rng.random_bool(0.3),
                    ..SamplingParams::default()
                },
                stop: rng.random_bool(0.2).then(|| ordinary(rng)),
                use_cache: rng.random_bool(0.9),
                tenant: ["a", "b"].choose(rng).expect("not empty"),
                deadline: match hurried {
                    true => between(rng, 30, 2000),
                    false => Duration::from_secs(60),
                },
                priority: 0,
                ttft: None,
                cancel,
                slow: match !calm && rng.random_bool(0.1) {
                    true => between(rng, 5, 150),
                    false => Duration::ZERO,
                },
            }
        })
        .collect()
}

fn faults(rng: &mut StdRng, counts: [u32; 3], span: Duration) -> Vec<FaultPlan> {
    let count = rng.random_range(1..=7);
    let span_ms = span.as_millis() as u64;
    (0..count)
        .map(|_| FaultPlan {
            at: between(rng, 0, span_ms),
            fault: fault(rng, counts),
        })
        .collect()
}

fn fault(rng: &mut StdRng, [routers, prefill, decode]: [u32; 3]) -> Fault {
    let router = rng.random_range(0..routers);
    let decoder = decoder(rng, decode);
    let any = |rng: &mut StdRng| any(rng, prefill, decode);
    match rng.random_range(0..22) {
        0..=4 => kill(rng, any),
        5 => Fault::Drain {
            worker: any(rng),
            back_after: between(rng, 0, 1000),
        },
        6 => Fault::Stall {
            worker: any(rng),
            time: between(rng, 50, 4000),
        },
        7 => Fault::LoseStep { worker: any(rng) },
        8..=9 => Fault::Dark {
            router,
            worker: any(rng),
            time: match rng.random_bool(0.6) {
                true => between(rng, 10, 800),
                false => between(rng, 800, 8000),
            },
        },
        10 => Fault::Reset {
            router,
            worker: any(rng),
        },
        11 => Fault::Slow {
            router,
            worker: any(rng),
            pace: Pace {
                latency: between(rng, 10, 300),
                jitter: between(rng, 0, 200),
            },
            time: between(rng, 100, 3000),
        },
        12..=14 => Fault::Lane {
            worker: decoder,
            faults: (0..rng.random_range(1..=3)).map(|_| lane(rng)).collect(),
        },
        15 => Fault::LaneCut { worker: decoder },
        16..=17 => Fault::LaneDark {
            worker: decoder,
            time: between(rng, 20, 4000),
        },
        18..=19 => Fault::KillRouter {
            router,
            back_after: between(rng, 0, 3000),
        },
        20 => Fault::StoreDown {
            time: between(rng, 100, 8000),
        },
        _ => Fault::StoreCompacted,
    }
}

fn decoder(rng: &mut StdRng, decode: u32) -> Slot {
    Slot {
        pool: Pool::Decode,
        index: rng.random_range(0..decode),
    }
}

fn any(rng: &mut StdRng, prefill: u32, decode: u32) -> Slot {
    match rng.random_bool(0.5) {
        true => Slot {
            pool: Pool::Prefill,
            index: rng.random_range(0..prefill),
        },
        false => decoder(rng, decode),
    }
}

/// Often back so soon that routers have not heard of the death yet.
fn kill(rng: &mut StdRng, any: impl FnOnce(&mut StdRng) -> Slot) -> Fault {
    Fault::Kill {
        worker: any(rng),
        machine: rng.random_bool(0.25),
        back_after: match rng.random_bool(0.4) {
            true => between(rng, 0, 50),
            false => between(rng, 50, 3000),
        },
    }
}

/// The loss of one worker that others can stand in for.
fn loss(rng: &mut StdRng, [_, prefill, decode]: [u32; 3]) -> Fault {
    match rng.random_bool(0.7) {
        true => kill(rng, |rng| any(rng, prefill, decode)),
        false => Fault::Drain {
            worker: any(rng, prefill, decode),
            back_after: between(rng, 0, 1000),
        },
    }
}

fn store_faults(rng: &mut StdRng, span: Duration) -> Vec<FaultPlan> {
    let count = rng.random_range(0..=2);
    let span_ms = span.as_millis() as u64;
    (0..count)
        .map(|_| FaultPlan {
            at: between(rng, 0, span_ms),
            fault: match rng.random_bool(0.7) {
                true => Fault::StoreDown {
                    time: between(rng, 100, 30_000),
                },
                false => Fault::StoreCompacted,
            },
        })
        .collect()
}

fn lane(rng: &mut StdRng) -> LaneFault {
    let soon = rng.random_range(0..40);
    let data = rng.random_bool(0.7);
    let (direction, kinds) = match data || rng.random_bool(0.5) {
        true => (
            Direction::Forth,
            [Kind::Open, Kind::Commit, Kind::Abort, Kind::Ping],
        ),
        false => (
            Direction::Back,
            [Kind::Opened, Kind::Committed, Kind::Ack, Kind::Pong],
        ),
    };
    LaneFault {
        direction,
        frame: match data {
            true => Frame::Data(soon),
            false => Frame::Control(*kinds.choose(rng).expect("not empty"), soon / 10),
        },
        hurt: match rng.random_range(0..9) {
            0 => Hurt::Drop,
            1 => Hurt::Duplicate,
            2 => Hurt::Swap,
            3 => Hurt::Truncate,
            4 => Hurt::CutInside,
            5 => Hurt::CutAfter,
            6 => Hurt::FlipPayload(rng.random()),
            7 => Hurt::FlipHeader(rng.random()),
            _ => Hurt::Echo(rng.random_range(1..20)),
        },
    }
}
