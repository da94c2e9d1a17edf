//! How much text one token can stand for, so that a text can be found too long before it
//! is encoded.
//!
//! A bound only: no token stands for more bytes than the longest one spells, where
//! nothing of a text is dropped on the way. What a `tokenizer.json` may drop is not
//! followed in detail; a step that is not known to keep every byte means no bound.

use serde_json::Value;

/// Bytes of text that a token can stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reach {
    longest: usize,
    /// How many times shorter normalising can make a text that is not ASCII.
    shrink: usize,
}

/// Decomposing makes UTF-8 at most three times shorter (U+212A is `K`), composing again at
/// most three times.
const NFC_SHRINK: usize = 9;

impl Reach {
    /// Of tokens of at most `longest` bytes.
    pub(crate) fn of(longest: usize, nfc: bool) -> Self {
        Self {
            longest: longest.max(1),
            shrink: if nfc { NFC_SHRINK } else { 1 },
        }
    }

    /// Of a `tokenizer.json`; `longest_spelled` are the bytes of its longest token as the
    /// file spells it, which is never shorter than what it stands for.
    pub(crate) fn of_file(file: &Value, longest_spelled: usize) -> Option<Self> {
        let nfc = normalizer(&file["normalizer"])?;
        let byte_level = pre_tokenizer(&file["pre_tokenizer"])?;
        let model = &file["model"];
        let absent = |field: &str| matches!(&model[field], Value::Null) || model[field] == "";
        let plain = model["type"] == "BPE"
            && absent("continuing_subword_prefix")
            && absent("end_of_word_suffix");
        // Otherwise characters without a token vanish, or many become one unknown token.
        let whole = if byte_level {
            has_all(model, (0..=255).map(byte_letter))
        } else {
            model["byte_fallback"] == true
                && has_all(model, (0..=255_u8).map(|byte| format!("<0x{byte:02X}>")))
        };
        // These swallow the blanks beside them.
        let swallows = |token: &Value| token["lstrip"] == true || token["rstrip"] == true;
        let added = file["added_tokens"].as_array();
        let greedy = added.into_iter().flatten().any(swallows);
        (plain && whole && !greedy).then(|| Self::of(longest_spelled, nfc))
    }

    /// No fewer tokens than this stand for `text`.
    pub(crate) fn fewest(&self, text: &str) -> usize {
        // Asking is cheap only where the answer matters.
        let shrink = match self.shrink {
            1 => 1,
            _ if text.is_ascii() => 1,
            shrink => shrink,
        };
        text.len() / self.longest.saturating_mul(shrink)
    }
}

/// Whether the text is brought into NFC; `None` for steps that may drop some of it.
fn normalizer(step: &Value) -> Option<bool> {
    if step.is_null() {
        return Some(false);
    }
    match step["type"].as_str()? {
        "NFC" => Some(true),
        "Prepend" => Some(false),
        "Replace" => {
            let from = step["pattern"]["String"].as_str()?;
            (from.len() <= step["content"].as_str()?.len()).then_some(false)
        }
        "Sequence" => {
            let steps = step["normalizers"].as_array()?;
            steps
                .iter()
                .try_fold(false, |nfc, step| Some(normalizer(step)? | nfc))
        }
        _ => None,
    }
}

/// Whether bytes are spelled in letters; `None` for steps that may drop some of the text.
fn pre_tokenizer(step: &Value) -> Option<bool> {
    if step.is_null() {
        return Some(false);
    }
    match step["type"].as_str()? {
        "ByteLevel" => Some(true),
        "Digits" | "Metaspace" => Some(false),
        "Split" => (step["behavior"] != "Removed").then_some(false),
        "Sequence" => {
            let steps = step["pretokenizers"].as_array()?;
            steps
                .iter()
                .try_fold(false, |bytes, step| Some(pre_tokenizer(step)? | bytes))
        }
        _ => None,
    }
}

fn has_all(model: &Value, mut pieces: impl Iterator<Item = String>) -> bool {
    pieces.all(|piece| model["vocab"].get(&piece).is_some())
}

/// The letter of the byte-level alphabet.
fn byte_letter(byte: u8) -> String {
    let letter = (0..0x144)
        .filter_map(char::from_u32)
        .find(|letter| crate::byte_level::byte_of(*letter) == Some(byte));
    letter.map(String::from).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn byte_level() -> Value {
        let vocab: serde_json::Map<String, Value> = (0..=255)
            .map(|byte| (byte_letter(byte), json!(byte)))
            .collect();
        json!({
            "normalizer": { "type": "NFC" },
            "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
                { "type": "Split", "behavior": "Isolated" }, { "type": "ByteLevel" },
            ] },
            "added_tokens": [{ "content": "<s>", "lstrip": false, "rstrip": false }],
            "model": { "type": "BPE", "vocab": vocab, "end_of_word_suffix": "" },
        })
    }

    #[test]
    fn what_keeps_every_byte_has_a_bound() {
        let reach = Reach::of_file(&byte_level(), 10).unwrap();
        assert_eq!(reach.fewest(&"x".repeat(1000)), 100);
        assert_eq!(reach.fewest(&"\u{e9}".repeat(450)), 10);
        assert_eq!(Reach::of(0, false).fewest("abc"), 3);
    }

    #[test]
    fn what_may_drop_some_has_none() {
        let with = |pointer: &str, value: Value| {
            let mut file = byte_level();
            *file.pointer_mut(pointer).unwrap() = value;
            Reach::of_file(&file, 10)
        };
        for (pointer, value) in [
            ("/normalizer", json!({ "type": "Strip" })),
            ("/normalizer", json!({ "type": "NFKC" })),
            (
                "/normalizer",
                json!({ "type": "Replace", "pattern": { "String": "  " }, "content": " " }),
            ),
            ("/pre_tokenizer", json!({ "type": "WhitespaceSplit" })),
            ("/pre_tokenizer", Value::Null),
            ("/pre_tokenizer/pretokenizers/0/behavior", json!("Removed")),
            ("/added_tokens/0/lstrip", json!(true)),
            ("/model/type", json!("Unigram")),
            ("/model/end_of_word_suffix", json!("</w>")),
            ("/model/vocab", json!({ "a": 0 })),
        ] {
            assert_eq!(with(pointer, value.clone()), None, "{pointer} {value}");
        }
        let nothing = with("/normalizer", Value::Null).unwrap();
        assert_eq!(nothing.fewest(&"\u{e9}".repeat(450)), 90);
    }
}
