//! An executor with filled KV, driven step by step.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use baton_engine::decoder::CpuExecutor;
use baton_engine::device::DeviceThreads;
use baton_engine::kv::{KvMemory, PoolSharing};
use baton_engine::model::Model;
use baton_engine::step::{Executor as _, LogitsWanted, PlanRow, RowInput, StepEvent, StepPlan};
use baton_engine::step_work::StepWork;
use baton_kernels::Kernels;
use baton_proto::kv_layout::KvLayout;

use super::sweep::{Phase, Point, Sweep};

/// Short steps are repeated until this much has been measured.
const MEASURED_SECONDS: f64 = 0.3;
const STEPS_MAX: usize = 200;

/// Tokens computed in earnest to fill the KV pools with; the rest are copies of them.
const FILL_TOKENS: u32 = 256;

/// What was measured at one point.
pub struct Measured {
    pub point: Point,
    pub work: StepWork,
    /// Times of single steps, in the order they ran.
    pub seconds: Vec<f64>,
}

impl Measured {
    /// The median time of a step.
    pub fn median(&self) -> f64 {
        let mut sorted = self.seconds.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    }
}

/// The engine without what plans and samples.
pub struct Rig {
    executor: CpuExecutor,
    layout: KvLayout,
    memory: Arc<KvMemory>,
    vocab: u32,
}

impl Rig {
    /// Maps pools that hold any one point of the sweep and fills them: pages that nobody
    /// wrote would all be one page of zeros, read from a cache.
    ///
    /// # Errors
    /// Memory or threads that cannot be had.
    pub fn new(
        model: &Arc<Model>,
        layout: KvLayout,
        threads: &DeviceThreads,
        sweep: &Sweep,
        sharing: PoolSharing,
    ) -> anyhow::Result<Self> {
        let blocks: Vec<u32> = (0..layout.groups.len())
            .map(|group| {
                let needed = |point: &Point| point.blocks_needed(&layout, group);
                let most = sweep.points.iter().map(needed).max().unwrap_or(1);
                u32::try_from(most).context("the KV pool has too many blocks")
            })
            .collect::<anyhow::Result<_>>()?;
        let memory = KvMemory::allocate_as(layout.clone(), &blocks, sharing);
        let memory = memory.context("`--kv-pool`")?;
        let kernels = Kernels::new(threads.isa, threads.threads).context("`--threads`")?;
        let room = blocks.iter().min().copied().unwrap_or(1) * layout.block_size;
        let fill = FILL_TOKENS.min(room).min(model.context_max());
        let step_tokens = sweep.points.iter().map(Point::step_tokens).max();
        let step_tokens_max = step_tokens.unwrap_or(1).max(fill) as usize;
        let executor = CpuExecutor::new(model, Arc::clone(&memory), kernels, step_tokens_max)?;
        let mut rig = Self {
            executor,
            layout,
            memory,
            vocab: model.vocab_size() as u32,
        };
        rig.fill(fill, &blocks)?;
        Ok(rig)
    }

    /// Bytes of the KV pools.
    pub fn kv_bytes(&self) -> u64 {
        self.memory.bytes() as u64
    }

    fn fill(&mut self, tokens: u32, blocks: &[u32]) -> anyhow::Result<()> {
        let point = Point {
            phase: Phase::Prefill,
            sequences: 1,
            tokens,
            depth: 0,
            calibrates: false,
        };
        let plan = self.plan(&point);
        self.step(&plan)?;
        let filled = self.layout.blocks_for(tokens);
        for (group, blocks) in blocks.iter().enumerate() {
            let pairs: Vec<(u32, u32)> = (filled..*blocks).map(|to| (to % filled, to)).collect();
            self.executor.copy_blocks(group, &pairs)?;
        }
        Ok(())
    }

    /// Times steps of a point: `rounds` at least, unless they take longer than `seconds_max`.
    ///
    /// # Errors
    /// A step that the executor refuses.
    pub fn measure(
        &mut self,
        point: &Point,
        rounds: u32,
        seconds_max: f64,
    ) -> anyhow::Result<Measured> {
        let plan = self.plan(point);
        let (work, first) = self.step(&plan)?;
        // The first step warms caches and scratch memory up. One so long that another would
        // exceed the point's time counts itself; warming up is nothing to it.
        let mut seconds = Vec::new();
        let mut total = first;
        if 2.0 * first > seconds_max {
            seconds.push(first);
        }
        let mut measured = 0.0;
        while seconds.is_empty() || total < seconds_max {
            let enough = seconds.len() >= rounds as usize && measured >= MEASURED_SECONDS;
            if enough || seconds.len() >= STEPS_MAX.max(rounds as usize) {
                break;
            }
            let (_, took) = self.step(&plan)?;
            seconds.push(took);
            measured += took;
            total += took;
        }
        Ok(Measured {
            point: *point,
            work,
            seconds,
        })
    }

    fn plan(&self, point: &Point) -> StepPlan {
        let token = |i: u32| i.wrapping_mul(7919).wrapping_add(1000) % self.vocab;
        let rows = (0..point.sequences)
            .map(|sequence| PlanRow {
                input: RowInput::Tokens(
                    (0..point.tokens)
                        .map(|i| token(sequence.wrapping_mul(131).wrapping_add(i)))
                        .collect(),
                ),
                position: point.depth,
                tables: point.tables(&self.layout, sequence),
                logits: LogitsWanted::Last,
                adapter: None,
            })
            .collect();
        StepPlan { rows }
    }

    /// Runs one step; its work and its seconds.
    fn step(&mut self, plan: &StepPlan) -> anyhow::Result<(StepWork, f64)> {
        let start = Instant::now();
        self.executor.submit(plan)?;
        loop {
            if let StepEvent::Done(output) = self.executor.poll()? {
                let seconds = start.elapsed().as_secs_f64();
                let work = output.work;
                self.executor.recycle(output);
                return Ok((work, seconds));
            }
        }
    }
}
