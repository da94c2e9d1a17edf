//! Hands each engine event to the request it belongs to.
//!
//! The engine emits one stream of events; a worker runs one task per request. This
//! is the table between the two: it runs on the engine's thread, so a mailbox must
//! take an event without waiting. A mailbox is bounded by its request: at most
//! prompt layers + max_tokens × n events are ever sent to it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::api::{Event, EventSink, RequestKey, StepStatistics, TokenEvent};

/// Takes the events of one request.
pub type Mailbox = Box<dyn FnMut(Event) + Send>;

/// The table of mailboxes. Share it by `Arc`; give [`EventRoutes::sink`] to the engine.
pub struct EventRoutes {
    mailboxes: Mutex<HashMap<RequestKey, Mailbox>>,
    on_step: Box<dyn Fn(&StepStatistics) + Send + Sync>,
    on_stopped: Box<dyn Fn(Option<String>) + Send + Sync>,
}

impl EventRoutes {
    /// An empty table. `on_step` hears every step, `on_stopped` the engine's end.
    pub fn new(
        on_step: impl Fn(&StepStatistics) + Send + Sync + 'static,
        on_stopped: impl Fn(Option<String>) + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            mailboxes: Mutex::default(),
            on_step: Box::new(on_step),
            on_stopped: Box::new(on_stopped),
        })
    }

    /// Opens a mailbox. It closes by itself with `Rejected` or `Released`.
    pub fn open(&self, key: RequestKey, mailbox: impl FnMut(Event) + Send + 'static) {
        self.lock().insert(key, Box::new(mailbox));
    }

    /// Closes a mailbox whose request was never handed to the engine.
    pub fn close(&self, key: RequestKey) {
        self.lock().remove(&key);
    }

    /// The engine's end of the table.
    pub fn sink(self: &Arc<Self>) -> Box<dyn EventSink> {
        let routes = Arc::clone(self);
        Box::new(move |event| routes.route(event))
    }

    fn route(&self, event: Event) {
        match event {
            Event::Step(statistics) => (self.on_step)(&statistics),
            Event::Stopped { error } => {
                // No event follows: dropping the mailboxes tells the requests.
                // In the order of their requests, so that two runs wake them alike.
                let mut left: Vec<_> = self.lock().drain().collect();
                left.sort_unstable_by_key(|(key, _)| *key);
                left.into_iter().for_each(drop);
                (self.on_stopped)(error);
            }
            Event::Tokens(tokens) => self.route_tokens(tokens),
            Event::Rejected { key, .. } | Event::Released { key } => {
                let mailbox = self.lock().remove(&key);
                if let Some(mut mailbox) = mailbox {
                    mailbox(event);
                }
            }
            Event::Accepted { key }
            | Event::Reserved { key, .. }
            | Event::LayersReady { key, .. }
            | Event::First { key, .. }
            | Event::Started { key, .. }
            | Event::Finished { key, .. }
            | Event::Failed { key, .. } => {
                if let Some(mailbox) = self.lock().get_mut(&key) {
                    mailbox(event);
                }
            }
        }
    }

    /// Splits one step's tokens by request, in order.
    fn route_tokens(&self, tokens: Vec<TokenEvent>) {
        let mut mailboxes = self.lock();
        let mut rest = tokens.into_iter().peekable();
        while let Some(first) = rest.next() {
            let key = first.key;
            let mut run = vec![first];
            while let Some(next) = rest.next_if(|next| next.key == key) {
                run.push(next);
            }
            if let Some(mailbox) = mailboxes.get_mut(&key) {
                mailbox(Event::Tokens(run));
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<RequestKey, Mailbox>> {
        // A mailbox that panicked leaves the table whole.
        self.mailboxes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_proto::sampling::SampledToken;
    use std::sync::mpsc;

    fn token(key: u64, index: u32) -> TokenEvent {
        TokenEvent {
            key: RequestKey(key),
            choice: 0,
            index,
            token: SampledToken {
                id: index,
                logprob: None,
            },
        }
    }

    #[test]
    fn tokens_reach_their_own_request_and_released_closes_it() {
        let routes = EventRoutes::new(|_| {}, |_| {});
        let mut sink = routes.sink();
        let (tx, rx) = mpsc::channel();
        routes.open(RequestKey(1), move |event| tx.send(event).unwrap());
        sink.emit(Event::Tokens(vec![token(1, 0), token(2, 0), token(1, 1)]));
        sink.emit(Event::Released { key: RequestKey(1) });
        sink.emit(Event::Tokens(vec![token(1, 2)]));
        let got: Vec<Event> = rx.iter().collect();
        assert_eq!(
            got,
            [
                Event::Tokens(vec![token(1, 0)]),
                Event::Tokens(vec![token(1, 1)]),
                Event::Released { key: RequestKey(1) },
            ]
        );
    }
}
