//! Which keys of a model's description are known, and what becomes of each.
//!
//! A key that changes what a model computes is applied or refused by name; nothing that
//! matters is skipped. The tables here are that rule as data: the readers check every key
//! of a file against them before anything is read, `docs/model-keys.md` prints them, and a
//! test tries the example of each row.
//!
//! Keys that no table has: below a GGUF file's architecture all are refused, in
//! `config.json` those whose names look like arithmetic ([`is_arithmetic`]); the others
//! become a warning.

mod config_json;
mod metadata;
mod page;
#[cfg(test)]
mod tests;

use std::path::Path;

use serde_json::{Map, Value};

use crate::model::error::Error;
use crate::model::family::Family;
use crate::model::gguf::Gguf;
use crate::model::warnings::Warnings;

pub use page::page;

/// One key of a description.
#[derive(Debug)]
pub(crate) struct Key {
    /// As in the file; GGUF keys of the architecture stand without its name.
    pub name: &'static str,
    pub treatment: Treatment,
    /// A value as JSON: one that changes the model, is refused, or is ignored.
    pub example: &'static str,
    /// Other members that a description with the example needs.
    #[cfg_attr(not(test), allow(dead_code))]
    pub beside: &'static str,
}

/// What becomes of a key.
#[derive(Debug)]
pub(crate) enum Treatment {
    /// The decoder computes what it says.
    Applied(&'static str),
    /// The tokenizer is what it says.
    Tokenizer(&'static str),
    /// Refused, but for values that change nothing.
    Refused {
        unless: &'static [Neutral],
        why: &'static str,
    },
    /// Changes no result.
    Ignored(&'static str),
}

/// A value with which a refused key changes nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Neutral {
    Number(f64),
    Bool(bool),
    Text(&'static str),
    /// An empty list or object.
    Empty,
    /// A list of ones.
    AllOnes,
    /// Texts that all end so.
    Ends(&'static str),
    /// Whether the family has norms on query and key heads.
    FamilyQkNorm,
    /// The family's activation; anything beside the family's own key for it.
    FamilyActivation,
    /// The value of something that only the reader knows; it compares and refuses.
    Reader(&'static str),
}

const fn applied(
    name: &'static str,
    example: &'static str,
    beside: &'static str,
    meaning: &'static str,
) -> Key {
    Key {
        name,
        treatment: Treatment::Applied(meaning),
        example,
        beside,
    }
}

const fn tokenizer(name: &'static str, example: &'static str, meaning: &'static str) -> Key {
    Key {
        name,
        treatment: Treatment::Tokenizer(meaning),
        example,
        beside: "",
    }
}

const fn refused(
    name: &'static str,
    unless: &'static [Neutral],
    example: &'static str,
    why: &'static str,
) -> Key {
    Key {
        name,
        treatment: Treatment::Refused { unless, why },
        example,
        beside: "",
    }
}

const fn ignored(name: &'static str, example: &'static str, why: &'static str) -> Key {
    Key {
        name,
        treatment: Treatment::Ignored(why),
        example,
        beside: "",
    }
}

/// Parts of names that say that a key of `config.json` changes the arithmetic.
const ARITHMETIC: [&str; 17] = [
    "rope",
    "rotary",
    "attention",
    "attn",
    "scale",
    "scaling",
    "softcap",
    "multiplier",
    "moe",
    "expert",
    "window",
    "alibi",
    "norm",
    "bias",
    "head",
    "layer",
    "clip",
];

fn is_arithmetic(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    ARITHMETIC.iter().any(|part| name.contains(part))
}

/// Checks every key of a `config.json`.
///
/// # Errors
/// [`Error::Unsupported`] for the first key, by name, that is not offered.
pub(crate) fn check_config_json(
    family: &Family,
    path: &Path,
    json: &Map<String, Value>,
    warnings: &mut Warnings,
) -> Result<(), Error> {
    for (name, value) in json.iter().filter(|(_, value)| !value.is_null()) {
        let found = config_json::KEYS.iter().find(|key| key.name == name);
        let Some(key) = found else {
            if is_arithmetic(name) {
                return Err(refusal(
                    path,
                    name,
                    value,
                    "an unknown key of this name may change the result",
                ));
            }
            warnings.add(path, name, "is not a known key and is ignored");
            continue;
        };
        if let Treatment::Refused { unless, why } = &key.treatment {
            let has = |other: &str| json.get(other).is_some_and(|value| !value.is_null());
            if !unless
                .iter()
                .any(|neutral| neutral.is(name, value, family, &has))
            {
                return Err(refusal(path, name, value, why));
            }
        }
    }
    Ok(())
}

/// Whether a key of `rope_scaling` (or `rope_parameters`) is known.
pub(crate) fn is_rope_key(name: &str) -> bool {
    config_json::KEYS
        .iter()
        .filter_map(|key| key.name.strip_prefix("rope_scaling."))
        .any(|known| known == name)
}

/// Checks every metadata key of a GGUF file.
///
/// # Errors
/// [`Error::Unsupported`] for the first key, by name, that is not offered.
pub(crate) fn check_gguf(
    family: &Family,
    architecture: &str,
    gguf: &Gguf<'_>,
    warnings: &mut Warnings,
) -> Result<(), Error> {
    let mut names: Vec<&str> = gguf.keys().collect();
    // The map has no order, the error should.
    names.sort_unstable();
    for full in names {
        let below = full
            .strip_prefix(architecture)
            .and_then(|rest| rest.strip_prefix('.'));
        let name = below.unwrap_or(full);
        let known = metadata::KEYS
            .iter()
            .find(|key| key.name == name && metadata::is_general(key.name) == below.is_none());
        match (known.map(|key| &key.treatment), below) {
            (Some(Treatment::Refused { unless, why }), _) => {
                let value = gguf.json(full);
                let neutral = |neutral: &Neutral| neutral.is(name, &value, family, &|_| false);
                if !unless.iter().any(neutral) {
                    return Err(refusal(gguf.path(), full, &value, why));
                }
            }
            (None, Some(_)) => {
                let why = "an unknown key of the architecture may change the result";
                return Err(refusal(gguf.path(), full, &gguf.json(full), why));
            }
            (None, None) if full.starts_with("tokenizer.") && !metadata::is_template(full) => {
                warnings.add(gguf.path(), full, "is not a known key and is ignored");
            }
            _ => {}
        }
    }
    Ok(())
}

fn refusal(path: &Path, name: &str, value: &Value, why: &str) -> Error {
    const SHOWN_CHARS_MAX: usize = 80;
    let text = value.to_string();
    let mut shown: String = text.chars().take(SHOWN_CHARS_MAX).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    Error::unsupported(path, name, format!("`{shown}` is refused: {why}"))
}

impl Neutral {
    /// Whether `value` of the key `name` changes nothing. `has` says whether the
    /// description has another key.
    fn is(&self, name: &str, value: &Value, family: &Family, has: &dyn Fn(&str) -> bool) -> bool {
        match self {
            Self::Number(number) => value.as_f64() == Some(*number),
            Self::Bool(boolean) => value.as_bool() == Some(*boolean),
            Self::Text(text) => value.as_str() == Some(text),
            Self::Empty => match value {
                Value::Array(list) => list.is_empty(),
                Value::Object(members) => members.is_empty(),
                _ => false,
            },
            Self::AllOnes => value
                .as_array()
                .is_some_and(|list| list.iter().all(|one| one.as_f64() == Some(1.0))),
            Self::Ends(end) => value.as_array().is_some_and(|list| {
                let ends = |text: &Value| text.as_str().is_some_and(|text| text.ends_with(end));
                list.iter().all(ends)
            }),
            Self::FamilyQkNorm => value.as_bool() == Some(family.qk_norm),
            Self::FamilyActivation => {
                let is_named = value
                    .as_str()
                    .is_some_and(|text| family.activation.names().contains(&text));
                let before = family
                    .hf_activation_keys
                    .iter()
                    .take_while(|key| **key != name);
                is_named
                    || family.hf_activation_keys.contains(&name)
                        && before.into_iter().any(|key| has(key))
            }
            Self::Reader(_) => true,
        }
    }
}
