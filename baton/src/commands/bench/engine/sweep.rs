//! The points of a sweep, and which of them can be measured.

use std::fmt;

use baton_engine::step::BLOCK_NONE;
use baton_proto::Error;
use baton_proto::kv_layout::KvLayout;
use serde::Serialize;

use super::flags::EngineBenchArgs;

/// What kind of step it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    Prefill,
    Decode,
}

/// One kind of step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Point {
    pub phase: Phase,
    pub sequences: u32,
    /// Tokens computed per sequence.
    pub tokens: u32,
    /// Positions each sequence has behind it.
    pub depth: u32,
    /// Whether the step-time model may learn from it.
    pub calibrates: bool,
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.phase {
            Phase::Prefill => write!(f, "prefill {} at {}", self.tokens, self.depth),
            Phase::Decode => write!(f, "decode {} at {}", self.sequences, self.depth),
        }
    }
}

impl Point {
    /// Tokens of the step.
    pub fn step_tokens(&self) -> u32 {
        self.sequences.saturating_mul(self.tokens)
    }

    /// First needed ordinal and number of blocks of one sequence in a KV group.
    fn blocks(&self, layout: &KvLayout, group: usize) -> (u32, u32) {
        let first = layout.first_needed_ordinal(group, self.depth);
        (first, layout.blocks_for(self.depth + self.tokens) - first)
    }

    /// Blocks the point needs in a KV group.
    pub fn blocks_needed(&self, layout: &KvLayout, group: usize) -> u64 {
        u64::from(self.blocks(layout, group).1) * u64::from(self.sequences)
    }

    /// The tables of one of its sequences. No two sequences share a block, so that a step
    /// reads as many bytes as that of a server without shared prefixes.
    pub fn tables(&self, layout: &KvLayout, sequence: u32) -> Vec<Vec<u32>> {
        (0..layout.groups.len())
            .map(|group| {
                let (first, blocks) = self.blocks(layout, group);
                let from = sequence * blocks;
                std::iter::repeat_n(BLOCK_NONE, first as usize)
                    .chain(from..from + blocks)
                    .collect()
            })
            .collect()
    }

    fn kv_bytes(&self, layout: &KvLayout) -> u64 {
        (0..layout.groups.len())
            .map(|group| self.blocks_needed(layout, group) * layout.block_bytes(group) as u64)
            .sum()
    }
}

/// A point that was not measured, and why.
#[derive(Clone, Debug, Serialize)]
pub struct Skipped {
    pub point: Point,
    pub reason: String,
}

/// What is measured and what is not.
pub struct Sweep {
    /// In the order of measuring: prefill first, then decode.
    pub points: Vec<Point>,
    pub skipped: Vec<Skipped>,
}

impl Sweep {
    /// The points that the flags name, apart from those longer than the model's context
    /// or larger than the pool.
    pub fn plan(args: &EngineBenchArgs, layout: &KvLayout, context: u32, pool_bytes: u64) -> Self {
        let prefill = grid(&args.prefill, &args.prefill_depth, |tokens, depth| Point {
            phase: Phase::Prefill,
            sequences: 1,
            tokens,
            depth,
            calibrates: false,
        });
        let decode = grid(&args.batch, &args.context, |sequences, depth| Point {
            phase: Phase::Decode,
            sequences,
            tokens: 1,
            depth,
            calibrates: false,
        });
        let mut sweep = Self {
            points: Vec::new(),
            skipped: Vec::new(),
        };
        for point in prefill.into_iter().chain(decode) {
            let end = u64::from(point.depth) + u64::from(point.tokens);
            let reason = if end > u64::from(context) {
                format!("{end} positions, the model's context has {context}")
            } else {
                let bytes = point.kv_bytes(layout);
                if bytes <= pool_bytes {
                    sweep.points.push(point);
                    continue;
                }
                let mib = |bytes: u64| bytes >> 20;
                format!("{} MiB of KV, the pool has {}", mib(bytes), mib(pool_bytes))
            };
            sweep.skipped.push(Skipped { point, reason });
        }
        sweep
    }

    /// Says why there are no points.
    pub fn nothing_left(&self) -> Error {
        let (field, reason) = match self.skipped.last() {
            Some(skipped) if skipped.reason.contains("pool") => ("kv_pool", &skipped.reason),
            Some(skipped) => ("context", &skipped.reason),
            None => return Error::invalid("batch", "no point to measure"),
        };
        Error::invalid(field, format!("no point can be measured: {reason}"))
    }
}

/// All pairs, each once, with every other one as on a chessboard left to calibrate.
fn grid(a: &[u32], b: &[u32], point: impl Fn(u32, u32) -> Point) -> Vec<Point> {
    let mut points: Vec<Point> = Vec::new();
    for (i, a) in a.iter().enumerate() {
        for (j, b) in b.iter().enumerate() {
            let point = Point {
                calibrates: (i + j) % 2 == 0,
                ..point(*a, *b)
            };
            let same = |p: &Point| {
                (p.sequences, p.tokens, p.depth) == (point.sequences, point.tokens, point.depth)
            };
            if !points.iter().any(same) {
                points.push(point);
            }
        }
    }
    points
}
