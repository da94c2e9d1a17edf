//! [`ModelConfig`] from the metadata of a GGUF file.

use super::{
    BiasConfig, LAYERS_MAX, LayerConfig, ModelConfig, RopeConfig, RopeScaling, check_shape,
};
use crate::model::error::Error;
use crate::model::family::{Family, Windows};
use crate::model::gguf::{Gguf, Value};
use crate::model::tensors::Tensors;

/// Divisors of the RoPE frequencies, which converters of llama3-scaled models write.
const ROPE_FACTORS: &str = "rope_freqs.weight";

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
) -> Result<ModelConfig, Error> {
    let keys = Keys {
        gguf,
        architecture: gguf.string("general.architecture")?.unwrap_or_default(),
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

    let global = RopeConfig {
        base: keys
            .float("rope.freq_base")?
            .unwrap_or(family.rope_base_default),
        dims: keys.size_or("rope.dimension_count", head_dim)?,
        scaling: rope_scaling(&keys, tensors)?,
    };
    let windows = windows(family, &keys, layers)?;
    let mut ropes = vec![global];
    if let Some(base) = family.rope_base_local
        && windows.iter().any(Option::is_some)
    {
        ropes.push(RopeConfig {
            base: keys.float("rope.freq_base_swa")?.unwrap_or(base),
            dims: ropes[0].dims,
            scaling: RopeScaling::None,
        });
    }
    let local = ropes.len() - 1;

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
        context_max: keys.size("context_length")?.min(u32::MAX as usize) as u32,
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

fn rope_scaling(keys: &Keys<'_, '_>, tensors: &mut Tensors<'_>) -> Result<RopeScaling, Error> {
    let kind = keys.gguf.string(&keys.key("rope.scaling.type"))?;
    let factor = match keys.float("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        // The older spelling of linear scaling.
        None => keys.float("rope.scale_linear")?,
    };
    let scaling = match (kind, factor) {
        (Some("linear"), Some(factor)) | (None, Some(factor)) if factor != 1.0 => {
            if factor <= 0.0 {
                return Err(keys.error("rope.scaling.factor", format!("{factor} is not above 0")));
            }
            RopeScaling::Linear { factor }
        }
        (None | Some("none" | "linear"), _) => RopeScaling::None,
        (Some(other), _) => {
            return Err(keys.unsupported(
                "rope.scaling.type",
                format!("`{other}` is not one of none, linear"),
            ));
        }
    };
    let Some(dims) = tensors.dims(ROPE_FACTORS) else {
        return Ok(scaling);
    };
    let count = dims.iter().product();
    let divisors = tensors.take_vector(ROPE_FACTORS, count)?;
    if divisors.iter().any(|divisor| *divisor <= 0.0) {
        return Err(Error::tensor(
            keys.gguf.path(),
            ROPE_FACTORS,
            "has a factor not above 0",
        ));
    }
    if scaling != RopeScaling::None {
        return Err(keys.unsupported(
            "rope.scaling.type",
            format!("linear scaling together with `{ROPE_FACTORS}`"),
        ));
    }
    Ok(RopeScaling::Factors { divisors })
}

fn windows(family: &Family, keys: &Keys<'_, '_>, layers: usize) -> Result<Vec<Option<u32>>, Error> {
    const WINDOW: &str = "attention.sliding_window";
    const PATTERN: &str = "attention.sliding_window_pattern";
    let Some(window) = keys.unsigned(WINDOW)?.filter(|window| *window > 0) else {
        return Ok(vec![None; layers]);
    };
    let window = u32::try_from(window)
        .map_err(|_| keys.error(WINDOW, format!("{window} is not below 2^32")))?;
    let every = |period: usize| {
        (1..=layers)
            .map(|n| {
                if n.is_multiple_of(period) {
                    None
                } else {
                    Some(window)
                }
            })
            .collect()
    };
    match keys.gguf.get(&keys.key(PATTERN)) {
        Some(Value::Array(_)) => {
            let flags = keys.gguf.numbers(&keys.key(PATTERN))?.unwrap_or_default();
            if flags.len() != layers {
                return Err(keys.error(
                    PATTERN,
                    format!("has {} entries for {layers} layers", flags.len()),
                ));
            }
            Ok(flags
                .iter()
                .map(|flag| (*flag != 0.0).then_some(window))
                .collect())
        }
        Some(_) => match keys.unsigned(PATTERN)? {
            Some(period) if period > 0 && period <= layers as u64 * 1024 => {
                Ok(every(period as usize))
            }
            other => Err(keys.error(PATTERN, format!("{other:?} is not a period above 0"))),
        },
        None => match family.windows {
            Windows::All => Ok(vec![Some(window); layers]),
            Windows::Periodic { period } => Ok(every(period)),
            Windows::UpperLayers => Err(keys.unsupported(
                WINDOW,
                "the file does not say which layers have it".to_owned(),
            )),
        },
    }
}

/// Looks metadata up below the architecture's name.
struct Keys<'g, 'a> {
    gguf: &'g Gguf<'a>,
    architecture: &'a str,
}

impl Keys<'_, '_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn error(&self, name: &str, message: String) -> Error {
        Error::config(self.gguf.path(), self.key(name), message)
    }

    fn unsupported(&self, name: &str, message: String) -> Error {
        Error::unsupported(self.gguf.path(), self.key(name), message)
    }

    fn unsigned(&self, name: &str) -> Result<Option<u64>, Error> {
        self.gguf.unsigned(&self.key(name))
    }

    fn float(&self, name: &str) -> Result<Option<f64>, Error> {
        self.gguf.float(&self.key(name))
    }

    /// A cap of 0 means none, as converters write it.
    fn soft_cap(&self, name: &str) -> Result<Option<f32>, Error> {
        Ok(self
            .float(name)?
            .filter(|cap| *cap > 0.0)
            .map(|cap| cap as f32))
    }

    fn optional_size(&self, name: &str) -> Result<Option<usize>, Error> {
        if let Some(Value::Array(_)) = self.gguf.get(&self.key(name)) {
            return Err(self.unsupported(name, "a value per layer is not offered".to_owned()));
        }
        match self.unsigned(name)? {
            None => Ok(None),
            Some(value) if (1..=u64::from(u32::MAX)).contains(&value) => Ok(Some(value as usize)),
            Some(value) => Err(self.error(name, format!("{value} is not in 1..2^32"))),
        }
    }

    fn size_or(&self, name: &str, default: usize) -> Result<usize, Error> {
        Ok(self.optional_size(name)?.unwrap_or(default))
    }

    fn size(&self, name: &str) -> Result<usize, Error> {
        self.optional_size(name)?
            .ok_or_else(|| self.error(name, "is missing".to_owned()))
    }
}
