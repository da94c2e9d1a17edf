//! How long a step will take: predicted from its work, calibrated by the steps that ran.
//!
//! ```text
//! time(work) = sum over terms of  coefficient * term(work)
//!
//! step              a fixed time                       what every step costs: start, barriers
//! weights           weight bytes at the read rate
//! products, three   matrix operations at their peak,   split where the step has more of them per
//!                   weight byte than the ridge, and 8 times the ridge: kernels reach different
//!                   shares of the peak on either side
//! logits            a fixed time per row that wants some
//! attention         attention operations at their peak
//! kv                K and V bytes at the read rate
//! ```
//!
//! A term is the time its part would take at the device's measured limits, so that every
//! coefficient says how far the part is from its limit and 1 is a sensible start.
//! [`StepTimeModel::observe`] fits them by least squares on relative errors:
//!
//! - They are never negative and never unbounded, whatever is observed.
//! - What has not been seen yet is assumed to be as far from its limit as what has been.
//! - Steps are remembered by regime (tokens, share of attention), each with its own
//!   bounded, fading memory: an hour of small decode steps does not wash out what was
//!   learned of prefill chunks.
//! - A step far slower or faster than its regime's usual error counts less: the system
//!   interrupts steps, and one such should not move the model.
//!
//! Least squares over a normal matrix rather than a running gradient: a few observations
//! suffice, and the result depends on what was observed, hardly on its order.
//!
//! Deterministic and pure: no clock, no device. It takes microseconds, allocates nothing
//! and belongs to one owner.

mod non_negative;

use std::time::Duration;

use baton_proto::Error;

pub use crate::step_work::{ModelCost, Row, StepWork};

/// What a device can do at best, with the threads the engine has.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceRates {
    /// Operations of matrix products, a multiply-add counting 2.
    pub product_ops_per_second: f64,
    /// Operations of attention.
    pub attention_ops_per_second: f64,
    /// Reading a working set of the model's size.
    pub bytes_per_second: f64,
}

impl DeviceRates {
    /// Round figures of a server core of today, for a start without measured ones.
    pub fn assumed(threads: usize) -> Self {
        let threads = threads.clamp(1, 1024) as f64;
        Self {
            product_ops_per_second: 400e9 * threads,
            attention_ops_per_second: 100e9 * threads,
            bytes_per_second: 12e9 * threads,
        }
    }
}

const TERMS: usize = 8;
type Terms = [f64; TERMS];

/// The terms' names, in the order of [`StepTimeModel::coefficients`].
pub const TERM_NAMES: [&str; TERMS] = [
    "step",
    "weights",
    "products below the ridge",
    "products above it",
    "products far above",
    "logits",
    "attention",
    "kv",
];

/// A start: what a step and a row of logits cost besides their work, about as measured
/// on two cores with a model of 30 layers.
const STEP_SECONDS: f64 = 100e-6;
const LOGITS_SECONDS: f64 = 10e-6;
/// Where matrix products count as far above the ridge, in ridges.
const FAR_RIDGES: f64 = 8.0;

/// Before anything is seen, every part runs at half of its limit.
const COEFFICIENT_ASSUMED: f64 = 2.0;
/// Far slower than a debug build of the scalar path; what is beyond is no step.
const COEFFICIENT_MAX: f64 = 1e5;

/// Steps a regime remembers: the newest counts 1, one this many steps ago 1/e.
const MEMORY_STEPS: f64 = 64.0;
/// No step takes less than this share of its terms: limits may be assumed too low, and a
/// small model may come from a cache, but not by more.
const SHARE_OF_LIMITS_MIN: f64 = 0.02;
/// How strongly coefficients are held to their common level, against what was seen. So
/// weak that a part that takes a tenth of the time is learned from its own steps.
const TIE: f64 = 1e-4;
/// Steps that error by more than this many usual errors count less.
const OUTLIER_DEVIATIONS: f64 = 3.0;
/// The usual error is never assumed smaller: clocks and caches vary by that much.
const DEVIATION_MIN: f64 = 0.02;
/// Steps over which the usual error is averaged.
const DEVIATION_STEPS: f64 = 8.0;

/// Longest time predicted or believed.
const SECONDS_MAX: f64 = 3600.0;
const SECONDS_MIN: f64 = 1e-7;

/// Regimes: powers of two of a step's tokens up to 1024, with little and much attention.
const TOKEN_CLASSES: usize = 11;
const REGIMES: usize = 2 * TOKEN_CLASSES;
/// From this share of a step's time at the limits on, attention is much.
const ATTENTION_SHARE_MUCH: f64 = 0.25;

/// What is remembered of the steps of one regime.
#[derive(Clone, Debug)]
struct Regime {
    /// Sums over steps, faded: `terms * terms` and `terms`, relative to the step's time.
    gram: [Terms; TERMS],
    moment: Terms,
    steps: u64,
    /// Usual size of the relative error.
    deviation: f64,
}

impl Regime {
    const NEW: Self = Self {
        gram: [[0.0; TERMS]; TERMS],
        moment: [0.0; TERMS],
        steps: 0,
        // Wide open: the first steps of a regime are all believed.
        deviation: 1.0,
    };
}

/// Predicts the time of a step and learns from the steps that ran.
#[derive(Clone, Debug)]
pub struct StepTimeModel {
    rates: DeviceRates,
    coefficients: Terms,
    regimes: Box<[Regime; REGIMES]>,
    steps: u64,
}

impl StepTimeModel {
    /// An uncalibrated model of a device.
    ///
    /// # Errors
    /// A rate that is not a positive finite number, by field.
    pub fn new(rates: DeviceRates) -> Result<Self, Error> {
        for (field, rate) in [
            ("product_ops_per_second", rates.product_ops_per_second),
            ("attention_ops_per_second", rates.attention_ops_per_second),
            ("bytes_per_second", rates.bytes_per_second),
        ] {
            if !(1.0..=1e18).contains(&rate) {
                let message = format!("{rate} is not in 1..=1e18");
                return Err(Error::invalid(field, message));
            }
        }
        Ok(Self {
            rates,
            coefficients: [COEFFICIENT_ASSUMED; TERMS],
            regimes: Box::new([Regime::NEW; REGIMES]),
            steps: 0,
        })
    }

    /// The device's limits the model was made with.
    pub fn rates(&self) -> DeviceRates {
        self.rates
    }

    /// Steps observed so far; with 0 of them predictions assume half of every limit.
    pub fn steps_observed(&self) -> u64 {
        self.steps
    }

    /// How many times longer than at its limit each part takes, by [`TERM_NAMES`].
    /// Neighbouring terms share what no observed step told apart.
    pub fn coefficients(&self) -> [f64; TERMS] {
        self.coefficients
    }

    /// The time a step with this work will take; an empty step takes none.
    pub fn predict(&self, work: &StepWork) -> Duration {
        if work.tokens == 0 {
            return Duration::ZERO;
        }
        let seconds = dot(&self.coefficients, &self.terms(work));
        Duration::from_secs_f64(seconds.clamp(SECONDS_MIN, SECONDS_MAX))
    }

    /// How large the relative error of predictions for such steps usually is; 1 where
    /// none was observed.
    pub fn deviation(&self, work: &StepWork) -> f64 {
        self.regimes[self.regime(work)].deviation
    }

    /// Learns from a step that took `took`. An empty step is no news, and a time that
    /// no step can take (the machine slept, a clock jumped) is not believed.
    pub fn observe(&mut self, work: &StepWork, took: Duration) {
        if work.tokens == 0 {
            return;
        }
        let terms = self.terms(work);
        let at_limits: f64 = terms.iter().sum();
        let seconds = took.as_secs_f64();
        if !(at_limits * SHARE_OF_LIMITS_MIN..=at_limits * COEFFICIENT_MAX).contains(&seconds) {
            return;
        }
        let predicted = dot(&self.coefficients, &terms).max(SECONDS_MIN);
        let error = (predicted / seconds).max(seconds / predicted) - 1.0;

        let index = self.regime(work);
        let regime = &mut self.regimes[index];
        let usual = OUTLIER_DEVIATIONS * regime.deviation;
        let weight = (usual / error).min(1.0);
        let keep = 1.0 - 1.0 / MEMORY_STEPS;
        // Relative to the larger of the two times, so that no step's error exceeds 1.
        let scale = seconds.max(predicted);
        let relative = terms.map(|term| term / scale);
        for (row, y) in regime.gram.iter_mut().zip(&relative) {
            for (sum, x) in row.iter_mut().zip(&relative) {
                *sum = keep * *sum + weight * x * y;
            }
        }
        for (sum, x) in regime.moment.iter_mut().zip(&relative) {
            *sum = keep * *sum + weight * x * seconds / scale;
        }
        regime.steps += 1;
        // An error counts for a little more than the usual at most: a single one hardly
        // widens the usual error, a lasting change soon does.
        let seen = error.min(usual + DEVIATION_MIN);
        regime.deviation += (seen - regime.deviation) / DEVIATION_STEPS;
        regime.deviation = regime.deviation.clamp(DEVIATION_MIN, 1.0);
        self.steps += 1;
        self.solve();
    }

    /// Non-negative least squares over everything remembered.
    fn solve(&mut self) {
        let (mut gram, mut moment) = ([[0.0; TERMS]; TERMS], [0.0; TERMS]);
        for regime in self.regimes.iter().filter(|regime| regime.steps > 0) {
            for (sums, row) in gram.iter_mut().zip(&regime.gram) {
                for (sum, x) in sums.iter_mut().zip(row) {
                    *sum += x;
                }
            }
            for (sum, x) in moment.iter_mut().zip(&regime.moment) {
                *sum += x;
            }
        }
        let total: f64 = gram.iter().flatten().sum();
        let trace: f64 = (0..TERMS).map(|i| gram[i][i]).sum();
        if !(total > 0.0 && trace > 0.0) {
            return;
        }
        // The one coefficient that would explain everything seen best.
        let level = (moment.iter().sum::<f64>() / total).clamp(0.0, COEFFICIENT_MAX);
        let tie = TIE * trace / TERMS as f64;
        for i in 0..TERMS {
            gram[i][i] += tie;
            moment[i] += tie * level;
        }
        self.coefficients =
            non_negative::solve(&gram, &moment).map(|coefficient| coefficient.min(COEFFICIENT_MAX));
    }

    /// The time each part of the work would take at the device's limits, seconds.
    fn terms(&self, work: &StepWork) -> Terms {
        let rates = &self.rates;
        let (ops, bytes) = (work.product_ops as f64, work.weight_bytes as f64);
        let ridge = rates.product_ops_per_second / rates.bytes_per_second * bytes;
        let product =
            |from: f64, to: f64| (ops.min(to) - from).max(0.0) / rates.product_ops_per_second;
        [
            STEP_SECONDS,
            bytes / rates.bytes_per_second,
            product(0.0, ridge),
            product(ridge, FAR_RIDGES * ridge),
            product(FAR_RIDGES * ridge, f64::INFINITY),
            work.logits as f64 * LOGITS_SECONDS,
            work.attention_ops as f64 / rates.attention_ops_per_second,
            work.kv_bytes as f64 / rates.bytes_per_second,
        ]
    }

    fn regime(&self, work: &StepWork) -> usize {
        // 1, 2, 3 to 4, 5 to 8, ...: the logarithm, rounded up.
        let class = u64::BITS - (work.tokens.max(1) - 1).leading_zeros();
        let class = (class as usize).min(TOKEN_CLASSES - 1);
        let terms = self.terms(work);
        let attention = terms[6] + terms[7];
        let much = attention > ATTENTION_SHARE_MUCH * terms.iter().sum::<f64>();
        2 * class + usize::from(much)
    }
}

fn dot(a: &Terms, b: &Terms) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
