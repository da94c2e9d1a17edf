//! The grant table: a lock, a write guard and a set of waiters around each state.
//!
//! No thread holds the table's lock and an entry's lock at once. The entry lock is never held across a read; the
//! guard is, and it is taken for one non-blocking read at a time.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_proto::RequestId;
use tokio::sync::Notify;

use super::event::{Event, EventKind, EventSink};
use super::outbox::Outbox;
use super::state::{LaneSerial, ReceiverState};
use crate::codec::Scope;
use crate::ticket::Ticket;
use crate::wake::lock;

/// How long an ended grant is remembered, so that a late commit or frame is told
/// what became of it. Longer than any lane outlives its peer.
const TOMBSTONE_LIFE: Duration = Duration::from_secs(30);

/// One grant.
pub(crate) struct Entry {
    pub(crate) scope: Scope,
    pub(crate) request_id: RequestId,
    inner: Mutex<EntryInner>,
    /// Notified whenever the write guard is given back.
    unguarded: Condvar,
    unguarded_async: Notify,
}

pub(crate) struct EntryInner {
    pub(crate) state: ReceiverState,
    /// Whether a lane is reading into the blocks right now.
    guarded: bool,
    /// Where the attached lane listens.
    pub(crate) outbox: Option<Arc<Outbox>>,
}

#[cfg(feature = "test-support")]
impl EntryInner {
    /// Whether a lane may write, or is writing, the blocks.
    pub(crate) fn may_be_written(&self) -> bool {
        self.state.terminal().is_none() || self.guarded
    }
}

/// The right to write into a grant's blocks for one read. Exclusive per grant.
pub(crate) struct WriteGuard(Arc<Entry>);

impl Drop for WriteGuard {
    fn drop(&mut self) {
        lock(&self.0.inner).guarded = false;
        self.0.unguarded.notify_all();
        self.0.unguarded_async.notify_waiters();
    }
}

impl Entry {
    pub(crate) fn new(scope: Scope, request_id: RequestId, state: ReceiverState) -> Self {
        Self {
            scope,
            request_id,
            inner: Mutex::new(EntryInner {
                state,
                guarded: false,
                outbox: None,
            }),
            unguarded: Condvar::new(),
            unguarded_async: Notify::new(),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, EntryInner> {
        lock(&self.inner)
    }

    /// Locks once no lane is reading into the blocks.
    pub(crate) fn lock_unguarded(&self) -> MutexGuard<'_, EntryInner> {
        let mut inner = self.lock();
        while inner.guarded {
            inner = self
                .unguarded
                .wait(inner)
                .unwrap_or_else(PoisonError::into_inner);
        }
        inner
    }

    /// Resolves when no lane is reading into the blocks. Cancel-safe.
    pub(crate) async fn unguarded(&self) {
        loop {
            let notified = self.unguarded_async.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if !self.lock().guarded {
                return;
            }
            notified.await;
        }
    }

    /// The write guard, unless `lane` must not write (any more).
    pub(crate) fn guard(entry: &Arc<Self>, lane: LaneSerial) -> Option<WriteGuard> {
        let mut inner = entry.lock();
        if !inner.state.may_touch(lane) || inner.guarded {
            return None;
        }
        inner.guarded = true;
        drop(inner);
        Some(WriteGuard(Arc::clone(entry)))
    }

    /// Sends an event. The caller holds the entry's lock, so that events of one grant
    /// keep their order and none follows a `revoke`.
    pub(crate) fn emit(&self, _held: &EntryInner, events: &dyn EventSink, what: EventKind) {
        events.emit(Event {
            ticket: self.scope.ticket,
            request_id: self.request_id.clone(),
            attempt: self.scope.attempt,
            what,
        });
    }
}

/// Every grant, live or remembered.
#[derive(Default)]
pub(crate) struct Table {
    entries: BTreeMap<Ticket, Arc<Entry>>,
    /// Ended grants, oldest first.
    ended: VecDeque<(Instant, Ticket)>,
}

impl Table {
    pub(crate) fn get(&self, ticket: Ticket) -> Option<Arc<Entry>> {
        self.entries.get(&ticket).cloned()
    }

    pub(crate) fn live(&self) -> usize {
        self.entries.len() - self.ended.len()
    }

    pub(crate) fn insert(&mut self, entry: Arc<Entry>) {
        self.entries.insert(entry.scope.ticket, entry);
    }

    /// Turns a grant that ended into a memory of it. At most `ended_max` are kept.
    pub(crate) fn retire(&mut self, ticket: Ticket, ended_max: usize, now: Instant) {
        self.ended.push_back((now, ticket));
        while self.ended.len() > ended_max {
            self.forget_oldest();
        }
    }

    /// Forgets grants that ended long ago.
    pub(crate) fn sweep(&mut self, now: Instant) {
        while self
            .ended
            .front()
            .is_some_and(|(ended, _)| *ended + TOMBSTONE_LIFE <= now)
        {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) {
        if let Some((_, ticket)) = self.ended.pop_front() {
            self.entries.remove(&ticket);
        }
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = &Arc<Entry>> {
        self.entries.values()
    }
}
