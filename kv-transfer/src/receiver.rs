//! The receiving side: a table of grants that lanes write into.
//!
//! The worker grants reserved blocks to one attempt of one request and passes the
//! ticket to the sender. Lanes (of any transport) look the ticket up, take the
//! write guard for one non-blocking read at a time, and report what arrived. The
//! pure states are in [`state`]; this file only adds the lock, the guard and the
//! clock. It decides nothing about retries or placement.
//!
//! Ownership of the granted blocks:
//! ```text
//! grant ------> lanes may write ------> Completed / Aborted / Expired event: worker's again
//!                    |
//!                    +-- revoke -> (guard gone) -> returns: worker's again
//! ```

pub mod event;
pub mod grant;
pub(crate) mod incoming;
pub(crate) mod lane;
pub(crate) mod outbox;
pub mod parts;
pub mod protections;
pub mod relayout;
pub mod state;
mod table;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use baton_proto::Epoch;
use bytes::Bytes;

pub use event::{Event, EventKind, EventSink};
pub use grant::{
    AbortReason, BlockGrant, ExpiryReason, Grant, GrantRequest, GroupGrant, Progress, Regrant,
    RegrantRequest, Senders, Terminal,
};
pub use protections::Protections;
pub use relayout::{Convert, Converters, OtherLayouts};
pub use state::ReceiverState;

use crate::codec::{Control, Scope};
use crate::environment::Environment;
use crate::error::{Error, Refusal};
use crate::region::{self, RegionTable};
use crate::sender::TransportKind;
use crate::ticket::{LaneKey, LayoutDigest, ProcessToken, Ticket};
use crate::transport::loopback;
use crate::wake::{Bell, lock};
use state::{Limits, Phase};
use table::{Entry, Table};

/// How a receiver is set up.
#[derive(Clone, Debug)]
pub struct ReceiverConfig {
    /// This worker's life. Grants and frames of another one are refused.
    pub epoch: Epoch,
    /// Senders with another digest are refused when they open a ticket.
    pub layout: LayoutDigest,
    /// What it takes to let senders of other layouts fill grants. Default `None`.
    pub other_layouts: Option<OtherLayouts>,
    /// One region per KV group.
    pub regions: RegionTable,
    /// What lanes authenticate with.
    pub lane_key: LaneKey,
    /// The lease: how long a grant whose lane is lost outlives the last word over that
    /// lane. Default 1.5 s.
    pub resume_grace: Duration,
    /// Live grants at once; more are refused with [`Error::Full`]. Default 4096.
    pub grants_max: usize,
    /// Payloads with a wrong checksum one grant survives; the next one aborts it.
    /// Default 3.
    pub corrupt_frames_max: u32,
    /// Whether senders of this process may copy directly. Default true.
    pub loopback: bool,
    /// Time and chance. Default: the system's.
    pub environment: Environment,
    /// Default: all. Only tests can change that.
    pub protections: Protections,
}

impl ReceiverConfig {
    /// The defaults, with a fresh lane key.
    pub fn new(epoch: Epoch, layout: LayoutDigest, regions: RegionTable) -> Self {
        Self {
            epoch,
            layout,
            other_layouts: None,
            regions,
            lane_key: LaneKey::random(),
            resume_grace: Duration::from_millis(1500),
            grants_max: 4096,
            corrupt_frames_max: 3,
            loopback: true,
            environment: Environment::default(),
            protections: Protections::ALL,
        }
    }
}

/// What a receiver has seen, as totals since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiverStatistics {
    pub grants: u64,
    pub committed: u64,
    pub aborted: u64,
    pub expired: u64,
    pub fenced: u64,
    pub lanes_lost: u64,
    pub frames: u64,
    pub frames_duplicate: u64,
    pub frames_corrupt: u64,
    /// Payload bytes read, wanted or not.
    pub bytes: u64,
    /// Payload bytes that nobody wanted.
    pub bytes_scratched: u64,
}

#[derive(Default)]
pub(crate) struct Counters {
    grants: AtomicU64,
    committed: AtomicU64,
    aborted: AtomicU64,
    expired: AtomicU64,
    fenced: AtomicU64,
    lanes_lost: AtomicU64,
    frames: AtomicU64,
    frames_duplicate: AtomicU64,
    frames_corrupt: AtomicU64,
    bytes: AtomicU64,
    bytes_scratched: AtomicU64,
}

/// What lanes and handles share.
pub(crate) struct Shared {
    pub(crate) config: ReceiverConfig,
    pub(crate) regions: Arc<RegionTable>,
    process_token: ProcessToken,
    events: Box<dyn EventSink>,
    table: Mutex<Table>,
    lane_serials: AtomicU64,
    counters: Counters,
    /// Rung when a grant may have to expire earlier than the reaper thinks.
    reaper_bell: Bell,
    stopping: AtomicBool,
}

impl Shared {
    fn new(config: ReceiverConfig, events: Box<dyn EventSink>) -> Result<Arc<Self>, Error> {
        Ok(Arc::new(Self {
            regions: Arc::new(config.regions.clone()),
            process_token: ProcessToken::random(),
            events,
            table: Mutex::default(),
            lane_serials: AtomicU64::new(1),
            counters: Counters::default(),
            reaper_bell: Bell::new().map_err(|error| Error::io("create an eventfd", error))?,
            stopping: AtomicBool::new(false),
            config,
        }))
    }

    pub(crate) fn now(&self) -> Instant {
        self.config.environment.now()
    }

    fn entry(&self, ticket: Ticket) -> Option<Arc<Entry>> {
        lock(&self.table).get(ticket)
    }

    /// Gives the blocks of a committed grant back and says so.
    fn finish_committed(&self, entry: &Entry, commit_payload: Bytes, transport: TransportKind) {
        self.retire(entry, &self.counters.committed);
        let mut inner = entry.lock_unguarded();
        let bytes = inner.state.progress().bytes_received;
        let foreign = !inner.state.parts().fills_as_its_own();
        let (duration, receiving) = lane::durations(
            inner.state.granted_at(),
            inner.state.first_part_at(),
            self.now(),
        );
        inner.state.take_parts();
        let what = EventKind::Completed {
            commit_payload,
            bytes,
            duration,
            receiving,
            transport,
            foreign,
        };
        entry.emit(&inner, &*self.events, what);
    }

    fn finish_aborted(&self, entry: &Entry, reason: AbortReason) {
        self.retire(entry, &self.counters.aborted);
        let mut inner = entry.lock_unguarded();
        inner.state.take_parts();
        entry.emit(&inner, &*self.events, EventKind::Aborted { reason });
    }

    /// Moves an ended grant out of the live ones, before its event is sent: who hears
    /// the event may grant again at once. Takes the table's lock, so no entry may be
    /// locked by the caller.
    fn retire(&self, entry: &Entry, counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
        let ended_max = self.config.grants_max.saturating_mul(4);
        lock(&self.table).retire(entry.scope.ticket, ended_max, self.now());
    }

    /// Takes the right to write away and tells the sender.
    fn fence(&self, entry: &Entry) -> Terminal {
        let mut inner = entry.lock();
        let live = inner.state.terminal().is_none();
        let terminal = inner.state.fence();
        let outbox = inner.outbox.take();
        drop(inner);
        if live {
            self.retire(entry, &self.counters.fenced);
            if let Some(outbox) = outbox {
                outbox.push(entry.scope, Control::Refused(Refusal::Fenced));
            }
        }
        terminal
    }

    /// Expires what is due; returns when to look again.
    pub(crate) fn reap(&self, now: Instant) -> Duration {
        let mut entries = Vec::new();
        {
            let mut table = lock(&self.table);
            table.sweep(now);
            entries.extend(table.entries().cloned());
        }
        let mut wake_at = now + Duration::from_secs(1);
        for entry in entries {
            let mut inner = entry.lock();
            let Some(reason) = inner.state.tick(now) else {
                if let Some(due) = inner.state.wake_at() {
                    wake_at = wake_at.min(due);
                }
                continue;
            };
            let outbox = inner.outbox.take();
            drop(inner);
            self.retire(&entry, &self.counters.expired);
            let mut inner = entry.lock_unguarded();
            inner.state.take_parts();
            entry.emit(&inner, &*self.events, EventKind::Expired { reason });
            drop(inner);
            if let Some(outbox) = outbox {
                outbox.push(entry.scope, Control::Refused(Refusal::Expired));
            }
        }
        wake_at.saturating_duration_since(now)
    }
}

/// Stops and joins the expiring thread with the last handle.
struct Reaper {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Reaper {
    fn drop(&mut self) {
        loopback::unlist(self.shared.process_token);
        self.shared.stopping.store(true, Ordering::Relaxed);
        self.shared.reaper_bell.ring();
        if let Some(thread) = self.thread.take() {
            // A handle that is dropped inside an event, on the thread itself, cannot wait.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

/// The grant table of one worker. Cheap to clone; the last clone ends the thread
/// that expires grants. Events are emitted while the grant's lock is held: a sink
/// must not call back into the receiver.
#[derive(Clone)]
pub struct Receiver {
    shared: Arc<Shared>,
    _reaper: Arc<Reaper>,
}

impl Receiver {
    /// Starts the receiver and the thread that expires grants, and, unless
    /// `loopback` is off, lists it under its process token for senders of this process.
    ///
    /// # Errors
    /// [`Error::Io`] if no thread can be started.
    pub fn start(config: ReceiverConfig, events: Box<dyn EventSink>) -> Result<Self, Error> {
        let shared = Shared::new(config, events)?;
        let reaped = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("kv-expire".to_owned())
            .spawn(move || {
                while !reaped.stopping.load(Ordering::Relaxed) {
                    let pause = reaped.reap(reaped.now());
                    // Ends early on a bell; a failing poll only makes the thread look sooner.
                    if reaped.reaper_bell.park(&[], pause).is_err() {
                        std::thread::sleep(pause.min(Duration::from_millis(10)));
                    }
                }
            })
            .map_err(|error| Error::io("start the expiring thread", error))?;
        if shared.config.loopback {
            loopback::list(shared.process_token, &shared);
        }
        Ok(Self::of(shared, Some(thread)))
    }

    /// A receiver without a thread: whoever starts it calls [`Shared::reap`].
    #[cfg(feature = "test-support")]
    pub(crate) fn driven(
        config: ReceiverConfig,
        events: Box<dyn EventSink>,
    ) -> Result<Self, Error> {
        Ok(Self::of(Shared::new(config, events)?, None))
    }

    fn of(shared: Arc<Shared>, thread: Option<JoinHandle<()>>) -> Self {
        let reaper = Reaper {
            shared: Arc::clone(&shared),
            thread,
        };
        Self {
            shared,
            _reaper: Arc::new(reaper),
        }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// What senders of the same process find this receiver by.
    pub fn process_token(&self) -> ProcessToken {
        self.shared.process_token
    }

    /// What senders authenticate with.
    pub fn lane_key(&self) -> &LaneKey {
        &self.shared.config.lane_key
    }

    /// This worker's life.
    pub fn epoch(&self) -> Epoch {
        self.shared.config.epoch
    }

    /// Lets one attempt write the named blocks. Does not block.
    ///
    /// # Errors
    /// [`Error::Extent`] or [`Error::Invalid`] if the request contradicts itself,
    /// [`Error::Full`] if `grants_max` grants are live (retry later).
    pub fn grant(&self, request: GrantRequest) -> Result<Grant, Error> {
        let config = &self.shared.config;
        if request.epoch != config.epoch {
            return Err(Error::Invalid(format!(
                "epoch `{}` is not this receiver's `{}`",
                request.epoch, config.epoch
            )));
        }
        let extents = request
            .groups
            .iter()
            .flat_map(|g| &g.blocks)
            .flat_map(|b| &b.layers);
        for extent in extents {
            region::check(&self.shared.regions, *extent)?;
        }
        self.check_senders(&request)?;
        let limits = Limits {
            resume_grace: config.resume_grace,
            corrupt_frames_max: config.corrupt_frames_max,
            protections: config.protections,
        };
        let state = ReceiverState::new(
            request.epoch,
            request.attempt,
            parts::PartTable::new(&request.groups)?,
            limits,
            config.environment.now(),
            request.deadline,
        )
        .for_senders(request.senders);
        self.insert(request.attempt, request.request_id, state)
    }

    /// Whether parts of other layouts could be placed in what is granted to all senders.
    fn check_senders(&self, request: &GrantRequest) -> Result<(), Error> {
        if request.senders == Senders::SameLayout {
            return Ok(());
        }
        let Some(others) = &self.shared.config.other_layouts else {
            return Err(Error::Invalid(
                "this receiver takes parts of its own layout only".to_owned(),
            ));
        };
        let bytes = others.own.layer_bytes();
        for grant in &request.groups {
            let group = others.own.groups.get(usize::from(grant.group));
            let layers = group.is_some_and(|group| group.layers == grant.layers);
            let mut extents = grant.blocks.iter().flat_map(|block| &block.layers);
            if !layers || extents.any(|extent| extent.len as usize != bytes) {
                return Err(Error::Invalid(format!(
                    "kv group `{}` is not granted as the receiver's layout has it",
                    grant.group
                )));
            }
        }
        Ok(())
    }

    fn insert(
        &self,
        attempt: baton_proto::Attempt,
        request_id: baton_proto::RequestId,
        state: ReceiverState,
    ) -> Result<Grant, Error> {
        let ticket = Ticket(self.shared.config.environment.id());
        let scope = Scope {
            ticket,
            epoch: self.shared.config.epoch,
            attempt,
        };
        let limit = self.shared.config.grants_max;
        {
            let mut table = lock(&self.shared.table);
            if table.live() >= limit {
                return Err(Error::Full {
                    what: "grants",
                    limit,
                });
            }
            table.insert(Arc::new(Entry::new(scope, request_id, state)));
        }
        self.shared.counters.grants.fetch_add(1, Ordering::Relaxed);
        self.shared.reaper_bell.ring();
        Ok(Grant { ticket })
    }

    /// Fences the attempt that holds `ticket`, waits until no lane touches the blocks,
    /// and grants the same blocks to a newer attempt under a new ticket.
    ///
    /// # Errors
    /// [`Error::UnknownTicket`] if the ticket is unknown or already ended without
    /// success (then its blocks are the worker's: grant them anew);
    /// [`Error::AttemptOrder`] if the attempt is not higher, and nothing changes.
    ///
    /// # Cancel safety
    /// Dropped early, the old attempt stays fenced and no new one is granted; calling
    /// again with the same ticket goes on.
    pub async fn regrant(&self, ticket: Ticket, request: RegrantRequest) -> Result<Regrant, Error> {
        let entry = self.shared.entry(ticket).ok_or(Error::UnknownTicket)?;
        let current = entry.scope.attempt;
        if request.attempt <= current {
            return Err(Error::AttemptOrder {
                current,
                asked: request.attempt,
            });
        }
        self.shared.fence(&entry);
        entry.unguarded().await;
        let next = entry.lock().state.regrant(
            request.attempt,
            request.keep_received,
            self.shared.now(),
            request.deadline,
        );
        match next {
            Ok(state) => {
                let request_id = entry.request_id.clone();
                self.insert(request.attempt, request_id, state)
                    .map(Regrant::Granted)
            }
            Err(Phase::Ended(Terminal::Committed)) => Ok(Regrant::Committed),
            Err(_) => Err(Error::UnknownTicket),
        }
    }

    /// Ends a grant. When this resolves no lane touches the blocks, now or later:
    /// the worker may give them back. Returns how the grant ended: `Fenced`, or, if
    /// another end was faster, that one (its event was or is being sent; after
    /// `Committed` the blocks hold the request's KV). `None` for a ticket the table
    /// does not know (any more).
    ///
    /// # Cancel safety
    /// Dropped early, the grant stays fenced; calling again waits again.
    pub async fn revoke(&self, ticket: Ticket) -> Option<Terminal> {
        let entry = self.shared.entry(ticket)?;
        let terminal = self.shared.fence(&entry);
        entry.unguarded().await;
        entry.lock().state.take_parts();
        Some(terminal)
    }

    /// [`Receiver::revoke`] for threads without a runtime. Waits for at most one
    /// non-blocking read.
    pub fn revoke_blocking(&self, ticket: Ticket) -> Option<Terminal> {
        let entry = self.shared.entry(ticket)?;
        let terminal = self.shared.fence(&entry);
        entry.lock_unguarded().state.take_parts();
        Some(terminal)
    }

    /// How far a live grant has come; `None` for a ticket the table does not know.
    pub fn progress(&self, ticket: Ticket) -> Option<Progress> {
        Some(self.shared.entry(ticket)?.lock().state.progress())
    }

    /// Whether a lane may write, or is writing, the blocks of `ticket`.
    #[cfg(feature = "test-support")]
    pub fn may_be_written(&self, ticket: Ticket) -> bool {
        let entry = self.shared.entry(ticket);
        entry.is_some_and(|entry| entry.lock().may_be_written())
    }

    /// Grants in the table, those remembered for late frames included.
    #[cfg(feature = "test-support")]
    pub fn grants_remembered(&self) -> usize {
        lock(&self.shared.table).entries().count()
    }

    /// Grants that are neither committed nor otherwise ended.
    pub fn grants_live(&self) -> usize {
        lock(&self.shared.table).live()
    }

    /// Totals since the start.
    pub fn statistics(&self) -> ReceiverStatistics {
        let counters = &self.shared.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ReceiverStatistics {
            grants: read(&counters.grants),
            committed: read(&counters.committed),
            aborted: read(&counters.aborted),
            expired: read(&counters.expired),
            fenced: read(&counters.fenced),
            lanes_lost: read(&counters.lanes_lost),
            frames: read(&counters.frames),
            frames_duplicate: read(&counters.frames_duplicate),
            frames_corrupt: read(&counters.frames_corrupt),
            bytes: read(&counters.bytes),
            bytes_scratched: read(&counters.bytes_scratched),
        }
    }
}
