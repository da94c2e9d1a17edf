//! One client: sends its request, reads every event, and knows what must come.

use std::sync::Arc;
use std::time::Duration;

use baton_proto::sampling::FinishReason;
use baton_proto::v1::generate_event::Event;
use baton_proto::{Error, ErrorKind, TokenId, v1};
use baton_router::{CallContext, Frontend, GenerateStream, Tenant};
use futures::StreamExt as _;
use tokio::time::Instant;

use crate::model::{self, Expected};
use crate::routers::Routers;
use crate::scenario::{Cancel, Mood, RequestPlan};
use crate::trace::{Invariant, Trace};

/// How far past its deadline an answer may come.
const PATIENCE: Duration = Duration::from_millis(1500);
/// Events that may be on their way to a client when its request ends.
const BUFFERED_MOST: u32 = 80;
/// A client whose router died asks so often, with pauses.
const TRIES_MOST: u32 = 5;
const RETRY_AFTER: Duration = Duration::from_millis(500);
/// How far before its deadline a request may be told that it is over.
const HASTE: Duration = Duration::from_millis(100);

/// How a request ended for its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ending {
    Completed,
    /// Told so before anything was done.
    Refused,
    /// With an error after that.
    Failed,
    /// The client left.
    Cancelled,
    /// Never; the run is broken.
    Unanswered,
}

/// What a client saw of its request.
#[derive(Clone, Copy, Debug)]
pub struct Served {
    pub number: u32,
    pub ending: Ending,
    /// When it was sent.
    pub at: Duration,
    /// From then to its first token.
    pub first: Option<Duration>,
    /// When a router that refused it said to come back.
    pub retry_after: Option<Duration>,
}

/// A request with what must come out of it.
pub struct Client {
    plan: RequestPlan,
    expected: Vec<Expected>,
    received: Vec<Received>,
    trace: Trace,
    mood: Mood,
    deadline: Instant,
    broken: bool,
    /// What it can go on with elsewhere.
    resume_token: Vec<u8>,
    sent: Instant,
    first: Option<Duration>,
    retry_after: Option<Duration>,
}

#[derive(Clone, Debug, Default)]
struct Received {
    ids: Vec<TokenId>,
    text: String,
    finished: bool,
}

impl Client {
    /// A client that knows its answer.
    pub fn new(plan: RequestPlan, trace: &Trace, mood: Mood) -> Self {
        let expected: Vec<_> = (0..plan.sampling.n)
            .map(|choice| {
                let whole = model::expected(&plan.prompt, &plan.sampling, choice);
                stopped(whole, &plan)
            })
            .collect();
        Self {
            received: vec![Received::default(); expected.len()],
            expected,
            trace: trace.clone(),
            mood,
            deadline: Instant::now(),
            broken: false,
            resume_token: Vec::new(),
            sent: Instant::now(),
            first: None,
            retry_after: None,
            plan,
        }
    }

    /// Runs the request to its end.
    pub async fn run(mut self, routers: Arc<Routers>) -> Served {
        tokio::time::sleep(self.plan.at).await;
        let received = Instant::now();
        self.sent = received;
        self.deadline = received + self.plan.deadline;
        self.tell(format!(
            "sent: {} prompt tokens, {} choices of up to {} tokens, {} ms",
            self.plan.prompt.len(),
            self.plan.sampling.n,
            self.plan.sampling.max_tokens,
            self.plan.deadline.as_millis()
        ));
        let leaves = match self.plan.cancel {
            Some(Cancel::After(time)) => received + time,
            _ => received + Duration::from_secs(3600),
        };
        // What is buffered for a slow client reaches it at its own pace.
        let buffered = self.plan.slow * BUFFERED_MOST;
        let until = self.deadline + PATIENCE + buffered;
        let ending = tokio::select! {
            biased;
            () = tokio::time::sleep_until(leaves) => Ending::Cancelled,
            ending = self.ask(&routers) => ending,
            () = tokio::time::sleep_until(until) => Ending::Unanswered,
        };
        match ending {
            Ending::Unanswered => {
                let what = format!("no end {} ms past its deadline", PATIENCE.as_millis());
                self.violate(Invariant::Answered, what);
            }
            ending => self.tell(format!("ends: {ending:?}")),
        }
        Served {
            number: self.plan.number,
            ending,
            at: self.plan.at,
            first: self.first,
            retry_after: self.retry_after,
        }
    }

    /// Asks a router; if it dies, another one for the rest.
    async fn ask(&mut self, routers: &Routers) -> Ending {
        let mut tries = 0;
        loop {
            let pick = routers.pick(self.plan.router);
            let Ok((number, frontend, dead)) = tokio::time::timeout_at(self.deadline, pick).await
            else {
                self.tell("no router is there".to_owned());
                return Ending::Failed;
            };
            let ending = tokio::select! {
                biased;
                () = dead.cancelled() => None,
                ending = self.ask_one(&frontend) => Some(ending),
            };
            match ending {
                // A router that has just started may not know its workers yet.
                Some(Ending::Refused)
                    if tries > 0
                        && tries < TRIES_MOST
                        && Instant::now() + RETRY_AFTER < self.deadline =>
                {
                    tries += 1;
                    tokio::time::sleep(RETRY_AFTER).await;
                    continue;
                }
                Some(ending) => return ending,
                None => tries = 1,
            }
            let have: usize = self
                .received
                .iter()
                .map(|received| received.ids.len())
                .sum();
            let goes_on = !self.resume_token.is_empty();
            self.tell(format!(
                "loses router-{number} with {have} tokens, goes on: {goes_on}"
            ));
            // What had ended is told again, what had come is not.
            self.received
                .iter_mut()
                .for_each(|received| received.finished = false);
        }
    }

    async fn ask_one(&mut self, frontend: &Frontend) -> Ending {
        let call = CallContext {
            tenant: Tenant::new(self.plan.tenant),
            request_id: format!("r{}", self.plan.number),
            deadline: Some(self.deadline),
            received: Instant::now(),
        };
        match frontend.generate(self.request(), call).await {
            Ok(stream) => self.read(stream).await,
            Err(error) => {
                self.judge(&error);
                Ending::Refused
            }
        }
    }

    async fn read(&mut self, mut stream: GenerateStream) -> Ending {
        let mut ending = None;
        while let Some(event) = stream.next().await {
            if ending.is_some() {
                self.wrong("an event after the last one".to_owned());
            }
            match event.map(|event| event.event) {
                Ok(Some(event)) => {
                    if self.take(event) {
                        ending = Some(Ending::Completed);
                    }
                }
                Ok(None) => self.wrong("an empty event".to_owned()),
                Err(error) => {
                    self.judge(&error);
                    ending = Some(Ending::Failed);
                }
            }
            let tokens: usize = self
                .received
                .iter()
                .map(|received| received.ids.len())
                .sum();
            if matches!(self.plan.cancel, Some(Cancel::Tokens(most)) if tokens >= most)
                && ending.is_none()
            {
                return Ending::Cancelled;
            }
            if !self.plan.slow.is_zero() {
                tokio::time::sleep(self.plan.slow).await;
            }
        }
        ending.unwrap_or_else(|| {
            self.wrong("the stream ended without a last event".to_owned());
            Ending::Failed
        })
    }

    /// Takes an event; true for the last one.
    fn take(&mut self, event: Event) -> bool {
        match event {
            Event::Accepted(accepted) => {
                self.resume_token = accepted.resume_token;
                false
            }
            Event::Tokens(tokens) => {
                self.take_tokens(tokens);
                false
            }
            Event::Finished(finished) => {
                self.take_finish(&finished);
                false
            }
            Event::Completed(completed) => {
                if let Some(open) = self.received.iter().position(|choice| !choice.finished) {
                    self.wrong(format!("completed while choice {open} was open"));
                }
                let made: usize = self.expected.iter().map(|choice| choice.tokens.len()).sum();
                let usage = completed.usage.unwrap_or_default();
                if usage.completion_tokens as usize != made {
                    let told = usage.completion_tokens;
                    self.wrong(format!("usage says {told} tokens, there were {made}"));
                }
                true
            }
        }
    }

    fn take_tokens(&mut self, tokens: v1::Tokens) {
        let choice = tokens.choice as usize;
        let (Some(expected), Some(received)) =
            (self.expected.get(choice), self.received.get_mut(choice))
        else {
            return self.wrong(format!("tokens of choice {choice}"));
        };
        let have = received.ids.len();
        let next: Vec<_> = expected.tokens.iter().skip(have).copied().collect();
        received.ids.extend(&tokens.ids);
        self.first.get_or_insert_with(|| self.sent.elapsed());
        received.text.push_str(&tokens.text);
        let finished = received.finished;
        if tokens.first_index as usize != have {
            let first = tokens.first_index;
            self.wrong(format!(
                "choice {choice}: tokens from index {first}, the client has {have}"
            ));
        } else if finished {
            self.wrong(format!("choice {choice}: tokens after its end"));
        } else if !next.starts_with(&tokens.ids) {
            let ids = &tokens.ids;
            let next = &next[..next.len().min(ids.len())];
            self.wrong(format!(
                "choice {choice}: tokens {ids:?} from index {have}, right are {next:?}"
            ));
        }
    }

    fn take_finish(&mut self, finished: &v1::ChoiceFinished) {
        let choice = finished.choice as usize;
        let (Some(expected), Some(received)) =
            (self.expected.get(choice), self.received.get_mut(choice))
        else {
            return self.wrong(format!("the end of choice {choice}"));
        };
        let again = std::mem::replace(&mut received.finished, true);
        received.text.push_str(&finished.text);
        let reason = v1::FinishReason::from(expected.reason);
        let text = text(expected, &self.plan);
        let problem = if again {
            "a second end".to_owned()
        } else if received.ids.len() != expected.tokens.len() {
            let (have, all) = (received.ids.len(), expected.tokens.len());
            format!("ended with {have} tokens of {all}")
        } else if finished.output_tokens as usize != received.ids.len() {
            let (told, have) = (finished.output_tokens, received.ids.len());
            format!("says {told} tokens, there were {have}")
        } else if finished.reason() != reason {
            format!("ended by {:?}, right is {reason:?}", finished.reason())
        } else if received.text != text {
            format!("its text is `{}`, right is `{text}`", received.text)
        } else {
            return;
        };
        self.wrong(format!("choice {choice}: {problem}"));
    }

    fn request(&self) -> v1::GenerateRequest {
        let choice = |received: &Received| v1::ResumeChoice {
            tokens_received: Some(received.ids.len() as u32),
            text_bytes_received: received.text.len() as u64,
            token_ids: match self.plan.keeps_ids {
                true => received.ids.clone(),
                false => Vec::new(),
            },
        };
        let resume = (!self.resume_token.is_empty()).then(|| v1::Resume {
            resume_token: self.resume_token.clone(),
            choices: self.received.iter().map(choice).collect(),
        });
        v1::GenerateRequest {
            resume,
            ..request(&self.plan)
        }
    }

    /// An error that a client may get, or not.
    fn judge(&mut self, error: &Error) {
        self.tell(format!(
            "error {:?} {}: {}",
            error.kind, error.reason, error.message
        ));
        self.retry_after = error.retry_after;
        if error.kind == ErrorKind::Overloaded && error.retry_after.is_none() {
            let what = format!("no hint when to come back: {}", error.message);
            self.violate(Invariant::Answered, what);
        }
        let early = Instant::now() + HASTE < self.deadline;
        match error.kind {
            ErrorKind::Deadline if early => {
                let what = format!("told of its deadline before it: {}", error.message);
                self.violate(Invariant::Answered, what);
            }
            ErrorKind::Deadline | ErrorKind::Overloaded | ErrorKind::Unavailable
                if self.mood.may_fail() => {}
            ErrorKind::Cancelled if error.reason == "SLOW_CLIENT" => {}
            // Said of a step that a fault made the device lose.
            ErrorKind::Internal if error.reason == "STEP_FAILED" => {}
            ErrorKind::Internal => {
                self.violate(
                    Invariant::NoPanic,
                    format!("internal error: {}", error.message),
                );
            }
            _ => self.violate(
                Invariant::NoNeedlessError,
                format!("failed with {:?}: {}", error.kind, error.message),
            ),
        }
    }

    fn tell(&self, text: String) {
        self.trace.tell(self.plan.number, None, 0, text);
    }

    /// The first wrong thing is told; what follows from it is not.
    fn wrong(&mut self, what: String) {
        if !std::mem::replace(&mut self.broken, true) {
            self.violate(Invariant::RightTokens, what);
        }
    }

    fn violate(&self, invariant: Invariant, what: String) {
        self.trace
            .violate(invariant, Some(self.plan.number), None, what);
    }
}

/// Cuts what the model would say behind a stop string.
fn stopped(mut whole: Expected, plan: &RequestPlan) -> Expected {
    let Some(stop) = plan.stop else { return whole };
    let min_tokens = plan.sampling.min_tokens as usize;
    let at = whole
        .tokens
        .iter()
        .skip(min_tokens)
        .position(|token| *token == stop);
    if let Some(at) = at {
        whole.tokens.truncate(min_tokens + at + 1);
        whole.reason = FinishReason::Stop;
    }
    whole
}

/// The text of a choice: a stop string is not part of it, nor is an end token.
fn text(expected: &Expected, plan: &RequestPlan) -> String {
    let mut tokens = &expected.tokens[..];
    let min_tokens = plan.sampling.min_tokens as usize;
    if let (Some(last), true) = (tokens.last(), tokens.len() > min_tokens)
        && Some(*last) == plan.stop
    {
        tokens = &tokens[..tokens.len() - 1];
    }
    tokens
        .iter()
        .map(|token| model::token_text(*token))
        .collect()
}

fn request(plan: &RequestPlan) -> v1::GenerateRequest {
    v1::GenerateRequest {
        model: "hash".to_owned(),
        prompt: Some(v1::generate_request::Prompt::TokenIds(v1::TokenIds {
            ids: plan.prompt.clone(),
        })),
        sampling: Some((&plan.sampling).into()),
        stop: plan
            .stop
            .iter()
            .map(|token| model::token_text(*token))
            .collect(),
        use_cache: Some(plan.use_cache),
        priority: plan.priority,
        slo: plan.ttft.map(|target| v1::Slo {
            ttft_ms: Some(target.as_secs_f64() * 1e3),
            itl_ms: None,
        }),
        ..v1::GenerateRequest::default()
    }
}
