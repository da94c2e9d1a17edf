//! The simulated model: its next token is a hash of the KV that is really held.
//!
//! At layer `l` and position `p` it stores `h(l, p)` in the blocks that the step's tables
//! name: a hash of `h(l-1, p)` and of everything visible before `p` *as it is read back
//! from the blocks*. Logits are a hash of the last layer's. So one wrong, stale, foreign
//! or half written block anywhere in a sequence's past changes all of its further tokens.
//! Sampling, end tokens and `max_tokens` are the engine's own. [`expected`] is the same
//! model without blocks, steps or scheduling.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use baton_engine::core::ModelFacts;
use baton_engine::kv::KvMemory;
use baton_engine::sampling::{Draw, Rules, Scratch};
use baton_engine::step::{
    BLOCK_NONE, Error, Executor, LogitsWanted, RowInput, StepEvent, StepId, StepOutput, StepPlan,
};
use baton_proto::kv_layout::{KvDtype, KvGroup, KvGroupKind, KvLayout};
use baton_proto::model_card::ModelCard;
use baton_proto::sampling::{FinishReason, SamplingParams};
use baton_proto::tokenizer_spec::{TokenEntry, TokenKind, TokenizerModel, TokenizerSpec};
use baton_proto::{NumericsId, TokenId};

/// Ids of the model.
pub const VOCAB: u32 = 64;
/// The one that ends a sequence.
pub const EOS: TokenId = 1;
/// Longest prompt and output together.
pub const CONTEXT_MAX: u32 = 256;
/// Layers, of which the middle one has a window.
pub const LAYERS: u32 = 3;

/// Bytes of K of one token in one layer: 16 halves. The state is in the first ones, where
/// a block of another size has it as well.
const K_BYTES: usize = 32;

/// Two full layers, and one with a window of 32 between them, in blocks of `block_size`.
pub fn layout(block_size: u32) -> KvLayout {
    KvLayout {
        block_size,
        dtype: KvDtype::F16,
        scale_group: 0,
        kv_heads: 1,
        head_dim: 16,
        layers: LAYERS,
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
        numerics: NumericsId([7; 16]),
        origin: None,
        shard: None,
    }
}

/// What a token is in text. No token's text is found across others.
pub fn token_text(id: TokenId) -> String {
    match id {
        0 | EOS => String::new(),
        id => format!("<{id}>"),
    }
}

/// The tokenizer that says so.
pub fn tokenizer_json() -> Arc<[u8]> {
    let entry = |id: u32| {
        let (text, kind) = match id {
            0 => ("<unk>".to_owned(), TokenKind::Unknown),
            EOS => ("</s>".to_owned(), TokenKind::Control),
            id => (token_text(id), TokenKind::UserDefined),
        };
        TokenEntry {
            text,
            score: 0.0,
            kind,
        }
    };
    let spec = TokenizerSpec {
        model: TokenizerModel::SentencePiece {
            add_space_prefix: false,
        },
        tokens: (0..VOCAB).map(entry).collect(),
        bos: None,
        eos: vec![EOS],
        unknown: Some(0),
        padding: None,
        add_bos: false,
        add_eos: false,
        chat_templates: Vec::new(),
        template_tokens: None,
    };
    serde_json::to_vec(&spec)
        .expect("plain structs always serialise")
        .into()
}

/// What a core must know of it.
pub fn facts(tokenizer_json: &[u8], block_size: u32) -> ModelFacts {
    ModelFacts {
        card: ModelCard {
            name: "hash".to_owned(),
            revision: "hash@1".into(),
            architecture: "hash".to_owned(),
            vocab_size: VOCAB,
            tokenizer_size: VOCAB,
            context_max: CONTEXT_MAX,
            parameters: 1,
            created: 0,
            weight_bytes: 1,
            layout: layout(block_size),
            tokenizer_hash: blake3::hash(tokenizer_json).to_hex().to_string(),
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

fn embed(token: TokenId, position: u32) -> u64 {
    mix(u64::from(token) + 1, u64::from(position) + 1)
}

fn layer(index: u32, below: u64, past: impl Iterator<Item = u64>) -> u64 {
    mix(below, past.fold(u64::from(index), mix))
}

fn write_logits(state: u64, out: &mut Vec<f32>) {
    out.extend((0..VOCAB).map(|id| {
        // -4 .. 4 in steps that f32 holds exactly; ends are rarer than other tokens.
        let logit = (mix(state, u64::from(id)) >> 45) as f32 / (1 << 16) as f32 - 4.0;
        if id == EOS { logit - 1.5 } else { logit }
    }));
}

/// The first position before `position` that a group sees.
fn visible_from(kind: KvGroupKind, position: u32) -> u32 {
    match kind {
        KvGroupKind::Full => 0,
        KvGroupKind::SlidingWindow { window } => (position + 1).saturating_sub(window),
    }
}

/// What the clock of a worker asks, and what a fault does to its device.
#[derive(Debug, Default)]
pub struct Device {
    /// Tokens of the step in flight.
    pub step_tokens: AtomicU32,
    /// The next step is lost.
    pub loses_step: AtomicBool,
}

struct Running {
    plan: StepPlan,
    /// Per row and position: the hidden state.
    states: Vec<Vec<u64>>,
    layer: u32,
}

/// The model over real pools.
pub struct HashExecutor {
    memory: Arc<KvMemory>,
    device: Arc<Device>,
    step: Option<Running>,
    steps: u64,
}

impl HashExecutor {
    /// Over the pools of `memory`, which no other executor has.
    pub fn new(memory: &Arc<KvMemory>, device: &Arc<Device>) -> Self {
        Self {
            memory: Arc::clone(memory),
            device: Arc::clone(device),
            step: None,
            steps: 0,
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
            + (position % block_size) as usize * K_BYTES;
        let region = self.memory.region(group);
        assert!(offset + size_of::<u64>() <= region.len);
        // SAFETY: the offset was just checked to be inside the region.
        unsafe { region.ptr.as_ptr().add(offset).cast() }
    }
}

impl Executor for HashExecutor {
    fn submit(&mut self, plan: &StepPlan) -> Result<StepId, Error> {
        assert!(self.step.is_none() && !plan.rows.is_empty());
        let mut tokens_in_all = 0;
        let mut states = Vec::with_capacity(plan.rows.len());
        for row in &plan.rows {
            let RowInput::Tokens(tokens) = &row.input else {
                return Err(Error::Device("only tokens are taken".to_owned()));
            };
            assert!(row.position + tokens.len() as u32 <= CONTEXT_MAX);
            tokens_in_all += tokens.len() as u32;
            let embedded = tokens.iter().zip(row.position..);
            states.push(embedded.map(|(token, at)| embed(*token, at)).collect());
        }
        self.device
            .step_tokens
            .store(tokens_in_all, Ordering::Relaxed);
        self.step = Some(Running {
            plan: plan.clone(),
            states,
            layer: 0,
        });
        self.steps += 1;
        Ok(StepId(self.steps))
    }

    fn poll(&mut self) -> Result<StepEvent, Error> {
        let mut step = self.step.take().ok_or(Error::NoStep)?;
        if step.layer == LAYERS {
            if self.device.loses_step.swap(false, Ordering::Relaxed) {
                return Err(Error::Device("the simulated device lost a step".to_owned()));
            }
            let mut output = StepOutput {
                vocab_size: VOCAB as usize,
                ..StepOutput::default()
            };
            for (row, states) in step.plan.rows.iter().zip(&step.states) {
                if row.logits != LogitsWanted::None {
                    let last = states.last().expect("a row has at least one token");
                    write_logits(*last, &mut output.logits);
                }
            }
            give_best_alone(&step.plan, &mut output);
            return Ok(StepEvent::Done(output));
        }
        let layout = self.memory.layout();
        let group = usize::from(step.layer == 1);
        let index = usize::from(step.layer == 2);
        let kind = layout.groups[group].kind;
        for (row, states) in step.plan.rows.iter().zip(&mut step.states) {
            let table = &row.tables[group];
            for (position, state) in (row.position..).zip(states) {
                let past = (visible_from(kind, position)..position).map(|at| {
                    // SAFETY: `slot` checks the bounds; this thread alone uses the pool,
                    // and a lane writes no block that a table names.
                    unsafe { self.slot(group, index, table, at).read_unaligned() }
                });
                *state = layer(step.layer, *state, past);
                let slot = self.slot(group, index, table, position);
                // SAFETY: as above.
                unsafe { slot.write_unaligned(*state) };
            }
        }
        let done = step.layer;
        step.layer += 1;
        self.step = Some(step);
        Ok(StepEvent::LayerDone { layer: done })
    }

    fn abort(&mut self) {
        self.step = None;
    }

    fn recycle(&mut self, _output: StepOutput) {}

    fn copy_blocks(&mut self, group: usize, pairs: &[(u32, u32)]) -> Result<(), Error> {
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

/// Where all rows asked for no more than the best of the same ids, it is all they get.
fn give_best_alone(plan: &StepPlan, output: &mut StepOutput) {
    let wanted = plan.rows.iter().map(|row| row.logits);
    let mut wanted = wanted.filter(|wanted| *wanted != LogitsWanted::None);
    let Some(LogitsWanted::Best { known }) = wanted.next() else {
        return;
    };
    if !wanted.all(|wanted| wanted == LogitsWanted::Best { known }) {
        return;
    }
    let best = |row: &[f32]| {
        let known = &row[..known as usize];
        let best = (0..known.len()).reduce(|a, b| if known[b] > known[a] { b } else { a });
        best.map(|id| id as TokenId)
    };
    output.best = output
        .logits
        .chunks_exact(VOCAB as usize)
        .map(best)
        .collect();
    output.logits.clear();
}

/// What a choice must look like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    pub tokens: Vec<TokenId>,
    pub reason: FinishReason,
}

/// The whole output of a choice, computed without blocks.
pub fn expected(prompt: &[TokenId], sampling: &SamplingParams, choice: u32) -> Expected {
    let groups = layout(16).groups;
    let rules = Rules::new(sampling, &[EOS], VOCAB, prompt.len() as u32);
    let mut history = rules.replay(prompt, &[]);
    let mut stored: Vec<Vec<u64>> = vec![Vec::new(); LAYERS as usize];
    let mut tokens: Vec<TokenId> = Vec::new();
    let mut logits = Vec::new();
    let mut scratch = Scratch::default();
    for position in 0.. {
        let token = match prompt.get(position) {
            Some(token) => *token,
            None => tokens[position - prompt.len()],
        };
        let mut state = embed(token, position as u32);
        for (index, stored) in (0..).zip(&mut stored) {
            let kind = groups[usize::from(index == 1)].kind;
            let from = visible_from(kind, position as u32) as usize;
            state = layer(index, state, stored[from..].iter().copied());
            stored.push(state);
        }
        if position + 1 < prompt.len() {
            continue;
        }
        logits.clear();
        write_logits(state, &mut logits);
        let index = tokens.len() as u32;
        let draw = Draw { choice, index };
        let drawn = rules
            .draw(draw, &history, &logits, &mut scratch)
            .expect("the model's logits are finite");
        history.push(drawn.id);
        tokens.push(drawn.id);
        if let Some(reason) = rules.end_after(drawn.id, index) {
            return Expected { tokens, reason };
        }
    }
    unreachable!("max_tokens ends every choice")
}
