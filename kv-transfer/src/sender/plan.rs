//! What a transfer says to send next, as values.

use baton_proto::kv_layout::ByteExtent;
use bytes::Bytes;

use crate::part::PartRange;

/// The parts of the next data frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FramePlan {
    pub range: PartRange,
    pub extents: Vec<ByteExtent>,
    pub bytes: u64,
}

/// What a transfer that asks for its turn on the lane gets to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NextFrame {
    /// Nothing now.
    Nothing,
    /// A frame larger than the bytes it may send this turn.
    Later,
    Frame(FramePlan),
}

/// The commit frame to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommitPlan {
    pub root: u32,
    pub parts: u64,
    pub payload: Bytes,
}
