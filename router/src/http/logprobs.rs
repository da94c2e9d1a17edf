//! Token log-probabilities in the two shapes of the public API.

use baton_proto::v1;
use baton_tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

/// One token's entry of a chat choice's `logprobs.content`.
pub(crate) fn chat_entry(tokenizer: &Tokenizer, id: u32, logprobs: &v1::Logprobs) -> Value {
    let named = |id: u32, logprob: f32| {
        json!({
            "token": tokenizer.token_text(id),
            "logprob": logprob,
            "bytes": tokenizer.token_bytes(id),
        })
    };
    let mut entry = named(id, logprobs.logprob);
    entry["top_logprobs"] = logprobs
        .top
        .iter()
        .map(|top| named(top.id, top.logprob))
        .collect();
    entry
}

/// A completion choice's `logprobs`, which grows token by token.
#[derive(Debug, Default)]
pub(crate) struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<Map<String, Value>>,
    text_offset: Vec<usize>,
    /// Characters of text before the next token.
    offset: usize,
}

impl CompletionLogprobs {
    /// The first token pushed stands behind this many characters.
    pub(crate) fn begin_at(&mut self, characters: usize) {
        self.offset = self.offset.max(characters);
    }

    pub(crate) fn push(&mut self, tokenizer: &Tokenizer, id: u32, logprobs: &v1::Logprobs) {
        let text = tokenizer.token_text(id);
        self.text_offset.push(self.offset);
        self.offset += text.chars().count();
        self.tokens.push(text);
        self.token_logprobs.push(logprobs.logprob);
        // Two ids may have one text; the first, more probable one keeps the key.
        let mut top = Map::new();
        for entry in &logprobs.top {
            top.entry(tokenizer.token_text(entry.id))
                .or_insert_with(|| json!(entry.logprob));
        }
        self.top_logprobs.push(top);
    }

    /// What was pushed since the last call; offsets go on.
    pub(crate) fn take(&mut self) -> Value {
        let offset = self.offset;
        let whole = std::mem::take(self);
        self.offset = offset;
        json!({
            "tokens": whole.tokens,
            "token_logprobs": whole.token_logprobs,
            "top_logprobs": whole.top_logprobs,
            "text_offset": whole.text_offset,
        })
    }
}
