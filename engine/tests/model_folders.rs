//! Incomplete, broken and contradictory Hugging Face folders end in an error that names
//! the file and the tensor; sharded and mixed-type ones give the bits of the plain one.

#[path = "model_support/runner.rs"]
mod runner;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use baton_engine::model::{LoadOptions, Model};
use baton_proto::tokenizer_spec::TokenizerModel;
use runner::{Runner, Setup, fixture, open};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

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

#[test]
fn what_a_folder_means_is_not_guessed_at() {
    let shards = Shards::new(&rand_tensors());
    let (root, file) = (shards.root.path(), "model.safetensors");
    let index = root.join("model.safetensors.index.json");
    let kept = std::fs::read(&index).unwrap();
    std::fs::remove_file(&index).unwrap();
    let no_index = &[
        "model-00001-of-00003.safetensors",
        "no `model.safetensors.index.json`",
    ];
    shards.refused(no_index);
    std::fs::copy(fixture("rand/model.safetensors"), root.join(file)).unwrap();
    shards.refused(no_index);
    std::fs::write(&index, &kept).unwrap();
    shards.refused(&["both `model.safetensors` and `model.safetensors.index.json`"]);
    std::fs::remove_file(root.join(file)).unwrap();
    logits_of(root);

    let stray = root.join("model-00001-of-00002.safetensors");
    std::fs::copy(shards.shard(1), &stray).unwrap();
    shards.refused(&[
        "`model-00001-of-00002.safetensors` is a shard that",
        "does not name",
    ]);
    std::fs::remove_file(&stray).unwrap();
    // Weights of another kind beside the model are no part of it.
    std::fs::write(root.join("consolidated.safetensors"), "x").unwrap();
    logits_of(root);
}

#[test]
fn a_key_that_is_there_twice_is_refused_by_file_and_offset() {
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        let shards = Shards::new(&rand_tensors());
        let path = shards.root.path().join(file);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replacen('{', "{\"a\": {}, \"a\": 1, ", 1)).unwrap();
        shards.refused(&[file, "byte offset", "the key `a` is there twice"]);
    }
}

#[test]
fn a_vocabulary_that_contradicts_itself_is_refused_by_field() {
    let json: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(fixture("rand/tokenizer.json")).unwrap())
            .unwrap();
    let refused = |change: &dyn Fn(&mut serde_json::Value), parts: &[&str]| {
        let shards = Shards::new(&rand_tensors());
        let mut json = json.clone();
        change(&mut json);
        let path = shards.root.path().join("tokenizer.json");
        std::fs::write(path, json.to_string()).unwrap();
        shards.refused(&[&["tokenizer.json"], parts].concat());
    };
    refused(
        &|json| json["model"]["vocab"]["new"] = 300.into(),
        &[
            "`model.vocab`",
            "`new` has id 300, the embedding has 300 rows",
        ],
    );
    refused(
        &|json| json["model"]["vocab"]["new"] = 299.into(),
        &["`model.vocab`", "id 299 twice"],
    );
    refused(
        &|json| json["added_tokens"][0]["content"] = "<other>".into(),
        &[
            "`added_tokens`",
            "`<other>` has id 0, which is also that of `<|bos|>`",
        ],
    );
    refused(
        &|json| {
            let mut again = json["added_tokens"][0].clone();
            again["id"] = 300.into();
            json["added_tokens"].as_array_mut().unwrap().push(again);
        },
        &["tokens 0 and 300 are both spelled `<|bos|>`"],
    );
}

/// RAND in one file whose header is edited as text.
fn with_header(edit: impl Fn(String) -> String) -> Shards {
    let shards = Shards::new(&rand_tensors());
    std::fs::remove_file(shards.root.path().join("model.safetensors.index.json")).unwrap();
    for number in 1..=3 {
        std::fs::remove_file(shards.shard(number)).unwrap();
    }
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
            "`vocab_size`: 301",
            "embedding has 300 rows",
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
            "rope_scaling.factor",
            "missing",
        ),
        (
            "\"use_cache\": true",
            "\"rope_scaling\": {\"type\": \"ntk\"}",
            "rope_type",
            "ntk",
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
    let named = a.template_tokens.clone().unwrap();
    assert_eq!(named["bos_token"], "<|bos|>");
    assert_eq!(named["eos_token"], "<|eos|>");
    assert!(!named.contains_key("unk_token"));
    let file_named = b.template_tokens.clone().unwrap();
    assert_eq!(file_named["bos_token"], named["bos_token"]);
    assert_eq!(file_named["eos_token"], named["eos_token"]);

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
