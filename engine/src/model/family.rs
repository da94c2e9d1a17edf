//! The families of models the decoder knows, as tables.
//!
//! A family says which tensor names mean what, in GGUF files and in Hugging Face
//! folders, and which parts of the decoder it uses. It holds no code of its own:
//! a variant that needs code is a new field of [`Family`], read by every family.

mod gemma3;
mod llama;
mod qwen2;
mod qwen3;

use super::config::{GateActivation, Pairing};

/// What distinguishes one family from the others.
#[derive(Debug)]
pub(crate) struct Family {
    pub name: &'static str,
    /// Values of `general.architecture`.
    pub gguf_architectures: &'static [&'static str],
    /// Values of `model_type` in `config.json`.
    pub hf_model_types: &'static [&'static str],
    pub gguf: Names,
    pub hf: Names,
    /// How GGUF files of this family pair rotated dimensions. Hugging Face folders
    /// always pair halves.
    pub gguf_pairing: Pairing,
    /// Queries, keys and values have biases although no configuration says so.
    pub qkv_bias_always: bool,
    pub qk_norm: bool,
    pub post_norms: bool,
    /// Added to the norm weights of Hugging Face folders; GGUF converters have done it.
    pub hf_norm_offset: f32,
    /// Whether embeddings are multiplied by the square root of the width.
    pub scale_embeddings: bool,
    pub activation: GateActivation,
    /// The key that names the activation in `config.json`, the family's own first.
    pub hf_activation_keys: &'static [&'static str],
    /// `head_dim` where `config.json` has none; `None` divides the width by the heads.
    pub head_dim_default: Option<usize>,
    pub rope_base_default: f64,
    /// RoPE base of windowed layers, where it is not the model's.
    pub rope_base_local: Option<f64>,
    pub windows: Windows,
    /// Whether a `config.json` without `tie_word_embeddings` means a tied output matrix.
    pub tied_by_default: bool,
}

/// Which layers have a sliding window, where no list says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Windows {
    /// Every layer, once the model has a window at all.
    All,
    /// With `use_sliding_window`: layers from `max_window_layers` on.
    UpperLayers,
    /// All but every `period`-th layer.
    Periodic { period: usize },
}

/// Tensor names of a container. `{}` stands for the layer; the parts carry no
/// `.weight`, because a bias has the same name with `.bias`.
#[derive(Debug)]
pub(crate) struct Names {
    pub embedding: &'static str,
    pub output_norm: &'static str,
    pub output: &'static str,
    pub attention_norm: &'static str,
    pub q: &'static str,
    pub k: &'static str,
    pub v: &'static str,
    pub attention_output: &'static str,
    pub q_norm: &'static str,
    pub k_norm: &'static str,
    pub post_attention_norm: &'static str,
    pub ffn_norm: &'static str,
    pub gate: &'static str,
    pub up: &'static str,
    pub down: &'static str,
    pub post_ffn_norm: &'static str,
}

/// GGUF names are the same for all families.
const GGUF_NAMES: Names = Names {
    embedding: "token_embd",
    output_norm: "output_norm",
    output: "output",
    attention_norm: "blk.{}.attn_norm",
    q: "blk.{}.attn_q",
    k: "blk.{}.attn_k",
    v: "blk.{}.attn_v",
    attention_output: "blk.{}.attn_output",
    q_norm: "blk.{}.attn_q_norm",
    k_norm: "blk.{}.attn_k_norm",
    post_attention_norm: "blk.{}.post_attention_norm",
    ffn_norm: "blk.{}.ffn_norm",
    gate: "blk.{}.ffn_gate",
    up: "blk.{}.ffn_up",
    down: "blk.{}.ffn_down",
    post_ffn_norm: "blk.{}.post_ffw_norm",
};

/// Hugging Face names of families without post-norms.
const HF_NAMES: Names = Names {
    embedding: "model.embed_tokens",
    output_norm: "model.norm",
    output: "lm_head",
    attention_norm: "model.layers.{}.input_layernorm",
    q: "model.layers.{}.self_attn.q_proj",
    k: "model.layers.{}.self_attn.k_proj",
    v: "model.layers.{}.self_attn.v_proj",
    attention_output: "model.layers.{}.self_attn.o_proj",
    q_norm: "model.layers.{}.self_attn.q_norm",
    k_norm: "model.layers.{}.self_attn.k_norm",
    // A family without post-norms never asks for the two.
    post_attention_norm: "",
    ffn_norm: "model.layers.{}.post_attention_layernorm",
    gate: "model.layers.{}.mlp.gate_proj",
    up: "model.layers.{}.mlp.up_proj",
    down: "model.layers.{}.mlp.down_proj",
    post_ffn_norm: "",
};

/// Tensors that a file may hold and no graph needs, by the end of their names:
/// `rotary_emb.inv_freq` are RoPE frequencies that old checkpoints saved; they
/// follow from the configuration.
pub(crate) const UNNEEDED: &[&str] = &["rotary_emb.inv_freq"];

const FAMILIES: [&Family; 4] = [
    &llama::FAMILY,
    &qwen2::FAMILY,
    &qwen3::FAMILY,
    &gemma3::FAMILY,
];

/// The family of a GGUF architecture.
pub(crate) fn by_gguf_architecture(name: &str) -> Option<&'static Family> {
    FAMILIES
        .into_iter()
        .find(|family| family.gguf_architectures.contains(&name))
}

/// The family of a Hugging Face model type.
pub(crate) fn by_hf_model_type(name: &str) -> Option<&'static Family> {
    FAMILIES
        .into_iter()
        .find(|family| family.hf_model_types.contains(&name))
}

/// The names errors list.
pub(crate) fn known(names: impl Fn(&'static Family) -> &'static [&'static str]) -> String {
    let all: Vec<&str> = FAMILIES
        .into_iter()
        .flat_map(|f| names(f).iter().copied())
        .collect();
    all.join(", ")
}
