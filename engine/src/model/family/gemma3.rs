//! Gemma 3, text only: windows on five of six layers with a RoPE base of their own,
//! norms around every part and on query and key heads, scaled embeddings, GeGLU.

use super::{Family, GGUF_NAMES, HF_NAMES, Names, Windows};
use crate::model::config::{GateActivation, Pairing};

pub(super) const FAMILY: Family = Family {
    name: "gemma3",
    gguf_architectures: &["gemma3"],
    hf_model_types: &["gemma3_text"],
    gguf: GGUF_NAMES,
    hf: Names {
        // What other families call the feed-forward's norm is here attention's post-norm.
        post_attention_norm: "model.layers.{}.post_attention_layernorm",
        ffn_norm: "model.layers.{}.pre_feedforward_layernorm",
        post_ffn_norm: "model.layers.{}.post_feedforward_layernorm",
        ..HF_NAMES
    },
    gguf_pairing: Pairing::Halves,
    qkv_bias_always: false,
    qk_norm: true,
    post_norms: true,
    hf_norm_offset: 1.0,
    scale_embeddings: true,
    activation: GateActivation::GeluTanh,
    hf_activation_keys: &["hidden_activation", "hidden_act"],
    head_dim_default: Some(256),
    rope_base_default: 1_000_000.0,
    rope_base_local: Some(10_000.0),
    windows: Windows::Periodic { period: 6 },
    tied_by_default: true,
};
