//! Python's numbers: how floats are written, how text becomes a number, division.

use super::error::{Error, Result};

/// Python's `repr` of a float: the shortest digits, exponents outside `1e-4..1e16`.
pub(crate) fn float_repr(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
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
    with_exponent(digits, exponent)
}

/// `1.5` and `7` as `1.5e+07`.
pub(crate) fn with_exponent(digits: &str, exponent: i32) -> String {
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// Python's `int(text, base)`; `None` where Python raises `ValueError`.
pub(crate) fn parse_int(text: &str, base: i128) -> Result<Option<i128>> {
    let text = text.trim_matches(super::characters::is_space);
    if let Some(c) = text
        .chars()
        .find(|&c| !c.is_ascii() && super::characters::is_decimal(c))
    {
        return Err(Error::unsupported(format!("the digit `{c}` in a number")));
    }
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let lower = digits.to_ascii_lowercase();
    let prefixed = [("0x", 16), ("0o", 8), ("0b", 2)]
        .into_iter()
        .find(|&(prefix, radix)| (base == 0 || base == radix) && lower.starts_with(prefix));
    let (digits, radix) = match prefixed {
        Some((_, radix)) => (lower[2..].strip_prefix('_').unwrap_or(&lower[2..]), radix),
        None if base == 0 => (lower.as_str(), 10),
        None => (lower.as_str(), base),
    };
    let zeros = |text: &str| text.bytes().all(|b| matches!(b, b'0' | b'_'));
    if prefixed.is_none()
        && base == 0
        && digits.len() > 1
        && digits.starts_with('0')
        && !zeros(digits)
    {
        return Ok(None);
    }
    let radix = match u32::try_from(radix) {
        Ok(radix @ 2..=36) => radix,
        _ => return Ok(None),
    };
    let Some(plain) = without_underscores(digits) else {
        return Ok(None);
    };
    if plain.is_empty() || !plain.chars().all(|c| c.is_digit(radix)) {
        return Ok(None);
    }
    match i128::from_str_radix(&plain, radix) {
        Ok(value) => Ok(Some(if negative { -value } else { value })),
        Err(_) => Err(too_large()),
    }
}

/// Python's `float(text)`; `None` where Python raises `ValueError`.
pub(crate) fn parse_float(text: &str) -> Result<Option<f64>> {
    let text = text.trim_matches(super::characters::is_space);
    if let Some(c) = text
        .chars()
        .find(|&c| !c.is_ascii() && super::characters::is_decimal(c))
    {
        return Err(Error::unsupported(format!("the digit `{c}` in a number")));
    }
    let between_digits = text.split('_').collect::<Vec<_>>().windows(2).all(|pair| {
        pair[0].ends_with(|c: char| c.is_ascii_digit())
            && pair[1].starts_with(|c: char| c.is_ascii_digit())
    });
    if !between_digits {
        return Ok(None);
    }
    Ok(text.replace('_', "").parse().ok())
}

fn without_underscores(digits: &str) -> Option<String> {
    let misplaced = digits.starts_with('_') || digits.ends_with('_') || digits.contains("__");
    (!misplaced).then(|| digits.replace('_', ""))
}

pub(crate) fn too_large() -> Error {
    Error::unsupported("an integer of more than 127 bits")
}

/// Python's `int(float)`.
pub(crate) fn truncate(value: f64) -> Result<i128> {
    if value.is_nan() || value.is_infinite() {
        return Err(Error::failed(format!(
            "cannot convert float {} to integer",
            if value.is_nan() { "NaN" } else { "infinity" }
        )));
    }
    if value.abs() >= 1e38 {
        return Err(too_large());
    }
    Ok(value as i128)
}

/// An integer as a float, where that is exact or Python would round it likewise.
pub(crate) fn to_float(value: i128) -> f64 {
    value as f64
}

/// Python's `left / right`. The quotient of rounded operands is right only where none
/// had to be rounded.
pub(crate) fn divide(left: i128, right: i128) -> Result<f64> {
    if right == 0 {
        return Err(Error::failed("division by zero"));
    }
    let exact = |value: i128| value.unsigned_abs() <= 1 << 53;
    if !(exact(left) && exact(right)) {
        return Err(Error::unsupported("division of integers beyond 2**53"));
    }
    Ok(to_float(left) / to_float(right))
}

pub(crate) fn floor_divide(left: i128, right: i128) -> Result<(i128, i128)> {
    if right == 0 {
        return Err(Error::failed("integer division or modulo by zero"));
    }
    let quotient = left.checked_div(right).ok_or_else(too_large)?;
    let remainder = left.checked_rem(right).ok_or_else(too_large)?;
    if remainder != 0 && (remainder < 0) != (right < 0) {
        Ok((quotient - 1, remainder + right))
    } else {
        Ok((quotient, remainder))
    }
}

/// Python's `divmod` of floats: the remainder has the divisor's sign.
pub(crate) fn floor_divide_float(left: f64, right: f64) -> Result<(f64, f64)> {
    if right == 0.0 {
        return Err(Error::failed("float floor division or modulo by zero"));
    }
    let mut remainder = left % right;
    let mut quotient = (left - remainder) / right;
    if remainder == 0.0 {
        remainder = 0.0_f64.copysign(right);
    } else if (right < 0.0) != (remainder < 0.0) {
        remainder += right;
        quotient -= 1.0;
    }
    let mut floor = quotient.floor();
    if quotient == 0.0 {
        floor = 0.0_f64.copysign(left / right);
    } else if quotient - floor > 0.5 {
        floor += 1.0;
    }
    Ok((floor, remainder))
}

pub(crate) fn power(left: i128, right: i128) -> Result<i128> {
    let exponent = u32::try_from(right).map_err(|_| match left {
        -1..=1 => Error::unsupported("such a large exponent"),
        _ => too_large(),
    })?;
    left.checked_pow(exponent).ok_or_else(too_large)
}

/// Python's `round(value, digits)` of a float.
pub(crate) fn round(value: f64, digits: i128) -> Result<f64> {
    if !value.is_finite() || digits > 308 {
        return Ok(value);
    }
    if let Ok(digits) = usize::try_from(digits) {
        // Rust rounds the exact decimal value half to even, as Python's `dtoa` does.
        return Ok(format!("{value:.digits$}").parse().unwrap_or(value));
    }
    if digits < -30 || value.abs() >= 1e30 {
        return Err(Error::unsupported("rounding to so many digits"));
    }
    let unit = 10_i128.pow(digits.unsigned_abs() as u32);
    let whole = value.trunc() as i128;
    let (down, rest) = (whole / unit * unit, (whole % unit).abs());
    let away = down + if value < 0.0 { -unit } else { unit };
    let beyond = value.fract() != 0.0;
    let up = match (rest * 2).cmp(&unit) {
        std::cmp::Ordering::Greater => true,
        std::cmp::Ordering::Equal => beyond || (down / unit) % 2 != 0,
        std::cmp::Ordering::Less => false,
    };
    let rounded = (if up { away } else { down }) as f64;
    Ok(if rounded == 0.0 {
        0.0_f64.copysign(value)
    } else {
        rounded
    })
}

/// Python's `round(value, digits)` of an integer.
pub(crate) fn round_int(value: i128, digits: i128) -> Result<i128> {
    if digits >= 0 {
        return Ok(value);
    }
    if digits < -30 {
        return Err(Error::unsupported("rounding to so many digits"));
    }
    let unit = 10_i128.pow(digits.unsigned_abs() as u32);
    let (quotient, rest) = floor_divide(value, unit)?;
    let up = rest * 2 > unit || (rest * 2 == unit && quotient % 2 != 0);
    (quotient + i128::from(up))
        .checked_mul(unit)
        .ok_or_else(too_large)
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
            assert_eq!(float_repr(value), expect);
        }
    }
}
