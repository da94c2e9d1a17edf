//! The two calls of a request as streams of the machine's events; the only place
//! that reads `worker.proto`'s messages.
//!
//! Dropping a session resets its call, which cancels the work at the worker.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use baton_proto::sampling::FinishReason;
use baton_proto::status::{from_detail, from_status};
use baton_proto::v1::decode_worker_client::DecodeWorkerClient;
use baton_proto::v1::prefill_worker_client::PrefillWorkerClient;
use baton_proto::{Error, ErrorKind, convert, limits, v1};
use futures::{Stream, StreamExt as _};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Request;

use crate::request::token_log::Drawn;
use crate::request::{DecodeEvent, PrefillEvent};
use crate::workers::{Placed, Worker};

/// Commands waiting for one decode call. A request sends one start, one command
/// per failed attempt and one cancel per choice, far less than this.
const COMMANDS_MAX: usize = 64;

type EventStream<T> = Pin<Box<dyn Stream<Item = T> + Send>>;

/// An open decode call.
pub struct DecodeSession {
    pub worker: Arc<Worker>,
    /// The attempt of its start.
    pub session: u32,
    pub placed: Placed,
    commands: mpsc::Sender<v1::DecodeCommand>,
    events: EventStream<DecodeEvent>,
}

/// What a worker reported beside its event, for timings.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// What the prompt took on the worker's clock.
    pub prefill: Option<Duration>,
    pub handoff: Option<v1::Handoff>,
}

impl DecodeSession {
    /// Opens the call; nothing is awaited.
    pub fn open(worker: Arc<Worker>, start: v1::DecodeStart, tokens: u32) -> Self {
        let (commands, receiver) = mpsc::channel(COMMANDS_MAX);
        let session = start.attempt;
        let timeout = start.work.as_ref().and_then(|work| work.deadline_ms);
        let mut client = DecodeWorkerClient::new(worker.channel.clone())
            .max_decoding_message_size(limits::INTERNAL_MESSAGE_BYTES_MAX)
            .max_encoding_message_size(limits::INTERNAL_MESSAGE_BYTES_MAX);
        let first = command(v1::decode_command::Command::Start(start));
        let outgoing = futures::stream::iter([first]).chain(ReceiverStream::new(receiver));
        let mut request = Request::new(outgoing);
        if let Some(ms) = timeout {
            request.set_timeout(Duration::from_millis(ms));
        }
        let events = async_stream::stream! {
            let mut stream = match client.decode(request).await {
                Ok(response) => response.into_inner(),
                Err(status) => {
                    yield DecodeEvent::Failed { error: from_status(&status) };
                    return;
                }
            };
            loop {
                match stream.message().await {
                    Ok(Some(event)) => yield decode_event(event),
                    Ok(None) => {
                        let error = gone("closed the stream before the request had ended");
                        yield DecodeEvent::Failed { error };
                        return;
                    }
                    Err(status) => {
                        let error = from_status(&status);
                        yield DecodeEvent::Failed { error };
                        return;
                    }
                }
            }
        };
        Self {
            placed: worker.ask(tokens),
            worker,
            session,
            commands,
            events: Box::pin(events),
        }
    }

    /// The next event; `None` after the call's end. Cancel safe.
    pub async fn next(&mut self) -> Option<DecodeEvent> {
        self.events.next().await
    }

    /// Sends a command. A full or closed channel means that the call is dead; its
    /// events say so.
    pub fn send(&self, inner: v1::decode_command::Command) {
        if let Err(error) = self.commands.try_send(command(inner)) {
            tracing::debug!(worker = %self.worker.key.id, %error, "drop a command");
        }
    }
}

/// An open prefill call.
pub struct PrefillSession {
    pub worker: Arc<Worker>,
    pub attempt: u32,
    pub placed: Placed,
    /// The way its KV goes.
    pub lane: Option<v1::Lane>,
    events: EventStream<(PrefillEvent, Report)>,
}

impl PrefillSession {
    /// Opens the call; nothing is awaited.
    pub fn open(
        worker: Arc<Worker>,
        prefill: v1::PrefillRequest,
        attempt: u32,
        placed: Placed,
    ) -> Self {
        let timeout = prefill.work.as_ref().and_then(|work| work.deadline_ms);
        let mut client = PrefillWorkerClient::new(worker.channel.clone())
            .max_decoding_message_size(limits::INTERNAL_MESSAGE_BYTES_MAX)
            .max_encoding_message_size(limits::INTERNAL_MESSAGE_BYTES_MAX);
        let lane = prefill.lane.clone();
        let mut request = Request::new(prefill);
        if let Some(ms) = timeout {
            request.set_timeout(Duration::from_millis(ms));
        }
        let events = async_stream::stream! {
            let failed = |error| (PrefillEvent::Failed { error }, Report::default());
            let mut stream = match client.prefill(request).await {
                Ok(response) => response.into_inner(),
                Err(status) => {
                    yield failed(from_status(&status));
                    return;
                }
            };
            loop {
                match stream.message().await {
                    Ok(Some(event)) => yield prefill_event(event),
                    Ok(None) => {
                        yield failed(gone("closed the stream before the handoff had ended"));
                        return;
                    }
                    Err(status) => {
                        yield failed(from_status(&status));
                        return;
                    }
                }
            }
        };
        Self {
            placed,
            lane,
            worker,
            attempt,
            events: Box::pin(events),
        }
    }

    /// The next event; `None` after the call's end. Cancel safe.
    pub async fn next(&mut self) -> Option<(PrefillEvent, Report)> {
        self.events.next().await
    }
}

/// Has a worker end the work of older attempts of a client's request.
///
/// # Errors
/// The worker's, or that it cannot be reached.
pub async fn raise_fence(worker: Arc<Worker>, fence: v1::Fence) -> Result<(), Error> {
    let request = v1::CancelRequest {
        fence: Some(fence),
        ..v1::CancelRequest::default()
    };
    let channel = worker.channel.clone();
    let raised = if worker.role.prefills() {
        PrefillWorkerClient::new(channel).cancel(request).await
    } else {
        DecodeWorkerClient::new(channel).cancel(request).await
    };
    raised.map(drop).map_err(|status| from_status(&status))
}

fn command(command: v1::decode_command::Command) -> v1::DecodeCommand {
    v1::DecodeCommand {
        command: Some(command),
    }
}

fn gone(message: &str) -> Error {
    Error::new(ErrorKind::Unavailable, message)
}

fn broken(message: &str) -> Error {
    Error::new(ErrorKind::Internal, message)
}

fn drawn(tokens: &[v1::SampledToken]) -> Vec<Drawn> {
    tokens.iter().map(convert::sampled_from_wire).collect()
}

fn decode_event(event: v1::DecodeEvent) -> DecodeEvent {
    use v1::decode_event::Event;
    match event.event {
        Some(Event::Queued(_)) => DecodeEvent::Queued,
        Some(Event::Reserved(reserved)) => match reserved.lane {
            Some(lane) => DecodeEvent::Reserved {
                attempt: lane.attempt,
                lane: Box::new(lane),
            },
            None => DecodeEvent::Failed {
                error: broken("reserved without a lane"),
            },
        },
        Some(Event::Started(started)) => DecodeEvent::Started {
            cached_tokens: started.cached_tokens,
        },
        Some(Event::Committed(committed)) => DecodeEvent::Committed {
            first: drawn(&committed.first),
        },
        Some(Event::Aborted(aborted)) => DecodeEvent::Aborted {
            attempt: aborted.attempt,
            error: aborted
                .error
                .as_ref()
                .map_or_else(|| gone("the handoff was aborted"), from_detail),
        },
        Some(Event::Tokens(tokens)) => DecodeEvent::Tokens {
            choice: tokens.choice,
            first_index: tokens.first_index,
            tokens: drawn(&tokens.tokens),
        },
        Some(Event::Finished(finished)) => {
            match convert::finish_from_wire(finished.reason()) {
                Some(reason) => DecodeEvent::Finished {
                    choice: finished.choice,
                    reason,
                    output_tokens: finished.output_tokens,
                },
                // A reason of a newer peer: the choice ended for a reason we cannot name.
                None => DecodeEvent::Finished {
                    choice: finished.choice,
                    reason: FinishReason::Stop,
                    output_tokens: finished.output_tokens,
                },
            }
        }
        Some(Event::Ended(ended)) => DecodeEvent::Ended {
            error: ended.error.as_ref().map(from_detail),
        },
        Some(Event::Leaving(_)) => DecodeEvent::Leaving,
        // A newer peer's event is tolerated; it is a sign of life only.
        None => DecodeEvent::Unknown,
    }
}

fn prefill_event(event: v1::PrefillEvent) -> (PrefillEvent, Report) {
    use v1::prefill_event::Event;
    let mut report = Report::default();
    let event = match event.event {
        Some(Event::Accepted(_)) => PrefillEvent::Accepted,
        Some(Event::Started(started)) => PrefillEvent::Started {
            cached_tokens: started.cached_tokens,
        },
        Some(Event::First(first)) => {
            report.prefill = Some(Duration::from_micros(first.prefill_us));
            PrefillEvent::First {
                tokens: drawn(&first.tokens),
            }
        }
        Some(Event::HandedOff(handed)) => {
            report.handoff = handed.committed.then_some(v1::Handoff {
                bytes: handed.bytes,
                exposed_us: handed.exposed_us,
                at_link_speed_us: handed.at_link_speed_us,
            });
            PrefillEvent::HandedOff {
                committed: handed.committed,
            }
        }
        None => PrefillEvent::Unknown,
    };
    (event, report)
}
