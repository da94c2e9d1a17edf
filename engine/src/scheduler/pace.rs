//! Steps that keep a target on the gap between tokens.
//!
//! A stream's next token comes with the next step, so the gap between two of its
//! tokens is the time of a step that carries it. The target binds three decisions of
//! the decode policy, and only them:
//!
//! ```text
//! who starts    a sequence joins only while a step with it and everyone who holds a
//!               place stays within the target: now, and as they grow
//! chunks        a prompt beside running streams gets what they leave of the target
//! never         a running sequence is not dropped, a decode row not left out, and a
//!               stream whose blocks were taken comes back as soon as there are some
//! ```
//!
//! # Which target
//! The smallest of the engine's and of the sequences' own. A sequence's own target
//! binds only where it could be met for that sequence alone: one that cannot be met
//! by any batch must not keep the others out as well.
//!
//! # Progress
//! Whoever finds nobody in a place starts, whatever the target, so at least one
//! sequence runs. The oldest prompt in progress gets [`CHUNK_LEAST`] tokens in every
//! step, even past the target; a prompt starts beside running streams only while that
//! many fit, so this is the exception. The queue is never overtaken, and those ahead
//! of it end, so everyone starts.
//!
//! # Growth
//! Who runs grows by a position a step, until it ends. The time ahead is cut where
//! sequences are expected to end; each piece counts those that are there at its
//! beginning, with the length they have at its end. Prompts in progress count as if they
//! decoded already.

use std::time::Duration;

use super::{SequenceView, Stage, State};
use crate::step_work::{Row, StepWork};

/// Foretells the time of a step. The scheduler adds rows to one and asks.
pub trait StepTimes {
    /// Adds a row's work to a step's.
    fn add(&self, work: &mut StepWork, row: Row);
    /// The time of a step of `work`; more work never takes less.
    fn predict(&self, work: &StepWork) -> Duration;
}

/// What paces the steps of an engine.
#[derive(Clone, Copy)]
pub struct Pace<'a> {
    pub times: &'a dyn StepTimes,
    /// The engine's own target; sequences may have smaller ones.
    pub target: Option<Duration>,
}

/// Tokens that the oldest prompt in progress gets in every step: a block of the
/// smallest size, which the kernels compute in whole tiles.
pub const CHUNK_LEAST: u32 = 16;

/// Pieces the time ahead is cut into. More are closer to the truth; a check costs so
/// many times the rows.
const PIECES: usize = 8;

/// Somebody who has a place in the steps to come.
#[derive(Clone, Copy)]
struct Member {
    /// Tokens it knows by the time it decodes.
    known: u32,
    /// Tokens it is expected to make, at least 1.
    foreseen: u32,
    /// Choices it stands for.
    slots: u32,
}

impl Member {
    fn of(view: &SequenceView) -> Self {
        Self {
            known: view.computed + view.uncomputed,
            foreseen: view.foreseen.max(1),
            slots: view.slots.max(1),
        }
    }

    /// Its decode rows after `made` more tokens.
    fn rows(self, made: u32) -> impl Iterator<Item = Row> {
        let position = self.known.saturating_add(made).saturating_sub(1);
        (0..self.slots).map(move |_| Row::decode(position))
    }
}

/// The target while a plan is made.
pub(super) struct Pacing<'a> {
    times: &'a dyn StepTimes,
    /// Of everyone who has a place.
    target: Duration,
    /// Of those who decode in this step.
    step_target: Duration,
    members: Vec<Member>,
    /// What this step computes so far.
    step: StepWork,
    /// Whether anybody decodes in this step.
    decodes: bool,
    /// Whether a prompt has got its part of this step.
    served: bool,
    /// Whether a prompt got less than there was room for.
    pub(super) cut: bool,
}

impl<'a> Pacing<'a> {
    /// `None` where no target is in force and none is asked for.
    pub(super) fn new(state: &State<'a>) -> Option<Self> {
        let pace = state.pace?;
        if pace.target.is_none() && state.sequences.iter().all(|view| view.itl_target.is_none()) {
            return None;
        }
        let target = pace.target.unwrap_or(Duration::MAX);
        let mut pacing = Self {
            times: pace.times,
            target,
            step_target: target,
            members: Vec::with_capacity(state.sequences.len()),
            step: StepWork::default(),
            decodes: false,
            served: false,
            cut: false,
        };
        for view in state.sequences {
            if view.stage == Stage::Waiting {
                continue;
            }
            pacing.join(view);
            let decodes = view.stage == Stage::Running && view.uncomputed == 1;
            if decodes && !view.held_back {
                pacing
                    .times
                    .add(&mut pacing.step, Row::decode(view.computed));
                pacing.decodes = true;
                let own = pacing.attainable(view).unwrap_or(Duration::MAX);
                pacing.step_target = pacing.step_target.min(own);
            }
        }
        Some(pacing)
    }

    /// Gives `view` a place.
    pub(super) fn join(&mut self, view: &SequenceView) {
        if let Some(own) = self.attainable(view) {
            self.target = self.target.min(own);
        }
        self.members.push(Member::of(view));
    }

    /// A sequence's own target, if it could be met for the sequence alone.
    fn attainable(&self, view: &SequenceView) -> Option<Duration> {
        let own = view.itl_target?;
        let mut alone = StepWork::default();
        for row in Member::of(view).rows(0) {
            self.times.add(&mut alone, row);
        }
        (self.times.predict(&alone) <= own).then_some(own)
    }

    /// Whether the waiting `view` may start now.
    pub(super) fn admits(&self, view: &SequenceView) -> bool {
        if self.members.is_empty() || view.begun {
            return true;
        }
        let own = self.attainable(view).unwrap_or(Duration::MAX);
        if !view.receives && self.decodes {
            let tokens = view.uncomputed.min(CHUNK_LEAST);
            if self.with_chunk(view.computed, tokens) > self.step_target {
                return false;
            }
        }
        self.stays_within(self.target.min(own), Member::of(view))
    }

    /// Whether the steps to come stay within `target` if `newcomer` joins.
    fn stays_within(&self, target: Duration, newcomer: Member) -> bool {
        if target == Duration::MAX {
            return true;
        }
        let everyone = || self.members.iter().copied().chain([newcomer]);
        let mut ends: Vec<u32> = everyone().map(|member| member.foreseen).collect();
        ends.sort_unstable();
        ends.dedup();
        let mut from = 0;
        for piece in 1..=PIECES.min(ends.len()) {
            let to = ends[piece * ends.len() / PIECES.min(ends.len()) - 1];
            let mut work = StepWork::default();
            for member in everyone().filter(|member| member.foreseen > from) {
                for row in member.rows(member.foreseen.min(to)) {
                    self.times.add(&mut work, row);
                }
            }
            if self.times.predict(&work) > target {
                return false;
            }
            from = to;
        }
        true
    }

    /// Tokens of the prompt `view`, from `position` on, that this step computes, of the
    /// `most` it has room for. They count from now on.
    pub(super) fn take_chunk(&mut self, position: u32, most: u32) -> u32 {
        let tokens = if self.decodes && self.step_target < Duration::MAX {
            self.fitting(position, most)
        } else {
            most
        };
        self.cut |= tokens < most;
        if tokens > 0 {
            self.served = true;
            let row = Row::prefill(position, tokens, true);
            self.times.add(&mut self.step, row);
        }
        tokens
    }

    /// The largest chunk within the target, or the least that the oldest prompt gets.
    fn fitting(&self, position: u32, most: u32) -> u32 {
        let least = if self.served {
            0
        } else {
            CHUNK_LEAST.min(most)
        };
        if self.with_chunk(position, most) <= self.step_target {
            return most;
        }
        // `low` fits or is the least, `high` does not fit.
        let (mut low, mut high) = (least, most);
        while low + 1 < high {
            let middle = low + (high - low) / 2;
            if self.with_chunk(position, middle) <= self.step_target {
                low = middle;
            } else {
                high = middle;
            }
        }
        low
    }

    /// The time of this step with `tokens` more of a prompt.
    fn with_chunk(&self, position: u32, tokens: u32) -> Duration {
        let mut work = self.step;
        // As if a token were drawn after them: at most the output head too much.
        self.times
            .add(&mut work, Row::prefill(position, tokens, true));
        self.times.predict(&work)
    }
}

#[cfg(test)]
mod load;
#[cfg(test)]
mod tests;
