//! The request machine's part in a decode worker's leaving.
//!
//! The worker that goes decodes on while another one computes what it needs, so that a
//! full or a dead worker elsewhere costs the client nothing: tokens of both are logged,
//! each index once. When the other one runs the first is let go. If nobody takes the
//! request it stays where it is, and is moved when the worker says again that it goes.
//!
//! Without `exact` the two may draw different tokens, so the first is let go at once.

use baton_proto::sampling::FinishReason;
use baton_proto::worker_info::leaving;

use super::{Action, DecodeEvent, Request, Stage};

impl Request {
    /// The decode worker goes.
    pub(super) fn decode_leaves(&mut self, out: &mut Vec<Action>) {
        let Some(decode) = &self.decode else { return };
        if !decode.running || !self.spec.exact || self.aside.is_some() {
            let error = leaving(&decode.worker.id);
            return self.decode_failed(error, out);
        }
        self.excluded_decode = vec![decode.worker.clone()];
        self.aside = self.decode.take();
        if self.prefill.take().is_some() {
            // The receiver has what it needs.
            out.push(Action::DropPrefill);
        }
        out.push(Action::SetDecodeAside);
        self.place(out);
    }

    /// What the worker says that goes, while the request moves.
    pub(super) fn handle_aside(&mut self, event: DecodeEvent, out: &mut Vec<Action>) {
        match event {
            DecodeEvent::Tokens {
                choice,
                first_index,
                tokens,
            } => {
                self.offer(choice, first_index, tokens, out);
                self.settle(out);
            }
            DecodeEvent::Finished {
                choice,
                reason,
                output_tokens,
            } if reason != FinishReason::Cancelled => {
                let log = self.logs.get_mut(choice as usize);
                match log.map(|log| log.announce_end(reason, output_tokens)) {
                    Some(Err(conflict)) => self.conflict(&conflict, out),
                    Some(Ok(())) => self.settle(out),
                    None => {}
                }
            }
            DecodeEvent::Finished { .. }
            | DecodeEvent::Ended { .. }
            | DecodeEvent::Failed { .. } => {
                self.aside = None;
                self.interrupted();
                out.push(Action::DropDecodeAside);
            }
            _ => {}
        }
    }

    /// The request runs at its next worker.
    pub(super) fn moved(&mut self, out: &mut Vec<Action>) {
        if self.aside.take().is_some() {
            out.push(Action::DropDecodeAside);
            out.push(Action::CountMove);
        }
    }

    /// Nobody takes the request: it stays for now.
    pub(super) fn stay(&mut self, out: &mut Vec<Action>) {
        self.decode = self.aside.take();
        self.next_prefill = None;
        self.last_error = None;
        out.push(Action::TakeDecodeBack);
        self.enter(Stage::Decoding, self.now, self.spec.timeouts.stall);
    }
}
