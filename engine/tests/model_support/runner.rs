//! What the model tests share: finding models, and running token ids through an executor.

#![allow(dead_code)]

use std::path::PathBuf;
use std::sync::Arc;

use baton_engine::backend::CpuBackend;
use baton_engine::decoder::{CpuExecutor, Pools};
use baton_engine::kv::KvMemory;
use baton_engine::model::{LoadOptions, Model, ModelConfig, WeightFormat};
use baton_engine::step::{
    BLOCK_NONE, Executor, LogitsWanted, PlanRow, RowInput, StepEvent, StepPlan,
};
use baton_kernels::{Isa, Kernels};
use baton_proto::kv_layout::{KvDtype, KvGroupKind};

/// A committed fixture.
pub fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fixtures")
        .join(name)
}

/// A downloaded model, or `None` after saying that the test skips it.
pub fn real_model(file: &str) -> Option<PathBuf> {
    let folder = match std::env::var_os("BATON_TEST_MODELS") {
        Some(folder) => PathBuf::from(folder),
        None => PathBuf::from(std::env::var_os("HOME")?).join(".cache/baton/models"),
    };
    let path = folder.join(file);
    if path.is_file() {
        return Some(path);
    }
    println!(
        "skipped: `{}` is not there; set BATON_TEST_MODELS to its folder",
        path.display()
    );
    None
}

pub fn open(path: &std::path::Path) -> Arc<Model> {
    open_as(path, WeightFormat::Keep)
}

pub fn open_as(path: &std::path::Path, weights: WeightFormat) -> Arc<Model> {
    let options = LoadOptions {
        context_max: Some(4096),
        weights,
        ..LoadOptions::default()
    };
    Model::open(path, &options, &mut |_, _| {}).unwrap_or_else(|error| panic!("{error}"))
}

/// How a test lays out its pools.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub block_size: u32,
    pub dtype: KvDtype,
    pub isa: Isa,
    pub threads: usize,
    /// Tokens of all sequences together.
    pub tokens: u32,
    pub step_tokens_max: usize,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            block_size: 16,
            dtype: KvDtype::F32,
            isa: Isa::detect(),
            threads: 2,
            tokens: 1024,
            step_tokens_max: 1024,
        }
    }
}

/// An executor and a bump allocator of blocks.
pub struct Runner {
    pub model: Arc<Model>,
    pub executor: CpuExecutor,
    pub memory: Arc<KvMemory>,
    block_size: u32,
    next_block: Vec<u32>,
}

/// One sequence: its tokens so far computed and its tables.
#[derive(Clone, Debug, Default)]
pub struct Sequence {
    pub computed: u32,
    pub tables: Vec<Vec<u32>>,
}

impl Runner {
    pub fn new(model: &Arc<Model>, setup: Setup) -> Self {
        let memory = memory(model, setup);
        let kernels = Kernels::new(setup.isa, setup.threads).unwrap();
        let executor =
            CpuExecutor::new(model, Arc::clone(&memory), kernels, setup.step_tokens_max).unwrap();
        Self::with_executor(model, memory, executor)
    }

    /// A runner that computes something else than the model's files say. The KV groups
    /// must stay as many.
    pub fn with_config(model: &Arc<Model>, config: ModelConfig) -> Self {
        let setup = Setup::default();
        let memory = memory(model, setup);
        let kernels = Kernels::new(setup.isa, setup.threads).unwrap();
        let pools = Pools {
            block_size: setup.block_size,
            position_bytes: memory.layout().layer_bytes() / setup.block_size as usize,
            blocks: (0..memory.groups())
                .map(|group| memory.blocks(group))
                .collect(),
        };
        let executor = CpuExecutor::with_backend(
            config,
            Arc::clone(model.weights()),
            CpuBackend::new(kernels, Arc::clone(&memory)),
            pools,
            setup.step_tokens_max,
        );
        Self::with_executor(model, memory, executor)
    }

    fn with_executor(model: &Arc<Model>, memory: Arc<KvMemory>, executor: CpuExecutor) -> Self {
        Self {
            model: Arc::clone(model),
            executor,
            block_size: memory.layout().block_size,
            next_block: vec![0; memory.groups()],
            memory,
        }
    }

    pub fn sequence(&self) -> Sequence {
        Sequence {
            computed: 0,
            tables: vec![Vec::new(); self.next_block.len()],
        }
    }

    /// A plan row that continues a sequence; allocates its blocks and forgets those
    /// that left a window.
    pub fn row(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        logits: LogitsWanted,
    ) -> PlanRow {
        let end = sequence.computed + tokens.len() as u32;
        let layout = self.memory.layout().clone();
        for (group, table) in sequence.tables.iter_mut().enumerate() {
            while (table.len() as u32) < end.div_ceil(self.block_size) {
                // Backwards through the pool, so that ordinal and block id differ.
                let blocks = self.memory.blocks(group);
                table.push(blocks - 1 - self.next_block[group]);
                self.next_block[group] += 1;
            }
            if let KvGroupKind::SlidingWindow { .. } = layout.groups[group].kind {
                let first = layout.first_needed_ordinal(group, sequence.computed) as usize;
                table[..first].fill(BLOCK_NONE);
            }
        }
        let row = PlanRow {
            input: RowInput::Tokens(tokens.to_vec()),
            position: sequence.computed,
            tables: sequence.tables.clone(),
            logits,
            adapter: None,
        };
        sequence.computed = end;
        row
    }

    /// Runs a plan to its end; one vector of logits per wanted row.
    pub fn run(&mut self, rows: Vec<PlanRow>) -> Vec<Vec<f32>> {
        self.executor.submit(&StepPlan { rows }).unwrap();
        let layers = self.model.config().layers.len() as u32;
        for expected in 0..layers {
            match self.executor.poll().unwrap() {
                StepEvent::LayerDone { layer } => assert_eq!(layer, expected),
                StepEvent::Done(_) => panic!("done after {expected} of {layers} layers"),
            }
        }
        match self.executor.poll().unwrap() {
            StepEvent::Done(output) => {
                let logits = output
                    .logits
                    .chunks_exact(output.vocab_size)
                    .map(<[f32]>::to_vec)
                    .collect();
                self.executor.recycle(output);
                logits
            }
            StepEvent::LayerDone { layer } => panic!("layer {layer} of {layers}"),
        }
    }

    /// Computes a new sequence in chunks; logits of its last position.
    pub fn prefill(&mut self, tokens: &[u32], chunk: usize) -> (Sequence, Vec<f32>) {
        let mut sequence = self.sequence();
        let mut logits = Vec::new();
        for part in tokens.chunks(chunk) {
            let row = self.row(&mut sequence, part, LogitsWanted::Last);
            logits = self.run(vec![row]);
        }
        (sequence, logits.pop().unwrap())
    }

    /// One greedy decode step.
    pub fn decode(&mut self, sequence: &mut Sequence, token: u32) -> Vec<f32> {
        let row = self.row(sequence, &[token], LogitsWanted::Last);
        self.run(vec![row]).pop().unwrap()
    }
}

fn memory(model: &Model, setup: Setup) -> Arc<KvMemory> {
    let layout = model.kv_layout(setup.block_size, setup.dtype);
    // Every sequence of a test may end in a block that is not full.
    let blocks = setup.tokens.div_ceil(setup.block_size) + 64;
    let groups = layout.groups.len();
    let memory = KvMemory::allocate(layout, &vec![blocks; groups]).unwrap();
    for group in 0..groups {
        poison(&memory, group);
    }
    memory
}

/// Fills a pool with NaN of every dtype, so that reading a slot nobody wrote shows.
#[allow(unsafe_code)]
fn poison(memory: &KvMemory, group: usize) {
    let region = memory.region(group);
    // SAFETY: the region is `len` bytes long, lives as long as `memory`, and nobody
    // else has seen it yet.
    unsafe { region.ptr.as_ptr().write_bytes(0xFF, region.len) };
}

/// The first of the largest.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, value) in logits.iter().enumerate() {
        if *value > logits[best] {
            best = id;
        }
    }
    best as u32
}
