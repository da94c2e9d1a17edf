//! Qwen 3 (dense): norms on query and key heads, a head size of its own.

use super::{Family, GGUF_NAMES, HF_NAMES, Windows};
use crate::model::config::{GateActivation, Pairing};

pub(super) const FAMILY: Family = Family {
    name: "qwen3",
    gguf_architectures: &["qwen3"],
    hf_model_types: &["qwen3"],
    gguf: GGUF_NAMES,
    hf: HF_NAMES,
    gguf_pairing: Pairing::Halves,
    qkv_bias_always: false,
    qk_norm: true,
    post_norms: false,
    hf_norm_offset: 0.0,
    scale_embeddings: false,
    activation: GateActivation::Silu,
    hf_activation_keys: &["hidden_act"],
    head_dim_default: Some(128),
    rope_base_default: 10_000.0,
    rope_base_local: None,
    windows: Windows::UpperLayers,
    tied_by_default: false,
};
