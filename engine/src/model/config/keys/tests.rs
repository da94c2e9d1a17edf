//! The example of every row of the tables, in a description that is otherwise sound.

#[path = "../../../../tests/model_support/gguf_edit.rs"]
mod gguf_edit;

use std::path::Path;

use gguf_edit::GgufEdit;
use serde_json::{Value, json};

use super::*;
use crate::model::config::{self, ModelConfig};
use crate::model::family;
use crate::model::tensors::Tensors;
use crate::model::tokenizer;
use baton_proto::tokenizer_spec::TokenizerSpec;

fn object(members: &str) -> Map<String, Value> {
    serde_json::from_str(&format!("{{{members}}}")).expect("test JSON")
}

fn example(key: &Key) -> Value {
    serde_json::from_str(key.example).expect("an example is JSON")
}

/// A value with which a refused key changes nothing.
fn neutral_value(neutral: &Neutral) -> Option<Value> {
    Some(match neutral {
        Neutral::Number(number) => json!(number),
        Neutral::Bool(boolean) => json!(boolean),
        Neutral::Text(text) => json!(text),
        Neutral::Empty => json!([]),
        Neutral::AllOnes => json!([1, 1, 1, 1]),
        Neutral::Ends(end) => json!([format!("Some{end}")]),
        Neutral::FamilyQkNorm => json!(false),
        Neutral::FamilyActivation => json!("silu"),
        Neutral::Reader(_) => return None,
    })
}

/// A tokenizer from a description with members set.
type OpenTokenizer = fn(&[(String, Value)]) -> Result<TokenizerSpec, Error>;

fn folder_tokenizer(members: &[(String, Value)]) -> Result<TokenizerSpec, Error> {
    // It has no start token of its own.
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/chain-bytes");
    let json = members.iter().cloned().collect();
    tokenizer::folder::read(Path::new(fixture), &json, 300, &mut Warnings::default())
}

fn file_tokenizer(members: &[(String, Value)]) -> Result<TokenizerSpec, Error> {
    let bytes = edited(members);
    let gguf = Gguf::parse(Path::new("rand.gguf"), &bytes)?;
    tokenizer::gguf::read(&gguf, 300, &mut Warnings::default())
}

fn check_tokenizer(container: &Container, open: OpenTokenizer) {
    for key in container.keys {
        if !matches!(key.treatment, Treatment::Tokenizer(_)) {
            continue;
        }
        let mut beside = (container.beside)(key);
        if key.name == "tokenizer.ggml.add_space_prefix" {
            beside.push(("tokenizer.ggml.model".to_owned(), json!("llama")));
            beside.push(("tokenizer.ggml.scores".to_owned(), json!(vec![0.5; 300])));
        }
        let before = open(&beside).expect("a sound tokenizer");
        match open(&(container.with)(key, beside, example(key))) {
            Ok(spec) => assert_ne!(spec, before, "{} changes nothing", key.name),
            Err(error) => {
                let part = key.name.rsplit('.').next().expect("a name");
                assert!(error.to_string().contains(part), "{}: {error}", key.name);
            }
        }
    }
}

#[test]
fn every_row_of_the_tokenizer_is_applied() {
    check_tokenizer(&FOLDER, folder_tokenizer);
    check_tokenizer(&FILE, file_tokenizer);
}

type Outcome = Result<(ModelConfig, Vec<String>), Error>;

type Members = Vec<(String, Value)>;

/// One container of descriptions: opens a sound one with members set.
struct Container {
    keys: &'static [Key],
    open: fn(&[(String, Value)]) -> Outcome,
    /// The members of a row's other keys.
    beside: fn(&Key) -> Members,
    /// Members plus the row's own key with a value.
    with: fn(&Key, Members, Value) -> Members,
}

fn folder(members: &[(String, Value)]) -> Outcome {
    let mut json = object(
        r#""model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 128,
        "vocab_size": 300, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5"#,
    );
    for (key, value) in members {
        json.insert(key.clone(), value.clone());
    }
    let name = json["model_type"].as_str().expect("a text");
    let family = family::by_hf_model_type(name).expect("a known family");
    let mut warnings = Warnings::default();
    let path = Path::new("config.json");
    let config = config::folder::read(family, path, &json, &mut warnings)?;
    Ok((config, warnings.into_vec()))
}

const FOLDER: Container = Container {
    keys: config_json::KEYS,
    open: folder,
    beside: |key| {
        let members = object(key.beside);
        match key.name.strip_prefix("rope_scaling.") {
            Some(_) if members.is_empty() => Vec::new(),
            Some(_) => vec![("rope_scaling".to_owned(), Value::Object(members))],
            None => members.into_iter().collect(),
        }
    },
    with: |key, mut members, value| {
        match key.name.strip_prefix("rope_scaling.") {
            Some(inner) => {
                let mut scaling = match members.pop() {
                    Some((_, Value::Object(scaling))) => scaling,
                    _ => Map::new(),
                };
                scaling.insert(inner.to_owned(), value);
                members.push(("rope_scaling".to_owned(), Value::Object(scaling)));
            }
            None => members.push((key.name.to_owned(), value)),
        }
        members
    },
};

/// RAND's GGUF file with members set.
fn edited(members: &[(String, Value)]) -> Vec<u8> {
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/rand.gguf");
    let mut edit = GgufEdit::new(&std::fs::read(fixture).expect("the fixture"));
    for (key, value) in members {
        edit = edit.set(key, value);
    }
    edit.bytes()
}

fn file(members: &[(String, Value)]) -> Outcome {
    let bytes = edited(members);
    let path = Path::new("rand.gguf");
    let mut gguf = Gguf::parse(path, &bytes)?;
    let architecture = gguf.string("general.architecture")?.expect("it has one");
    let family = family::by_gguf_architecture(architecture).expect("a known family");
    let mut tensors = Tensors::new(path, gguf.take_tensors());
    let mut warnings = Warnings::default();
    let config = config::gguf::read(family, &gguf, &mut tensors, &mut warnings)?;
    Ok((config, warnings.into_vec()))
}

fn full(name: &str) -> String {
    if metadata::is_general(name) || name.starts_with("qwen2.") {
        name.to_owned()
    } else {
        format!("llama.{name}")
    }
}

const FILE: Container = Container {
    keys: metadata::KEYS,
    open: file,
    beside: |key| {
        let members = object(key.beside).into_iter();
        members.map(|(name, value)| (full(&name), value)).collect()
    },
    with: |key, mut members, value| {
        members.push((full(key.name), value));
        members
    },
};

fn refuses(outcome: Outcome, key: &str, value: &str) {
    let error = outcome.expect_err(key);
    let message = error.to_string();
    assert!(
        message.contains(&format!("{key}`")),
        "no `{key}` in: {message}"
    );
    assert!(message.contains(value), "no {value} in: {message}");
}

fn check(container: &Container) {
    let (plain, warnings) = (container.open)(&[]).expect("a sound description");
    assert_eq!(warnings, [""; 0]);
    let mut names: Vec<&str> = container.keys.iter().map(|key| key.name).collect();
    names.sort_unstable();
    assert!(names.windows(2).all(|two| two[0] != two[1]), "{names:?}");
    for key in container.keys {
        let beside = (container.beside)(key);
        let members = (container.with)(key, beside.clone(), example(key));
        let outcome = (container.open)(&members);
        match &key.treatment {
            // Where tensors start is no part of the configuration.
            Treatment::Applied(_) if key.name == "general.alignment" => {
                refuses(outcome, key.name, "power of two");
            }
            Treatment::Applied(_) => {
                let (config, _) = outcome.unwrap_or_else(|error| panic!("{}: {error}", key.name));
                if let Ok((before, _)) = (container.open)(&beside) {
                    assert_ne!(config, before, "{} changes nothing", key.name);
                }
                assert_ne!(config, plain, "{} changes nothing", key.name);
            }
            Treatment::Refused { unless, .. } => {
                // Floats of a GGUF file are f32.
                let shown = &key.example[..key.example.len().min(3)];
                refuses(outcome, key.name, shown);
                for value in unless.iter().filter_map(neutral_value) {
                    let members = (container.with)(key, beside.clone(), value.clone());
                    let (config, _) = (container.open)(&members)
                        .unwrap_or_else(|error| panic!("{} = {value}: {error}", key.name));
                    assert_eq!(config, plain, "{} = {value}", key.name);
                }
            }
            Treatment::Ignored(_) | Treatment::Tokenizer(_) => {
                let (config, warnings) =
                    outcome.unwrap_or_else(|error| panic!("{}: {error}", key.name));
                assert_eq!(config, plain, "{} is not ignored", key.name);
                assert_eq!(warnings, [""; 0], "{}", key.name);
            }
        }
    }
}

#[test]
fn every_row_of_config_json_is_applied_refused_or_ignored_as_it_says() {
    check(&FOLDER);
}

#[test]
fn every_row_of_gguf_metadata_is_applied_refused_or_ignored_as_it_says() {
    check(&FILE);
}

#[test]
fn unknown_keys_that_look_like_arithmetic_are_refused_and_others_warned_about() {
    for name in [
        "rope_scaling_type",
        "rotary_emb_base",
        "attn_scale",
        "v_head_dim",
        "moe_intermediate_size",
        "mlp_multipliers",
        "Query_Scaling",
        "router_logit_softcapping",
    ] {
        refuses(folder(&[(name.to_owned(), json!(0.5))]), name, "0.5");
        folder(&[(name.to_owned(), Value::Null)]).expect("null is absent");
    }
    for name in ["rope.freq_scale", "x", "attention.indexer.top_k"] {
        refuses(file(&[(full(name), json!(7))]), name, "7");
    }
    let (_, warnings) = folder(&[("unsloth_fixed".to_owned(), json!(true))]).unwrap();
    assert!(warnings[0].contains("`unsloth_fixed`"), "{warnings:?}");
    let (_, warnings) = file(&[("tokenizer.ggml.new".to_owned(), json!(true))]).unwrap();
    assert!(warnings[0].contains("`tokenizer.ggml.new`"), "{warnings:?}");
    let (_, warnings) = file(&[("quantize.imatrix.file".to_owned(), json!("x"))]).unwrap();
    assert_eq!(warnings, [""; 0]);
}

#[test]
fn the_refused_value_is_shown_cut() {
    let long = json!({ "x": "y".repeat(1000) });
    let error = folder(&[("quantization_config".to_owned(), long)]).unwrap_err();
    assert!(error.to_string().len() < 300, "{error}");
}

#[test]
fn lists_of_equal_values_are_the_value_and_others_name_the_first_layer_that_differs() {
    for name in ["attention.head_count_kv", "feed_forward_length"] {
        let (config, _) = file(&[(full(name), json!([4, 4, 4, 4]))]).unwrap();
        assert_eq!(config, file(&[(full(name), json!(4))]).unwrap().0);
        refuses(
            file(&[(full(name), json!([4, 4, 2, 1]))]),
            name,
            "2 in layer 2",
        );
        refuses(
            file(&[(full(name), json!([4, 4, 4]))]),
            name,
            "3 entries for 4 layers",
        );
        refuses(
            file(&[(full(name), json!([0, 0, 0, 0]))]),
            name,
            "0 is not in",
        );
        refuses(file(&[(full(name), json!([]))]), name, "0 entries");
        refuses(
            file(&[(full(name), json!(["a", "b", "c", "d"]))]),
            name,
            "numbers",
        );
    }
    refuses(
        file(&[(full("block_count"), json!([4, 4]))]),
        "block_count",
        "one number",
    );
}

#[test]
fn the_page_shows_these_tables() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/model-keys.md");
    let wanted = page();
    if std::env::var_os("BATON_WRITE_DOCS").is_some() {
        std::fs::write(path, &wanted).expect("write the page");
    }
    assert!(
        std::fs::read_to_string(path).is_ok_and(|page| page == wanted),
        "docs/model-keys.md differs; write it with BATON_WRITE_DOCS=1 and this test"
    );
}
