//! What a receiver tells its worker.

use std::time::Duration;

use baton_proto::{Attempt, RequestId};
use bytes::Bytes;
use tokio::sync::mpsc;

use super::grant::{AbortReason, ExpiryReason};
use crate::sender::TransportKind;
use crate::ticket::Ticket;

/// Something happened to a grant. Each grant gets at most one of `Completed`,
/// `Aborted` and `Expired`, as its last event; one whose `revoke` returned `Fenced`
/// gets none after that. When such an event is sent, no lane touches the blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub ticket: Ticket,
    pub request_id: RequestId,
    pub attempt: Attempt,
    pub what: EventKind,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// The first lane opened the ticket.
    Started,
    /// Every part arrived, its checksum and the root digest agree. The blocks are
    /// the worker's again.
    Completed {
        /// The sender's opaque commit payload.
        commit_payload: Bytes,
        /// Payload bytes of all parts.
        bytes: u64,
        /// From the grant to the commit.
        duration: Duration,
        /// From the first part's arrival to the commit; zero if nothing had to be sent.
        receiving: Duration,
        /// Of the lane that committed.
        transport: TransportKind,
        /// The blocks must not be found by the hashes of their tokens: their bits are not
        /// those that this worker would have computed, or a block of a sliding window
        /// lacks positions that its sender held no more.
        foreign: bool,
    },
    /// The transfer ended without success. The blocks are the worker's again.
    Aborted { reason: AbortReason },
    /// The transfer ran out of time. The blocks are the worker's again.
    Expired { reason: ExpiryReason },
    /// The lane that carried the transfer broke. The sender may come back within the
    /// grace time; the grant lives until then or until it is revoked.
    LaneLost,
}

/// Takes events on a lane's thread. Must not block: a lane that waits here stops
/// answering pings.
pub trait EventSink: Send + Sync {
    fn emit(&self, event: Event);
}

impl<F: Fn(Event) + Send + Sync> EventSink for F {
    fn emit(&self, event: Event) {
        self(event);
    }
}

/// A sink and the stream it feeds. Unbounded by type, bounded by use: a grant emits
/// at most [`LANE_LOST_EVENTS_MAX`] + 2 events and the grant table is bounded. A
/// dropped stream is not an error.
pub fn channel() -> (Box<dyn EventSink>, mpsc::UnboundedReceiver<Event>) {
    let (tx, rx) = mpsc::unbounded_channel();
    (Box::new(move |event| drop(tx.send(event))), rx)
}

/// `LaneLost` events one grant may cause; later losses are only counted.
pub const LANE_LOST_EVENTS_MAX: u32 = 8;
