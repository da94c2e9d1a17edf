//! Token log-probabilities in the two shapes of the public API.
//!
//! `bytes` and `text_offset` speak of the text that the client gets, so a token is listed when
//! its part of the text is certain.

use std::collections::VecDeque;

use baton_proto::v1;
use baton_tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

/// The tokens of one choice, until their part of the text is certain.
#[derive(Debug, Default)]
pub(crate) struct Unlisted(VecDeque<(u32, v1::Logprobs)>);

/// A token that can be listed.
#[derive(Debug)]
pub(crate) struct Listed {
    id: u32,
    logprobs: v1::Logprobs,
    text: v1::TokenText,
}

impl Unlisted {
    /// More tokens, and what became certain with them.
    pub(crate) fn push(&mut self, tokens: &mut v1::Tokens) -> Vec<Listed> {
        let logprobs = std::mem::take(&mut tokens.logprobs);
        self.0.extend(tokens.ids.iter().copied().zip(logprobs));
        self.settle(std::mem::take(&mut tokens.token_texts))
    }

    /// The parts of the text of the next tokens.
    pub(crate) fn settle(&mut self, texts: Vec<v1::TokenText>) -> Vec<Listed> {
        let count = texts.len().min(self.0.len());
        let tokens = self.0.drain(..count);
        let listed = tokens
            .zip(texts)
            .map(|((id, logprobs), text)| Listed { id, logprobs, text });
        listed.collect()
    }
}

/// One token's entry of a chat choice's `logprobs.content`.
pub(crate) fn chat_entry(tokenizer: &Tokenizer, listed: &Listed) -> Value {
    // An alternative is no part of any text: its bytes are those it would bring along.
    let alternative = |top: &v1::TokenLogprob| {
        let bytes = match tokenizer.is_special(top.id) {
            true => &[],
            false => tokenizer.token_bytes(top.id),
        };
        json!({ "token": tokenizer.token_text(top.id), "logprob": top.logprob, "bytes": bytes })
    };
    json!({
        "token": tokenizer.token_text(listed.id),
        "logprob": listed.logprobs.logprob,
        "bytes": listed.text.bytes,
        "top_logprobs": listed.logprobs.top.iter().map(alternative).collect::<Vec<_>>(),
    })
}

/// A completion choice's `logprobs`.
pub(crate) fn completion_lists(tokenizer: &Tokenizer, listed: &[Listed]) -> Value {
    let top = |one: &Listed| {
        // Two ids may have one text; the first, more probable one keeps the key.
        let mut top = Map::new();
        for entry in &one.logprobs.top {
            top.entry(tokenizer.token_text(entry.id))
                .or_insert_with(|| json!(entry.logprob));
        }
        Value::Object(top)
    };
    let list = |of: &dyn Fn(&Listed) -> Value| listed.iter().map(of).collect::<Vec<_>>();
    json!({
        "tokens": list(&|one| json!(tokenizer.token_text(one.id))),
        "token_logprobs": list(&|one| json!(one.logprobs.logprob)),
        "top_logprobs": list(&top),
        "text_offset": list(&|one| json!(one.text.offset)),
    })
}
