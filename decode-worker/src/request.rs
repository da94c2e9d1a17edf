//! The life of one request on a decode worker.
//!
//! ```text
//!            Start(receive)                    Start(local)
//!                 |                                 |
//!              Waiting ---- Rejected -> status      |
//!                 | Reserved: grant                 |
//!                 v                                 v
//!   Reticket -> Reserved --- Completed: commit --> Running --- Released -> Ended
//!                 |  ^                               ^
//!        Aborted, |  | Reticket: grant again         | Submit(local)
//!        Expired  v  |                               |
//!              Orphaned ---- PrefillLocally ----> Switching
//!
//!   cancel, reader gone, deadline, in any state -> Ending --- Released -> over
//! ```
//!
//! When the worker's grace time is over the router is told, and told again, that the
//! request is to move; it goes on here until the router ends it.
//!
//! The blocks of a reservation go back to the engine only after `revoke` returned,
//! which is when no lane touches them. The task ends only after `Released`.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use baton_engine::api::{Command, Event, GroupReservation, RequestKey, Submission, Work};
use baton_kv_transfer::Ticket;
use baton_kv_transfer::receiver::{
    self, AbortReason, EventKind, GrantRequest, Regrant, RegrantRequest, Senders,
};
use baton_proto::convert::{forced_from_wire, sampled_from_wire, sampled_to_wire};
use baton_proto::environment::{self, Defect};
use baton_proto::live_requests::Stop;
use baton_proto::sampling::{FinishReason, SampledToken};
use baton_proto::status::{to_detail, to_status};
use baton_proto::work::WorkOrder;
use baton_proto::worker_info::{HANDOFF_EXPIRED, LEAVE_TIME, WORKER_DRAINING};
use baton_proto::{Attempt, Error, ErrorKind, v1};
use prost::Message as _;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::{Status, Streaming};

use crate::grant::{group_grants, wanted_ranges};
use crate::worker::Shared;

/// How often a router that has not moved a request is asked to.
const LEAVE_AGAIN: Duration = Duration::from_secs(1);

/// What a request's task hears.
pub(crate) enum Input {
    Engine(Event),
    Lane(receiver::Event),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Waiting,
    Reserved(Ticket),
    Orphaned { until: Instant },
    Switching,
    Running,
    Ending,
}

/// Whether the task goes on.
enum Flow {
    Continue,
    Over,
}

pub(crate) struct RequestTask {
    shared: Arc<Shared>,
    order: WorkOrder,
    key: RequestKey,
    attempt: Attempt,
    phase: Phase,
    /// Kept while the KV is to come from a peer, for a new grant.
    reservation: Vec<GroupReservation>,
    cached_tokens: u32,
    /// Tokens of a prompt that is computed here, until its first token.
    computing: Option<u32>,
    submitted: Instant,
    deadline: Option<Instant>,
    /// The error that `Ended` reports.
    failure: Option<Error>,
    inputs: mpsc::UnboundedReceiver<Input>,
    inputs_tx: mpsc::UnboundedSender<Input>,
    out: mpsc::Sender<Result<v1::DecodeEvent, Status>>,
    stop: Stop,
}

impl RequestTask {
    pub(crate) fn new(
        shared: Arc<Shared>,
        order: WorkOrder,
        attempt: Attempt,
        out: mpsc::Sender<Result<v1::DecodeEvent, Status>>,
        stop: Stop,
    ) -> Self {
        let (inputs_tx, inputs) = mpsc::unbounded_channel();
        let now = Instant::now();
        Self {
            key: shared.next_key(),
            deadline: order.deadline.map(|left| now + left),
            shared,
            order,
            attempt,
            phase: Phase::Waiting,
            reservation: Vec::new(),
            cached_tokens: 0,
            computing: None,
            submitted: now,
            failure: None,
            inputs,
            inputs_tx,
            out,
            stop,
        }
    }

    /// Runs the request to its end. Everything it held is given back on return.
    pub(crate) async fn run(mut self, path: Path, mut commands: Streaming<v1::DecodeCommand>) {
        let work = match path {
            Path::Receive => Work::Receive,
            Path::Local => Work::Local,
        };
        if let Err(error) = self.submit(work) {
            drop(self.out.send(Err(to_status(&error))).await);
            return;
        }
        let mut commands_open = true;
        let mut leave = boxed(self.shared.grace.over());
        loop {
            let due = self.next_due();
            let ending = self.phase == Phase::Ending;
            let flow = tokio::select! {
                biased;
                input = self.inputs.recv() => match input {
                    Some(input) => self.handle_input(input).await,
                    None => Flow::Over,
                },
                () = self.stop.stopped(), if !ending => self.end(self.stop.reason()).await,
                () = self.out.closed(), if !ending => self.end(None).await,
                () = sleep_until(due), if !ending => self.handle_due().await,
                () = &mut leave, if !ending => {
                    leave = boxed(tokio::time::sleep(LEAVE_AGAIN));
                    self.leave().await
                }
                command = commands.message(), if commands_open && !ending => match command {
                    Ok(Some(v1::DecodeCommand { command: Some(command) })) => {
                        self.handle_command(command).await
                    }
                    Ok(Some(v1::DecodeCommand { command: None })) => {
                        let error = Error::invalid("command", "is empty or not known here");
                        self.end(Some(error)).await
                    }
                    // A router that leaves takes its request with it.
                    Ok(None) | Err(_) => {
                        commands_open = false;
                        self.end(None).await
                    }
                },
            };
            if matches!(flow, Flow::Over) {
                return;
            }
        }
    }

    fn submit(&mut self, work: Work) -> Result<(), Error> {
        let key = self.key;
        let mailbox = self.inputs_tx.clone();
        self.shared.routes.open(key, move |event| {
            drop(mailbox.send(Input::Engine(event)));
        });
        let submission = Submission {
            key,
            request_id: self.order.request_id.clone(),
            work,
            prompt: self.order.prompt.clone(),
            forced: self.order.forced.clone(),
            sampling: self.order.sampling.clone(),
            cache_salt: self.order.cache_salt.clone(),
            priority: self.order.priority,
            use_cache: self.order.use_cache,
            itl_target: self.order.slo.itl,
        };
        self.shared
            .engine
            .send(Command::Submit(Box::new(submission)))
            .map_err(|error| {
                self.shared.routes.close(key);
                self.shared.send_error(&error)
            })
    }

    async fn handle_input(&mut self, input: Input) -> Flow {
        match input {
            Input::Engine(event) => self.handle_engine(event).await,
            Input::Lane(event) => self.handle_lane(event).await,
        }
    }

    async fn handle_engine(&mut self, event: Event) -> Flow {
        match event {
            Event::Accepted { .. } => {
                let position = self.shared.engine.load().requests_waiting;
                self.emit(v1::decode_event::Event::Queued(v1::Queued { position }))
                    .await
            }
            Event::Rejected { rejection, .. } => {
                let mut error = rejection.error;
                error.retry_after = error.retry_after.or(rejection.retry_after);
                drop(self.out.send(Err(to_status(&error))).await);
                Flow::Over
            }
            Event::Reserved {
                groups,
                cached_tokens,
                ..
            } => {
                self.reservation = groups;
                self.cached_tokens = cached_tokens;
                if self.phase == Phase::Ending {
                    // Cancelled before a lane was let in: nothing touches the blocks.
                    self.command(Command::Release { key: self.key });
                    return Flow::Continue;
                }
                self.grant().await
            }
            Event::Started { cached_tokens, .. } => {
                let started = v1::DecodeStarted {
                    cached_tokens,
                    queued_us: micros(self.submitted.elapsed()),
                };
                self.phase = match self.phase {
                    Phase::Ending => Phase::Ending,
                    _ => Phase::Running,
                };
                self.shared.count_local();
                let forced = self.order.forced.first().map_or(0, Vec::len);
                let known = (self.order.prompt.len() + forced) as u32;
                self.computing = Some(known.saturating_sub(cached_tokens));
                self.shared.pace().begin(Instant::now().into_std());
                self.emit(v1::decode_event::Event::Started(started)).await
            }
            Event::Tokens(run) => {
                self.prompt_computed(true);
                self.emit_tokens(run).await
            }
            Event::Finished {
                choice,
                reason,
                output_tokens,
                ..
            } => {
                self.shared.metrics.finished(reason);
                let finished = v1::WorkerChoiceFinished {
                    choice,
                    reason: v1::FinishReason::from(reason).into(),
                    output_tokens,
                };
                self.emit(v1::decode_event::Event::Finished(finished)).await
            }
            Event::Failed { error, .. } => {
                self.failure = Some(error);
                Flow::Continue
            }
            Event::Released { .. } => self.handle_released().await,
            // Never sent for this kind of work.
            Event::LayersReady { .. }
            | Event::First { .. }
            | Event::Step(_)
            | Event::Stopped { .. } => Flow::Continue,
        }
    }

    /// The worker's pace is learned from prompts that were computed to their end.
    fn prompt_computed(&mut self, whole: bool) {
        if let Some(tokens) = self.computing.take() {
            let tokens = if whole { tokens } else { 0 };
            self.shared.pace().end(tokens, Instant::now().into_std());
        }
    }

    async fn handle_released(&mut self) -> Flow {
        self.prompt_computed(false);
        self.shared.count_ended();
        if self.phase == Phase::Switching {
            self.key = self.shared.next_key();
            return match self.submit(Work::Local) {
                Ok(()) => Flow::Continue,
                Err(error) => {
                    drop(self.out.send(Err(to_status(&error))).await);
                    Flow::Over
                }
            };
        }
        let ended = v1::Ended {
            error: self.failure.as_ref().map(to_detail),
        };
        // A reader that is gone, or that stands still, needs no last word.
        let event = v1::decode_event::Event::Ended(ended);
        let patience = self.shared.config.slow_client_deadline;
        let last = self.out.send(Ok(v1::DecodeEvent { event: Some(event) }));
        drop(tokio::time::timeout(patience, last).await);
        Flow::Over
    }

    async fn handle_lane(&mut self, event: receiver::Event) -> Flow {
        if self.phase != Phase::Reserved(event.ticket) {
            return Flow::Continue;
        }
        match event.what {
            EventKind::Started => Flow::Continue,
            EventKind::LaneLost => {
                tracing::warn!(request_id = %self.order.request_id, attempt = %event.attempt, "the data lane broke; waiting for the sender to come back");
                Flow::Continue
            }
            EventKind::Completed {
                commit_payload,
                bytes,
                receiving,
                transport,
                foreign,
                ..
            } => {
                self.shared.forget_ticket(event.ticket);
                let first = match self.parse_first(&commit_payload) {
                    Ok(first) => first,
                    Err(error) => return self.orphan(event.attempt, error).await,
                };
                self.shared.metrics.received(bytes, transport, receiving);
                self.commit(&first, receiving, foreign).await
            }
            EventKind::Aborted { reason } => {
                self.shared.forget_ticket(event.ticket);
                self.shared.metrics.receive_failed(false);
                self.orphan(event.attempt, abort_error(&reason)).await
            }
            EventKind::Expired { reason } => {
                self.shared.forget_ticket(event.ticket);
                self.shared.metrics.receive_failed(true);
                let error = Error::new(
                    ErrorKind::Deadline,
                    format!("no commit arrived in time ({reason:?})"),
                )
                .with_reason(HANDOFF_EXPIRED);
                self.orphan(event.attempt, error).await
            }
        }
    }

    /// Opens the reservation to a lane and tells the router how to reach it.
    async fn grant(&mut self) -> Flow {
        let request = GrantRequest {
            request_id: self.order.request_id.clone(),
            attempt: self.attempt,
            epoch: self.shared.info.epoch,
            groups: group_grants(self.shared.engine.memory(), &self.reservation),
            senders: Senders::AnyLayout {
                tokens: self.order.prompt.len() as u32,
                exact: self.order.exact,
            },
            deadline: self.handoff_time(),
        };
        match self.shared.receiver.grant(request) {
            Ok(grant) => self.offer(grant.ticket).await,
            Err(error) => {
                let error = Error::new(error.kind(), error.to_string());
                self.end(Some(error)).await
            }
        }
    }

    async fn offer(&mut self, ticket: Ticket) -> Flow {
        self.phase = Phase::Reserved(ticket);
        self.shared.follow_ticket(ticket, self.inputs_tx.clone());
        let receiver = &self.shared.receiver;
        let lane = v1::Lane {
            data_address: self.shared.info.data_address.clone(),
            process_token: receiver.process_token().to_bytes().to_vec(),
            epoch: self.shared.info.epoch.0,
            lane_key: receiver.lane_key().0.to_vec(),
            ticket: ticket.to_bytes().to_vec(),
            attempt: self.attempt.0,
            wanted: wanted_ranges(&self.reservation),
            layout_json: self.shared.layout_json.clone(),
            deadline_ms: millis(self.handoff_time()),
            tls: Some(self.shared.config.tls.is_enabled()),
        };
        self.emit(v1::decode_event::Event::Reserved(v1::Reserved {
            lane: Some(lane),
            cached_tokens: self.cached_tokens,
        }))
        .await
    }

    fn parse_first(
        &self,
        payload: &[u8],
    ) -> Result<Vec<(SampledToken, Option<FinishReason>)>, Error> {
        let broken = |message: String| {
            Error::new(ErrorKind::Unavailable, message).with_reason("HANDOFF_BAD_COMMIT")
        };
        let first = v1::First::decode(payload).map_err(|error| broken(error.to_string()))?;
        if first.tokens.len() != self.order.sampling.n as usize {
            return Err(broken(format!(
                "the commit carries {} first tokens for {} choices",
                first.tokens.len(),
                self.order.sampling.n
            )));
        }
        let vocab = self.shared.info.card.vocab_size;
        if let Some(token) = first.tokens.iter().find(|token| token.id >= vocab) {
            return Err(broken(format!(
                "the commit carries token {}, the vocabulary has {vocab}",
                token.id
            )));
        }
        Ok(first.tokens.iter().map(sampled_from_wire).collect())
    }

    async fn commit(
        &mut self,
        first: &[(SampledToken, Option<FinishReason>)],
        receiving: Duration,
        foreign: bool,
    ) -> Flow {
        self.phase = Phase::Running;
        self.reservation.clear();
        self.shared.count_handoff();
        let committed = v1::Committed {
            first: first
                .iter()
                .map(|(token, finish)| sampled_to_wire(token, *finish))
                .collect(),
            transfer_us: micros(receiving),
        };
        self.command(Command::Commit {
            key: self.key,
            first: first.iter().map(|(token, _)| token.clone()).collect(),
            foreign,
        });
        self.emit(v1::decode_event::Event::Committed(committed))
            .await
    }

    /// The attempt failed; the reservation stands until the router decides.
    async fn orphan(&mut self, attempt: Attempt, error: Error) -> Flow {
        tracing::info!(request_id = %self.order.request_id, %attempt, %error, "handoff failed");
        self.phase = Phase::Orphaned {
            until: Instant::now() + self.handoff_time(),
        };
        self.emit(v1::decode_event::Event::Aborted(v1::HandoffAborted {
            attempt: attempt.0,
            error: Some(to_detail(&error)),
        }))
        .await
    }

    async fn handle_command(&mut self, command: v1::decode_command::Command) -> Flow {
        use v1::decode_command::Command as Wire;
        match command {
            Wire::Start(_) => {
                let error = Error::invalid("command.start", "the request has started already");
                self.end(Some(error)).await
            }
            Wire::Cancel(_) => self.end(None).await,
            Wire::CancelChoice(v1::CancelChoice { choice }) => {
                self.command(Command::CancelChoice {
                    key: self.key,
                    choice,
                });
                Flow::Continue
            }
            Wire::Reticket(v1::Reticket { attempt }) => self.reticket(Attempt(attempt)).await,
            Wire::PrefillLocally(v1::PrefillLocally { attempt, forced }) => {
                match forced_from_wire(&forced, self.order.sampling.n) {
                    Ok(forced) => self.prefill_locally(Attempt(attempt), forced).await,
                    Err(error) => self.end(Some(error)).await,
                }
            }
        }
    }

    async fn reticket(&mut self, attempt: Attempt) -> Flow {
        if attempt <= self.attempt {
            let error = Error::new(
                ErrorKind::Fenced,
                format!("attempt {attempt} does not follow attempt {}", self.attempt),
            );
            return self.end(Some(error)).await;
        }
        match self.phase {
            Phase::Reserved(ticket) => {
                let request = RegrantRequest {
                    attempt,
                    deadline: self.handoff_time(),
                    keep_received: false,
                };
                match self.shared.receiver.regrant(ticket, request).await {
                    Ok(Regrant::Granted(grant)) => {
                        self.shared.forget_ticket(ticket);
                        self.attempt = attempt;
                        self.offer(grant.ticket).await
                    }
                    // Its completion is on the way and answers the router.
                    Ok(Regrant::Committed) => Flow::Continue,
                    Err(_) => {
                        self.shared.forget_ticket(ticket);
                        self.attempt = attempt;
                        self.grant().await
                    }
                }
            }
            Phase::Orphaned { .. } => {
                self.attempt = attempt;
                self.grant().await
            }
            // Not reserved yet: the first grant carries the new attempt.
            Phase::Waiting => {
                self.attempt = attempt;
                Flow::Continue
            }
            // The commit won; `Committed` was sent.
            Phase::Running | Phase::Switching | Phase::Ending => Flow::Continue,
        }
    }

    async fn prefill_locally(&mut self, attempt: Attempt, forced: Vec<Vec<u32>>) -> Flow {
        if matches!(
            self.phase,
            Phase::Running | Phase::Switching | Phase::Ending
        ) {
            return Flow::Continue;
        }
        let committed = self.close_ticket().await;
        if committed {
            return Flow::Continue;
        }
        self.attempt = attempt;
        self.order.forced = forced;
        self.reservation.clear();
        self.phase = Phase::Switching;
        self.command(Command::Cancel { key: self.key });
        self.command(Command::Release { key: self.key });
        Flow::Continue
    }

    /// The worker goes, so the request has to.
    async fn leave(&mut self) -> Flow {
        tracing::info!(request_id = %self.order.request_id, reason = WORKER_DRAINING,
            "the grace time is over; asking the router to move the request");
        self.emit(v1::decode_event::Event::Leaving(v1::Leaving {
            time_ms: millis(LEAVE_TIME),
        }))
        .await
    }

    /// Stops all work and gives the blocks back once no lane touches them.
    async fn end(&mut self, error: Option<Error>) -> Flow {
        if self.failure.is_none() {
            self.failure = error;
        }
        let waiting = self.phase == Phase::Waiting;
        self.command(Command::Cancel { key: self.key });
        if !environment::has(Defect::FreeBeforeQuiet) {
            self.close_ticket().await;
        }
        self.phase = Phase::Ending;
        if !waiting {
            self.command(Command::Release { key: self.key });
        }
        Flow::Continue
    }

    /// Fences the open ticket, if any, and waits until its lanes are quiet. Returns
    /// whether the commit had won.
    async fn close_ticket(&mut self) -> bool {
        let Phase::Reserved(ticket) = self.phase else {
            return false;
        };
        let terminal = self.shared.receiver.revoke(ticket).await;
        let committed = terminal == Some(receiver::Terminal::Committed);
        if !committed {
            self.shared.forget_ticket(ticket);
        }
        committed
    }

    fn next_due(&self) -> Option<Instant> {
        let orphaned = match self.phase {
            Phase::Orphaned { until } => Some(until),
            _ => None,
        };
        match (orphaned, self.deadline) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    async fn handle_due(&mut self) -> Flow {
        let what = match self.phase {
            Phase::Orphaned { .. } => "the router did not place the prefill again in time",
            _ => "the request's deadline passed",
        };
        self.end(Some(Error::new(ErrorKind::Deadline, what))).await
    }

    fn handoff_time(&self) -> Duration {
        let left = self
            .deadline
            .map(|deadline| deadline.saturating_duration_since(Instant::now()));
        left.map_or(self.shared.config.handoff_deadline, |left| {
            left.min(self.shared.config.handoff_deadline)
        })
    }

    async fn emit_tokens(&mut self, run: Vec<baton_engine::api::TokenEvent>) -> Flow {
        let mut run = run.into_iter().peekable();
        while let Some(first) = run.next() {
            let (choice, first_index) = (first.choice, first.index);
            let mut tokens = vec![sampled_to_wire(&first.token, None)];
            while let Some(next) = run.next_if(|next| next.choice == choice) {
                tokens.push(sampled_to_wire(&next.token, None));
            }
            let tokens = v1::WorkerTokens {
                choice,
                first_index,
                tokens,
            };
            if let Flow::Over = self.emit(v1::decode_event::Event::Tokens(tokens)).await {
                return Flow::Over;
            }
        }
        Flow::Continue
    }

    /// Sends an event. A full channel means a slow reader: its choices are paused
    /// until it has caught up, and the request is cancelled if it never does.
    async fn emit(&mut self, event: v1::decode_event::Event) -> Flow {
        if self.phase == Phase::Ending {
            return Flow::Continue;
        }
        let event = Ok(v1::DecodeEvent { event: Some(event) });
        let event = match self.out.try_send(event) {
            Ok(()) => return Flow::Continue,
            Err(mpsc::error::TrySendError::Closed(_)) => return self.end(None).await,
            Err(mpsc::error::TrySendError::Full(event)) => event,
        };
        self.pause(true);
        let sent = tokio::select! {
            biased;
            sent = tokio::time::timeout(self.shared.config.slow_client_deadline, self.out.send(event)) => sent,
            () = self.stop.stopped() => return self.end(self.stop.reason()).await,
        };
        self.pause(false);
        match sent {
            Ok(Ok(())) => Flow::Continue,
            Ok(Err(_)) => self.end(None).await,
            Err(_) => {
                let error = Error::new(ErrorKind::Cancelled, "the reader was too slow")
                    .with_reason("SLOW_CLIENT");
                self.end(Some(error)).await
            }
        }
    }

    fn pause(&self, paused: bool) {
        for choice in 0..self.order.sampling.n {
            self.command(Command::Pause {
                key: self.key,
                choice,
                paused,
            });
        }
    }

    /// A stopped engine drops this task's mailbox, which ends the task.
    fn command(&self, command: Command) {
        if let Err(error) = self.shared.engine.send(command) {
            tracing::debug!(request_id = %self.order.request_id, %error, "engine command refused");
        }
    }
}

/// How the KV of the prompt comes about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    Receive,
    Local,
}

fn abort_error(reason: &AbortReason) -> Error {
    let (kind, code, message) = match reason {
        AbortReason::BySender(why) => (
            ErrorKind::Unavailable,
            "HANDOFF_ABORTED",
            format!("the prefill worker gave up: {why}"),
        ),
        AbortReason::Corrupt => (
            ErrorKind::Unavailable,
            "HANDOFF_CORRUPT",
            "the bytes arrived damaged".to_owned(),
        ),
        AbortReason::LayoutMismatch => (
            ErrorKind::Unavailable,
            "LAYOUT_MISMATCH",
            "the sender lays out KV differently".to_owned(),
        ),
        // Names the field and both values.
        AbortReason::Unfit(error) => return (**error).clone(),
    };
    Error::new(kind, message).with_reason(code)
}

fn boxed(
    wait: impl Future<Output = ()> + Send + 'static,
) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    Box::pin(wait)
}

async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
