//! The plan and the result of one engine step, as plain data.
//!
//! A plan is serialisable and complete: every rank of a tensor-parallel group
//! would run the same one. A row is a run of consecutive positions of one
//! sequence; a step holds rows of many sequences, prefill chunks and single
//! decode tokens alike, because a row's arithmetic does not depend on its neighbours.
//!
//! The executor contract: `submit` takes a plan, `poll` advances it and reports
//! `LayerDone` once per layer in ascending order, then `Done`. Between two polls
//! the caller may `abort` the step; nothing of it is then used.

use serde::{Deserialize, Serialize};

use baton_proto::TokenId;

use crate::step_clock::StepClock;
use crate::step_work::StepWork;

/// Names a step of one executor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StepId(pub u64);

/// Where a row's input tokens come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RowInput {
    /// Known tokens, at least one.
    Tokens(Vec<TokenId>),
    /// The token drawn for a row of the step before. Refused by executors that do
    /// not pipeline steps.
    OutputOf { row: u32 },
}

/// Which positions of a row need logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LogitsWanted {
    None,
    Last,
    All,
    /// Of the last position, only which of the first `known` ids has the highest logit.
    /// An executor may give the logits instead.
    Best {
        known: u32,
    },
}

/// A run of consecutive positions of one sequence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanRow {
    pub input: RowInput,
    /// Absolute position of the first input token.
    pub position: u32,
    /// Per KV group: block id of every ordinal up to the last position written.
    /// Ordinals that left a sliding window are `BLOCK_NONE` and never touched.
    pub tables: Vec<Vec<u32>>,
    pub logits: LogitsWanted,
    /// Adapter to apply; only `None` is accepted until adapters exist.
    pub adapter: Option<u32>,
}

/// A table entry that holds no block.
pub const BLOCK_NONE: u32 = u32::MAX;

/// What one step computes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepPlan {
    pub rows: Vec<PlanRow>,
}

/// What a step says while it runs.
#[derive(Debug)]
pub enum StepEvent {
    /// K and V of this model layer are stored for every row.
    LayerDone { layer: u32 },
    /// The step is over.
    Done(StepOutput),
}

/// Logits of the rows that asked for them, or the best ids alone.
#[derive(Debug, Default)]
pub struct StepOutput {
    /// Where it is not empty, there are no logits: one entry per row that asked for its
    /// best id, in plan order. That is where all rows that asked for anything asked for
    /// the best of as many ids, and all their logits are finite. The entry is the lowest
    /// id of the highest logit, or nothing where no id is known.
    pub best: Vec<Option<TokenId>>,
    /// `[rows that asked, in plan order, positions ascending][vocab_size]`, f32.
    pub logits: Vec<f32>,
    /// Width of one logits row.
    pub vocab_size: usize,
    /// What the step asked of the device.
    pub work: StepWork,
}

/// Runs plans on one device.
pub trait Executor: Send {
    /// What foretells its steps; `None` where nothing does, and then no target on the
    /// gap between tokens can be kept.
    fn step_clock(&self) -> Option<Box<dyn StepClock>> {
        None
    }

    /// Starts `plan`. One step at a time.
    ///
    /// # Errors
    /// A plan that names positions past the context, blocks outside the pool or an
    /// unsupported row is refused before anything is computed.
    fn submit(&mut self, plan: &StepPlan) -> Result<StepId, Error>;

    /// Advances the step by one layer (or waits for the device to).
    ///
    /// # Errors
    /// The step is lost; its sequences must be recomputed.
    fn poll(&mut self) -> Result<StepEvent, Error>;

    /// Drops the step in flight.
    fn abort(&mut self);

    /// Takes a finished output's buffer back, so that the next step allocates nothing.
    fn recycle(&mut self, output: StepOutput);

    /// Copies whole blocks inside one group's pool, for copy-on-write: (from, to).
    ///
    /// # Errors
    /// A block id outside the pool.
    fn copy_blocks(&mut self, group: usize, pairs: &[(u32, u32)]) -> Result<(), Error>;
}

/// Why a step could not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("step plan row {row}: `{field}` {message}")]
    InvalidPlan {
        row: usize,
        field: &'static str,
        message: String,
    },
    #[error("no step is in flight")]
    NoStep,
    #[error("device failed: {0}")]
    Device(String),
}
