//! [`TokenizerSpec`] from the files of a Hugging Face folder.
//!
//! `tokenizer.json` goes along verbatim; beside it the token list, the ids that end
//! a sequence (from every file that names one) and the chat templates.

use std::collections::BTreeMap;
use std::path::Path;

use baton_proto::TokenId;
use baton_proto::tokenizer_spec::{
    ChatTemplate, TokenEntry, TokenKind, TokenizerModel, TokenizerSpec,
};
use serde_json::{Map, Value};

use super::{SpecialIds, spellings};
use crate::model::error::Error;
use crate::model::files;
use crate::model::warnings::Warnings;

/// The largest known `tokenizer.json` (Gemma) has 33 MB.
const TOKENIZER_BYTES_MAX: u64 = 256 << 20;
const SMALL_FILE_BYTES_MAX: u64 = 32 << 20;
/// The settings that are variables of chat templates.
const TEMPLATE_TOKENS: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// Reads the tokenizer of a model with `vocab` embedding rows; `config` is the
/// folder's `config.json`.
///
/// # Errors
/// [`Error::NotAModel`] without a `tokenizer.json`, else [`Error::Config`] or
/// [`Error::Malformed`] naming file and field.
pub(crate) fn read(
    folder: &Path,
    config: &Map<String, Value>,
    vocab: usize,
    warnings: &mut Warnings,
) -> Result<TokenizerSpec, Error> {
    let path = folder.join("tokenizer.json");
    let Some(json) = files::read_text(&path, TOKENIZER_BYTES_MAX)? else {
        return Err(Error::NotAModel {
            path: folder.to_owned(),
            message: "it has no `tokenizer.json`".to_owned(),
        });
    };
    let tokenizer: Map<String, Value> = files::parse_json(&path, &json)?;
    let tokens = tokens(&path, &tokenizer, vocab)?;
    let ids: BTreeMap<&str, TokenId> = (0..)
        .zip(&tokens)
        .map(|(id, token)| (token.text.as_str(), id))
        .collect();

    let settings_path = folder.join("tokenizer_config.json");
    let settings: Map<String, Value> =
        files::read_json_if_there(&settings_path, SMALL_FILE_BYTES_MAX)?.unwrap_or_default();
    let named = |key: &str| special_text(settings.get(key)).and_then(|text| ids.get(text).copied());

    let generation_path = folder.join("generation_config.json");
    let generation: Map<String, Value> =
        files::read_json_if_there(&generation_path, SMALL_FILE_BYTES_MAX)?.unwrap_or_default();
    let config_path = folder.join("config.json");
    let mut special = SpecialIds::new(vocab, warnings);
    for (path, json) in [(&generation_path, &generation), (&config_path, config)] {
        for id in id_list(json.get("eos_token_id")) {
            special.end(path, "eos_token_id", id)?;
        }
    }
    if let Some(id) = named("eos_token") {
        special.add_end(id);
    }
    let bos = match (
        named("bos_token"),
        id_list(config.get("bos_token_id")).first(),
    ) {
        (None, Some(id)) => special.start(&config_path, "bos_token_id", id)?,
        (bos, _) => bos,
    };
    let boolean = |key: &str| settings.get(key).and_then(Value::as_bool);
    let bos_wanted = boolean("add_bos_token").unwrap_or(false);
    let eos = special.finish(&config_path, ("bos_token_id", bos_wanted), "eos_token_id")?;
    let post = tokenizer.get("post_processor");
    Ok(TokenizerSpec {
        model: TokenizerModel::HuggingFace { json },
        add_bos: boolean("add_bos_token")
            .unwrap_or_else(|| bos.is_some_and(|bos| template_has(post, &tokens, bos, true))),
        add_eos: boolean("add_eos_token").unwrap_or_else(|| {
            eos.iter()
                .any(|eos| template_has(post, &tokens, *eos, false))
        }),
        bos,
        eos,
        unknown: named("unk_token"),
        padding: named("pad_token"),
        chat_templates: chat_templates(folder, &settings_path, &settings)?,
        template_tokens: Some(template_tokens(folder, &settings)?),
        tokens,
    })
}

/// The variables that chat templates get for special tokens: what the tokenizer's settings
/// name, and no others. Folders of an older format name them in a file of their own.
fn template_tokens(
    folder: &Path,
    settings: &Map<String, Value>,
) -> Result<BTreeMap<String, String>, Error> {
    let older: Map<String, Value> = match settings.contains_key("added_tokens_decoder") {
        true => Map::new(),
        false => {
            let path = folder.join("special_tokens_map.json");
            files::read_json_if_there(&path, SMALL_FILE_BYTES_MAX)?.unwrap_or_default()
        }
    };
    let text = |name: &str| {
        let value = settings.get(name).or_else(|| older.get(name));
        special_text(value).filter(|text| !text.is_empty())
    };
    let named = TEMPLATE_TOKENS.iter();
    Ok(named
        .filter_map(|name| Some(((*name).to_owned(), text(name)?.to_owned())))
        .collect())
}

/// The vocabulary and the added tokens by id. Added tokens past the embedding matrix,
/// which some published models have, cannot be fed to the model and are left out.
fn tokens(
    path: &Path,
    tokenizer: &Map<String, Value>,
    vocab: usize,
) -> Result<Vec<TokenEntry>, Error> {
    let error = |field: &str, message: &str| Error::config(path, field, message);
    let model = tokenizer
        .get("model")
        .and_then(Value::as_object)
        .ok_or_else(|| error("model", "is missing or not an object"))?;
    let unknown = model.get("unk_token").and_then(Value::as_str);
    let byte_fallback = model
        .get("byte_fallback")
        .and_then(Value::as_bool)
        .unwrap_or(false);
    let kind_of = |text: &str| match text {
        text if Some(text) == unknown => TokenKind::Unknown,
        text if byte_fallback && is_byte(text) => TokenKind::Byte,
        _ => TokenKind::Normal,
    };
    let mut entries: BTreeMap<u64, TokenEntry> = BTreeMap::new();
    match model.get("vocab") {
        Some(Value::Object(pieces)) => {
            for (text, id) in pieces {
                let id = id
                    .as_u64()
                    .ok_or_else(|| error("model.vocab", "has an id that is no number"))?;
                let entry = TokenEntry {
                    text: text.clone(),
                    score: 0.0,
                    kind: kind_of(text),
                };
                if entries.insert(id, entry).is_some() {
                    return Err(error("model.vocab", &format!("gives id {id} twice")));
                }
            }
        }
        Some(Value::Array(pieces)) => {
            for (id, piece) in (0..).zip(pieces) {
                let text = piece.get(0).and_then(Value::as_str);
                let score = piece.get(1).and_then(Value::as_f64);
                let (Some(text), Some(score)) = (text, score) else {
                    return Err(error(
                        "model.vocab",
                        "has an entry that is not [piece, score]",
                    ));
                };
                let entry = TokenEntry {
                    text: text.to_owned(),
                    score: score as f32,
                    kind: kind_of(text),
                };
                entries.insert(id, entry);
            }
        }
        _ => return Err(error("model.vocab", "is missing or not a map or list")),
    }
    if let Some((id, entry)) = entries.range(vocab as u64..).next() {
        let message = format!(
            "`{}` has id {id}, the embedding has {vocab} rows",
            entry.text.escape_debug()
        );
        return Err(error("model.vocab", &message));
    }
    for added in tokenizer
        .get("added_tokens")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
    {
        let id = added.get("id").and_then(Value::as_u64);
        let text = added.get("content").and_then(Value::as_str);
        let (Some(id), Some(text)) = (id, text) else {
            return Err(error("added_tokens", "has an entry without id or content"));
        };
        let special = added
            .get("special")
            .and_then(Value::as_bool)
            .unwrap_or(false);
        let kind = match special {
            _ if Some(text) == unknown => TokenKind::Unknown,
            true => TokenKind::Control,
            false => TokenKind::UserDefined,
        };
        let known = entries.get(&id);
        if let Some(other) = known.filter(|known| known.text != text) {
            let message = format!(
                "`{}` has id {id}, which is also that of `{}`",
                text.escape_debug(),
                other.text.escape_debug()
            );
            return Err(error("added_tokens", &message));
        }
        let score = known.map_or(0.0, |entry| entry.score);
        entries.insert(
            id,
            TokenEntry {
                text: text.to_owned(),
                score,
                kind,
            },
        );
    }
    let spelled = entries.iter().map(|(id, entry)| (*id, entry.text.as_str()));
    spellings::check(path, "model.vocab, added_tokens", spelled)?;
    let size = entries
        .keys()
        .next_back()
        .map_or(0, |last| (last + 1).min(vocab as u64));
    if size == 0 {
        return Err(error("model.vocab", "is empty"));
    }
    Ok((0..size)
        .map(|id| {
            entries.remove(&id).unwrap_or(TokenEntry {
                text: String::new(),
                score: 0.0,
                kind: TokenKind::Unused,
            })
        })
        .collect())
}

/// `<0x00>` to `<0xFF>`.
fn is_byte(text: &str) -> bool {
    text.strip_prefix("<0x")
        .and_then(|rest| rest.strip_suffix('>'))
        .is_some_and(|hex| hex.len() == 2 && u8::from_str_radix(hex, 16).is_ok())
}

/// A special token is a string, or an object with its `content`.
fn special_text(value: Option<&Value>) -> Option<&str> {
    match value? {
        Value::String(text) => Some(text),
        other => other.get("content")?.as_str(),
    }
}

/// One id, a list of them, or none.
fn id_list(value: Option<&Value>) -> &[Value] {
    match value {
        None | Some(Value::Null) => &[],
        Some(Value::Array(ids)) => ids,
        Some(id) => std::slice::from_ref(id),
    }
}

/// Whether the post-processor puts a token at the start (or the end) of a text.
fn template_has(
    post: Option<&Value>,
    tokens: &[TokenEntry],
    token: TokenId,
    at_start: bool,
) -> bool {
    let Some(post) = post else { return false };
    let parts = match post.get("processors").and_then(Value::as_array) {
        Some(parts) => parts.iter().collect(),
        None => vec![post],
    };
    parts.into_iter().any(|part| {
        let Some(single) = part.get("single").and_then(Value::as_array) else {
            return false;
        };
        let edge = if at_start {
            single.first()
        } else {
            single.last()
        };
        edge.and_then(|edge| edge.get("SpecialToken")?.get("id")?.as_str())
            .is_some_and(|text| tokens.get(token as usize).is_some_and(|t| t.text == text))
    })
}

fn chat_templates(
    folder: &Path,
    settings_path: &Path,
    settings: &Map<String, Value>,
) -> Result<Vec<ChatTemplate>, Error> {
    let mut templates: Vec<ChatTemplate> = Vec::new();
    match settings.get("chat_template") {
        None | Some(Value::Null) => {}
        Some(Value::String(source)) => {
            templates.push(ChatTemplate {
                name: "default".to_owned(),
                source: source.clone(),
            });
        }
        Some(Value::Array(list)) => {
            for entry in list {
                let name = entry.get("name").and_then(Value::as_str);
                let source = entry.get("template").and_then(Value::as_str);
                let (Some(name), Some(source)) = (name, source) else {
                    return Err(Error::config(
                        settings_path,
                        "chat_template",
                        "has an entry without name or template",
                    ));
                };
                templates.push(ChatTemplate {
                    name: name.to_owned(),
                    source: source.to_owned(),
                });
            }
        }
        Some(_) => {
            return Err(Error::config(
                settings_path,
                "chat_template",
                "must be a string or a list of named templates",
            ));
        }
    }
    // A file of its own wins over the setting, as in the library that writes both.
    if let Some(source) =
        files::read_text(&folder.join("chat_template.jinja"), SMALL_FILE_BYTES_MAX)?
    {
        templates.retain(|template| template.name != "default");
        templates.insert(
            0,
            ChatTemplate {
                name: "default".to_owned(),
                source,
            },
        );
    }
    Ok(templates)
}
