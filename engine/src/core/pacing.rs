//! What the scheduler needs to keep a target on the gap between tokens: foretold step
//! times, learned from the steps that ran, and how many tokens streams usually make.
//!
//! Both are estimates that only decide when something runs, never what comes out.

use std::collections::VecDeque;
use std::time::Duration;

use baton_proto::Error;

use super::request::Request;
use crate::scheduler::{Pace, StepTimes};
use crate::step_clock::StepClock;
use crate::step_work::{Row, StepWork};

/// Steps that the margin is taken from. A few seconds of them: a stall of the machine
/// is soon forgotten, and until then it is a few among many.
const RATIOS: usize = 256;
/// Steps before the margin is taken from them.
const RATIOS_LEAST: usize = 16;
/// The margin until then.
const MARGIN_ASSUMED: f64 = 1.05;
/// Of the steps with decode rows, this share shall be within the target: a target is
/// judged by the 99th percentile of the gaps.
const WITHIN: f64 = 0.99;
/// However unsteady the steps are, a target is missed by its own spread at worst and
/// not by planning for a fraction of it.
const MARGIN: (f64, f64) = (0.8, 1.6);

/// Ended choices that the usual length is taken from.
const LENGTHS: usize = 64;
/// Ended choices before it is.
const LENGTHS_LEAST: usize = 8;
/// Of the choices that ended lately, this share was not longer.
const NOT_LONGER: f64 = 0.9;
/// Tokens expected of a choice that is longer than usual, or of one of which nothing is
/// known: enough to plan for, not so many that an unbounded one keeps others out.
const TOKENS_BEYOND_USUAL: u32 = 32;
const TOKENS_ASSUMED: u32 = 512;

/// Foretells steps, learns from them, and keeps count of what targets did.
pub(super) struct Pacer {
    clock: Option<Box<dyn StepClock>>,
    /// The engine's own target.
    target: Option<Duration>,
    /// Real over foretold times of the last steps with decode rows.
    ratios: Recent,
    margin: f64,
    lengths: Recent,
    usual_length: Option<u32>,
    /// Whether a target kept the first in the queue from starting in the last plan.
    pub delays: bool,
    pub delayed_total: u64,
    pub cut_steps_total: u64,
}

impl Pacer {
    pub(super) fn new(
        clock: Option<Box<dyn StepClock>>,
        target: Option<Duration>,
    ) -> Result<Self, Error> {
        if target.is_some() && clock.is_none() {
            return Err(Error::unsupported(
                "itl_target_ms",
                "this device's steps cannot be foretold",
            ));
        }
        Ok(Self {
            clock,
            target,
            ratios: Recent::new(RATIOS),
            margin: MARGIN_ASSUMED,
            lengths: Recent::new(LENGTHS),
            usual_length: None,
            delays: false,
            delayed_total: 0,
            cut_steps_total: 0,
        })
    }

    /// Whether requests may have targets of their own.
    pub(super) fn foretells(&self) -> bool {
        self.clock.is_some()
    }

    /// The smallest of the engine's target and those of `requests`.
    pub(super) fn target<'a>(
        &self,
        requests: impl Iterator<Item = &'a Request>,
    ) -> Option<Duration> {
        requests
            .filter_map(|request| request.itl_target)
            .chain(self.target)
            .min()
    }

    /// What the scheduler plans with.
    pub(super) fn pace(&self) -> Option<Pace<'_>> {
        self.clock.is_some().then_some(Pace {
            times: self,
            target: self.target,
        })
    }

    /// Learns from a step that ran; says how far it was off, if `decodes`: real over
    /// foretold time.
    pub(super) fn observe(
        &mut self,
        work: &StepWork,
        took: Duration,
        decodes: bool,
    ) -> Option<f64> {
        let clock = self.clock.as_mut()?;
        let foretold = clock.predict(work);
        clock.observe(work, took);
        if !decodes || foretold.is_zero() {
            return None;
        }
        let ratio = took.as_secs_f64() / foretold.as_secs_f64();
        self.ratios.push(ratio);
        if let Some(margin) = self.ratios.quantile(WITHIN, RATIOS_LEAST) {
            self.margin = margin.clamp(MARGIN.0, MARGIN.1);
        }
        Some(ratio)
    }

    /// Learns from a choice that came to its own end.
    pub(super) fn ended(&mut self, output_tokens: u32) {
        self.lengths.push(f64::from(output_tokens));
        let usual = self.lengths.quantile(NOT_LONGER, LENGTHS_LEAST);
        self.usual_length = usual.map(|tokens| tokens as u32);
    }

    /// Tokens that a choice of `request` is expected to make yet.
    pub(super) fn foreseen(&self, request: &Request, made: u32) -> u32 {
        let left = request.rules.params().max_tokens.saturating_sub(made);
        let expected = match self.usual_length {
            Some(usual) => usual.saturating_sub(made).max(TOKENS_BEYOND_USUAL),
            None => TOKENS_ASSUMED,
        };
        left.min(expected).max(1)
    }
}

impl StepTimes for Pacer {
    fn add(&self, work: &mut StepWork, row: Row) {
        if let Some(clock) = &self.clock {
            clock.add(work, row);
        }
    }

    /// The time that most steps of this work stay within.
    fn predict(&self, work: &StepWork) -> Duration {
        match &self.clock {
            Some(clock) => clock.predict(work).mul_f64(self.margin),
            None => Duration::ZERO,
        }
    }
}

/// The last so many values.
struct Recent {
    values: VecDeque<f64>,
    /// Kept so that a quantile allocates nothing.
    sorted: Vec<f64>,
    most: usize,
}

impl Recent {
    fn new(most: usize) -> Self {
        Self {
            values: VecDeque::with_capacity(most),
            sorted: Vec::with_capacity(most),
            most,
        }
    }

    fn push(&mut self, value: f64) {
        if self.values.len() == self.most {
            self.values.pop_front();
        }
        self.values.push_back(value);
    }

    /// The value that `share` of them do not exceed, once there are `least`.
    fn quantile(&mut self, share: f64, least: usize) -> Option<f64> {
        if self.values.len() < least {
            return None;
        }
        self.sorted.clear();
        self.sorted.extend(&self.values);
        let rank = (share * self.sorted.len() as f64).ceil() as usize;
        let at = rank.clamp(1, self.sorted.len()) - 1;
        let (_, value, _) = self.sorted.select_nth_unstable_by(at, f64::total_cmp);
        Some(*value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row takes a millisecond.
    struct PerRow;

    impl StepClock for PerRow {
        fn add(&self, work: &mut StepWork, row: Row) {
            work.tokens += u64::from(row.tokens);
        }

        fn predict(&self, work: &StepWork) -> Duration {
            Duration::from_millis(work.tokens)
        }

        fn observe(&mut self, _work: &StepWork, _took: Duration) {}
    }

    fn pacer() -> Pacer {
        Pacer::new(Some(Box::new(PerRow)), None).unwrap()
    }

    fn work(tokens: u64) -> StepWork {
        StepWork {
            tokens,
            ..StepWork::default()
        }
    }

    fn planned(pacer: &Pacer) -> f64 {
        pacer.predict(&work(100)).as_secs_f64() / 0.1
    }

    #[test]
    fn the_margin_is_what_most_steps_stay_within() {
        let mut pacer = pacer();
        assert!((planned(&pacer) - MARGIN_ASSUMED).abs() < 1e-6);
        for step in 0..RATIOS as u64 {
            // A tenth of the steps takes 12 % longer, the others what was foretold.
            let took = if step % 10 == 0 { 11_200 } else { 10_000 };
            pacer.observe(&work(10), Duration::from_micros(took), true);
        }
        assert!((planned(&pacer) - 1.12).abs() < 1e-6);
    }

    #[test]
    fn a_stall_moves_the_margin_little_and_not_for_long() {
        let mut pacer = pacer();
        let mut steps = |count, ms| {
            for _ in 0..count {
                pacer.observe(&work(10), Duration::from_millis(ms), true);
            }
            planned(&pacer)
        };
        assert!((steps(RATIOS, 10) - 1.0).abs() < 1e-6);
        assert!((steps(2, 900) - 1.0).abs() < 1e-6, "two steps of many");
        assert!((steps(RATIOS, 900) - MARGIN.1).abs() < 1e-6, "bounded");
        assert!((steps(RATIOS, 10) - 1.0).abs() < 1e-6, "forgotten");
        assert!((steps(RATIOS, 1) - MARGIN.0).abs() < 1e-6, "both ways");
    }

    #[test]
    fn steps_without_decode_rows_say_nothing_about_the_margin() {
        let mut pacer = pacer();
        for _ in 0..RATIOS {
            let ratio = pacer.observe(&work(10), Duration::from_millis(30), false);
            assert_eq!(ratio, None);
        }
        assert!((planned(&pacer) - MARGIN_ASSUMED).abs() < 1e-6);
    }

    #[test]
    fn a_target_needs_a_clock() {
        let target = Some(Duration::from_millis(5));
        let error = Pacer::new(None, target).err().unwrap();
        assert_eq!(error.field, "itl_target_ms");
        assert!(Pacer::new(None, None).unwrap().pace().is_none());
    }

    #[test]
    fn the_usual_length_is_that_of_nine_in_ten() {
        let mut pacer = pacer();
        for tokens in [10, 20, 30, 40, 50, 60, 70, 80, 90, 5000] {
            pacer.ended(tokens);
        }
        assert_eq!(pacer.usual_length, Some(90));
    }
}
