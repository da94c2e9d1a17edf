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

use std::time::Duration;

use baton_proto::Epoch;

pub use event::{Event, EventKind, EventSink};
pub use grant::{
    AbortReason, BlockGrant, ExpiryReason, Grant, GrantRequest, GroupGrant, Progress, Regrant,
    RegrantRequest, Terminal,
};

use crate::error::Error;
use crate::region::RegionTable;
use crate::ticket::{LaneKey, LayoutDigest, ProcessToken, Ticket};

/// How a receiver is set up.
#[derive(Clone, Debug)]
pub struct ReceiverConfig {
    /// This worker's life. Grants and frames of another one are refused.
    pub epoch: Epoch,
    /// Senders with another digest are refused when they open a ticket.
    pub layout: LayoutDigest,
    /// One region per KV group.
    pub regions: RegionTable,
    /// What lanes authenticate with.
    pub lane_key: LaneKey,
    /// How long a grant outlives its lane (default 1.5 s, the lease of the design).
    pub resume_grace: Duration,
    /// Live grants at once; more are refused with [`Error::Full`]. Default 4096.
    pub grants_max: usize,
    /// Payloads with a wrong checksum one grant survives; the next one aborts it.
    /// Default 3.
    pub corrupt_frames_max: u32,
    /// Whether senders of this process may copy directly. Default true.
    pub loopback: bool,
}

impl ReceiverConfig {
    /// The defaults, with a fresh lane key.
    pub fn new(epoch: Epoch, layout: LayoutDigest, regions: RegionTable) -> Self {
        Self {
            epoch,
            layout,
            regions,
            lane_key: LaneKey::random(),
            resume_grace: Duration::from_millis(1500),
            grants_max: 4096,
            corrupt_frames_max: 3,
            loopback: true,
        }
    }
}

/// The grant table of one worker. Cheap to clone; the last clone ends the thread
/// that expires grants.
#[derive(Clone)]
pub struct Receiver {
    config: std::sync::Arc<ReceiverConfig>,
    process_token: ProcessToken,
}

impl Receiver {
    /// Starts the receiver and the thread that expires grants, and, unless
    /// `loopback` is off, lists it under its process token for senders of this process.
    ///
    /// # Errors
    /// [`Error::Io`] if no thread can be started.
    pub fn start(config: ReceiverConfig, events: Box<dyn EventSink>) -> Result<Self, Error> {
        let _ = events;
        Ok(Self {
            config: std::sync::Arc::new(config),
            process_token: ProcessToken::random(),
        })
    }

    /// What senders of the same process find this receiver by.
    pub fn process_token(&self) -> ProcessToken {
        self.process_token
    }

    /// What senders authenticate with.
    pub fn lane_key(&self) -> &LaneKey {
        &self.config.lane_key
    }

    /// This worker's life.
    pub fn epoch(&self) -> Epoch {
        self.config.epoch
    }

    /// Lets one attempt write the named blocks. Does not block.
    ///
    /// # Errors
    /// [`Error::Extent`] or [`Error::Invalid`] if the request contradicts itself,
    /// [`Error::Full`] if `grants_max` grants are live (retry later).
    pub fn grant(&self, request: GrantRequest) -> Result<Grant, Error> {
        let _ = request;
        Err(Error::Closed)
    }

    /// Fences the attempt that holds `ticket`, waits until no lane touches the blocks,
    /// and grants the same blocks to a newer attempt under a new ticket.
    ///
    /// # Errors
    /// [`Error::UnknownTicket`] if the ticket is unknown or already ended without
    /// success; [`Error::AttemptOrder`] if the attempt is not higher.
    ///
    /// # Cancel safety
    /// Dropped early, the old attempt stays fenced and no new one is granted.
    pub async fn regrant(&self, ticket: Ticket, request: RegrantRequest) -> Result<Regrant, Error> {
        let _ = (ticket, request);
        Err(Error::Closed)
    }

    /// Ends a grant. When this resolves no lane touches the blocks, now or later:
    /// the worker may give them back. Returns how the grant ended, which is
    /// `Committed` if the commit was faster (then `Completed` was or is being sent),
    /// and `None` for a ticket the table does not know (any more).
    ///
    /// # Cancel safety
    /// Dropped early, the grant stays fenced; calling again waits again.
    pub async fn revoke(&self, ticket: Ticket) -> Option<Terminal> {
        let _ = ticket;
        None
    }

    /// [`Receiver::revoke`] for threads without a runtime. Waits for at most one
    /// non-blocking read.
    pub fn revoke_blocking(&self, ticket: Ticket) -> Option<Terminal> {
        let _ = ticket;
        None
    }

    /// How far a grant has come; `None` for a ticket the table does not know.
    pub fn progress(&self, ticket: Ticket) -> Option<Progress> {
        let _ = ticket;
        None
    }
}
