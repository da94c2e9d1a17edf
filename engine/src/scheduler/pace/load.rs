//! A server under a heavy load, in a time of its own: a target beside fixed batches.
//!
//! 64 clients send one request after another. Every step takes exactly what is foretold
//! of it, so that what is measured is the policy: how many it lets in, and how it cuts
//! prompts.

use super::*;
use crate::config::{Limits, Role};
use crate::scheduler::testing::{Fixed, waiting};
use crate::scheduler::{Plan, plan};

const CLIENTS: u64 = 64;
const PROMPT: u32 = 128;
const SECONDS: f64 = 12.0;
const SETTLED: f64 = 3.0;
/// What a prefill worker takes for a prompt; it computes one after another.
const PREFILL_SECONDS: f64 = 0.015;

/// 2 ms, 0.4 ms a token and 1.5 us a position: about a small model on one core.
struct Device;

impl StepTimes for Device {
    fn add(&self, work: &mut StepWork, row: Row) {
        work.tokens += u64::from(row.tokens);
        work.kv_bytes += u64::from(row.position + row.tokens);
    }

    fn predict(&self, work: &StepWork) -> Duration {
        Duration::from_nanos(2_000_000 + 400_000 * work.tokens + 1_500 * work.kv_bytes)
    }
}

/// Who computes prompts.
#[derive(Clone, Copy, PartialEq)]
enum Shape {
    Mixed,
    Split,
}

/// One stream: its view, when its KV is there, when its last token came.
struct Stream {
    view: SequenceView,
    ready: f64,
    last: Option<f64>,
}

/// What the clients saw.
#[derive(Debug)]
struct Seen {
    p99_ms: f64,
    tokens_per_s: f64,
}

struct Server {
    shape: Shape,
    limits: Limits,
    target: Option<Duration>,
    streams: Vec<Stream>,
    arrivals: u64,
    now: f64,
    prefill_free: f64,
    gaps: Vec<f64>,
}

impl Server {
    fn new(shape: Shape, batch: u32, target: Option<Duration>) -> Self {
        let limits = Limits {
            sequences_max: batch,
            step_tokens_max: batch + 256,
            ..Limits::default()
        };
        let mut server = Self {
            shape,
            limits,
            target,
            streams: Vec::new(),
            arrivals: 0,
            now: 0.0,
            prefill_free: 0.0,
            gaps: Vec::new(),
        };
        for _ in 0..CLIENTS {
            server.arrive();
        }
        server
    }

    /// A request of 32 to 160 tokens, spread evenly and the same in every run.
    fn arrive(&mut self) {
        self.arrivals += 1;
        let spread = self.arrivals.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        let view = SequenceView {
            receives: self.shape == Shape::Split,
            foreseen: 32 + (spread % 129) as u32,
            ..waiting(self.arrivals, PROMPT)
        };
        self.streams.push(Stream {
            view,
            ready: f64::MAX,
            last: None,
        });
    }

    fn plan(&self) -> Plan {
        let views: Vec<_> = self.streams.iter().map(|s| s.view.clone()).collect();
        let accounts = Fixed {
            exclusive: 0,
            charge: vec![0],
        };
        let state = State {
            role: Role::Decode,
            limits: &self.limits,
            block_size: 16,
            sequences: &views,
            available: Some(1 << 20),
            window_free: &[0],
            accounts: &accounts,
            pace: Some(Pace {
                times: &Device,
                target: self.target,
            }),
        };
        plan(&state, Duration::ZERO)
    }

    fn step(&mut self) {
        for stream in &mut self.streams {
            let view = &mut stream.view;
            if view.stage == Stage::Reserved && stream.ready <= self.now {
                // The first token came with the KV. The gap to the second holds what is
                // left of the step under way, whatever the policy, and is not counted.
                (view.stage, view.receives) = (Stage::Running, false);
                (view.computed, view.uncomputed) = (view.computed + view.uncomputed, 1);
                view.blocks = view.computed.div_ceil(16);
                view.foreseen -= 1;
            }
        }
        let plan = self.plan();
        let mut work = StepWork::default();
        for row in &plan.rows {
            let view = &self
                .streams
                .iter()
                .find(|s| s.view.id == row.id)
                .unwrap()
                .view;
            Device.add(&mut work, Row::prefill(view.computed, row.tokens, true));
        }
        if plan.rows.is_empty() {
            let next = self
                .streams
                .iter()
                .map(|s| s.ready)
                .fold(f64::MAX, f64::min);
            assert!(!plan.admit.is_empty() || next < f64::MAX, "it stands still");
            self.now = self.now.max(if plan.admit.is_empty() {
                next
            } else {
                self.now
            });
        } else {
            self.now += Device.predict(&work).as_secs_f64();
        }
        for admission in &plan.admit {
            let own = |s: &&mut Stream| s.view.id == admission.id;
            let stream = self.streams.iter_mut().find(own).unwrap();
            stream.view.credit = admission.credit;
            stream.view.stage = Stage::Running;
            if stream.view.receives {
                stream.view.stage = Stage::Reserved;
                self.prefill_free = self.prefill_free.max(self.now) + PREFILL_SECONDS;
                stream.ready = self.prefill_free;
            }
        }
        for row in &plan.rows {
            let own = |s: &&mut Stream| s.view.id == row.id;
            let stream = self.streams.iter_mut().find(own).unwrap();
            let view = &mut stream.view;
            view.computed += row.tokens;
            view.uncomputed -= row.tokens;
            view.blocks = view.computed.div_ceil(16);
            if view.uncomputed > 0 {
                continue;
            }
            view.uncomputed = 1;
            view.foreseen -= 1;
            if let Some(last) = stream.last.replace(self.now)
                && last > SETTLED
            {
                self.gaps.push(self.now - last);
            }
        }
        for stream in &mut self.streams {
            if stream.view.stage == Stage::Running {
                stream.ready = f64::MAX;
            }
        }
        let before = self.streams.len();
        let ended = |s: &Stream| s.view.stage == Stage::Running && s.view.foreseen == 0;
        self.streams.retain(|stream| !ended(stream));
        for _ in self.streams.len()..before {
            self.arrive();
        }
    }

    fn run(mut self) -> Seen {
        while self.now < SECONDS {
            self.step();
        }
        self.gaps.sort_by(f64::total_cmp);
        let rank = (self.gaps.len() as f64 * 0.99).ceil() as usize;
        Seen {
            p99_ms: self.gaps[rank - 1] * 1e3,
            tokens_per_s: self.gaps.len() as f64 / (self.now - SETTLED),
        }
    }
}

/// The p99 stays within a tenth of the target, and the throughput within a twentieth of
/// the best fixed batch's that keeps the target itself.
#[test]
fn a_target_is_as_good_as_the_best_batch_that_keeps_it() {
    for (shape, target_ms) in [
        (Shape::Split, 8),
        (Shape::Split, 14),
        (Shape::Split, 24),
        (Shape::Mixed, 12),
        (Shape::Mixed, 24),
    ] {
        let target = Duration::from_millis(target_ms);
        let paced = Server::new(shape, 64, Some(target)).run();
        let fixed = (1..=64).filter(|batch| batch % 2 == 0 || *batch == 1);
        let best = fixed
            .map(|batch| (batch, Server::new(shape, batch, None).run()))
            .filter(|(_, seen)| seen.p99_ms <= target_ms as f64)
            .max_by(|(_, a), (_, b)| a.tokens_per_s.total_cmp(&b.tokens_per_s));
        let (batch, best) = best.expect("one stream alone keeps the target");
        println!("{target_ms} ms: {paced:?}; batch {batch}: {best:?}");
        assert!(
            paced.p99_ms <= 1.1 * target_ms as f64,
            "{target_ms}: {paced:?}"
        );
        assert!(
            paced.tokens_per_s >= 0.95 * best.tokens_per_s,
            "{target_ms}: {paced:?} beside batch {batch}: {best:?}"
        );
    }
}
