//! What a `config.json` becomes, and which are refused.

use super::*;
use crate::model::config::RopeScaling;
use crate::model::family;

fn config(json: &str) -> Result<ModelConfig, Error> {
    let json: Map<String, Value> = serde_json::from_str(json).expect("test JSON");
    let name = json["model_type"].as_str().expect("test JSON");
    let family = family::by_hf_model_type(name).expect("a known family");
    read(
        family,
        Path::new("config.json"),
        &json,
        &mut Warnings::default(),
    )
}

/// A sound description of a type with further members.
fn with(model_type: &str, extra: &str) -> Result<ModelConfig, Error> {
    let needed = match model_type {
        "mistral" if !extra.contains("\"sliding_window\"") => r#", "sliding_window": null"#,
        "gemma3_text" if !extra.contains("query_pre_attn_scalar") => {
            r#", "sliding_window": null, "query_pre_attn_scalar": 256"#
        }
        _ => "",
    };
    config(&format!(
        r#"{{"model_type": "{model_type}", "hidden_size": 1024, "num_hidden_layers": 8,
            "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 2048,
            "vocab_size": 1000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6{needed}{extra}}}"#
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
            r#", "rope_scaling": {"type": "su", "factor": 4.0}"#,
            "rope_scaling.rope_type",
        ),
        (r#", "partial_rotary_factor": 1.5"#, "partial_rotary_factor"),
        (
            r#", "partial_rotary_factor": 0.05"#,
            "partial_rotary_factor",
        ),
        (r#", "hidden_act": "gelu""#, "hidden_act"),
        (r#", "num_key_value_heads": 3"#, "key and value heads"),
        (r#", "head_dim": -1"#, "head_dim"),
        (r#", "tie_word_embeddings": 1"#, "tie_word_embeddings"),
        (
            r#", "sliding_window": 64, "layer_types": ["chunked_attention"]"#,
            "layer_types",
        ),
    ] {
        refused("llama", extra, key);
    }
}

fn refused(model_type: &str, extra: &str, key: &str) {
    match with(model_type, extra) {
        Ok(config) => panic!("{extra} is taken as {}", config.rope_text()),
        Err(error) => {
            let message = error.to_string();
            assert!(
                message.contains(&format!("`{key}`")),
                "no `{key}` in: {message}"
            );
        }
    }
}

#[test]
fn a_scaling_that_is_written_is_applied_or_refused() {
    const YARN: &str = r#""rope_type": "yarn", "factor": 4.0"#;
    for (scaling, key) in [
        // Without a type, of a type that does not read it, or of two types.
        (r#"{"factor": 4}"#.to_owned(), "factor"),
        (
            r#"{"rope_type": "default", "factor": 4}"#.to_owned(),
            "factor",
        ),
        (
            r#"{"type": "linear", "rope_type": "default", "factor": 4}"#.to_owned(),
            "rope_type",
        ),
        (r#"{"type": 3}"#.to_owned(), "type"),
        (
            r#"{"type": "linear", "factor": 4, "low_freq_factor": 1}"#.to_owned(),
            "low_freq_factor",
        ),
        (
            format!("{{{YARN}, \"mrope_section\": [1, 1, 2]}}"),
            "mrope_section",
        ),
        (
            format!("{{{YARN}, \"extrapolation_factor\": 1}}"),
            "extrapolation_factor",
        ),
        // Incomplete or out of range.
        (r#"{"type": "linear"}"#.to_owned(), "factor"),
        (r#"{"type": "dynamic", "factor": 0.5}"#.to_owned(), "factor"),
        (
            r#"{"type": "dynamic", "factor": 2, "original_max_position_embeddings": 512}"#
                .to_owned(),
            "original_max_position_embeddings",
        ),
        (
            format!("{{{YARN}, \"beta_fast\": 1, \"beta_slow\": 2}}"),
            "beta_fast",
        ),
        (format!("{{{YARN}, \"mscale\": 1}}"), "mscale"),
        (
            format!("{{{YARN}, \"attention_factor\": -1}}"),
            "attention_factor",
        ),
        (
            r#"{"type": "longrope", "short_factor": [1]}"#.to_owned(),
            "long_factor",
        ),
    ] {
        let key = format!("rope_scaling.{key}");
        refused("llama", &format!(r#", "rope_scaling": {scaling}"#), &key);
        refused("llama", &format!(r#", "rope_parameters": {scaling}"#), &key);
    }
    for (scaling, field) in [
        (
            r#"{"type": "longrope", "short_factor": [1], "long_factor": [1]}"#,
            "rope factors",
        ),
        (
            r#"{"rope_type": "yarn", "factor": 4, "rope_theta": 1}"#,
            "rope scaling",
        ),
    ] {
        refused("llama", &format!(r#", "rope_scaling": {scaling}"#), field);
    }
}

#[test]
fn what_stands_in_two_places_must_agree() {
    let linear = r#"{"type": "linear", "factor": 4}"#;
    let both = |other: &str| format!(r#", "rope_scaling": {linear}, "rope_parameters": {other}"#);
    refused(
        "llama",
        &both(r#"{"rope_theta": 5000.0}"#),
        "rope_parameters",
    );
    let alike = with("llama", &both(linear)).unwrap();
    assert_eq!(
        alike,
        with("llama", &format!(r#", "rope_scaling": {linear}"#)).unwrap()
    );
    assert_eq!(with("llama", &both("{}")).unwrap(), alike);
    refused(
        "llama",
        r#", "rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}"#,
        "rope_scaling.rope_theta",
    );
    refused(
        "llama",
        r#", "partial_rotary_factor": 0.5, "rope_scaling": {"partial_rotary_factor": 0.25}"#,
        "rope_scaling.partial_rotary_factor",
    );
    let original = r#", "original_max_position_embeddings": 1024"#;
    refused("llama", original, "original_max_position_embeddings");
    let yarn = r#", "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 512}"#;
    refused(
        "llama",
        &format!("{original}{yarn}"),
        "rope_scaling.original_max_position_embeddings",
    );
    refused(
        "mistral",
        r#", "use_sliding_window": false, "sliding_window": 64"#,
        "use_sliding_window",
    );
    refused(
        "mistral",
        r#", "max_window_layers": 2, "sliding_window": 64"#,
        "max_window_layers",
    );
    let windowed = ["sliding_attention"; 8]
        .map(|ty| format!("\"{ty}\""))
        .join(", ");
    refused(
        "qwen2",
        &format!(r#", "use_sliding_window": false, "layer_types": [{windowed}]"#),
        "layer_types",
    );
    refused(
        "gemma3_text",
        &format!(
            r#", "sliding_window": 64, "sliding_window_pattern": 2, "layer_types": [{windowed}]"#
        ),
        "sliding_window_pattern",
    );
}

#[test]
fn rotations_per_layer_type_are_of_families_that_have_them() {
    let per_type = r#", "sliding_window": 64, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0}}"#;
    let config = with("gemma3_text", per_type).unwrap();
    assert_eq!(config.rope_text(), "halves 500000/256 linear 8, 20000/256");
    refused("mistral", per_type, "rope_parameters");
    refused(
        "gemma3_text",
        &per_type.replace("sliding_attention", "chunked_attention"),
        "rope_parameters",
    );
    // Flat, the library would not read it.
    refused(
        "gemma3_text",
        r#", "rope_parameters": {"rope_type": "linear", "factor": 8.0}"#,
        "rope_parameters",
    );
    refused(
        "llama",
        r#", "rope_local_base_freq": 1e4"#,
        "rope_local_base_freq",
    );
    refused(
        "gemma3_text",
        &format!("{per_type}, \"rope_local_base_freq\": 1e4"),
        "rope_parameters.sliding_attention.rope_theta",
    );
}

#[test]
fn yarn_stretches_the_context_and_infers_its_factor_as_the_library_does() {
    let yarn = |extra: &str| {
        let scaling = format!(r#"{{"type": "yarn", "factor": 4.0{extra}}}"#);
        let config = with("qwen2", &format!(r#", "rope_scaling": {scaling}"#)).unwrap();
        (config.ropes[0].attention_factor, config.context_max)
    };
    let inferred = 0.1 * 4_f64.ln() + 1.0;
    assert_eq!(yarn(""), (inferred, 16_384));
    assert_eq!(
        yarn(r#", "original_max_position_embeddings": 1024"#),
        (inferred, 4096)
    );
    assert_eq!(yarn(r#", "attention_factor": 1"#).0, 1.0);
    assert_eq!(yarn(r#", "mscale": 1.0, "mscale_all_dim": 1.0"#).0, 1.0);
    assert_eq!(yarn(r#", "mscale": 0, "mscale_all_dim": 0"#).0, inferred);
}

#[test]
fn dynamic_scaling_is_for_the_context_that_is_asked_for() {
    let scaled = with(
        "llama",
        r#", "rope_scaling": {"type": "dynamic", "factor": 2.0}"#,
    )
    .unwrap();
    let plain = with("llama", "").unwrap();
    let at = |config: &ModelConfig, context: u32| {
        let mut config = config.clone();
        config.limit_context(context);
        (config.context_max, config.rope_text())
    };
    assert_eq!(scaled.context_max, 4096);
    assert_eq!(scaled.rope_text(), plain.rope_text());
    assert_eq!(at(&scaled, 100), at(&plain, 100));
    assert_eq!(at(&plain, 8192).0, 4096);
    assert_eq!(at(&scaled, 6000).0, 6000);
    assert_eq!(at(&scaled, 100_000), at(&scaled, 8192));
    assert_eq!(
        at(&scaled, 8192).1,
        "halves 10000/64 dynamic 2 4096 for 8192"
    );
}

#[test]
fn a_json_key_that_stands_twice_has_its_last_value() {
    let twice = with("llama", r#", "rope_theta": 5000.0, "rope_theta": 20000.0"#).unwrap();
    assert_eq!(twice.ropes[0].base, 20_000.0);
}

#[test]
fn a_key_whose_default_suits_one_size_of_model_must_be_there() {
    let sound: Map<String, Value> = serde_json::from_str(
        r#"{"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
            "num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 1000,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "sliding_window": null,
            "query_pre_attn_scalar": 256}"#,
    )
    .unwrap();
    for (model_type, key, default) in NEEDED {
        let mut json = sound.clone();
        json.insert("model_type".to_owned(), model_type.into());
        config(&Value::Object(json.clone()).to_string()).unwrap();
        json.remove(key);
        let error = config(&Value::Object(json).to_string()).unwrap_err();
        let message = error.to_string();
        assert!(
            message.contains(&format!("`{key}`")) && message.contains(&default.to_string()),
            "{message}"
        );
    }
}
