//! The request machine's answers to failures: who is blamed, who is tried next.
//!
//! A refusal (a worker that did not take the request) costs nothing but that
//! worker's place among the candidates; a failure after it took the request is
//! charged, and [`super::Spec::attempts_max`] of those end the request. A worker that
//! leaves in order is not charged either.
//!
//! A handoff that breaks on its way is first put to the prefill worker. If the decode
//! worker turns out dead, or a second prefill worker cannot reach it either, it was the
//! decode worker, and the prefill workers are candidates again.

use std::time::Duration;

use baton_proto::live_requests::RESUMED_ELSEWHERE;
use baton_proto::worker_info::{HANDOFF_PEER_LOST, HANDOFF_UNREACHABLE, WORKER_DRAINING};
use baton_proto::{Error, ErrorKind};

use super::{Action, BrokenLane, Prefilling, Request, Stage, TokenLog, WorkerKey};
use crate::placement::NO_DECODE_WORKER;

/// Whether another worker would say the same.
fn is_final(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::Invalid
            | ErrorKind::Unauthenticated
            | ErrorKind::Unsupported
            | ErrorKind::TooLarge
    )
}

/// Whether a handoff broke on its way: the sender saw its receiver go, or could not
/// reach it. The fault may be at either end.
fn is_between(error: &Error) -> bool {
    matches!(
        error.reason.as_str(),
        HANDOFF_PEER_LOST | "HANDOFF_FAILED" | HANDOFF_UNREACHABLE
    )
}

/// A worker's clock starts a moment later than ours, and may still be read earlier.
const DEADLINE_SLACK: Duration = Duration::from_millis(20);

/// When to come back if a worker that has no room does not say it.
const RETRY_AFTER_DEFAULT: Duration = Duration::from_secs(1);

/// A worker's error as the client sees it: whose it is, and a hint when to come back.
fn attribute(role: &str, worker: &WorkerKey, mut error: Error) -> Error {
    // What is wrong with a handoff is never the request's fault.
    let handoff = error.reason.starts_with("HANDOFF");
    if error.reason == RESUMED_ELSEWHERE {
        return error;
    }
    if is_final(error.kind) && !handoff {
        if let Some(field) = error.field.strip_prefix("work.") {
            error.field = field.to_owned();
        }
        return error;
    }
    error.message = format!("{role} worker `{}`: {}", worker.id, error.message);
    // A worker's own deadlines, fences and cancels are, for a client, a worker that
    // did not do it; the request's deadline is kept here.
    if handoff
        || matches!(
            error.kind,
            ErrorKind::Cancelled | ErrorKind::Deadline | ErrorKind::Fenced | ErrorKind::NotFound
        )
    {
        error.kind = ErrorKind::Unavailable;
    }
    if matches!(error.kind, ErrorKind::Overloaded | ErrorKind::Unavailable) {
        error.retry_after.get_or_insert(RETRY_AFTER_DEFAULT);
    }
    error
}

impl Request {
    /// The prefill attempt is over without a commit.
    pub(super) fn prefill_failed(&mut self, error: Error, out: &mut Vec<Action>) {
        let prefill = self.prefill.take();
        if prefill.is_some() {
            out.push(Action::DropPrefill);
        }
        if !matches!(self.stage, Stage::Prefilling(_) | Stage::HandingOff) {
            // D has what it needs.
            return;
        }
        if let Some(prefill) = prefill {
            if let Some(decode) = &self.decode
                && is_between(&error)
            {
                let decode = decode.worker.clone();
                let again = self
                    .broken_lanes
                    .iter()
                    .any(|lane| lane.decode == decode && lane.prefill != prefill.worker);
                if again {
                    return self.decode_failed(error, out);
                }
                self.broken_lanes.push(BrokenLane {
                    prefill: prefill.worker.clone(),
                    decode,
                    charged: prefill.accepted,
                });
            }
            if prefill.accepted {
                self.interrupted();
            }
            let charged = prefill.accepted && error.reason != WORKER_DRAINING;
            let error = attribute("prefill", &prefill.worker, error);
            self.excluded_prefill.push(prefill.worker);
            if !self.may_go_on(error, charged, out) {
                return;
            }
        } else if !self.may_go_on(error, true, out) {
            return;
        }
        self.count_retry(false, out);
        self.place(out);
    }

    /// The decode worker will not go on with the request.
    pub(super) fn decode_failed(&mut self, error: Error, out: &mut Vec<Action>) {
        let Some(decode) = self.decode.take() else {
            return;
        };
        if self.prefill.take().is_some() {
            out.push(Action::DropPrefill);
        }
        out.push(Action::CancelDecode);
        self.next_prefill = None;
        self.clear_senders_to(&decode.worker);
        // A worker that goes has done nothing wrong; and as long as the one that the request
        // moves away from still runs, nothing is lost.
        let charged = decode.took && error.reason != WORKER_DRAINING && self.aside.is_none();
        let error = attribute("decode", &decode.worker, error);
        self.excluded_decode.push(decode.worker);
        if self.aside.is_none() {
            self.logs.iter_mut().for_each(TokenLog::forget_held);
            if decode.took {
                self.interrupted();
            }
        }
        if self.may_go_on(error, charged, out) {
            self.count_retry(decode.running, out);
            self.place(out);
        }
    }

    /// Prefill workers whose handoff to this decode worker broke were not at fault.
    fn clear_senders_to(&mut self, decode: &WorkerKey) {
        let (theirs, others) = std::mem::take(&mut self.broken_lanes)
            .into_iter()
            .partition::<Vec<_>, _>(|lane| lane.decode == *decode);
        self.broken_lanes = others;
        for lane in theirs {
            self.excluded_prefill.retain(|key| *key != lane.prefill);
            self.failures -= u32::from(lane.charged);
        }
    }

    fn count_retry(&self, migration: bool, out: &mut Vec<Action>) {
        let mid_stream = self.logs.iter().any(|log| !log.is_empty());
        out.push(Action::CountRetry {
            mid_stream,
            migration,
        });
    }

    /// Charges a failure; fails the request when that was the last try or when
    /// nobody else would answer otherwise.
    fn may_go_on(&mut self, error: Error, charged: bool, out: &mut Vec<Action>) -> bool {
        self.failures += u32::from(charged);
        if self.now + DEADLINE_SLACK >= self.spec.timeouts.total {
            self.fail_late(out);
            return false;
        }
        let given_away = error.reason == RESUMED_ELSEWHERE;
        if given_away || is_final(error.kind) || self.failures >= self.spec.attempts_max {
            self.fail(error, out);
            return false;
        }
        self.last_error = Some(error);
        true
    }

    /// Ends the request with an error.
    pub(super) fn fail(&mut self, error: Error, out: &mut Vec<Action>) {
        out.push(Action::Fail(error));
        self.release(out);
    }

    fn fail_late(&mut self, out: &mut Vec<Action>) {
        let total = self.spec.timeouts.total.as_millis();
        let late = |doing: &str| {
            let message = format!("the request's time of {total} ms ended while {doing}");
            Error::new(ErrorKind::Deadline, message)
        };
        let error = if self.unplaced_since.is_some() {
            late("no decode worker was there").with_reason(NO_DECODE_WORKER)
        } else {
            late(self.stage.doing())
        };
        self.fail(error, out);
    }

    pub(super) fn worker_lost(&mut self, worker: &WorkerKey, error: Error, out: &mut Vec<Action>) {
        if self.decode.as_ref().is_some_and(|d| d.worker == *worker) {
            self.decode_failed(error, out);
        } else if self.prefill.as_ref().is_some_and(|p| p.worker == *worker) {
            self.prefill_failed(error, out);
        }
    }

    /// A deadline has come; early wake-ups do nothing.
    pub(super) fn tick(&mut self, now: Duration, out: &mut Vec<Action>) {
        if now >= self.spec.timeouts.total {
            return self.fail_late(out);
        }
        if self.gap_ends().is_some_and(|end| now >= end) {
            return self.end_stalled(out);
        }
        if self.stage_deadline.is_none_or(|deadline| now < deadline) {
            return;
        }
        let silent = |what: String, wait: Duration| {
            let message = format!("{what} for {} ms", wait.as_millis());
            Error::new(ErrorKind::Unavailable, message)
        };
        let timeouts = self.spec.timeouts;
        let local = self.decode.as_ref().is_some_and(|decode| decode.local);
        match self.stage {
            Stage::Placing => self.place(out),
            Stage::Reserving { queued: false } => {
                let error = silent("gave no answer".to_owned(), timeouts.answer);
                self.decode_failed(error.with_reason("RESERVE_TIMEOUT"), out);
            }
            Stage::Reserving { queued: true } | Stage::Prefilling(Prefilling::Accepted) => {
                let message = format!(
                    "kept the request in its queue for {} ms",
                    timeouts.queue.as_millis()
                );
                let error = Error::new(ErrorKind::Overloaded, message).with_reason("QUEUE_TIMEOUT");
                if matches!(self.stage, Stage::Reserving { .. }) {
                    self.decode_failed(error, out);
                } else {
                    self.prefill_failed(error, out);
                }
            }
            Stage::Prefilling(Prefilling::Asked) => {
                let error = silent("gave no answer".to_owned(), timeouts.answer);
                self.prefill_failed(error.with_reason("PREFILL_TIMEOUT"), out);
            }
            Stage::Prefilling(Prefilling::Computing) => {
                let error = silent("computed no first token".to_owned(), timeouts.prefill)
                    .with_reason("PREFILL_TIMEOUT");
                if local {
                    self.decode_failed(error, out);
                } else {
                    self.prefill_failed(error, out);
                }
            }
            Stage::HandingOff => {
                let error = silent("the handoff made no progress".to_owned(), timeouts.handoff);
                self.prefill_failed(error.with_reason("HANDOFF_TIMEOUT"), out);
            }
            Stage::Decoding => {
                let error = silent("sent no token".to_owned(), timeouts.stall);
                self.decode_failed(error.with_reason("DECODE_TIMEOUT"), out);
            }
            Stage::Queued | Stage::Finished => {}
        }
    }
}

impl Stage {
    /// What is being waited for, as the end of a sentence.
    pub fn doing(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Placing => "being placed",
            Self::Reserving { queued: false } => "reserving blocks at a decode worker",
            Self::Reserving { queued: true } => "waiting in a decode worker's queue",
            Self::Prefilling(Prefilling::Asked) => "asking a prefill worker",
            Self::Prefilling(Prefilling::Accepted) => "waiting in a prefill worker's queue",
            Self::Prefilling(Prefilling::Computing) => "computing the prompt",
            Self::HandingOff => "handing over to the decode worker",
            Self::Decoding => "decoding",
            Self::Finished => "finished",
        }
    }
}
