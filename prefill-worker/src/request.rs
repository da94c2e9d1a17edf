//! The life of one request on a prefill worker.
//!
//! ```text
//! Submit -> Accepted -> Started -> LayersReady.. -> First -> commit -> HandedOff
//!                                       | push          | to the router at once
//!                                       v               v
//!                                   data lane ==== commit carries the first tokens
//!
//! then, however it went: abort the transfer unless it ended, wait until no lane
//! reads the blocks, Release, wait for Released.
//! ```
//!
//! A cancelled call, a passed deadline and a failed handoff all take that one exit,
//! so nothing stays pinned.

use std::sync::Arc;
use std::time::Duration;

use baton_engine::api::{Command, Event, RequestKey, Submission, Work};
use baton_kv_transfer::Refusal;
use baton_kv_transfer::sender::{CommitOutcome, Transfer};
use baton_observability::labels::TransferFailure;
use baton_proto::convert::sampled_to_wire;
use baton_proto::live_requests::Stop;
use baton_proto::sampling::{FinishReason, SampledToken};
use baton_proto::status::to_status;
use baton_proto::work::WorkOrder;
use baton_proto::worker_info::{HANDOFF_PEER_LOST, HANDOFF_UNREACHABLE, leaving};
use baton_proto::{Error, ErrorKind, v1};
use prost::Message as _;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::Status;

use crate::ship::{Lane, source_blocks};
use crate::worker::Shared;

/// What a router gets to read the end of a request before its receiver hears of it.
const LAST_WORD_READ: Duration = Duration::from_secs(1);

type Events = mpsc::Sender<Result<v1::PrefillEvent, Status>>;

pub(crate) struct RequestTask {
    shared: Arc<Shared>,
    order: WorkOrder,
    lane: Lane,
    key: RequestKey,
    submitted: Instant,
    started: Option<Instant>,
    /// Prompt tokens to compute, from the start until the first token.
    computing: Option<u32>,
    bytes: u64,
    /// `Released` has arrived: the engine holds nothing.
    released: bool,
    inputs: mpsc::UnboundedReceiver<Event>,
    out: Events,
    stop: Stop,
    deadline: Option<Instant>,
}

impl RequestTask {
    pub(crate) fn new(
        shared: Arc<Shared>,
        order: WorkOrder,
        lane: Lane,
        out: Events,
        stop: Stop,
    ) -> Result<Self, Error> {
        let key = shared.next_key();
        let (mailbox, inputs) = mpsc::unbounded_channel();
        shared
            .routes
            .open(key, move |event| drop(mailbox.send(event)));
        let submission = Submission {
            key,
            request_id: order.request_id.clone(),
            work: Work::Prefill {
                ship: lane.ship.clone(),
            },
            prompt: order.prompt.clone(),
            forced: order.forced.clone(),
            sampling: order.sampling.clone(),
            cache_salt: order.cache_salt.clone(),
            priority: order.priority,
            use_cache: order.use_cache,
            // A prefill worker has no tokens to keep apart.
            itl_target: None,
        };
        if let Err(error) = shared.engine.send(Command::Submit(Box::new(submission))) {
            shared.routes.close(key);
            return Err(shared.send_error(&error));
        }
        let now = Instant::now();
        Ok(Self {
            deadline: order.deadline.map(|left| now + left),
            shared,
            order,
            lane,
            key,
            submitted: now,
            started: None,
            computing: None,
            bytes: 0,
            released: false,
            inputs,
            out,
            stop,
        })
    }

    /// Runs the request to its end. Everything it held is given back on return.
    pub(crate) async fn run(mut self) {
        let target = self.lane.target.clone();
        let opening = self.lane.opening.clone();
        let sender = &self.shared.sender;
        let opened = match &self.lane.form {
            Some(form) => sender.open_as(target, form),
            None => sender.open(target, opening),
        };
        let transfer = match opened {
            Ok(transfer) => transfer,
            Err(error) => {
                let error = transfer_error(&error);
                self.command(Command::Cancel { key: self.key });
                self.give_back().await;
                drop(self.out.send(Err(to_status(&error))).await);
                return;
            }
        };
        let result = self.drive(&transfer).await;
        if let Err(error) = &result {
            self.command(Command::Cancel { key: self.key });
            transfer.abort(&error.to_string());
            if error.kind != ErrorKind::Cancelled {
                tracing::info!(request_id = %self.order.request_id, %error, "prefill ended early");
            }
        }
        transfer.quiesced().await;
        self.give_back().await;
        if let Err(error) = result {
            // A caller that is gone needs no last word.
            drop(self.out.send(Err(to_status(&error))).await);
        }
    }

    /// Up to the first token a worker that goes gives the prompt up; from there on it
    /// keeps the blocks until its receiver has them.
    async fn drive(&mut self, transfer: &Transfer) -> Result<(), Error> {
        let leave = self.shared.grace.over();
        tokio::pin!(leave);
        loop {
            let event = tokio::select! {
                biased;
                event = self.next() => event?,
                () = &mut leave => return Err(leaving(&self.shared.info.worker_id)),
            };
            match event {
                Event::Accepted { .. } => {
                    let load = self.shared.engine.load();
                    self.emit(v1::prefill_event::Event::Accepted(v1::PrefillAccepted {
                        queue_requests: load.requests_waiting,
                        queue_tokens: load.prefill_tokens_waiting,
                    }))
                    .await?;
                }
                Event::Rejected { rejection, .. } => {
                    self.released = true;
                    let mut error = rejection.error;
                    error.retry_after = error.retry_after.or(rejection.retry_after);
                    return Err(error);
                }
                Event::Started { cached_tokens, .. } => {
                    let now = Instant::now();
                    self.started = Some(now);
                    let forced = self.order.forced.first().map_or(0, Vec::len);
                    let known = (self.order.prompt.len() + forced) as u32;
                    self.computing = Some(known.saturating_sub(cached_tokens));
                    self.shared.pace().begin(now.into_std());
                    let queued = now - self.submitted;
                    self.shared
                        .metrics
                        .0
                        .request_queue_time
                        .observe_duration(queued);
                    self.emit(v1::prefill_event::Event::Started(v1::PrefillStarted {
                        cached_tokens,
                        queued_us: micros(queued),
                    }))
                    .await?;
                }
                Event::LayersReady {
                    group,
                    layer,
                    blocks,
                    ..
                } => self.push(transfer, group, layer, &blocks).await?,
                Event::First {
                    tokens,
                    cached_tokens,
                    ..
                } => return self.hand_over(transfer, &tokens, cached_tokens).await,
                Event::Failed { error, .. } => return Err(error),
                Event::Released { .. } => {
                    self.released = true;
                    return Err(Error::new(
                        ErrorKind::Cancelled,
                        "the engine let go of the request",
                    ));
                }
                Event::Reserved { .. }
                | Event::Tokens(_)
                | Event::Finished { .. }
                | Event::Step(_)
                | Event::Stopped { .. } => {}
            }
        }
    }

    async fn push(
        &mut self,
        transfer: &Transfer,
        group: u16,
        layer: u32,
        blocks: &[(u32, u32)],
    ) -> Result<(), Error> {
        let memory = Arc::clone(self.shared.engine.memory());
        let (sources, bytes) = source_blocks(&memory, group, layer, blocks).ok_or_else(|| {
            Error::new(
                ErrorKind::Internal,
                format!("layer {layer} is not in kv group {group}"),
            )
        })?;
        self.bytes += match &self.lane.form {
            Some(form) => u64::from(form.part_bytes()) * sources.len() as u64,
            None => bytes,
        };
        let pushed = self
            .unless_over(transfer.push(group, layer, &sources))
            .await?;
        pushed.map_err(|error| match error {
            baton_kv_transfer::Error::PeerLost(_) => lost_peer(transfer),
            error => transfer_error(&error),
        })
    }

    /// The first tokens go to the router before anything else; the commit repeats them
    /// to the receiver.
    async fn hand_over(
        &mut self,
        transfer: &Transfer,
        tokens: &[(SampledToken, Option<FinishReason>)],
        cached_tokens: u32,
    ) -> Result<(), Error> {
        // From here on nothing hides the transfer.
        let computed = Instant::now();
        self.prompt_computed(true);
        let prefill = computed - self.started.unwrap_or(self.submitted);
        self.shared
            .metrics
            .0
            .request_prefill_time
            .observe_duration(prefill);
        let first = v1::First {
            tokens: tokens
                .iter()
                .map(|(token, finish)| sampled_to_wire(token, *finish))
                .collect(),
            prefill_us: micros(prefill),
            cached_tokens,
        };
        self.emit(v1::prefill_event::Event::First(first.clone()))
            .await?;
        if tokens.iter().all(|(_, finish)| finish.is_some()) {
            // Nothing is left to decode anywhere. The router ends the request at the
            // receiver, and leaves this call when it has read the tokens; were the
            // receiver told first, its word of an aborted handoff could overtake them,
            // and the prompt would be computed once more.
            self.emit(v1::prefill_event::Event::HandedOff(v1::HandedOff {
                committed: false,
                bytes: 0,
                exposed_us: 0,
                at_link_speed_us: 0,
            }))
            .await?;
            drop(tokio::time::timeout(LAST_WORD_READ, self.out.closed()).await);
            transfer.abort("every choice ended with its first token");
            return Ok(());
        }
        let payload = first.encode_to_vec().into();
        let outcome = self.unless_over(transfer.commit(payload)).await?;
        match outcome {
            CommitOutcome::Committed => {
                let exposed = computed.elapsed();
                let statistics = transfer.statistics();
                self.shared.metrics.sent(self.bytes, &statistics, exposed);
                self.shared.count_handoff();
                self.emit(v1::prefill_event::Event::HandedOff(v1::HandedOff {
                    committed: true,
                    bytes: self.bytes,
                    exposed_us: micros(exposed),
                    at_link_speed_us: statistics.at_link_speed.map_or(0, micros),
                }))
                .await
            }
            CommitOutcome::Refused(refusal) => {
                self.shared.metrics.send_failed(refusal_cause(refusal));
                Err(Error::new(
                    refusal.kind(),
                    format!("the receiver refused the handoff: {refusal}"),
                )
                .with_reason("HANDOFF_REFUSED"))
            }
            CommitOutcome::PeerLost => {
                self.shared.metrics.send_failed(TransferFailure::PeerLost);
                Err(lost_peer(transfer))
            }
            CommitOutcome::Aborted(reason) => {
                self.shared.metrics.send_failed(TransferFailure::Cancelled);
                Err(Error::new(ErrorKind::Cancelled, reason).with_reason("HANDOFF_ABORTED"))
            }
        }
    }

    /// The worker's pace is learned from prompts that were computed to their end.
    fn prompt_computed(&mut self, whole: bool) {
        if let Some(tokens) = self.computing.take() {
            let tokens = if whole { tokens } else { 0 };
            self.shared.pace().end(tokens, Instant::now().into_std());
        }
    }

    /// Un-pins the blocks and waits until the engine has them.
    async fn give_back(&mut self) {
        self.prompt_computed(false);
        self.command(Command::Release { key: self.key });
        while !self.released {
            match self.inputs.recv().await {
                Some(Event::Released { .. } | Event::Rejected { .. }) => self.released = true,
                Some(_) => {}
                // The engine ended and dropped every mailbox.
                None => return,
            }
        }
    }

    async fn next(&mut self) -> Result<Event, Error> {
        let due = self.deadline;
        let out = self.out.clone();
        let stop = self.stop.clone();
        let received = over_or(&out, &stop, due, self.inputs.recv()).await?;
        received.ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, "the engine stopped").with_reason("ENGINE_STOPPED")
        })
    }

    async fn unless_over<T>(&self, work: impl Future<Output = T>) -> Result<T, Error> {
        over_or(&self.out, &self.stop, self.deadline, work).await
    }

    async fn emit(&self, event: v1::prefill_event::Event) -> Result<(), Error> {
        let event = v1::PrefillEvent { event: Some(event) };
        self.unless_over(self.out.send(Ok(event)))
            .await?
            .map_err(|_| gone())
    }

    fn command(&self, command: Command) {
        if let Err(error) = self.shared.engine.send(command) {
            tracing::debug!(request_id = %self.order.request_id, %error, "engine command refused");
        }
    }
}

/// `work`, unless the caller leaves, cancels or its time is over.
async fn over_or<T>(
    out: &Events,
    stop: &Stop,
    deadline: Option<Instant>,
    work: impl Future<Output = T>,
) -> Result<T, Error> {
    let due = async {
        match deadline {
            Some(deadline) => tokio::time::sleep_until(deadline).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        () = stop.stopped() => Err(stop.reason().unwrap_or_else(gone)),
        () = out.closed() => Err(gone()),
        () = due => Err(Error::new(ErrorKind::Deadline, "the request's deadline passed")),
        done = work => Ok(done),
    }
}

fn gone() -> Error {
    Error::new(ErrorKind::Cancelled, "the request was cancelled")
}

/// Whose fault it is, nobody here can say; but a port that was never reached will not be
/// reached by the next request either.
fn lost_peer(transfer: &Transfer) -> Error {
    let why = transfer.failure().unwrap_or_default();
    let reason = match transfer.was_reached() {
        true => HANDOFF_PEER_LOST,
        false => HANDOFF_UNREACHABLE,
    };
    let message = format!("the receiver is lost: {why}");
    Error::new(ErrorKind::Unavailable, message).with_reason(reason)
}

fn transfer_error(error: &baton_kv_transfer::Error) -> Error {
    Error::new(error.kind(), error.to_string()).with_reason("HANDOFF_FAILED")
}

fn refusal_cause(refusal: Refusal) -> TransferFailure {
    match refusal {
        Refusal::UnknownTicket | Refusal::Fenced => TransferFailure::Fenced,
        Refusal::Expired => TransferFailure::Expired,
        Refusal::LayoutMismatch => TransferFailure::Layout,
        Refusal::Corrupt | Refusal::Incomplete => TransferFailure::Checksum,
        Refusal::Aborted | Refusal::Other(_) => TransferFailure::Cancelled,
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
