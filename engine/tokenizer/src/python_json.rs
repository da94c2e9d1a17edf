//! `tojson` as Python's `json.dumps(ensure_ascii=False)` writes it.
//!
//! Models were trained on prompts rendered by Python, so spaces, escapes and the
//! spelling of numbers must be the same. `<` and `&` stay as they are: prompts are not
//! HTML.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// Deeper values are refused; a client's JSON cannot be that deep.
const DEPTH_MAX: usize = 200;

/// The template filter `tojson(indent, ensure_ascii, separators, sort_keys)`.
pub(crate) fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let (between, after_key) = match separators.as_deref() {
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
        Some([between, after_key]) => (between.clone(), after_key.clone()),
        Some(_) => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "separators must be a pair",
            ));
        }
    };
    let writer = Writer {
        indent,
        between,
        after_key,
        ensure_ascii: options
            .get::<Option<bool>>("ensure_ascii")?
            .unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let mut out = String::new();
    writer.write(value, 0, &mut out)?;
    Ok(out)
}

struct Writer {
    indent: Option<usize>,
    between: String,
    after_key: String,
    ensure_ascii: bool,
    sort_keys: bool,
}

impl Writer {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "value is nested too deeply for JSON",
            ));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => out.push_str(&value.to_string()),
            ValueKind::Number => out.push_str(&python_float(f64::try_from(value.clone())?)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list(&items, ['[', ']'], depth, out, |item, out| {
                    self.write(item, depth + 1, out)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.list(&keys, ['{', '}'], depth, out, |key, out| {
                    self.string(&key_text(key)?, out);
                    out.push_str(&self.after_key);
                    self.write(&value.get_item(key)?, depth + 1, out)
                })?;
            }
            kind => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("{kind} is not JSON serializable"),
                ));
            }
        }
        Ok(())
    }

    fn list(
        &self,
        items: &[Value],
        brackets: [char; 2],
        depth: usize,
        out: &mut String,
        mut write: impl FnMut(&Value, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(brackets[0]);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                out.push_str(&self.between);
            }
            self.line_break(depth + 1, out);
            write(item, out)?;
        }
        if !items.is_empty() {
            self.line_break(depth, out);
        }
        out.push(brackets[1]);
        Ok(())
    }

    fn line_break(&self, depth: usize, out: &mut String) {
        if let Some(indent) = self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent.min(64) * depth));
        }
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
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
                _ if self.ensure_ascii && !c.is_ascii() => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                _ => out.push(c),
            }
        }
        out.push('"');
    }
}

fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::Number if key.is_integer() => Ok(key.to_string()),
        ValueKind::Number => Ok(python_float(f64::try_from(key.clone())?)),
        kind => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("JSON keys must be strings, not {kind}"),
        )),
    }
}

/// Python's `repr` of a float: the shortest digits, exponents outside `1e-4..1e16`.
fn python_float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if value == 0.0 || (-4..16).contains(&exponent) {
        let fixed = format!("{value}");
        return if fixed.contains('.') {
            fixed
        } else {
            format!("{fixed}.0")
        };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_spelled_as_python_does() {
        for (value, expect) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e-5, "1.5e-05"),
            (0.0001, "0.0001"),
            (1.25e300, "1.25e+300"),
        ] {
            assert_eq!(python_float(value), expect);
        }
    }
}
