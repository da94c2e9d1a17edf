//! How long to wait before trying again.
//!
//! Exponential with jitter: after an outage a hundred workers come back spread
//! out, not in step. Pure: the caller brings the random number.

use std::time::Duration;

/// Grows from `first` to `max`, doubling.
#[derive(Clone, Debug)]
pub struct Backoff {
    first: Duration,
    max: Duration,
    failures: u32,
}

impl Backoff {
    pub const fn new(first: Duration, max: Duration) -> Self {
        Self {
            first,
            max,
            failures: 0,
        }
    }

    /// The wait after one more failure, between half of the step and all of it;
    /// `random` is in 0..1.
    pub fn next(&mut self, random: f64) -> Duration {
        let factor = 1_u32 << self.failures.min(16);
        self.failures = self.failures.saturating_add(1);
        let step = self.first.saturating_mul(factor).min(self.max);
        step.mul_f64(0.5 + 0.5 * random.clamp(0.0, 1.0))
    }

    /// It worked: the next failure starts from the first step again.
    pub fn reset(&mut self) {
        self.failures = 0;
    }

    /// Failures since the last success.
    pub const fn failures(&self) -> u32 {
        self.failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_up_to_the_limit_and_starts_again() {
        let ms = Duration::from_millis;
        let mut backoff = Backoff::new(ms(100), ms(1000));
        let steps: Vec<_> = (0..6).map(|_| backoff.next(1.0)).collect();
        assert_eq!(steps, [100, 200, 400, 800, 1000, 1000].map(ms));
        backoff.reset();
        assert_eq!(backoff.next(0.0), ms(50));
        for _ in 0..1000 {
            backoff.next(0.5);
        }
        assert_eq!(backoff.next(1.0), ms(1000));
    }
}
