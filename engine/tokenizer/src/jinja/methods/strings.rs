//! Python's methods of strings.

use crate::jinja::calls::{CallArgs, integer, string};
use crate::jinja::characters as chars;
use crate::jinja::error::{Error, Result};
use crate::jinja::interpreter::Interpreter;
use crate::jinja::operators;
use crate::jinja::text::{Str, StrBuilder};
use crate::jinja::value::Value;

impl Interpreter {
    pub(super) fn string_method(
        &mut self,
        text: &Str,
        name: &'static str,
        args: CallArgs,
    ) -> Result<Value> {
        let cased = |result: String| Ok(Value::Str(Str::derived(result, text)));
        match name {
            "upper" => args.none(name).and_then(|()| cased(text.to_uppercase())),
            "lower" => args.none(name).and_then(|()| cased(text.to_lowercase())),
            "casefold" => args.none(name).and_then(|()| cased(chars::casefold(text)?)),
            "capitalize" => args
                .none(name)
                .and_then(|()| cased(chars::capitalize(text)?)),
            "title" => args.none(name).and_then(|()| cased(chars::title(text)?)),
            "swapcase" => args.none(name).and_then(|()| cased(chars::swapcase(text)?)),
            "strip" | "lstrip" | "rstrip" => {
                let [set] = args.bind(name, ["/chars"], 0)?;
                strip(text, set.as_ref(), name != "rstrip", name != "lstrip").map(Value::Str)
            }
            "startswith" | "endswith" => affix(text, name, args),
            "removeprefix" | "removesuffix" => {
                let [affix] = args.bind(name, ["/affix"], 1)?;
                let affix = string(&affix.unwrap_or(Value::None), "the argument")?;
                let cut = match name {
                    "removeprefix" => text.strip_prefix(affix.as_str()),
                    _ => text.strip_suffix(affix.as_str()),
                };
                Ok(Value::Str(
                    cut.map_or_else(|| text.clone(), |cut| text.part(cut)),
                ))
            }
            "find" | "rfind" | "index" | "rindex" | "count" => search(text, name, args),
            "split" | "rsplit" => {
                let [separator, limit] = args.bind(name, ["sep", "maxsplit"], 0)?;
                let limit = limit.map_or(Ok(-1), |limit| integer(&limit, "maxsplit"))?;
                let limit = usize::try_from(limit).unwrap_or(usize::MAX);
                let parts = match separator {
                    None | Some(Value::None) => split_blanks(text, limit, name == "rsplit"),
                    Some(separator) => {
                        let separator = string(&separator, "the separator")?;
                        if separator.is_empty() {
                            return Err(Error::failed("empty separator"));
                        }
                        split(text, &separator, limit, name == "rsplit")
                    }
                };
                self.spend(parts.len())?;
                let parts = parts.into_iter().map(|part| text.part(part));
                Value::list(parts.map(Value::Str).collect())
            }
            "splitlines" => {
                let [keep] = args.bind(name, ["keepends"], 0)?;
                let keep = keep.is_some_and(|keep| keep.is_true());
                let lines = split_lines(text, keep);
                self.spend(lines.len())?;
                Value::list(
                    lines
                        .into_iter()
                        .map(|line| Value::Str(text.part(line)))
                        .collect(),
                )
            }
            "partition" | "rpartition" => {
                let [separator] = args.bind(name, ["/sep"], 1)?;
                let separator = string(&separator.unwrap_or(Value::None), "the separator")?;
                if separator.is_empty() {
                    return Err(Error::failed("empty separator"));
                }
                let at = if name == "partition" {
                    text.find(separator.as_str())
                } else {
                    text.rfind(separator.as_str())
                };
                let parts = match at {
                    Some(at) => {
                        let end = at + separator.len();
                        [text.slice(0..at), separator, text.slice(end..text.len())]
                    }
                    None if name == "partition" => [text.clone(), Str::own(""), Str::own("")],
                    None => [Str::own(""), Str::own(""), text.clone()],
                };
                Value::tuple(parts.map(Value::Str).to_vec())
            }
            "replace" => {
                let [old, new, count] = args.bind(name, ["/old", "/new", "/count"], 2)?;
                let old = string(&old.unwrap_or(Value::None), "the text to replace")?;
                let new = string(&new.unwrap_or(Value::None), "the replacement")?;
                let count = count.map_or(Ok(-1), |count| integer(&count, "the count"))?;
                self.replace(text, &old, &new, count).map(Value::Str)
            }
            "join" => {
                let [parts] = args.bind(name, ["/iterable"], 1)?;
                let parts = self.items(&parts.unwrap_or(Value::None))?;
                let mut texts = Vec::with_capacity(parts.len());
                for part in &parts {
                    let part = string(part, "each part of join()")?;
                    self.spend_bytes(part.len() + text.len())?;
                    texts.push(part);
                }
                // Joining escapes where a part is HTML.
                if texts.len() == 1 && texts[0].markup {
                    return Ok(Value::Str(texts.remove(0)));
                }
                Ok(Value::Str(operators::join(text, &texts)))
            }
            "center" | "ljust" | "rjust" => {
                let [width, fill] = args.bind(name, ["/width", "/fillchar"], 1)?;
                let width = integer(&width.unwrap_or(Value::None), "the width")?;
                let fill = match fill {
                    None => Str::own(" "),
                    Some(fill) => string(&fill, "the fill character")?,
                };
                if fill.chars().count() != 1 {
                    return Err(Error::failed(
                        "the fill character must be exactly one character long",
                    ));
                }
                self.pad(text, width, &fill, name).map(Value::Str)
            }
            "zfill" => {
                let [width] = args.bind(name, ["/width"], 1)?;
                let width = integer(&width.unwrap_or(Value::None), "the width")?;
                let missing = self.missing_width(text, width)?;
                let signed = usize::from(text.starts_with(['+', '-']));
                let mut out = StrBuilder::default();
                out.push(&text.slice(0..signed));
                out.push_own(&"0".repeat(missing));
                out.push(&text.slice(signed..text.len()));
                Ok(Value::Str(out.finish()))
            }
            "expandtabs" => {
                let [size] = args.bind(name, ["tabsize"], 0)?;
                let size = size.map_or(Ok(8), |size| integer(&size, "tabsize"))?;
                let size = usize::try_from(size).unwrap_or(0);
                self.spend_bytes(text.matches('\t').count().saturating_mul(size))?;
                cased(expand_tabs(text, size))
            }
            "format" => self.str_format(text, &args.positional, &args.keywords),
            "format_map" => {
                let [map] = args.bind(name, ["/map"], 1)?;
                let Some(Value::Dict(dict)) = map else {
                    return Err(Error::unsupported("`format_map` of what is not a dict"));
                };
                let mut keywords = Vec::new();
                for (key, value) in &dict.entries {
                    if let Value::Str(key) = key {
                        keywords.push((key.shared(), value.clone()));
                    }
                }
                self.str_format(text, &[], &keywords)
            }
            "translate" => {
                let [table] = args.bind(name, ["/table"], 1)?;
                self.translate(text, &table.unwrap_or(Value::None))
            }
            _ => {
                args.none(name)?;
                predicate(text, name).map(Value::Bool)
            }
        }
    }

    /// Python's `str.replace`; a negative count means all.
    pub(in crate::jinja) fn replace(
        &mut self,
        text: &Str,
        old: &Str,
        new: &Str,
        count: i128,
    ) -> Result<Str> {
        let limit = usize::try_from(count).unwrap_or(usize::MAX);
        let found: Vec<usize> = text
            .match_indices(old.as_str())
            .map(|(at, _)| at)
            .take(limit)
            .collect();
        self.spend_bytes(text.len() + found.len().saturating_mul(new.len()))?;
        self.spend(found.len() / 8)?;
        let mut out = StrBuilder::default();
        let mut from = 0;
        for at in found {
            out.push(&text.slice(from..at));
            out.push(new);
            from = at + old.len();
        }
        out.push(&text.slice(from..text.len()));
        Ok(out.finish())
    }

    fn missing_width(&mut self, text: &Str, width: i128) -> Result<usize> {
        let width = usize::try_from(width).unwrap_or(0);
        let missing = width.saturating_sub(text.chars().count());
        self.spend_bytes(missing.saturating_mul(4))?;
        Ok(missing)
    }

    pub(in crate::jinja) fn pad(
        &mut self,
        text: &Str,
        width: i128,
        fill: &Str,
        how: &str,
    ) -> Result<Str> {
        let missing = self.missing_width(text, width)?;
        let left = match how {
            "ljust" => 0,
            "rjust" => missing,
            // Python puts the odd one to the left where the width is odd.
            _ => missing / 2 + (missing & width as usize & 1),
        };
        let mut out = StrBuilder::default();
        for _ in 0..left {
            out.push(fill);
        }
        out.push(text);
        for _ in left..missing {
            out.push(fill);
        }
        Ok(out.finish())
    }

    fn translate(&mut self, text: &Str, table: &Value) -> Result<Value> {
        let Value::Dict(table) = table else {
            return Err(Error::unsupported("`translate` by what is not a dict"));
        };
        let mut out = StrBuilder::default();
        for (at, c) in text.char_indices() {
            self.spend(1)?;
            match table.get(&Value::Int(i128::from(c as u32)))? {
                None => out.push(&text.slice(at..at + c.len_utf8())),
                Some(Value::None) => {}
                Some(Value::Str(replacement)) => {
                    self.spend_bytes(replacement.len())?;
                    out.push(replacement);
                }
                Some(Value::Int(code)) => {
                    let code = u32::try_from(*code).ok().and_then(char::from_u32);
                    let Some(c) = code else {
                        return Err(Error::failed("character mapping is out of range"));
                    };
                    out.push_derived(c.encode_utf8(&mut [0; 4]), text);
                }
                Some(_) => {
                    return Err(Error::failed(
                        "character mapping must return integer, None or str",
                    ));
                }
            }
        }
        Ok(Value::Str(out.finish()))
    }
}

/// Python's `strip(chars)` at either end.
pub(in crate::jinja) fn strip(
    text: &Str,
    set: Option<&Value>,
    left: bool,
    right: bool,
) -> Result<Str> {
    let set = match set {
        None | Some(Value::None) => None,
        Some(set) => Some(string(set, "the characters to strip")?),
    };
    let matches = |c: char| match &set {
        None => chars::is_space(c),
        Some(set) => set.contains(c),
    };
    let mut kept = text.as_str();
    if left {
        kept = kept.trim_start_matches(matches);
    }
    if right {
        kept = kept.trim_end_matches(matches);
    }
    Ok(text.part(kept))
}

/// The part of the text between two positions, counted in characters, with the byte
/// where it starts; `None` where Python finds nothing, not even an empty text.
fn window<'t>(
    text: &'t Str,
    start: Option<&Value>,
    stop: Option<&Value>,
) -> Result<Option<(&'t str, usize)>> {
    let bound = |value: Option<&Value>, default: i128, length: i128| match value {
        None | Some(Value::None) => Ok(default),
        Some(value) => {
            let at = integer(value, "a position")?;
            Ok(if at < 0 {
                at.saturating_add(length).max(0)
            } else {
                at
            })
        }
    };
    if start.is_none() && stop.is_none() {
        return Ok(Some((text, 0)));
    }
    let length = text.chars().count() as i128;
    let start = bound(start, 0, length)?;
    let stop = bound(stop, length, length)?.min(length);
    if start > stop {
        return Ok(None);
    }
    let byte = |position: i128| {
        let mut starts = text.char_indices().map(|(at, _)| at);
        starts.nth(position as usize).unwrap_or(text.len())
    };
    let from = byte(start);
    Ok(Some((&text.as_str()[from..byte(stop)], from)))
}

fn affix(text: &Str, name: &str, args: CallArgs) -> Result<Value> {
    let [affix, start, stop] = args.bind(name, ["/affix", "/start", "/stop"], 1)?;
    let window = window(text, start.as_ref(), stop.as_ref())?;
    let matches = |affix: &Value| -> Result<bool> {
        let affix = string(affix, &format!("{name}()'s argument"))?;
        Ok(window.is_some_and(|(part, _)| match name {
            "startswith" => part.starts_with(affix.as_str()),
            _ => part.ends_with(affix.as_str()),
        }))
    };
    let found = match affix.unwrap_or(Value::None) {
        Value::Tuple(affixes) => {
            let mut found = false;
            for affix in &affixes.items {
                found = found || matches(affix)?;
            }
            found
        }
        affix => matches(&affix)?,
    };
    Ok(Value::Bool(found))
}

fn search(text: &Str, name: &str, args: CallArgs) -> Result<Value> {
    let [wanted, start, stop] = args.bind(name, ["/sub", "/start", "/stop"], 1)?;
    let wanted = string(
        &wanted.unwrap_or(Value::None),
        &format!("{name}()'s argument"),
    )?;
    let window = window(text, start.as_ref(), stop.as_ref())?;
    if name == "count" {
        let count = window.map_or(0, |(part, _)| part.matches(wanted.as_str()).count());
        return Ok(Value::Int(count as i128));
    }
    let found = window.and_then(|(part, from)| {
        let at = if name.starts_with('r') {
            part.rfind(wanted.as_str())
        } else {
            part.find(wanted.as_str())
        };
        Some(text[..from + at?].chars().count() as i128)
    });
    match found {
        Some(at) => Ok(Value::Int(at)),
        None if name.ends_with("find") => Ok(Value::Int(-1)),
        None => Err(Error::failed("substring not found")),
    }
}

fn split<'t>(text: &'t str, separator: &str, limit: usize, from_right: bool) -> Vec<&'t str> {
    let parts = limit.saturating_add(1);
    if from_right {
        let mut found: Vec<&str> = text.rsplitn(parts, separator).collect();
        found.reverse();
        return found;
    }
    text.splitn(parts, separator).collect()
}

/// Splits at runs of blanks; no part is empty.
fn split_blanks(text: &str, limit: usize, from_right: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = if from_right {
        text.trim_end_matches(chars::is_space)
    } else {
        text.trim_start_matches(chars::is_space)
    };
    while !rest.is_empty() {
        let cut = if from_right {
            rest.char_indices().rev().find(|&(_, c)| chars::is_space(c))
        } else {
            rest.char_indices().find(|&(_, c)| chars::is_space(c))
        };
        match cut {
            Some((at, c)) if parts.len() < limit => {
                let after = at + c.len_utf8();
                if from_right {
                    parts.push(&rest[after..]);
                    rest = rest[..at].trim_end_matches(chars::is_space);
                } else {
                    parts.push(&rest[..at]);
                    rest = rest[after..].trim_start_matches(chars::is_space);
                }
            }
            // What is over the limit keeps its blanks at the other end.
            _ => {
                parts.push(rest);
                break;
            }
        }
    }
    if from_right {
        parts.reverse();
    }
    parts
}

pub(in crate::jinja) fn split_lines(text: &str, keep: bool) -> Vec<&str> {
    let mut lines = Vec::new();
    let mut start = 0;
    let mut characters = text.char_indices().peekable();
    while let Some((at, c)) = characters.next() {
        if !chars::is_line_break(c) {
            continue;
        }
        let mut end = at + c.len_utf8();
        if c == '\r' && characters.peek().is_some_and(|&(_, next)| next == '\n') {
            characters.next();
            end += 1;
        }
        lines.push(&text[start..if keep { end } else { at }]);
        start = end;
    }
    if start < text.len() {
        lines.push(&text[start..]);
    }
    lines
}

fn expand_tabs(text: &str, size: usize) -> String {
    let mut out = String::with_capacity(text.len());
    let mut column = 0;
    for c in text.chars() {
        match c {
            '\t' if size > 0 => {
                let blanks = size - column % size;
                out.extend(std::iter::repeat_n(' ', blanks));
                column += blanks;
            }
            '\t' => {}
            '\n' | '\r' => {
                out.push(c);
                column = 0;
            }
            c => {
                out.push(c);
                column += 1;
            }
        }
    }
    out
}

fn predicate(text: &str, name: &str) -> Result<bool> {
    let all = |test: &dyn Fn(char) -> Result<bool>| -> Result<bool> {
        let mut holds = !text.is_empty();
        for c in text.chars() {
            holds = test(c)? && holds;
        }
        Ok(holds)
    };
    let upper = text.chars().any(|c| c.is_uppercase());
    let lower = text.chars().any(|c| c.is_lowercase());
    let title = text.chars().any(chars::is_title);
    match name {
        "isalpha" => all(&|c| Ok(chars::is_letter(c))),
        "isalnum" => all(&|c| Ok(chars::is_letter(c) || chars::is_number(c))),
        "isdecimal" => all(&|c| Ok(chars::is_decimal(c))),
        "isdigit" => all(&chars::is_digit),
        "isnumeric" => all(&chars::is_numeric),
        "isspace" => all(&|c| Ok(chars::is_space(c))),
        "isascii" => Ok(text.is_ascii()),
        "isprintable" => Ok(text.chars().all(chars::is_printable)),
        "islower" => Ok(lower && !upper && !title),
        "isupper" => Ok(upper && !lower && !title),
        "istitle" => Ok(is_titled(text)),
        "isidentifier" if text.is_ascii() => {
            let word = |c: char| c == '_' || c.is_ascii_alphanumeric();
            Ok(text.chars().all(word) && text.chars().next().is_some_and(|c| !c.is_ascii_digit()))
        }
        _ => Err(Error::unsupported(format!(
            "`{name}` of text that is not ASCII"
        ))),
    }
}

fn is_titled(text: &str) -> bool {
    let mut in_word = false;
    let mut any = false;
    for c in text.chars() {
        let starts = c.is_uppercase() || chars::is_title(c);
        if starts && in_word || c.is_lowercase() && !in_word {
            return false;
        }
        in_word = chars::is_cased(c);
        any = any || in_word;
    }
    any
}
