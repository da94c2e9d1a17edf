//! Requests in, whole outputs out, with the order rules of the stream checked.

use baton_proto::convert::finish_from_wire;
use baton_proto::{Error, v1};
use baton_router::auth::ANONYMOUS;
use baton_router::{CallContext, Frontend, Tenant};
use futures::StreamExt as _;

use crate::oracle::{Case, Output};

/// What a client of the cluster saw.
#[derive(Clone, Debug)]
pub struct Answer {
    pub choices: Vec<Output>,
    pub texts: Vec<String>,
    pub usage: v1::Usage,
    pub timings: v1::PhaseTimings,
}

/// A case as a request of the front door.
pub fn request(case: &Case) -> v1::GenerateRequest {
    v1::GenerateRequest {
        prompt: Some(v1::generate_request::Prompt::TokenIds(v1::TokenIds {
            ids: case.prompt.clone(),
        })),
        sampling: Some((&case.sampling).into()),
        ..v1::GenerateRequest::default()
    }
}

/// Runs a request to its end.
///
/// # Errors
/// The cluster's refusal or failure.
///
/// # Panics
/// If the stream breaks its order rules.
pub async fn run(frontend: &Frontend, request: v1::GenerateRequest) -> Result<Answer, Error> {
    let n = request
        .sampling
        .as_ref()
        .and_then(|sampling| sampling.n)
        .unwrap_or(1);
    let call = CallContext::new(Tenant::new(ANONYMOUS));
    let mut stream = frontend.generate(request, call).await?;
    let mut collector = Collector::new(n);
    while let Some(event) = stream.next().await {
        collector.take(event?);
    }
    Ok(collector.finish())
}

/// Puts a stream together and checks it: accepted first, indices without gap or
/// repeat, nothing after a choice's end, completed last.
pub struct Collector {
    accepted: bool,
    completed: Option<v1::Completed>,
    choices: Vec<Output>,
    texts: Vec<String>,
}

impl Collector {
    /// A collector for `n` choices.
    pub fn new(n: u32) -> Self {
        Self {
            accepted: false,
            completed: None,
            choices: vec![Output::default(); n as usize],
            texts: vec![String::new(); n as usize],
        }
    }

    /// Tokens seen so far, over all choices.
    pub fn tokens(&self) -> usize {
        self.choices.iter().map(|choice| choice.tokens.len()).sum()
    }

    /// What arrived so far, one per choice.
    pub fn choices(&self) -> &[Output] {
        &self.choices
    }

    /// Takes the next event.
    ///
    /// # Panics
    /// If it may not come here.
    pub fn take(&mut self, event: v1::GenerateEvent) {
        use v1::generate_event::Event;
        assert!(self.completed.is_none(), "an event after the last one");
        match event.event.expect("an event") {
            Event::Accepted(_) => {
                assert!(!self.accepted, "accepted twice");
                self.accepted = true;
            }
            Event::Tokens(tokens) => {
                assert!(self.accepted, "tokens before accepted");
                let choice = &mut self.choices[tokens.choice as usize];
                assert!(
                    choice.finish.is_none(),
                    "tokens after the end of their choice"
                );
                assert_eq!(
                    tokens.first_index as usize,
                    choice.tokens.len(),
                    "indices reach the client exactly once and in order"
                );
                choice.tokens.extend(&tokens.ids);
                choice
                    .logprobs
                    .extend(tokens.logprobs.iter().map(|logprob| logprob.logprob));
                self.texts[tokens.choice as usize].push_str(&tokens.text);
            }
            Event::Finished(finished) => {
                let choice = &mut self.choices[finished.choice as usize];
                assert!(choice.finish.is_none(), "a choice ended twice");
                choice.finish = finish_from_wire(finished.reason());
                self.texts[finished.choice as usize].push_str(&finished.text);
            }
            Event::Completed(completed) => self.completed = Some(completed),
        }
    }

    /// The whole answer.
    ///
    /// # Panics
    /// If the stream ended early.
    pub fn finish(self) -> Answer {
        let completed = self
            .completed
            .expect("the stream ended without its last event");
        assert!(self.choices.iter().all(|choice| choice.finish.is_some()));
        Answer {
            choices: self.choices,
            texts: self.texts,
            usage: completed.usage.unwrap_or_default(),
            timings: completed.timings.unwrap_or_default(),
        }
    }
}
