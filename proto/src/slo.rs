//! What a request expects of latency, checked by one rule at the front door and at workers.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::error::Error;
use crate::{limits, v1};

/// A checked [`v1::Slo`]. The default expects nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slo {
    /// Longest time to the first token that a router lets a request in for.
    pub ttft: Option<Duration>,
    /// Longest gap between two tokens of one choice that decode plans for.
    pub itl: Option<Duration>,
}

impl Slo {
    /// Checks the field `slo` of a message; absent expects nothing.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Invalid`] for a value outside its range, naming the field under
    /// `field`.
    pub fn from_wire(wire: Option<&v1::Slo>, field: &str) -> Result<Self, Error> {
        let Some(wire) = wire else {
            return Ok(Self::default());
        };
        let ttft = wire
            .ttft_ms
            .map(|ms| ttft_from_ms(ms, &format!("{field}.ttft_ms")))
            .transpose()?;
        let itl = wire
            .itl_ms
            .map(|ms| itl_from_ms(ms, &format!("{field}.itl_ms")))
            .transpose()?;
        Ok(Self { ttft, itl })
    }

    /// As it travels to workers, for which a request's wait is over: nothing where nothing
    /// else is expected.
    pub fn to_wire(self) -> Option<v1::Slo> {
        self.itl.map(|itl| v1::Slo {
            ttft_ms: None,
            // Of whole nanoseconds, so that both ends of the range come back as they were.
            itl_ms: Some(itl.as_nanos() as f64 / 1e6),
        })
    }
}

/// A target on the gap between tokens.
///
/// # Errors
/// [`crate::ErrorKind::Invalid`] naming `field` and [`limits::ITL_MS`]; NaN is in no range.
pub fn itl_from_ms(ms: f64, field: &str) -> Result<Duration, Error> {
    from_ms(ms, field, &limits::ITL_MS)
}

/// A target on the time to the first token.
///
/// # Errors
/// [`crate::ErrorKind::Invalid`] naming `field` and [`limits::TTFT_MS`]; NaN is in no range.
pub fn ttft_from_ms(ms: f64, field: &str) -> Result<Duration, Error> {
    from_ms(ms, field, &limits::TTFT_MS)
}

fn from_ms(ms: f64, field: &str, range: &RangeInclusive<f64>) -> Result<Duration, Error> {
    if range.contains(&ms) {
        return Ok(Duration::from_secs_f64(ms / 1e3));
    }
    let (least, most) = (range.start(), range.end());
    Err(Error::invalid(
        field,
        format!("{ms} is not in {least}..={most} milliseconds"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    fn read(itl_ms: Option<f64>, ttft_ms: Option<f64>) -> Result<Slo, Error> {
        Slo::from_wire(Some(&v1::Slo { ttft_ms, itl_ms }), "slo")
    }

    #[test]
    fn a_target_in_range_survives_the_wire() {
        for ms in [0.1, 7.25, 60_000.0] {
            let slo = read(Some(ms), None).unwrap();
            assert_eq!(Slo::from_wire(slo.to_wire().as_ref(), "slo"), Ok(slo));
        }
        assert_eq!(read(None, None), Ok(Slo::default()));
        assert_eq!(Slo::from_wire(None, "slo"), Ok(Slo::default()));
        assert_eq!(Slo::default().to_wire(), None);
    }

    #[test]
    fn a_target_out_of_range_is_refused_by_name_and_range() {
        let odd = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
        for ms in [0.0, -1.0, 0.099, 60_000.1, 1e300].into_iter().chain(odd) {
            let error = read(Some(ms), None).unwrap_err();
            assert_eq!(
                (error.kind, error.field.as_str()),
                (ErrorKind::Invalid, "slo.itl_ms")
            );
            assert!(error.message.contains("0.1..=60000"), "{}", error.message);
        }
    }

    #[test]
    fn a_target_on_the_first_token_stays_at_the_router() {
        let slo = read(None, Some(250.0)).unwrap();
        assert_eq!(slo.ttft, Some(Duration::from_millis(250)));
        assert_eq!(slo.to_wire(), None);
        for ms in [0.0, 0.5, 600_001.0, f64::NAN] {
            let error = read(None, Some(ms)).unwrap_err();
            assert_eq!(
                (error.kind, error.field.as_str()),
                (ErrorKind::Invalid, "slo.ttft_ms")
            );
            assert!(error.message.contains("1..=600000"), "{}", error.message);
        }
    }
}
