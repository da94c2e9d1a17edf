//! How a template takes what templates differ in: content in parts, tool arguments,
//! absent content.
//!
//! The template is asked, not read: a short conversation with words that occur nowhere
//! else is rendered in one way, and the result tells. It is asked once, when a request
//! first needs the answer. In doubt a template gets strings, which every one takes.

use std::sync::OnceLock;

use crate::chat::{ArgumentStyle, ROLES, Shapes, part_of};
use crate::error::Error;
use crate::json::{Json, JsonObject};

/// Words that no template has.
const FIRST: &str = "qzfirstpart";
const SECOND: &str = "qzsecondpart";
const KEY: &str = "qzargument";
const VALUE: &str = "qzvalue";

/// What was found out about one template.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    parts: [OnceLock<bool>; ROLES.len()],
    /// By role, tool calls beside it, and null or absent.
    missing: [[[OnceLock<bool>; 2]; 2]; ROLES.len()],
    arguments: OnceLock<ArgumentStyle>,
}

/// A template that can be asked.
pub(crate) struct Format<'a> {
    pub(crate) answers: &'a Answers,
    pub(crate) render: &'a dyn Fn(Vec<Json>) -> Result<String, Error>,
}

impl Shapes for Format<'_> {
    fn takes_parts(&self, role: &'static str) -> bool {
        let ask = || {
            let parts = Json::Array(vec![part_of(FIRST), part_of(SECOND)]);
            let message = with_content(message(role), parts);
            let rendered = self.ask(role, false, message);
            // Quoted, the list itself was printed.
            let shows = |text: &String, word: &str| {
                text.contains(word)
                    && !text.contains(&format!("'{word}'"))
                    && !text.contains(&format!("\"{word}\""))
            };
            rendered.is_ok_and(|text| shows(&text, FIRST) && shows(&text, SECOND))
        };
        *self.answers.parts[index(role)].get_or_init(ask)
    }

    fn takes_missing(&self, role: &'static str, calls: bool, null: bool) -> bool {
        let ask = || {
            let with = |content: Option<Json>| {
                let message = match content {
                    Some(content) => with_content(message(role), content),
                    None => message(role),
                };
                self.ask(role, calls, message)
            };
            let count = |text: &str| text.matches("None").count() + text.matches("null").count();
            match (with(null.then_some(Json::Null)), with(Some("".into()))) {
                (Ok(missing), Ok(empty)) => count(&missing) == count(&empty),
                (missing, _) => missing.is_ok_and(|text| count(&text) == 0),
            }
        };
        let place = &self.answers.missing[index(role)];
        *place[usize::from(calls)][usize::from(null)].get_or_init(ask)
    }

    fn arguments(&self) -> ArgumentStyle {
        let ask = || {
            let with = |arguments: Json| {
                let message = with_content(message("assistant"), "".into());
                let mut messages = conversation("assistant", true, message);
                set_arguments(&mut messages, &arguments);
                (self.render)(messages)
            };
            let object = JsonObject::from([(KEY.to_owned(), VALUE.into())]);
            let text = format!("{{\"{KEY}\": \"{VALUE}\"}}");
            // Printed as Python prints a mapping, which is no JSON.
            let bare = format!("'{KEY}'");
            match with(Json::Object(object)) {
                Ok(shown) if !shown.contains(&bare) => ArgumentStyle::Object,
                _ => match with(Json::String(text.clone())) {
                    Ok(shown) if shown.contains(&text) => ArgumentStyle::Text,
                    _ => ArgumentStyle::Object,
                },
            }
        };
        *self.answers.arguments.get_or_init(ask)
    }
}

impl Format<'_> {
    fn ask(&self, role: &'static str, calls: bool, message: Json) -> Result<String, Error> {
        let mut messages = conversation(role, calls, message);
        if messages.len() > 2 && self.arguments() == ArgumentStyle::Text {
            set_arguments(&mut messages, &"{}".into());
        }
        (self.render)(messages)
    }
}

fn index(role: &str) -> usize {
    ROLES.iter().position(|known| *known == role).unwrap_or(0)
}

fn object(members: &[(&str, Json)]) -> Json {
    let members = members.iter();
    Json::Object(
        members
            .map(|(key, value)| ((*key).to_owned(), value.clone()))
            .collect(),
    )
}

fn message(role: &str) -> Json {
    match role {
        // An id of nine letters is what the strictest templates ask for.
        "tool" | "function" => object(&[
            ("role", role.into()),
            ("tool_call_id", "call00001".into()),
            ("name", "lookup".into()),
        ]),
        _ => object(&[("role", role.into())]),
    }
}

fn with_content(mut message: Json, content: Json) -> Json {
    if let Json::Object(members) = &mut message {
        members.insert("content".to_owned(), content);
    }
    message
}

/// A legal conversation around `message`.
fn conversation(role: &str, calls: bool, mut message: Json) -> Vec<Json> {
    let said = |role: &str, text: &str| with_content(self::message(role), text.into());
    let function = object(&[("name", "lookup".into()), ("arguments", object(&[]))]);
    let call = object(&[
        ("id", "call00001".into()),
        ("type", "function".into()),
        ("function", function),
    ]);
    let add_calls = |message: &mut Json| {
        if let Json::Object(members) = message {
            members.insert("tool_calls".to_owned(), Json::Array(vec![call.clone()]));
        }
    };
    match role {
        "system" | "developer" => vec![message, said("user", "u")],
        "user" => vec![message],
        "assistant" if calls => {
            add_calls(&mut message);
            vec![said("user", "u"), message, said("tool", "t")]
        }
        "assistant" => vec![said("user", "u"), message, said("user", "v")],
        _ => {
            let mut asking = said("assistant", "");
            add_calls(&mut asking);
            vec![said("user", "u"), asking, message]
        }
    }
}

fn set_arguments(messages: &mut [Json], arguments: &Json) {
    for message in messages {
        if let Json::Object(message) = message
            && let Some(Json::Array(calls)) = message.get_mut("tool_calls")
            && let Some(Json::Object(call)) = calls.first_mut()
            && let Some(Json::Object(function)) = call.get_mut("function")
        {
            function.insert("arguments".to_owned(), arguments.clone());
        }
    }
}
