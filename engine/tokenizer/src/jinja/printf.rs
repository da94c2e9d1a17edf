//! Python's `'…' % values`.

use super::compare::{Number, number};
use super::error::{Error, Result};
use super::format_spec::{Align, float_digits, integer_digits};
use super::interpreter::Interpreter;
use super::numbers;
use super::text::{Str, StrBuilder};
use super::value::Value;

/// One `%` directive.
#[derive(Default)]
struct Directive {
    left: bool,
    plus: bool,
    blank: bool,
    zero: bool,
    alternate: bool,
    width: usize,
    precision: Option<usize>,
}

/// The values that directives take, one after the other or by name.
struct Values<'v> {
    all: &'v Value,
    next: usize,
    named: bool,
}

impl Values<'_> {
    fn take(&mut self) -> Result<Value> {
        let at = self.next;
        self.next += 1;
        match self.all {
            Value::Tuple(values) => values.items.get(at).cloned(),
            single if at == 0 => Some(single.clone()),
            _ => None,
        }
        .ok_or_else(|| Error::failed("not enough arguments for format string"))
    }

    fn size(&mut self) -> Result<i128> {
        match self.take()? {
            Value::Int(size) => Ok(size),
            Value::Bool(size) => Ok(i128::from(size)),
            _ => Err(Error::failed("* wants int")),
        }
    }

    /// Python lets a mapping be left over, and nothing else.
    fn check_all_taken(&self) -> Result<()> {
        let left = match self.all {
            Value::Tuple(values) => self.next < values.items.len(),
            Value::Dict(_) | Value::List(_) | Value::Range(_) => false,
            Value::Undefined(_) => false,
            _ => self.next == 0,
        };
        if left && !self.named {
            return Err(Error::failed(
                "not all arguments converted during string formatting",
            ));
        }
        Ok(())
    }
}

pub(super) fn format(interpreter: &mut Interpreter, format: &Str, values: &Value) -> Result<Value> {
    if format.markup {
        return Err(Error::unsupported("`%` of a string marked as safe"));
    }
    interpreter.spend_bytes(format.len())?;
    let mut values = Values {
        all: values,
        next: 0,
        named: false,
    };
    let mut out = StrBuilder::default();
    let text = format.as_str();
    let mut from = 0;
    while let Some(found) = text[from..].find('%') {
        out.push(&format.slice(from..from + found));
        let mut rest = text[from + found + 1..].chars();
        let value = directive(interpreter, &mut rest, &mut values)?;
        out.push(&value);
        from = text.len() - rest.as_str().len();
    }
    out.push(&format.slice(from..text.len()));
    values.check_all_taken()?;
    Ok(Value::Str(out.finish()))
}

fn directive(
    interpreter: &mut Interpreter,
    rest: &mut std::str::Chars<'_>,
    values: &mut Values<'_>,
) -> Result<Str> {
    let incomplete = || Error::failed("incomplete format");
    let peek = |rest: &std::str::Chars<'_>| rest.clone().next();
    let mut named = None;
    if peek(rest) == Some('(') {
        rest.next();
        let mut name = String::new();
        let mut open = 1;
        loop {
            let c = rest
                .next()
                .ok_or_else(|| Error::failed("incomplete format key"))?;
            match c {
                '(' => open += 1,
                ')' => open -= 1,
                _ => {}
            }
            if open == 0 {
                break;
            }
            name.push(c);
        }
        let Value::Dict(dict) = values.all else {
            return Err(Error::failed("format requires a mapping"));
        };
        let found = dict.get_str(&name).cloned();
        named = Some(found.ok_or_else(|| Error::failed(format!("no such key: '{name}'")))?);
        values.named = true;
    }
    let mut spec = Directive::default();
    while let Some(flag) = peek(rest) {
        match flag {
            '-' => spec.left = true,
            '+' => spec.plus = true,
            ' ' => spec.blank = true,
            '0' => spec.zero = true,
            '#' => spec.alternate = true,
            _ => break,
        }
        rest.next();
    }
    let number = |rest: &mut std::str::Chars<'_>, values: &mut Values<'_>| -> Result<i128> {
        if peek(rest) == Some('*') {
            rest.next();
            return values.size();
        }
        let mut size = 0_i128;
        while let Some(digit) = peek(rest).and_then(|c| c.to_digit(10)) {
            rest.next();
            size = (size * 10 + i128::from(digit)).min(1 << 40);
        }
        Ok(size)
    };
    let width = number(rest, values)?;
    spec.left |= width < 0;
    spec.width = usize::try_from(width.unsigned_abs()).unwrap_or(usize::MAX);
    if peek(rest) == Some('.') {
        rest.next();
        let precision = number(rest, values)?;
        spec.precision = Some(usize::try_from(precision.max(0)).unwrap_or(usize::MAX));
    }
    if matches!(peek(rest), Some('h' | 'l' | 'L')) {
        rest.next();
    }
    let kind = rest.next().ok_or_else(incomplete)?;
    if kind == '%' {
        return Ok(Str::own("%"));
    }
    let value = match named {
        Some(value) => value,
        None => values.take()?,
    };
    convert(interpreter, kind, &spec, &value)
}

fn convert(
    interpreter: &mut Interpreter,
    kind: char,
    spec: &Directive,
    value: &Value,
) -> Result<Str> {
    let align = if spec.left { Align::Left } else { Align::Right };
    let text = match kind {
        's' => Some(interpreter.str_of(value)?),
        'r' => Some(interpreter.repr_of(value)?),
        'a' => Some(interpreter.ascii_of(value)?),
        'c' => Some(character(value)?),
        _ => None,
    };
    if let Some(mut text) = text {
        if let Some(precision) = spec.precision.filter(|_| kind != 'c') {
            let end = text.char_indices().nth(precision).map(|(at, _)| at);
            text = text.slice(0..end.unwrap_or(text.len()));
        }
        return interpreter.field("", &text.with_markup(false), spec.width, ' ', align);
    }
    let (negative, prefix, digits) = match kind {
        'd' | 'i' | 'u' | 'x' | 'X' | 'o' => integer(kind, spec, value)?,
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
            let float = match number(value) {
                Some(Number::Int(integer)) => numbers::to_float(integer),
                Some(Number::Float(float)) => float,
                None => return Err(not_a_number("must be real number", value)),
            };
            let digits = float_digits(float, kind, spec.precision.unwrap_or(6), spec.alternate)?;
            (float.is_sign_negative() && !float.is_nan(), "", digits)
        }
        _ => {
            return Err(Error::failed(format!(
                "unsupported format character '{kind}'"
            )));
        }
    };
    let sign = match (negative, spec.plus, spec.blank) {
        (true, ..) => "-",
        (false, true, _) => "+",
        (false, false, true) => " ",
        _ => "",
    };
    let zero = spec.zero && !spec.left;
    let (fill, align) = if zero {
        ('0', Align::AfterSign)
    } else {
        (' ', align)
    };
    let digits = Str::own(digits);
    interpreter.field(&format!("{sign}{prefix}"), &digits, spec.width, fill, align)
}

fn integer(kind: char, spec: &Directive, value: &Value) -> Result<(bool, &'static str, String)> {
    let integer = match number(value) {
        Some(Number::Int(integer)) => integer,
        Some(Number::Float(float)) if matches!(kind, 'd' | 'i' | 'u') => numbers::truncate(float)?,
        _ => return Err(not_a_number("an integer is required", value)),
    };
    let mut digits = integer_digits(integer.unsigned_abs(), kind);
    if let Some(precision) = spec.precision {
        if precision > 10_000 {
            return Err(Error::unsupported("a precision above 10000"));
        }
        let missing = precision.saturating_sub(digits.len());
        digits.insert_str(0, &"0".repeat(missing));
    }
    let prefix = match (spec.alternate, kind) {
        (true, 'x') => "0x",
        (true, 'X') => "0X",
        (true, 'o') => "0o",
        _ => "",
    };
    Ok((integer < 0, prefix, digits))
}

fn character(value: &Value) -> Result<Str> {
    match value {
        Value::Str(text) if text.chars().count() == 1 => Ok(text.clone()),
        Value::Int(code) => {
            let c = u32::try_from(*code).ok().and_then(char::from_u32);
            let c = c.ok_or_else(|| Error::failed("%c arg not in range(0x110000)"))?;
            Ok(Str::own(c.to_string()))
        }
        _ => Err(Error::failed("%c requires int or char")),
    }
}

fn not_a_number(expected: &str, value: &Value) -> Error {
    match value {
        Value::Undefined(what) => Error::failed(what.as_ref()),
        _ => Error::failed(format!("%: {expected}, not '{}'", value.type_name())),
    }
}
