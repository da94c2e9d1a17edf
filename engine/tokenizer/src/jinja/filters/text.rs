//! Filters of text.

use crate::jinja::calls::{CallArgs, integer, string};
use crate::jinja::characters as chars;
use crate::jinja::error::{Error, Result};
use crate::jinja::interpreter::Interpreter;
use crate::jinja::methods::{split_lines, strip};
use crate::jinja::operators;
use crate::jinja::printf;
use crate::jinja::text::{Str, StrBuilder, escaped};
use crate::jinja::value::{Dict, Value};

impl Interpreter {
    pub(super) fn text_filter(
        &mut self,
        name: &str,
        value: Value,
        args: CallArgs,
    ) -> Result<Value> {
        match name {
            "urlencode" => return self.url_encode(&value, args),
            "xmlattr" => return self.xml_attributes(&value, args),
            "indent" => return self.indent(&value, args),
            "truncate" => return self.truncate(&value, args),
            _ => {}
        }
        let text = self.str_of(&value)?;
        self.spend_bytes(text.len())?;
        let derived = |result: String| Ok(Value::Str(Str::derived(result, &text)));
        match name {
            "upper" => args.none(name).and_then(|()| derived(text.to_uppercase())),
            "lower" => args.none(name).and_then(|()| derived(text.to_lowercase())),
            "capitalize" => args
                .none(name)
                .and_then(|()| derived(chars::capitalize(&text)?)),
            "title" => args.none(name).and_then(|()| derived(title(&text)?)),
            "safe" => args.none(name).map(|()| Value::Str(text.with_markup(true))),
            "e" | "escape" => args.none(name).map(|()| Value::Str(escaped(&text))),
            "forceescape" => {
                args.none(name)?;
                Ok(Value::Str(escaped(&text.with_markup(false))))
            }
            "trim" => {
                let [set] = args.bind(name, ["chars"], 0)?;
                strip(&text, set.as_ref(), true, true).map(Value::Str)
            }
            "center" => {
                let [width] = args.bind(name, ["width"], 0)?;
                let width = width.map_or(Ok(80), |width| integer(&width, "width"))?;
                self.pad(&text, width, &Str::own(" "), name).map(Value::Str)
            }
            "replace" => {
                let [old, new, count] = args.bind(name, ["old", "new", "count"], 2)?;
                let old = self.str_of(&old.unwrap_or(Value::None))?;
                let new = self.str_of(&new.unwrap_or(Value::None))?;
                let count = match count {
                    None | Some(Value::None) => -1,
                    Some(count) => integer(&count, "count")?,
                };
                self.replace(&text, &old, &new, count).map(Value::Str)
            }
            "wordcount" => {
                args.none(name)?;
                let mut words = 0;
                let mut in_word = false;
                for c in text.chars() {
                    let word = chars::is_word(c);
                    words += i128::from(word && !in_word);
                    in_word = word;
                }
                Ok(Value::Int(words))
            }
            // "format", the last one of Jinja2's.
            _ => {
                if !args.positional.is_empty() && !args.keywords.is_empty() {
                    return Err(Error::failed(
                        "can't handle positional and keyword arguments at the same time",
                    ));
                }
                let values = if args.keywords.is_empty() {
                    Value::tuple(args.positional)?
                } else {
                    let pairs = args.keywords.into_iter();
                    let pairs = pairs.map(|(key, value)| (Value::str(key), value));
                    Value::Dict(std::rc::Rc::new(Dict::from_pairs(pairs)?))
                };
                printf::format(self, &text, &values)
            }
        }
    }

    fn indent(&mut self, value: &Value, args: CallArgs) -> Result<Value> {
        let [width, first, blank] = args.bind("indent", ["width", "first", "blank"], 0)?;
        let text = match value {
            Value::Undefined(what) => return Err(Error::failed(what.as_ref())),
            value => string(value, "the text to indent")?,
        };
        if text.markup {
            return Err(Error::unsupported("`indent` of a string marked as safe"));
        }
        let blanks = match width {
            None => Str::own(" ".repeat(4)),
            Some(Value::Str(blanks)) => blanks,
            Some(width) => {
                let width = usize::try_from(integer(&width, "width")?).unwrap_or(0);
                self.spend_bytes(width)?;
                Str::own(" ".repeat(width))
            }
        };
        let is_true = |value: Option<Value>| value.is_some_and(|value| value.is_true());
        let (first, blank) = (is_true(first), is_true(blank));
        // A line break at the end makes one more line, which is dropped again.
        let padded = Str::own(format!("{}\n", text.as_str()));
        let lines = split_lines(&padded, false);
        self.spend_bytes(lines.len().saturating_mul(blanks.len() + 1))?;
        let mut out = StrBuilder::default();
        let mut from = 0;
        for (index, line) in lines.iter().enumerate() {
            if index > 0 {
                out.push_derived("\n", &text);
            }
            let indented = if index == 0 {
                first
            } else {
                blank || !line.is_empty()
            };
            if indented {
                out.push(&blanks);
            }
            // The same place in the text itself, which knows where it came from.
            let start = line.as_ptr() as usize - padded.as_ptr() as usize;
            from = from.max(start);
            out.push(&text.slice(start.min(text.len())..(start + line.len()).min(text.len())));
        }
        Ok(Value::Str(out.finish()))
    }

    fn truncate(&mut self, value: &Value, args: CallArgs) -> Result<Value> {
        let [length, kill, end, leeway] =
            args.bind("truncate", ["length", "killwords", "end", "leeway"], 0)?;
        let length = length.map_or(Ok(255), |length| integer(&length, "length"))?;
        let kill = kill.is_some_and(|kill| kill.is_true());
        let end = end.map_or_else(|| Ok(Str::own("...")), |end| string(&end, "end"))?;
        let leeway = match leeway {
            None | Some(Value::None) => 5,
            Some(leeway) => integer(&leeway, "leeway")?,
        };
        let end_length = end.chars().count() as i128;
        if length < end_length || leeway < 0 {
            return Err(Error::failed(format!(
                "truncate: expected length >= {end_length} and leeway >= 0"
            )));
        }
        if value.is_undefined() {
            return Ok(value.clone());
        }
        let text = match value {
            Value::Str(text) if !text.markup => text.clone(),
            other => {
                return Err(Error::unsupported(format!(
                    "`truncate` of a {} or of a string marked as safe",
                    other.type_name()
                )));
            }
        };
        self.spend_bytes(text.len())?;
        if text.chars().count() as i128 <= length + leeway {
            return Ok(Value::Str(text));
        }
        let kept = (length - end_length) as usize;
        let at = text
            .char_indices()
            .nth(kept)
            .map_or(text.len(), |(at, _)| at);
        let mut cut = text.slice(0..at);
        if !kill && let Some(blank) = cut.rfind(' ') {
            cut = cut.slice(0..blank);
        }
        Ok(Value::Str(operators::join(&Str::own(""), &[cut, end])))
    }

    fn url_encode(&mut self, value: &Value, args: CallArgs) -> Result<Value> {
        args.none("urlencode")?;
        let pairs = match value {
            Value::Str(_) | Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) => {
                let text = self.str_of(value)?;
                self.spend_bytes(text.len() * 3)?;
                return Ok(Value::Str(Str::derived(url_quoted(&text, false), &text)));
            }
            Value::Dict(dict) => Value::View(crate::jinja::value::View::Items, dict.clone()),
            other => other.clone(),
        };
        let mut parts = Vec::new();
        for pair in self.items(&pairs)? {
            let pair = self.items(&pair)?;
            let [key, value] = &pair[..] else {
                return Err(Error::failed("urlencode takes pairs"));
            };
            let mut out = StrBuilder::default();
            for (index, side) in [key, value].into_iter().enumerate() {
                let text = self.str_of(side)?;
                self.spend_bytes(text.len() * 3)?;
                if index > 0 {
                    out.push_own("=");
                }
                out.push_derived(&url_quoted(&text, true), &text);
            }
            parts.push(out.finish());
        }
        Ok(Value::Str(operators::join(&Str::own("&"), &parts)))
    }

    fn xml_attributes(&mut self, value: &Value, args: CallArgs) -> Result<Value> {
        let [space] = args.bind("xmlattr", ["autospace"], 0)?;
        let Value::Dict(dict) = value else {
            return Err(super::not_a("xmlattr", value));
        };
        let mut parts = Vec::new();
        for (key, value) in &dict.entries {
            if matches!(value, Value::None | Value::Undefined(_)) {
                continue;
            }
            let key = string(key, "an attribute's name")?;
            let bad = |c: char| c.is_ascii_whitespace() || matches!(c, '\u{b}' | '/' | '>' | '=');
            if key.contains(bad) {
                return Err(Error::failed(format!(
                    "invalid character in attribute name: '{}'",
                    key.as_str()
                )));
            }
            let value = self.str_of(value)?;
            self.spend_bytes((key.len() + value.len()) * 6)?;
            let mut out = StrBuilder::default();
            out.push(&escaped(&key));
            out.push_own("=\"");
            out.push(&escaped(&value));
            out.push_own("\"");
            parts.push(out.finish());
        }
        let joined = operators::join(&Str::own(" "), &parts);
        if joined.is_empty() || space.is_some_and(|space| !space.is_true()) {
            return Ok(Value::Str(joined));
        }
        Ok(Value::Str(operators::join(
            &Str::own(" "),
            &[Str::own(""), joined],
        )))
    }
}

/// `urllib.parse.quote`, with `+` for blanks and no safe `/` in a query.
fn url_quoted(text: &str, in_query: bool) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => {
                out.push(byte as char);
            }
            b'/' if !in_query => out.push('/'),
            b' ' if in_query => out.push('+'),
            byte => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

/// Jinja2's own words: what stands between blanks, hyphens and opening brackets.
fn title(text: &str) -> Result<String> {
    let begins = |c: char| chars::is_space(c) || matches!(c, '-' | '(' | '{' | '[' | '<');
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(begins).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        let mut letters = word.chars();
        if let Some(first) = letters.next() {
            out.extend(first.to_uppercase());
            out.push_str(&letters.as_str().to_lowercase());
        }
        let blanks = after.find(|c| !begins(c)).unwrap_or(after.len());
        out.push_str(&after[..blanks]);
        rest = &after[blanks..];
    }
    Ok(out)
}
