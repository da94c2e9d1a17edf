//! What the request machine hears and says.

use std::time::Duration;

use baton_proto::sampling::FinishReason;
use baton_proto::{Error, TokenId, v1};

use super::token_log::{Drawn, Run};
use crate::placement::{Placement, WorkerKey};

/// How long each wait may take.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// The whole request, from accepted.
    pub total: Duration,
    /// For a decode worker to be there at all, before the first token.
    pub pool: Duration,
    /// The same after it.
    pub pool_of_stream: Duration,
    /// Of a stream whose worker died, beyond what computing is foretold to take.
    pub gap: Duration,
    /// A worker's death shows within this time.
    pub silence: Duration,
    /// A worker's first answer to a call.
    pub answer: Duration,
    /// In a worker's queue.
    pub queue: Duration,
    /// From the start of a prompt's computation to its first token.
    pub prefill: Duration,
    /// From the first token, and from the sender's last word, to the receiver's commit.
    pub handoff: Duration,
    /// Between two signs of life of a decoding request.
    pub stall: Duration,
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Event {
    Begin,
    /// The answer to [`Action::Place`].
    Placed(Result<Placement, Error>),
    Decode {
        session: u32,
        event: DecodeEvent,
    },
    Prefill {
        attempt: u32,
        event: PrefillEvent,
    },
    /// A worker fell silent or out of the cluster.
    WorkerLost {
        worker: WorkerKey,
        error: Error,
    },
    /// The text layer found a stop string; the token at `output_tokens - 1` completed it.
    StopMatched {
        choice: u32,
        output_tokens: u32,
    },
    /// [`super::Request::wake_at`] has come.
    Tick,
    ClientGone,
    /// The router gives the request up (a client that does not read, a shutdown).
    Abort(Error),
}

/// What a decode worker said.
#[derive(Clone, Debug)]
pub enum DecodeEvent {
    Queued,
    Reserved {
        attempt: u32,
        lane: Box<v1::Lane>,
    },
    Started {
        cached_tokens: u32,
    },
    Committed {
        first: Vec<Drawn>,
    },
    Aborted {
        attempt: u32,
        error: Error,
    },
    Tokens {
        choice: u32,
        first_index: u32,
        tokens: Vec<Drawn>,
    },
    Finished {
        choice: u32,
        reason: FinishReason,
        output_tokens: u32,
    },
    Ended {
        error: Option<Error>,
    },
    /// The worker goes, and the request with it before long: it is to move.
    Leaving,
    /// Refused, or the call broke.
    Failed {
        error: Error,
    },
    /// An event of a newer peer.
    Unknown,
}

/// What a prefill worker said.
#[derive(Clone, Debug)]
pub enum PrefillEvent {
    Accepted,
    Started {
        cached_tokens: u32,
    },
    First {
        tokens: Vec<Drawn>,
    },
    HandedOff {
        committed: bool,
    },
    /// Refused, or the call broke, or it ended without a word.
    Failed {
        error: Error,
    },
    /// An event of a newer peer.
    Unknown,
}

/// What a placement must respect.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlaceQuery {
    /// The decode worker stays; only a prefill worker (or none) is wanted.
    pub keep_decode: Option<WorkerKey>,
    pub exclude_decode: Vec<WorkerKey>,
    pub exclude_prefill: Vec<WorkerKey>,
    /// Tokens already sent, that have to be computed again like a prompt.
    pub resumed_tokens: u32,
    pub split_allowed: bool,
}

impl PlaceQuery {
    /// Nothing was tried, and the client has nothing.
    pub fn is_first(&self) -> bool {
        self.keep_decode.is_none()
            && self.exclude_decode.is_empty()
            && self.exclude_prefill.is_empty()
            && self.resumed_tokens == 0
    }
}

/// What to do.
#[derive(Clone, Debug)]
pub enum Action {
    /// Choose workers, answer with [`Event::Placed`].
    Place(PlaceQuery),
    /// Open a decode call; its events carry `attempt` as their session.
    StartDecode {
        worker: WorkerKey,
        local: bool,
        attempt: u32,
        forced: Vec<Vec<TokenId>>,
    },
    Reticket {
        attempt: u32,
    },
    PrefillLocally {
        attempt: u32,
        forced: Vec<Vec<TokenId>>,
    },
    CancelChoice {
        choice: u32,
    },
    /// Open a prefill call.
    StartPrefill {
        worker: WorkerKey,
        attempt: u32,
        lane: Box<v1::Lane>,
        forced: Vec<Vec<TokenId>>,
    },
    /// Close the prefill call; an open one is cancelled by that.
    DropPrefill,
    /// The prefill call is over but for its last word.
    AwaitPrefillEnd,
    /// Cancel the decode call.
    CancelDecode,
    /// The decode call is over but for its last word.
    AwaitDecodeEnd,
    /// The decode call goes on beside the next one, until that one runs.
    SetDecodeAside,
    /// The call that was set aside is the decode call again: nobody takes its place.
    TakeDecodeBack,
    /// Close the call that was set aside, which cancels it.
    DropDecodeAside,
    /// Send tokens to the client.
    Emit {
        choice: u32,
        run: Run,
    },
    FinishChoice {
        choice: u32,
        reason: FinishReason,
    },
    /// Send the last event.
    Complete,
    /// Two sources disagreed.
    CountConflict,
    /// A request of a worker that goes runs elsewhere.
    CountMove,
    /// The request is placed again.
    CountRetry {
        mid_stream: bool,
        migration: bool,
    },
    /// End the client's stream with an error.
    Fail(Error),
}
