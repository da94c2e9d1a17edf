//! Fuzz targets: damaged headers of GGUF and safetensors files, and damaged JSON files of
//! a folder, through the same [`Model::open`] that serves.
//!
//! A case is damage to a sound fixture ([`damage`]): replaced numbers and texts, edited
//! bytes. Whatever they make of it: no panic; an error that names the file, or a model
//! that can be described; memory within [`BYTES_MAX`]; processor time within [`CPU_MAX`].
//!
//! `cargo test` draws a second's worth of cases per target. Longer, on stable:
//!
//! ```text
//! BOLERO_RANDOM_ITERATIONS=1000000000 BOLERO_RANDOM_TEST_TIME_MS=200000 \
//!     cargo test -p baton-engine --test fuzz_headers -- --nocapture
//! ```
//!
//! (200 s each on one shared core: 88,535 GGUF headers, 58,181 safetensors headers and
//! 17,734 folder descriptions, at most 8.4 MB held.) The targets are bolero's, so that
//! `cargo bolero test --sanitizer NONE` can steer them by coverage. A failure prints the
//! damage and the `BOLERO_RANDOM_SEED` that repeats it.

#[path = "model_support/allocations.rs"]
mod allocations;
#[path = "model_support/damage.rs"]
mod damage;
#[path = "model_support/gguf_parts.rs"]
mod gguf_parts;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use allocations::peak_of;
use baton_engine::model::{Error, LoadOptions, Model};
use baton_proto::kv_layout::KvDtype;
use bolero::produce;
use damage::{Damage, Form, Sound, Value, json_values, scaled};
use gguf_parts::{Parts, shard_name};
use rustix::process::{Resource, Rlimit, setrlimit};
use tempfile::TempDir;

/// Rotation tables may take 32 MiB whatever the file's size; everything else is a small
/// multiple of the fixture's 360 KB (the sound ones take 1.8 times that).
const BYTES_MAX: usize = (32 << 20) + (2 << 20);

/// Of the loading thread. Sound fixtures take a few milliseconds.
const CPU_MAX: Duration = Duration::from_secs(1);

/// Address space of the process: an allocation that ignores the file's size fails
/// instead of taking the machine down.
const ADDRESS_SPACE_MAX: u64 = 8 << 30;

const TEST_TIME: Duration = Duration::from_secs(1);
/// Elements of an array whose places are known to the edits.
const ARRAY_VALUES_MAX: u64 = 3;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fixtures")
        .join(name)
}

fn limit_address_space() {
    let limit = Rlimit {
        current: Some(ADDRESS_SPACE_MAX),
        maximum: Some(ADDRESS_SPACE_MAX),
    };
    setrlimit(Resource::As, limit).unwrap();
}

/// What the scheduler gave this thread, which a busy machine does not change.
fn cpu_time() -> Duration {
    let line = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    let nanoseconds = line.split(' ').next().unwrap();
    Duration::from_nanos(nanoseconds.parse().unwrap())
}

/// Opens what may be anything; also the most bytes held meanwhile.
fn open_measured(path: &Path) -> (Result<(), Error>, usize) {
    let start = cpu_time();
    let (opened, bytes): (Result<(), Error>, usize) = peak_of(|| {
        let model = Model::open(path, &LoadOptions::default(), &mut |_, _| {})?;
        model.card("fuzz", model.kv_layout(16, KvDtype::F16));
        Ok(())
    });
    let took = cpu_time() - start;
    assert!(bytes <= BYTES_MAX, "{bytes} bytes: {opened:?}");
    assert!(took <= CPU_MAX, "{took:?}: {opened:?}");
    if let Err(error) = &opened {
        let folder = path.parent().unwrap().to_string_lossy();
        assert!(error.to_string().contains(&*folder), "{error}");
    }
    (opened, bytes)
}

fn open_bounded(path: &Path) -> Result<(), Error> {
    open_measured(path).0
}

/// How many cases ended how; bolero itself reports none of it under `cargo test`.
#[derive(Default)]
struct Tally {
    opened: AtomicU64,
    refused: AtomicU64,
    bytes_most: AtomicUsize,
}

impl Tally {
    fn open(&self, path: &Path) {
        let (result, bytes) = open_measured(path);
        let counter = match result {
            Ok(()) => &self.opened,
            Err(_) => &self.refused,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        self.bytes_most.fetch_max(bytes, Ordering::Relaxed);
    }

    fn report(&self, target: &str) {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (opened, refused) = (count(&self.opened), count(&self.refused));
        let bytes = self.bytes_most.load(Ordering::Relaxed);
        println!("{target}: {opened} opened, {refused} refused, at most {bytes} bytes");
        assert!(refused > 0, "no damage ever did any harm");
    }
}

/// A header of GGUF, walked as the format says, so that its numbers can be named.
struct Walk<'a> {
    bytes: &'a [u8],
    at: usize,
    values: Vec<(usize, usize)>,
}

impl Walk<'_> {
    fn number(&mut self, len: usize) -> u64 {
        let mut le = [0; 8];
        le[..len].copy_from_slice(&self.bytes[self.at..self.at + len]);
        self.values.push((self.at, len));
        self.at += len;
        u64::from_le_bytes(le)
    }

    fn string(&mut self) {
        self.at += self.number(8) as usize;
    }

    fn value(&mut self, ty: u64) {
        match ty {
            0 | 1 | 7 => drop(self.number(1)),
            2 | 3 => drop(self.number(2)),
            4..=6 => drop(self.number(4)),
            8 => self.string(),
            9 => {
                let (element, count) = (self.number(4), self.number(8));
                for index in 0..count {
                    self.value(element);
                    // The rest is alike and would draw most of the edits.
                    if index >= ARRAY_VALUES_MAX {
                        self.values.pop();
                    }
                }
            }
            _ => drop(self.number(8)),
        }
    }
}

fn sound_gguf(bytes: Vec<u8>) -> Sound {
    let mut walk = Walk {
        bytes: &bytes,
        at: 0,
        values: Vec::new(),
    };
    let (_magic, _version) = (walk.number(4), walk.number(4));
    let (tensors, entries) = (walk.number(8), walk.number(8));
    for _ in 0..entries {
        walk.string();
        let ty = walk.number(4);
        walk.value(ty);
    }
    for _ in 0..tensors {
        walk.string();
        for _ in 0..walk.number(4) {
            walk.number(8);
        }
        let (_type, _offset) = (walk.number(4), walk.number(8));
    }
    let (header, values) = (walk.at, walk.values);
    Sound {
        header,
        values,
        form: Form::Binary,
        bytes,
    }
}

#[test]
fn gguf_headers() {
    limit_address_space();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fuzz.gguf");
    let sound = sound_gguf(std::fs::read(fixture("rand.gguf")).unwrap());
    std::fs::write(&path, &sound.bytes).unwrap();
    open_bounded(&path).unwrap();
    let tally = Tally::default();
    bolero::check!()
        .with_test_time(TEST_TIME)
        .with_generator(Damage::any())
        .for_each(|damage: &Damage| {
            std::fs::write(&path, sound.damaged(damage)).unwrap();
            tally.open(&path);
        });
    tally.report("gguf_headers");
}

/// Damage to the header of one of two shards; the other is sound.
#[test]
fn gguf_shards() {
    limit_address_space();
    let folder = tempfile::tempdir().unwrap();
    let path = |number: usize| folder.path().join(shard_name("fuzz", number, 2));
    let parts = Parts::read(&std::fs::read(fixture("rand.gguf")).unwrap());
    let shards: Vec<Sound> = parts
        .split(2)
        .iter()
        .map(|shard| sound_gguf(shard.bytes()))
        .collect();
    for (index, shard) in shards.iter().enumerate() {
        std::fs::write(path(index + 1), &shard.bytes).unwrap();
    }
    open_bounded(&path(1)).unwrap();
    let tally = Tally::default();
    bolero::check!()
        .with_test_time(TEST_TIME)
        .with_generator((0..shards.len(), Damage::any()))
        .for_each(|(which, damage): &(usize, Damage)| {
            std::fs::write(path(which + 1), shards[*which].damaged(damage)).unwrap();
            tally.open(&path(2 - which));
            std::fs::write(path(which + 1), &shards[*which].bytes).unwrap();
        });
    tally.report("gguf_shards");
}

const FOLDER_FILES: [&str; 5] = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
];

fn sound_folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in FOLDER_FILES {
        std::fs::copy(fixture("rand").join(file), folder.path().join(file)).unwrap();
    }
    open_bounded(folder.path()).unwrap();
    folder
}

#[test]
fn safetensors_headers() {
    limit_address_space();
    let folder = sound_folder();
    let path = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let data = bytes.split_off(8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize);
    let json = bytes.split_off(8);
    let sound = Sound {
        header: json.len(),
        values: json_values(&json),
        form: Form::Json,
        bytes: json,
    };
    let tally = Tally::default();
    bolero::check!()
        .with_test_time(TEST_TIME)
        .with_generator((Damage::any(), produce::<(Option<Value>, Option<u32>)>()))
        .for_each(
            |(damage, (length, cut)): &(Damage, (Option<Value>, Option<u32>))| {
                let json = sound.damaged(damage);
                // Mostly a length that is right, else nothing behind it would be reached.
                let length = match length {
                    Some(Value::Small(_)) | None => json.len() as u64,
                    Some(wrong) => wrong.number(),
                };
                let mut bytes = [&length.to_le_bytes()[..], &json, &data].concat();
                if let Some(cut) = cut.filter(|cut| cut % 4 == 0) {
                    bytes.truncate(scaled(cut, bytes.len()));
                }
                std::fs::write(&path, bytes).unwrap();
                tally.open(folder.path());
            },
        );
    tally.report("safetensors_headers");
}

#[test]
fn folder_descriptions() {
    limit_address_space();
    let folder = sound_folder();
    let sound: Vec<(PathBuf, Sound)> = ["config.json", "tokenizer.json", "tokenizer_config.json"]
        .iter()
        .map(|file| {
            let path = folder.path().join(file);
            let bytes = std::fs::read(&path).unwrap();
            let sound = Sound {
                header: bytes.len(),
                values: json_values(&bytes),
                form: Form::Json,
                bytes,
            };
            (path, sound)
        })
        .collect();
    let tally = Tally::default();
    bolero::check!()
        .with_test_time(TEST_TIME)
        .with_generator((0..sound.len(), Damage::any()))
        .for_each(|(which, damage): &(usize, Damage)| {
            let (path, sound) = &sound[*which];
            std::fs::write(path, sound.damaged(damage)).unwrap();
            tally.open(folder.path());
            std::fs::write(path, &sound.bytes).unwrap();
        });
    tally.report("folder_descriptions");
}

/// Found by `gguf_headers`: a table per layer was laid out before the number was checked.
#[test]
fn a_number_of_layers_that_no_model_has_takes_no_memory() {
    limit_address_space();
    let folder = sound_folder();
    let path = folder.path().join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let huge = text.replace(
        "\"num_hidden_layers\": 4",
        "\"num_hidden_layers\": 400000000",
    );
    assert_ne!(huge, text);
    std::fs::write(&path, huge).unwrap();
    let error = open_bounded(folder.path()).unwrap_err().to_string();
    assert!(
        error.contains("`num_hidden_layers`") && error.contains("400000000"),
        "{error}"
    );

    let mut bytes = std::fs::read(fixture("rand.gguf")).unwrap();
    let key = b"llama.block_count";
    let at = bytes
        .windows(key.len())
        .position(|window| window == key)
        .unwrap();
    let value = at + key.len() + 4;
    bytes[value..value + 4].copy_from_slice(&400_000_000_u32.to_le_bytes());
    let path = folder.path().join("huge.gguf");
    std::fs::write(&path, bytes).unwrap();
    let error = open_bounded(&path).unwrap_err().to_string();
    assert!(
        error.contains("block_count`") && error.contains("400000000"),
        "{error}"
    );
}
