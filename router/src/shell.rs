//! Starting and stopping a router: the owner of every task.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use baton_membership::Membership;
use baton_observability::{Registry, RouterMetrics};
use baton_proto::{Error, ErrorKind, transport};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::admission::Admission;
use crate::auth::Keys;
use crate::config::RouterConfig;
use crate::frontend::{Frontend, Shared};
use crate::giants::Giants;
use crate::last_view::{self, LastView};
use crate::placement::LeastTokens;
use crate::placement::WorkerKey;
use crate::placement::prefix_index::PrefixIndex;
use crate::resume::ResumeKeys;
use crate::resume::fences::Fences;
use crate::workers::{CacheChanges, Connect, Follower, Observer, Over, Patience, Workers};

impl Observer for Shared {
    fn gone(&self, worker: &WorkerKey) {
        self.prefixes().remove(worker);
    }

    fn cache_changed(&self, worker: &WorkerKey, changes: &CacheChanges) {
        let mut prefixes = self.prefixes();
        if changes.snapshot {
            prefixes.remove(worker);
        }
        prefixes.evicted(&changes.removed, worker);
        prefixes.insert(&changes.stored, worker, 1);
    }
}

/// A running router. Dropping it ends every request and aborts the rest;
/// [`Router::stop`] drains and joins.
pub struct Router {
    shared: Arc<Shared>,
    follower: JoinSet<()>,
    stop_following: CancellationToken,
}

impl Router {
    /// Starts to follow the cluster. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] naming the wrong setting.
    pub fn start(config: RouterConfig, membership: Arc<dyn Membership>) -> Result<Self, Error> {
        // A certificate that cannot be read is found now, not at the first worker.
        config.worker_tls.client()?;
        let connect = Over(config.worker_tls.clone());
        Self::start_over(config, membership, Arc::new(connect))
    }

    /// The same, with another way to reach workers than connections of its own.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] naming the wrong setting.
    pub fn start_over(
        config: RouterConfig,
        membership: Arc<dyn Membership>,
        connect: Arc<dyn Connect>,
    ) -> Result<Self, Error> {
        config.validate()?;
        let mut registry = Registry::default();
        let metrics = RouterMetrics::new(&mut registry);
        metrics.build.set(&[("version", env!("CARGO_PKG_VERSION"))]);
        let shared = Arc::new(Shared {
            workers: Arc::new(Workers::default()),
            policy: Box::new(LeastTokens {
                local_prefill_tokens_max: config.local_prefill_tokens_max,
                refuse_without_prefill: config.refuse_without_prefill,
                ..LeastTokens::default()
            }),
            admission: Admission::new(&config, metrics.clone()),
            keys: Keys::new(&config.api_keys),
            resume_keys: ResumeKeys::new(&config.resume_keys),
            fences: Fences::default(),
            giants: Giants::default(),
            prefixes: Mutex::new(PrefixIndex::new(config.prefix_spans_max)),
            margin: Mutex::default(),
            metrics,
            registry: Arc::new(registry),
            requests: TaskTracker::new(),
            stop: CancellationToken::new(),
            draining: OnceLock::new(),
            config,
        });
        let stop_following = CancellationToken::new();
        let mut follower = JoinSet::new();
        let last_view = LastView::open(
            last_view::Settings {
                seeds: shared.config.seeds()?,
                state_dir: shared.config.state_dir.clone(),
                connect: Arc::clone(&connect),
            },
            membership.watch(),
        );
        let view = last_view.watch();
        follower.spawn(last_view.run(stop_following.clone()));
        let follow = Follower {
            workers: Arc::clone(&shared.workers),
            view,
            connect,
            patience: Patience {
                silence: Duration::from_millis(shared.config.worker_silence_ms),
                lost: Duration::from_millis(shared.config.worker_lost_ms),
            },
            observer: Arc::clone(&shared) as Arc<dyn Observer>,
        };
        follower.spawn(follow.run(stop_following.clone()));
        Ok(Self {
            shared,
            follower,
            stop_following,
        })
    }

    /// The front doors' handle.
    pub fn frontend(&self) -> Frontend {
        Frontend::new(Arc::clone(&self.shared))
    }

    /// Refuses new requests from now on; running ones go on until [`Router::stop`].
    /// Returns when the time they get is over.
    pub fn drain(&self) -> Instant {
        let since = *self.shared.draining.get_or_init(Instant::now);
        since + Duration::from_millis(self.shared.config.drain_ms)
    }

    /// Ends every running request with `UNAVAILABLE`.
    pub fn end_requests(&self) {
        self.shared.stop.cancel();
    }

    /// Takes nothing new, gives running requests what is left of
    /// [`RouterConfig::drain_ms`], and ends the rest. Front doors stay open meanwhile, so
    /// that whoever still comes is told to go elsewhere.
    pub async fn see_out(&self) {
        let until = self.drain();
        let requests = &self.shared.requests;
        requests.close();
        if tokio::time::timeout_at(until, requests.wait())
            .await
            .is_err()
        {
            tracing::warn!(requests = requests.len(), "end what still runs");
            self.end_requests();
            requests.wait().await;
        }
    }

    /// As [`Router::see_out`]; then joins every task.
    pub async fn stop(mut self) {
        self.see_out().await;
        self.stop_following.cancel();
        while self.follower.join_next().await.is_some() {}
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        self.end_requests();
    }
}

/// Runs a router with its gRPC front door until `shutdown`. `ready` gets the bound address.
///
/// # Errors
/// A wrong setting, an address that cannot be bound, or a server that breaks.
pub async fn serve(
    config: RouterConfig,
    membership: Arc<dyn Membership>,
    shutdown: CancellationToken,
    ready: oneshot::Sender<SocketAddr>,
) -> Result<(), Error> {
    let wanted = config.grpc;
    let router = Router::start(config, membership)?;
    let listener = TcpListener::bind(wanted)
        .await
        .map_err(|error| transport::bind_error("grpc", &wanted.to_string(), &error))?;
    let address = listener
        .local_addr()
        .map_err(|error| Error::new(ErrorKind::Internal, error.to_string()))?;
    // Nobody waiting for the address is fine.
    let _ = ready.send(address);
    let served = router.serve_grpc(listener, shutdown).await;
    router.stop().await;
    served
}
