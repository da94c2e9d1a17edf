//! `tojson` as Python's `json.dumps(ensure_ascii=False)` writes it.
//!
//! Models were trained on prompts rendered by Python, so spaces, escapes and the
//! spelling of numbers must be the same. `<` and `&` stay as they are: prompts are not
//! HTML.

use super::calls::CallArgs;
use super::compare;
use super::error::{Error, Result};
use super::interpreter::Interpreter;
use super::numbers::float_repr;
use super::text::{Str, StrBuilder};
use super::value::Value;
use crate::json::Json;

/// Wider indents are refused.
const INDENT_MAX: i128 = 64;

/// The template filter `tojson(ensure_ascii, indent, separators, sort_keys)`.
pub(super) fn tojson(
    interpreter: &mut Interpreter,
    value: &Value,
    args: CallArgs,
) -> Result<Value> {
    let [ensure_ascii, indent, separators, sort_keys] = args.bind(
        "tojson",
        ["ensure_ascii", "indent", "separators", "sort_keys"],
        0,
    )?;
    let indent = match indent {
        None | Some(Value::None) => None,
        Some(Value::Str(text)) => Some(text),
        Some(Value::Int(width)) if width > INDENT_MAX => {
            return Err(Error::unsupported(format!("an indent above {INDENT_MAX}")));
        }
        Some(Value::Int(width)) => {
            let width = usize::try_from(width).unwrap_or(0);
            Some(Str::own(" ".repeat(width)))
        }
        Some(Value::Bool(one)) => Some(Str::own(if one { " " } else { "" })),
        Some(_) => return Err(Error::failed("indent must be a number or a string")),
    };
    let (between, after_key) = match separators {
        None | Some(Value::None) if indent.is_some() => (Str::own(","), Str::own(": ")),
        None | Some(Value::None) => (Str::own(", "), Str::own(": ")),
        Some(pair) => match &interpreter.items(&pair)?[..] {
            [Value::Str(between), Value::Str(after_key)] => (between.clone(), after_key.clone()),
            _ => return Err(Error::failed("separators must be a pair of strings")),
        },
    };
    let is_true = |option: Option<Value>| option.is_some_and(|option| option.is_true());
    let mut writer = Writer {
        indent,
        between,
        after_key,
        ensure_ascii: is_true(ensure_ascii),
        sort_keys: is_true(sort_keys),
        out: StrBuilder::default(),
        interpreter,
    };
    writer.write(value, 0)?;
    Ok(Value::Str(writer.out.finish()))
}

struct Writer<'i> {
    indent: Option<Str>,
    between: Str,
    after_key: Str,
    ensure_ascii: bool,
    sort_keys: bool,
    out: StrBuilder,
    interpreter: &'i mut Interpreter,
}

impl Writer<'_> {
    /// The depth of values is bounded where they are made.
    fn write(&mut self, value: &Value, depth: usize) -> Result<()> {
        self.interpreter.spend(1)?;
        match value {
            Value::None => self.out.push_own("null"),
            Value::Bool(value) => self.out.push_own(if *value { "true" } else { "false" }),
            Value::Int(integer) => self.out.push_own(&integer.to_string()),
            Value::Float(float) => self.out.push_own(&json_float(*float)),
            Value::Str(text) => self.string(text)?,
            Value::List(sequence) | Value::Tuple(sequence) => {
                self.out.push_own("[");
                for (index, item) in sequence.items.iter().enumerate() {
                    self.before(index, depth + 1)?;
                    self.write(item, depth + 1)?;
                }
                self.end(sequence.items.is_empty(), depth, "]")?;
            }
            Value::Dict(dict) => {
                let mut entries: Vec<(Value, Value)> = dict.entries.clone();
                self.interpreter.spend(entries.len())?;
                if self.sort_keys {
                    compare::sort_by_key(&mut entries, false)?;
                }
                self.out.push_own("{");
                for (index, (key, value)) in entries.iter().enumerate() {
                    self.before(index, depth + 1)?;
                    self.key(key)?;
                    self.out.push(&self.after_key);
                    self.write(value, depth + 1)?;
                }
                self.end(entries.is_empty(), depth, "}")?;
            }
            other => {
                return Err(Error::failed(format!(
                    "object of type {} is not JSON serializable",
                    other.type_name()
                )));
            }
        }
        Ok(())
    }

    fn before(&mut self, index: usize, depth: usize) -> Result<()> {
        if index > 0 {
            self.out.push(&self.between);
        }
        self.line_break(depth)
    }

    fn end(&mut self, is_empty: bool, depth: usize, bracket: &str) -> Result<()> {
        if !is_empty {
            self.line_break(depth)?;
        }
        self.out.push_own(bracket);
        Ok(())
    }

    fn line_break(&mut self, depth: usize) -> Result<()> {
        if let Some(indent) = &self.indent {
            self.interpreter.spend_bytes(indent.len() * depth)?;
            self.out.push_own("\n");
            for _ in 0..depth {
                self.out.push(indent);
            }
        }
        Ok(())
    }

    fn key(&mut self, key: &Value) -> Result<()> {
        let text = match key {
            Value::Str(text) => return self.string(text),
            Value::None => "null".to_owned(),
            Value::Bool(value) => value.to_string(),
            Value::Int(integer) => integer.to_string(),
            Value::Float(float) => json_float(*float),
            other => {
                return Err(Error::failed(format!(
                    "keys must be str, int, float, bool or None, not {}",
                    other.type_name()
                )));
            }
        };
        self.out.push_own(&format!("\"{text}\""));
        Ok(())
    }

    fn string(&mut self, text: &Str) -> Result<()> {
        self.interpreter.spend_bytes(text.len())?;
        let mut inner = String::with_capacity(text.len() + 2);
        escape(text, self.ensure_ascii, &mut inner);
        self.out.push_own("\"");
        self.out.push_derived(&inner, text);
        self.out.push_own("\"");
        Ok(())
    }
}

fn json_float(value: f64) -> String {
    if value.is_nan() {
        "NaN".to_owned()
    } else if value.is_infinite() {
        if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned()
    } else {
        float_repr(value)
    }
}

/// What stands between the quotes.
fn escape(text: &str, ensure_ascii: bool, out: &mut String) {
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\0'..='\u{1f}' => out.push_str(&format!("\\u{:04x}", c as u32)),
            _ if ensure_ascii && !c.is_ascii() => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
            _ => out.push(c),
        }
    }
}

/// A client's JSON as Python writes it without options, for templates that take the text
/// of an object. Its depth is bounded where it is read.
pub(crate) fn dumps(json: &Json) -> String {
    let mut out = String::new();
    dump(json, &mut out);
    out
}

fn dump(json: &Json, out: &mut String) {
    let quoted = |text: &str, out: &mut String| {
        out.push('"');
        escape(text, false, out);
        out.push('"');
    };
    match json {
        Json::Null => out.push_str("null"),
        Json::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
        Json::Integer(value) => out.push_str(&value.to_string()),
        Json::LongInteger(digits) => out.push_str(digits),
        Json::Float(value) => out.push_str(&json_float(*value)),
        Json::String(text) => quoted(text, out),
        Json::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                dump(item, out);
            }
            out.push(']');
        }
        Json::Object(members) => {
            out.push('{');
            for (index, (key, member)) in members.iter().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                quoted(key, out);
                out.push_str(": ");
                dump(member, out);
            }
            out.push('}');
        }
    }
}
