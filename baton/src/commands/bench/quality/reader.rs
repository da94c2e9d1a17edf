//! One model with one KV format, reading windows one after another.

use std::sync::Arc;

use anyhow::Context as _;
use baton_engine::decoder::CpuExecutor;
use baton_engine::kv::KvMemory;
use baton_engine::model::Model;
use baton_engine::step::{
    Executor as _, LogitsWanted, PlanRow, RowInput, StepEvent, StepOutput, StepPlan,
};
use baton_kernels::{Isa, Kernels};
use baton_proto::TokenId;
use baton_proto::kv_layout::KvDtype;

use super::{CONTEXT_AT_ONCE, SCORED_AT_ONCE};

const BLOCK_SIZE: u32 = 16;

/// A model and the KV memory of one sequence, which every window overwrites.
pub struct Reader {
    model: Arc<Model>,
    executor: CpuExecutor,
    tables: Vec<Vec<u32>>,
}

impl Reader {
    /// A reader of windows of at most `window` tokens.
    ///
    /// # Errors
    /// Formats the engine does not have, or memory the system refuses.
    pub fn new(
        model: &Arc<Model>,
        dtype: KvDtype,
        window: u32,
        threads: usize,
    ) -> anyhow::Result<Self> {
        let layout = model.kv_layout(BLOCK_SIZE, dtype);
        let (groups, blocks) = (layout.groups.len(), layout.blocks_for(window));
        let memory = KvMemory::allocate(layout, &vec![blocks; groups])?;
        let kernels = Kernels::new(Isa::detect(), threads)?;
        let executor =
            CpuExecutor::new(model, memory, kernels, CONTEXT_AT_ONCE.max(SCORED_AT_ONCE))?;
        Ok(Self {
            model: Arc::clone(model),
            executor,
            tables: vec![(0..blocks).collect(); groups],
        })
    }

    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Computes tokens whose logits nobody asks for.
    ///
    /// # Errors
    /// What the executor refuses.
    pub fn store(&mut self, tokens: &[TokenId], position: usize) -> anyhow::Result<()> {
        let output = self.step(tokens, position, LogitsWanted::None)?;
        self.executor.recycle(output);
        Ok(())
    }

    /// Logits of every token given.
    ///
    /// # Errors
    /// As [`Self::store`].
    pub fn logits(&mut self, tokens: &[TokenId], position: usize) -> anyhow::Result<StepOutput> {
        self.step(tokens, position, LogitsWanted::All)
    }

    /// Takes logits back, so that the next ones need no new memory.
    pub fn recycle(&mut self, output: StepOutput) {
        self.executor.recycle(output);
    }

    fn step(
        &mut self,
        tokens: &[TokenId],
        position: usize,
        logits: LogitsWanted,
    ) -> anyhow::Result<StepOutput> {
        let row = PlanRow {
            input: RowInput::Tokens(tokens.to_vec()),
            position: u32::try_from(position).context("position in a window")?,
            tables: self.tables.clone(),
            logits,
            adapter: None,
        };
        self.executor.submit(&StepPlan { rows: vec![row] })?;
        loop {
            if let StepEvent::Done(output) = self.executor.poll()? {
                return Ok(output);
            }
        }
    }
}
