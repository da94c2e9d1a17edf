//! Foretells an engine's steps: what a row adds, and how long it takes.
//!
//! The core asks before a step and tells after it; [`Calibrated`] is the clock of a real
//! device, tests have others. One owner, no time of its own.

use std::time::Duration;

use crate::step_time::{DeviceRates, StepTimeModel};
use crate::step_work::{ModelCost, Row, StepWork};

/// Foretells the time of a device's steps, and learns from those that ran.
pub trait StepClock: Send {
    /// Adds a row's work to a step's.
    fn add(&self, work: &mut StepWork, row: Row);

    /// The time a step of `work` takes; more work never takes less.
    fn predict(&self, work: &StepWork) -> Duration;

    /// A step of `work` took so long.
    fn observe(&mut self, work: &StepWork, took: Duration);
}

/// The cost of one model, and a model of time that the steps calibrate.
#[derive(Clone, Debug)]
pub struct Calibrated {
    cost: ModelCost,
    times: StepTimeModel,
}

impl Calibrated {
    /// A clock that has seen no step yet.
    ///
    /// # Errors
    /// As [`StepTimeModel::new`].
    pub fn new(cost: ModelCost, rates: DeviceRates) -> Result<Self, baton_proto::Error> {
        let times = StepTimeModel::new(rates)?;
        Ok(Self { cost, times })
    }
}

impl StepClock for Calibrated {
    fn add(&self, work: &mut StepWork, row: Row) {
        self.cost.add(work, row);
    }

    fn predict(&self, work: &StepWork) -> Duration {
        self.times.predict(work)
    }

    fn observe(&mut self, work: &StepWork, took: Duration) {
        self.times.observe(work, took);
    }
}
