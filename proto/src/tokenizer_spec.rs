//! A model's tokenizer as plain data.
//!
//! The engine reads it from the model's files, workers ship it, routers build
//! the tokenizer from it, and grammar masks will use its token bytes. Routers
//! therefore need no model files.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ids::TokenId;

/// What a vocabulary entry is for (the GGUF token types).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TokenKind {
    Normal,
    Unknown,
    /// Control tokens: never part of the text, never matched in user text unless asked.
    Control,
    /// Added by the model's author: matched whole, part of the text.
    UserDefined,
    Unused,
    /// One byte, written `<0xNN>`.
    Byte,
}

/// One vocabulary entry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenEntry {
    /// The piece as the model's files spell it (byte-level alphabet or U+2581 for spaces).
    pub text: String,
    pub score: f32,
    pub kind: TokenKind,
}

/// How text becomes tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum TokenizerModel {
    /// Byte-level BPE. `pre` names the split rule (`smollm`, `llama-bpe`, `qwen2`, `gpt-2`, …).
    ByteLevelBpe { merges: Vec<String>, pre: String },
    /// SentencePiece BPE: merge the adjacent pair whose joined piece has the highest score.
    SentencePiece { add_space_prefix: bool },
    /// A Hugging Face `tokenizer.json`, verbatim.
    HuggingFace { json: String },
}

/// A chat template and its name (`default` for the main one).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatTemplate {
    pub name: String,
    pub source: String,
}

/// Everything the text layer needs of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenizerSpec {
    pub model: TokenizerModel,
    /// Indexed by token id; holes are `TokenKind::Unused` with empty text.
    pub tokens: Vec<TokenEntry>,
    pub bos: Option<TokenId>,
    /// Every id that ends a sequence, from all of the model's files.
    pub eos: Vec<TokenId>,
    pub unknown: Option<TokenId>,
    pub padding: Option<TokenId>,
    /// Whether plain text is prefixed with BOS (chat templates write it themselves).
    pub add_bos: bool,
    pub add_eos: bool,
    pub chat_templates: Vec<ChatTemplate>,
    /// `bos_token`, `eos_token` and the like as the model's files give them to a chat
    /// template; a name that is not here is undefined there. Absent in what workers of an
    /// older version ship: then the texts of the ids above are taken.
    #[serde(default)]
    pub template_tokens: Option<BTreeMap<String, String>>,
}
