//! Llama 1 to 3, SmolLM2, and Mistral with its window on every layer.

use super::{Family, GGUF_NAMES, HF_NAMES, Windows};
use crate::model::config::{GateActivation, Pairing};

pub(super) const FAMILY: Family = Family {
    name: "llama",
    gguf_architectures: &["llama"],
    hf_model_types: &["llama", "mistral"],
    gguf: GGUF_NAMES,
    hf: HF_NAMES,
    // The converter permutes the rows of q and k, so that pairs become neighbours.
    gguf_pairing: Pairing::Interleaved,
    qkv_bias_always: false,
    qk_norm: false,
    post_norms: false,
    hf_norm_offset: 0.0,
    scale_embeddings: false,
    activation: GateActivation::Silu,
    hf_activation_keys: &["hidden_act"],
    head_dim_default: None,
    rope_base_default: 10_000.0,
    rope_base_local: None,
    windows: Windows::All,
    tied_by_default: false,
};
