//! The receiver's end of one lane, whatever transport carries it.
//!
//! A transport feeds it decoded frames and drains its outbox; everything that a
//! frame means is decided here and in the pure state. Dropping it is the loss of
//! the lane.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use baton_proto::relayout::Fit;
use bytes::Bytes;

use super::Shared;
use super::event::{EventKind, LANE_LOST_EVENTS_MAX};
use super::grant::{AbortReason, Terminal};
use super::incoming::{Arrived, Destination, Incoming};
use super::outbox::Outbox;
use super::relayout::{Plan, Staged};
use super::state::{Arrival, CommitAnswer, LaneSerial, Layout, Placement, Stray};
use super::table::Entry;
use crate::codec::{Control, Header, Scope};
use crate::error::{Error, Refusal};
use crate::part::PartRange;
use crate::sender::TransportKind;
use crate::ticket::{LayoutDigest, SessionId, Ticket};

/// Consumed bytes are acknowledged at least this often, so that the sender's window
/// (tens of MiB) never closes for want of a word.
const ACK_BYTES: u64 = 1 << 20;

struct Opened {
    entry: Arc<Entry>,
    consumed: u64,
    acknowledged: u64,
}

/// The receiver's end of one authenticated lane.
pub(crate) struct ReceiverLane {
    shared: Arc<Shared>,
    serial: LaneSerial,
    session: SessionId,
    outbox: Arc<Outbox>,
    transport: TransportKind,
    /// Tickets this lane opened and may write, bounded by the grant table.
    opened: BTreeMap<Ticket, Opened>,
    /// When the last bytes came over this lane.
    heard_at: Instant,
    /// The layout that the sender described last, and what it comes to.
    described: Option<(Bytes, Layout)>,
    /// Where frames of other layouts stand until they are whole.
    aside: Vec<u8>,
}

impl ReceiverLane {
    pub(crate) fn new(
        shared: Arc<Shared>,
        session: SessionId,
        outbox: Arc<Outbox>,
        transport: TransportKind,
    ) -> Self {
        let heard_at = shared.now();
        let serial = LaneSerial(shared.lane_serials.fetch_add(1, Ordering::Relaxed));
        Self {
            shared,
            serial,
            session,
            outbox,
            transport,
            opened: BTreeMap::new(),
            heard_at,
            described: None,
            aside: Vec::new(),
        }
    }

    pub(crate) fn outbox(&self) -> &Arc<Outbox> {
        &self.outbox
    }

    pub(crate) fn now(&self) -> Instant {
        self.shared.now()
    }

    /// The lane goes on as another transport than it began.
    pub(crate) fn set_transport(&mut self, transport: TransportKind) {
        self.transport = transport;
    }

    /// The last bytes came at `at`.
    pub(crate) fn heard(&mut self, at: Instant) {
        self.heard_at = at;
    }

    /// Handles a frame without block bytes.
    ///
    /// # Errors
    /// [`Error::Protocol`] for a frame that a sender never sends; close the lane.
    pub(crate) fn control(&mut self, scope: Scope, control: Control) -> Result<(), Error> {
        match control {
            Control::Ping => self.outbox.push(scope, Control::Pong),
            Control::Pong => {}
            Control::Open { layout } => {
                let layout = self.layout_of(layout);
                self.open(scope, layout);
            }
            Control::OpenAs { layout } => {
                let layout = self.layout_described(layout);
                self.open(scope, layout);
            }
            Control::Commit {
                root,
                parts,
                payload,
            } => self.commit(scope, root, parts, payload),
            Control::Abort { reason } => self.abort(scope, reason),
            other => {
                return Err(Error::Protocol(format!(
                    "a sender sent `{:?}`",
                    other.kind()
                )));
            }
        }
        Ok(())
    }

    fn layout_of(&self, digest: LayoutDigest) -> Layout {
        if digest == self.shared.config.layout {
            Layout::Same
        } else {
            Layout::Unknown
        }
    }

    fn layout_described(&mut self, text: Bytes) -> Layout {
        let Some(others) = &self.shared.config.other_layouts else {
            return Layout::Unknown;
        };
        if let Some((known, layout)) = &self.described
            && *known == text
        {
            return layout.clone();
        }
        let layout = match Plan::new(&text, others) {
            Ok(plan) if plan.relayout.fit() == Fit::Same => Layout::Same,
            Ok(plan) => Layout::Other(Arc::new(plan)),
            Err(error) => Layout::Unfit(Box::new(error)),
        };
        self.described = Some((text, layout.clone()));
        layout
    }

    fn open(&mut self, scope: Scope, layout: Layout) {
        let Some(entry) = self.shared.entry(scope.ticket) else {
            return self
                .outbox
                .push(scope, Control::Refused(Refusal::UnknownTicket));
        };
        // A lane that is replaced may be inside its last read.
        let mut inner = entry.lock_unguarded();
        let live_before = inner.state.terminal().is_none();
        match inner.state.attach(self.serial, self.session, scope, layout) {
            Ok(attached) => {
                inner.outbox = Some(Arc::clone(&self.outbox));
                if attached.first {
                    entry.emit(&inner, &*self.shared.events, EventKind::Started);
                }
                drop(inner);
                // What is consumed counts from the answer on, at both ends: a sender that
                // asks again on the same lane sends nothing until it is answered.
                let opened = Opened {
                    entry,
                    consumed: 0,
                    acknowledged: 0,
                };
                self.opened.insert(scope.ticket, opened);
                self.outbox.push(scope, Control::Opened(attached.missing));
            }
            Err(refusal) => {
                let terminal = inner.state.terminal().filter(|_| live_before).cloned();
                drop(inner);
                if let Some(Terminal::Aborted(reason)) = terminal {
                    self.shared.finish_aborted(&entry, reason);
                }
                self.outbox.push(scope, Control::Refused(refusal));
            }
        }
    }

    fn commit(&mut self, scope: Scope, root: u32, parts: u64, payload: Bytes) {
        let Some(entry) = self.shared.entry(scope.ticket) else {
            return self
                .outbox
                .push(scope, Control::Refused(Refusal::UnknownTicket));
        };
        let answer = entry
            .lock()
            .state
            .commit(self.serial, self.session, scope, root, parts);
        let reply = match answer {
            CommitAnswer::Committed => {
                self.shared
                    .finish_committed(&entry, payload, self.transport);
                Control::Committed
            }
            CommitAnswer::Again => Control::Committed,
            CommitAnswer::Missing(missing) => Control::Missing(missing),
            CommitAnswer::Refused { refusal, ended } => {
                if ended {
                    let reason = entry.lock().state.terminal().cloned();
                    if let Some(Terminal::Aborted(reason)) = reason {
                        self.shared.finish_aborted(&entry, reason);
                    }
                }
                Control::Refused(refusal)
            }
        };
        self.outbox.push(scope, reply);
    }

    fn abort(&mut self, scope: Scope, reason: String) {
        if let Some(entry) = self.shared.entry(scope.ticket) {
            let ended = entry
                .lock()
                .state
                .abort(self.session, scope, reason.clone());
            if ended == Ok(true) {
                self.shared
                    .finish_aborted(&entry, AbortReason::BySender(reason));
            }
        }
        self.opened.remove(&scope.ticket);
        // Whatever was known here, nothing of it is left: the sender may stop repeating.
        self.outbox.push(scope, Control::Aborted);
    }

    /// Decides where the payload of a data frame goes.
    ///
    /// # Errors
    /// [`Error::Protocol`] if the frame names parts that were not granted; close the lane.
    pub(crate) fn data(&mut self, header: Header) -> Result<Incoming, Error> {
        let regions = Arc::clone(&self.shared.regions);
        let Some(opened) = self.opened.get(&header.scope.ticket) else {
            self.outbox.push(header.scope, self.answer(header.scope));
            return Ok(Incoming::unwanted(regions, header));
        };
        let inner = opened.entry.lock();
        match inner
            .state
            .place(self.serial, header.scope, header.range, header.payload_len)
        {
            Placement::Scratch => Ok(Incoming::unwanted(regions, header)),
            Placement::Violation => Err(Error::Protocol(format!(
                "`{}` bytes for `{:?}` were not granted",
                header.payload_len, header.range
            ))),
            Placement::Blocks(numbers) => {
                let parts = inner.state.parts();
                let slots = numbers
                    .clone()
                    .map(|number| (parts.extent(number), !parts.is_received(number)));
                let destination = Destination {
                    entry: Arc::clone(&opened.entry),
                    lane: self.serial,
                    numbers: numbers.clone(),
                };
                let incoming = Incoming::placed(regions, header, destination, slots);
                let Some(plan) = parts.plan() else {
                    return Ok(incoming);
                };
                let targets = numbers.map(|number| match parts.is_received(number) {
                    true => Vec::new(),
                    false => parts.targets(number),
                });
                let buffer = std::mem::take(&mut self.aside);
                let len = header.payload_len as usize;
                let staged = Staged::new(Arc::clone(plan), buffer, len, targets.collect());
                Ok(incoming.aside(staged))
            }
        }
    }

    /// The answer to a data frame of a ticket that this lane has not open (any more).
    fn answer(&self, scope: Scope) -> Control {
        let Some(entry) = self.shared.entry(scope.ticket) else {
            return Control::Refused(Refusal::UnknownTicket);
        };
        match entry.lock().state.answer_to_stray(self.session, scope) {
            Stray::Committed => Control::Committed,
            Stray::Refused(refusal) => Control::Refused(refusal),
        }
    }

    /// Takes note of a whole data frame.
    pub(crate) fn finish(&mut self, incoming: Incoming) {
        let now = self.shared.now();
        let Header {
            scope,
            range,
            payload_len,
            ..
        } = incoming.header;
        let counters = &self.shared.counters;
        counters.frames.fetch_add(1, Ordering::Relaxed);
        counters
            .bytes
            .fetch_add(u64::from(payload_len), Ordering::Relaxed);
        counters
            .bytes_scratched
            .fetch_add(incoming.scratched, Ordering::Relaxed);
        if let Some(arrived) = incoming.arrived() {
            self.arrived(scope, range, arrived, now);
        }
        if let Some(opened) = self.opened.get_mut(&scope.ticket) {
            opened.consumed += u64::from(payload_len);
            if opened.consumed - opened.acknowledged >= ACK_BYTES {
                Self::acknowledge(&self.outbox, scope, opened);
            }
        }
    }

    fn arrived(&mut self, scope: Scope, range: PartRange, arrived: Arrived, now: Instant) {
        let Arrived {
            destination,
            crcs,
            intact,
            staged,
        } = arrived;
        let Destination {
            entry,
            lane,
            numbers,
        } = destination;
        let counters = &self.shared.counters;
        if let Some(staged) = staged {
            // Nothing of a damaged frame reaches a block.
            let counts = intact || !self.shared.config.protections.digest();
            let written = !counts || staged.write(&self.shared.regions, &entry, lane);
            self.aside = staged.into_buffer();
            if !written {
                return;
            }
        }
        let arrival = entry
            .lock()
            .state
            .arrived(lane, numbers, &crcs, intact, now);
        match arrival {
            Arrival::Stored | Arrival::Dropped => {}
            Arrival::Duplicate => {
                counters.frames_duplicate.fetch_add(1, Ordering::Relaxed);
            }
            Arrival::Corrupt => {
                counters.frames_corrupt.fetch_add(1, Ordering::Relaxed);
                self.outbox.push(scope, Control::Nack(range));
            }
            Arrival::Poisoned => {
                counters.frames_corrupt.fetch_add(1, Ordering::Relaxed);
                self.shared.finish_aborted(&entry, AbortReason::Corrupt);
                self.outbox.push(scope, Control::Refused(Refusal::Corrupt));
            }
        }
    }

    /// Called when the transport has nothing to read for now: acknowledges the rest.
    pub(crate) fn idle(&mut self) {
        for opened in self.opened.values_mut() {
            if opened.consumed > opened.acknowledged {
                Self::acknowledge(&self.outbox, opened.entry.scope, opened);
            }
        }
        self.opened
            .retain(|_, opened| opened.entry.lock().state.may_write(self.serial));
    }

    fn acknowledge(outbox: &Outbox, scope: Scope, opened: &mut Opened) {
        opened.acknowledged = opened.consumed;
        outbox.push(
            scope,
            Control::Ack {
                consumed: opened.consumed,
            },
        );
    }
}

impl Drop for ReceiverLane {
    fn drop(&mut self) {
        for opened in self.opened.values() {
            let mut inner = opened.entry.lock();
            if !inner.state.lane_lost(self.serial, self.heard_at) {
                continue;
            }
            inner.outbox = None;
            self.shared
                .counters
                .lanes_lost
                .fetch_add(1, Ordering::Relaxed);
            if inner.state.lanes_lost() <= LANE_LOST_EVENTS_MAX {
                opened
                    .entry
                    .emit(&inner, &*self.shared.events, EventKind::LaneLost);
            }
        }
        self.shared.reaper_bell.ring();
    }
}

/// A grant's durations as its `Completed` event reports them.
pub(super) fn durations(
    granted_at: Instant,
    first_part_at: Option<Instant>,
    now: Instant,
) -> (Duration, Duration) {
    let since = |start: Instant| now.saturating_duration_since(start);
    (
        since(granted_at),
        first_part_at.map_or(Duration::ZERO, since),
    )
}
