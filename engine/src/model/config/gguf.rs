//! [`ModelConfig`] from the metadata of a GGUF file.

mod lookup;
mod rope;
mod windows;

use super::{BiasConfig, LAYERS_MAX, LayerConfig, ModelConfig, RopeConfig, check_shape, keys};
use crate::model::error::Error;
use crate::model::family::Family;
use crate::model::gguf::Gguf;
use crate::model::tensors::Tensors;
use crate::model::warnings::Warnings;
use lookup::Keys;

/// Gemma 3 27B alone scales its scores by the width per head instead of the head's
/// size. GGUF does not say so; the layer count does.
///
/// *Source*: llama.cpp, `LLM_ARCH_GEMMA3`.
const GEMMA3_27B_LAYERS: usize = 62;

/// Reads the configuration. Takes the RoPE factors out of `tensors`, where there are any.
///
/// # Errors
/// [`Error::Config`] or [`Error::Unsupported`], naming the metadata key.
pub(crate) fn read(
    family: &'static Family,
    gguf: &Gguf<'_>,
    tensors: &mut Tensors<'_>,
    warnings: &mut Warnings,
) -> Result<ModelConfig, Error> {
    let architecture = gguf.string("general.architecture")?.unwrap_or_default();
    keys::check_gguf(family, architecture, gguf, warnings)?;
    let mut keys = Keys {
        gguf,
        architecture,
        layers: None,
    };
    let hidden = keys.size("embedding_length")?;
    let layers = keys.size("block_count")?;
    // Before anything is laid out per layer.
    if layers > LAYERS_MAX {
        return Err(keys.error(
            "block_count",
            format!("{layers} is not in 1..={LAYERS_MAX}"),
        ));
    }
    keys.layers = Some(layers);
    let heads = keys.size("attention.head_count")?;
    let kv_heads = keys.size_or("attention.head_count_kv", heads)?;
    let head_dim = match keys.optional_size("attention.key_length")? {
        Some(head_dim) => head_dim,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            return Err(keys.error(
                "attention.key_length",
                format!("is missing, and {heads} heads do not divide a width of {hidden}"),
            ));
        }
    };
    let value_length = keys.size_or("attention.value_length", head_dim)?;
    if value_length != head_dim {
        return Err(keys.unsupported(
            "attention.value_length",
            format!("{value_length} differs from the key length {head_dim}"),
        ));
    }
    let Some([vocab, _]) = tensors.dims("token_embd.weight") else {
        return Err(Error::tensor(
            gguf.path(),
            "token_embd.weight",
            "is missing or not a matrix",
        ));
    };
    let vocab = *vocab;
    let eps = keys
        .float("attention.layer_norm_rms_epsilon")?
        .ok_or_else(|| keys.error("attention.layer_norm_rms_epsilon", "is missing".to_owned()))?;

    let windows = windows::read(family, &keys, layers)?;
    let own_context = keys.size("context_length")?.min(u32::MAX as usize) as u32;
    let shape = rope::Shape {
        head_dim,
        context: own_context,
        windowed: windows.iter().any(Option::is_some),
    };
    let ropes = rope::read(family, &keys, tensors, shape)?;
    // Layers with a window use the last rotation.
    let local = ropes.len() - 1;
    let context_max = ropes
        .iter()
        .filter_map(RopeConfig::stretched_context)
        .fold(own_context, u32::max);

    let scale_dim = if family.name == "gemma3" && layers == GEMMA3_27B_LAYERS {
        hidden as f64 / heads as f64
    } else {
        head_dim as f64
    };
    let attention_scale = keys
        .float("attention.scale")?
        .unwrap_or(scale_dim.sqrt().recip());

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
        kv_heads,
        head_dim,
        ffn: keys.size("feed_forward_length")?,
        vocab,
        context_max,
        norm_eps: eps as f32,
        ropes,
        rope_pairing: family.gguf_pairing,
        // No metadata says which biases exist; the tensors do. One that the first
        // layer has and another lacks is then missed by name.
        bias: BiasConfig {
            qkv: family.qkv_bias_always || tensors.contains("blk.0.attn_q.bias"),
            attention_output: tensors.contains("blk.0.attn_output.bias"),
            ffn: tensors.contains("blk.0.ffn_gate.bias"),
        },
        qk_norm: family.qk_norm,
        post_norms: family.post_norms,
        embedding_scale: if family.scale_embeddings {
            (hidden as f32).sqrt()
        } else {
            1.0
        },
        activation: family.activation,
        attention_scale: attention_scale as f32,
        attention_soft_cap: keys.soft_cap("attn_logit_softcapping")?,
        final_soft_cap: keys.soft_cap("final_logit_softcapping")?,
        tied: !tensors.contains("output.weight"),
    };
    check_shape(gguf.path(), &config)?;
    Ok(config)
}
