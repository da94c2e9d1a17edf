//! Numbers and text in a given width and precision: the core of `%` and `format`.

use super::error::{Error, Result};
use super::interpreter::Interpreter;
use super::numbers::with_exponent;
use super::text::{Str, StrBuilder};

/// Wider fields are refused: no prompt has them.
const WIDTH_MAX: usize = 1 << 20;
/// Python's own bound is far above; Rust's is 65535.
const PRECISION_MAX: usize = 10_000;

/// A float's digits without a sign, by Python's types `e`, `f` and `g`.
pub(super) fn float_digits(
    value: f64,
    kind: char,
    precision: usize,
    alternate: bool,
) -> Result<String> {
    if precision > PRECISION_MAX {
        return Err(Error::unsupported(format!(
            "a precision above {PRECISION_MAX}"
        )));
    }
    let magnitude = value.abs();
    let upper = kind.is_ascii_uppercase();
    let digits = if magnitude.is_nan() {
        "nan".to_owned()
    } else if magnitude.is_infinite() {
        "inf".to_owned()
    } else {
        match kind.to_ascii_lowercase() {
            'f' => {
                let point = if alternate && precision == 0 { "." } else { "" };
                format!("{magnitude:.precision$}{point}")
            }
            'e' => {
                let scientific = format!("{magnitude:.precision$e}");
                let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
                let point = if alternate && precision == 0 { "." } else { "" };
                with_exponent(&format!("{digits}{point}"), exponent.parse().unwrap_or(0))
            }
            _ => general(magnitude, precision.max(1), alternate),
        }
    };
    Ok(if upper {
        digits.to_ascii_uppercase()
    } else {
        digits
    })
}

/// `%g`: `precision` significant digits, without the zeros at the end.
fn general(magnitude: f64, precision: usize, alternate: bool) -> String {
    let scientific = format!("{magnitude:.*e}", precision - 1);
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let trim = |text: &str| {
        if alternate {
            return if text.contains('.') {
                text.to_owned()
            } else {
                format!("{text}.")
            };
        }
        match text.contains('.') {
            true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
            false => text.to_owned(),
        }
    };
    if exponent < -4 || exponent >= precision as i32 {
        return with_exponent(&trim(digits), exponent);
    }
    let decimals = (precision as i32 - 1 - exponent).max(0) as usize;
    trim(&format!("{magnitude:.decimals$}"))
}

/// An integer's digits without sign or prefix.
pub(super) fn integer_digits(magnitude: u128, kind: char) -> String {
    match kind {
        'x' => format!("{magnitude:x}"),
        'X' => format!("{magnitude:X}"),
        'o' => format!("{magnitude:o}"),
        'b' => format!("{magnitude:b}"),
        _ => magnitude.to_string(),
    }
}

/// Digits in groups from the right, up to the point.
pub(super) fn grouped(digits: &str, separator: char, size: usize) -> String {
    let end = digits
        .find(|c: char| !c.is_ascii_hexdigit())
        .unwrap_or(digits.len());
    // `e` of an exponent is a hexadecimal digit too.
    let end = digits[..end].find('e').filter(|_| size == 3).unwrap_or(end);
    let (whole, rest) = digits.split_at(end);
    let mut out = String::with_capacity(digits.len() * 4 / 3);
    for (index, c) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index) % size == 0 {
            out.push(separator);
        }
        out.push(c);
    }
    out.push_str(rest);
    out
}

/// Where a field's text goes.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Align {
    Left,
    Right,
    Center,
    /// Between the sign and the digits.
    AfterSign,
}

impl Interpreter {
    /// Brings `sign` and `body` to a width.
    pub(super) fn field(
        &mut self,
        sign: &str,
        body: &Str,
        width: usize,
        fill: char,
        align: Align,
    ) -> Result<Str> {
        if width > WIDTH_MAX {
            return Err(Error::unsupported(format!("a width above {WIDTH_MAX}")));
        }
        self.spend_bytes(width + body.len())?;
        let length = sign.chars().count() + body.chars().count();
        let missing = width.saturating_sub(length);
        let fill = |count: usize| fill.to_string().repeat(count);
        let (before, between, after) = match align {
            Align::Left => (0, 0, missing),
            Align::Right => (missing, 0, 0),
            Align::Center => (missing / 2, 0, missing - missing / 2),
            Align::AfterSign => (0, missing, 0),
        };
        let mut out = StrBuilder::default();
        out.push_own(&fill(before));
        out.push_own(sign);
        out.push_own(&fill(between));
        out.push(body);
        out.push_own(&fill(after));
        Ok(out.finish())
    }
}
