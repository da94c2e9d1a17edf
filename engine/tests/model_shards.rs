//! GGUF models that are split into shards: any of them opens all, and shards that do not
//! belong together are refused by the name of the file.

#[path = "model_support/gguf_parts.rs"]
mod gguf_parts;
#[path = "model_support/runner.rs"]
mod runner;

use std::path::{Path, PathBuf};

use baton_engine::model::{LoadOptions, Model};
use gguf_parts::{I32, Parts, U16, shard_name};
use runner::{Runner, Setup, fixture, open};
use tempfile::TempDir;

const COUNT: usize = 3;

fn rand() -> Parts {
    Parts::read(&std::fs::read(fixture("rand.gguf")).unwrap())
}

fn path(folder: &TempDir, number: usize) -> PathBuf {
    folder.path().join(shard_name("rand", number, COUNT))
}

fn written(shards: &[Parts]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (index, shard) in shards.iter().enumerate() {
        std::fs::write(path(&folder, index + 1), shard.bytes()).unwrap();
    }
    folder
}

fn logits(path: &Path) -> Vec<u32> {
    let model = open(path);
    let mut runner = Runner::new(&model, Setup::default());
    let tokens: Vec<u32> = (2..40).collect();
    let (_, logits) = runner.prefill(&tokens, 32);
    logits.into_iter().map(f32::to_bits).collect()
}

fn refused(path: &Path, parts: &[&str]) {
    match Model::open(path, &LoadOptions::default(), &mut |_, _| {}) {
        Ok(_) => panic!("opened, expected {parts:?}"),
        Err(error) => {
            let message = error.to_string();
            for part in parts {
                assert!(message.contains(part), "no `{part}` in: {message}");
            }
        }
    }
}

#[test]
fn any_shard_and_their_folder_open_the_whole_model() {
    let whole = fixture("rand.gguf");
    let (model, expected) = (open(&whole), logits(&whole));
    let folder = written(&rand().split(COUNT));
    let mut digests = Vec::new();
    for place in [
        path(&folder, 1),
        path(&folder, 2),
        path(&folder, 3),
        folder.path().to_owned(),
    ] {
        assert_eq!(logits(&place), expected, "{}", place.display());
        let shards = open(&place);
        assert_eq!(shards.parameters(), model.parameters());
        assert_eq!(shards.formats(), model.formats());
        assert_eq!(shards.tokenizer_spec(), model.tokenizer_spec());
        digests.push(*shards.digest());
    }
    assert!(digests.iter().all(|digest| *digest == digests[0]));
    assert_ne!(&digests[0], model.digest());

    // The digest covers each shard.
    for changed in 0..COUNT {
        let mut shards = rand().split(COUNT);
        shards[changed].tensors[0].data[0] ^= 1;
        let folder = written(&shards);
        assert_ne!(*open(&path(&folder, 1)).digest(), digests[0], "{changed}");
    }
}

#[test]
fn a_set_of_one_is_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(shard_name("rand", 1, 1));
    std::fs::copy(fixture("rand.gguf"), &path).unwrap();
    let model = open(&path);
    assert_eq!(model.digest(), open(&fixture("rand.gguf")).digest());
    std::fs::write(&path, rand().split(1)[0].bytes()).unwrap();
    open(&path);
}

#[test]
fn shards_that_do_not_belong_together_are_refused_by_file() {
    let name = |number| shard_name("rand", number, COUNT);
    for lost in 1..=COUNT {
        let folder = written(&rand().split(COUNT));
        std::fs::remove_file(path(&folder, lost)).unwrap();
        let given = path(&folder, lost % COUNT + 1);
        refused(&given, &[&name(lost), "No such file"]);
        refused(folder.path(), &[&name(lost), "No such file"]);
    }

    let folder = written(&rand().split(COUNT));
    std::fs::copy(path(&folder, 2), path(&folder, 3)).unwrap();
    refused(
        &path(&folder, 1),
        &[
            &name(3),
            "split.no",
            "1, counted from 0; by its name it is 2",
        ],
    );

    let changed = |index: usize, change: &dyn Fn(&mut Parts)| {
        let mut shards = rand().split(COUNT);
        change(&mut shards[index]);
        written(&shards)
    };
    let folder = changed(1, &|shard| {
        shard.set("split.count", U16, &4_u16.to_le_bytes());
    });
    refused(&path(&folder, 1), &[&name(2), "split.count", "4 files"]);
    let folder = changed(2, &|shard| {
        shard.set("split.tensors.count", I32, &38_i32.to_le_bytes());
    });
    refused(
        &path(&folder, 1),
        &[&name(3), "split.tensors.count", "differs"],
    );
    let folder = changed(1, &|shard| {
        shard.set_u32("llama.block_count", 5);
    });
    refused(
        &path(&folder, 1),
        &[&name(2), "llama.block_count", "differs"],
    );
    // Metadata that the first shard has not is not read anywhere else.
    let folder = changed(1, &|shard| {
        shard.set_u32("llama.new", 5);
    });
    refused(&path(&folder, 1), &[&name(2), "llama.new", "differs"]);
    let folder = changed(1, &|shard| {
        let again = rand().tensors[0].clone();
        shard.tensors.push(again);
    });
    refused(
        &path(&folder, 1),
        &[&name(2), &rand().tensors[0].name, "is also in", &name(1)],
    );
    let folder = changed(2, &|shard| drop(shard.tensors.pop()));
    refused(&path(&folder, 1), &[&name(1), "39 tensors", "hold 38"]);
    let folder = changed(0, &|shard| {
        shard.entries.retain(|(key, _)| !key.starts_with("split."));
    });
    refused(&path(&folder, 1), &[&name(1), "split.count"]);
    let folder = changed(1, &|shard| shard.tensors[0].data.truncate(7));
    refused(&path(&folder, 1), &[&name(2), "tensor `"]);
}

#[test]
fn a_shard_that_is_not_named_like_one_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rand.gguf");
    std::fs::write(&path, rand().split(COUNT)[1].bytes()).unwrap();
    refused(
        &path,
        &["rand.gguf", "split.count", "shard 2 of 3", "00001-of-00003"],
    );
}

#[test]
fn a_folder_is_never_guessed_at() {
    let folder = written(&rand().split(COUNT));
    std::fs::copy(fixture("rand.gguf"), folder.path().join("other.gguf")).unwrap();
    refused(
        folder.path(),
        &[
            "more than one GGUF model",
            "other.gguf",
            &shard_name("rand", 1, COUNT),
        ],
    );
    // A file that is named is that file, whatever lies beside it.
    open(&folder.path().join("other.gguf"));
    open(&path(&folder, 2));
    let empty = tempfile::tempdir().unwrap();
    refused(empty.path(), &["config.json", "GGUF"]);
}
