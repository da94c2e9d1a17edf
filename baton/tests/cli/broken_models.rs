//! Models that cannot be served are refused by every command that opens one, with the
//! field and the place, before anything is joined or printed.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{assert_says, baton, fixture, refused};

/// Every command that opens a model. Nobody is at the store's address.
fn check(model: &Path, words: &[&str]) {
    let model = model.to_str().unwrap();
    let store = "--etcd=http://127.0.0.1:1";
    let doors = ["--http=127.0.0.1:0", "--grpc=127.0.0.1:0"];
    let commands: [Vec<&str>; 5] = [
        vec!["model", "inspect", model],
        vec!["generate", "--model", model, "hello"],
        vec!["up", "--model", model, doors[0], doors[1]],
        vec!["prefill", store, "--model", model],
        vec!["decode", store, "--model", model],
    ];
    for command in commands {
        // The log would say that nobody is at the store's address.
        let said = refused(baton(&command).args(["--log", "off"]));
        assert_says(&said, words);
    }
}

/// The file with the only occurrence of `from` replaced by as many bytes.
fn patched(folder: &Path, from: &[u8], to: &[u8]) -> PathBuf {
    assert_eq!(from.len(), to.len());
    let mut bytes = std::fs::read(fixture("rand.gguf")).unwrap();
    let places: Vec<usize> = (0..bytes.len() - from.len())
        .filter(|at| bytes[*at..].starts_with(from))
        .collect();
    assert_eq!(places.len(), 1, "{}", from.escape_ascii());
    bytes[places[0]..][..to.len()].copy_from_slice(to);
    let path = folder.join("broken.gguf");
    std::fs::write(&path, bytes).unwrap();
    path
}

/// A string of GGUF.
fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

#[test]
fn a_merge_that_is_none_is_named_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let model = patched(folder.path(), &string("h e"), &string("h_e"));
    let place = "merges[1] `h_e`";
    check(&model, &["broken.gguf", "`tokenizer`", place, "no space"]);
    let model = patched(folder.path(), &string("h e"), &string("h \u{1}"));
    check(&model, &["broken.gguf", "merges[1]", "is no token"]);
}

#[test]
fn a_split_rule_that_is_not_known_is_refused_where_the_model_is_opened() {
    let folder = tempfile::tempdir().unwrap();
    let model = patched(folder.path(), &string("gpt-2"), &string("gpt-9"));
    check(&model, &["broken.gguf", "`gpt-9`"]);
}

#[test]
fn a_damaged_tokenizer_file_is_refused_with_its_reason() {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture("rand")).unwrap() {
        let from = entry.unwrap().path();
        std::fs::copy(&from, folder.path().join(from.file_name().unwrap())).unwrap();
    }
    let path = folder.path().join("tokenizer.json");
    let sound: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let check_with = |change: &dyn Fn(&mut Value), words: &[&str]| {
        let mut json = sound.clone();
        change(&mut json);
        std::fs::write(&path, json.to_string()).unwrap();
        check(folder.path(), words);
    };
    check_with(
        &|json| json["model"]["merges"][3] = serde_json::json!(["h", "nowhere"]),
        &["`tokenizer`", "tokenizer.json", "nowhere"],
    );
    check_with(
        &|json| json["decoder"] = serde_json::json!({"type": "CTC"}),
        &["`tokenizer`", "decoder `CTC`"],
    );
}
