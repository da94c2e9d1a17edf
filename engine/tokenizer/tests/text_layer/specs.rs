//! Tokenizers for tests: those of the golden files, and small ones spelled by hand.

use std::collections::HashMap;
use std::sync::Arc;

use baton_proto::tokenizer_spec::{
    ChatTemplate, TokenEntry, TokenKind, TokenizerModel, TokenizerSpec,
};
use baton_tokenizer::Tokenizer;
use serde_json::{Value, json};

pub fn golden_tokenizers() -> Value {
    serde_json::from_str(include_str!("../golden/tokenizers.json")).unwrap()
}

pub fn entry(text: &str, score: f32, kind: TokenKind) -> TokenEntry {
    TokenEntry {
        text: text.to_owned(),
        score,
        kind,
    }
}

pub fn spec(model: TokenizerModel, tokens: Vec<TokenEntry>) -> TokenizerSpec {
    TokenizerSpec {
        model,
        tokens,
        bos: None,
        eos: Vec::new(),
        unknown: None,
        padding: None,
        add_bos: false,
        add_eos: false,
        chat_templates: Vec::new(),
        template_tokens: None,
    }
}

pub fn build(spec: &TokenizerSpec) -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_spec(spec).unwrap())
}

/// The tokens of a golden section: `[text, score, kind]` each.
pub fn golden_tokens(section: &Value) -> Vec<TokenEntry> {
    let tokens = section["tokens"].as_array().unwrap();
    tokens
        .iter()
        .map(|token| {
            let kind = match token[2].as_str().unwrap() {
                "normal" => TokenKind::Normal,
                "control" => TokenKind::Control,
                "user_defined" => TokenKind::UserDefined,
                "byte" => TokenKind::Byte,
                "unknown" => TokenKind::Unknown,
                other => panic!("kind `{other}`"),
            };
            let score = token[1].as_f64().unwrap() as f32;
            entry(token[0].as_str().unwrap(), score, kind)
        })
        .collect()
}

fn strings(list: &Value) -> Vec<String> {
    let list = list.as_array().unwrap().iter();
    list.map(|text| text.as_str().unwrap().to_owned()).collect()
}

/// The golden byte-level vocabulary as a GGUF file gives it.
pub fn byte_level(golden: &Value, pre: &str) -> TokenizerSpec {
    let section = &golden["byte_level"];
    let merges = strings(&section["merges"]);
    let pre = pre.to_owned();
    let mut spec = spec(
        TokenizerModel::ByteLevelBpe { merges, pre },
        golden_tokens(section),
    );
    spec.eos = vec![0];
    spec
}

/// The same as a `tokenizer.json`.
pub fn byte_level_json(golden: &Value, rule: &Value) -> TokenizerSpec {
    let section = &golden["byte_level"];
    let vocab: serde_json::Map<String, Value> = (0..)
        .zip(golden_tokens(section))
        .filter(|(_, token)| token.kind != TokenKind::UserDefined)
        .map(|(id, token)| (token.text, json!(id)))
        .collect();
    let json = json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": null,
        "added_tokens": section["added_tokens"],
        "normalizer": rule["normalizer"],
        "pre_tokenizer": rule["pre_tokenizer"],
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": rule["ignore_merges"], "vocab": vocab, "merges": section["merges"],
        },
    });
    let json = json.to_string();
    spec(TokenizerModel::HuggingFace { json }, Vec::new())
}

pub fn sentence_piece(section: &Value) -> TokenizerSpec {
    let add_space_prefix = section["add_space_prefix"].as_bool().unwrap();
    let mut spec = spec(
        TokenizerModel::SentencePiece { add_space_prefix },
        golden_tokens(section),
    );
    spec.unknown = Some(0);
    spec.bos = Some(1);
    spec.eos = vec![2];
    spec.add_bos = true;
    spec
}

/// The same as a `tokenizer.json`, merges rebuilt from scores as `transformers` does.
pub fn sentence_piece_json(spec: &TokenizerSpec, decoder: Value) -> TokenizerSpec {
    let pieces: HashMap<&str, f32> = spec
        .tokens
        .iter()
        .filter(|token| token.kind == TokenKind::Normal)
        .map(|token| (token.text.as_str(), token.score))
        .collect();
    let mut merges: Vec<(f32, [&str; 2])> = Vec::new();
    for (piece, &score) in &pieces {
        for (at, _) in piece.char_indices().skip(1) {
            let halves = [&piece[..at], &piece[at..]];
            if halves.iter().all(|half| pieces.contains_key(half)) {
                merges.push((score, halves));
            }
        }
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let merges: Vec<[&str; 2]> = merges.into_iter().map(|(_, halves)| halves).collect();
    let vocab: serde_json::Map<String, Value> = (0..)
        .zip(&spec.tokens)
        .map(|(id, token)| (token.text.clone(), json!(id)))
        .collect();
    let added: Vec<Value> = (0..3)
        .map(|id: usize| {
            json!({
                "id": id, "content": spec.tokens[id].text, "special": true,
                "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            })
        })
        .collect();
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "pre_tokenizer": null, "post_processor": null, "decoder": decoder,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>",
            "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab, "merges": merges,
        },
    });
    let json = json.to_string();
    let model = TokenizerModel::HuggingFace { json };
    TokenizerSpec {
        model,
        tokens: Vec::new(),
        ..spec.clone()
    }
}

pub fn byte_fallback_decoder() -> Value {
    json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]})
}

pub fn metaspace_decoder() -> Value {
    json!({"type": "Sequence", "decoders": [
        {"type": "ByteFallback"},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
    ]})
}

/// The printable character that byte-level vocabularies write for a byte.
pub fn byte_character(byte: u8) -> char {
    let kept = |b: u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    if kept(byte) {
        return byte as char;
    }
    let before = (0..byte).filter(|&b| !kept(b)).count() as u32;
    char::from_u32(0x100 + before).unwrap()
}

/// One token per byte (id = byte), then 256 EOS, 257 `<think>` (user-defined), 258 a
/// hole, 259 ` hello`; 300 ids in all. No merges reach 259.
pub fn bytes_only() -> TokenizerSpec {
    let mut tokens: Vec<TokenEntry> = (0..=255)
        .map(|byte| entry(&byte_character(byte).to_string(), 0.0, TokenKind::Normal))
        .collect();
    tokens.push(entry("<|end|>", 0.0, TokenKind::Control));
    tokens.push(entry("<think>", 0.0, TokenKind::UserDefined));
    tokens.push(entry("", 0.0, TokenKind::Unused));
    tokens.push(entry("Ġhello", 0.0, TokenKind::Normal));
    tokens.resize(300, entry("[PAD]", 0.0, TokenKind::Unused));
    let merges = vec!["a b".to_owned()];
    tokens[260] = entry("ab", 0.0, TokenKind::Normal);
    let pre = "gpt-2".to_owned();
    let mut spec = spec(TokenizerModel::ByteLevelBpe { merges, pre }, tokens);
    spec.eos = vec![256];
    spec
}

/// A SentencePiece vocabulary with a leading blank: 0 unknown, 1 `<s>`, 2 `</s>`, then
/// 256 byte tokens from id 3 on, then `PIECES` from id 259 on.
pub fn pieces() -> TokenizerSpec {
    let mut tokens = vec![
        entry("<unk>", 0.0, TokenKind::Unknown),
        entry("<s>", 0.0, TokenKind::Control),
        entry("</s>", 0.0, TokenKind::Control),
    ];
    for byte in 0..=255 {
        tokens.push(entry(&format!("<0x{byte:02X}>"), 0.0, TokenKind::Byte));
    }
    for (rank, piece) in PIECES.iter().enumerate() {
        tokens.push(entry(piece, -(rank as f32), TokenKind::Normal));
    }
    let add_space_prefix = true;
    let mut spec = spec(TokenizerModel::SentencePiece { add_space_prefix }, tokens);
    spec.unknown = Some(0);
    spec.bos = Some(1);
    spec.eos = vec![2];
    spec.add_bos = true;
    spec
}

pub const PIECES: [&str; 24] = [
    "▁",
    "▁Hello",
    "▁world",
    "▁again",
    "a",
    "b",
    "▁▁▁▁",
    "x",
    "▁,",
    "y",
    "▁.",
    "z",
    "▁▁",
    "indented",
    "1",
    "2",
    "3",
    "▁1",
    "▁2",
    "▁3",
    "▁a",
    "▁x",
    "Hello",
    "\n",
];

/// The id of one of [`PIECES`].
pub fn piece(text: &str) -> u32 {
    let at = PIECES.iter().position(|&piece| piece == text);
    259 + at.unwrap_or_else(|| panic!("no piece `{text}`")) as u32
}

pub fn with_template(mut spec: TokenizerSpec, name: &str, source: &str) -> TokenizerSpec {
    spec.chat_templates.push(ChatTemplate {
        name: name.to_owned(),
        source: source.to_owned(),
    });
    spec
}
