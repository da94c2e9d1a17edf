//! What a worker says when it grants blocks to a peer, and what it gets back.

use std::time::Duration;

use baton_proto::kv_layout::ByteExtent;
use baton_proto::{Attempt, Epoch, RequestId};

use crate::ticket::Ticket;

/// One reserved block: where each layer of its group goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockGrant {
    pub ordinal: u32,
    /// One extent per entry of [`GroupGrant::layers`], in that order.
    pub layers: Vec<ByteExtent>,
}

/// The reserved blocks of one KV group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupGrant {
    pub group: u16,
    /// Model layers of the group, ascending.
    pub layers: Vec<u32>,
    /// Ascending ordinals.
    pub blocks: Vec<BlockGrant>,
}

/// The blocks that one attempt may write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrantRequest {
    /// For log lines and events.
    pub request_id: RequestId,
    pub attempt: Attempt,
    /// The receiver's own epoch; frames that name another one are refused.
    pub epoch: Epoch,
    pub groups: Vec<GroupGrant>,
    /// Who may fill them.
    pub senders: Senders,
    /// From now until the commit must be here; then the grant expires.
    pub deadline: Duration,
}

/// Which senders may fill a grant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Senders {
    /// Those whose blocks are laid out as the receiver's.
    #[default]
    SameLayout,
    /// Others too, if [`super::ReceiverConfig::other_layouts`] is set: their parts are
    /// re-laid out on arrival.
    AnyLayout {
        /// Positions of the prompt; what lies behind them in its last block has no meaning.
        tokens: u32,
        /// Only those whose K and V keep their bits.
        exact: bool,
    },
}

/// A grant, to be sent to the peer together with the lane key, the data address and
/// the process token (see [`crate::sender::LaneTarget`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    pub ticket: Ticket,
}

/// A new attempt for blocks that an older attempt was granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegrantRequest {
    /// Higher than the attempt it fences.
    pub attempt: Attempt,
    pub deadline: Duration,
    /// Keep parts that arrived whole. Only if the new sender's numerics id is the old
    /// one's, so that its bytes would be the same.
    pub keep_received: bool,
}

/// How a regrant ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Regrant {
    /// The old attempt is fenced; the new one may write.
    Granted(Grant),
    /// Too late: the old attempt had committed. Its `Completed` event was sent.
    Committed,
}

/// The one terminal state of a grant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Terminal {
    /// Every byte arrived and was checked.
    Committed,
    /// The sender gave up, or its bytes stayed damaged.
    Aborted(AbortReason),
    /// The commit did not come in time.
    Expired(ExpiryReason),
    /// Revoked, or superseded by a newer attempt.
    Fenced,
}

/// Why a grant was aborted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AbortReason {
    /// The sender's own words (bounded; for logs).
    BySender(String),
    /// Payloads kept failing their checksum, or the root digests differ.
    Corrupt,
    /// The sender's KV layout is another one.
    LayoutMismatch,
    /// The sender described its layout, and it cannot, or for an exact request must not,
    /// be re-laid out: the error names the field and both values.
    Unfit(Box<baton_proto::Error>),
}

/// Why a grant expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpiryReason {
    /// The grant's own deadline.
    Deadline,
    /// The lane was lost and no lane came back within the grace time.
    LaneLost,
}

/// How far a grant has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    pub parts_total: u64,
    pub parts_received: u64,
    pub bytes_received: u64,
}
