//! The events of one step or command, collected and sent in their fixed order:
//! tokens, ends, failures, first tokens, releases.

use baton_proto::Error;
use baton_proto::sampling::{FinishReason, SampledToken};

use super::request::Request;
use crate::api::{Event, EventSink, RequestKey, TokenEvent};

#[derive(Debug, Default)]
pub(super) struct Outbox {
    tokens: Vec<TokenEvent>,
    finished: Vec<Event>,
    pub failed: Vec<(RequestKey, Error)>,
    pub first: Vec<Event>,
    pub released: Vec<RequestKey>,
}

impl Outbox {
    /// Appends a token to a choice, notes its event, and its end if it is the last.
    pub(super) fn push_token(
        &mut self,
        request: &mut Request,
        choice: u32,
        token: SampledToken,
        context_max: u32,
    ) {
        let index = request.choices[choice as usize].output.len() as u32;
        let reason = append(request, choice, token.id, context_max);
        self.tokens.push(TokenEvent {
            key: request.key,
            choice,
            index,
            token,
        });
        if let Some(reason) = reason {
            self.finished(request, choice, reason);
        }
    }

    /// Notes that a choice has ended.
    pub(super) fn finished(&mut self, request: &Request, choice: u32, reason: FinishReason) {
        self.finished.push(Event::Finished {
            key: request.key,
            choice,
            reason,
            output_tokens: request.choices[choice as usize].output.len() as u32,
        });
    }

    /// Tokens of the choices that have come to their own end.
    pub(super) fn ended(&self) -> impl Iterator<Item = u32> {
        self.finished.iter().filter_map(|event| match event {
            Event::Finished {
                reason: FinishReason::Stop | FinishReason::Length,
                output_tokens,
                ..
            } => Some(*output_tokens),
            _ => None,
        })
    }

    pub(super) fn flush(&mut self, sink: &mut dyn EventSink) {
        if !self.tokens.is_empty() {
            sink.emit(Event::Tokens(std::mem::take(&mut self.tokens)));
        }
        for event in self.finished.drain(..) {
            sink.emit(event);
        }
        for (key, error) in self.failed.drain(..) {
            sink.emit(Event::Failed { key, error });
        }
        for event in self.first.drain(..) {
            sink.emit(event);
        }
        for key in self.released.drain(..) {
            sink.emit(Event::Released { key });
        }
    }
}

/// Appends a token to a choice and says whether it is its last.
pub(super) fn append(
    request: &mut Request,
    choice: u32,
    token: u32,
    context_max: u32,
) -> Option<FinishReason> {
    let prompt = request.prompt_len();
    let choice = &mut request.choices[choice as usize];
    let index = choice.output.len() as u32;
    choice.output.push(token);
    choice.history.push(token);
    let reason = request.rules.end_after(token, index).or_else(|| {
        let length = prompt + choice.output.len() as u32;
        (length >= context_max).then_some(FinishReason::Length)
    });
    choice.ended = reason.is_some();
    reason
}
