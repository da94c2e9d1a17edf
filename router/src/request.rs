//! The life of one request as a pure state machine: events in, actions out.
//!
//! It decides which worker does what next, keeps the [token log](token_log) of
//! every choice, and bounds every wait. It owns no clock, socket or task: `now`
//! is the time since the request was accepted, and [the driver](crate::driver)
//! carries the actions out.
//!
//! ```text
//! Queued -> Placing -> Reserving -> Prefilling -> HandingOff -> Decoding -> Finished
//!             ^  |         |  (local: no P, D computes)  |          |
//!             |  +-- P failed: Reticket at D, another P (or PrefillLocally)
//!             +----- D failed: another D, the log's tokens forced
//!             +----- D goes: the same, while D decodes on until the other one runs
//! ```
//!
//! Every placement has a number, the attempt. Events carry the attempt they
//! belong to, so what an abandoned worker still says is ignored.
//!
//! A `Reticket` keeps the forced tokens that D was started with: a token that was
//! sent since is drawn again by the new prefill worker, must come out the same
//! (same numerics, counter-based sampling) and is dropped by its index.

mod action;
mod failure;
mod gap;
mod moving;
pub mod token_log;

use std::time::Duration;

use baton_proto::environment::{self, Defect};
use baton_proto::sampling::FinishReason;
use baton_proto::{Error, ErrorKind, TokenId, v1};

pub use action::{Action, DecodeEvent, Event, PlaceQuery, PrefillEvent, Timeouts};
use token_log::{Conflict, Drawn, Run, TokenLog};

use crate::placement::{DECODE_WORKERS_TRIED, NO_DECODE_WORKER, Placement, WorkerKey};

/// What the machine must know of a request.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// Choices.
    pub n: u32,
    /// Per choice.
    pub max_tokens: u32,
    /// Failed attempts before the request fails. At least 1.
    pub attempts_max: u32,
    /// Whether every token is drawn with the same arithmetic, whoever draws it.
    pub exact: bool,
    pub timeouts: Timeouts,
}

/// How often a request looks whether a decode worker is there now.
const LOOK_AGAIN: Duration = Duration::from_millis(200);
/// A dead worker may be taken for one that is there for so long.
const NOTICED_WITHIN: Duration = Duration::from_millis(500);

/// Where a request is. For people, logs and tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Queued,
    Placing,
    /// D was asked; `queued` once it said that the request waits there.
    Reserving {
        queued: bool,
    },
    /// P (or D itself on the local path) has the prompt.
    Prefilling(Prefilling),
    /// The first token is here, the KV is on its way.
    HandingOff,
    Decoding,
    Finished,
}

/// How far a prefill is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefilling {
    Asked,
    Accepted,
    Computing,
}

#[derive(Clone, Debug)]
struct Decode {
    worker: WorkerKey,
    /// The attempt of its start: names the session.
    session: u32,
    /// The attempt whose ticket is (being) granted.
    ticket: u32,
    /// Per choice, what it was started with.
    forced: Vec<Vec<TokenId>>,
    local: bool,
    /// It took the request (reserved, started or sent tokens).
    took: bool,
    /// It has the KV, so that it knows its choices.
    running: bool,
    /// Choices to cancel as soon as it runs.
    cancel_choices: Vec<u32>,
}

#[derive(Clone, Debug)]
struct Prefill {
    worker: WorkerKey,
    attempt: u32,
    accepted: bool,
}

#[derive(Clone, Debug)]
struct BrokenLane {
    prefill: WorkerKey,
    decode: WorkerKey,
    charged: bool,
}

/// The state of one request.
#[derive(Debug)]
pub struct Request {
    spec: Spec,
    logs: Vec<TokenLog>,
    /// Choices whose end was reported.
    reported: Vec<bool>,
    stage: Stage,
    /// When the stage has waited long enough.
    stage_deadline: Option<Duration>,
    attempt: u32,
    failures: u32,
    decode: Option<Decode>,
    /// The decode worker that goes, and decodes on while the request moves.
    aside: Option<Decode>,
    prefill: Option<Prefill>,
    /// The prefill worker to call once D has reserved.
    next_prefill: Option<WorkerKey>,
    excluded_decode: Vec<WorkerKey>,
    excluded_prefill: Vec<WorkerKey>,
    /// Handoffs that broke between the two: either may be at fault.
    broken_lanes: Vec<BrokenLane>,
    last_error: Option<Error>,
    cached_tokens: Option<u32>,
    /// Since when it waits for a decode worker to be there.
    unplaced_since: Option<Duration>,
    gap: gap::Gap,
    /// The time of the event in hand.
    now: Duration,
}

impl Request {
    /// A request that waits for [`Event::Begin`].
    pub fn new(spec: Spec) -> Self {
        Self {
            spec,
            logs: (0..spec.n)
                .map(|choice| TokenLog::new(choice, spec.max_tokens))
                .collect(),
            reported: vec![false; spec.n as usize],
            stage: Stage::Queued,
            stage_deadline: None,
            attempt: 0,
            failures: 0,
            decode: None,
            aside: None,
            prefill: None,
            next_prefill: None,
            excluded_decode: Vec::new(),
            excluded_prefill: Vec::new(),
            broken_lanes: Vec::new(),
            last_error: None,
            cached_tokens: None,
            unplaced_since: None,
            gap: gap::Gap::default(),
            now: Duration::ZERO,
        }
    }

    /// A choice begins with these tokens, which its client says it was sent. To be
    /// called before [`Event::Begin`].
    pub fn take_over(&mut self, choice: u32, ids: Vec<TokenId>) {
        if let Some(log) = self.logs.get_mut(choice as usize) {
            *log = TokenLog::claimed(choice, self.spec.max_tokens, ids);
        }
    }

    /// Where the request is.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// When [`Event::Tick`] is due.
    pub fn wake_at(&self) -> Duration {
        let total = self.spec.timeouts.total;
        let stage = self.stage_deadline.unwrap_or(total);
        self.gap_ends().unwrap_or(total).min(stage).min(total)
    }

    /// Prompt tokens that the first placement found in a prefix cache; `None` until
    /// the worker that computes the prompt has said so.
    pub fn cached_tokens(&self) -> Option<u32> {
        self.cached_tokens
    }

    /// Tokens of a choice so far, up to a stop string.
    pub fn output_tokens(&self, choice: u32) -> u32 {
        self.logs.get(choice as usize).map_or(0, TokenLog::len)
    }

    /// Takes an event and says what to do, in this order. After
    /// [`Stage::Finished`] nothing is answered.
    pub fn handle(&mut self, now: Duration, event: Event) -> Vec<Action> {
        let mut out = Vec::new();
        if self.stage == Stage::Finished {
            return out;
        }
        self.now = now;
        match event {
            Event::Begin => self.place(&mut out),
            Event::Placed(Ok(placement)) => self.placed(now, placement, &mut out),
            Event::Placed(Err(_)) if self.aside.is_some() => self.stay(&mut out),
            Event::Placed(Err(error)) if self.may_wait(now, &error) => {
                self.enter(Stage::Placing, now, LOOK_AGAIN);
            }
            Event::Placed(Err(error)) => {
                // Why nobody may go on says more than why the last one did not.
                let last = self.last_error.take().filter(|_| error.field.is_empty());
                self.fail(last.unwrap_or(error), &mut out);
            }
            Event::Decode { session, event } => {
                if self
                    .decode
                    .as_ref()
                    .is_some_and(|decode| decode.session == session)
                {
                    self.handle_decode(now, event, &mut out);
                } else if self
                    .aside
                    .as_ref()
                    .is_some_and(|aside| aside.session == session)
                {
                    self.handle_aside(event, &mut out);
                }
            }
            Event::Prefill { attempt, event } => {
                if self
                    .prefill
                    .as_ref()
                    .is_some_and(|prefill| prefill.attempt == attempt)
                {
                    self.handle_prefill(now, event, &mut out);
                }
            }
            Event::WorkerLost { worker, error } => self.worker_lost(&worker, error, &mut out),
            Event::StopMatched {
                choice,
                output_tokens,
            } => self.stop_matched(choice, output_tokens, &mut out),
            Event::Tick => self.tick(now, &mut out),
            Event::ClientGone => self.release(&mut out),
            Event::Abort(error) => self.fail(error, &mut out),
        }
        out
    }

    /// Whether a worker that starts, or comes back, would be in time: for a request of which
    /// its client has nothing yet, or for a stream whose gap may last so long.
    fn may_wait(&mut self, now: Duration, error: &Error) -> bool {
        let timeouts = self.spec.timeouts;
        let pool = match self.logs.iter().all(TokenLog::is_empty) {
            true => timeouts.pool,
            false => timeouts.pool_of_stream,
        };
        let most = match error.reason.as_str() {
            NO_DECODE_WORKER => {
                // Whoever comes is welcome, also one that was left.
                self.excluded_decode.clear();
                pool
            }
            DECODE_WORKERS_TRIED if self.left_dead() => pool.min(NOTICED_WITHIN),
            _ => return false,
        };
        let since = *self.unplaced_since.get_or_insert(now);
        now.saturating_sub(since) < most
    }

    /// The last worker may be dead, for all that is known.
    fn left_dead(&self) -> bool {
        let error = self.last_error.as_ref();
        error.is_some_and(|error| error.kind == ErrorKind::Unavailable)
    }

    fn place(&mut self, out: &mut Vec<Action>) {
        self.stage = Stage::Placing;
        self.stage_deadline = None;
        out.push(Action::Place(PlaceQuery {
            keep_decode: self.decode.as_ref().map(|decode| decode.worker.clone()),
            exclude_decode: self.excluded_decode.clone(),
            exclude_prefill: self.excluded_prefill.clone(),
            resumed_tokens: self.logs.iter().map(TokenLog::len).max().unwrap_or(0),
            // Choices that went different ways share no KV beyond the prompt.
            split_allowed: self.spec.n == 1 || self.logs.iter().all(TokenLog::is_empty),
        }));
    }

    fn placed(&mut self, now: Duration, placement: Placement, out: &mut Vec<Action>) {
        self.unplaced_since = None;
        self.attempt += 1;
        let attempt = self.attempt;
        self.next_prefill = placement.prefill;
        let local = self.next_prefill.is_none();
        match &mut self.decode {
            Some(decode) => {
                decode.ticket = attempt;
                decode.local = local;
                if local {
                    let forced = self.forced();
                    out.push(Action::PrefillLocally { attempt, forced });
                } else {
                    out.push(Action::Reticket { attempt });
                }
            }
            None => {
                let forced = self.forced();
                let ended = |(choice, log): (usize, &TokenLog)| {
                    log.finished().is_some().then_some(choice as u32)
                };
                self.decode = Some(Decode {
                    worker: placement.decode.clone(),
                    session: attempt,
                    ticket: attempt,
                    forced: forced.clone(),
                    local,
                    took: false,
                    running: false,
                    cancel_choices: self.logs.iter().enumerate().filter_map(ended).collect(),
                });
                out.push(Action::StartDecode {
                    worker: placement.decode,
                    local,
                    attempt,
                    forced,
                });
            }
        }
        self.enter(
            Stage::Reserving { queued: false },
            now,
            self.spec.timeouts.answer,
        );
    }

    /// What a start forces: the log of every choice; nothing if nothing was sent.
    fn forced(&self) -> Vec<Vec<TokenId>> {
        if self.logs.iter().all(TokenLog::is_empty) {
            return Vec::new();
        }
        self.logs.iter().map(|log| log.forced().to_vec()).collect()
    }

    fn enter(&mut self, stage: Stage, now: Duration, wait: Duration) {
        self.stage = stage;
        self.stage_deadline = Some(now.saturating_add(wait));
    }

    fn handle_decode(&mut self, now: Duration, event: DecodeEvent, out: &mut Vec<Action>) {
        let timeouts = self.spec.timeouts;
        match event {
            DecodeEvent::Queued => {
                if self.stage == (Stage::Reserving { queued: false }) {
                    self.enter(Stage::Reserving { queued: true }, now, timeouts.queue);
                }
            }
            DecodeEvent::Reserved { attempt, lane } => self.reserved(now, attempt, lane, out),
            DecodeEvent::Started { cached_tokens } => {
                self.note_cached(cached_tokens);
                if let Some(decode) = &mut self.decode {
                    decode.took = true;
                }
                self.enter(
                    Stage::Prefilling(Prefilling::Computing),
                    now,
                    timeouts.prefill,
                );
            }
            DecodeEvent::Committed { first } => {
                let base = self.decode_base();
                self.decode_runs(out);
                self.enter(Stage::Decoding, now, timeouts.stall);
                for (choice, drawn) in first.into_iter().enumerate() {
                    let index = base.get(choice).copied().unwrap_or(0);
                    self.offer(choice as u32, index, vec![drawn], out);
                }
                self.settle(out);
            }
            DecodeEvent::Aborted { attempt, error } => {
                let waits = matches!(self.stage, Stage::Prefilling(_) | Stage::HandingOff);
                if waits && self.decode.as_ref().is_some_and(|d| d.ticket == attempt) {
                    self.prefill_failed(error, out);
                }
            }
            DecodeEvent::Tokens {
                choice,
                first_index,
                tokens,
            } => {
                self.decode_runs(out);
                self.enter(Stage::Decoding, now, timeouts.stall);
                self.offer(choice, first_index, tokens, out);
                self.settle(out);
            }
            DecodeEvent::Finished {
                choice,
                reason,
                output_tokens,
            } => self.decode_finished(choice, reason, output_tokens, out),
            DecodeEvent::Ended { error } => {
                let error = error.unwrap_or_else(|| {
                    Error::new(ErrorKind::Internal, "ended before every choice had ended")
                });
                self.decode_failed(error, out);
            }
            DecodeEvent::Failed { error } => self.decode_failed(error, out),
            DecodeEvent::Leaving => self.decode_leaves(out),
            DecodeEvent::Unknown => {}
        }
    }

    fn reserved(
        &mut self,
        now: Duration,
        attempt: u32,
        lane: Box<v1::Lane>,
        out: &mut Vec<Action>,
    ) {
        let Some(decode) = &mut self.decode else {
            return;
        };
        if decode.ticket != attempt || !matches!(self.stage, Stage::Reserving { .. }) {
            return;
        }
        decode.took = true;
        let Some(worker) = self.next_prefill.take() else {
            return;
        };
        let forced = decode.forced.clone();
        self.prefill = Some(Prefill {
            worker: worker.clone(),
            attempt,
            accepted: false,
        });
        out.push(Action::StartPrefill {
            worker,
            attempt,
            lane,
            forced,
        });
        self.enter(
            Stage::Prefilling(Prefilling::Asked),
            now,
            self.spec.timeouts.answer,
        );
    }

    fn handle_prefill(&mut self, now: Duration, event: PrefillEvent, out: &mut Vec<Action>) {
        let timeouts = self.spec.timeouts;
        let prefilling = matches!(self.stage, Stage::Prefilling(_));
        match event {
            PrefillEvent::Accepted => {
                if let Some(prefill) = &mut self.prefill {
                    prefill.accepted = true;
                }
                if prefilling {
                    self.enter(Stage::Prefilling(Prefilling::Accepted), now, timeouts.queue);
                }
            }
            PrefillEvent::Started { cached_tokens } => {
                self.note_cached(cached_tokens);
                if prefilling {
                    self.enter(
                        Stage::Prefilling(Prefilling::Computing),
                        now,
                        timeouts.prefill,
                    );
                }
            }
            PrefillEvent::First { tokens } => {
                let base = self.decode_base();
                if prefilling {
                    self.enter(Stage::HandingOff, now, timeouts.handoff);
                }
                for (choice, drawn) in tokens.into_iter().enumerate() {
                    let index = base.get(choice).copied().unwrap_or(0);
                    self.offer(choice as u32, index, vec![drawn], out);
                }
                self.settle(out);
            }
            PrefillEvent::HandedOff { committed } => {
                if self.stage == Stage::HandingOff && !committed || prefilling {
                    let error =
                        Error::new(ErrorKind::Internal, "ended without handing anything over");
                    return self.prefill_failed(error, out);
                }
                self.prefill = None;
                out.push(Action::DropPrefill);
                if self.stage == Stage::HandingOff {
                    self.enter(Stage::HandingOff, now, timeouts.handoff);
                }
            }
            PrefillEvent::Failed { error } => self.prefill_failed(error, out),
            PrefillEvent::Unknown => {}
        }
    }

    /// Per choice, the index of the token that prefill draws.
    fn decode_base(&self) -> Vec<u32> {
        let forced = self.decode.iter().flat_map(|decode| &decode.forced);
        forced.map(|tokens| tokens.len() as u32).collect()
    }

    fn decode_runs(&mut self, out: &mut Vec<Action>) {
        self.moved(out);
        if let Some(decode) = &mut self.decode {
            decode.took = true;
            decode.running = true;
            for choice in decode.cancel_choices.drain(..) {
                out.push(Action::CancelChoice { choice });
            }
        }
    }

    fn note_cached(&mut self, cached_tokens: u32) {
        self.cached_tokens.get_or_insert(cached_tokens);
    }

    fn decode_finished(
        &mut self,
        choice: u32,
        reason: FinishReason,
        output_tokens: u32,
        out: &mut Vec<Action>,
    ) {
        let Some(log) = self.logs.get_mut(choice as usize) else {
            let error = format!("choice {choice} is not one of {}", self.spec.n);
            return self.fail(Error::new(ErrorKind::Internal, error), out);
        };
        if log.finished().is_some() {
            return;
        }
        if reason == FinishReason::Cancelled {
            // Nobody here asked for it, so the worker is giving the request up.
            let error = Error::new(ErrorKind::Unavailable, "cancelled the request by itself");
            return self.decode_failed(error, out);
        }
        match log.announce_end(reason, output_tokens) {
            Ok(()) => self.settle(out),
            Err(conflict) => self.conflict(&conflict, out),
        }
    }

    fn offer(&mut self, choice: u32, first_index: u32, run: Vec<Drawn>, out: &mut Vec<Action>) {
        if self.stage == Stage::Finished {
            return;
        }
        let Some(log) = self.logs.get_mut(choice as usize) else {
            let error = format!("choice {choice} is not one of {}", self.spec.n);
            return self.fail(Error::new(ErrorKind::Internal, error), out);
        };
        let all = (self.attempt > 1 && environment::has(Defect::RetryNotDeduplicated))
            .then(|| run.iter().map(|(token, _)| token.clone()).collect());
        let offered = log.offer(first_index, run).map(|run| Run {
            tokens: all.unwrap_or(run.tokens),
            ..run
        });
        match offered {
            Ok(run) if run.tokens.is_empty() => {}
            Ok(run) => {
                self.went_on();
                out.push(Action::Emit { choice, run });
            }
            Err(conflict) => self.conflict(&conflict, out),
        }
    }

    fn conflict(&mut self, conflict: &Conflict, out: &mut Vec<Action>) {
        if let Conflict::Claimed { choice, .. } = conflict {
            let field = format!("resume.choices[{choice}].token_ids");
            let error = Error::invalid(field, conflict.to_string());
            return self.fail(error.with_reason("RESUME_MISMATCH"), out);
        }
        out.push(Action::CountConflict);
        self.fail(Error::new(ErrorKind::Internal, conflict.to_string()), out);
    }

    fn stop_matched(&mut self, choice: u32, output_tokens: u32, out: &mut Vec<Action>) {
        let Some(log) = self.logs.get_mut(choice as usize) else {
            return;
        };
        let known = log.finished().is_some();
        log.stop_at(output_tokens);
        if !known && let Some(decode) = &mut self.decode {
            if decode.running {
                out.push(Action::CancelChoice { choice });
            } else {
                decode.cancel_choices.push(choice);
            }
        }
        self.settle(out);
    }

    /// Reports the ends that are new, and the end of the request.
    fn settle(&mut self, out: &mut Vec<Action>) {
        if self.stage == Stage::Finished {
            return;
        }
        for (log, (choice, reported)) in self.logs.iter().zip(self.reported.iter_mut().enumerate())
        {
            if let Some(reason) = log.finished().filter(|_| !*reported) {
                *reported = true;
                out.push(Action::FinishChoice {
                    choice: choice as u32,
                    reason,
                });
            }
        }
        if self.reported.iter().all(|reported| *reported) {
            out.push(Action::Complete);
            self.release(out);
        }
    }

    /// Ends the request here and at its workers.
    fn release(&mut self, out: &mut Vec<Action>) {
        let done = self.logs.iter().all(|log| log.finished().is_some());
        if self.prefill.take().is_some() {
            // A worker that knows of the end is left its last word.
            out.push(if done {
                Action::AwaitPrefillEnd
            } else {
                Action::DropPrefill
            });
        }
        if self.aside.take().is_some() {
            out.push(Action::DropDecodeAside);
        }
        if let Some(decode) = self.decode.take() {
            out.push(if done && decode.running {
                Action::AwaitDecodeEnd
            } else {
                Action::CancelDecode
            });
        }
        self.stage = Stage::Finished;
        self.stage_deadline = None;
    }
}

#[cfg(test)]
mod tests;
