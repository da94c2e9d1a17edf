//! [`ModelConfig`] from the `config.json` of a Hugging Face folder.

use std::path::Path;

use serde_json::{Map, Value};

use super::{
    BiasConfig, GateActivation, LAYERS_MAX, LayerConfig, ModelConfig, Pairing, RopeConfig,
    RopeScaling, check_shape,
};
use crate::model::error::Error;
use crate::model::family::{Family, Windows};

/// Reads the configuration of a known family.
///
/// # Errors
/// [`Error::Config`] or [`Error::Unsupported`], naming the key.
pub(crate) fn read(
    family: &'static Family,
    path: &Path,
    json: &Map<String, Value>,
) -> Result<ModelConfig, Error> {
    let keys = Keys {
        path,
        json,
        prefix: "",
    };
    if keys.get("quantization_config").is_some() {
        return Err(keys.unsupported("quantization_config", "quantised folders are not read"));
    }
    if keys
        .float("partial_rotary_factor")?
        .is_some_and(|factor| factor != 1.0)
    {
        return Err(keys.unsupported("partial_rotary_factor", "only 1 is offered"));
    }
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
    check_activation(family, &keys)?;

    let windows = windows(family, &keys, layers)?;
    let (ropes, local) = ropes(family, &keys, head_dim, windows.iter().any(Option::is_some))?;
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
        context_max: keys.size("max_position_embeddings")?.min(u32::MAX as usize) as u32,
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

fn check_activation(family: &Family, keys: &Keys<'_>) -> Result<(), Error> {
    let found = family
        .hf_activation_keys
        .iter()
        .find_map(|key| keys.get(key).map(|value| (*key, value)));
    let Some((key, value)) = found else {
        return Ok(());
    };
    let known = match value.as_str() {
        Some("silu" | "swish") => Some(GateActivation::Silu),
        Some("gelu_pytorch_tanh" | "gelu_new") => Some(GateActivation::GeluTanh),
        _ => None,
    };
    if known == Some(family.activation) {
        return Ok(());
    }
    Err(keys.unsupported(
        key,
        format!("`{value}` is not this architecture's activation"),
    ))
}

fn windows(family: &Family, keys: &Keys<'_>, layers: usize) -> Result<Vec<Option<u32>>, Error> {
    if family.windows == Windows::UpperLayers && keys.boolean("use_sliding_window")? != Some(true) {
        return Ok(vec![None; layers]);
    }
    let Some(window) = keys.optional_size("sliding_window")? else {
        return match keys.get("layer_types") {
            Some(Value::Array(types)) if types.iter().any(|ty| ty == "sliding_attention") => {
                Err(keys.error("sliding_window", "is missing".to_owned()))
            }
            _ => Ok(vec![None; layers]),
        };
    };
    let window = u32::try_from(window)
        .map_err(|_| keys.error("sliding_window", format!("{window} is not below 2^32")))?;
    if let Some(types) = keys.get("layer_types") {
        let Value::Array(types) = types else {
            return Err(keys.error("layer_types", "is not a list".to_owned()));
        };
        if types.len() != layers {
            return Err(keys.error(
                "layer_types",
                format!("has {} entries for {layers} layers", types.len()),
            ));
        }
        return types
            .iter()
            .map(|ty| match ty.as_str() {
                Some("sliding_attention") => Ok(Some(window)),
                Some("full_attention") => Ok(None),
                _ => Err(keys.unsupported(
                    "layer_types",
                    format!("`{ty}` is not one of sliding_attention, full_attention"),
                )),
            })
            .collect();
    }
    let is_windowed: Box<dyn Fn(usize) -> bool> = match family.windows {
        Windows::All => Box::new(|_| true),
        Windows::UpperLayers => {
            let first = keys
                .whole("max_window_layers")?
                .ok_or_else(|| keys.error("max_window_layers", "is missing".to_owned()))?;
            Box::new(move |layer| layer as u64 >= first)
        }
        Windows::Periodic { period } => {
            let period = keys
                .optional_size("sliding_window_pattern")?
                .unwrap_or(period);
            Box::new(move |layer| !(layer + 1).is_multiple_of(period))
        }
    };
    Ok((0..layers)
        .map(|layer| is_windowed(layer).then_some(window))
        .collect())
}

/// The model's rotations and which of them windowed layers use. Two spellings
/// exist: `rope_theta` with `rope_scaling`, and `rope_parameters` (flat, or one
/// set per layer type).
fn ropes(
    family: &Family,
    keys: &Keys<'_>,
    dims: usize,
    windowed: bool,
) -> Result<(Vec<RopeConfig>, usize), Error> {
    let per_type = |name: &str| {
        keys.object("rope_parameters")
            .ok()
            .flatten()?
            .get(name)?
            .as_object()
    };
    let (global, local) = (per_type("full_attention"), per_type("sliding_attention"));
    let rope = |prefix: &'static str, json: Option<&Map<String, Value>>, base: f64| {
        let scaling = match json {
            Some(json) => rope_scaling(&Keys {
                path: keys.path,
                json,
                prefix,
            })?,
            None => RopeScaling::None,
        };
        let own = match json {
            Some(json) => Keys {
                path: keys.path,
                json,
                prefix,
            }
            .float("rope_theta")?,
            None => None,
        };
        let base = own.unwrap_or(base);
        if base <= 0.0 {
            return Err(keys.error("rope_theta", format!("{base} is not above 0")));
        }
        Ok(RopeConfig {
            base,
            dims,
            scaling,
        })
    };
    let base = keys
        .float("rope_theta")?
        .unwrap_or(family.rope_base_default);
    let flat = match keys.object("rope_parameters")? {
        Some(_) if global.is_some() || local.is_some() => global,
        Some(flat) => Some(flat),
        None => keys.object("rope_scaling")?,
    };
    let mut ropes = vec![rope("rope_scaling.", flat, base)?];
    if let Some(default) = family.rope_base_local
        && windowed
    {
        let base = keys.float("rope_local_base_freq")?.unwrap_or(default);
        ropes.push(rope("rope_parameters.sliding_attention.", local, base)?);
    }
    let local = ropes.len() - 1;
    Ok((ropes, local))
}

fn rope_scaling(keys: &Keys<'_>) -> Result<RopeScaling, Error> {
    let kind = keys
        .get("rope_type")
        .or(keys.get("type"))
        .map(|value| value.as_str());
    let positive = |name: &str| match keys.float(name)? {
        Some(value) if value > 0.0 => Ok(value),
        Some(value) => Err(keys.error(name, format!("{value} is not above 0"))),
        None => Err(keys.error(name, "is missing".to_owned())),
    };
    match kind {
        None | Some(Some("default")) => Ok(RopeScaling::None),
        Some(Some("linear")) => Ok(RopeScaling::Linear {
            factor: positive("factor")?,
        }),
        Some(Some("llama3")) => {
            let scaling = RopeScaling::Llama3 {
                factor: positive("factor")?,
                low_freq_factor: positive("low_freq_factor")?,
                high_freq_factor: positive("high_freq_factor")?,
                original_context: keys
                    .size("original_max_position_embeddings")?
                    .min(u32::MAX as usize) as u32,
            };
            match scaling {
                RopeScaling::Llama3 {
                    low_freq_factor,
                    high_freq_factor,
                    ..
                } if low_freq_factor >= high_freq_factor => Err(keys.error(
                    "high_freq_factor",
                    format!("{high_freq_factor} is not above low_freq_factor {low_freq_factor}"),
                )),
                _ => Ok(scaling),
            }
        }
        Some(other) => Err(keys.unsupported(
            "rope_type",
            format!(
                "`{}` is not one of default, linear, llama3",
                other.unwrap_or("?")
            ),
        )),
    }
}

/// Looks keys of one JSON object up; `null` counts as missing.
struct Keys<'a> {
    path: &'a Path,
    json: &'a Map<String, Value>,
    /// What stands before a key in errors.
    prefix: &'static str,
}

impl<'a> Keys<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.json.get(key).filter(|value| !value.is_null())
    }

    fn error(&self, key: &str, message: String) -> Error {
        Error::config(self.path, format!("{}{key}", self.prefix), message)
    }

    fn unsupported(&self, key: &str, message: impl Into<String>) -> Error {
        Error::unsupported(self.path, format!("{}{key}", self.prefix), message)
    }

    fn typed<T>(
        &self,
        key: &str,
        wanted: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match read(value) {
                Some(value) => Ok(Some(value)),
                None => Err(self.error(key, format!("must be {wanted}"))),
            },
        }
    }

    fn boolean(&self, key: &str) -> Result<Option<bool>, Error> {
        self.typed(key, "true or false", Value::as_bool)
    }

    fn object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>, Error> {
        self.typed(key, "an object", Value::as_object)
    }

    fn float(&self, key: &str) -> Result<Option<f64>, Error> {
        self.typed(key, "a finite number", |value| {
            value.as_f64().filter(|v| v.is_finite())
        })
    }

    /// A cap of 0 means none.
    fn soft_cap(&self, key: &str) -> Result<Option<f32>, Error> {
        Ok(self
            .float(key)?
            .filter(|cap| *cap > 0.0)
            .map(|cap| cap as f32))
    }

    fn whole(&self, key: &str) -> Result<Option<u64>, Error> {
        self.typed(key, "a whole number", Value::as_u64)
    }

    fn optional_size(&self, key: &str) -> Result<Option<usize>, Error> {
        match self.whole(key)? {
            None => Ok(None),
            Some(value) if (1..=u64::from(u32::MAX)).contains(&value) => Ok(Some(value as usize)),
            Some(value) => Err(self.error(key, format!("{value} is not in 1..2^32"))),
        }
    }

    fn size(&self, key: &str) -> Result<usize, Error> {
        self.optional_size(key)?
            .ok_or_else(|| self.error(key, "is missing".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::family;

    fn config(json: &str) -> Result<ModelConfig, Error> {
        let json: Map<String, Value> = serde_json::from_str(json).expect("test JSON");
        let name = json["model_type"].as_str().expect("test JSON");
        let family = family::by_hf_model_type(name).expect("a known family");
        read(family, Path::new("config.json"), &json)
    }

    fn with(model_type: &str, extra: &str) -> Result<ModelConfig, Error> {
        config(&format!(
            r#"{{"model_type": "{model_type}", "hidden_size": 1024, "num_hidden_layers": 8,
                "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 2048,
                "vocab_size": 1000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6{extra}}}"#
        ))
    }

    fn windows(config: &ModelConfig) -> Vec<Option<u32>> {
        config.layers.iter().map(|layer| layer.window).collect()
    }

    #[test]
    fn mistral_has_its_window_on_every_layer_or_none() {
        let windowed = with("mistral", r#", "sliding_window": 4096"#).unwrap();
        assert_eq!(windows(&windowed), vec![Some(4096); 8]);
        assert_eq!(windowed.kv_groups().len(), 1);
        assert_eq!(windowed.ropes.len(), 1);
        let full = with("mistral", r#", "sliding_window": null, "head_dim": 128"#).unwrap();
        assert_eq!(windows(&full), vec![None; 8]);
        assert_eq!((full.head_dim, full.q_width()), (128, 2048));
    }

    #[test]
    fn qwen_windows_only_the_upper_layers_and_only_when_told_to() {
        let off = r#", "use_sliding_window": false, "sliding_window": 64, "max_window_layers": 6"#;
        assert_eq!(windows(&with("qwen2", off).unwrap()), vec![None; 8]);
        let on = off.replace("false", "true");
        let config = with("qwen2", &on).unwrap();
        assert_eq!(windows(&config)[5..], [None, Some(64), Some(64)]);
        assert!(config.bias.qkv && !config.bias.attention_output);
        assert_eq!(config.kv_groups()[1].layers, [6, 7]);
    }

    #[test]
    fn qwen3_heads_have_a_size_of_their_own() {
        let config = with("qwen3", "").unwrap();
        assert_eq!(
            (config.head_dim, config.qk_norm, config.bias.qkv),
            (128, true, false)
        );
        assert_eq!(with("qwen3", r#", "head_dim": 32"#).unwrap().head_dim, 32);
    }

    #[test]
    fn gemma3_alternates_and_rotates_windowed_layers_by_another_base() {
        let extra = r#", "sliding_window": 512, "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 64, "rope_scaling": {"rope_type": "linear", "factor": 8.0}"#;
        let config = with("gemma3_text", extra).unwrap();
        let full: Vec<usize> = (0..8)
            .filter(|layer| config.layers[*layer].window.is_none())
            .collect();
        assert_eq!(full, [5]);
        assert_eq!(config.ropes[config.layers[5].rope].base, 1e6);
        assert_eq!(
            config.ropes[config.layers[5].rope].scaling,
            RopeScaling::Linear { factor: 8.0 }
        );
        assert_eq!(config.ropes[config.layers[0].rope].base, 1e4);
        assert_eq!(
            config.ropes[config.layers[0].rope].scaling,
            RopeScaling::None
        );
        assert_eq!(
            (config.attention_scale, config.embedding_scale, config.tied),
            (0.125, 32.0, true)
        );
        let newer = r#", "sliding_window": 512, "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0}},
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention",
            "full_attention", "full_attention", "full_attention", "full_attention"]"#;
        let config = with("gemma3_text", newer).unwrap();
        assert_eq!(windows(&config)[..3], [None, Some(512), None]);
        assert_eq!(
            (config.ropes[0].base, config.ropes[1].base),
            (500_000.0, 20_000.0)
        );
    }

    #[test]
    fn llama3_scaling_is_read_in_both_spellings() {
        let scaling = r#"{"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192"#;
        let old = with(
            "llama",
            &format!(r#", "rope_theta": 500000.0, "rope_scaling": {scaling}}}"#),
        );
        let new = with(
            "llama",
            &format!(r#", "rope_parameters": {scaling}, "rope_theta": 500000.0}}"#),
        );
        let (old, new) = (old.unwrap(), new.unwrap());
        assert!(matches!(
            old.ropes[0].scaling,
            RopeScaling::Llama3 { factor: 32.0, .. }
        ));
        assert_eq!(old, new);
        let broken = format!(r#", "rope_scaling": {}}}"#, scaling.replace("4.0", "0.5"));
        assert!(
            with("llama", &broken)
                .unwrap_err()
                .to_string()
                .contains("high_freq_factor")
        );
    }

    #[test]
    fn what_is_not_offered_is_refused_by_key() {
        for (extra, key) in [
            (
                r#", "rope_scaling": {"type": "yarn", "factor": 4.0}"#,
                "rope_scaling.rope_type",
            ),
            (r#", "partial_rotary_factor": 0.5"#, "partial_rotary_factor"),
            (r#", "hidden_act": "gelu""#, "hidden_act"),
            (r#", "num_key_value_heads": 3"#, "key and value heads"),
            (r#", "head_dim": -1"#, "head_dim"),
            (r#", "tie_word_embeddings": 1"#, "tie_word_embeddings"),
            (
                r#", "sliding_window": 64, "layer_types": ["chunked_attention"]"#,
                "layer_types",
            ),
        ] {
            let message = with("llama", extra).unwrap_err().to_string();
            assert!(
                message.contains(&format!("`{key}`")),
                "no `{key}` in: {message}"
            );
        }
    }
}
