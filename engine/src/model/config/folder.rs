//! [`ModelConfig`] from the `config.json` of a Hugging Face folder.
//!
//! A key that stands twice has its last value, as in the library that wrote the file.

mod lookup;
mod rope;
#[cfg(test)]
mod tests;
mod windows;

use std::path::Path;

use serde_json::{Map, Value};

use super::{
    BiasConfig, LAYERS_MAX, LayerConfig, ModelConfig, Pairing, RopeConfig, check_shape, keys,
};
use crate::model::error::Error;
use crate::model::family::Family;
use crate::model::warnings::Warnings;
use lookup::Keys;

/// Reads the configuration of a known family.
///
/// # Errors
/// [`Error::Config`] or [`Error::Unsupported`], naming the key.
pub(crate) fn read(
    family: &'static Family,
    path: &Path,
    json: &Map<String, Value>,
    warnings: &mut Warnings,
) -> Result<ModelConfig, Error> {
    keys::check_config_json(family, path, json, warnings)?;
    let keys = Keys {
        path,
        json,
        prefix: "",
    };
    check_defaults(&keys)?;
    let hidden = keys.size("hidden_size")?;
    let layers = keys.size("num_hidden_layers")?;
    // Before anything is laid out per layer.
    if layers > LAYERS_MAX {
        return Err(keys.error(
            "num_hidden_layers",
            format!("{layers} is not in 1..={LAYERS_MAX}"),
        ));
    }
    let heads = keys.size("num_attention_heads")?;
    let head_dim = match keys.optional_size("head_dim")?.or(family.head_dim_default) {
        Some(head_dim) => head_dim,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            return Err(keys.error(
                "head_dim",
                format!("is missing, and {heads} heads do not divide a width of {hidden}"),
            ));
        }
    };
    let windows = windows::read(family, &keys, layers)?;
    let windowed = windows.iter().any(Option::is_some);
    let own_context = keys.size("max_position_embeddings")?.min(u32::MAX as usize) as u32;
    let ropes = rope::read(family, &keys, head_dim, own_context, windowed)?;
    // Layers with a window use the last rotation.
    let local = ropes.len() - 1;
    let context_max = ropes
        .iter()
        .filter_map(RopeConfig::stretched_context)
        .fold(own_context, u32::max);
    let attention_bias = keys.boolean("attention_bias")?.unwrap_or(false);
    let scale_dim = keys
        .float("query_pre_attn_scalar")?
        .unwrap_or(head_dim as f64);
    if scale_dim <= 0.0 {
        return Err(keys.error(
            "query_pre_attn_scalar",
            format!("{scale_dim} is not above 0"),
        ));
    }

    let config = ModelConfig {
        architecture: family.name.to_owned(),
        hidden,
        layers: windows
            .into_iter()
            .map(|window| LayerConfig {
                window,
                rope: if window.is_some() { local } else { 0 },
            })
            .collect(),
        heads,
        kv_heads: keys.optional_size("num_key_value_heads")?.unwrap_or(heads),
        head_dim,
        ffn: keys.size("intermediate_size")?,
        vocab: keys.size("vocab_size")?,
        context_max,
        norm_eps: keys
            .float("rms_norm_eps")?
            .ok_or_else(|| keys.error("rms_norm_eps", "is missing".to_owned()))?
            as f32,
        ropes,
        rope_pairing: Pairing::Halves,
        bias: BiasConfig {
            qkv: family.qkv_bias_always || attention_bias,
            attention_output: attention_bias,
            ffn: keys.boolean("mlp_bias")?.unwrap_or(false),
        },
        qk_norm: family.qk_norm,
        post_norms: family.post_norms,
        embedding_scale: if family.scale_embeddings {
            (hidden as f32).sqrt()
        } else {
            1.0
        },
        activation: family.activation,
        attention_scale: scale_dim.sqrt().recip() as f32,
        attention_soft_cap: keys.soft_cap("attn_logit_softcapping")?,
        final_soft_cap: keys.soft_cap("final_logit_softcapping")?,
        tied: keys
            .boolean("tie_word_embeddings")?
            .unwrap_or(family.tied_by_default),
    };
    check_shape(path, &config)?;
    Ok(config)
}

/// Keys without which the library takes a number that suits one size of model. Its own
/// writers always write them.
const NEEDED: [(&str, &str, u32); 7] = [
    ("mistral", "sliding_window", 4096),
    ("mistral", "num_key_value_heads", 8),
    ("qwen2", "num_key_value_heads", 32),
    ("qwen3", "num_key_value_heads", 32),
    ("gemma3_text", "num_key_value_heads", 4),
    ("gemma3_text", "sliding_window", 4096),
    ("gemma3_text", "query_pre_attn_scalar", 256),
];

fn check_defaults(keys: &Keys<'_>) -> Result<(), Error> {
    let model_type = keys.get("model_type").and_then(Value::as_str);
    for (of, key, default) in NEEDED {
        if model_type == Some(of) && !keys.json.contains_key(key) {
            let message = format!("is missing; the library takes {default} for `{of}`: write it");
            return Err(keys.error(key, message));
        }
    }
    Ok(())
}
