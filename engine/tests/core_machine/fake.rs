//! A deterministic model whose KV is real bytes in the pools, and the same model
//! without pools, steps or scheduling: the oracle.
//!
//! At layer `l` and position `p` the model stores `h(l, p)`, a hash of `h(l-1, p)`
//! and of everything visible before `p` *as it is read from the blocks*. Logits are a
//! hash of the last layer's. So one wrong block, stale slot or missing copy anywhere
//! in a sequence's past changes all of its further tokens.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use baton_engine::api::Submission;
use baton_engine::core::ModelFacts;
use baton_engine::kv::KvMemory;
use baton_engine::sampling::{Draw, Rules, Scratch};
use baton_engine::step::{
    BLOCK_NONE, Error, Executor, LogitsWanted, RowInput, StepEvent, StepId, StepOutput, StepPlan,
};
use baton_engine::step_clock::StepClock;
use baton_engine::step_work::{Row, StepWork};
use baton_proto::NumericsId;
use baton_proto::kv_layout::{KvDtype, KvGroup, KvGroupKind, KvLayout};
use baton_proto::model_card::ModelCard;
use baton_proto::sampling::{FinishReason, SampledToken};

pub const VOCAB: usize = 56;
/// Ids above are padding and must never appear.
pub const TOKENIZER_SIZE: u32 = 50;
pub const EOS: u32 = 1;
/// A prompt with this token makes the model's logits NaN.
pub const NAN_TOKEN: u32 = 49;
/// A prompt with this token makes the executor panic.
pub const PANIC_TOKEN: u32 = 48;
/// A prompt with this token makes the executor lose the step.
pub const ERROR_TOKEN: u32 = 47;
/// Ordinary tokens are below it.
pub const ORDINARY: u32 = 47;
pub const CONTEXT_MAX: u32 = 400;

/// Two full layers and one with a window of 32, in the middle.
pub fn layout(block_size: u32) -> KvLayout {
    KvLayout {
        block_size,
        dtype: KvDtype::F16,
        scale_group: 0,
        kv_heads: 1,
        head_dim: 16,
        layers: 3,
        groups: vec![
            KvGroup {
                kind: KvGroupKind::Full,
                layers: vec![0, 2],
            },
            KvGroup {
                kind: KvGroupKind::SlidingWindow { window: 32 },
                layers: vec![1],
            },
        ],
        numerics: NumericsId([3; 16]),
        origin: None,
        shard: None,
    }
}

pub fn facts(layout: &KvLayout) -> ModelFacts {
    ModelFacts {
        card: ModelCard {
            name: "fake".to_owned(),
            revision: "fake@0".into(),
            architecture: "hash".to_owned(),
            vocab_size: VOCAB as u32,
            tokenizer_size: TOKENIZER_SIZE,
            context_max: CONTEXT_MAX,
            parameters: 1,
            created: 0,
            weight_bytes: 1,
            layout: layout.clone(),
            tokenizer_hash: String::new(),
        },
        eos: vec![EOS],
    }
}

fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.rotate_left(23) ^ b.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

fn embed(token: u32, position: u32) -> u64 {
    mix(u64::from(token) + 1, u64::from(position) + 1)
}

fn layer(index: usize, below: u64, past: impl Iterator<Item = u64>) -> u64 {
    mix(below, past.fold(index as u64, mix))
}

fn write_logits(state: u64, out: &mut Vec<f32>) {
    out.extend((0..VOCAB as u64).map(|id| {
        // -4 .. 4 in steps that f32 holds exactly; ends are a little rarer than others.
        let logit = (mix(state, id) >> 45) as f32 / (1 << 16) as f32 - 4.0;
        match id as u32 {
            EOS => logit - 1.0,
            // The tokens that break the device come from prompts alone.
            ORDINARY..TOKENIZER_SIZE => -1000.0,
            _ => logit,
        }
    }));
}

/// The first visible position before `position` in `group`.
fn visible_from(layout: &KvLayout, group: usize, position: u32) -> u32 {
    match layout.groups[group].kind {
        KvGroupKind::Full => 0,
        KvGroupKind::SlidingWindow { window } => (position + 1).saturating_sub(window),
    }
}

/// What the executor did, readable while the core owns it.
#[derive(Debug, Default)]
pub struct Tally {
    pub steps: AtomicU64,
    pub aborts: AtomicU64,
    pub copies: AtomicU64,
    pub rows: AtomicU64,
}

struct Running {
    plan: StepPlan,
    /// Per row and position: the hidden state.
    states: Vec<Vec<u64>>,
    layer: usize,
}

/// The model over real pools.
pub struct FakeExecutor {
    memory: Arc<KvMemory>,
    tally: Arc<Tally>,
    step: Option<Running>,
    /// Seconds that its clock foretells per token of a step; without it, no clock.
    pub seconds_per_token: Option<u64>,
    /// Sabotage: copies for copy-on-write are counted but not made.
    pub skips_copies: bool,
}

impl FakeExecutor {
    pub fn new(memory: &Arc<KvMemory>, tally: &Arc<Tally>) -> Self {
        Self {
            memory: Arc::clone(memory),
            tally: Arc::clone(tally),
            step: None,
            seconds_per_token: None,
            skips_copies: false,
        }
    }

    fn slot(&self, group: usize, index: usize, table: &[u32], position: u32) -> *mut u64 {
        let block_size = self.memory.layout().block_size;
        let block = table[(position / block_size) as usize];
        assert_ne!(
            block, BLOCK_NONE,
            "position {position} of group {group} was dropped too early"
        );
        let offset = self.memory.extent(group, block, index).offset as usize
            + (position % block_size) as usize * 8;
        let region = self.memory.region(group);
        assert!(offset + 8 <= region.len);
        // SAFETY: the offset was just checked to be inside the region.
        unsafe { region.ptr.as_ptr().add(offset).cast() }
    }
}

/// Every token takes the same time, whatever steps really took.
struct FakeClock {
    seconds_per_token: u64,
}

impl StepClock for FakeClock {
    fn add(&self, work: &mut StepWork, row: Row) {
        work.tokens += u64::from(row.tokens);
    }

    fn predict(&self, work: &StepWork) -> Duration {
        Duration::from_secs(self.seconds_per_token * work.tokens)
    }

    fn observe(&mut self, _work: &StepWork, _took: Duration) {}
}

/// Where all rows asked for no more than the best id, and can have it, it is all they get.
fn give_best_alone(plan: &StepPlan, output: &mut StepOutput) {
    let mut wanted = plan
        .rows
        .iter()
        .filter(|row| row.logits != LogitsWanted::None);
    let Some(LogitsWanted::Best { known }) = wanted.next().map(|row| row.logits) else {
        return;
    };
    let agree = wanted.all(|row| row.logits == LogitsWanted::Best { known });
    if agree && output.logits.iter().all(|x| x.is_finite()) {
        let best = |row: &[f32]| {
            let known = &row[..known as usize];
            (0..known.len()).reduce(|best, id| if known[id] > known[best] { id } else { best })
        };
        output.best = output
            .logits
            .chunks_exact(VOCAB)
            .map(|row| best(row).map(|id| id as u32))
            .collect();
        output.logits.clear();
    }
}

impl Executor for FakeExecutor {
    fn step_clock(&self) -> Option<Box<dyn StepClock>> {
        let seconds_per_token = self.seconds_per_token?;
        Some(Box::new(FakeClock { seconds_per_token }))
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<StepId, Error> {
        assert!(self.step.is_none() && !plan.rows.is_empty());
        let block_size = self.memory.layout().block_size;
        let mut writers: HashMap<(usize, u32), usize> = HashMap::new();
        let mut states = Vec::new();
        for (at, row) in plan.rows.iter().enumerate() {
            let RowInput::Tokens(tokens) = &row.input else {
                panic!("only tokens")
            };
            let end = row.position + tokens.len() as u32;
            assert!(end <= CONTEXT_MAX);
            for (group, table) in row.tables.iter().enumerate() {
                assert_eq!(
                    table.len() as u32,
                    end.div_ceil(block_size),
                    "length of the table"
                );
                for ordinal in row.position / block_size..end.div_ceil(block_size) {
                    let block = table[ordinal as usize];
                    let other = writers.insert((group, block), at);
                    assert!(
                        other.is_none_or(|other| other == at),
                        "two rows write one block"
                    );
                }
            }
            states.push(
                tokens
                    .iter()
                    .zip(row.position..)
                    .map(|(token, p)| embed(*token, p))
                    .collect(),
            );
        }
        for (at, row) in plan.rows.iter().enumerate() {
            for (group, table) in row.tables.iter().enumerate() {
                for block in table.iter().filter(|block| **block != BLOCK_NONE) {
                    let writer = writers.get(&(group, *block));
                    assert!(
                        writer.is_none_or(|w| *w == at),
                        "one row reads what another writes"
                    );
                }
            }
        }
        self.step = Some(Running {
            plan: plan.clone(),
            states,
            layer: 0,
        });
        let number = self.tally.steps.fetch_add(1, Ordering::Relaxed);
        self.tally
            .rows
            .fetch_add(plan.rows.len() as u64, Ordering::Relaxed);
        Ok(StepId(number))
    }

    fn poll(&mut self) -> Result<StepEvent, Error> {
        let mut step = self.step.take().ok_or(Error::NoStep)?;
        let layout = self.memory.layout().clone();
        if step.layer == layout.layers as usize {
            let mut output = StepOutput {
                vocab_size: VOCAB,
                ..Default::default()
            };
            for (row, states) in step.plan.rows.iter().zip(&step.states) {
                let RowInput::Tokens(tokens) = &row.input else {
                    unreachable!()
                };
                if tokens.contains(&PANIC_TOKEN) {
                    panic!("the fake device was asked to panic");
                }
                if tokens.contains(&ERROR_TOKEN) {
                    return Err(Error::Device(
                        "the fake device was asked to fail".to_owned(),
                    ));
                }
                if row.logits != LogitsWanted::None {
                    write_logits(states[states.len() - 1], &mut output.logits);
                    if tokens.contains(&NAN_TOKEN) {
                        let last = output.logits.len() - 1;
                        output.logits[last - 20] = f32::NAN;
                    }
                }
            }
            give_best_alone(&step.plan, &mut output);
            return Ok(StepEvent::Done(output));
        }
        let group = layout
            .groups
            .iter()
            .position(|group| group.layers.contains(&(step.layer as u32)))
            .unwrap();
        let index = layout.groups[group]
            .layers
            .iter()
            .position(|l| *l as usize == step.layer)
            .unwrap();
        for (row, states) in step.plan.rows.iter().zip(&mut step.states) {
            let table = &row.tables[group];
            for (position, state) in (row.position..).zip(states) {
                let past = (visible_from(&layout, group, position)..position).map(|j| {
                    // SAFETY: `slot` checks the bounds; this thread alone uses the pool.
                    unsafe { self.slot(group, index, table, j).read_unaligned() }
                });
                *state = layer(step.layer, *state, past);
                let slot = self.slot(group, index, table, position);
                // SAFETY: as above.
                unsafe { slot.write_unaligned(*state) };
            }
        }
        let done = step.layer as u32;
        step.layer += 1;
        self.step = Some(step);
        Ok(StepEvent::LayerDone { layer: done })
    }

    fn abort(&mut self) {
        self.tally.aborts.fetch_add(1, Ordering::Relaxed);
        self.step = None;
    }

    fn recycle(&mut self, _output: StepOutput) {}

    fn copy_blocks(&mut self, group: usize, pairs: &[(u32, u32)]) -> Result<(), Error> {
        self.tally
            .copies
            .fetch_add(pairs.len() as u64, Ordering::Relaxed);
        if self.skips_copies {
            return Ok(());
        }
        let bytes = self.memory.layout().block_bytes(group);
        let base = self.memory.region(group).ptr.as_ptr();
        for (from, to) in pairs {
            assert_ne!(from, to);
            // SAFETY: `extent` checks that both blocks are inside; they differ.
            unsafe {
                let from = base.add(self.memory.extent(group, *from, 0).offset as usize);
                let to = base.add(self.memory.extent(group, *to, 0).offset as usize);
                std::ptr::copy_nonoverlapping(from, to, bytes);
            }
        }
        Ok(())
    }
}

/// What one choice must look like.
#[derive(Clone, Debug)]
pub struct Expected {
    pub tokens: Vec<SampledToken>,
    pub reason: FinishReason,
}

/// The whole output of every choice of a request without forced tokens.
pub fn oracle(submission: &Submission) -> Vec<Expected> {
    assert!(submission.forced.is_empty());
    (0..submission.sampling.n)
        .map(|choice| oracle_choice(submission, choice))
        .collect()
}

fn oracle_choice(submission: &Submission, choice: u32) -> Expected {
    let layout = layout(16);
    let prompt = &submission.prompt;
    let rules = Rules::new(
        &submission.sampling,
        &[EOS],
        TOKENIZER_SIZE,
        prompt.len() as u32,
    );
    let mut history = rules.replay(prompt, &[]);
    let mut stored: Vec<Vec<u64>> = vec![Vec::new(); layout.layers as usize];
    let mut tokens: Vec<SampledToken> = Vec::new();
    let mut logits = Vec::new();
    let mut scratch = Scratch::default();
    for position in 0.. {
        let token = match prompt.get(position) {
            Some(token) => *token,
            None => tokens[position - prompt.len()].id,
        };
        let mut state = embed(token, position as u32);
        for (index, stored) in stored.iter_mut().enumerate() {
            let group = usize::from(index == 1);
            let from = visible_from(&layout, group, position as u32) as usize;
            state = layer(index, state, stored[from..].iter().copied());
            stored.push(state);
        }
        if position + 1 < prompt.len() {
            continue;
        }
        logits.clear();
        write_logits(state, &mut logits);
        let index = tokens.len() as u32;
        let drawn = rules
            .draw(Draw { choice, index }, &history, &logits, &mut scratch)
            .unwrap();
        history.push(drawn.id);
        let reason = rules.end_after(drawn.id, index);
        tokens.push(drawn);
        if let Some(reason) = reason {
            return Expected { tokens, reason };
        }
    }
    unreachable!("max_tokens ends every choice")
}
