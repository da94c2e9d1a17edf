//! Latency arithmetic: where a request's time went, and what a set of requests achieved.
//!
//! Pure functions of durations that the caller measured on one clock. Phases are
//! differences of consecutive marks, so they add up to the total exactly.

use std::time::Duration;

use crate::labels::{SecondTokenPhase, TtftPhase};

/// When a request passed each point, as time since it was accepted.
///
/// A mark that was never reached (no reservation on the local path, say) is
/// `None` and its phase takes no time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TtftMarks {
    pub admitted: Option<Duration>,
    pub tokenized: Option<Duration>,
    pub routed: Option<Duration>,
    pub reserved: Option<Duration>,
    pub prefill_started: Option<Duration>,
    pub prefilled: Option<Duration>,
    pub first_token_returned: Option<Duration>,
}

impl TtftMarks {
    /// The phases, in order; they add up to `sent`, the time to first token.
    pub fn split(&self, sent: Duration) -> [(TtftPhase, Duration); 8] {
        let parts = split(
            sent,
            [
                self.admitted,
                self.tokenized,
                self.routed,
                self.reserved,
                self.prefill_started,
                self.prefilled,
                self.first_token_returned,
                Some(sent),
            ],
        );
        std::array::from_fn(|at| (TtftPhase::ALL[at], parts[at]))
    }
}

/// When the second token's steps happened, as time since the first token was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SecondTokenMarks {
    /// The decode worker had all KV.
    pub committed: Option<Duration>,
    /// The sequence entered a batch.
    pub decode_started: Option<Duration>,
}

impl SecondTokenMarks {
    /// The phases, in order; they add up to `sent`, the first gap.
    pub fn split(&self, sent: Duration) -> [(SecondTokenPhase, Duration); 3] {
        let parts = split(sent, [self.committed, self.decode_started, Some(sent)]);
        std::array::from_fn(|at| (SecondTokenPhase::ALL[at], parts[at]))
    }
}

/// Differences of consecutive marks. A missing mark counts as passed together
/// with the one before, and marks are clamped to be ascending and within `total`,
/// so that the parts add up to `total` whatever the marks say (as long as the last is set to it).
fn split<const N: usize>(total: Duration, marks: [Option<Duration>; N]) -> [Duration; N] {
    let mut passed = Duration::ZERO;
    marks.map(|mark| {
        let mark = mark.unwrap_or(passed).clamp(passed, total.max(passed));
        let part = mark - passed;
        passed = mark;
        part
    })
}

/// Splits a measured interval by what a peer says its last part took on its own
/// clock: (before, reported). Never negative, always adds up.
pub fn split_by_report(interval: Duration, reported: Duration) -> (Duration, Duration) {
    let reported = reported.min(interval);
    (interval - reported, reported)
}

/// The `quantile` (0 to 1) of `samples` by the nearest-rank rule, `None` if there are none.
/// `samples` must be sorted ascending.
pub fn percentile(samples: &[f64], quantile: f64) -> Option<f64> {
    let last = samples.len().checked_sub(1)?;
    let rank = (quantile.clamp(0.0, 1.0) * samples.len() as f64).ceil() as usize;
    Some(samples[rank.saturating_sub(1).min(last)])
}

/// What is usually said about a set of samples.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Summary {
    pub count: usize,
    pub mean: f64,
    pub p50: f64,
    pub p95: f64,
    pub p99: f64,
    pub max: f64,
}

impl Summary {
    /// Sorts `samples` and sums them up; `None` if there are none. NaNs are not allowed in.
    pub fn of(samples: &mut [f64]) -> Option<Self> {
        samples.sort_by(f64::total_cmp);
        Some(Self {
            count: samples.len(),
            mean: samples.iter().sum::<f64>() / samples.len() as f64,
            p50: percentile(samples, 0.50)?,
            p95: percentile(samples, 0.95)?,
            p99: percentile(samples, 0.99)?,
            max: *samples.last()?,
        })
    }
}

/// A service level objective; `None` means anything goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slo {
    pub ttft: Option<Duration>,
    /// On the mean gap of a request.
    pub tpot: Option<Duration>,
}

/// How one request went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLatency {
    pub ttft: Duration,
    /// First to last token.
    pub decode: Duration,
    pub tokens: u32,
}

impl RequestLatency {
    /// The mean gap, `None` for a single token.
    pub fn tpot(&self) -> Option<Duration> {
        (self.tokens > 1).then(|| self.decode / (self.tokens - 1))
    }

    /// Whether both objectives were met.
    pub fn meets(&self, slo: &Slo) -> bool {
        let within =
            |value: Duration, limit: Option<Duration>| limit.is_none_or(|max| value <= max);
        within(self.ttft, slo.ttft) && self.tpot().is_none_or(|tpot| within(tpot, slo.tpot))
    }
}

/// Requests per second that met the objective. Failed requests are not in
/// `requests`, but the `window` they were sent in counts.
pub fn goodput(requests: &[RequestLatency], slo: &Slo, window: Duration) -> f64 {
    if window.is_zero() {
        return 0.0;
    }
    let good = requests.iter().filter(|request| request.meets(slo)).count();
    good as f64 / window.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(value: u64) -> Duration {
        Duration::from_millis(value)
    }

    #[test]
    fn phases_add_up_to_the_total_whatever_is_missing_or_out_of_order() {
        let full = TtftMarks {
            admitted: Some(ms(1)),
            tokenized: Some(ms(3)),
            routed: Some(ms(4)),
            reserved: Some(ms(10)),
            prefill_started: Some(ms(30)),
            prefilled: Some(ms(90)),
            first_token_returned: Some(ms(95)),
        };
        let parts = full.split(ms(100)).map(|(_, part)| part);
        assert_eq!(parts, [1, 2, 1, 6, 20, 60, 5, 5].map(ms));
        for marks in [
            TtftMarks::default(),
            TtftMarks {
                reserved: None,
                ..full
            },
            TtftMarks {
                tokenized: Some(ms(500)),
                ..full
            },
            TtftMarks {
                prefilled: Some(ms(2)),
                ..full
            },
        ] {
            let sum: Duration = marks.split(ms(100)).iter().map(|(_, part)| *part).sum();
            assert_eq!(sum, ms(100), "{marks:?}");
        }
    }

    #[test]
    fn the_first_gap_is_split_the_same_way() {
        let marks = SecondTokenMarks {
            committed: Some(ms(4)),
            decode_started: Some(ms(6)),
        };
        assert_eq!(
            marks.split(ms(11)).map(|(_, part)| part),
            [ms(4), ms(2), ms(5)]
        );
    }

    #[test]
    fn a_peers_report_never_exceeds_what_was_measured() {
        assert_eq!(split_by_report(ms(10), ms(7)), (ms(3), ms(7)));
        assert_eq!(split_by_report(ms(10), ms(70)), (ms(0), ms(10)));
    }

    #[test]
    fn percentiles_are_nearest_rank() {
        let mut samples: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        let summary = Summary::of(&mut samples).unwrap();
        assert_eq!(
            (summary.p50, summary.p95, summary.p99, summary.max),
            (50.0, 95.0, 99.0, 100.0)
        );
        assert_eq!(summary.mean, 50.5);
        assert_eq!(percentile(&[3.0], 0.99), Some(3.0));
        assert_eq!(percentile(&[3.0, 5.0], 0.0), Some(3.0));
        assert_eq!(percentile(&[], 0.5), None);
        assert_eq!(Summary::of(&mut []), None);
    }

    #[test]
    fn goodput_counts_requests_that_met_both_objectives() {
        let slo = Slo {
            ttft: Some(ms(200)),
            tpot: Some(ms(20)),
        };
        let request = |ttft, decode, tokens| RequestLatency {
            ttft: ms(ttft),
            decode: ms(decode),
            tokens,
        };
        let requests = [
            request(200, 180, 10),
            request(201, 180, 10),
            request(100, 190, 10),
            request(10, 0, 1),
        ];
        assert_eq!(goodput(&requests, &slo, Duration::from_secs(2)), 1.0);
        assert_eq!(
            goodput(&requests, &Slo::default(), Duration::from_secs(2)),
            2.0
        );
        assert_eq!(goodput(&requests, &slo, Duration::ZERO), 0.0);
    }
}
