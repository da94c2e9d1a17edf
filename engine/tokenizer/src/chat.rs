//! A conversation as a client sends it, checked, and brought into the shape that a
//! template takes.
//!
//! Whatever cannot be shown to the model is refused by its path; the rendered prompt is
//! then checked for what the template left out. How a template takes content parts, tool
//! arguments and absent content is [`crate::template_format`]'s to find out.

use crate::error::Error;
use crate::json::{Json, JsonObject};

/// The roles that a message may have. Templates write roles inside of control tokens
/// (`<|user|>`), so no others are passed on.
pub(crate) const ROLES: [&str; 6] = [
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
];

/// What to render.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatRequest {
    /// OpenAI messages: `role`, `content` (string, text parts, or null beside tool
    /// calls), `tool_calls`, `name`, `tool_call_id`.
    pub messages: Vec<Json>,
    /// OpenAI tools; empty for none.
    pub tools: Vec<Json>,
    /// Documents for retrieval templates; empty for none.
    pub documents: Vec<Json>,
    /// A template by name. Otherwise `tool_use` if there are tools and it exists, else
    /// `default`.
    pub template: Option<String>,
    /// Open the assistant's turn at the end.
    pub add_generation_prompt: bool,
    /// Leave the last message open, so that the model continues it. Excludes
    /// `add_generation_prompt`.
    pub continue_final_message: bool,
    /// Control tokens that the request's own text spells become tokens. Otherwise only
    /// those of the template do.
    pub allow_special_tokens: bool,
    /// The request's creation time in Unix seconds, for `strftime_now`; in UTC. It is
    /// given, not read, so that a resumed request renders the same prompt.
    pub now: i64,
    /// More template variables (`enable_thinking`).
    pub extra: JsonObject,
}

/// Text that must be found in the rendered prompt, and where it came from.
pub(crate) struct Expected {
    path: String,
    word: String,
}

/// A checked message.
pub(crate) struct Message {
    pub(crate) role: &'static str,
    pub(crate) content: Content,
    /// Function name and arguments of each tool call.
    pub(crate) calls: Vec<Arguments>,
    /// All members, in the client's order.
    members: JsonObject,
}

/// A message's content as the client sent it.
pub(crate) enum Content {
    Absent,
    Null,
    Text(String),
    /// Text parts; refusals are among them.
    Parts(Vec<Json>),
}

/// The arguments of a tool call.
pub(crate) enum Arguments {
    /// An object, or the text of one, and that text if the client sent text.
    Object(JsonObject, Option<String>),
    /// Text that is no object: cut off, or a list.
    Text(String),
}

/// How arguments are given to a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ArgumentStyle {
    Object,
    Text,
    /// As `Object`; what is no object becomes the member `arguments` of one.
    OnlyObject,
}

/// What a message's shape depends on.
pub(crate) trait Shapes {
    /// Whether the template walks the parts of such a message's content.
    fn takes_parts(&self, role: &'static str) -> bool;
    /// Whether the template takes a message without content (`null`, or no such member).
    fn takes_missing(&self, role: &'static str, calls: bool, null: bool) -> bool;
    fn arguments(&self) -> ArgumentStyle;
}

impl ChatRequest {
    /// The messages, checked.
    pub(crate) fn checked(&self) -> Result<Vec<Message>, Error> {
        if self.messages.is_empty() {
            return Err(invalid("messages", "must not be empty"));
        }
        (0..)
            .zip(&self.messages)
            .map(|(index, message)| check(&format!("messages[{index}]"), message))
            .collect()
    }
}

pub(crate) fn invalid(path: &str, reason: &str) -> Error {
    Error::InvalidChat {
        path: path.to_owned(),
        reason: reason.to_owned(),
    }
}

fn check(path: &str, message: &Json) -> Result<Message, Error> {
    let Json::Object(members) = message else {
        return Err(invalid(path, "must be an object"));
    };
    let role_path = format!("{path}.role");
    let role = match members.get("role") {
        Some(Json::String(role)) => {
            ROLES
                .into_iter()
                .find(|known| known == role)
                .ok_or_else(|| {
                    let shown: String = role.chars().take(40).collect();
                    let known = ROLES.join(", ");
                    invalid(&role_path, &format!("`{shown}` is not one of {known}"))
                })?
        }
        _ => return Err(invalid(&role_path, "must be a string")),
    };
    let present = |field: &str| members.get(field).filter(|value| **value != Json::Null);
    for field in ["function_call", "audio"] {
        if present(field).is_some() {
            return Err(invalid(&format!("{path}.{field}"), "is not supported"));
        }
    }
    let content_path = format!("{path}.content");
    let mut content = match members.get("content") {
        None => Content::Absent,
        Some(Json::Null) => Content::Null,
        Some(Json::String(text)) => Content::Text(text.clone()),
        Some(Json::Array(parts)) => Content::Parts(
            (0..)
                .zip(parts)
                .map(|(index, part)| text_part(&format!("{content_path}[{index}]"), role, part))
                .collect::<Result<_, _>>()?,
        ),
        Some(_) => {
            let reason = "must be a string or a list of text parts";
            return Err(invalid(&content_path, reason));
        }
    };
    if matches!(content, Content::Absent | Content::Null)
        && !matches!(role, "assistant" | "tool" | "function")
    {
        return Err(invalid(&content_path, "is required for this role"));
    }
    match present("refusal") {
        None => {}
        Some(Json::String(text)) if role == "assistant" => content.add(text),
        Some(_) => {
            let reason = "must be a string of an assistant message";
            return Err(invalid(&format!("{path}.refusal"), reason));
        }
    }
    let calls = match members.get("tool_calls") {
        None | Some(Json::Null) => Vec::new(),
        Some(calls) => check_calls(&format!("{path}.tool_calls"), calls)?,
    };
    let mut members = members.clone();
    members.shift_remove("refusal");
    if calls.is_empty() {
        members.shift_remove("tool_calls");
    }
    Ok(Message {
        role,
        content,
        calls,
        members,
    })
}

/// One content part, with the `type` and `text` that templates look for.
fn text_part(path: &str, role: &str, part: &Json) -> Result<Json, Error> {
    let kind_path = format!("{path}.type");
    let field = match part.get("type").and_then(Json::as_str) {
        Some("text") => "text",
        Some("refusal") if role == "assistant" => "refusal",
        Some(kind) => {
            let shown: String = kind.chars().take(40).collect();
            let reason = format!("`{shown}` is not supported; only `text` is");
            return Err(invalid(&kind_path, &reason));
        }
        None => return Err(invalid(&kind_path, "must be `text`")),
    };
    let Some(text) = part.get(field).and_then(Json::as_str) else {
        return Err(invalid(&format!("{path}.{field}"), "must be a string"));
    };
    Ok(match (field, part) {
        ("text", part) => part.clone(),
        _ => part_of(text),
    })
}

/// A content part of this text.
pub(crate) fn part_of(text: &str) -> Json {
    Json::Object(JsonObject::from([
        ("type".to_owned(), "text".into()),
        ("text".to_owned(), text.into()),
    ]))
}

fn check_calls(path: &str, calls: &Json) -> Result<Vec<Arguments>, Error> {
    let Json::Array(calls) = calls else {
        return Err(invalid(path, "must be a list"));
    };
    let check = |(index, call): (usize, &Json)| {
        let path = format!("{path}[{index}].function");
        let Some(function) = call.get("function").and_then(Json::as_object) else {
            return Err(invalid(&path, "must be an object"));
        };
        if function.get("name").and_then(Json::as_str).is_none() {
            return Err(invalid(&format!("{path}.name"), "must be a string"));
        }
        match function.get("arguments") {
            None | Some(Json::Null) => Ok(Arguments::Object(JsonObject::new(), None)),
            Some(Json::Object(arguments)) => Ok(Arguments::Object(arguments.clone(), None)),
            Some(Json::String(text)) if text.trim().is_empty() => {
                Ok(Arguments::Object(JsonObject::new(), Some(text.clone())))
            }
            Some(Json::String(text)) => Ok(match Json::parse(text) {
                Ok(Json::Object(arguments)) => Arguments::Object(arguments, Some(text.clone())),
                _ => Arguments::Text(text.clone()),
            }),
            Some(_) => {
                let reason = "must be text or a JSON object";
                Err(invalid(&format!("{path}.arguments"), reason))
            }
        }
    };
    calls.iter().enumerate().map(check).collect()
}

impl Content {
    /// Adds one more text, as a part of its own.
    fn add(&mut self, text: &str) {
        match self {
            Self::Absent | Self::Null => *self = Self::Text(text.to_owned()),
            Self::Text(given) => *self = Self::Parts(vec![part_of(given), part_of(text)]),
            Self::Parts(parts) => parts.push(part_of(text)),
        }
    }
}

impl Message {
    /// Whether a tool call has arguments that are no object.
    pub(crate) fn has_text_arguments(&self) -> bool {
        let text = |call: &Arguments| matches!(call, Arguments::Text(_));
        self.calls.iter().any(text)
    }

    /// The message as the template takes it.
    pub(crate) fn shaped(&self, shapes: &dyn Shapes, only_objects: bool) -> Json {
        let has_calls = !self.calls.is_empty();
        let missing = |null: bool| shapes.takes_missing(self.role, has_calls, null);
        let content = match &self.content {
            Content::Absent if missing(false) => None,
            Content::Null if missing(true) => Some(Json::Null),
            Content::Absent | Content::Null => Some("".into()),
            Content::Text(text) => Some(text.as_str().into()),
            Content::Parts(parts) if shapes.takes_parts(self.role) => {
                Some(Json::Array(parts.clone()))
            }
            Content::Parts(parts) => {
                let texts: Vec<&str> = parts
                    .iter()
                    .filter_map(|part| part.get("text")?.as_str())
                    .collect();
                Some(Json::String(texts.join("\n")))
            }
        };
        let mut members = self.members.clone();
        match content {
            Some(content) => drop(members.insert("content".to_owned(), content)),
            None => drop(members.shift_remove("content")),
        }
        if has_calls && let Some(Json::Array(calls)) = members.get_mut("tool_calls") {
            let style = match shapes.arguments() {
                ArgumentStyle::Object if only_objects => ArgumentStyle::OnlyObject,
                style => style,
            };
            for (call, arguments) in calls.iter_mut().zip(&self.calls) {
                if let Json::Object(call) = call
                    && let Some(Json::Object(function)) = call.get_mut("function")
                {
                    function.insert("arguments".to_owned(), arguments.shaped(style));
                }
            }
        }
        Json::Object(members)
    }
}

impl Arguments {
    fn shaped(&self, style: ArgumentStyle) -> Json {
        match (self, style) {
            (Self::Object(_, Some(text)), ArgumentStyle::Text) => text.as_str().into(),
            (Self::Object(object, None), ArgumentStyle::Text) => {
                Json::String(crate::jinja::dumps(&Json::Object(object.clone())))
            }
            (Self::Object(object, _), _) => Json::Object(object.clone()),
            (Self::Text(text), ArgumentStyle::OnlyObject) => Json::Object(JsonObject::from([(
                "arguments".to_owned(),
                text.as_str().into(),
            )])),
            (Self::Text(text), _) => text.as_str().into(),
        }
    }
}

/// One word of each message, tool call and tool. Templates trim, escape and reorder,
/// so whole texts cannot be looked for; a plain ASCII word survives all of that.
pub(crate) fn expected(messages: &[Json], tools: &[Json]) -> Vec<Expected> {
    let mut all = Vec::new();
    let mut add = |path: String, text: Option<&str>| {
        if let Some(word) = text.and_then(longest_word) {
            let word = word.to_owned();
            all.push(Expected { path, word });
        }
    };
    let name = |value: &Json| Some(value.get("function")?.get("name")?.as_str()?.to_owned());
    // Templates of thinking models drop earlier thoughts, by design.
    let shown = |text: &str| text.rsplit("</think>").next().unwrap_or(text).to_owned();
    for (index, message) in (0..).zip(messages) {
        let path = format!("messages[{index}]");
        match message.get("content") {
            Some(Json::Array(parts)) => {
                // Thoughts may end in a later part than they begin in.
                let ends = |part: &Json| {
                    let text = part.get("text").and_then(Json::as_str);
                    text.is_some_and(|text| text.contains("</think>"))
                };
                let first = parts.iter().rposition(ends).unwrap_or(0);
                for (part, value) in parts.iter().enumerate().skip(first) {
                    let text = value.get("text").and_then(Json::as_str).map(shown);
                    add(format!("{path}.content[{part}]"), text.as_deref());
                }
            }
            content => {
                let text = content.and_then(Json::as_str).map(shown);
                add(format!("{path}.content"), text.as_deref());
            }
        }
        let calls = message.get("tool_calls").and_then(Json::as_array);
        for (call, value) in (0..).zip(calls.unwrap_or_default()) {
            add(format!("{path}.tool_calls[{call}]"), name(value).as_deref());
        }
    }
    for (index, tool) in (0..).zip(tools) {
        add(format!("tools[{index}]"), name(tool).as_deref());
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
