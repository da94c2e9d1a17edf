//! Ranges of the numbers that are 32-bit floats inside, checked before they are rounded.
//!
//! A JSON number or a flag has 64 bits. Rounded first, 100.0000001 would be 100 and within its
//! range, and 1e-50 would be 0, which may mean something else (a temperature of 0 is greedy).

use crate::error::Error;

/// What one field may be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FloatRange {
    pub field: &'static str,
    low: f64,
    high: f64,
    /// Whether `low` itself is allowed.
    with_low: bool,
}

pub const TEMPERATURE: FloatRange = closed("temperature", 0.0, 100.0);
pub const TOP_P: FloatRange = FloatRange {
    with_low: false,
    ..closed("top_p", 0.0, 1.0)
};
pub const MIN_P: FloatRange = closed("min_p", 0.0, 1.0);
pub const REPETITION_PENALTY: FloatRange = closed("repetition_penalty", 0.01, 100.0);
pub const PRESENCE_PENALTY: FloatRange = closed("presence_penalty", -2.0, 2.0);
pub const FREQUENCY_PENALTY: FloatRange = closed("frequency_penalty", -2.0, 2.0);
pub const LOGIT_BIAS: FloatRange = closed("logit_bias", -100.0, 100.0);

const fn closed(field: &'static str, low: f64, high: f64) -> FloatRange {
    FloatRange {
        field,
        low,
        high,
        with_low: true,
    }
}

impl FloatRange {
    /// The range for people: `0..=100`, or `above 0 and at most 1`.
    pub fn allowed(&self) -> String {
        let (low, high) = (self.low, self.high);
        match self.with_low {
            true => format!("{low}..={high}"),
            false => format!("above {low} and at most {high}"),
        }
    }

    /// The number as it is used. Minus zero becomes zero.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Invalid`] naming the field and the range: a number outside of it (NaN
    /// is in none), or one that is not zero and would become it.
    pub fn narrow(&self, value: f64) -> Result<f32, Error> {
        let above = value > self.low || (self.with_low && value == self.low);
        if !above || value > self.high {
            return Err(self.refusal(&format!("{value:?}")));
        }
        let narrow = value as f32;
        if narrow == 0.0 && value != 0.0 {
            let least = f32::from_bits(1);
            let message = format!("{value:?} is too close to 0, the least above it is {least:e}");
            return Err(Error::invalid(self.field, message));
        }
        Ok(narrow + 0.0)
    }

    /// Checks a number that has 32 bits already.
    ///
    /// # Errors
    /// As [`Self::narrow`].
    pub fn check(&self, value: f32) -> Result<(), Error> {
        let low = self.low as f32;
        let above = value > low || (self.with_low && value == low);
        if above && value <= self.high as f32 {
            return Ok(());
        }
        Err(self.refusal(&format!("{value:?}")))
    }

    fn refusal(&self, value: &str) -> Error {
        let allowed = self.allowed();
        let message = match self.with_low {
            true => format!("{value} is not in {allowed}"),
            false => format!("{value} is not {allowed}"),
        };
        Error::invalid(self.field, message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [FloatRange; 7] = [
        TEMPERATURE,
        TOP_P,
        MIN_P,
        REPETITION_PENALTY,
        PRESENCE_PENALTY,
        FREQUENCY_PENALTY,
        LOGIT_BIAS,
    ];

    #[test]
    fn the_bounds_are_those_of_64_bits() {
        for range in ALL {
            let taken = |value: f64| range.narrow(value).map_err(|error| error.field);
            let refused = Err(range.field.to_owned());
            assert_eq!(taken(range.high), Ok(range.high as f32));
            assert_eq!(taken(range.low).is_ok(), range.with_low, "{range:?}");
            // The next numbers of 64 bits round to the bounds.
            for outside in [range.high.next_up(), range.low.next_down()] {
                assert_eq!(taken(outside), refused, "{outside:?}");
            }
            for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300, -1e300] {
                assert_eq!(taken(value), refused, "{value:?}");
                let error = range.narrow(value).unwrap_err();
                assert!(
                    error.message.contains(&range.allowed()),
                    "{}",
                    error.message
                );
            }
            // What passed here passes at the worker.
            if range.with_low {
                range.check(range.narrow(range.low).unwrap()).unwrap();
            }
            range.check(range.narrow(range.high).unwrap()).unwrap();
        }
        assert!(TEMPERATURE.narrow(100.000_000_1).is_err());
        assert!(TOP_P.narrow(1.000_000_01).is_err());
        assert!(REPETITION_PENALTY.narrow(0.009_999_999_99).is_err());
    }

    #[test]
    fn nothing_but_zero_becomes_zero() {
        for range in ALL {
            for tiny in [1e-50, f64::MIN_POSITIVE, 5e-324] {
                assert!(range.narrow(tiny).is_err(), "{range:?}");
            }
        }
        assert_eq!(TEMPERATURE.narrow(1e-40).map(|t| t > 0.0), Ok(true));
        let zero = TEMPERATURE.narrow(-0.0).unwrap();
        assert_eq!(zero.to_bits(), 0.0_f32.to_bits());
    }

    #[test]
    fn narrow_numbers_are_checked_as_they_are() {
        for value in [f32::NAN, f32::INFINITY, -1e-3, 100.001] {
            assert!(TEMPERATURE.check(value).is_err(), "{value:?}");
        }
        assert!(REPETITION_PENALTY.check(0.01).is_ok());
        assert!(TOP_P.check(0.0).is_err() && TOP_P.check(-0.0).is_err());
    }
}
