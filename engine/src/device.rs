//! What the threads of an engine could do at best on this machine, as measured.
//!
//! The kernels' crate has the loops; here their figures become the rates that a model's
//! work is held against, for predicting steps and for MFU and MBU.
//!
//! An engine's start takes a brief look at its own threads' limits, once per process for
//! as many threads, whichever cores they have: engines that start together would otherwise
//! measure each other.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use baton_kernels::{ComputeLimits, Error, Isa, LimitMeter, ReadLimit, read_rate_at};

use crate::step_time::DeviceRates;
use crate::step_work::ModelCost;

/// What one figure of the brief look may take.
const BRIEF_FIGURE: Duration = Duration::from_millis(15);
/// Larger working sets are read at the rate of this one: it is far beyond the caches of a
/// few cores, and touching more would delay a worker's start.
const BRIEF_BYTES_MAX: usize = 128 << 20;

/// The threads an engine computes with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceThreads {
    pub isa: Isa,
    pub threads: usize,
    /// Cores they are pinned to, one each, or none.
    pub cores: Vec<usize>,
}

/// The limits of an engine's threads.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceLimits {
    pub compute: ComputeLimits,
    /// By working set, ascending; at least one.
    pub read: Vec<ReadLimit>,
}

impl DeviceLimits {
    /// Measures with `budget` for each figure.
    ///
    /// # Errors
    /// Threads that cannot be had or pinned.
    pub fn measure(
        threads: &DeviceThreads,
        working_sets: &[usize],
        budget: Duration,
    ) -> Result<Self, Error> {
        let meter = LimitMeter::new(threads.isa, threads.threads, &threads.cores, budget)?;
        Ok(Self {
            compute: meter.compute()?,
            read: meter.read(working_sets)?,
        })
    }

    /// The better of both figures each, where both measured the same working sets: what
    /// else a machine does only ever lowers a limit. And by which share the two differ at
    /// most, which says how quiet the machine was.
    pub fn best_of(self, other: &Self) -> (Self, f64) {
        let mut drift = 0.0;
        let mut best = |a: f64, b: f64| {
            drift = f64::max(drift, 1.0 - a.min(b) / a.max(b));
            a.max(b)
        };
        let (a, b) = (self.compute, other.compute);
        let compute = ComputeLimits {
            int8_ops_per_second: best(a.int8_ops_per_second, b.int8_ops_per_second),
            f32_ops_per_second: best(a.f32_ops_per_second, b.f32_ops_per_second),
            f16_ops_per_second: match (a.f16_ops_per_second, b.f16_ops_per_second) {
                (Some(a), Some(b)) => Some(best(a, b)),
                (a, b) => a.or(b),
            },
        };
        let read = self
            .read
            .iter()
            .map(|limit| ReadLimit {
                bytes: limit.bytes,
                bytes_per_second: best(
                    limit.bytes_per_second,
                    read_rate_at(&other.read, limit.bytes as f64),
                ),
            })
            .collect();
        (Self { compute, read }, drift)
    }

    /// A brief look at the limits for a model of `weight_bytes`: tens of milliseconds the
    /// first time for such threads and sizes, nothing afterwards.
    ///
    /// # Errors
    /// As [`measure`](Self::measure).
    pub fn brief(threads: &DeviceThreads, weight_bytes: u64) -> Result<Self, Error> {
        static KNOWN: Mutex<Vec<(DeviceThreads, usize, DeviceLimits)>> = Mutex::new(Vec::new());
        let working_set = usize::try_from(weight_bytes)
            .unwrap_or(BRIEF_BYTES_MAX)
            .clamp(1 << 20, BRIEF_BYTES_MAX)
            .next_power_of_two();
        // Held while measuring, so that engines of one process measure one after another.
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |(of, size, _): &&(DeviceThreads, usize, DeviceLimits)| {
            (of.isa, of.threads, *size) == (threads.isa, threads.threads, working_set)
        };
        if let Some((_, _, limits)) = known.iter().find(same) {
            return Ok(limits.clone());
        }
        let limits = Self::measure(threads, &[working_set], BRIEF_FIGURE)?;
        known.push((threads.clone(), working_set, limits.clone()));
        Ok(limits)
    }

    /// Reading a working set of this many bytes at best.
    pub fn read_bytes_per_second(&self, working_set: u64) -> f64 {
        read_rate_at(&self.read, working_set as f64)
    }

    /// The rates that `cost`'s steps are held against. Products of integers and of floats
    /// have different peaks, so a model's is that of its mix.
    pub fn rates(&self, cost: &ModelCost) -> DeviceRates {
        let integer = cost.integer_share();
        let ComputeLimits {
            int8_ops_per_second,
            f32_ops_per_second,
            ..
        } = self.compute;
        DeviceRates {
            product_ops_per_second: 1.0
                / (integer / int8_ops_per_second + (1.0 - integer) / f32_ops_per_second),
            attention_ops_per_second: f32_ops_per_second,
            bytes_per_second: self.read_bytes_per_second(cost.weight_bytes()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_brief_look_is_taken_once_for_equal_threads() {
        let threads = DeviceThreads {
            isa: Isa::Scalar,
            threads: 1,
            cores: Vec::new(),
        };
        let first = DeviceLimits::brief(&threads, 500_000).unwrap();
        assert_eq!(first, DeviceLimits::brief(&threads, 700_000).unwrap());
        assert!(first.compute.int8_ops_per_second > 0.0);
        assert!(first.read_bytes_per_second(1 << 30) > 0.0);
    }

    #[test]
    fn of_two_looks_the_better_counts_and_their_distance_is_told() {
        let look = |int8: f64, read: f64| DeviceLimits {
            compute: ComputeLimits {
                int8_ops_per_second: int8,
                f32_ops_per_second: 50.0,
                f16_ops_per_second: None,
            },
            read: vec![ReadLimit {
                bytes: 1 << 20,
                bytes_per_second: read,
            }],
        };
        let (best, drift) = look(100.0, 30.0).best_of(&look(90.0, 40.0));
        assert_eq!(best, look(100.0, 40.0));
        assert!((drift - 0.25).abs() < 1e-9);
    }

    #[test]
    fn threads_that_cannot_be_had_are_an_error() {
        let threads = DeviceThreads {
            isa: Isa::Scalar,
            threads: 1,
            cores: vec![1_000_000],
        };
        assert!(matches!(
            DeviceLimits::measure(&threads, &[1 << 20], BRIEF_FIGURE),
            Err(Error::Pin { .. })
        ));
    }
}
