//! What every worker answers about itself, whatever its role: the description,
//! the tokenizer specification and the watch stream.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_stream::{Stream, StreamExt as _};
use tonic::Status;

use crate::error::Error;
use crate::ids::{Epoch, WorkerId};
use crate::model_card::ModelCard;
use crate::protocol::{self, ProtocolVersion};
use crate::status::to_status;
use crate::{v1, work};

/// The longest silence of a watch stream; a router that hears nothing for a few of
/// these judges the worker dead.
pub const WATCH_INTERVAL: Duration = Duration::from_millis(250);

/// A stream of messages as tonic wants it.
pub type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// A worker's state as routers see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerState {
    Starting,
    Ready,
    Draining,
}

impl WorkerState {
    /// The name on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Draining => "draining",
        }
    }
}

/// The facts about one worker. Cheap to clone.
#[derive(Clone)]
pub struct WorkerInfo {
    pub worker_id: WorkerId,
    pub epoch: Epoch,
    /// prefill, decode or mixed.
    pub role: &'static str,
    pub card: Arc<ModelCard>,
    /// Where senders connect; empty for workers that receive nothing.
    pub data_address: String,
    /// JSON of the tokenizer specification.
    pub tokenizer_json: Arc<[u8]>,
    pub state: watch::Receiver<WorkerState>,
    /// Reads the load now; must not block.
    pub load: Arc<dyn Fn() -> v1::Load + Send + Sync>,
}

impl WorkerInfo {
    /// The answer to `Describe`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unavailable`] for an incompatible protocol.
    pub fn describe(&self, request: &v1::DescribeRequest) -> Result<v1::WorkerDescription, Error> {
        if let Some(peer) = request.protocol {
            protocol::CURRENT.check_peer(ProtocolVersion::from(peer))?;
        }
        let card = serde_json::to_string(&*self.card)
            .map_err(|error| Error::new(crate::ErrorKind::Internal, error.to_string()))?;
        Ok(v1::WorkerDescription {
            protocol: Some(protocol::CURRENT.into()),
            worker_id: self.worker_id.0.clone(),
            epoch: self.epoch.0,
            role: self.role.to_owned(),
            model_card_json: card,
            data_address: self.data_address.clone(),
            load: Some((self.load)()),
        })
    }

    /// The answer to `TokenizerSpec`.
    pub fn tokenizer_stream(&self) -> ResponseStream<v1::TokenizerSpecChunk> {
        let chunks = work::spec_chunks(&self.tokenizer_json);
        Box::pin(tokio_stream::iter(chunks).map(Ok))
    }

    /// The answer to `Watch`: a snapshot at once, then one per interval or change of
    /// state. Ends when the worker goes.
    pub fn watch_stream(&self) -> ResponseStream<v1::WatchEvent> {
        let (tx, rx) = tokio::sync::mpsc::channel(4);
        let info = self.clone();
        // Ends with its reader: every send fails once the stream is dropped.
        tokio::spawn(async move {
            let mut state = info.state.clone();
            for sequence in 0_u64.. {
                let event = v1::WatchEvent {
                    epoch: info.epoch.0,
                    sequence,
                    state: state.borrow_and_update().name().to_owned(),
                    load: Some((info.load)()),
                };
                if tx.send(Ok(event)).await.is_err() {
                    return;
                }
                tokio::select! {
                    biased;
                    changed = state.changed() => if changed.is_err() { return },
                    () = tokio::time::sleep(WATCH_INTERVAL) => {}
                    () = tx.closed() => return,
                }
            }
        });
        Box::pin(tokio_stream::wrappers::ReceiverStream::new(rx))
    }

    /// Refuses new work unless the worker is ready.
    ///
    /// # Errors
    /// `UNAVAILABLE`, reason `WORKER_STARTING` or `WORKER_DRAINING`.
    pub fn check_ready(&self) -> Result<(), Status> {
        let (reason, what) = match *self.state.borrow() {
            WorkerState::Ready => return Ok(()),
            WorkerState::Starting => ("WORKER_STARTING", "starting"),
            WorkerState::Draining => ("WORKER_DRAINING", "draining"),
        };
        let error = Error::new(
            crate::ErrorKind::Unavailable,
            format!("worker `{}` is {what}", self.worker_id),
        );
        Err(to_status(&error.with_reason(reason)))
    }
}
