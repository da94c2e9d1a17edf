//! A request and its sequences, as the core keeps them.
//!
//! ```text
//! request --admitted--> trunk: computes the prompt (or has it written by a peer)
//!                         | prompt complete: fork
//!                         +--> branch 0 \  share the prompt's blocks, copy the partial
//!                         +--> branch 1 /  last one when they first write it
//! ```
//!
//! A sequence has known tokens (prompt, forced, drawn) and a number of computed
//! positions. Whether tokens are uncomputed because the request is new, resumed,
//! chunked or was preempted makes no difference to anything.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use baton_proto::TokenId;
use baton_proto::block_hash::{BlockHash, BlockHasher};
use baton_proto::kv_layout::SPAN_TOKENS;
use baton_proto::sampling::{FinishReason, SampledToken};

use crate::api::{OrdinalRange, RequestKey};
use crate::kv::Tables;
use crate::sampling::{History, Rules};
use crate::scheduler::{SequenceId, Stage};

/// What a request is for; the payload of `Work` that outlives submission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Local,
    Prefill,
    Receive,
}

/// Where a request is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestStage {
    /// Holds nothing yet.
    Queued,
    /// `Receive`: a peer may write its blocks until commit or release.
    Reserved,
    /// Its sequences compute.
    Active,
    /// Nothing is computed any more, but a peer may touch its blocks until `Release`.
    AwaitingRelease,
}

/// One choice of a request.
#[derive(Debug)]
pub(super) struct Choice {
    /// Forced and drawn tokens.
    pub output: Vec<TokenId>,
    pub history: History,
    pub ended: bool,
    pub paused: bool,
}

/// A reserved block and its ordinal.
#[derive(Clone, Copy, Debug)]
pub(super) struct Granted {
    pub ordinal: u32,
    pub block: u32,
}

#[derive(Debug)]
pub(super) struct Request {
    pub key: RequestKey,
    pub kind: Kind,
    pub arrival: u64,
    pub arrived: Duration,
    /// Names the tenant.
    pub tenant: Vec<u8>,
    pub priority: i32,
    /// Where its turn is on the fair clock.
    pub tag: u64,
    pub stage: RequestStage,
    pub prompt: Arc<[TokenId]>,
    pub choices: Vec<Choice>,
    pub rules: Rules,
    /// Names its blocks; `None` keeps the request out of the prefix cache.
    pub hasher: Option<BlockHasher>,
    /// Its own target on the gap between tokens.
    pub itl_target: Option<Duration>,
    /// Whether a target has put its start off.
    pub delayed: bool,
    /// Whether `Started` or `Reserved` was emitted.
    pub started: bool,
    pub cached_tokens: u32,
    /// `Prefill`: per group, the ordinals to report as ready.
    pub ship: Vec<Range<u32>>,
    /// `Prefill`: the prompt's blocks once nothing of it is computed here any more.
    pub pinned: Option<Tables>,
    /// `Prefill`: what `First` will say, per choice.
    pub first: Vec<Option<(SampledToken, Option<FinishReason>)>>,
    /// `Receive`: per group, the blocks a peer may write.
    pub granted: Vec<Vec<Granted>>,
    /// Per group, the window blocks one of its sequences may hold at most.
    pub unit_charge: Vec<u32>,
    /// Per group, what `pinned` and `granted` count for while no sequence counts for them.
    pub held_charge: Vec<u32>,
}

impl Request {
    pub(super) fn id(&self, choice: u32) -> SequenceId {
        SequenceId {
            arrival: self.arrival,
            choice,
        }
    }

    pub(super) fn prompt_len(&self) -> u32 {
        self.prompt.len() as u32
    }

    /// The known token at `position` of a choice; the trunk asks for prompt positions only.
    pub(super) fn token(&self, choice: u32, position: u32) -> TokenId {
        let prompt = self.prompt.len();
        match self.prompt.get(position as usize) {
            Some(token) => *token,
            None => self.choices[choice as usize].output[position as usize - prompt],
        }
    }

    /// Tokens the trunk's choices have, of those that go on the fewest.
    pub(super) fn made_least(&self) -> u32 {
        let goes_on = self.choices.iter().filter(|choice| !choice.ended);
        let made = goes_on.map(|choice| choice.output.len() as u32);
        made.min().unwrap_or(0)
    }

    /// Whether every choice has ended.
    pub(super) fn all_ended(&self) -> bool {
        self.choices.iter().all(|choice| choice.ended)
    }
}

/// The part of `ranges` that belongs to `group`, as one range (empty if none).
pub(super) fn shipped(ranges: &[OrdinalRange], group: usize) -> Range<u32> {
    ranges
        .iter()
        .find(|range| usize::from(range.group) == group)
        .map_or(0..0, |range| {
            range.first..range.first.saturating_add(range.count)
        })
}

/// A token stream, or the prompt that several share until it is computed.
#[derive(Debug)]
pub(super) struct Sequence {
    pub id: SequenceId,
    pub key: RequestKey,
    /// Computes the prompt for all choices; its `id.choice` is 0.
    pub trunk: bool,
    pub stage: Stage,
    /// Known tokens.
    pub known: u32,
    /// Positions whose K and V are in its blocks.
    pub computed: u32,
    pub tables: Tables,
    /// Names of its first whole blocks, as far as they were needed.
    pub names: Vec<BlockHash>,
    /// Whole blocks that are in the prefix index already.
    pub published: u32,
    pub credit: u32,
    pub extra_credit: u32,
    /// Choices it stands for.
    pub slots: u32,
    /// Per group, the window blocks charged while it holds blocks.
    pub charge: Vec<u32>,
}

impl Sequence {
    /// Names its first `blocks` whole blocks; all their tokens must be known.
    pub(super) fn extend_names(&mut self, request: &Request, blocks: u32, block_size: u32) {
        let Some(hasher) = &request.hasher else {
            return;
        };
        while (self.names.len() as u32) < blocks {
            let start = self.names.len() as u32 * block_size;
            let mut parent = self.names.last().copied();
            for span in (start..start + block_size).step_by(SPAN_TOKENS as usize) {
                let mut tokens = [0; SPAN_TOKENS as usize];
                for (slot, position) in tokens.iter_mut().zip(span..) {
                    *slot = request.token(self.id.choice, position);
                }
                parent = Some(hasher.next(parent, &tokens));
            }
            self.names.extend(parent);
        }
    }

    /// Names that a prefix hit may use: whole blocks below the last known token, of
    /// which at least one position is always computed.
    pub(super) fn usable_names(&self, block_size: u32) -> &[BlockHash] {
        let limit = (self.known.saturating_sub(1) / block_size) as usize;
        &self.names[..limit.min(self.names.len())]
    }
}
