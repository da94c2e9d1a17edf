//! A conversation as a client sends it, checked and brought into the one shape that
//! chat templates know.
//!
//! Templates see `content` as a string always, and tool arguments as objects. Whatever
//! cannot be shown to the model is refused by its path; the rendered prompt is then
//! checked for what the template left out.

use serde_json::{Map, Value};

use crate::error::Error;

/// What to render.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatRequest {
    /// OpenAI messages: `role`, `content` (string, text parts, or null beside tool
    /// calls), `tool_calls`, `name`, `tool_call_id`.
    pub messages: Vec<Value>,
    /// OpenAI tools; empty for none.
    pub tools: Vec<Value>,
    /// Documents for retrieval templates; empty for none.
    pub documents: Vec<Value>,
    /// A template by name. Otherwise `tool_use` if there are tools and it exists, else
    /// `default`.
    pub template: Option<String>,
    /// Open the assistant's turn at the end.
    pub add_generation_prompt: bool,
    /// Leave the last message open, so that the model continues it. Excludes
    /// `add_generation_prompt`.
    pub continue_final_message: bool,
    /// The request's creation time in Unix seconds, for `strftime_now`; in UTC. It is
    /// given, not read, so that a resumed request renders the same prompt.
    pub now: i64,
    /// More template variables (`enable_thinking`).
    pub extra: Map<String, Value>,
}

/// Text that must be found in the rendered prompt, and where it came from.
pub(crate) struct Expected {
    path: String,
    word: String,
}

impl ChatRequest {
    /// The messages in the shape that templates know.
    pub(crate) fn normalised(&self) -> Result<Vec<Value>, Error> {
        if self.messages.is_empty() {
            return Err(invalid("messages", "must not be empty"));
        }
        (0..)
            .zip(&self.messages)
            .map(|(index, message)| normalise(&format!("messages[{index}]"), message))
            .collect()
    }
}

pub(crate) fn invalid(path: &str, reason: &str) -> Error {
    Error::InvalidChat {
        path: path.to_owned(),
        reason: reason.to_owned(),
    }
}

fn normalise(path: &str, message: &Value) -> Result<Value, Error> {
    let Value::Object(message) = message else {
        return Err(invalid(path, "must be an object"));
    };
    let role = match message.get("role") {
        Some(Value::String(role)) if !role.is_empty() => role.as_str(),
        _ => return Err(invalid(&format!("{path}.role"), "must be a string")),
    };
    for field in ["function_call", "audio"] {
        if message.get(field).is_some_and(|value| !value.is_null()) {
            return Err(invalid(&format!("{path}.{field}"), "is not supported"));
        }
    }
    let mut texts = Vec::new();
    let content_path = format!("{path}.content");
    match message.get("content") {
        None | Some(Value::Null) => {
            if !matches!(role, "assistant" | "tool" | "function") {
                return Err(invalid(&content_path, "is required for this role"));
            }
        }
        Some(Value::String(text)) => texts.push(text.as_str()),
        Some(Value::Array(parts)) => {
            for (index, part) in (0..).zip(parts) {
                texts.push(part_text(&format!("{content_path}[{index}]"), role, part)?);
            }
        }
        Some(_) => {
            return Err(invalid(
                &content_path,
                "must be a string or a list of text parts",
            ));
        }
    }
    match message.get("refusal") {
        None | Some(Value::Null) => {}
        Some(Value::String(text)) if role == "assistant" => texts.push(text),
        Some(_) => {
            return Err(invalid(
                &format!("{path}.refusal"),
                "must be a string of an assistant message",
            ));
        }
    }
    let mut shaped = Map::new();
    shaped.insert("role".into(), role.into());
    shaped.insert("content".into(), texts.join("\n").into());
    for (key, value) in message {
        match (key.as_str(), value) {
            ("role" | "content" | "refusal", _) => {}
            ("tool_calls", Value::Null) => {}
            ("tool_calls", Value::Array(calls)) if calls.is_empty() => {}
            ("tool_calls", value) => {
                let calls = tool_calls(&format!("{path}.tool_calls"), value)?;
                shaped.insert(key.clone(), calls);
            }
            _ => {
                shaped.insert(key.clone(), value.clone());
            }
        }
    }
    Ok(Value::Object(shaped))
}

/// The text of one content part. Several parts are joined by a line break.
fn part_text<'v>(path: &str, role: &str, part: &'v Value) -> Result<&'v str, Error> {
    let kind_path = format!("{path}.type");
    let field = match part.get("type").and_then(Value::as_str) {
        Some("text") => "text",
        Some("refusal") if role == "assistant" => "refusal",
        Some(kind) => {
            return Err(invalid(
                &kind_path,
                &format!("`{kind}` is not supported; only `text` is"),
            ));
        }
        None => return Err(invalid(&kind_path, "must be `text`")),
    };
    part.get(field)
        .and_then(Value::as_str)
        .ok_or_else(|| invalid(&format!("{path}.{field}"), "must be a string"))
}

/// Clients send arguments as JSON text; templates want the object.
fn tool_calls(path: &str, value: &Value) -> Result<Value, Error> {
    let Value::Array(calls) = value else {
        return Err(invalid(path, "must be a list"));
    };
    let mut shaped = calls.clone();
    for (index, call) in (0..).zip(&mut shaped) {
        let path = format!("{path}[{index}].function");
        let Some(function) = call.get_mut("function").and_then(Value::as_object_mut) else {
            return Err(invalid(&path, "must be an object"));
        };
        if !function.get("name").is_some_and(Value::is_string) {
            return Err(invalid(&format!("{path}.name"), "must be a string"));
        }
        let parsed = match function.get("arguments") {
            None | Some(Value::Null) => Some(Map::new()),
            Some(Value::Object(arguments)) => Some(arguments.clone()),
            Some(Value::String(text)) if text.trim().is_empty() => Some(Map::new()),
            Some(Value::String(text)) => serde_json::from_str(text).ok(),
            Some(_) => None,
        };
        let arguments =
            parsed.ok_or_else(|| invalid(&format!("{path}.arguments"), "must be a JSON object"))?;
        function.insert("arguments".into(), Value::Object(arguments));
    }
    Ok(Value::Array(shaped))
}

/// One word of each message, tool call and tool. Templates trim, escape and reorder,
/// so whole texts cannot be looked for; a plain ASCII word survives all of that.
pub(crate) fn expected(messages: &[Value], tools: &[Value]) -> Vec<Expected> {
    let mut all = Vec::new();
    let mut add = |path: String, text: Option<&str>| {
        if let Some(word) = text.and_then(longest_word) {
            let word = word.to_owned();
            all.push(Expected { path, word });
        }
    };
    for (index, message) in (0..).zip(messages) {
        // Templates of thinking models drop earlier thoughts, by design.
        let content = message["content"].as_str();
        let content = content.map(|text| text.rsplit("</think>").next().unwrap_or(text));
        add(format!("messages[{index}].content"), content);
        let calls = message["tool_calls"].as_array();
        for (call, value) in (0..).zip(calls.into_iter().flatten()) {
            add(
                format!("messages[{index}].tool_calls[{call}]"),
                value["function"]["name"].as_str(),
            );
        }
    }
    for (index, tool) in (0..).zip(tools) {
        add(format!("tools[{index}]"), tool["function"]["name"].as_str());
    }
    all
}

/// Refuses a prompt that lost something of the conversation.
pub(crate) fn check_complete(expected: &[Expected], rendered: &str) -> Result<(), Error> {
    match expected.iter().find(|item| !rendered.contains(&item.word)) {
        None => Ok(()),
        Some(missing) => Err(invalid(
            &missing.path,
            "the model's chat template leaves this out; refusing to drop it",
        )),
    }
}

fn longest_word(text: &str) -> Option<&str> {
    text.split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty())
        .max_by_key(|word| word.len())
}
