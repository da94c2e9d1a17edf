//! Python's `str()` and `repr()` of values: what `{{ … }}` prints.

use super::characters;
use super::error::{Error, Result};
use super::interpreter::Interpreter;
use super::numbers::float_repr;
use super::text::{Str, StrBuilder};
use super::value::{Span, Value, View};

impl Interpreter {
    /// Python's `str(value)`.
    pub(super) fn str_of(&mut self, value: &Value) -> Result<Str> {
        match value {
            Value::Str(text) => Ok(text.clone()),
            _ => {
                let mut out = StrBuilder::default();
                self.write_str(value, &mut out)?;
                Ok(out.finish())
            }
        }
    }

    /// Appends `str(value)`.
    pub(super) fn write_str(&mut self, value: &Value, out: &mut StrBuilder) -> Result<()> {
        self.spend(value.weight())?;
        match value {
            Value::Str(text) => out.push(text),
            Value::Undefined(_) => {}
            _ => write_repr(value, out)?,
        }
        Ok(())
    }

    /// Python's `repr(value)`.
    pub(super) fn repr_of(&mut self, value: &Value) -> Result<Str> {
        self.spend(value.weight())?;
        let mut out = StrBuilder::default();
        write_repr(value, &mut out)?;
        Ok(out.finish())
    }

    /// Python's `ascii(value)`.
    pub(super) fn ascii_of(&mut self, value: &Value) -> Result<Str> {
        let repr = self.repr_of(value)?;
        let mut out = String::with_capacity(repr.len());
        for c in repr.chars() {
            match c {
                '\0'..='\x7f' => out.push(c),
                c => push_escape(c, &mut out),
            }
        }
        Ok(Str::derived(out, &repr))
    }
}

fn write_repr(value: &Value, out: &mut StrBuilder) -> Result<()> {
    match value {
        Value::Undefined(_) => out.push_own("Undefined"),
        Value::None => out.push_own("None"),
        Value::Bool(true) => out.push_own("True"),
        Value::Bool(false) => out.push_own("False"),
        Value::Int(integer) => out.push_own(&integer.to_string()),
        Value::Float(float) => out.push_own(&float_repr(*float)),
        Value::Str(text) if text.markup => {
            out.push_own("Markup(");
            quote(text, out);
            out.push_own(")");
        }
        Value::Str(text) => quote(text, out),
        Value::List(sequence) => items(&sequence.items, ["[", "]"], out)?,
        Value::Tuple(sequence) if sequence.items.len() == 1 => {
            items(&sequence.items, ["(", ",)"], out)?;
        }
        Value::Tuple(sequence) => items(&sequence.items, ["(", ")"], out)?,
        Value::Dict(dict) => {
            out.push_own("{");
            for (index, (key, value)) in dict.entries.iter().enumerate() {
                if index > 0 {
                    out.push_own(", ");
                }
                write_repr(key, out)?;
                out.push_own(": ");
                write_repr(value, out)?;
            }
            out.push_own("}");
        }
        Value::Range(Span { start, stop, step }) => {
            out.push_own(&match step {
                1 => format!("range({start}, {stop})"),
                _ => format!("range({start}, {stop}, {step})"),
            });
        }
        Value::View(view, dict) => {
            let list = |pick: fn(&(Value, Value)) -> Value| -> Vec<Value> {
                dict.entries.iter().map(pick).collect()
            };
            out.push_own(value.type_name());
            match view {
                View::Keys => items(&list(|entry| entry.0.clone()), ["([", "])"], out)?,
                View::Values => items(&list(|entry| entry.1.clone()), ["([", "])"], out)?,
                View::Items => {
                    let pairs: Result<Vec<Value>> = dict
                        .entries
                        .iter()
                        .map(|(key, value)| Value::tuple(vec![key.clone(), value.clone()]))
                        .collect();
                    items(&pairs?, ["([", "])"], out)?;
                }
            }
        }
        // Python prints an address or an object that the template cannot want to show.
        _ => {
            return Err(Error::unsupported(format!(
                "printing a {}",
                value.type_name()
            )));
        }
    }
    Ok(())
}

fn items(items: &[Value], brackets: [&str; 2], out: &mut StrBuilder) -> Result<()> {
    out.push_own(brackets[0]);
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            out.push_own(", ");
        }
        write_repr(item, out)?;
    }
    out.push_own(brackets[1]);
    Ok(())
}

/// A string literal with the quote that needs no escape, if there is one.
fn quote(text: &Str, out: &mut StrBuilder) {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    let mut inner = String::with_capacity(text.len() + 2);
    for c in text.chars() {
        match c {
            '\\' => inner.push_str("\\\\"),
            '\n' => inner.push_str("\\n"),
            '\r' => inner.push_str("\\r"),
            '\t' => inner.push_str("\\t"),
            c if c == quote => {
                inner.push('\\');
                inner.push(c);
            }
            c if characters::is_printable(c) => inner.push(c),
            c => push_escape(c, &mut inner),
        }
    }
    let quote = quote.encode_utf8(&mut [0; 4]).to_owned();
    out.push_own(&quote);
    out.push_derived(&inner, text);
    out.push_own(&quote);
}

/// `\xe9`, `\u2028`, `\U0001f642`.
fn push_escape(c: char, out: &mut String) {
    out.push_str(&match c as u32 {
        code @ 0..=0xff => format!("\\x{code:02x}"),
        code @ 0x100..=0xffff => format!("\\u{code:04x}"),
        code => format!("\\U{code:08x}"),
    });
}
