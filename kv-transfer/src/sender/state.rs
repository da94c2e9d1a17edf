//! The sending side of one attempt, as a pure state machine.
//!
//! It owns no socket, clock, task or memory. The worker's calls and the lane's
//! frames are its events; [`SenderState::next_frame`], [`SenderState::next_commit`]
//! and [`SenderState::abort_to_send`] say what to send. The receiver's word about
//! what is missing overrides everything remembered here.
//!
//! ```text
//!         opened by the receiver     all sent, commit asked        accepted
//!  Open ------------------------> Sending ---------------> CommitSent --------> Acked
//!    |                             ^  |  ^                  |  |
//!    |                             |  |  |  parts missing   |  |
//!    |                             |  |  +------------------+  |
//!    |       lane lost, opened anew|  |      lane lost         |
//!    |                             +--+------------------------+
//!    |                                |
//!    +--------------------------------+--> Aborted: by the worker, refused, or peer lost
//! ```
//! The two on the right are terminal; a second terminal transition has no effect.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use baton_proto::kv_layout::ByteExtent;
use bytes::Bytes;

use super::SourceBlock;
use super::gather::{Gathering, LinkSpeed};
use super::parts::{Part, PartPhase, Parts};
pub use super::plan::{CommitPlan, FramePlan, NextFrame};
use super::window::Window;
use crate::codec::{COALESCE_BYTES, FRAME_PARTS_MAX};
use crate::error::{Error, Refusal};
use crate::part::{Missing, PartKey, PartRange, RootDigest};

/// An `Open`, `Commit` or `Abort` that stays unanswered is said again after this.
/// A lane loses nothing while it lives, so this is rare and need not be fast.
const REPEAT_AFTER: Duration = Duration::from_millis(500);

/// Why a transfer ended without acceptance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AbortCause {
    /// The worker's own words.
    Local(String),
    Refused(Refusal),
    PeerLost(String),
}

/// Where a transfer is in its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The receiver has not said what it lacks.
    Open,
    Sending,
    CommitSent,
    Acked,
    Aborted(AbortCause),
}

/// Limits of one transfer.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub queue_parts_max: usize,
    pub queue_bytes_max: u64,
    pub in_flight_bytes_max: u64,
    pub in_flight_parts_max: usize,
    /// A receiver not heard of for longer, with no lane to it, is lost.
    pub reconnect_max: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    Down,
    /// `Open` was sent; the answer is awaited.
    Opening,
    Up,
}

/// Running totals of a transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub bytes_sent: u64,
    pub bytes_resent: u64,
    pub lanes_lost: u32,
}

/// The sending side of one attempt.
pub struct SenderState {
    phase: Phase,
    link: Link,
    /// When the receiver was last known to live, on lanes that are gone.
    heard_at: Instant,
    /// The receiver has answered once.
    reached: bool,
    /// Why no lane has come up since, as far as that is known.
    no_lane: Option<String>,
    limits: Limits,
    deadline: Instant,
    parts: Parts,
    /// Bytes of every part on the wire, if that is not what it has in memory.
    part_bytes: Option<u32>,
    /// Ranges of queued parts, in the order in which they were pushed or asked for.
    queue: VecDeque<PartRange>,
    queued_parts: usize,
    queued_bytes: u64,
    /// The link as its lane knows it.
    link_speed: LinkSpeed,
    gathering: Gathering,
    /// What the receiver lacked when it opened this lane: parts pushed later are
    /// checked against it.
    wanted: Missing,
    commit: Option<Bytes>,
    window: Window,
    /// When an `Open`, `Commit` or `Abort` that awaits its answer went out on this lane.
    said_at: Option<Instant>,
    /// An abort that the receiver has not heard.
    abort_reason: Option<String>,
    totals: Totals,
}

impl SenderState {
    /// A transfer without a lane.
    pub fn new(limits: Limits, now: Instant, deadline: Duration) -> Self {
        Self {
            phase: Phase::Open,
            link: Link::Down,
            heard_at: now,
            reached: false,
            no_lane: None,
            limits,
            deadline: now + deadline,
            parts: Parts::default(),
            part_bytes: None,
            queue: VecDeque::new(),
            queued_parts: 0,
            queued_bytes: 0,
            link_speed: LinkSpeed::default(),
            gathering: Gathering::Idle,
            wanted: Missing::nothing(),
            commit: None,
            window: Window::new(limits.in_flight_bytes_max, limits.in_flight_parts_max, now),
            abort_reason: None,
            said_at: None,
            totals: Totals::default(),
        }
    }

    /// Every part has so many bytes on the wire. Before anything is pushed.
    pub fn set_part_bytes(&mut self, bytes: Option<u32>) {
        self.part_bytes = bytes;
    }

    pub fn phase(&self) -> &Phase {
        &self.phase
    }

    pub fn is_ended(&self) -> bool {
        matches!(self.phase, Phase::Acked | Phase::Aborted(_))
    }

    /// Whether the receiver has answered.
    pub fn was_reached(&self) -> bool {
        self.reached
    }

    pub fn totals(&self) -> Totals {
        self.totals
    }

    pub fn parts(&self) -> u64 {
        self.parts.len() as u64
    }

    /// Whether `push` may take more.
    pub fn has_room(&self) -> bool {
        self.queued_parts < self.limits.queue_parts_max
            && self.queued_bytes < self.limits.queue_bytes_max
    }

    /// What the lane has seen of its link.
    pub fn set_link(&mut self, speed: LinkSpeed) {
        self.link_speed = speed;
    }

    /// What all bytes sent would need at once, nothing else between; `None` while the link
    /// is unknown.
    pub fn at_link_speed(&self) -> Option<Duration> {
        self.link_speed.time_for(self.totals.bytes_sent)
    }

    /// Whether the lane has to look at what was queued last: a group is full, or nobody
    /// waits for it to become so.
    pub fn needs_a_look(&self) -> bool {
        self.gathering.due().is_none() || self.group_is_full()
    }

    fn group_is_full(&self) -> bool {
        // Half a queue at most, so that holding never makes a pusher wait.
        let Limits {
            queue_bytes_max,
            queue_parts_max,
            ..
        } = self.limits;
        self.commit.is_some()
            || self.queued_bytes >= self.link_speed.group_bytes().min(queue_bytes_max / 2)
            || self.queued_parts >= queue_parts_max.div_ceil(2)
    }

    /// Queues blocks of one layer, all or none.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a part pushed before or after the commit was asked for.
    pub fn push(&mut self, group: u16, layer: u32, blocks: &[SourceBlock]) -> Result<(), Error> {
        if self.commit.is_some() {
            return Err(Error::Invalid(
                "a block was pushed after the commit".to_owned(),
            ));
        }
        let mut blocks = blocks.to_vec();
        blocks.sort_unstable_by_key(|block| block.ordinal);
        let twice = blocks
            .windows(2)
            .find(|pair| pair[0].ordinal == pair[1].ordinal)
            .map(|pair| pair[0].ordinal)
            .or_else(|| self.parts.known(group, layer, &blocks));
        if let Some(ordinal) = twice {
            return Err(Error::Invalid(format!(
                "block `{ordinal}` of layer `{layer}` was pushed twice"
            )));
        }
        let mut parts = Vec::with_capacity(blocks.len());
        for block in blocks {
            let key = PartKey {
                group,
                layer,
                ordinal: block.ordinal,
            };
            let held = self.link == Link::Up && !self.wanted.contains(key);
            let phase = if held {
                PartPhase::Held
            } else {
                PartPhase::Queued
            };
            parts.push(Part::new(block, phase));
            if !held {
                self.enqueue(key, self.part_bytes.unwrap_or(block.extent.len));
            }
        }
        self.parts.insert(group, layer, parts.into_iter());
        Ok(())
    }

    /// Everything was pushed.
    pub fn commit(&mut self, payload: Bytes) {
        if !self.is_ended() {
            self.commit.get_or_insert(payload);
        }
    }

    /// A lane is there.
    pub fn connected(&mut self) {
        self.link = Link::Opening;
        self.no_lane = None;
        self.said_at = None;
    }

    /// No lane came up this time, and why. Another one will be tried, unless that is
    /// `hopeless`: a receiver that was never reached is lost then.
    pub fn lane_failed(&mut self, reason: &str, hopeless: bool) {
        if hopeless && !self.reached {
            self.peer_lost(&format!("no lane comes up: {reason}"));
        }
        self.no_lane = Some(reason.to_owned());
    }

    /// Whether to send `Open` now.
    pub fn open_to_send(&mut self, now: Instant) -> bool {
        self.link == Link::Opening && !self.is_ended() && self.say(now)
    }

    /// Whether to say now what is not said yet on this lane, or not answered for long.
    fn say(&mut self, now: Instant) -> bool {
        let due = self.said_at.is_none_or(|said| said + REPEAT_AFTER <= now);
        if due {
            self.said_at = Some(now);
        }
        due
    }

    /// The receiver said what it lacks.
    pub fn opened(&mut self, missing: Missing, now: Instant) {
        if self.is_ended() || self.link != Link::Opening {
            return;
        }
        self.phase = Phase::Sending;
        self.reached = true;
        self.link = Link::Up;
        self.said_at = None;
        self.window.restart(now);
        self.queue.clear();
        self.queued_parts = 0;
        self.queued_bytes = 0;
        let mut queued = Vec::new();
        for (key, part) in self.parts.iter_mut() {
            if missing.contains(key) {
                part.phase = PartPhase::Queued;
                queued.push((key, self.part_bytes.unwrap_or(part.extent.len)));
            } else {
                part.phase = PartPhase::Held;
            }
        }
        self.gathering = match queued.is_empty() {
            true => Gathering::Idle,
            false => Gathering::Leaving,
        };
        queued
            .into_iter()
            .for_each(|(key, len)| self.enqueue(key, len));
        self.wanted = missing;
    }

    /// The lane is gone; the last word over it came at `heard_at`. Unless ended, the
    /// transfer waits for another one.
    pub fn lane_lost(&mut self, heard_at: Instant) {
        if self.link != Link::Down {
            self.link = Link::Down;
            self.heard_at = self.heard_at.max(heard_at);
            self.said_at = None;
            self.totals.lanes_lost += 1;
            if self.phase == Phase::CommitSent {
                self.phase = Phase::Sending;
            }
        }
    }

    /// The next consecutive queued parts that the window has room for, unless that are
    /// more than `budget` bytes.
    pub fn next_frame(&mut self, budget: u64, now: Instant) -> NextFrame {
        if self.link != Link::Up || self.is_ended() || self.window_is_full() {
            return NextFrame::Nothing;
        }
        let Some(head) = self.queue.front().copied() else {
            return NextFrame::Nothing;
        };
        if !self.gathering.leaves(self.group_is_full(), now) {
            return NextFrame::Nothing;
        }
        let (bytes_room, parts_room) = self.window.room();
        let bytes_max = bytes_room.min(COALESCE_BYTES as u64);
        let parts_max = parts_room.clamp(1, FRAME_PARTS_MAX as usize);
        let mut plan = FramePlan {
            range: PartRange { count: 0, ..head },
            extents: Vec::new(),
            bytes: 0,
        };
        let candidates = PartRange {
            count: head.count.min(parts_max as u32),
            ..head
        };
        for part in self.parts.run(candidates) {
            let bytes = plan.bytes + u64::from(self.part_bytes.unwrap_or(part.extent.len));
            if plan.range.count > 0 && bytes > bytes_max {
                break;
            }
            plan.bytes = bytes;
            plan.range.count += 1;
            plan.extents.push(part.extent);
        }
        if plan.bytes > budget {
            return NextFrame::Later;
        }
        for part in self.parts.run_mut(plan.range) {
            part.phase = PartPhase::Sent;
            if std::mem::replace(&mut part.sent_before, true) {
                let bytes = self.part_bytes.unwrap_or(part.extent.len);
                self.totals.bytes_resent += u64::from(bytes);
            }
        }
        self.queued_parts -= plan.range.count as usize;
        self.queued_bytes -= plan.bytes;
        self.window.sent(plan.bytes, plan.extents.len(), now);
        self.totals.bytes_sent += plan.bytes;
        self.queue.pop_front();
        if plan.range.count < head.count {
            self.queue.push_front(PartRange {
                first: head.first + plan.range.count,
                count: head.count - plan.range.count,
                ..head
            });
        }
        if self.queue.is_empty() {
            self.gathering = Gathering::Idle;
        }
        NextFrame::Frame(plan)
    }

    /// Whether the window keeps the next frame from leaving.
    fn window_is_full(&self) -> bool {
        let Some(head) = self.queue.front() else {
            return false;
        };
        let first = self.parts.run(PartRange { count: 1, ..*head }).first();
        let bytes = first.map(|part| self.part_bytes.unwrap_or(part.extent.len));
        bytes.is_some_and(|bytes| self.window.is_full(bytes))
    }

    /// When to ask what is missing, because the window stays full.
    fn stalls_at(&self) -> Option<Instant> {
        let sending = self.link == Link::Up && self.phase == Phase::Sending;
        (sending && self.window_is_full()).then(|| self.window.stalls_at())
    }

    /// The checksums of parts, computed from their bytes.
    pub fn checksums(&mut self, range: PartRange, crcs: &[u32]) {
        self.parts.set_checksums(range, crcs);
    }

    /// Once a commit is due: parts whose checksums are still unknown because the
    /// receiver had them all along.
    pub fn next_unchecked(&self) -> Option<(PartRange, Vec<ByteExtent>)> {
        if !self.commit_is_due() {
            return None;
        }
        let (range, parts) = self.parts.unchecked(FRAME_PARTS_MAX)?;
        Some((range, parts.iter().map(|part| part.extent).collect()))
    }

    /// The commit, once everything pushed was sent and its checksums are known.
    pub fn next_commit(&mut self, now: Instant) -> Option<CommitPlan> {
        let unanswered =
            self.phase == Phase::CommitSent && self.link == Link::Up && self.queue.is_empty();
        if !(self.commit_is_due() || unanswered) || !self.say(now) {
            return None;
        }
        let payload = self.commit.clone()?;
        let mut digest = RootDigest::new();
        for (key, part) in self.parts.iter() {
            digest.part(key, part.crc()?);
        }
        self.phase = Phase::CommitSent;
        Some(CommitPlan {
            root: digest.value(),
            parts: self.parts.len() as u64,
            payload,
        })
    }

    fn commit_is_due(&self) -> bool {
        self.link == Link::Up
            && self.phase == Phase::Sending
            && self.commit.is_some()
            && self.queue.is_empty()
    }

    /// The receiver has read `consumed` payload bytes of this lane.
    ///
    /// Returns how many bytes were consumed since some were under way without a pause, and
    /// in which time.
    pub fn acknowledged(&mut self, consumed: u64, now: Instant) -> Option<(u64, Duration)> {
        self.window.acknowledged(consumed, now)
    }

    /// A frame arrived damaged.
    pub fn damaged(&mut self, range: PartRange) {
        if self.link == Link::Up && !self.is_ended() {
            range
                .keys()
                .take(FRAME_PARTS_MAX as usize)
                .for_each(|key| self.requeue(key));
        }
    }

    /// The commit came before these parts.
    pub fn missing(&mut self, missing: &Missing) {
        if self.phase != Phase::CommitSent {
            return;
        }
        self.phase = Phase::Sending;
        self.said_at = None;
        let keys = self.parts.iter().map(|(key, _)| key);
        let keys: Vec<PartKey> = keys.filter(|key| missing.contains(*key)).collect();
        keys.into_iter().for_each(|key| self.requeue(key));
        if self.queue.is_empty() {
            let cause = AbortCause::Refused(Refusal::Incomplete);
            self.abort_with(cause, "blocks were never pushed");
        }
    }

    /// The receiver accepted. Whether that was news.
    pub fn committed(&mut self) -> bool {
        self.phase == Phase::CommitSent && self.end(Phase::Acked)
    }

    /// The receiver will not take this attempt.
    pub fn refused(&mut self, refusal: Refusal) -> bool {
        self.end(Phase::Aborted(AbortCause::Refused(refusal)))
    }

    /// The worker gives up.
    pub fn abort(&mut self, reason: &str) -> bool {
        self.abort_with(AbortCause::Local(reason.to_owned()), reason)
    }

    /// Nothing will be heard from the receiver any more.
    pub fn peer_lost(&mut self, reason: &str) -> bool {
        self.abort_with(AbortCause::PeerLost(reason.to_owned()), reason)
    }

    fn abort_with(&mut self, cause: AbortCause, reason: &str) -> bool {
        let ended = self.end(Phase::Aborted(cause));
        if ended {
            self.abort_reason = Some(reason.to_owned());
        }
        ended
    }

    /// The reason to put into an `Abort` frame now.
    pub fn abort_to_send(&mut self, now: Instant) -> Option<String> {
        if self.link == Link::Down {
            return None;
        }
        let reason = self.abort_reason.clone()?;
        self.say(now).then_some(reason)
    }

    /// The receiver heard the abort.
    pub fn abort_heard(&mut self) {
        self.abort_reason = None;
    }

    /// Whether the transfer still has something to say or to hear: an abort is repeated
    /// until the receiver heard it or is lost.
    pub fn wants_lane(&self, now: Instant) -> bool {
        !self.is_ended() || (self.abort_reason.is_some() && !self.is_out_of_reach(now))
    }

    fn is_out_of_reach(&self, now: Instant) -> bool {
        self.link == Link::Down && now >= self.heard_at + self.limits.reconnect_max
    }

    /// Ends the transfer if its time is over; whether it did.
    pub fn tick(&mut self, now: Instant) -> bool {
        if self.is_ended() {
            return false;
        }
        if now >= self.deadline {
            return self.peer_lost("the transfer's deadline passed");
        }
        if self.is_out_of_reach(now) {
            let reason = match &self.no_lane {
                Some(reason) => format!("no lane came up in time: {reason}"),
                None => "no lane came up in time".to_owned(),
            };
            return self.peer_lost(&reason);
        }
        if self.stalls_at().is_some_and(|at| at <= now) {
            self.link = Link::Opening;
            self.said_at = None;
        }
        false
    }

    /// When time alone may change what to do or say.
    pub fn wake_at(&self) -> Option<Instant> {
        let ended = self.is_ended();
        if ended && self.abort_reason.is_none() {
            return None;
        }
        let deadline = (!ended).then_some(self.deadline);
        let lost = (self.link == Link::Down).then(|| self.heard_at + self.limits.reconnect_max);
        let again = self.said_at.map(|said| said + REPEAT_AFTER);
        let held = match self.link {
            Link::Up if !ended => self.gathering.due(),
            _ => None,
        };
        let times = [deadline, lost, again, held, self.stalls_at()];
        times.into_iter().flatten().min()
    }

    fn requeue(&mut self, key: PartKey) {
        let only = PartRange {
            group: key.group,
            layer: key.layer,
            first: key.ordinal,
            count: 1,
        };
        if let Some(part) = self.parts.run_mut(only).first_mut()
            && part.phase != PartPhase::Queued
        {
            part.phase = PartPhase::Queued;
            let len = self.part_bytes.unwrap_or(part.extent.len);
            self.enqueue(key, len);
            // It was due before.
            self.gathering = Gathering::Leaving;
        }
    }

    fn enqueue(&mut self, key: PartKey, len: u32) {
        self.queued_parts += 1;
        self.queued_bytes += u64::from(len);
        match self.queue.back_mut() {
            Some(last)
                if (last.group, last.layer) == (key.group, key.layer)
                    && last.first.checked_add(last.count) == Some(key.ordinal) =>
            {
                last.count += 1;
            }
            _ => self.queue.push_back(PartRange {
                group: key.group,
                layer: key.layer,
                first: key.ordinal,
                count: 1,
            }),
        }
    }

    /// The only way into a terminal phase; whether this call was the one.
    fn end(&mut self, phase: Phase) -> bool {
        if self.is_ended() {
            return false;
        }
        self.phase = phase;
        self.said_at = None;
        self.queue.clear();
        self.queued_parts = 0;
        self.queued_bytes = 0;
        true
    }
}
