//! Hostile, truncated and contradictory model files: each ends in an error that names
//! the file and the place, quickly and without large allocations.
#![allow(unsafe_code)]

#[path = "model_support/runner.rs"]
mod runner;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use baton_engine::model::{Error, LoadOptions, Model};
use baton_proto::tokenizer_spec::TokenizerModel;
use runner::{Runner, Setup, fixture, open, real_model};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

/// Counts what the current thread holds and the most it ever held.
struct Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // Threads that are ending have no counters any more.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(held.get())));
    });
}

// SAFETY: forwards to the system's allocator; the counters do not touch memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Opens a file that must be refused; the message.
fn refused(path: &Path) -> (Error, String) {
    let held = HELD.with(Cell::get);
    PEAK.with(|peak| peak.set(held));
    let start = Instant::now();
    let error = match Model::open(path, &LoadOptions::default(), &mut |_, _| {}) {
        Ok(model) => panic!("{} was opened: {model:?}", path.display()),
        Err(error) => error,
    };
    assert!(
        start.elapsed() < Duration::from_secs(1),
        "{error}: took {:?}",
        start.elapsed()
    );
    let extra = PEAK.with(Cell::get) - held;
    assert!(extra < 64 << 20, "{error}: took {extra} bytes");
    let message = error.to_string();
    assert!(
        message.contains(&*path.file_name().unwrap().to_string_lossy()),
        "{message}"
    );
    (error, message)
}

/// Writes GGUF files, right or wrong.
#[derive(Clone, Default)]
struct GgufWriter {
    entries: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
    data: Vec<u8>,
}

fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

fn entry(key: &str, ty: u32, value: &[u8]) -> Vec<u8> {
    let mut bytes = string(key);
    bytes.extend(ty.to_le_bytes());
    bytes.extend_from_slice(value);
    bytes
}

impl GgufWriter {
    fn entry(mut self, key: &str, ty: u32, value: &[u8]) -> Self {
        self.entries.push(entry(key, ty, value));
        self
    }

    fn text(self, key: &str, value: &str) -> Self {
        self.entry(key, 8, &string(value))
    }

    fn tensor(mut self, name: &str, dims: &[u64], ty: u32, offset: u64) -> Self {
        let mut info = string(name);
        info.extend((dims.len() as u32).to_le_bytes());
        for dim in dims {
            info.extend(dim.to_le_bytes());
        }
        info.extend(ty.to_le_bytes());
        info.extend(offset.to_le_bytes());
        self.tensors.push(info);
        self
    }

    fn data(mut self, bytes: usize) -> Self {
        self.data = vec![0; bytes];
        self
    }

    fn header(version: u32, tensors: u64, entries: u64) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(version.to_le_bytes());
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(entries.to_le_bytes());
        bytes
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Self::header(3, self.tensors.len() as u64, self.entries.len() as u64);
        bytes.extend(self.entries.concat());
        bytes.extend(self.tensors.concat());
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend_from_slice(&self.data);
        bytes
    }
}

struct Folder {
    root: tempfile::TempDir,
    files: usize,
}

impl Folder {
    fn new() -> Self {
        Self {
            root: tempfile::tempdir().unwrap(),
            files: 0,
        }
    }

    fn gguf(&mut self, bytes: &[u8]) -> PathBuf {
        self.files += 1;
        let path = self
            .root
            .path()
            .join(format!("hostile-{}.gguf", self.files));
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

#[test]
fn hostile_gguf_headers_are_refused_by_field_and_offset() {
    let mut folder = Folder::new();
    let arch = || GgufWriter::default().text("general.architecture", "llama");
    let header = GgufWriter::header;
    let with_key_length = |length: u64| {
        let mut bytes = header(3, 0, 1);
        bytes.extend(length.to_le_bytes());
        bytes.extend([b'x'; 64]);
        bytes
    };
    let with_array = |element: u32, count: u64| {
        let mut value = element.to_le_bytes().to_vec();
        value.extend(count.to_le_bytes());
        value.extend([0; 64]);
        arch().entry("some.array", 9, &value).bytes()
    };
    let with_string = |length: u64| {
        let mut value = length.to_le_bytes().to_vec();
        value.extend([b'x'; 64]);
        arch().entry("some.string", 8, &value).bytes()
    };
    let mut nested = Vec::new();
    for _ in 0..1000 {
        nested.extend(9_u32.to_le_bytes());
        nested.extend(1_u64.to_le_bytes());
    }
    let file_size = with_string(0).len() as u64;
    let cases: Vec<(Vec<u8>, &str, &str)> = vec![
        (header(3, 1 << 63, 0), "tensor_count", "offset 8"),
        (header(3, 0, 1 << 63), "metadata_kv_count", "offset 16"),
        (with_key_length(1 << 63), "metadata key 0", "offset 24"),
        (with_key_length(1 << 30), "metadata key 0", "offset 24"),
        (with_string(1 << 63), "some.string", "offset 92"),
        (with_string(1 << 30), "some.string", "offset 92"),
        (with_string(file_size + 1), "some.string", "offset 92"),
        (with_array(4, 1 << 62), "some.array", "offset 95"),
        (with_array(8, 1 << 62), "some.array", "offset 95"),
        (with_array(8, 1000), "some.array", "offset 95"),
        (with_array(9, 1), "some.array", "arrays of arrays"),
        (
            arch().entry("some.array", 9, &nested).bytes(),
            "some.array",
            "arrays of arrays",
        ),
        (with_array(99, 1), "some.array", "element type 99"),
        (
            arch().entry("odd", 99, &[0; 8]).bytes(),
            "odd",
            "value type 99",
        ),
        (arch().entry("odd", 7, &[2]).bytes(), "odd", "boolean of 2"),
        (header(0, 0, 0), "version", "offset 4"),
        (header(1, 0, 0), "version", "offset 4"),
        (header(99, 0, 0), "version", "offset 4"),
        (header(3_u32.swap_bytes(), 0, 0), "version", "byte-swapped"),
        (b"FUGG\0\0\0\x03".to_vec(), "magic", "big-endian"),
        (b"GGU".to_vec(), "magic", "offset 0"),
        (b"nonsense, but long enough".to_vec(), "magic", "offset 0"),
        (
            arch().text("general.architecture", "llama").bytes(),
            "general.architecture",
            "twice",
        ),
        (
            GgufWriter::default().text("general.name", "x").bytes(),
            "general.architecture",
            "missing",
        ),
        (
            GgufWriter::default()
                .text("general.architecture", "mamba")
                .bytes(),
            "general.architecture",
            "mamba",
        ),
        (
            GgufWriter::default()
                .entry("general.architecture", 4, &[0; 4])
                .bytes(),
            "general.architecture",
            "string",
        ),
        (arch().bytes(), "llama.embedding_length", "missing"),
        (
            arch()
                .entry("general.alignment", 4, &3_u32.to_le_bytes())
                .bytes(),
            "general.alignment",
            "power of two",
        ),
        (
            arch().entry("split.count", 2, &2_u16.to_le_bytes()).bytes(),
            "split.count",
            "merge",
        ),
        (
            arch().tensor("a", &[64, 1 << 62], 0, 0).bytes(),
            "dimensions of tensor `a`",
            "offset",
        ),
        (
            arch().tensor("a", &[0], 0, 0).bytes(),
            "dimensions of tensor `a`",
            "offset",
        ),
        (
            arch().tensor("a", &[1; 5], 0, 0).bytes(),
            "dimensions of tensor `a`",
            "1..=4",
        ),
        (
            arch().tensor("a", &[], 0, 0).bytes(),
            "dimensions of tensor `a`",
            "1..=4",
        ),
        (
            arch().tensor("a", &[33], 2, 0).data(64).bytes(),
            "dimensions of tensor `a`",
            "block",
        ),
        (
            arch().tensor("a", &[32], 77, 0).data(64).bytes(),
            "type of tensor `a`",
            "77",
        ),
        (
            arch().tensor("a", &[32], 10, 0).data(64).bytes(),
            "type of tensor `a`",
            "Q2_K",
        ),
        (
            arch().tensor("a", &[16], 0, 8).data(96).bytes(),
            "offset of tensor `a`",
            "alignment",
        ),
        (
            arch().tensor("a", &[16], 0, 1 << 63).data(64).bytes(),
            "tensor `a`",
            "cut off",
        ),
        (
            arch().tensor("a", &[16], 0, u64::MAX - 31).data(64).bytes(),
            "tensor `a`",
            "cut off",
        ),
        (
            arch().tensor("a", &[17], 0, 0).data(64).bytes(),
            "tensor `a`",
            "cut off",
        ),
        (
            arch()
                .tensor("a", &[16], 0, 0)
                .tensor("a", &[16], 0, 64)
                .data(128)
                .bytes(),
            "tensor `a`",
            "twice",
        ),
        (
            arch()
                .tensor("a", &[16], 0, 0)
                .tensor("b", &[16], 0, 32)
                .data(128)
                .bytes(),
            "tensor `b`",
            "overlaps",
        ),
    ];
    for (bytes, field, detail) in cases {
        let path = folder.gguf(&bytes);
        let (_, message) = refused(&path);
        assert!(message.contains(field), "no `{field}` in: {message}");
        assert!(message.contains(detail), "no `{detail}` in: {message}");
    }
    let (_, message) = refused(&folder.gguf(b""));
    assert!(message.contains("empty"), "{message}");
    let (error, _) = refused(Path::new("/nowhere/at-all.gguf"));
    assert_eq!(error.kind(), baton_proto::ErrorKind::NotFound);
}

#[test]
fn a_gguf_cut_anywhere_is_refused() {
    let whole = std::fs::read(fixture("rand.gguf")).unwrap();
    let mut folder = Folder::new();
    open(&folder.gguf(&whole));
    for point in 0..50 {
        // The last point lacks one byte.
        let length = if point == 49 {
            whole.len() - 1
        } else {
            whole.len() * point / 49
        };
        refused(&folder.gguf(&whole[..length]));
    }
}

/// Replaces the only occurrence of `from` by `to`, of the same length.
fn patched(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let at: Vec<usize> = (0..=bytes.len() - from.len())
        .filter(|at| &bytes[*at..*at + from.len()] == from)
        .collect();
    assert_eq!(at.len(), 1, "{}", from.escape_ascii());
    let mut bytes = bytes.to_vec();
    bytes[at[0]..at[0] + to.len()].copy_from_slice(to);
    bytes
}

#[test]
fn gguf_tensors_and_metadata_must_fit_the_architecture() {
    let whole = std::fs::read(fixture("rand.gguf")).unwrap();
    let mut folder = Folder::new();
    let cases = [
        (
            "blk.2.attn_q.weight",
            "blk.2.attn_z.weight",
            "tensor `blk.2.attn_q.weight`: is missing",
        ),
        (
            "blk.0.ffn_gate.weight",
            "blk.9.ffn_gate.weight",
            "tensor `blk.0.ffn_gate.weight`: is missing",
        ),
        (
            "llama.embedding_length",
            "llama.embedding_lengtz",
            "llama.embedding_length",
        ),
        (
            "llama.attention.head_count_kv",
            "llama.attention.head_count_kz",
            "tensor `blk.0.attn_k.weight`: has shape",
        ),
        (
            "tokenizer.ggml.merges",
            "tokenizer.ggml.merger",
            "tokenizer.ggml.merges",
        ),
        (
            "tokenizer.ggml.tokens",
            "tokenizer.ggml.tokenz",
            "tokenizer.ggml.tokens",
        ),
        (
            "tokenizer.ggml.model",
            "tokenizer.ggml.modeX",
            "tokenizer.ggml.model",
        ),
    ];
    for (from, to, expected) in cases {
        let path = folder.gguf(&patched(&whole, from.as_bytes(), to.as_bytes()));
        let (_, message) = refused(&path);
        assert!(message.contains(expected), "no `{expected}` in: {message}");
    }
}

#[test]
fn a_gguf_tensor_that_the_graph_does_not_use_is_refused() {
    let mut folder = Folder::new();
    // An untied output matrix becomes an unknown tensor: the model then looks tied.
    let whole = std::fs::read(fixture("rand.gguf")).unwrap();
    let path = folder.gguf(&patched(
        &whole,
        b"\x0d\0\0\0\0\0\0\0output.weight",
        b"\x0d\0\0\0\0\0\0\0outputs.weigh",
    ));
    let (_, message) = refused(&path);
    assert!(
        message.contains("tensor `outputs.weigh`: exists in the file but is not used"),
        "{message}"
    );
}

/// The RAND folder with its tensors in three shards and an index.
struct Shards {
    root: tempfile::TempDir,
}

type Owned = (String, Dtype, Vec<usize>, Vec<u8>);

fn rand_tensors() -> Vec<Owned> {
    let bytes = std::fs::read(fixture("rand/model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<Owned> = file
        .tensors()
        .into_iter()
        .map(|(name, view)| {
            (
                name,
                view.dtype(),
                view.shape().to_vec(),
                view.data().to_vec(),
            )
        })
        .collect();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    tensors
}

fn write_safetensors(path: &Path, tensors: &[Owned]) {
    let views: Vec<(&str, TensorView<'_>)> = tensors
        .iter()
        .map(|(name, dtype, shape, data)| {
            (
                name.as_str(),
                TensorView::new(*dtype, shape.clone(), data).unwrap(),
            )
        })
        .collect();
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

impl Shards {
    fn new(tensors: &[Owned]) -> Self {
        let root = tempfile::tempdir().unwrap();
        for file in [
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "generation_config.json",
        ] {
            std::fs::copy(fixture("rand").join(file), root.path().join(file)).unwrap();
        }
        let shards = Self { root };
        let mut map = BTreeMap::new();
        for (number, part) in tensors.chunks(tensors.len().div_ceil(3)).enumerate() {
            write_safetensors(&shards.shard(number + 1), part);
            for tensor in part {
                map.insert(tensor.0.clone(), number + 1);
            }
        }
        shards.index(&map);
        shards
    }

    fn shard(&self, number: usize) -> PathBuf {
        self.root
            .path()
            .join(format!("model-{number:05}-of-00003.safetensors"))
    }

    fn index(&self, map: &BTreeMap<String, usize>) {
        let weight_map: serde_json::Map<String, serde_json::Value> = map
            .iter()
            .map(|(name, shard)| {
                (
                    name.clone(),
                    format!("model-{shard:05}-of-00003.safetensors").into(),
                )
            })
            .collect();
        let json = serde_json::json!({ "metadata": {}, "weight_map": weight_map });
        std::fs::write(
            self.root.path().join("model.safetensors.index.json"),
            json.to_string(),
        )
        .unwrap();
    }

    fn map(&self) -> BTreeMap<String, usize> {
        let text =
            std::fs::read_to_string(self.root.path().join("model.safetensors.index.json")).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        json["weight_map"]
            .as_object()
            .unwrap()
            .iter()
            .map(|(name, file)| (name.clone(), file.as_str().unwrap()[6..11].parse().unwrap()))
            .collect()
    }

    /// Opens the folder, which must be refused with a message that has all of `parts`.
    fn refused(&self, parts: &[&str]) {
        match Model::open(self.root.path(), &LoadOptions::default(), &mut |_, _| {}) {
            Ok(_) => panic!("opened, expected {parts:?}"),
            Err(error) => {
                let message = error.to_string();
                for part in parts {
                    assert!(message.contains(part), "no `{part}` in: {message}");
                }
            }
        }
    }
}

fn logits_of(path: &Path) -> Vec<u32> {
    let model = open(path);
    let mut runner = Runner::new(&model, Setup::default());
    let tokens: Vec<u32> = (2..70).collect();
    runner
        .prefill(&tokens, 32)
        .1
        .iter()
        .map(|value| value.to_bits())
        .collect()
}

#[test]
fn shards_give_the_bits_of_the_single_file() {
    let shards = Shards::new(&rand_tensors());
    assert_eq!(logits_of(shards.root.path()), logits_of(&fixture("rand")));
}

#[test]
fn mixed_float_types_give_the_same_bits() {
    let mut tensors = rand_tensors();
    let (mut wide, mut narrow) = (0, 0);
    for (number, (_, dtype, _, data)) in tensors.iter_mut().enumerate() {
        let values: Vec<f32> = data
            .chunks_exact(2)
            .map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32())
            .collect();
        let halves: Vec<half::f16> = values
            .iter()
            .map(|value| half::f16::from_f32(*value))
            .collect();
        let exact = values
            .iter()
            .zip(&halves)
            .all(|(value, half)| *value == half.to_f32());
        if number % 3 == 1 && exact {
            (*dtype, *data) = (
                Dtype::F16,
                halves.iter().flat_map(|h| h.to_le_bytes()).collect(),
            );
            narrow += 1;
        } else if number % 3 == 0 {
            (*dtype, *data) = (
                Dtype::F32,
                values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            );
            wide += 1;
        }
    }
    assert!(
        wide > 3 && narrow > 3,
        "{wide} f32 and {narrow} f16 tensors"
    );
    let shards = Shards::new(&tensors);
    assert_eq!(logits_of(shards.root.path()), logits_of(&fixture("rand")));
}

#[test]
fn incomplete_shards_are_refused_by_file_and_tensor() {
    let tensors = rand_tensors();
    for cut in [1, 4096, usize::MAX] {
        let shards = Shards::new(&tensors);
        let path = shards.shard(2);
        let bytes = std::fs::read(&path).unwrap();
        let left = if cut == usize::MAX {
            bytes.len() / 2
        } else {
            bytes.len() - cut
        };
        std::fs::write(&path, &bytes[..left]).unwrap();
        shards.refused(&["model-00002-of-00003", "tensor `model.", "cut off"]);
    }
    let shards = Shards::new(&tensors);
    std::fs::remove_file(shards.shard(3)).unwrap();
    shards.refused(&["model-00003-of-00003", "cannot open"]);

    let shards = Shards::new(&tensors);
    let mut map = shards.map();
    let moved = tensors[0].0.clone();
    map.insert(moved.clone(), 2);
    shards.index(&map);
    shards.refused(&["model-00001-of-00003", &moved, "the index says"]);

    let mut map = shards.map();
    map.remove(&moved);
    shards.index(&map);
    shards.refused(&["model-00001-of-00003", &moved, "not listed in the index"]);

    map.insert(moved, 1);
    map.insert("model.layers.9.extra.weight".to_owned(), 3);
    shards.index(&map);
    shards.refused(&[
        "model-00003-of-00003",
        "model.layers.9.extra.weight",
        "not in this shard",
    ]);

    std::fs::write(
        shards.root.path().join("model.safetensors.index.json"),
        r#"{"weight_map": {"a": "../../etc/passwd"}}"#,
    )
    .unwrap();
    shards.refused(&["index.json", "not a plain file name"]);
}

/// RAND in one file whose header is edited as text.
fn with_header(edit: impl Fn(String) -> String) -> Shards {
    let shards = Shards::new(&rand_tensors());
    std::fs::remove_file(shards.root.path().join("model.safetensors.index.json")).unwrap();
    let bytes = std::fs::read(fixture("rand/model.safetensors")).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = edit(String::from_utf8(bytes[8..8 + length].to_vec()).unwrap());
    let mut edited = (header.len() as u64).to_le_bytes().to_vec();
    edited.extend(header.as_bytes());
    edited.extend(&bytes[8 + length..]);
    std::fs::write(shards.root.path().join("model.safetensors"), edited).unwrap();
    shards
}

#[test]
fn broken_safetensors_headers_are_refused_by_file_and_tensor() {
    let file = "model.safetensors";
    logits_of(with_header(|header| header).root.path());
    for length in [1_u64 << 63, 0, 360_520, 360_512] {
        let shards = with_header(|header| header);
        let path = shards.root.path().join(file);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        std::fs::write(&path, bytes).unwrap();
        shards.refused(&[file, "header"]);
    }
    with_header(|header| header.replacen('{', "[", 1)).refused(&[file, "header", "JSON"]);

    let tensor = "lm_head.weight";
    let entry = |header: &str| -> (String, u64, u64) {
        let json: serde_json::Value = serde_json::from_str(header).unwrap();
        let offsets = &json[tensor]["data_offsets"];
        let (start, end) = (offsets[0].as_u64().unwrap(), offsets[1].as_u64().unwrap());
        (format!("[{start},{end}]"), start, end)
    };
    let offsets = |change: fn(u64, u64) -> (u64, u64)| {
        with_header(move |header| {
            let (text, start, end) = entry(&header);
            let (start, end) = change(start, end);
            let changed = header.replacen(&text, &format!("[{start},{end}]"), 1);
            assert_ne!(changed, header);
            changed
        })
    };
    offsets(|start, end| (end, start)).refused(&[file, tensor, "data_offsets"]);
    offsets(|start, end| (start, end + 2)).refused(&[file, tensor, "needs"]);
    offsets(|start, end| (start + 2, end + 2)).refused(&[file, "tensor", "hole"]);
    offsets(|_, end| (end, end + (1 << 60))).refused(&[file, tensor, "data_offsets"]);
    with_header(|header| header.replacen("\"BF16\"", "\"F8_E4M3\"", 1))
        .refused(&[file, "F8_E4M3", "tensor"]);
    with_header(|header| header.replacen("\"BF16\"", "\"X9\"", 1)).refused(&[file, "X9", "tensor"]);
    with_header(|header| header.replacen("\"shape\"", "\"form\"", 1)).refused(&[
        file,
        "tensor",
        "header entry",
    ]);
    with_header(|header| header.replacen(tensor, "model.norm.weight", 1)).refused(&[
        file,
        "model.norm.weight",
        "twice",
    ]);
    with_header(|header| header.replacen(tensor, "lm_tail.weight", 1))
        .refused(&[tensor, "missing"]);

    // Two tensors of one size made to share a range.
    with_header(|header| {
        let json: serde_json::Value = serde_json::from_str(&header).unwrap();
        let range = |name: &str| json[name]["data_offsets"].to_string();
        header.replacen(
            &range("model.layers.1.self_attn.k_proj.weight"),
            &range("model.layers.0.self_attn.k_proj.weight"),
            1,
        )
    })
    .refused(&[file, "tensor", "overlaps"]);

    let shards = with_header(|header| header);
    let path = shards.root.path().join(file);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.extend([0; 16]);
    std::fs::write(&path, bytes).unwrap();
    shards.refused(&[file, "16 bytes follow"]);
}

#[test]
fn a_folder_says_what_it_lacks() {
    let root = tempfile::tempdir().unwrap();
    let message = || {
        Model::open(root.path(), &LoadOptions::default(), &mut |_, _| {})
            .unwrap_err()
            .to_string()
    };
    assert!(message().contains("config.json"));
    let config = std::fs::read_to_string(fixture("rand/config.json")).unwrap();
    let write = |text: &str| std::fs::write(root.path().join("config.json"), text).unwrap();
    write("{ not json");
    assert!(message().contains("byte offset"));
    write(&config.replace("\"llama\"", "\"mamba\""));
    assert!(message().contains("`mamba` is not one of llama, mistral, qwen2, qwen3, gemma3_text"));
    write(&config);
    assert!(message().contains("model.safetensors"));
    std::fs::copy(
        fixture("rand/model.safetensors"),
        root.path().join("model.safetensors"),
    )
    .unwrap();
    assert!(message().contains("tokenizer.json"));
}

#[test]
fn a_folder_with_a_contradiction_is_refused_by_tensor() {
    let cases = [
        (
            "\"head_dim\": 8",
            "\"head_dim\": 16",
            "self_attn.q_proj.weight",
            "has shape",
        ),
        (
            "\"num_key_value_heads\": 2",
            "\"num_key_value_heads\": 4",
            "self_attn.k_proj.weight",
            "has shape",
        ),
        (
            "\"num_hidden_layers\": 4",
            "\"num_hidden_layers\": 5",
            "model.layers.4",
            "missing",
        ),
        (
            "\"num_hidden_layers\": 4",
            "\"num_hidden_layers\": 3",
            "model.layers.3",
            "not used",
        ),
        (
            "\"tie_word_embeddings\": false",
            "\"tie_word_embeddings\": true",
            "lm_head.weight",
            "differs",
        ),
        (
            "\"vocab_size\": 300",
            "\"vocab_size\": 301",
            "lm_head.weight",
            "has shape",
        ),
        (
            "\"hidden_act\": \"silu\"",
            "\"hidden_act\": \"relu\"",
            "hidden_act",
            "relu",
        ),
        (
            "\"use_cache\": true",
            "\"attention_bias\": true",
            "q_proj.bias",
            "missing",
        ),
        (
            "\"use_cache\": true",
            "\"quantization_config\": {}",
            "quantization_config",
            "not read",
        ),
        (
            "\"use_cache\": true",
            "\"rope_scaling\": {\"rope_type\": \"yarn\"}",
            "rope_type",
            "yarn",
        ),
        (
            "\"use_cache\": true",
            "\"rope_scaling\": {\"type\": \"dynamic\"}",
            "rope_type",
            "dynamic",
        ),
        (
            "\"rms_norm_eps\": 1e-05",
            "\"rms_norm_eps\": \"x\"",
            "rms_norm_eps",
            "number",
        ),
        (
            "\"hidden_size\": 64",
            "\"hidden_size\": 4294967295",
            "hidden size",
            "1..=",
        ),
        (
            "\"num_attention_heads\": 8",
            "\"num_attention_heads\": 0",
            "num_attention_heads",
            "1..2^32",
        ),
    ];
    let config = std::fs::read_to_string(fixture("rand/config.json")).unwrap();
    for (from, to, place, detail) in cases {
        let shards = with_header(|header| header);
        assert!(config.contains(from), "{from}");
        std::fs::write(
            shards.root.path().join("config.json"),
            config.replace(from, to),
        )
        .unwrap();
        shards.refused(&[place, detail]);
    }
}

#[test]
fn both_containers_give_one_tokenizer_and_one_configuration() {
    let (folder, file) = (open(&fixture("rand")), open(&fixture("rand.gguf")));
    let (a, b) = (folder.tokenizer_spec(), file.tokenizer_spec());
    assert!(matches!(&a.model, TokenizerModel::HuggingFace { json } if json.contains("merges")));
    let TokenizerModel::ByteLevelBpe { merges, .. } = &b.model else {
        panic!("{:?}", b.model)
    };
    assert_eq!(merges.len(), 38);
    let texts = |spec: &baton_proto::tokenizer_spec::TokenizerSpec| -> Vec<String> {
        spec.tokens.iter().map(|token| token.text.clone()).collect()
    };
    assert_eq!(texts(a), texts(b));
    assert_eq!((a.bos, &a.eos), (Some(0), &vec![1]));
    assert_eq!((b.bos, &b.eos), (Some(0), &vec![1]));
    assert_eq!(a.add_bos, b.add_bos);
    assert_eq!(a.chat_templates, b.chat_templates);

    let mut config = file.config().clone();
    config.rope_pairing = folder.config().rope_pairing;
    assert_eq!(&config, folder.config());
    assert_ne!(folder.digest(), file.digest());
    assert_eq!(
        file.digest(),
        blake3::hash(&std::fs::read(fixture("rand.gguf")).unwrap()).as_bytes()
    );
    assert_eq!(folder.parameters(), file.parameters());
}

#[test]
fn every_file_of_a_folder_adds_its_end_tokens() {
    let model = open(&fixture("chain-bytes"));
    let generation: serde_json::Value = serde_json::from_str(
        &std::fs::read_to_string(fixture("chain-bytes/generation_config.json")).unwrap(),
    )
    .unwrap();
    let ends = match &generation["eos_token_id"] {
        serde_json::Value::Array(ids) => ids.iter().map(|id| id.as_u64().unwrap() as u32).collect(),
        id => vec![id.as_u64().unwrap() as u32],
    };
    assert!(
        ends.len() > 1,
        "the fixture names one end token only in generation_config.json"
    );
    for end in ends {
        assert!(
            model.eos().contains(&end),
            "{end} is not in {:?}",
            model.eos()
        );
    }
}

#[test]
fn numerics_tell_files_and_kv_types_apart() {
    use baton_proto::kv_layout::KvDtype::{F16, F32};
    let (a, again, b) = (
        open(&fixture("rand")),
        open(&fixture("rand")),
        open(&fixture("rand.gguf")),
    );
    assert_eq!(a.numerics(F16), again.numerics(F16));
    assert_ne!(a.numerics(F16), a.numerics(F32));
    assert_ne!(a.numerics(F16), b.numerics(F16));
    let layout = a.kv_layout(16, F16);
    layout.validate().unwrap();
    let card = a.card("rand", layout);
    assert_eq!(
        (card.vocab_size, card.tokenizer_size, card.context_max),
        (300, 300, 4096)
    );
    assert!(card.revision.as_str().starts_with("rand@"));
}

#[test]
fn progress_ends_with_all_bytes() {
    let mut calls = Vec::new();
    Model::open(
        &fixture("rand.gguf"),
        &LoadOptions::default(),
        &mut |done, total| {
            calls.push((done, total));
        },
    )
    .unwrap();
    assert!(calls.len() >= 5 && calls.is_sorted());
    let (done, total) = *calls.last().unwrap();
    assert!(done == total && total > 100_000, "{done} of {total}");
}

#[test]
fn smollm2_is_what_its_file_says() {
    let Some(path) = real_model("smollm2-135m-instruct.gguf") else {
        return;
    };
    let model = open(&path);
    let config = model.config();
    assert_eq!(
        (
            config.layers.len(),
            config.hidden,
            config.heads,
            config.kv_heads
        ),
        (30, 576, 9, 3)
    );
    assert_eq!(
        (config.head_dim, config.ffn, config.vocab, config.tied),
        (64, 1536, 49_152, true)
    );
    assert_eq!(config.ropes[0].base, 100_000.0);
    assert_eq!(model.formats(), "F32:61,Q4_1:210,Q8_0:1");
    let spec = model.tokenizer_spec();
    assert_eq!(
        (spec.bos, spec.eos.as_slice(), spec.add_bos),
        (Some(1), &[2][..], false)
    );
    assert_eq!(spec.tokens.len(), 49_152);
    assert!(spec.chat_templates[0].source.contains("<|im_start|>"));
}

#[test]
fn gemma3_has_its_windows_and_its_two_rope_bases() {
    let Some(path) = real_model("gemma3-270m.gguf") else {
        return;
    };
    let model = open(&path);
    let config = model.config();
    let full: Vec<usize> = (0..18)
        .filter(|layer| config.layers[*layer].window.is_none())
        .collect();
    assert_eq!(full, [5, 11, 17]);
    assert!(
        config
            .layers
            .iter()
            .all(|layer| layer.window.is_none_or(|window| window == 512))
    );
    let bases: Vec<f64> = config
        .layers
        .iter()
        .map(|l| config.ropes[l.rope].base)
        .collect();
    assert_eq!((bases[0], bases[5]), (10_000.0, 1_000_000.0));
    assert_eq!((config.attention_scale, config.head_dim), (1.0 / 16.0, 256));
    let groups = model.kv_groups();
    assert_eq!(groups.len(), 2);
    assert_eq!(groups[0].layers, [5, 11, 17]);
    let spec = model.tokenizer_spec();
    assert!(matches!(
        spec.model,
        TokenizerModel::SentencePiece {
            add_space_prefix: false
        }
    ));
    assert_eq!(
        (spec.bos, spec.eos.as_slice(), spec.add_bos),
        (Some(2), &[1][..], true)
    );
}
