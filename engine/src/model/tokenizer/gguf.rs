//! [`TokenizerSpec`] from the metadata of a GGUF file.

use std::collections::BTreeMap;

use baton_proto::tokenizer_spec::{
    ChatTemplate, TokenEntry, TokenKind, TokenizerModel, TokenizerSpec,
};

use super::{SpecialIds, spellings};
use crate::model::error::Error;
use crate::model::gguf::Gguf;
use crate::model::warnings::Warnings;

const MODEL: &str = "tokenizer.ggml.model";
const TOKENS: &str = "tokenizer.ggml.tokens";
const SCORES: &str = "tokenizer.ggml.scores";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";

const BOS: &str = "tokenizer.ggml.bos_token_id";

/// Metadata keys of ids that end a sequence: of text, of a turn, of a message.
const END_KEYS: [&str; 3] = [
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
];

/// The variables of chat templates, and the metadata keys of their ids. The format itself
/// spells `seperator` so.
const TEMPLATE_TOKENS: [(&str, &str); 7] = [
    ("bos_token", "tokenizer.ggml.bos_token_id"),
    ("eos_token", "tokenizer.ggml.eos_token_id"),
    ("unk_token", "tokenizer.ggml.unknown_token_id"),
    ("sep_token", "tokenizer.ggml.seperator_token_id"),
    ("pad_token", "tokenizer.ggml.padding_token_id"),
    ("cls_token", "tokenizer.ggml.cls_token_id"),
    ("mask_token", "tokenizer.ggml.mask_token_id"),
];

/// Split rules whose models put BOS in front although the file need not say so.
///
/// *Source*: llama.cpp, `llama_vocab::impl::load`.
const PRE_WITH_BOS: [&str; 4] = ["llama3", "llama-v3", "llama-bpe", "falcon3"];

/// Reads the tokenizer of a model with `vocab` embedding rows.
///
/// # Errors
/// [`Error::Config`] or [`Error::Unsupported`], naming the metadata key.
pub(crate) fn read(
    gguf: &Gguf<'_>,
    vocab: usize,
    warnings: &mut Warnings,
) -> Result<TokenizerSpec, Error> {
    let path = gguf.path();
    let missing = |key: &str| Error::config(path, key, "is missing");
    let texts = gguf.strings(TOKENS)?.ok_or_else(|| missing(TOKENS))?;
    if texts.len() != vocab {
        return Err(Error::config(
            path,
            TOKENS,
            format!("{} tokens for an embedding of {vocab} rows", texts.len()),
        ));
    }
    spellings::check(path, TOKENS, (0..).zip(texts.iter().copied()))?;
    let same_length = |key: &str, values: Option<Vec<f64>>| match values {
        Some(values) if values.len() != texts.len() => Err(Error::config(
            path,
            key,
            format!("{} values for {} tokens", values.len(), texts.len()),
        )),
        other => Ok(other),
    };
    let scores = same_length(SCORES, gguf.numbers(SCORES)?)?;
    let types = same_length(TYPES, gguf.numbers(TYPES)?)?;

    let name = gguf.string(MODEL)?.ok_or_else(|| missing(MODEL))?;
    let pre = gguf.string("tokenizer.ggml.pre")?.unwrap_or("default");
    let (model, add_bos_default) = match name {
        "gpt2" => {
            let merges = gguf.strings(MERGES)?.ok_or_else(|| missing(MERGES))?;
            let model = TokenizerModel::ByteLevelBpe {
                merges: merges.into_iter().map(str::to_owned).collect(),
                pre: pre.to_owned(),
            };
            (model, PRE_WITH_BOS.contains(&pre))
        }
        "llama" => {
            if scores.is_none() {
                return Err(missing(SCORES));
            }
            let add_space_prefix = gguf
                .boolean("tokenizer.ggml.add_space_prefix")?
                .unwrap_or(true);
            (TokenizerModel::SentencePiece { add_space_prefix }, true)
        }
        other => {
            return Err(Error::unsupported(
                path,
                MODEL,
                format!("`{other}` is not one of gpt2, llama"),
            ));
        }
    };

    let mut tokens = Vec::with_capacity(texts.len());
    for (id, text) in texts.iter().enumerate() {
        let kind = match types.as_ref().map_or(1.0, |types| types[id]) {
            0.0 | 1.0 => TokenKind::Normal,
            2.0 => TokenKind::Unknown,
            3.0 => TokenKind::Control,
            4.0 => TokenKind::UserDefined,
            5.0 => TokenKind::Unused,
            6.0 => TokenKind::Byte,
            other => {
                return Err(Error::config(
                    path,
                    TYPES,
                    format!("token {id} has the unknown type {other}"),
                ));
            }
        };
        tokens.push(TokenEntry {
            text: (*text).to_owned(),
            score: scores.as_ref().map_or(0.0, |scores| scores[id] as f32),
            kind,
        });
    }

    let add_bos = gguf
        .boolean("tokenizer.ggml.add_bos_token")?
        .unwrap_or(add_bos_default);
    let mut special = SpecialIds::new(texts.len(), warnings);
    for key in END_KEYS.into_iter().filter(|key| gguf.get(key).is_some()) {
        special.end(path, key, &gguf.json(key))?;
    }
    let bos = match gguf.get(BOS) {
        Some(_) => special.start(path, BOS, &gguf.json(BOS))?,
        None => None,
    };
    let mut id = |key: &str| match gguf.get(key) {
        Some(_) => special.id(path, key, &gguf.json(key)),
        None => Ok(None),
    };
    let unknown = id("tokenizer.ggml.unknown_token_id")?;
    let padding = id("tokenizer.ggml.padding_token_id")?;
    let mut template_tokens = BTreeMap::new();
    for (name, key) in TEMPLATE_TOKENS {
        // What is no id is reported above.
        let id = gguf.json(key).as_u64();
        let id = id.and_then(|id| usize::try_from(id).ok());
        if let Some(text) = id.and_then(|id| texts.get(id)) {
            template_tokens.insert(name.to_owned(), (*text).to_owned());
        }
    }
    Ok(TokenizerSpec {
        model,
        bos,
        eos: special.finish(path, (BOS, add_bos), END_KEYS[0])?,
        unknown,
        padding,
        add_bos,
        add_eos: gguf
            .boolean("tokenizer.ggml.add_eos_token")?
            .unwrap_or(false),
        chat_templates: chat_templates(gguf)?,
        template_tokens: Some(template_tokens),
        tokens,
    })
}

/// The main template, then those listed by name.
fn chat_templates(gguf: &Gguf<'_>) -> Result<Vec<ChatTemplate>, Error> {
    let mut templates = Vec::new();
    if let Some(source) = gguf.string("tokenizer.chat_template")? {
        templates.push(ChatTemplate {
            name: "default".to_owned(),
            source: source.to_owned(),
        });
    }
    for name in gguf
        .strings("tokenizer.chat_templates")?
        .unwrap_or_default()
    {
        let key = format!("tokenizer.chat_template.{name}");
        if let Some(source) = gguf.string(&key)? {
            templates.push(ChatTemplate {
                name: name.to_owned(),
                source: source.to_owned(),
            });
        }
    }
    Ok(templates)
}
