//! What every worker answers about itself, whatever its role: the description and the
//! tokenizer specification ([`crate::watching`] has the watch stream); and how it leaves.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_stream::{Stream, StreamExt as _};
use tokio_util::task::TaskTracker;
use tonic::Status;

use crate::cache_names::CacheNames;
use crate::error::Error;
use crate::ids::{Epoch, WorkerId};
use crate::model_card::ModelCard;
use crate::protocol::{self, ProtocolVersion};
use crate::status::to_status;
use crate::watching::{Told, WATCH_INTERVAL, Watchers};
use crate::{v1, work};

/// What the requests of a worker whose grace time is over get to go on elsewhere: about
/// what computing a long prompt once more takes.
pub const LEAVE_TIME: Duration = Duration::from_secs(10);

/// Why a draining worker does not take, or go on with, a request.
pub const WORKER_DRAINING: &str = "WORKER_DRAINING";

/// Why a prefill worker gives up a handoff whose receiver's data port it could not reach.
pub const HANDOFF_UNREACHABLE: &str = "HANDOFF_UNREACHABLE";

/// Why a prefill worker gives up a handoff whose receiver it had reached and lost.
pub const HANDOFF_PEER_LOST: &str = "HANDOFF_PEER_LOST";

/// Why a decode worker gives up a handoff of which it heard nothing, or no end, in time.
pub const HANDOFF_EXPIRED: &str = "HANDOFF_EXPIRED";

/// What a request hears that a worker ends because it leaves.
pub fn leaving(worker: &WorkerId) -> Error {
    let message = format!("worker `{worker}` leaves, its grace time is over");
    Error::new(crate::ErrorKind::Unavailable, message).with_reason(WORKER_DRAINING)
}

/// The time that a draining worker lets its requests run. Begun once. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Grace(Arc<GraceState>);

#[derive(Debug, Default)]
struct GraceState {
    end: OnceLock<Instant>,
    /// Wakes those who wait in the order they came, which a `watch` does not.
    begun: Notify,
}

impl Grace {
    /// The time begins now, unless it has begun.
    pub fn begin(&self, time: Duration) {
        if self.0.end.set(Instant::now() + time).is_ok() {
            self.0.begun.notify_waiters();
        }
    }

    /// The worker leaves: it takes no new request from now on, and its `left` requests have
    /// `time`, from the first call on. Waits until routers know and `publish` has ended.
    pub async fn leave(
        &self,
        info: &WorkerInfo,
        state: &watch::Sender<WorkerState>,
        (left, time): (usize, Duration),
        publish: impl Future<Output = ()>,
    ) -> Told {
        self.begin(time);
        if state.send_replace(WorkerState::Draining) != WorkerState::Draining {
            tracing::info!(worker = %info.worker_id, left, grace_ms = time.as_millis() as u64,
                "draining");
        }
        tokio::join!(info.watchers.all_know(&info.worker_id), publish).0
    }

    /// Resolves when the time is over, which it is not before it began. Cancel safe.
    pub fn over(&self) -> impl Future<Output = ()> + Send + use<> {
        let state = Arc::clone(&self.0);
        async move {
            loop {
                let begun = state.begun.notified();
                tokio::pin!(begun);
                begun.as_mut().enable();
                match state.end.get() {
                    Some(end) => return tokio::time::sleep_until(*end).await,
                    None => begun.await,
                }
            }
        }
    }

    /// Waits until `tasks` have ended, at most for this time and then for [`LEAVE_TIME`], in
    /// which others take over what is left: `left` requests, for the log.
    pub async fn see_out(&self, worker: &WorkerId, tasks: &TaskTracker, left: impl Fn() -> usize) {
        let all_ended = tokio::select! {
            biased;
            () = tasks.wait() => true,
            () = self.over() => false,
        };
        if all_ended {
            return;
        }
        tracing::warn!(%worker, left = left(),
            "the grace time is over; the rest is handed over to other workers");
        if tokio::time::timeout(LEAVE_TIME, tasks.wait())
            .await
            .is_err()
        {
            tracing::warn!(%worker, left = left(), "nobody took the rest over; ending it");
        }
    }
}

/// A stream of messages as tonic wants it.
pub type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// A worker's state as routers see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerState {
    Starting,
    Ready,
    /// Its engine has something to do and does not move.
    Stalled,
    Draining,
}

impl WorkerState {
    /// The name on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Stalled => "stalled",
            Self::Draining => "draining",
        }
    }
}

/// How long an engine may stand between two layers before its worker says so. The longest
/// layer, of a long chunk on a slow machine, takes tenths of a second.
pub const STALLED_AFTER: Duration = Duration::from_secs(5);

/// Keeps `state` to whether the engine moves: `still_for` says how long it has not.
/// Never ends. Cancel safe.
pub async fn follow_engine(
    worker: &WorkerId,
    state: &watch::Sender<WorkerState>,
    still_for: impl Fn() -> Duration,
) {
    loop {
        let still = still_for();
        state.send_if_modified(|state| {
            let now = match *state {
                WorkerState::Ready if still >= STALLED_AFTER => WorkerState::Stalled,
                WorkerState::Stalled if still < STALLED_AFTER => WorkerState::Ready,
                other => other,
            };
            let changed = now != *state;
            match now {
                WorkerState::Stalled if changed => tracing::error!(%worker,
                    still_ms = still.as_millis() as u64, "the engine does not move"),
                _ if changed => tracing::warn!(%worker, "the engine moves again"),
                _ => {}
            }
            *state = now;
            changed
        });
        tokio::time::sleep(WATCH_INTERVAL).await;
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
    /// What its prefix cache holds.
    pub cache: Arc<CacheNames>,
    /// Who reads its watch streams.
    pub watchers: Watchers,
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

    /// Refuses new work unless the worker is ready.
    ///
    /// # Errors
    /// `UNAVAILABLE`, reason `WORKER_STARTING`, `WORKER_STALLED` or `WORKER_DRAINING`.
    pub fn check_ready(&self) -> Result<(), Status> {
        let (reason, what) = match *self.state.borrow() {
            WorkerState::Ready => return Ok(()),
            WorkerState::Starting => ("WORKER_STARTING", "starting"),
            WorkerState::Stalled => ("WORKER_STALLED", "not moving"),
            WorkerState::Draining => (WORKER_DRAINING, "draining"),
        };
        let error = Error::new(
            crate::ErrorKind::Unavailable,
            format!("worker `{}` is {what}", self.worker_id),
        );
        Err(to_status(&error.with_reason(reason)))
    }
}
