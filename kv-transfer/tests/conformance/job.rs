//! One attempt of one request, on both sides.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_kv_transfer::sender::{CommitOutcome, SourceBlock, Transfer};
use baton_kv_transfer::{LaneKey, LayoutDigest, ProcessToken, Ticket};
use baton_proto::Epoch;
use bytes::Bytes;
use rand::Rng;
use rand::rngs::StdRng;

use crate::world::{EPOCH, LAYOUT};

/// How one side of a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReceiverEnd {
    Completed,
    /// The blocks came back without success.
    Ended(String),
    /// The process is gone, and its memory with it.
    Died,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SenderEnd {
    Said(CommitOutcome),
    Died,
}

/// What a request is to be like.
#[derive(Clone)]
pub struct Plan {
    pub blocks: usize,
    pub deadline: Duration,
    /// From its start until the commit is asked for; `None` if it never is.
    pub commit_after: Option<Duration>,
    pub pushes_over: Duration,
    pub attempt: u32,
    pub layout: LayoutDigest,
    /// What the sender believes.
    pub sent_attempt: u32,
    pub sent_epoch: Epoch,
    /// The sender's own deadline.
    pub sent_deadline: Duration,
}

impl Plan {
    pub fn new(blocks: usize, rng: &mut StdRng) -> Self {
        let pushes_over = Duration::from_micros(rng.random_range(0..40_000));
        let deadline = Duration::from_secs(20);
        Self {
            blocks,
            deadline,
            commit_after: Some(pushes_over),
            pushes_over,
            attempt: 1,
            layout: LAYOUT,
            sent_attempt: 1,
            sent_epoch: EPOCH,
            sent_deadline: deadline,
        }
    }
}

/// Bytes by block and layer.
pub type Content = Vec<Vec<Vec<u8>>>;

/// A decode worker that is a process of its own.
#[derive(Clone)]
pub struct Remote {
    pub address: SocketAddr,
    pub process_token: ProcessToken,
    pub lane_key: LaneKey,
    pub ticket: Ticket,
}

/// One attempt of one request, on both sides.
pub struct Job {
    pub ticket: Ticket,
    pub transfer: Option<Arc<Transfer>>,
    pub sender: usize,
    pub plan: Plan,
    pub ordinals: Vec<u32>,
    pub source_blocks: Vec<u32>,
    pub destination_blocks: Vec<u32>,
    pub content: Content,
    pub started: Instant,
    pub pushes: VecDeque<(Instant, u32, Vec<SourceBlock>)>,
    pub committed_at: Option<Instant>,
    /// A lane has opened the ticket.
    pub opened: bool,
    pub revoking: bool,
    pub receiver_end: Option<ReceiverEnd>,
    pub sender_end: Option<SenderEnd>,
    pub receiver_back: Option<Instant>,
    pub sender_back: Option<Instant>,
    /// When something happened after which the blocks of a side must be back by then.
    pub receiver_due: Option<Instant>,
    pub sender_due: Option<Instant>,
}

impl Job {
    pub fn is_over(&self) -> bool {
        self.receiver_back.is_some() && self.sender_back.is_some()
    }

    pub fn payload(&self) -> Bytes {
        Bytes::from(format!("first token of {:?}", self.source_blocks))
    }
}

/// What a transfer is opened for.
pub struct Wanted {
    pub ordinals: Vec<u32>,
    /// Where they go; none of ours if `remote`.
    pub blocks: Vec<u32>,
    pub ticket: Ticket,
    /// Fresh bytes if `None`, else those of an older attempt.
    pub content: Option<Content>,
    pub remote: Option<Remote>,
}
