//! One rule for special ids that are no token, in folders and GGUF files: a warning where
//! nothing needs the id, a refusal where a sequence could not start or end as asked.

#[path = "model_support/gguf_edit.rs"]
mod gguf_edit;
#[path = "model_support/runner.rs"]
mod runner;

use std::sync::Arc;

use baton_engine::model::{Error, LoadOptions, Model};
use gguf_edit::GgufEdit;
use runner::fixture;
use serde_json::{Map, Value, json};

/// The vocabulary of every fixture here.
const TOKENS: u64 = 300;

/// What ids that are no token look like in the wild.
const BAD: [i64; 3] = [4_294_967_295, -1, TOKENS as i64];

fn open(path: &std::path::Path) -> Result<Arc<Model>, Error> {
    Model::open(path, &LoadOptions::default(), &mut |_, _| {})
}

fn gguf(members: &[(&str, Value)]) -> Result<Arc<Model>, Error> {
    let mut edit = GgufEdit::new(&std::fs::read(fixture("rand.gguf")).unwrap());
    for (key, value) in members {
        edit = edit.set(&format!("tokenizer.ggml.{key}"), value);
    }
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("rand.gguf");
    std::fs::write(&path, edit.bytes()).unwrap();
    open(&path)
}

/// A folder without named special tokens, with members set in files.
fn folder(members: &[(&str, &str, Value)]) -> Result<Arc<Model>, Error> {
    let root = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(fixture("chain-bytes")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), root.path().join(file.file_name())).unwrap();
    }
    for (file, key, value) in members {
        let path = root.path().join(file);
        let mut json: Map<String, Value> =
            serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        json.insert((*key).to_owned(), value.clone());
        std::fs::write(&path, Value::Object(json).to_string()).unwrap();
    }
    open(root.path())
}

fn warns(model: Result<Arc<Model>, Error>, field: &str, id: i64) -> Arc<Model> {
    let model = model.unwrap_or_else(|error| panic!("{field} {id}: {error}"));
    let warnings = model.warnings();
    assert_eq!(warnings.len(), 1, "{field} {id}: {warnings:?}");
    for part in [&format!("{field}`"), &id.to_string(), "is ignored"] {
        assert!(warnings[0].contains(part), "no {part} in: {}", warnings[0]);
    }
    model
}

fn refuses(model: Result<Arc<Model>, Error>, field: &str, id: &str) {
    match model {
        Ok(_) => panic!("{field} {id} was taken"),
        Err(error) => {
            let message = error.to_string();
            for part in [&format!("{field}`"), id] {
                assert!(message.contains(part), "no {part} in: {message}");
            }
        }
    }
}

#[test]
fn ids_that_nobody_uses_are_a_warning_in_gguf_files() {
    let sound = gguf(&[]).unwrap();
    assert!(sound.warnings().is_empty());
    for id in BAD {
        for key in [
            "unknown_token_id",
            "padding_token_id",
            "eot_token_id",
            "eom_token_id",
        ] {
            let model = warns(gguf(&[(key, json!(id))]), key, id);
            assert_eq!(model.eos(), sound.eos());
        }
        // No prompt starts with it.
        let members = [("bos_token_id", json!(id)), ("add_bos_token", json!(false))];
        let model = warns(gguf(&members), "bos_token_id", id);
        assert_eq!(model.tokenizer_spec().bos, None);
        // Another id ends sequences.
        let members = [("eos_token_id", json!(id)), ("eot_token_id", json!(7))];
        assert_eq!(warns(gguf(&members), "eos_token_id", id).eos(), [7]);
    }
}

#[test]
fn ids_that_are_needed_are_refused_in_gguf_files() {
    for id in BAD {
        let members = [("bos_token_id", json!(id)), ("add_bos_token", json!(true))];
        refuses(gguf(&members), "bos_token_id", &id.to_string());
        refuses(
            gguf(&[("eos_token_id", json!(id))]),
            "eos_token_id",
            &id.to_string(),
        );
    }
    for value in [json!("1"), json!(1.5), json!(true), json!([1])] {
        refuses(
            gguf(&[("padding_token_id", value)]),
            "padding_token_id",
            "must be an id",
        );
    }
    // No end at all is a base model's own affair.
    let none = gguf(&[("eos_token_id", Value::Null)]).unwrap();
    assert_eq!((none.eos(), none.warnings()), (&[][..], &[][..]));
}

#[test]
fn the_same_holds_for_folders() {
    const FILES: [&str; 2] = ["config.json", "generation_config.json"];
    let sound = folder(&[]).unwrap();
    assert!(sound.warnings().is_empty());
    for id in BAD {
        for file in FILES {
            // The other file and the list have ids that are tokens.
            let model = folder(&[(file, "eos_token_id", json!([3, id]))]);
            assert!(warns(model, "eos_token_id", id).eos().contains(&3));
        }
        let start = ("config.json", "bos_token_id", json!(id));
        let model = warns(folder(std::slice::from_ref(&start)), "bos_token_id", id);
        assert_eq!(model.tokenizer_spec().bos, None);
        let added = ("tokenizer_config.json", "add_bos_token", json!(true));
        refuses(folder(&[start, added]), "bos_token_id", &id.to_string());
        let ends = FILES.map(|file| (file, "eos_token_id", json!(id)));
        let unnamed = ("tokenizer_config.json", "eos_token", Value::Null);
        let members: Vec<_> = ends.into_iter().chain([unnamed]).collect();
        refuses(folder(&members), "eos_token_id", &id.to_string());
    }
    for value in [json!("1"), json!([1.5]), json!({"id": 1})] {
        let member = ("config.json", "eos_token_id", value);
        refuses(folder(&[member]), "eos_token_id", "must be an id");
    }
    // Ids of padding are read nowhere.
    let padding = folder(&[("config.json", "pad_token_id", json!(-1))]).unwrap();
    assert!(padding.warnings().is_empty());
}
