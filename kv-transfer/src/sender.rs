//! The sending side: transfers that push final blocks to a receiver.
//!
//! The worker opens one [`Transfer`] per attempt, pushes parts as the engine
//! finishes layers, commits once, and waits for [`Transfer::quiesced`] before it
//! lets the engine reuse the source blocks. Lanes are OS threads of this module;
//! which transport carries them is decided once per peer. The pure states are in
//! [`state`]. On a lost lane this side reconnects inside the transfer's deadline
//! and sends again what the receiver says is missing; transports hold no policy.

use std::net::SocketAddr;
use std::time::Duration;

use baton_proto::kv_layout::ByteExtent;
use baton_proto::{Attempt, Epoch, RequestId};
use bytes::Bytes;

use crate::error::{Error, Refusal};
use crate::region::RegionTable;
use crate::ticket::{LaneKey, LayoutDigest, ProcessToken, Ticket};

/// Where a transfer goes and by what right. Everything but the deadline was given
/// out by the receiver's worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneTarget {
    /// The receiver's data port; `None` if it listens on none (loopback only).
    pub data_address: Option<SocketAddr>,
    pub process_token: ProcessToken,
    pub lane_key: LaneKey,
    pub ticket: Ticket,
    /// The receiver's epoch.
    pub epoch: Epoch,
    pub attempt: Attempt,
    /// For log lines.
    pub request_id: RequestId,
    /// From now until the receiver's acceptance must be here.
    pub deadline: Duration,
}

/// How senders reach receivers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransportKind {
    /// A direct copy inside this process.
    Loopback,
    /// A TCP connection to the data port.
    Tcp,
}

/// How a sender is set up.
#[derive(Clone, Debug)]
pub struct SenderConfig {
    /// One region per KV group.
    pub regions: RegionTable,
    /// In order of preference; the first that reaches the target is used. Default
    /// loopback, then tcp.
    pub transports: Vec<TransportKind>,
    /// Lanes (threads) per peer; transfers are spread over them. Default 1.
    pub lanes_per_peer: usize,
    /// Open transfers at once; more are refused with [`Error::Full`]. Default 1024.
    pub transfers_max: usize,
    /// Parts one transfer may have queued before `push` waits. Default 262 144.
    pub queue_parts_max: usize,
    /// Bytes one transfer may have queued before `push` waits. Default 1 GiB: source
    /// blocks are pinned anyway, so the queue costs only its entries.
    pub queue_bytes_max: u64,
    /// Bytes of one transfer sent and not yet acknowledged. Default 32 MiB.
    pub in_flight_bytes_max: u64,
    /// Default 250 ms.
    pub ping_interval: Duration,
    /// A lane silent for this long is dead. Default 1 s.
    pub silence_max: Duration,
    /// Connect and hello. Default 1 s.
    pub connect_timeout: Duration,
    /// A lane without transfers closes after this. Default 10 s.
    pub lane_idle_max: Duration,
}

impl SenderConfig {
    /// The defaults.
    pub fn new(regions: RegionTable) -> Self {
        Self {
            regions,
            transports: vec![TransportKind::Loopback, TransportKind::Tcp],
            lanes_per_peer: 1,
            transfers_max: 1024,
            queue_parts_max: 262_144,
            queue_bytes_max: 1 << 30,
            in_flight_bytes_max: 32 << 20,
            ping_interval: Duration::from_millis(250),
            silence_max: Duration::from_secs(1),
            connect_timeout: Duration::from_secs(1),
            lane_idle_max: Duration::from_secs(10),
        }
    }
}

/// One source block of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceBlock {
    pub ordinal: u32,
    pub extent: ByteExtent,
}

/// How a commit ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommitOutcome {
    /// The receiver has every byte and owns the request from here.
    Committed,
    /// The receiver will not take this attempt; place it again.
    Refused(Refusal),
    /// Nothing was heard from the receiver until the deadline. It may or may not have
    /// committed; the router finds out from the receiver's worker.
    PeerLost,
    /// `abort` was called (or the sender stopped) before the acceptance.
    Aborted(String),
}

/// What a transfer has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferStatistics {
    pub parts: u64,
    /// Payload bytes handed to the lane, repeats included.
    pub bytes_sent: u64,
    pub bytes_resent: u64,
    pub reconnects: u32,
    /// From `open` to the end.
    pub duration: Duration,
}

/// All lanes of one worker to its peers. Cheap to clone; the last clone aborts open
/// transfers and joins the lanes.
#[derive(Clone)]
pub struct Sender {
    config: std::sync::Arc<SenderConfig>,
}

impl Sender {
    /// A sender without lanes; they start with the first transfer to a peer.
    pub fn start(config: SenderConfig) -> Self {
        Self {
            config: std::sync::Arc::new(config),
        }
    }

    /// Opens a transfer. Returns at once; connecting happens on the lane's thread, and
    /// its failure shows in `push` and `commit`.
    ///
    /// # Errors
    /// [`Error::Full`] beyond `transfers_max`; [`Error::Unreachable`] if no configured
    /// transport fits the target; [`Error::Io`] if no thread can be started.
    pub fn open(&self, target: LaneTarget, layout: LayoutDigest) -> Result<Transfer, Error> {
        let _ = (&self.config, target, layout);
        Err(Error::Closed)
    }
}

/// One attempt's way to its receiver. Dropping it before the end aborts it; wait for
/// [`Transfer::quiesced`] first if the source blocks are to be reused.
pub struct Transfer {
    _private: (),
}

impl Transfer {
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
        let _ = (group, layer, blocks);
        Err(Error::Closed)
    }

    /// Says that everything was pushed, and waits for the receiver's word. `payload` is
    /// opaque here (at most [`crate::codec::COMMIT_PAYLOAD_BYTES_MAX`] bytes).
    ///
    /// # Cancel safety
    /// Dropped early, the commit stays under way; call `outcome` to wait again.
    pub async fn commit(&self, payload: Bytes) -> CommitOutcome {
        let _ = payload;
        CommitOutcome::PeerLost
    }

    /// Waits until the transfer has ended, without committing. Cancel-safe.
    pub async fn outcome(&self) -> CommitOutcome {
        CommitOutcome::PeerLost
    }

    /// Gives the transfer up and tells the receiver. Idempotent; without effect once
    /// it has ended. Does not block.
    pub fn abort(&self, reason: &str) {
        let _ = reason;
    }

    /// Resolves when the transfer has ended and no lane reads its blocks, now or later:
    /// the source blocks may be reused. Cancel-safe.
    pub async fn quiesced(&self) {}

    /// What was done so far.
    pub fn statistics(&self) -> TransferStatistics {
        TransferStatistics::default()
    }
}
