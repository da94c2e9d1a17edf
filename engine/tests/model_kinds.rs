//! What is not a regular file is refused by its kind, at whatever place a model has a
//! file, and never waited for.

#[path = "model_support/gguf_parts.rs"]
mod gguf_parts;
#[path = "model_support/runner.rs"]
mod runner;

use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use baton_engine::model::{LoadOptions, Model};
use baton_proto::ErrorKind;
use gguf_parts::{Parts, shard_name};
use runner::{fixture, open};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use tempfile::TempDir;

/// Ends a test that would wait for ever; no load of these files takes a second.
const HANGS_AFTER: Duration = Duration::from_secs(60);

/// The word for a kind of file, and how one is made.
type Kind = (&'static str, fn(&Path));

/// What may lie where a file is expected.
const KINDS: [Kind; 5] = [
    ("a FIFO", |path| {
        mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    }),
    ("a socket", |path| drop(UnixListener::bind(path).unwrap())),
    ("a folder", |path| std::fs::create_dir(path).unwrap()),
    ("a link to `nowhere`, where nothing is", |path| {
        symlink("nowhere", path).unwrap();
    }),
    ("a character device", |path| {
        symlink("/dev/zero", path).unwrap()
    }),
];

/// The message of a refusal that must come.
fn refusal(path: &Path) -> (ErrorKind, String) {
    let (tx, rx) = mpsc::channel();
    let opened = path.to_owned();
    std::thread::spawn(move || {
        let opened = Model::open(&opened, &LoadOptions::default(), &mut |_, _| {});
        drop(tx.send(opened.map(|_| ())));
    });
    let opened = rx.recv_timeout(HANGS_AFTER);
    let opened = opened.unwrap_or_else(|_| panic!("`{}` is waited for", path.display()));
    let error = opened.expect_err("what is no file is refused");
    (error.kind(), error.to_string())
}

/// Each kind in turn at `place`, where a sound model has a file.
fn check(model: &Path, place: &Path) {
    let kept = std::fs::read(place).unwrap();
    for (word, make) in KINDS {
        std::fs::remove_file(place).unwrap();
        make(place);
        let (kind, message) = refusal(model);
        let name = place.file_name().unwrap().to_str().unwrap();
        assert!(message.contains(word), "no `{word}` in: {message}");
        assert!(message.contains(name), "no `{name}` in: {message}");
        assert_eq!(kind, ErrorKind::Invalid, "{message}");
        if place.is_dir() {
            std::fs::remove_dir(place).unwrap();
        } else {
            std::fs::remove_file(place).unwrap();
        }
        std::fs::write(place, &kept).unwrap();
    }
    open(model);
}

fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture("rand")).unwrap() {
        let from = entry.unwrap().path();
        std::fs::copy(&from, folder.path().join(from.file_name().unwrap())).unwrap();
    }
    folder
}

#[test]
fn every_file_of_a_folder() {
    let folder = folder();
    std::fs::write(folder.path().join("chat_template.jinja"), "{{ bos_token }}").unwrap();
    let files: Vec<PathBuf> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    assert_eq!(files.len(), 6, "{files:?}");
    for place in files {
        check(folder.path(), &place);
    }
}

#[test]
fn shards_and_index_of_a_folder() {
    let folder = folder();
    let at = |name: &str| folder.path().join(name);
    let shard = "model-00001-of-00001.safetensors";
    std::fs::rename(at("model.safetensors"), at(shard)).unwrap();
    let bytes = std::fs::read(at(shard)).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let map: serde_json::Map<String, serde_json::Value> = file
        .names()
        .into_iter()
        .map(|name| (name.to_owned(), shard.into()))
        .collect();
    let index = serde_json::json!({ "weight_map": map });
    std::fs::write(at("model.safetensors.index.json"), index.to_string()).unwrap();
    open(folder.path());
    check(folder.path(), &at(shard));
    check(folder.path(), &at("model.safetensors.index.json"));
}

#[test]
fn a_gguf_file_and_every_shard() {
    let folder = tempfile::tempdir().unwrap();
    let whole = std::fs::read(fixture("rand.gguf")).unwrap();
    let place = folder.path().join("rand.gguf");
    std::fs::write(&place, &whole).unwrap();
    for (word, make) in KINDS.into_iter().filter(|(word, _)| *word != "a folder") {
        std::fs::remove_file(&place).unwrap();
        make(&place);
        let (_, message) = refusal(&place);
        assert!(message.contains(word), "no `{word}` in: {message}");
        assert!(message.contains("rand.gguf"), "{message}");
    }

    let folder = tempfile::tempdir().unwrap();
    let shard = |number| folder.path().join(shard_name("rand", number, 2));
    for (index, part) in Parts::read(&whole).split(2).iter().enumerate() {
        std::fs::write(shard(index + 1), part.bytes()).unwrap();
    }
    check(&shard(1), &shard(2));
    check(&shard(2), &shard(1));
}
