//! What a decoder computes, as plain data.
//!
//! One transformer decoder serves every family; the differences between them are
//! the values here. Values come from the model's files and are never guessed when
//! a file gives them.

pub(crate) mod folder;
pub(crate) mod gguf;
pub(crate) mod keys;
mod rope;

use std::path::Path;

use baton_kernels::{Activation, RopePairing};
use baton_proto::kv_layout::{KvGroup, KvGroupKind};
use serde::{Deserialize, Serialize};

use super::error::Error;

pub use rope::{RopeConfig, RopeScaling};

/// Layers of the largest model that is not nonsense.
const LAYERS_MAX: usize = 1024;
/// Width of the residual stream, the heads or the feed-forward layer likewise.
const WIDTH_MAX: usize = 1 << 20;
/// Positions of the longest context; bounds the RoPE tables.
const CONTEXT_MAX: u32 = 1 << 20;

/// The kernels' vectors hold this many f32; a stored head is a multiple of it.
const HEAD_LANES: usize = 16;

/// What differs between the layers of one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerConfig {
    /// Position `p` sees positions `> p - window`; `None` sees all earlier ones.
    pub window: Option<u32>,
    /// Index into [`ModelConfig::ropes`].
    pub rope: usize,
}

/// Which matrices have a bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BiasConfig {
    pub qkv: bool,
    pub attention_output: bool,
    pub ffn: bool,
}

/// [`baton_kernels::Activation`] in a form that can be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GateActivation {
    Silu,
    GeluTanh,
}

impl GateActivation {
    /// What `config.json` calls it.
    pub(crate) fn names(self) -> [&'static str; 2] {
        match self {
            Self::Silu => ["silu", "swish"],
            Self::GeluTanh => ["gelu_pytorch_tanh", "gelu_new"],
        }
    }
}

impl From<GateActivation> for Activation {
    fn from(activation: GateActivation) -> Self {
        match activation {
            GateActivation::Silu => Self::Silu,
            GateActivation::GeluTanh => Self::GeluTanh,
        }
    }
}

/// Which two dimensions of a head rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pairing {
    /// `2i, 2i + 1`: GGUF files of the llama architecture, whose rows were permuted for it.
    Interleaved,
    /// `i, i + dims / 2`: everything else.
    Halves,
}

impl From<Pairing> for RopePairing {
    fn from(pairing: Pairing) -> Self {
        match pairing {
            Pairing::Interleaved => Self::Interleaved,
            Pairing::Halves => Self::Halves,
        }
    }
}

/// What a decoder computes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// The family's name: `llama`, `qwen2`, `qwen3`, `gemma3`.
    pub architecture: String,
    /// Width of the residual stream.
    pub hidden: usize,
    pub layers: Vec<LayerConfig>,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Width of the feed-forward layer.
    pub ffn: usize,
    /// Rows of the embedding and output matrices.
    pub vocab: usize,
    /// Longest sequence, in tokens.
    pub context_max: u32,
    pub norm_eps: f32,
    pub ropes: Vec<RopeConfig>,
    pub rope_pairing: Pairing,
    pub bias: BiasConfig,
    /// RMS norms on every query and key head.
    pub qk_norm: bool,
    /// RMS norms on what attention and feed-forward add to the residual.
    pub post_norms: bool,
    /// Multiplies the embeddings.
    pub embedding_scale: f32,
    pub activation: GateActivation,
    /// Multiplies the attention scores.
    pub attention_scale: f32,
    pub attention_soft_cap: Option<f32>,
    pub final_soft_cap: Option<f32>,
    /// The output matrix is the embedding matrix.
    pub tied: bool,
}

impl ModelConfig {
    /// Dimensions of a head in activations and in the KV cache: `head_dim`, padded with
    /// zeros to whole vectors. Zeros add nothing to a score, and the padding of a
    /// value meets zero weights.
    pub fn head_dim_stored(&self) -> usize {
        self.head_dim.next_multiple_of(HEAD_LANES)
    }

    /// Width of one fused row of queries, keys and values.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim_stored()
    }

    /// Width of the queries, and of what attention gives.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim_stored()
    }

    /// Width of the keys, and of the values.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim_stored()
    }

    /// How keys are rotated, in one line: what two workers must have in common to read
    /// each other's KV.
    pub fn rope_text(&self) -> String {
        let pairing = match self.rope_pairing {
            Pairing::Interleaved => "interleaved",
            Pairing::Halves => "halves",
        };
        let tables: Vec<String> = self
            .ropes
            .iter()
            .map(|rope| rope.text(self.context_max))
            .collect();
        format!("{pairing} {}", tables.join(", "))
    }

    /// Loads the model for sequences of up to `wanted` tokens: fewer than the files allow,
    /// or more where a scaling stretches the context as far as it is asked to.
    pub(crate) fn limit_context(&mut self, wanted: u32) {
        let limits = self.ropes.iter().filter_map(RopeConfig::context_limit);
        let limit = limits.fold(self.context_max, u32::max).min(CONTEXT_MAX);
        self.context_max = wanted.min(limit);
    }

    /// The layers that share a block table: full attention first (where there is
    /// any), then one group per distinct window, ascending.
    pub fn kv_groups(&self) -> Vec<KvGroup> {
        let mut windows: Vec<Option<u32>> = self.layers.iter().map(|layer| layer.window).collect();
        // `None` sorts before every window.
        windows.sort_unstable();
        windows.dedup();
        windows
            .into_iter()
            .map(|window| KvGroup {
                kind: match window {
                    None => KvGroupKind::Full,
                    Some(window) => KvGroupKind::SlidingWindow { window },
                },
                layers: (0_u32..)
                    .zip(&self.layers)
                    .filter(|(_, layer)| layer.window == window)
                    .map(|(index, _)| index)
                    .collect(),
            })
            .collect()
    }
}

/// Whether the numbers fit each other and are of a size that can be meant.
/// Everything later multiplies them without checks.
fn check_shape(path: &Path, config: &ModelConfig) -> Result<(), Error> {
    let bounded = [
        ("layers", config.layers.len(), LAYERS_MAX),
        ("hidden size", config.hidden, WIDTH_MAX),
        ("attention heads", config.heads, WIDTH_MAX),
        ("key and value heads", config.kv_heads, config.heads),
        ("head size", config.head_dim, WIDTH_MAX),
        (
            "width of all heads",
            config.heads.saturating_mul(config.head_dim),
            WIDTH_MAX,
        ),
        ("feed-forward size", config.ffn, WIDTH_MAX),
        ("vocabulary size", config.vocab, 1 << 24),
        (
            "context length",
            config.context_max as usize,
            CONTEXT_MAX as usize,
        ),
    ];
    for (field, value, max) in bounded {
        if value == 0 || value > max {
            return Err(Error::config(
                path,
                field,
                format!("{value} is not in 1..={max}"),
            ));
        }
    }
    if !config.heads.is_multiple_of(config.kv_heads) {
        return Err(Error::config(
            path,
            "key and value heads",
            format!(
                "{} do not divide {} query heads",
                config.kv_heads, config.heads
            ),
        ));
    }
    if !(config.norm_eps >= 0.0 && config.norm_eps < 1.0) {
        return Err(Error::config(
            path,
            "norm epsilon",
            format!("{} is not in 0..1", config.norm_eps),
        ));
    }
    for rope in &config.ropes {
        if let Some((field, message)) = rope.problem(config.head_dim) {
            return Err(Error::config(path, field, message));
        }
    }
    if config.layers.iter().any(|layer| layer.window == Some(0)) {
        return Err(Error::config(path, "sliding window", "0 is not above 0"));
    }
    Ok(())
}
