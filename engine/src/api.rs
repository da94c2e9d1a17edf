//! What a worker says to the engine and hears from it.
//!
//! A worker names each request by a [`RequestKey`] of its own choice. The life of
//! one, by the kind of work:
//!
//! ```text
//! Local     Submit -> Accepted -> Started -> Tokens.. -> Finished (per choice) -> Released
//! Prefill   Submit -> Accepted -> Started -> LayersReady.. -> First -> [worker sends, then Release] -> Released
//! Receive   Submit -> Accepted -> Reserved -> [lanes write] -> Commit -> Tokens.. -> Finished -> Released
//! any       Cancel -> (Prefill, Receive: worker waits for its guards, then Release) -> Released
//! refused   Submit -> Rejected
//! ```
//!
//! `Released` is the last event of every accepted request and is sent exactly
//! once: from then on the engine holds no block for it.
//!
//! Blocks a peer may still touch are never free: after `Cancel` of a `Receive`
//! (between `Reserved` and `Commit`) or of a `Prefill` (after `Started`), they stay
//! quarantined or pinned until the worker says `Release`, which it does when the last
//! guard is gone. The same holds for a `Prefill` that `Failed`. A cancel at any other
//! time is answered with `Released` at once, and a `Release` that comes later, or for
//! any other request, is ignored. `Release` without `Cancel` ends a reservation or a
//! prefill as well.

use std::time::Duration;

use baton_proto::sampling::{FinishReason, SampledToken, SamplingParams};
use baton_proto::{RequestId, TokenId};

/// Names a request between one worker and its engine; never reused in an engine's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestKey(pub u64);

/// A run of block ordinals of one KV group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrdinalRange {
    pub group: u16,
    pub first: u32,
    pub count: u32,
}

/// What is to be done with a request here.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// Compute the prompt and decode it here.
    Local,
    /// Compute the prompt, draw each choice's next token, keep the blocks pinned for
    /// sending until `Release`. Only the blocks of `ship` are reported as ready.
    Prefill { ship: Vec<OrdinalRange> },
    /// Reserve blocks; the KV of the prompt arrives from a peer, then `Commit`.
    Receive,
}

/// A request as the engine needs it.
#[derive(Clone, Debug, PartialEq)]
pub struct Submission {
    pub key: RequestKey,
    /// For log lines only.
    pub request_id: RequestId,
    pub work: Work,
    /// At least one token; prompt + max_tokens fit the context.
    pub prompt: Vec<TokenId>,
    /// Per choice, the output tokens the client already has: forced, never drawn
    /// again, and never reported again. Empty, or one entry per choice. A choice whose
    /// forced tokens reach its end is `Finished` without another token.
    pub forced: Vec<Vec<TokenId>>,
    pub sampling: SamplingParams,
    /// The tenant's domain of the prefix cache.
    pub cache_salt: Vec<u8>,
    /// Higher goes first. Between requests of one priority every tenant, which
    /// `cache_salt` names, gets the same number of tokens.
    pub priority: i32,
    /// Whether the prefix cache may be read and filled by this request.
    pub use_cache: bool,
    /// Longest gap between two tokens of a choice that steps are planned for, on top of
    /// the engine's own target. `Local` and `Receive` only.
    pub itl_target: Option<Duration>,
}

/// What a worker tells the engine.
#[derive(Debug)]
pub enum Command {
    Submit(Box<Submission>),
    /// All bytes of a `Receive` arrived and were checked. `first` has one token per
    /// choice for index `forced.len()` of that choice.
    Commit {
        key: RequestKey,
        first: Vec<SampledToken>,
        /// The bytes are not those that this engine would have computed (another type of
        /// KV at the sender, positions missing behind a window): neither they nor what is
        /// computed from them is ever found by a prefix.
        foreign: bool,
    },
    /// Stop work on a request. Idempotent; unknown keys are ignored.
    Cancel {
        key: RequestKey,
    },
    /// End one choice early (a stop string matched in the router): `Finished` with
    /// `Cancelled`. Ignored for a `Prefill`.
    CancelChoice {
        key: RequestKey,
        choice: u32,
    },
    /// The worker's lanes no longer touch the request's blocks.
    Release {
        key: RequestKey,
    },
    /// Hold back or let go a choice whose reader is slow. While it is held back, others
    /// that are short of blocks may take its own; it is then recomputed.
    Pause {
        key: RequestKey,
        choice: u32,
        paused: bool,
    },
    /// Drop every unreferenced cached block, and let no later request hit a held one.
    ClearCache,
}

/// One block of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservedBlock {
    pub ordinal: u32,
    pub block: u32,
    pub generation: u32,
}

/// The blocks of one KV group that must arrive from a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupReservation {
    pub group: u16,
    /// Ascending ordinals.
    pub blocks: Vec<ReservedBlock>,
}

/// A token of one choice.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenEvent {
    pub key: RequestKey,
    pub choice: u32,
    /// Index in the choice's output, from 0.
    pub index: u32,
    pub token: SampledToken,
}

/// Why a submission was refused.
#[derive(Clone, Debug, PartialEq)]
pub struct Rejection {
    pub error: baton_proto::Error,
    pub retry_after: Option<Duration>,
}

/// What the engine tells a worker.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Taken into the queue.
    Accepted { key: RequestKey },
    /// Refused; nothing is held.
    Rejected {
        key: RequestKey,
        rejection: Rejection,
    },
    /// `Receive`: these blocks may be written until `Commit` or `Release`.
    Reserved {
        key: RequestKey,
        groups: Vec<GroupReservation>,
        /// Prompt tokens whose KV is already here.
        cached_tokens: u32,
    },
    /// `Prefill`: K and V of `layer` are final in these blocks: (ordinal, block id).
    /// Each shipped (layer, ordinal) is reported exactly once.
    LayersReady {
        key: RequestKey,
        group: u16,
        /// Model layer.
        layer: u32,
        blocks: Vec<(u32, u32)>,
    },
    /// `Prefill`: the next token of every choice; every shipped layer was reported.
    /// A choice that ends with this token says so. For a choice that had ended with
    /// its forced tokens already, its last forced token stands here with the reason.
    First {
        key: RequestKey,
        tokens: Vec<(SampledToken, Option<FinishReason>)>,
        cached_tokens: u32,
    },
    /// Prompt processing started (`Local`, `Prefill`): for queue-time accounting.
    Started { key: RequestKey, cached_tokens: u32 },
    /// Tokens of one step, in order.
    Tokens(Vec<TokenEvent>),
    /// A choice ended. After its last token.
    Finished {
        key: RequestKey,
        choice: u32,
        reason: FinishReason,
        output_tokens: u32,
    },
    /// The request cannot go on (for example non-finite logits); `Released` follows.
    Failed {
        key: RequestKey,
        error: baton_proto::Error,
    },
    /// The engine holds nothing for this request any more.
    Released { key: RequestKey },
    /// After every step.
    Step(StepStatistics),
    /// The engine thread ended; no event follows.
    Stopped { error: Option<String> },
}

/// What one step did and how the engine stands after it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepStatistics {
    pub duration: Duration,
    pub prefill_tokens: u32,
    pub decode_tokens: u32,
    pub flops: u64,
    pub bytes: u64,
    pub preemptions: u32,
    /// Real over foretold time since the step before, where decode rows ran: how far
    /// their tokens' gap was off.
    pub over_prediction: Option<f64>,
}

/// How full an engine is, as of its last step or command. Cheap to read at any time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Load {
    pub requests_running: u32,
    pub requests_waiting: u32,
    pub prefill_tokens_waiting: u32,
    pub preemptions_total: u64,
    pub prefix_queries_tokens_total: u64,
    pub prefix_hits_tokens_total: u64,
    /// Requests that failed because the model's logits were not finite.
    pub not_finite_total: u64,
    /// Smallest target on the gap between tokens that is in force.
    pub itl_target: Option<Duration>,
    /// Requests whose start was put off to keep a target.
    pub slo_delayed_total: u64,
    /// Steps whose prompt tokens were cut to keep a target.
    pub slo_cut_steps_total: u64,
    /// Per KV group.
    pub blocks: Vec<BlockCounts>,
}

/// Blocks of one KV group by state; the counts sum to `total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    pub total: u32,
    pub free: u32,
    /// In the table of a running sequence.
    pub referenced: u32,
    /// Only in the prefix cache; evictable.
    pub cached: u32,
    /// Granted to a peer to write.
    pub reserved: u32,
    /// Being sent to a peer.
    pub pinned: u32,
    /// A peer may still touch it.
    pub quarantined: u32,
}

/// Receives the engine's events on the engine's thread. Blocking here stalls the
/// engine, which is the intended back-pressure; losing the receiver is not an error.
pub trait EventSink: Send {
    fn emit(&mut self, event: Event);
}

impl<F: FnMut(Event) + Send> EventSink for F {
    fn emit(&mut self, event: Event) {
        self(event);
    }
}
