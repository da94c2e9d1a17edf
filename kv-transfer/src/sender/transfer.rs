//! One transfer as the worker holds it and as its lane sees it.
//!
//! The pure state stands behind one lock; the read guard is a count beside it, so
//! that the lock is never held while bytes are read.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use bytes::Bytes;
use tokio::sync::Notify;

use super::state::{AbortCause, Limits, Phase, SenderState};
use super::wire::WireForm;
use super::{
    CommitOutcome, LaneTarget, SenderConfig, SourceBlock, TransferStatistics, TransportKind,
};
use crate::codec::{COMMIT_PAYLOAD_BYTES_MAX, Scope};
use crate::error::Error;
use crate::region::{self, RegionTable};
use crate::ticket::Opening;
use crate::wake::{Bell, lock};

/// What the worker's handle and the lane share.
pub(crate) struct TransferShared {
    config: Arc<SenderConfig>,
    pub(crate) target: LaneTarget,
    pub(crate) opening: Opening,
    inner: Mutex<Inner>,
    /// Notified whenever something a waiter may wait for changed.
    changed: Notify,
    /// Wakes the lane's thread.
    bell: Bell,
    opened_at: Instant,
    open: Arc<AtomicUsize>,
    /// What parts become on the wire; `None` as they are stored.
    form: Option<WireForm>,
}

pub(crate) struct Inner {
    pub(crate) state: SenderState,
    /// Borrows of source bytes that are alive.
    readers: usize,
    ended_at: Option<Instant>,
    /// Of the last lane.
    pub(crate) transport: Option<TransportKind>,
}

impl Inner {
    /// All that anybody waits for: the end, the blocks' return, room to push.
    fn news(&self) -> [bool; 3] {
        let ended = self.state.is_ended();
        [ended, self.is_quiet(), ended || self.state.has_room()]
    }

    /// Whether the transfer has ended and nothing borrows its blocks.
    fn is_quiet(&self) -> bool {
        self.state.is_ended() && self.readers == 0
    }
}

/// The right to read the source blocks for one checksum or one write.
pub(crate) struct ReadGuard(Arc<TransferShared>);

impl Drop for ReadGuard {
    fn drop(&mut self) {
        self.0.update(|inner| inner.readers -= 1);
    }
}

impl TransferShared {
    pub(crate) fn new(
        config: &Arc<SenderConfig>,
        target: LaneTarget,
        opening: Opening,
        bell: Bell,
        open: Arc<AtomicUsize>,
        now: Instant,
    ) -> Self {
        let limits = Limits {
            queue_parts_max: config.queue_parts_max,
            queue_bytes_max: config.queue_bytes_max,
            in_flight_bytes_max: config.in_flight_bytes_max,
            in_flight_parts_max: config.in_flight_parts_max,
            reconnect_max: config.reconnect_max,
        };
        let state = SenderState::new(limits, now, target.deadline);
        open.fetch_add(1, Ordering::Relaxed);
        Self {
            config: Arc::clone(config),
            target,
            opening,
            inner: Mutex::new(Inner {
                state,
                readers: 0,
                ended_at: None,
                transport: None,
            }),
            changed: Notify::new(),
            bell,
            opened_at: now,
            open,
            form: None,
        }
    }

    /// The same, with parts that have another form on the wire. Before anything is pushed.
    pub(crate) fn in_form(mut self, form: Option<WireForm>) -> Self {
        let part_bytes = form.as_ref().map(WireForm::part_bytes);
        self.lock().state.set_part_bytes(part_bytes);
        self.form = form;
        self
    }

    pub(crate) fn form(&self) -> Option<&WireForm> {
        self.form.as_ref()
    }

    fn now(&self) -> Instant {
        self.config.environment.now()
    }

    pub(crate) fn regions(&self) -> &RegionTable {
        &self.config.regions
    }

    pub(crate) fn scope(&self) -> Scope {
        let LaneTarget {
            ticket,
            epoch,
            attempt,
            ..
        } = self.target;
        Scope {
            ticket,
            epoch,
            attempt,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    /// Changes the state and wakes whoever waits for what this brought about. A worker that
    /// waits for the end is not woken for each frame on the way there.
    pub(crate) fn update<T>(&self, change: impl FnOnce(&mut Inner) -> T) -> T {
        let mut inner = self.lock();
        let before = inner.news();
        let result = change(&mut inner);
        if inner.ended_at.is_none() && inner.state.is_ended() {
            inner.ended_at = Some(self.now());
        }
        let after = inner.news();
        drop(inner);
        if before != after {
            self.changed.notify_waiters();
        }
        result
    }

    /// Changes or reads the state where no waiter can care.
    pub(crate) fn update_quietly<T>(&self, change: impl FnOnce(&mut Inner) -> T) -> T {
        change(&mut self.lock())
    }

    /// Ends the transfer if its time is over.
    pub(crate) fn tick(&self, now: Instant) {
        self.update(|inner| inner.state.tick(now));
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.lock().state.is_ended()
    }

    /// A read guard, unless the transfer has ended.
    pub(crate) fn guard(transfer: &Arc<Self>) -> Option<ReadGuard> {
        let mut inner = transfer.lock();
        if inner.state.is_ended() {
            return None;
        }
        inner.readers += 1;
        drop(inner);
        Some(ReadGuard(Arc::clone(transfer)))
    }

    #[cfg(any(test, feature = "test-support"))]
    pub(crate) fn is_quiet(&self) -> bool {
        self.lock().is_quiet()
    }

    /// Resolves with the first `Some` that `check` gives. Cancel-safe.
    async fn wait_for<T>(&self, mut check: impl FnMut(&mut Inner) -> Option<T>) -> T {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if let Some(result) = check(&mut self.lock()) {
                return result;
            }
            changed.await;
        }
    }
}

impl Drop for TransferShared {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One attempt's way to its receiver. Dropping it before the end aborts it; wait for
/// [`Transfer::quiesced`] first if the source blocks are to be reused.
pub struct Transfer {
    shared: Arc<TransferShared>,
}

impl Transfer {
    pub(super) fn new(shared: Arc<TransferShared>) -> Self {
        Self { shared }
    }

    /// Queues blocks of one layer whose bytes are final. Waits only while the queue is
    /// over its bounds. All of `blocks` are queued or none.
    ///
    /// # Errors
    /// [`Error::Refused`], [`Error::Aborted`], [`Error::PeerLost`] once the transfer has
    /// ended (stop pushing); [`Error::Extent`], [`Error::Invalid`] for bad input,
    /// also for a part pushed twice or after `commit`.
    ///
    /// # Cancel safety
    /// Dropped early, nothing of this call was queued.
    pub async fn push(&self, group: u16, layer: u32, blocks: &[SourceBlock]) -> Result<(), Error> {
        let stored = self.shared.form().map(WireForm::stored_bytes);
        for block in blocks {
            region::check(self.shared.regions(), block.extent)?;
            if let Some(stored) = stored.filter(|stored| *stored != block.extent.len as usize) {
                return Err(Error::Invalid(format!(
                    "a part of `{}` bytes has no form on the wire: parts have `{stored}`",
                    block.extent.len
                )));
            }
        }
        let pushed = self
            .shared
            .wait_for(|inner| {
                if let Some(error) = ended(inner.state.phase()) {
                    return Some(Err(error));
                }
                let state = &mut inner.state;
                state.has_room().then(|| {
                    state.push(group, layer, blocks)?;
                    Ok(state.needs_a_look())
                })
            })
            .await;
        if pushed? {
            self.shared.bell.ring();
        }
        Ok(())
    }

    /// Says that everything was pushed, and waits for the receiver's word. `payload` is
    /// opaque here (at most [`COMMIT_PAYLOAD_BYTES_MAX`] bytes; a longer one aborts).
    ///
    /// # Cancel safety
    /// Dropped early, the commit stays under way; call `outcome` to wait again.
    pub async fn commit(&self, payload: Bytes) -> CommitOutcome {
        if payload.len() > COMMIT_PAYLOAD_BYTES_MAX {
            self.abort(&format!(
                "a commit payload of `{}` bytes is too long",
                payload.len()
            ));
        }
        self.shared.update(|inner| inner.state.commit(payload));
        self.shared.bell.ring();
        self.outcome().await
    }

    /// Waits until the transfer has ended, without committing. Cancel-safe.
    pub async fn outcome(&self) -> CommitOutcome {
        self.shared
            .wait_for(|inner| outcome(inner.state.phase()))
            .await
    }

    /// How the transfer ended; `None` while it has not.
    pub fn try_outcome(&self) -> Option<CommitOutcome> {
        outcome(self.shared.lock().state.phase())
    }

    /// Why the peer is lost, in words; `None` unless [`CommitOutcome::PeerLost`] is how
    /// the transfer ended.
    pub fn failure(&self) -> Option<String> {
        match self.shared.lock().state.phase() {
            Phase::Aborted(AbortCause::PeerLost(reason)) => Some(reason.clone()),
            _ => None,
        }
    }

    /// Whether the receiver has answered, however the transfer ended.
    pub fn was_reached(&self) -> bool {
        self.shared.lock().state.was_reached()
    }

    /// Gives the transfer up and tells the receiver. Idempotent; without effect once
    /// it has ended. Does not block.
    pub fn abort(&self, reason: &str) {
        self.shared.update(|inner| inner.state.abort(reason));
        self.shared.bell.ring();
    }

    /// Resolves when the transfer has ended and no lane reads its blocks, now or later:
    /// the source blocks may be reused. Cancel-safe.
    pub async fn quiesced(&self) {
        self.shared
            .wait_for(|inner| inner.is_quiet().then_some(()))
            .await;
    }

    /// Whether a lane may read, or is reading, the source blocks.
    #[cfg(feature = "test-support")]
    pub fn may_be_read(&self) -> bool {
        !self.shared.is_quiet()
    }

    /// What was done so far.
    pub fn statistics(&self) -> TransferStatistics {
        let inner = self.shared.lock();
        let totals = inner.state.totals();
        let end = inner.ended_at.unwrap_or_else(|| self.shared.now());
        TransferStatistics {
            parts: inner.state.parts(),
            bytes_sent: totals.bytes_sent,
            bytes_resent: totals.bytes_resent,
            reconnects: totals.lanes_lost,
            transport: inner.transport,
            duration: end.saturating_duration_since(self.shared.opened_at),
            at_link_speed: inner.state.at_link_speed(),
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.abort("the sender dropped the transfer");
    }
}

fn outcome(phase: &Phase) -> Option<CommitOutcome> {
    Some(match phase {
        Phase::Open | Phase::Sending | Phase::CommitSent => return None,
        Phase::Acked => CommitOutcome::Committed,
        Phase::Aborted(AbortCause::Refused(refusal)) => CommitOutcome::Refused(*refusal),
        Phase::Aborted(AbortCause::PeerLost(_)) => CommitOutcome::PeerLost,
        Phase::Aborted(AbortCause::Local(reason)) => CommitOutcome::Aborted(reason.clone()),
    })
}

fn ended(phase: &Phase) -> Option<Error> {
    Some(match phase {
        Phase::Open | Phase::Sending | Phase::CommitSent => return None,
        Phase::Acked => Error::Aborted("it was committed".to_owned()),
        Phase::Aborted(AbortCause::Refused(refusal)) => Error::Refused(*refusal),
        Phase::Aborted(AbortCause::PeerLost(reason)) => Error::PeerLost(reason.clone()),
        Phase::Aborted(AbortCause::Local(reason)) => Error::Aborted(reason.clone()),
    })
}
