//! JSON of a request as values of the template engine, which keep in mind that the request
//! gave them.

use crate::chat::ROLES;
use crate::jinja::{Dict, Error, Str, Value};
use crate::json::Json;

/// Values of `type`. They are fixed words, so a request spells nothing of its own with them.
const TYPES: [&str; 9] = [
    "function", "text", "string", "number", "integer", "object", "array", "boolean", "null",
];

/// `json` as a template sees it.
///
/// # Errors
/// An integer beyond 128 bits, or nesting beyond the engine's.
pub(crate) fn value(json: &Json) -> Result<Value, Error> {
    Ok(match json {
        Json::Null => Value::None,
        Json::Bool(value) => Value::Bool(*value),
        Json::Integer(value) => Value::Int(*value),
        Json::LongInteger(digits) => {
            let digits: String = digits.chars().take(64).collect();
            let what = format!("an integer beyond 128 bits (`{digits}`)");
            return Err(Error::unsupported(what));
        }
        Json::Float(value) => Value::Float(*value),
        Json::String(text) => Value::Str(Str::given(text.as_str())),
        Json::Array(items) => list(items)?,
        Json::Object(members) => {
            let mut dict = Dict::default();
            for (key, member) in members {
                let member = match member {
                    Json::String(text) if is_fixed(key, text) => Value::str(text.as_str()),
                    member => value(member)?,
                };
                dict.insert(Value::Str(Str::given(key.as_str())), member)?;
            }
            Value::Dict(dict.into())
        }
    })
}

/// The same of several.
pub(crate) fn list(items: &[Json]) -> Result<Value, Error> {
    Value::list(items.iter().map(value).collect::<Result<_, _>>()?)
}

/// Whether the member is a word that the API fixes. Templates write roles inside of
/// control tokens (`<|user|>`).
fn is_fixed(key: &str, text: &str) -> bool {
    match key {
        "role" => ROLES.contains(&text),
        "type" => TYPES.contains(&text),
        _ => false,
    }
}
