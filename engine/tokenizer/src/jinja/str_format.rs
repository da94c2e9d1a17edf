//! Python's `str.format` and its format specifications.

use std::sync::Arc;

use super::compare::{Number, number};
use super::error::{Error, Result};
use super::format_spec::{Align, float_digits, grouped, integer_digits};
use super::interpreter::Interpreter;
use super::numbers;
use super::text::{Str, StrBuilder};
use super::value::Value;

/// How fields without a number are counted.
#[derive(Clone, Copy, PartialEq)]
enum Numbering {
    Unknown,
    Automatic(usize),
    Manual,
}

struct Fields<'a> {
    positional: &'a [Value],
    keywords: &'a [(Arc<str>, Value)],
    numbering: Numbering,
}

impl Interpreter {
    pub(super) fn str_format(
        &mut self,
        format: &Str,
        positional: &[Value],
        keywords: &[(Arc<str>, Value)],
    ) -> Result<Value> {
        let mut fields = Fields {
            positional,
            keywords,
            numbering: Numbering::Unknown,
        };
        self.format_fields(format, &mut fields, 3).map(Value::Str)
    }

    fn format_fields(
        &mut self,
        format: &Str,
        fields: &mut Fields<'_>,
        depth: usize,
    ) -> Result<Str> {
        if depth == 0 {
            return Err(Error::failed("max string recursion exceeded"));
        }
        self.spend_bytes(format.len())?;
        let text = format.as_str();
        let mut out = StrBuilder::default();
        let mut at = 0;
        while let Some(found) = text[at..].find(['{', '}']) {
            let brace = at + found;
            out.push(&format.slice(at..brace));
            let doubled = text[brace + 1..].starts_with(&text[brace..=brace]);
            if doubled {
                out.push(&format.slice(brace..brace + 1));
                at = brace + 2;
                continue;
            }
            if text[brace..].starts_with('}') {
                return Err(Error::failed("single '}' encountered in format string"));
            }
            let end = field_end(&text[brace + 1..])
                .ok_or_else(|| Error::failed("expected '}' before end of string"))?;
            let field = format.slice(brace + 1..brace + 1 + end);
            out.push(&self.format_field(&field, fields, depth)?);
            at = brace + 1 + end + 1;
        }
        out.push(&format.slice(at..text.len()));
        Ok(out.finish())
    }

    fn format_field(&mut self, field: &Str, fields: &mut Fields<'_>, depth: usize) -> Result<Str> {
        let text = field.as_str();
        let mut in_brackets = false;
        let name_end = text
            .char_indices()
            .find(|&(_, c)| {
                in_brackets = (in_brackets || c == '[') && c != ']';
                !in_brackets && (c == ':' || c == '!')
            })
            .map_or(text.len(), |(at, _)| at);
        let (name, mut rest) = text.split_at(name_end);
        let value = self.format_value(name, fields)?;
        let mut conversion = None;
        if let Some(after) = rest.strip_prefix('!') {
            let kind = after.chars().next();
            let kind = kind.ok_or_else(|| Error::failed("end of string looking for conversion"))?;
            conversion = Some(kind);
            rest = &after[kind.len_utf8()..];
            if !rest.is_empty() && !rest.starts_with(':') {
                return Err(Error::failed("expected ':' after conversion specifier"));
            }
        }
        let spec = rest.strip_prefix(':').unwrap_or("");
        let spec = field.slice(text.len() - spec.len()..text.len());
        let spec = self.format_fields(&spec, fields, depth - 1)?;
        let value = match conversion {
            None => value,
            Some('s') => Value::Str(self.str_of(&value)?),
            Some('r') => Value::Str(self.repr_of(&value)?),
            Some('a') => Value::Str(self.ascii_of(&value)?),
            Some(other) => {
                return Err(Error::failed(format!(
                    "unknown conversion specifier {other}"
                )));
            }
        };
        self.format_with(&value, &spec)
    }

    /// The value that `name.attribute[key]` stands for.
    fn format_value(&mut self, name: &str, fields: &mut Fields<'_>) -> Result<Value> {
        let end = name.find(['.', '[']).unwrap_or(name.len());
        let (first, mut rest) = name.split_at(end);
        let mixed = || Error::failed("cannot mix automatic and manual field numbering");
        let index = if first.is_empty() {
            let next = match fields.numbering {
                Numbering::Unknown => 0,
                Numbering::Automatic(next) => next,
                Numbering::Manual => return Err(mixed()),
            };
            fields.numbering = Numbering::Automatic(next + 1);
            Some(next)
        } else if first.bytes().all(|byte| byte.is_ascii_digit()) {
            if matches!(fields.numbering, Numbering::Automatic(_)) {
                return Err(mixed());
            }
            fields.numbering = Numbering::Manual;
            Some(first.parse().unwrap_or(usize::MAX))
        } else {
            None
        };
        let found = match index {
            Some(index) => fields.positional.get(index),
            None => fields
                .keywords
                .iter()
                .find(|(key, _)| **key == *first)
                .map(|(_, value)| value),
        };
        let mut value = found
            .cloned()
            .ok_or_else(|| Error::failed(format!("format: no argument '{first}'")))?;
        while !rest.is_empty() {
            if let Some(after) = rest.strip_prefix('.') {
                let end = after.find(['.', '[']).unwrap_or(after.len());
                if end == 0 {
                    return Err(Error::failed("empty attribute in format string"));
                }
                value = self.attribute(&value, &after[..end])?;
                rest = &after[end..];
            } else if let Some(after) = rest.strip_prefix('[') {
                let end = after.find(']').filter(|&end| end > 0);
                let end = end.ok_or_else(|| Error::failed("missing ']' in format string"))?;
                let key = &after[..end];
                let key = match key.parse::<i128>() {
                    Ok(index) if key.bytes().all(|byte| byte.is_ascii_digit()) => Value::Int(index),
                    _ => Value::str(key),
                };
                value = self.item(&value, &key)?;
                rest = &after[end + 1..];
                if !rest.is_empty() && !rest.starts_with(['.', '[']) {
                    return Err(Error::failed(
                        "only '.' or '[' may follow ']' in format field",
                    ));
                }
            } else {
                return Err(Error::failed("malformed format field"));
            }
        }
        Ok(value)
    }

    fn format_with(&mut self, value: &Value, spec: &Str) -> Result<Str> {
        if spec.is_empty() {
            return self.str_of(value).map(|text| text.with_markup(false));
        }
        let spec = Spec::parse(spec)?;
        match value {
            Value::Str(text) => self.format_text(text, &spec),
            Value::Int(_) | Value::Float(_) | Value::Bool(_) => self.format_number(value, &spec),
            _ => Err(Error::failed(format!(
                "unsupported format string passed to {}.__format__",
                value.type_name()
            ))),
        }
    }

    fn format_text(&mut self, text: &Str, spec: &Spec) -> Result<Str> {
        if !matches!(spec.kind, None | Some('s')) {
            return Err(Error::failed(
                "unknown format code for object of type 'str'",
            ));
        }
        if spec.sign.is_some() || spec.alternate || spec.grouping.is_some() {
            return Err(Error::failed("not allowed in string format specifier"));
        }
        let align = match spec.align {
            Some(Align::AfterSign) => {
                return Err(Error::failed("'=' alignment not allowed in string format"));
            }
            align => align.unwrap_or(Align::Left),
        };
        let end = spec
            .precision
            .and_then(|precision| text.char_indices().nth(precision))
            .map_or(text.len(), |(at, _)| at);
        let text = text.slice(0..end).with_markup(false);
        let fill = spec.fill.unwrap_or(if spec.zero { '0' } else { ' ' });
        self.field("", &text, spec.width, fill, align)
    }

    fn format_number(&mut self, value: &Value, spec: &Spec) -> Result<Str> {
        let (negative, prefix, digits) = match (number(value), spec.kind) {
            (Some(Number::Int(integer)), None | Some('d' | 'b' | 'o' | 'x' | 'X')) => {
                if spec.precision.is_some() {
                    return Err(Error::failed("precision not allowed in integer format"));
                }
                let kind = spec.kind.unwrap_or('d');
                let prefix = match (spec.alternate, kind) {
                    (true, 'x') => "0x",
                    (true, 'X') => "0X",
                    (true, 'o') => "0o",
                    (true, 'b') => "0b",
                    _ => "",
                };
                let digits = integer_digits(integer.unsigned_abs(), kind);
                let digits = match spec.grouping {
                    None => digits,
                    Some(',') if kind != 'd' => {
                        return Err(Error::failed("cannot specify ',' with this type"));
                    }
                    Some(separator) => grouped(&digits, separator, if kind == 'd' { 3 } else { 4 }),
                };
                (integer < 0, prefix, digits)
            }
            (Some(Number::Int(code)), Some('c')) => {
                if spec.sign.is_some() || spec.precision.is_some() || spec.alternate {
                    return Err(Error::failed(
                        "not allowed with integer format specifier 'c'",
                    ));
                }
                let c = u32::try_from(code).ok().and_then(char::from_u32);
                let c = c.ok_or_else(|| Error::failed("%c arg not in range(0x110000)"))?;
                (false, "", c.to_string())
            }
            (Some(found), Some('e' | 'E' | 'f' | 'F' | 'g' | 'G' | '%'))
            | (Some(found @ Number::Float(_)), None) => {
                let float = match found {
                    Number::Int(integer) => numbers::to_float(integer),
                    Number::Float(float) => float,
                };
                let digits = float_text(float, spec)?;
                let digits = match spec.grouping {
                    Some(separator) => grouped(&digits, separator, 3),
                    None => digits,
                };
                (float.is_sign_negative() && !float.is_nan(), "", digits)
            }
            (_, Some('n')) => return Err(Error::unsupported("the format type `n`")),
            _ => return Err(Error::failed("unknown format code for a number")),
        };
        let sign = match (negative, spec.sign) {
            (true, _) => "-",
            (false, Some('+')) => "+",
            (false, Some(' ')) => " ",
            _ => "",
        };
        let zero = spec.zero && spec.align.is_none();
        let fill = spec.fill.unwrap_or(if spec.zero { '0' } else { ' ' });
        if zero && spec.grouping.is_some() {
            return Err(Error::unsupported("zero padding of grouped digits"));
        }
        let default = match (zero, spec.kind) {
            (true, _) => Align::AfterSign,
            (_, Some('c')) => Align::Left,
            _ => Align::Right,
        };
        let align = spec.align.unwrap_or(default);
        let sign = format!("{sign}{prefix}");
        self.field(&sign, &Str::own(digits), spec.width, fill, align)
    }
}

fn float_text(float: f64, spec: &Spec) -> Result<String> {
    let kind = match spec.kind {
        Some('%') => {
            let digits = float_digits(float * 100.0, 'f', spec.precision.unwrap_or(6), false)?;
            return Ok(format!("{digits}%"));
        }
        Some(kind) => kind,
        None => {
            let Some(precision) = spec.precision else {
                if spec.alternate {
                    return Err(Error::unsupported("`#` in the format of a float"));
                }
                return Ok(numbers::float_repr(float.abs()));
            };
            // Like `g`, with one digit after the point at least.
            let precision = precision.max(1);
            let general = float_digits(float, 'g', precision, false)?;
            let plain = float.is_finite() && !general.contains(['.', 'e']);
            return match plain {
                true if general.len() >= precision => Err(Error::unsupported(
                    "such a precision of a float without a type",
                )),
                true => Ok(format!("{general}.0")),
                false => Ok(general),
            };
        }
    };
    float_digits(float, kind, spec.precision.unwrap_or(6), spec.alternate)
}

/// Where the field's closing brace is, past nested fields and `[…]`.
fn field_end(text: &str) -> Option<usize> {
    let mut open = 0;
    let mut in_brackets = false;
    for (at, c) in text.char_indices() {
        match c {
            '[' if open == 0 => in_brackets = true,
            ']' => in_brackets = false,
            _ if in_brackets => {}
            '{' => open += 1,
            '}' if open == 0 => return Some(at),
            '}' => open -= 1,
            _ => {}
        }
    }
    None
}

#[derive(Default)]
struct Spec {
    fill: Option<char>,
    align: Option<Align>,
    sign: Option<char>,
    alternate: bool,
    zero: bool,
    width: usize,
    grouping: Option<char>,
    precision: Option<usize>,
    kind: Option<char>,
}

impl Spec {
    fn parse(text: &str) -> Result<Self> {
        let mut spec = Self::default();
        let align = |c: char| match c {
            '<' => Some(Align::Left),
            '>' => Some(Align::Right),
            '^' => Some(Align::Center),
            '=' => Some(Align::AfterSign),
            _ => None,
        };
        let mut rest = text.chars();
        let peek = |rest: &std::str::Chars<'_>| rest.clone().next();
        let second = text.chars().nth(1).and_then(align);
        if second.is_some() {
            spec.fill = rest.next();
            spec.align = second;
            rest.next();
        } else if let Some(found) = peek(&rest).and_then(align) {
            spec.align = Some(found);
            rest.next();
        }
        if let Some(sign @ ('+' | '-' | ' ')) = peek(&rest) {
            spec.sign = Some(sign);
            rest.next();
        }
        if peek(&rest) == Some('#') {
            spec.alternate = true;
            rest.next();
        }
        if peek(&rest) == Some('0') {
            spec.zero = true;
            rest.next();
        }
        let number = |rest: &mut std::str::Chars<'_>| {
            let mut found = None;
            while let Some(digit) = peek(rest).and_then(|c| c.to_digit(10)) {
                rest.next();
                found = Some((found.unwrap_or(0_usize) * 10 + digit as usize).min(1 << 40));
            }
            found
        };
        spec.width = number(&mut rest).unwrap_or(0);
        if let Some(grouping @ (',' | '_')) = peek(&rest) {
            spec.grouping = Some(grouping);
            rest.next();
        }
        if peek(&rest) == Some('.') {
            rest.next();
            let precision = number(&mut rest);
            spec.precision =
                Some(precision.ok_or_else(|| Error::failed("format specifier missing precision"))?);
        }
        spec.kind = rest.next();
        if rest.next().is_some() {
            return Err(Error::failed(format!("invalid format specifier '{text}'")));
        }
        Ok(spec)
    }
}
