//! The async task of one request: carries the [machine](crate::request)'s actions
//! out and brings it what happens. Decides nothing.
//!
//! It is owned by the router's task tracker and ends on its own: with the
//! request's end, when the client's stream is dropped, or at the deadline. Calls
//! to workers are fields, so ending the task resets them. What the client does
//! not take stays in a bounded channel; past it the workers' streams are not
//! read, and past a time the request is given up.

mod ending;
mod outlet;
mod placing;
mod resuming;
mod sessions;
mod timing;

use std::sync::Arc;
use std::time::Duration;

use baton_observability::RouterMetrics;
use baton_observability::labels::Decision;
use baton_proto::block_hash::BlockHash;
use baton_proto::sampling::{SampledToken, SamplingParams};
use baton_proto::slo::Slo;
use baton_proto::worker_info::{
    HANDOFF_EXPIRED, HANDOFF_PEER_LOST, HANDOFF_UNREACHABLE, WORKER_DRAINING,
};
use baton_proto::{Error, ErrorKind, NumericsId, RequestId, TokenId, v1};
use tokio::time::Instant;

use outlet::Undelivered;
pub use outlet::{Inlet, Outlet};
use sessions::{DecodeSession, PrefillSession};
use timing::Timing;

use crate::admission::Permit;
use crate::auth::Tenant;
use crate::frontend::{Shared, Tally};
use crate::placement::Pair;
use crate::request::{Action, DecodeEvent, Event, PrefillEvent, Request, Spec, Stage, Timeouts};
use crate::resume::fences::Fenced;
use crate::resume::prompt_hash;
use crate::resume::received::Cursor;
use crate::text::{ChoiceText, StopRules, TokenText};
use crate::workers::{Placed, ServedModel, Worker, Workers};

/// How long a whole answer waits for the prefill worker's word on its cache. The word
/// was sent before the answer's first token.
const USAGE_PATIENCE: Duration = Duration::from_millis(250);

/// A checked request.
pub struct Job {
    pub request_id: RequestId,
    pub created: i64,
    pub tenant: Tenant,
    pub model: ServedModel,
    pub prompt: Vec<TokenId>,
    pub sampling: SamplingParams,
    pub rules: StopRules,
    pub use_cache: bool,
    pub exact: bool,
    pub priority: i32,
    pub slo: Slo,
    pub received: Instant,
    pub admitted: Instant,
    pub tokenized: Instant,
    pub deadline: Instant,
    pub permit: Permit,
    pub fenced: Fenced,
    pub resumed: Option<Resumed>,
}

impl Job {
    /// What tokens gave to the text, for those who asked about tokens.
    fn token_texts(&self, texts: Vec<TokenText>) -> Vec<v1::TokenText> {
        if self.sampling.logprobs.is_none() {
            return Vec::new();
        }
        let wire = |text: TokenText| v1::TokenText {
            bytes: text.bytes,
            offset: text.offset,
        };
        texts.into_iter().map(wire).collect()
    }
}

/// What a client that resumes its stream brings along.
pub struct Resumed {
    /// The arithmetic of the tokens it has.
    pub numerics: Option<NumericsId>,
    /// One per choice.
    pub choices: Vec<v1::ResumeChoice>,
}

/// The running request.
pub struct Driver {
    shared: Arc<Shared>,
    job: Job,
    tally: Tally,
    machine: Request,
    texts: Vec<ChoiceText>,
    /// Per choice, what the client has.
    cursors: Vec<Cursor>,
    /// Text that the client lacks although it has the tokens, sent with the acceptance.
    owed: Vec<String>,
    outlet: Outlet,
    timing: Timing,
    decode: Option<DecodeSession>,
    /// The call that goes on while the request moves away from its worker.
    aside: Option<DecodeSession>,
    prefill: Option<PrefillSession>,
    /// The prefill worker's time, until it is asked.
    booked: Option<Placed>,
    /// The request was placed once.
    placed_before: bool,
    /// Calls that only have their last word left.
    closing: Option<DecodeSession>,
    closing_prefill: Option<PrefillSession>,
    accepted: bool,
    /// The arithmetic that every token is to be drawn with: that of the decode worker
    /// the request was accepted with.
    numerics: Option<NumericsId>,
    /// The decode worker is noted as a holder of the prompt.
    remembered: bool,
    spans: Vec<(NumericsId, Vec<BlockHash>)>,
    retries: u64,
    mid_stream: bool,
    migrations: u64,
    /// Moves away from workers that left in order.
    moves: u64,
    outcome: Option<Result<(), Error>>,
}

impl Driver {
    /// A driver that has not begun.
    pub fn new(shared: Arc<Shared>, job: Job, tally: Tally, outlet: Outlet) -> Self {
        let config = &shared.config;
        let ms = Duration::from_millis;
        let pool = config.pool_timeout_ms.map_or(Duration::MAX, ms);
        let spec = Spec {
            n: job.sampling.n,
            max_tokens: job.sampling.max_tokens,
            attempts_max: config.attempts_max,
            exact: job.exact,
            timeouts: Timeouts {
                total: job.deadline - job.received,
                // Nobody waits beyond the target on the first token, for this either.
                pool: pool.min(job.slo.ttft.unwrap_or(Duration::MAX)),
                pool_of_stream: pool.min(ms(config.stream_gap_ms)),
                gap: ms(config.stream_gap_ms),
                silence: ms(config.worker_silence_ms),
                answer: ms(config.answer_timeout_ms),
                queue: ms(config.queue_timeout_ms),
                prefill: ms(config.prefill_timeout_ms),
                handoff: ms(config.handoff_timeout_ms),
                stall: ms(config.stall_timeout_ms),
            },
        };
        let texts = (0..spec.n)
            .map(|_| ChoiceText::new(&job.model.tokenizer, &job.prompt, &job.rules))
            .collect();
        let cursors = (0..spec.n as usize).map(Cursor::new).collect();
        Self {
            cursors,
            owed: vec![String::new(); spec.n as usize],
            remembered: false,
            timing: Timing::new(job.received, job.admitted, job.tokenized, spec.n),
            machine: Request::new(spec),
            texts,
            outlet,
            decode: None,
            aside: None,
            prefill: None,
            booked: None,
            placed_before: false,
            closing: None,
            closing_prefill: None,
            accepted: false,
            numerics: None,
            spans: Vec::new(),
            retries: 0,
            mid_stream: false,
            migrations: 0,
            moves: 0,
            outcome: None,
            shared,
            job,
            tally,
        }
    }

    fn metrics(&self) -> &RouterMetrics {
        &self.shared.metrics
    }

    /// Runs the request to its end.
    pub async fn run(mut self) {
        match self.take_over() {
            Ok(true) => self.finish_taken_over().await,
            Ok(false) => self.step(Event::Begin).await,
            Err(error) => {
                self.outcome = Some(Err(error));
                return self.finish().await;
            }
        }
        while self.machine.stage() != Stage::Finished {
            let event = self.next_event().await;
            self.step(event).await;
        }
        self.finish().await;
    }

    /// Waits for what happens next. Cancel safe: every arm is.
    async fn next_event(&mut self) -> Event {
        let wake = self.job.received + self.machine.wake_at();
        let numerics = self.numerics.filter(|_| self.job.exact);
        let worker = |worker: Option<&Arc<Worker>>| worker.map(Arc::clone);
        let decoder = worker(self.decode.as_ref().map(|session| &session.worker));
        let prefiller = worker(self.prefill.as_ref().map(|session| &session.worker));
        tokio::select! {
            biased;
            () = self.outlet.gone() => Event::ClientGone,
            () = self.shared.stop.cancelled() => Event::Abort(stopping()),
            error = self.job.fenced.raised() => Event::Abort(error),
            () = tokio::time::sleep_until(wake) => Event::Tick,
            // A prefill worker says little; a busy decode worker must not drown it.
            event = prefill_event(&mut self.prefill, &mut self.timing) => event,
            event = decode_event(&mut self.decode) => event,
            event = decode_event(&mut self.aside) => event,
            event = lost(decoder, &self.shared.workers, numerics) => event,
            event = lost(prefiller, &self.shared.workers, numerics) => event,
        }
    }

    /// Hands an event to the machine and carries out what it says, and what that leads to.
    async fn step(&mut self, event: Event) {
        let mut events = std::collections::VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            if let Event::Decode { session, event } = &event
                && self.decode.as_ref().is_some_and(|d| d.session == *session)
            {
                self.heard_from_decode(event);
                events.extend(self.accept(event).await);
            }
            if let Event::Prefill {
                event: PrefillEvent::Failed { error },
                ..
            } = &event
            {
                self.handoff_broke(error);
            }
            let now = self.timing.now();
            for action in self.machine.handle(now, event) {
                if let Some(next) = self.act(action).await {
                    events.push_back(next);
                }
            }
        }
    }

    fn heard_from_decode(&mut self, event: &DecodeEvent) {
        if let (DecodeEvent::Leaving, Some(session)) = (event, &self.decode) {
            tracing::info!(worker = %session.worker.key.id, reason = WORKER_DRAINING,
                "the decode worker leaves; moving the request");
        }
        if let DecodeEvent::Aborted { error, .. } = event {
            self.handoff_broke(error);
        }
        self.timing.heard_from_decode(event);
        let took = matches!(
            event,
            DecodeEvent::Reserved { .. }
                | DecodeEvent::Started { .. }
                | DecodeEvent::Committed { .. }
                | DecodeEvent::Tokens { .. }
        );
        if let Some(session) = self.decode.as_mut().filter(|_| took) {
            session.placed.taken();
        }
        if matches!(
            event,
            DecodeEvent::Committed { .. } | DecodeEvent::Tokens { .. }
        ) && let Some(session) = &mut self.decode
        {
            session.placed.prefilled();
        }
    }

    /// A handoff broke on its way: the way is tried before another one is sent over it. A
    /// port that was never reached is most likely out of everybody's reach.
    fn handoff_broke(&self, error: &Error) {
        let (Some(prefill), Some(decode)) = (&self.prefill, &self.decode) else {
            return;
        };
        let Some(lane) = &prefill.lane else { return };
        let (prefill, decode) = (&prefill.worker.key, &decode.worker.key);
        let workers = &self.shared.workers;
        let senders = match error.reason.as_str() {
            HANDOFF_UNREACHABLE => {
                tracing::warn!(worker = %decode.id, prefill = %prefill.id, error = error.message,
                    "the decode worker cannot be reached; preferring others");
                let all = workers.ready_of(&self.job.model.card).into_iter();
                let senders = all.filter(|worker| worker.role.prefills());
                senders.map(|worker| worker.key.clone()).collect()
            }
            HANDOFF_PEER_LOST | HANDOFF_EXPIRED => vec![prefill.clone()],
            _ => return,
        };
        for prefill in senders {
            let decode = decode.clone();
            workers.cut_lanes.cut(Pair { prefill, decode }, lane);
        }
    }

    /// The first sign that a worker took the request is when the client is told of it.
    async fn accept(&mut self, event: &DecodeEvent) -> Vec<Event> {
        let refused = matches!(
            event,
            DecodeEvent::Failed { .. } | DecodeEvent::Ended { .. } | DecodeEvent::Unknown
        );
        if self.accepted || refused {
            return Vec::new();
        }
        self.acknowledge().await
    }

    /// Tells the client that it is served, and what it still lacks of what it has.
    async fn acknowledge(&mut self) -> Vec<Event> {
        self.accepted = true;
        if let Some(session) = &self.decode {
            let numerics = session.worker.card.layout.numerics;
            self.numerics.get_or_insert(numerics);
        }
        self.metrics()
            .prompt_tokens
            .inc_by(self.job.prompt.len() as u64);
        let job = &self.job;
        let accepted = v1::Accepted {
            request_id: job.request_id.0.clone(),
            seed: job.sampling.seed,
            prompt_token_hash: prompt_hash(&job.prompt).to_hex().to_string(),
            prompt_tokens: job.prompt.len() as u32,
            model: job.model.card.name.clone(),
            model_revision: job.model.card.revision.0.clone(),
            created: job.created,
            resume_token: self.resume_token(),
        };
        let accepted = v1::generate_event::Event::Accepted(accepted);
        if let Err(failed) = self.deliver(accepted).await {
            return vec![failed];
        }
        self.pay_what_is_owed().await
    }

    async fn act(&mut self, action: Action) -> Option<Event> {
        use v1::decode_command::Command;
        match action {
            Action::Place(query) => return Some(Event::Placed(self.place(&query))),
            Action::StartDecode {
                worker,
                local,
                attempt,
                forced,
            } => return self.start_decode(&worker, local, attempt, forced),
            Action::StartPrefill {
                worker,
                attempt,
                lane,
                forced,
            } => return self.start_prefill(&worker, attempt, *lane, forced),
            Action::Reticket { attempt } => {
                self.command(Command::Reticket(v1::Reticket { attempt }));
            }
            Action::PrefillLocally { attempt, forced } => {
                self.timing.goes_local();
                self.metrics().decisions.get(Decision::DecodeOnly).inc();
                let forced = lists(forced);
                self.command(Command::PrefillLocally(v1::PrefillLocally {
                    attempt,
                    forced,
                }));
            }
            Action::CancelChoice { choice } => {
                self.command(Command::CancelChoice(v1::CancelChoice { choice }));
            }
            Action::DropPrefill => self.prefill = None,
            Action::AwaitPrefillEnd => self.closing_prefill = self.prefill.take(),
            Action::CancelDecode => {
                self.command(Command::Cancel(v1::CancelDecode {}));
                self.closing = self.decode.take();
            }
            Action::AwaitDecodeEnd => self.closing = self.decode.take(),
            Action::SetDecodeAside => self.aside = self.decode.take(),
            Action::TakeDecodeBack => self.decode = self.aside.take(),
            Action::DropDecodeAside => self.aside = None,
            Action::Emit { choice, run } => {
                return self.emit(choice, run.tokens).await;
            }
            Action::FinishChoice { choice, reason } => {
                let text = &mut self.texts[choice as usize];
                let rest = match self.cursors[choice as usize].end(text.finish()) {
                    Ok(rest) => rest,
                    Err(error) => return Some(self.give_up(error)),
                };
                let (reason, stop_string) = match text.stopped() {
                    Some(stopped) => (v1::FinishReason::Stop, Some(stopped.stop_string.clone())),
                    None => (reason.into(), None),
                };
                let finished = v1::ChoiceFinished {
                    choice,
                    reason: reason.into(),
                    text: rest.text,
                    output_tokens: text.tokens(),
                    stop_string,
                    token_texts: self.job.token_texts(rest.token_texts),
                };
                let event = v1::generate_event::Event::Finished(finished);
                return self.deliver(event).await.err();
            }
            Action::Complete => return self.complete().await,
            Action::CountConflict => {
                tracing::error!("two workers drew different tokens");
                self.metrics().token_conflicts.inc();
            }
            Action::CountMove => {
                self.moves += 1;
                if let Some(session) = &self.decode {
                    tracing::info!(worker = %session.worker.key.id, "moved");
                }
            }
            Action::CountRetry {
                mid_stream,
                migration,
            } => {
                self.retries += 1;
                self.mid_stream |= mid_stream;
                self.migrations += u64::from(migration);
            }
            Action::Fail(error) => {
                self.outcome.get_or_insert(Err(error));
            }
        }
        None
    }

    fn command(&self, command: v1::decode_command::Command) {
        if let Some(session) = &self.decode {
            session.send(command);
        }
    }

    async fn emit(&mut self, choice: u32, tokens: Vec<SampledToken>) -> Option<Event> {
        if !self.remembered
            && let Some(session) = &self.decode
        {
            // The first token shows that the decode worker took the prompt in.
            self.remembered = true;
            let worker = Arc::clone(&session.worker);
            self.remember(std::slice::from_ref(&worker), &worker.key);
        }
        if self.cursors[choice as usize].is_caught_up() {
            return self.emit_piece(choice, tokens).await;
        }
        // What the client has is found out token by token.
        for token in tokens {
            if let Some(event) = self.emit_piece(choice, vec![token]).await {
                return Some(event);
            }
        }
        None
    }

    async fn emit_piece(&mut self, choice: u32, tokens: Vec<SampledToken>) -> Option<Event> {
        let text = &mut self.texts[choice as usize];
        let piece = text.push(tokens);
        if piece.tokens.is_empty() {
            return None;
        }
        let stopped = piece.stopped.then(|| Event::StopMatched {
            choice,
            output_tokens: text.tokens(),
        });
        let cursor = &mut self.cursors[choice as usize];
        let rest = match cursor.pass(piece) {
            Ok(rest) => rest,
            Err(error) => return Some(self.give_up(error)),
        };
        self.job.permit.started();
        if let Some(session) = &mut self.prefill {
            session.placed.prefilled();
        }
        if rest.is_empty() {
            return stopped;
        }
        let count = rest.tokens.len() as u64;
        let logprobs = rest
            .tokens
            .iter()
            .filter_map(|token| token.logprob.as_ref());
        let tokens = v1::Tokens {
            choice,
            first_index: rest.first_index,
            ids: rest.tokens.iter().map(|token| token.id).collect(),
            logprobs: logprobs.map(v1::Logprobs::from).collect(),
            text: rest.text,
            token_texts: self.job.token_texts(rest.token_texts),
        };
        if let Err(failed) = self
            .deliver(v1::generate_event::Event::Tokens(tokens))
            .await
        {
            return Some(failed);
        }
        if count > 0 {
            self.shared.metrics.generation_tokens.inc_by(count);
            self.timing.sent(choice, count, &self.shared.metrics);
            if let Some((foretold, took)) = self.timing.take_forecast() {
                self.shared.margin().learn(foretold, took);
            }
        }
        stopped
    }

    /// Ends the request with an error; nothing is delivered any more.
    fn give_up(&mut self, error: Error) -> Event {
        self.outcome.get_or_insert(Err(error.clone()));
        Event::Abort(error)
    }

    /// Prompt tokens that were found in a prefix cache.
    ///
    /// A prefill worker says so on a connection of its own, and a short answer may be
    /// whole at the decode worker before the word is read: then it is waited for.
    async fn cached_tokens(&mut self) -> u32 {
        if let Some(known) = self.machine.cached_tokens() {
            return known;
        }
        let Some(session) = &mut self.prefill else {
            return 0;
        };
        let said = async {
            while let Some((event, _)) = session.next().await {
                if let PrefillEvent::Started { cached_tokens } = event {
                    return cached_tokens;
                }
            }
            0
        };
        tokio::time::timeout(USAGE_PATIENCE, said)
            .await
            .unwrap_or(0)
    }

    async fn complete(&mut self) -> Option<Event> {
        let prompt_tokens = self.job.prompt.len() as u32;
        let cached_tokens = self.cached_tokens().await.min(prompt_tokens);
        self.metrics()
            .cached_prompt_tokens
            .inc_by(u64::from(cached_tokens));
        let completed = v1::Completed {
            usage: Some(v1::Usage {
                prompt_tokens,
                completion_tokens: self.texts.iter().map(ChoiceText::tokens).sum(),
                cached_tokens,
            }),
            timings: Some(self.timing.report()),
        };
        let delivered = self
            .deliver(v1::generate_event::Event::Completed(completed))
            .await;
        match &delivered {
            Ok(()) => {
                self.outcome.get_or_insert(Ok(()));
            }
            // The machine has finished and takes no tick any more.
            Err(Event::Tick) => {
                let message = "the request's time ended before its client took the last event";
                let late = Error::new(ErrorKind::Deadline, message);
                self.outcome.get_or_insert(Err(late));
            }
            Err(_) => {}
        }
        delivered.err()
    }

    /// Hands an event to the client's channel, or says what its client's silence means.
    async fn deliver(&mut self, event: v1::generate_event::Event) -> Result<(), Event> {
        if let Some(Err(error)) = &self.outcome {
            return Err(Event::Abort(error.clone()));
        }
        let event = v1::GenerateEvent { event: Some(event) };
        match self.outlet.send(event, self.job.deadline).await {
            Ok(()) => Ok(()),
            Err(Undelivered::Gone) => Err(Event::ClientGone),
            Err(Undelivered::Deadline) => Err(Event::Tick),
            Err(Undelivered::Slow(waited)) => {
                let message = format!("the client took nothing for {} ms", waited.as_millis());
                let error = Error::new(ErrorKind::Cancelled, message).with_reason("SLOW_CLIENT");
                self.outcome.get_or_insert(Err(error.clone()));
                Err(Event::Abort(error))
            }
        }
    }
}

fn lists(forced: Vec<Vec<TokenId>>) -> Vec<v1::TokenIds> {
    forced.into_iter().map(|ids| v1::TokenIds { ids }).collect()
}

fn stopping() -> Error {
    Error::new(ErrorKind::Unavailable, "the router is shutting down").with_reason("DRAINING")
}

async fn decode_event(session: &mut Option<DecodeSession>) -> Event {
    let Some(session) = session else {
        return std::future::pending().await;
    };
    match session.next().await {
        Some(event) => Event::Decode {
            session: session.session,
            event,
        },
        // The stream's end was an event already.
        None => std::future::pending().await,
    }
}

async fn prefill_event(session: &mut Option<PrefillSession>, timing: &mut Timing) -> Event {
    let Some(session) = session else {
        return std::future::pending().await;
    };
    match session.next().await {
        Some((event, report)) => {
            timing.heard_from_prefill(&event, report);
            Event::Prefill {
                attempt: session.attempt,
                event,
            }
        }
        None => std::future::pending().await,
    }
}

async fn lost(
    worker: Option<Arc<Worker>>,
    workers: &Workers,
    numerics: Option<NumericsId>,
) -> Event {
    let Some(worker) = worker else {
        return std::future::pending().await;
    };
    let error = worker.lost(|| workers.can_replace(&worker, numerics)).await;
    Event::WorkerLost {
        worker: worker.key.clone(),
        error,
    }
}
