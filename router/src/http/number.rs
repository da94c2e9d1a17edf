//! Whole numbers of JSON bodies.
//!
//! JSON has one kind of number: `16`, `16.0` and `1.6e1` are the same, and some clients write
//! every number as a float. A whole number is taken however it is written. One that is not
//! whole, or does not fit, is refused with the number and the range.

use std::fmt;

use baton_proto::{float_range, limits};
use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};

/// Up to here a float of 64 bits is one whole number and no neighbour's rounding.
const FLOAT_WHOLE_MAX: f64 = 9_007_199_254_740_992.0;

/// A whole number in the range of `T`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Whole<T>(pub(crate) T);

/// A seed: 64 bits, written signed or unsigned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seed(pub(crate) u64);

struct WholeVisitor {
    low: i128,
    high: i128,
}

impl WholeVisitor {
    fn check<E: Error>(&self, value: i128) -> Result<i128, E> {
        if (self.low..=self.high).contains(&value) {
            return Ok(value);
        }
        Err(E::custom(format_args!(
            "{value} is not in {}..={}",
            self.low, self.high
        )))
    }
}

impl Visitor<'_> for WholeVisitor {
    type Value = i128;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a whole number in {}..={}", self.low, self.high)
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<i128, E> {
        self.check(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<i128, E> {
        self.check(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<i128, E> {
        if value.fract() == 0.0 && value.abs() <= FLOAT_WHOLE_MAX {
            return self.check(value as i128);
        }
        Err(E::invalid_value(Unexpected::Float(value), &self))
    }
}

fn whole<'de, D: Deserializer<'de>>(body: D, low: i128, high: i128) -> Result<i128, D::Error> {
    // Not `deserialize_any`: a number is what is asked for.
    body.deserialize_i64(WholeVisitor { low, high })
}

macro_rules! whole {
    ($($type:ty),+) => {$(
        impl<'de> Deserialize<'de> for Whole<$type> {
            fn deserialize<D: Deserializer<'de>>(body: D) -> Result<Self, D::Error> {
                let value = whole(body, <$type>::MIN.into(), <$type>::MAX.into())?;
                // The visitor keeps to the type's range.
                Ok(Self(<$type>::try_from(value).map_err(D::Error::custom)?))
            }
        }
    )+};
}
whole!(u32, i32, u64);

impl<'de> Deserialize<'de> for Seed {
    fn deserialize<D: Deserializer<'de>>(body: D) -> Result<Self, D::Error> {
        let value = whole(body, i64::MIN.into(), u64::MAX.into())?;
        // A negative seed is a seed: its bits are kept.
        Ok(Self(value as u64))
    }
}

/// The numbers behind the wrappers.
pub(crate) fn all(numbers: Vec<Whole<u32>>) -> Vec<u32> {
    numbers.into_iter().map(|number| number.0).collect()
}

/// What the field at this path of a body may be, for the message of a wrong one. Nothing for
/// fields that are no numbers.
pub(crate) fn allowed(path: &str) -> Option<String> {
    let floats = [
        float_range::TEMPERATURE,
        float_range::TOP_P,
        float_range::MIN_P,
        float_range::REPETITION_PENALTY,
        float_range::PRESENCE_PENALTY,
        float_range::FREQUENCY_PENALTY,
        float_range::LOGIT_BIAS,
    ];
    let field = path.split('.').next().unwrap_or(path);
    if let Some(range) = floats.iter().find(|range| range.field == field) {
        return Some(format!("a number, {}", range.allowed()));
    }
    let ms = |range: std::ops::RangeInclusive<f64>| {
        format!("milliseconds, {}..={}", range.start(), range.end())
    };
    Some(match path {
        "slo.ttft_ms" => ms(limits::TTFT_MS),
        "slo.itl_ms" => ms(limits::ITL_MS),
        "max_tokens" | "max_completion_tokens" => {
            "a whole number from 1 to what the context leaves".to_owned()
        }
        "min_tokens" => "a whole number from 0 to `max_tokens`".to_owned(),
        "top_k" => format!("a whole number, 0..={}", u32::MAX),
        "n" | "best_of" => format!("a whole number, 1..={}", limits::CHOICES_MAX),
        "logprobs" | "top_logprobs" => {
            format!("a whole number, 0..={}", limits::TOP_LOGPROBS_MAX)
        }
        "seed" => format!("a whole number, {}..={}", i64::MIN, u64::MAX),
        "priority" => {
            let range = limits::PRIORITY;
            format!("a whole number, {}..={}", range.start(), range.end())
        }
        _ if field.starts_with("stop_token_ids") => "ids of the tokenizer".to_owned(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<T: for<'de> Deserialize<'de>>(json: &str) -> Result<T, String> {
        serde_json::from_str(json).map_err(|error| error.to_string())
    }

    #[test]
    fn a_whole_number_is_taken_however_it_is_written() {
        for json in ["16", "16.0", "1.6e1", "160e-1"] {
            assert_eq!(read(json), Ok(Whole(16_u32)), "{json}");
        }
        assert_eq!(read("1e2"), Ok(Whole(100_u32)));
        assert_eq!(read("-0.0"), Ok(Whole(0_u32)));
        assert_eq!(read("-0"), Ok(Whole(0_u32)));
        assert_eq!(read("-100.0"), Ok(Whole(-100_i32)));
        assert_eq!(read("18446744073709551615"), Ok(Whole(u64::MAX)));
    }

    #[test]
    fn what_is_not_whole_or_does_not_fit_is_refused_with_the_range() {
        for json in [
            "16.5",
            "-1",
            "-1.0",
            "4294967296",
            "4294967296.0",
            "1e30",
            "18446744073709551616",
            "-9223372036854775809",
            "\"16\"",
            "true",
            "[16]",
        ] {
            let error = read::<Whole<u32>>(json).unwrap_err();
            assert!(error.contains("0..=4294967295"), "{json}: {error}");
        }
        let error = read::<Whole<i32>>("2147483648").unwrap_err();
        assert!(error.contains("-2147483648..=2147483647"), "{error}");
    }

    #[test]
    fn a_seed_is_any_64_bits() {
        assert_eq!(read("-1"), Ok(Seed(u64::MAX)));
        assert_eq!(read("18446744073709551615"), Ok(Seed(u64::MAX)));
        assert_eq!(read("-9223372036854775808"), Ok(Seed(1 << 63)));
        assert_eq!(read("7.0"), Ok(Seed(7)));
        for json in ["18446744073709551616", "1e19", "0.5", "\"7\""] {
            let error = read::<Seed>(json).unwrap_err();
            assert!(error.contains("18446744073709551615"), "{json}: {error}");
        }
    }
}
