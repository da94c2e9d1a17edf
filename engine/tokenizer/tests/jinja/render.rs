//! Renders a template with plain variables through the crate's public interface.

use baton_tokenizer::{ChatRequest, Error};
use serde_json::{Value, json};

use crate::conversations::members;

#[path = "../text_layer/specs.rs"]
#[allow(dead_code)]
pub(crate) mod specs;

/// What a render came to, with errors told apart by who is at fault.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Outcome {
    Text(String),
    /// Jinja2 has this, and it is refused by name.
    Refused(String),
    Failed(String),
}

pub(crate) fn render(source: &str, variables: &Value, now: i64) -> Outcome {
    let spec = specs::with_template(specs::pieces(), "default", source);
    let tokenizer = specs::build(&spec);
    let rendered = tokenizer.render_chat(&ChatRequest {
        // A message without a word, which no template has to show.
        messages: vec![json!({"role": "user", "content": "!"}).into()],
        extra: members(variables.as_object().unwrap()),
        now,
        ..ChatRequest::default()
    });
    outcome(rendered.map(|text| text.to_string()))
}

pub(crate) fn outcome(rendered: Result<String, Error>) -> Outcome {
    match rendered {
        Ok(text) => Outcome::Text(text),
        Err(error) => {
            let message = error.to_string();
            if message.contains("is not supported") {
                Outcome::Refused(message)
            } else {
                Outcome::Failed(message)
            }
        }
    }
}
