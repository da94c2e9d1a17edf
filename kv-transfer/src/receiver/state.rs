//! The receiving side of one attempt, as a pure state machine.
//!
//! It owns no socket, clock, task or memory: lanes report what happened together
//! with `now`, and the answers say what to do. The shell guarantees that at most
//! one lane is between [`ReceiverState::place`] and [`ReceiverState::arrived`] for
//! a ticket at any time.
//!
//! ```text
//!            attach             commit, all parts, root equal
//!  Granted ----------> Receiving -------------------------> Committed
//!     |                 |   ^ |
//!     |        lane lost|   | | abort by the sender, damaged too often,
//!     |                 +---+ | or another layout
//!     |            attach     +---------------------------> Aborted
//!     |                       |
//!     +-----------------------+-- deadline, or lease over on a lost lane -> Expired
//!     |                       |
//!     +-----------------------+-- revoke, or a newer attempt -----------> Fenced
//! ```
//! A sender of another layout may attach if the grant is for such ([`Senders`]): then its
//! own parts are what is counted, and whoever stores them puts them where they belong.
//!
//! The four on the right are terminal: no part is placed in blocks from then on,
//! and a second terminal transition is refused. Of lanes, only the one that
//! attached last may write; frames of any other go to scratch.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_proto::{Attempt, Epoch};

use super::grant::{AbortReason, ExpiryReason, Progress, Senders, Terminal};
use super::parts::PartTable;
use super::protections::Protections;
use super::relayout::Plan;
use crate::codec::Scope;
use crate::error::Refusal;
use crate::part::{Missing, PartRange};
use crate::ticket::SessionId;

/// Names one lane of one receiver; never reused in a receiver's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaneSerial(pub u64);

/// Where a grant is in its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// No lane has opened the ticket yet.
    Granted,
    /// A session owns the ticket.
    Receiving,
    Ended(Terminal),
}

/// Limits of one grant.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// See [`super::ReceiverConfig::resume_grace`].
    pub resume_grace: Duration,
    /// See [`super::ReceiverConfig::corrupt_frames_max`].
    pub corrupt_frames_max: u32,
    pub protections: Protections,
}

/// How the layout of the sender that opens a ticket goes with the receiver's.
#[derive(Clone, Debug)]
pub enum Layout {
    /// It is the same.
    Same,
    /// Its parts can be re-laid out.
    Other(Arc<Plan>),
    /// Its digest is another one, and nothing more is known.
    Unknown,
    /// They do not go together.
    Unfit(Box<baton_proto::Error>),
}

/// The answer to an opened ticket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attached {
    pub missing: Missing,
    /// Whether this was the first lane ever.
    pub first: bool,
}

/// Where the payload of a data frame goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Into the blocks with these part numbers; those received before go to scratch.
    Blocks(Range<usize>),
    /// Nowhere; the frame is read and forgotten.
    Scratch,
    /// The sender named a part it was not granted, or a wrong length: close its lane.
    Violation,
}

/// What a whole data frame amounts to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// At least one part was news.
    Stored,
    /// Every part was here before.
    Duplicate,
    /// Damaged: ask for it again.
    Corrupt,
    /// Damaged once too often: the grant is aborted now.
    Poisoned,
    /// The lane lost the right to write while the frame came in.
    Dropped,
}

/// The answer to a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommitAnswer {
    /// The grant is committed now.
    Committed,
    /// It was before; say so again.
    Again,
    /// Not yet: these have to come first.
    Missing(Missing),
    /// Never. `ended` if the grant was aborted by this very commit.
    Refused { refusal: Refusal, ended: bool },
}

/// The answer to a data frame of a grant that its lane has not opened, or that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stray {
    Refused(Refusal),
    /// The sender missed the acceptance.
    Committed,
}

/// The receiving side of one attempt.
pub struct ReceiverState {
    epoch: Epoch,
    attempt: Attempt,
    limits: Limits,
    phase: Phase,
    parts: PartTable,
    senders: Senders,
    granted_at: Instant,
    first_part_at: Option<Instant>,
    deadline: Instant,
    /// The session that opened the ticket first; no other may use it.
    session: Option<SessionId>,
    lane: Option<LaneSerial>,
    /// When the last word came over a lane that was lost: the lease runs from then.
    heard_at: Option<Instant>,
    lanes_lost: u32,
    corrupt_frames: u32,
    /// Whether the blocks went on to a newer attempt or back to the worker.
    parts_taken: bool,
}

impl ReceiverState {
    /// A fresh grant.
    pub fn new(
        epoch: Epoch,
        attempt: Attempt,
        parts: PartTable,
        limits: Limits,
        now: Instant,
        deadline: Duration,
    ) -> Self {
        Self {
            epoch,
            attempt,
            limits,
            phase: Phase::Granted,
            parts,
            senders: Senders::SameLayout,
            granted_at: now,
            first_part_at: None,
            deadline: now + deadline,
            session: None,
            lane: None,
            heard_at: None,
            lanes_lost: 0,
            corrupt_frames: 0,
            parts_taken: false,
        }
    }

    /// The same grant, for these senders.
    pub fn for_senders(self, senders: Senders) -> Self {
        Self { senders, ..self }
    }

    pub fn phase(&self) -> &Phase {
        &self.phase
    }

    pub fn terminal(&self) -> Option<&Terminal> {
        match &self.phase {
            Phase::Ended(terminal) => Some(terminal),
            Phase::Granted | Phase::Receiving => None,
        }
    }

    pub fn attempt(&self) -> Attempt {
        self.attempt
    }

    pub fn progress(&self) -> Progress {
        self.parts.progress()
    }

    pub fn parts(&self) -> &PartTable {
        &self.parts
    }

    pub fn granted_at(&self) -> Instant {
        self.granted_at
    }

    pub fn first_part_at(&self) -> Option<Instant> {
        self.first_part_at
    }

    /// How many lanes this grant has lost.
    pub fn lanes_lost(&self) -> u32 {
        self.lanes_lost
    }

    /// A lane of `session` opened the ticket. From now on only this lane writes.
    pub fn attach(
        &mut self,
        lane: LaneSerial,
        session: SessionId,
        scope: Scope,
        layout: Layout,
    ) -> Result<Attached, Refusal> {
        self.check(session, scope)?;
        if let Phase::Ended(terminal) = &self.phase {
            return match terminal {
                // The sender missed our acceptance; its next commit is answered again.
                Terminal::Committed => Ok(Attached {
                    missing: Missing::nothing(),
                    first: false,
                }),
                ended => Err(refusal_of(ended)),
            };
        }
        if let Err(reason) = self.arrange(layout) {
            self.end(Terminal::Aborted(reason));
            return Err(Refusal::LayoutMismatch);
        }
        let first = self.session.replace(session).is_none();
        self.phase = Phase::Receiving;
        self.lane = Some(lane);
        self.heard_at = None;
        Ok(Attached {
            missing: self.parts.missing(),
            first,
        })
    }

    /// Expects the parts of a sender of such a layout, if it may fill the grant.
    fn arrange(&mut self, layout: Layout) -> Result<(), AbortReason> {
        match (layout, self.senders) {
            (Layout::Same, _) => self.parts.arrange(None, 0),
            (Layout::Other(plan), Senders::AnyLayout { tokens, exact }) => {
                if exact {
                    let checked = plan.relayout.check_exact();
                    checked.map_err(|error| AbortReason::Unfit(Box::new(error)))?;
                }
                self.parts.arrange(Some(&plan), tokens);
            }
            (Layout::Unfit(error), Senders::AnyLayout { .. }) => {
                return Err(AbortReason::Unfit(error));
            }
            (Layout::Other(_) | Layout::Unfit(_) | Layout::Unknown, _) => {
                return Err(AbortReason::LayoutMismatch);
            }
        }
        Ok(())
    }

    /// Where a data frame of `lane` goes. Asked again before each read, so that a
    /// frame that was fenced half way ends in scratch.
    pub fn place(&self, lane: LaneSerial, scope: Scope, range: PartRange, len: u32) -> Placement {
        let named = scope.epoch == self.epoch && scope.attempt == self.attempt;
        if !self.may_touch(lane) || (!named && self.limits.protections.fence()) {
            return Placement::Scratch;
        }
        let Some(numbers) = self.parts.numbers(range) else {
            return Placement::Violation;
        };
        let granted: u64 = numbers
            .clone()
            .map(|number| u64::from(self.parts.extent(number).len))
            .sum();
        if granted == u64::from(len) {
            Placement::Blocks(numbers)
        } else {
            Placement::Violation
        }
    }

    /// Whether `lane` is the one that may write now.
    pub fn may_write(&self, lane: LaneSerial) -> bool {
        self.phase == Phase::Receiving && self.lane == Some(lane)
    }

    /// Whether bytes of `lane` may go into blocks now.
    pub fn may_touch(&self, lane: LaneSerial) -> bool {
        self.may_write(lane) || !self.limits.protections.fence()
    }

    /// A data frame is whole. `crcs` are those of its parts, `intact` whether they
    /// agree with the frame's checksum.
    pub fn arrived(
        &mut self,
        lane: LaneSerial,
        numbers: Range<usize>,
        crcs: &[u32],
        intact: bool,
        now: Instant,
    ) -> Arrival {
        if !self.may_write(lane) {
            return Arrival::Dropped;
        }
        if !intact && self.limits.protections.digest() {
            self.corrupt_frames += 1;
            if self.corrupt_frames > self.limits.corrupt_frames_max {
                self.end(Terminal::Aborted(AbortReason::Corrupt));
                return Arrival::Poisoned;
            }
            return Arrival::Corrupt;
        }
        self.first_part_at.get_or_insert(now);
        let mut news = false;
        for (number, &crc) in numbers.zip(crcs) {
            news |= self.parts.receive(number, crc);
        }
        if news {
            Arrival::Stored
        } else {
            Arrival::Duplicate
        }
    }

    /// The sender says that it pushed `parts` parts with the root digest `root`.
    pub fn commit(
        &mut self,
        lane: LaneSerial,
        session: SessionId,
        scope: Scope,
        root: u32,
        parts: u64,
    ) -> CommitAnswer {
        let refused = |refusal| CommitAnswer::Refused {
            refusal,
            ended: false,
        };
        if let Err(refusal) = self.check(session, scope) {
            return refused(refusal);
        }
        match &self.phase {
            Phase::Ended(Terminal::Committed) => return CommitAnswer::Again,
            Phase::Ended(ended) => return refused(refusal_of(ended)),
            Phase::Granted | Phase::Receiving => {}
        }
        if !self.may_write(lane) {
            return refused(Refusal::Fenced);
        }
        let progress = self.parts.progress();
        if !self.parts.is_complete() {
            return CommitAnswer::Missing(self.parts.missing());
        }
        let same = parts == progress.parts_total && root == self.parts.root();
        if !same && self.limits.protections.digest() {
            self.end(Terminal::Aborted(AbortReason::Corrupt));
            return CommitAnswer::Refused {
                refusal: Refusal::Corrupt,
                ended: true,
            };
        }
        self.end(Terminal::Committed);
        CommitAnswer::Committed
    }

    /// The sender gave up. `Ok(true)` if that ended the grant.
    pub fn abort(
        &mut self,
        session: SessionId,
        scope: Scope,
        reason: String,
    ) -> Result<bool, Refusal> {
        self.check(session, scope)?;
        Ok(self.end(Terminal::Aborted(AbortReason::BySender(reason))))
    }

    /// `lane` is gone; the last word over it came at `heard_at`. Whether this grant was
    /// its.
    pub fn lane_lost(&mut self, lane: LaneSerial, heard_at: Instant) -> bool {
        if !self.may_write(lane) {
            return false;
        }
        self.lane = None;
        self.heard_at = Some(heard_at);
        self.lanes_lost += 1;
        true
    }

    /// Ends the grant if its time is over.
    pub fn tick(&mut self, now: Instant) -> Option<ExpiryReason> {
        if self.terminal().is_some() || self.wake_at()? > now {
            return None;
        }
        let reason = if self.deadline <= now {
            ExpiryReason::Deadline
        } else {
            ExpiryReason::LaneLost
        };
        self.end(Terminal::Expired(reason)).then_some(reason)
    }

    /// When [`ReceiverState::tick`] has something to do; `None` once the grant ended.
    pub fn wake_at(&self) -> Option<Instant> {
        if self.terminal().is_some() {
            return None;
        }
        let lease = self.heard_at.map(|heard| heard + self.limits.resume_grace);
        Some(lease.map_or(self.deadline, |lease| lease.min(self.deadline)))
    }

    /// Takes the right to write away. Returns how the grant ended, now or before.
    pub fn fence(&mut self) -> Terminal {
        self.end(Terminal::Fenced);
        self.terminal().cloned().unwrap_or(Terminal::Fenced)
    }

    /// The state of a newer attempt for the same blocks.
    ///
    /// # Errors
    /// Gives back the phase unless it is fenced and still has its blocks: fence it,
    /// wait for its guard, then ask, once.
    pub fn regrant(
        &mut self,
        attempt: Attempt,
        keep_received: bool,
        now: Instant,
        deadline: Duration,
    ) -> Result<Self, Phase> {
        let fenced = self.phase == Phase::Ended(Terminal::Fenced);
        if !fenced || self.parts_taken || attempt <= self.attempt {
            return Err(self.phase.clone());
        }
        let mut parts = self.take_parts();
        if !keep_received {
            parts.clear();
        }
        Ok(
            Self::new(self.epoch, attempt, parts, self.limits, now, deadline)
                .for_senders(self.senders),
        )
    }

    /// Takes the blocks out of an ended grant.
    pub fn take_parts(&mut self) -> PartTable {
        self.parts_taken = true;
        std::mem::replace(&mut self.parts, PartTable::empty())
    }

    /// What to answer a frame of `session` that comes to nothing here.
    pub fn answer_to_stray(&self, session: SessionId, scope: Scope) -> Stray {
        match (self.check(session, scope), &self.phase) {
            (Err(refusal), _) => Stray::Refused(refusal),
            (Ok(()), Phase::Ended(Terminal::Committed)) => Stray::Committed,
            (Ok(()), Phase::Ended(ended)) => Stray::Refused(refusal_of(ended)),
            (Ok(()), Phase::Granted | Phase::Receiving) => Stray::Refused(Refusal::UnknownTicket),
        }
    }

    fn check(&self, session: SessionId, scope: Scope) -> Result<(), Refusal> {
        if self.session.is_some_and(|owner| owner != session) {
            return Err(Refusal::UnknownTicket);
        }
        if scope.epoch != self.epoch || scope.attempt != self.attempt {
            return Err(Refusal::Fenced);
        }
        Ok(())
    }

    /// The only way into a terminal state; whether this call was the one.
    fn end(&mut self, terminal: Terminal) -> bool {
        if self.terminal().is_some() {
            return false;
        }
        self.phase = Phase::Ended(terminal);
        self.lane = None;
        true
    }
}

/// What a sender is told that comes after the end.
pub fn refusal_of(terminal: &Terminal) -> Refusal {
    match terminal {
        Terminal::Committed | Terminal::Fenced => Refusal::Fenced,
        Terminal::Expired(_) => Refusal::Expired,
        Terminal::Aborted(AbortReason::BySender(_)) => Refusal::Aborted,
        Terminal::Aborted(AbortReason::Corrupt) => Refusal::Corrupt,
        Terminal::Aborted(AbortReason::LayoutMismatch | AbortReason::Unfit(_)) => {
            Refusal::LayoutMismatch
        }
    }
}
