//! Qwen 2 and 2.5: biases on queries, keys and values, whatever the configuration says.

use super::{Family, GGUF_NAMES, HF_NAMES, Windows};
use crate::model::config::{GateActivation, Pairing};

pub(super) const FAMILY: Family = Family {
    name: "qwen2",
    gguf_architectures: &["qwen2"],
    hf_model_types: &["qwen2"],
    gguf: GGUF_NAMES,
    hf: HF_NAMES,
    gguf_pairing: Pairing::Halves,
    qkv_bias_always: true,
    qk_norm: false,
    post_norms: false,
    hf_norm_offset: 0.0,
    scale_embeddings: false,
    activation: GateActivation::Silu,
    hf_activation_keys: &["hidden_act"],
    head_dim_default: None,
    rope_base_default: 10_000.0,
    rope_base_local: None,
    windows: Windows::UpperLayers,
    tied_by_default: false,
};
