//! Hostile, truncated and contradictory GGUF files end in an error that names the file and
//! the place, quickly and without large allocations; good ones become what they say.

#[path = "model_support/allocations.rs"]
mod allocations;
#[path = "model_support/gguf_parts.rs"]
mod gguf_parts;
#[path = "model_support/runner.rs"]
mod runner;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use allocations::peak_of;
use baton_engine::model::{Error, LoadOptions, Model};
use baton_proto::tokenizer_spec::TokenizerModel;
use gguf_parts::Parts;
use runner::{fixture, open, real_model};

/// Opens a file that must be refused; the message.
fn refused(path: &Path) -> (Error, String) {
    let error = match bounded(path) {
        Ok(model) => panic!("{} was opened: {model:?}", path.display()),
        Err(error) => error,
    };
    let message = error.to_string();
    assert!(
        message.contains(&*path.file_name().unwrap().to_string_lossy()),
        "{message}"
    );
    (error, message)
}

/// Opens a small file within a second and 64 MB.
fn bounded(path: &Path) -> Result<Arc<Model>, Error> {
    let start = Instant::now();
    let (model, extra) = peak_of(|| Model::open(path, &LoadOptions::default(), &mut |_, _| {}));
    let what = model
        .as_ref()
        .map_or_else(ToString::to_string, |model| format!("{model:?}"));
    assert!(
        start.elapsed() < Duration::from_secs(1),
        "{what}: took {:?}",
        start.elapsed()
    );
    assert!(extra < 64 << 20, "{what}: took {extra} bytes");
    model
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
            "shard 1 of 2",
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
            arch().tensor("a", &[32], 16, 0).data(64).bytes(),
            "type of tensor `a`",
            "IQ2_XXS",
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

#[test]
fn a_gguf_with_random_damage_opens_or_is_refused_within_bounds() {
    let whole = std::fs::read(fixture("rand.gguf")).unwrap();
    let mut folder = Folder::new();
    let path = folder.gguf(&whole);
    // The metadata and tensor infos; damage to weights is only another model.
    let header = 20_000.min(whole.len());
    let mut state = 1_u64;
    let mut next = |below: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let (mut opened, mut refused) = (0, 0);
    for _ in 0..600 {
        let mut damaged = whole.clone();
        for _ in 0..=next(3) {
            let at = next(header);
            damaged[at] = match next(4) {
                0 => 0,
                1 => 0xFF,
                2 => damaged[at] ^ 1 << next(8),
                _ => next(256) as u8,
            };
        }
        std::fs::write(&path, &damaged).unwrap();
        match bounded(&path) {
            Ok(_) => opened += 1,
            Err(_) => refused += 1,
        }
    }
    // Neither way is rare: most damage to token texts is harmless, to lengths it is not.
    assert!(
        opened > 20 && refused > 20,
        "{opened} opened, {refused} refused"
    );
}

#[test]
fn a_context_longer_than_the_file_can_mean_is_refused() {
    let whole = std::fs::read(fixture("rand.gguf")).unwrap();
    let entry = |value: u32| entry("llama.context_length", 4, &value.to_le_bytes());
    let mut folder = Folder::new();
    let huge = folder.gguf(&patched(&whole, &entry(4096), &entry(u32::MAX)));
    assert!(refused(&huge).1.contains("context length"));
    // Tables of 8 dimensions over 2^20 positions take all that is always allowed.
    let longest = folder.gguf(&patched(&whole, &entry(4096), &entry(1 << 20)));
    assert_eq!(bounded(&longest).unwrap().context_max(), 1 << 20);
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
            "`llama.embedding_lengtz`: `64` is refused",
        ),
        (
            "llama.attention.head_count_kv",
            "llama.attention.head_count_kz",
            "`llama.attention.head_count_kz`: `2` is refused",
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
fn a_vocabulary_that_contradicts_the_embedding_or_itself_is_refused_by_key() {
    let parts = Parts::read(&std::fs::read(fixture("rand.gguf")).unwrap());
    let mut folder = Folder::new();
    let mut says = |change: &dyn Fn(&mut Parts)| {
        let mut parts = parts.clone();
        change(&mut parts);
        refused(&folder.gguf(&parts.bytes())).1
    };
    const TOKENS: &str = "tokenizer.ggml.tokens";
    let tokens = parts.strings(TOKENS);
    let with = |change: &dyn Fn(&mut Vec<String>)| {
        let mut tokens = tokens.clone();
        change(&mut tokens);
        tokens
    };
    for (message, place, detail) in [
        (
            says(&|parts| {
                parts.set_u32("llama.vocab_size", 301);
            }),
            "`llama.vocab_size`",
            "301, but the embedding has 300 rows",
        ),
        (
            says(&|parts| {
                parts.set_strings(TOKENS, &tokens[..299]);
            }),
            TOKENS,
            "299 tokens for an embedding of 300 rows",
        ),
        (
            says(&|parts| {
                let longer = with(&|tokens| tokens.push("new".to_owned()));
                parts.set_strings(TOKENS, &longer);
            }),
            TOKENS,
            "301 tokens for an embedding of 300 rows",
        ),
        (
            says(&|parts| {
                let twice = with(&|tokens| tokens[9] = tokens[7].clone());
                parts.set_strings(TOKENS, &twice);
            }),
            TOKENS,
            "tokens 7 and 9 are both spelled",
        ),
        (
            says(&|parts| {
                let mut value = 5_u32.to_le_bytes().to_vec();
                value.extend(299_u64.to_le_bytes());
                value.extend([0; 4 * 299]);
                parts.set("tokenizer.ggml.token_type", 9, &value);
            }),
            "tokenizer.ggml.token_type",
            "299 values for 300 tokens",
        ),
        (
            says(&|parts| {
                let mut value = 6_u32.to_le_bytes().to_vec();
                value.extend(301_u64.to_le_bytes());
                value.extend([0; 4 * 301]);
                parts.set("tokenizer.ggml.scores", 9, &value);
            }),
            "tokenizer.ggml.scores",
            "301 values for 300 tokens",
        ),
    ] {
        assert!(message.contains(place), "no `{place}` in: {message}");
        assert!(message.contains(detail), "no `{detail}` in: {message}");
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

#[test]
fn numerics_tell_files_and_kv_types_apart() {
    use baton_proto::kv_layout::KvDtype::{F16, F32, Int4, Int8};
    let (a, again, b) = (
        open(&fixture("rand")),
        open(&fixture("rand")),
        open(&fixture("rand.gguf")),
    );
    assert_eq!(a.numerics(F16), again.numerics(F16));
    assert_ne!(a.numerics(F16), a.numerics(F32));
    assert_ne!(a.numerics(F16), a.numerics(Int8));
    assert_ne!(a.numerics(Int8), a.numerics(Int4));
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
