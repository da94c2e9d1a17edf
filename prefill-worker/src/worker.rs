//! Puts a prefill worker together and takes it apart.
//!
//! Start: engine, sender, gRPC server, then membership: a worker is
//! listed only once a request would succeed. Stop: draining is published first, so
//! that routers look elsewhere; prompts and handoffs end within the grace time; then the record
//! is withdrawn, the server closed, the engine joined.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use baton_engine::api::RequestKey;
use baton_engine::config::EngineConfig;
use baton_engine::engine::{Engine, SendError};
use baton_engine::kv::PoolSharing;
use baton_engine::model::Model;
use baton_engine::routes::EventRoutes;
use baton_kv_transfer::pool::regions_of;
use baton_kv_transfer::sender::{Sender, SenderConfig, WireForm};
use baton_kv_transfer::{NixlError, NixlLender, RegionTable, SharedMemory, TransportChoice};
use baton_membership::{Capacity, Membership, Registration, Role, WorkerRecord};
use baton_observability::tls_listener::HTTP_ALPN;
use baton_observability::{AdminState, Readiness, WorkerMetrics};
use baton_proto::live_requests::LiveRequests;
use baton_proto::pace::PromptPace;
use baton_proto::transport;
use baton_proto::v1::prefill_worker_server::PrefillWorkerServer;
use baton_proto::watching::{Told, Watchers};
use baton_proto::worker_info::{Grace, WorkerInfo, WorkerState, follow_engine, leaving};
use baton_proto::{Epoch, Error as WireError, ErrorKind, limits, protocol, v1};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::service::RoutesBuilder;

use crate::config::PrefillWorkerConfig;
use crate::metrics::Metrics;
use crate::service::Service;
use crate::ship::wire_form;

/// Why a worker could not start or had to stop.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Config(#[from] WireError),
    #[error("start engine: {0}")]
    Engine(#[from] baton_engine::engine::Error),
    #[error("membership: {0}")]
    Membership(#[from] baton_membership::Error),
    #[error("engine stopped: {0}")]
    EngineStopped(String),
    #[error("{0} task panicked")]
    Task(&'static str),
}

/// Lanes that are tried at once, each on a thread that may stand for two seconds.
pub(crate) const PROBES_MAX: usize = 16;

/// What every request's task needs.
pub(crate) struct Shared {
    pub(crate) config: PrefillWorkerConfig,
    pub(crate) info: WorkerInfo,
    pub(crate) engine: Engine,
    pub(crate) routes: Arc<EventRoutes>,
    pub(crate) sender: Sender,
    /// What parts may be on the wire, if that is not what the pool stores.
    pub(crate) form: Option<WireForm>,
    pub(crate) metrics: Metrics,
    pub(crate) tasks: TaskTracker,
    live: Mutex<LiveRequests>,
    handoffs: AtomicU64,
    next_key: AtomicU64,
    state: watch::Sender<WorkerState>,
    registration: tokio::sync::OnceCell<Registration>,
    pace: Mutex<PromptPace>,
    /// Lanes that may be tried at once.
    pub(crate) probes: Arc<Semaphore>,
    /// Over: what still runs is to go on elsewhere.
    pub(crate) grace: Grace,
}

/// What a worker is put together from.
pub(crate) struct Parts {
    pub(crate) config: PrefillWorkerConfig,
    pub(crate) epoch: Epoch,
    /// JSON of the tokenizer specification.
    pub(crate) tokenizer_json: Arc<[u8]>,
    pub(crate) engine: Engine,
    pub(crate) routes: Arc<EventRoutes>,
    pub(crate) sender: Sender,
    /// What parts may be on the wire, if that is not what the pool stores.
    pub(crate) form: Option<WireForm>,
    pub(crate) metrics: Metrics,
}

impl Shared {
    /// A worker that is starting.
    pub(crate) fn new(parts: Parts) -> Arc<Self> {
        let card = Arc::new(parts.engine.card().clone());
        let (state, state_rx) = watch::channel(WorkerState::Starting);
        Arc::new_cyclic(|weak: &std::sync::Weak<Self>| {
            let weak = weak.clone();
            let load = move || {
                weak.upgrade()
                    .map(|shared| shared.load())
                    .unwrap_or_default()
            };
            Self {
                info: WorkerInfo {
                    worker_id: parts.config.worker_id.clone(),
                    epoch: parts.epoch,
                    role: "prefill",
                    card,
                    data_address: String::new(),
                    tokenizer_json: parts.tokenizer_json,
                    state: state_rx,
                    load: Arc::new(load),
                    cache: Arc::clone(parts.engine.cache_names()),
                    watchers: Watchers::default(),
                },
                engine: parts.engine,
                routes: parts.routes,
                sender: parts.sender,
                form: parts.form,
                metrics: parts.metrics,
                tasks: TaskTracker::new(),
                live: Mutex::default(),
                handoffs: AtomicU64::new(0),
                next_key: AtomicU64::new(1),
                state,
                registration: tokio::sync::OnceCell::new(),
                pace: Mutex::default(),
                probes: Arc::new(Semaphore::new(PROBES_MAX)),
                grace: Grace::default(),
                config: parts.config,
            }
        })
    }

    /// The worker takes requests from now on.
    pub(crate) fn set_ready(&self) {
        self.state.send_replace(WorkerState::Ready);
    }

    /// Keeps the handle of its record. Once.
    pub(crate) fn registered(&self, registration: Registration) {
        drop(self.registration.set(registration));
    }

    pub(crate) fn next_key(&self) -> RequestKey {
        RequestKey(self.next_key.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn live(&self) -> MutexGuard<'_, LiveRequests> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn pace(&self) -> MutexGuard<'_, PromptPace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn count_handoff(&self) {
        self.handoffs.fetch_add(1, Ordering::Relaxed);
    }

    /// Why the engine took no command, as the router should hear it.
    pub(crate) fn send_error(&self, error: &SendError) -> WireError {
        let kind = match error {
            SendError::Full => ErrorKind::Overloaded,
            SendError::Stopped => ErrorKind::Unavailable,
        };
        WireError::new(kind, error.to_string())
            .with_retry_after(self.config.engine.limits.retry_after)
    }

    /// Resolves when another process has taken this worker's id.
    async fn superseded(&self) -> Epoch {
        match self.registration.get() {
            Some(registration) => registration.superseded().await,
            None => std::future::pending().await,
        }
    }

    /// Marks the worker as leaving: no new requests, and routers have said that they know.
    /// What runs has the grace time from the first call on.
    pub(crate) async fn start_draining(&self) -> Told {
        let publish = async {
            if let Some(registration) = self.registration.get() {
                registration.say_draining().await;
            }
        };
        let left = (self.live().len(), self.config.drain_grace);
        self.grace
            .leave(&self.info, &self.state, left, publish)
            .await
    }
}

/// A running prefill worker.
pub struct PrefillWorker {
    shared: Arc<Shared>,
    control: SocketAddr,
    admin: Option<SocketAddr>,
    registry: Arc<baton_observability::Registry>,
    stop: CancellationToken,
    engine_stopped: watch::Receiver<Option<String>>,
    servers: TaskTracker,
}

impl PrefillWorker {
    /// Starts everything and registers with the membership.
    ///
    /// # Errors
    /// A setting that cannot work, a port that is taken, no memory for the pools.
    ///
    /// *Cancel safety*: dropped before it returns, it has listed nothing, and what it
    /// started ends with the runtime.
    pub async fn start(
        config: PrefillWorkerConfig,
        model: Arc<Model>,
        membership: Arc<dyn Membership>,
    ) -> Result<Self, Error> {
        // Files that cannot be used are found before anything has started.
        let admin_tls = config.tls.rustls_server(HTTP_ALPN)?;
        let data_tls = config.tls.rustls_client()?;
        let mut registry = baton_observability::exposition::registry(&[
            ("model_name", config.engine.model_name.as_str()),
            ("role", "prefill"),
        ]);
        let metrics = Metrics(WorkerMetrics::new(&mut registry));
        let registry = Arc::new(registry);
        let (stopped_tx, engine_stopped) = watch::channel(None);
        let routes = {
            let metrics = metrics.clone();
            EventRoutes::new(
                move |step| metrics.step(step),
                move |error| {
                    stopped_tx.send_replace(Some(error.unwrap_or_default()));
                },
            )
        };
        let tokenizer_json: Arc<[u8]> = serde_json::to_vec(model.tokenizer_spec())
            .map_err(|error| WireError::new(ErrorKind::Internal, error.to_string()))?
            .into();
        let engine = {
            let (engine_config, sink) = (engine_config(&config), routes.sink());
            // Mapping the pools and pinning threads takes milliseconds: not on the runtime.
            tokio::task::spawn_blocking(move || Engine::start(model, engine_config, sink))
                .await
                .map_err(|_| Error::Task("engine start"))??
        };
        metrics.device(engine.device_rates());

        let epoch = Epoch(rand::random());
        let regions = regions_of(engine.memory());
        let sender = Sender::start(SenderConfig {
            tls: data_tls,
            transports: config.kv_transport.kinds(),
            nixl: lender(&config, regions.clone()).await?,
            ..SenderConfig::new(regions)
        });
        let form = wire_form(config.kv_wire, engine.layout())?;
        let (listener, control) = transport::listen("listen", config.listen).await?;
        let (admin_listener, admin) = match config.admin_listen {
            Some(address) => {
                let (listener, bound) = transport::listen("admin_listen", address).await?;
                (Some(listener), Some(bound))
            }
            None => (None, None),
        };
        let shared = Shared::new(Parts {
            config,
            epoch,
            tokenizer_json,
            engine,
            routes,
            sender,
            form,
            metrics,
        });

        let stop = CancellationToken::new();
        let servers = TaskTracker::new();
        serve_grpc(&shared, listener, &servers, stop.clone());
        if let Some(listener) = admin_listener {
            let admin_state = admin_state(&shared, Arc::clone(&registry));
            let (tls, stop) = (admin_tls, stop.clone());
            servers.spawn(async move {
                let serving = baton_observability::admin::serve(listener, tls, admin_state, stop);
                if let Err(error) = serving.await {
                    tracing::error!(%error, "the admin endpoint ended");
                }
            });
        }
        servers.spawn({
            let (shared, stop) = (Arc::clone(&shared), stop.clone());
            async move {
                let still_for = || shared.engine.still_for();
                let following = follow_engine(&shared.info.worker_id, &shared.state, still_for);
                stop.run_until_cancelled(following).await;
            }
        });
        servers.close();

        shared.set_ready();
        let address = control.to_string();
        let registration = membership.register(record(&shared, &address)).await?;
        shared.registered(registration);
        tracing::info!(worker = %shared.info.worker_id, %epoch, %control, model = %shared.info.card.revision, "prefill worker ready");
        Ok(Self {
            shared,
            control,
            admin,
            registry,
            stop,
            engine_stopped,
            servers,
        })
    }

    /// Where the gRPC services listen.
    pub fn control_address(&self) -> SocketAddr {
        self.control
    }

    /// Where /metrics is, if it is served.
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.admin
    }

    /// How full the worker is and which paths it took, as `Describe` reports it.
    pub fn load(&self) -> v1::Load {
        self.shared.load()
    }

    /// The worker's metrics, for a process that serves several roles' as one.
    pub fn registry(&self) -> Arc<baton_observability::Registry> {
        Arc::clone(&self.registry)
    }

    /// Brings the gauges up to date before a scrape.
    pub fn refresh_metrics(&self) -> impl Fn() + Send + Sync + 'static {
        let shared = Arc::clone(&self.shared);
        move || shared.metrics.load(&shared.engine.load())
    }

    /// Runs until `shutdown` or until the engine fails, then drains and leaves.
    ///
    /// # Errors
    /// [`Error::EngineStopped`] if the engine ended by itself, [`Error::Membership`] if
    /// another process took the worker's id.
    ///
    /// *Cancel safety*: dropping it skips the drain.
    pub async fn run(self, shutdown: CancellationToken) -> Result<(), Error> {
        let mut stopped = self.engine_stopped.clone();
        enum End {
            Asked,
            Engine(String),
            Superseded(Epoch),
        }
        let end = tokio::select! {
            () = shutdown.cancelled() => End::Asked,
            changed = stopped.wait_for(Option::is_some) => {
                End::Engine(changed.ok().and_then(|reason| reason.clone()).unwrap_or_default())
            }
            by = self.shared.superseded() => End::Superseded(by),
        };
        let id = self.shared.info.worker_id.clone();
        // Routers send a superseded worker nothing any more; what runs here may end.
        self.stop(matches!(end, End::Engine(_))).await?;
        match end {
            End::Asked => Ok(()),
            End::Engine(reason) => Err(Error::EngineStopped(reason)),
            End::Superseded(by) => Err(baton_membership::Error::Superseded { id, by }.into()),
        }
    }

    /// Drains (unless `at_once`), withdraws the record and ends everything.
    ///
    /// # Errors
    /// [`Error::Task`] if the engine thread could not be joined.
    pub async fn stop(self, at_once: bool) -> Result<(), Error> {
        self.shared.start_draining().await;
        self.shared.tasks.close();
        if !at_once {
            let shared = &self.shared;
            let left = || shared.live().len();
            let id = &shared.info.worker_id;
            shared.grace.see_out(id, &shared.tasks, left).await;
        }
        let reason = leaving(&self.shared.info.worker_id);
        self.shared.live().end_all(&reason);
        let engine = Arc::clone(&self.shared);
        // Requests end when their blocks are back; a stopped engine drops them all.
        let ended =
            tokio::time::timeout(std::time::Duration::from_secs(2), self.shared.tasks.wait()).await;
        if ended.is_err() {
            tracing::warn!("requests did not end in time; stopping the engine under them");
        }
        let ended = tokio::task::spawn_blocking(move || engine.engine.stop())
            .await
            .map_err(|_| Error::Task("engine stop"))?;
        self.shared.info.watchers.end();
        self.stop.cancel();
        let closed =
            tokio::time::timeout(std::time::Duration::from_secs(2), self.servers.wait()).await;
        if closed.is_err() {
            tracing::warn!("connections did not end in time; closing them");
        }
        tracing::info!(worker = %self.shared.info.worker_id, "prefill worker left");
        if !ended {
            return Err(Error::EngineStopped("it does not move".to_owned()));
        }
        Ok(())
    }
}

impl Shared {
    pub(crate) fn load(&self) -> v1::Load {
        let load = self.engine.load();
        v1::Load {
            requests_running: load.requests_running,
            requests_waiting: load.requests_waiting,
            prefill_tokens_waiting: load.prefill_tokens_waiting,
            blocks: load
                .blocks
                .iter()
                .map(|counts| v1::BlockCounts {
                    total: counts.total,
                    free: counts.free,
                    referenced: counts.referenced,
                    cached: counts.cached,
                    reserved: counts.reserved,
                    pinned: counts.pinned,
                    quarantined: counts.quarantined,
                })
                .collect(),
            preemptions_total: load.preemptions_total,
            prefix_queries_tokens_total: load.prefix_queries_tokens_total,
            prefix_hits_tokens_total: load.prefix_hits_tokens_total,
            handoffs_total: self.handoffs.load(Ordering::Relaxed),
            local_prefills_total: 0,
            prefill_tokens_per_second: self.pace().tokens_per_second(),
            requests_per_second: 0.0,
        }
    }
}

/// The pools, registered with NIXL, if KV is to go over it.
async fn lender(
    config: &PrefillWorkerConfig,
    regions: RegionTable,
) -> Result<Option<NixlLender>, Error> {
    let Some(library) = config.nixl.clone() else {
        return Ok(None);
    };
    if config.tls.is_enabled() {
        tracing::warn!("kv goes over nixl, which encrypts nothing: tls protects its frames alone");
    }
    // Pinning the pools for RDMA takes its time: not on the runtime.
    let lender = tokio::task::spawn_blocking(move || NixlLender::new(&library, &regions)).await;
    let lender = lender.map_err(|_| Error::Task("registering the pools with NIXL"))?;
    let failed = |error: NixlError| WireError::new(ErrorKind::Unavailable, error.to_string());
    Ok(Some(lender.map_err(failed)?))
}

/// The engine's settings, with pools of its own where the host shares no memory.
fn engine_config(config: &PrefillWorkerConfig) -> EngineConfig {
    let mut engine = config.engine.clone();
    let may_do_without = config.kv_transport == TransportChoice::Auto;
    if engine.pool_sharing == PoolSharing::Lendable
        && may_do_without
        && let Err(error) = SharedMemory::new(1)
    {
        tracing::warn!(%error, "no memory can be shared on this host: kv goes over tcp");
        engine.pool_sharing = PoolSharing::Private;
    }
    engine
}

fn serve_grpc(
    shared: &Arc<Shared>,
    listener: TcpListener,
    servers: &TaskTracker,
    stop: CancellationToken,
) {
    let mut services = RoutesBuilder::default();
    services.add_service(
        PrefillWorkerServer::new(Service {
            shared: Arc::clone(shared),
        })
        .max_decoding_message_size(limits::INTERNAL_MESSAGE_BYTES_MAX)
        .max_encoding_message_size(limits::INTERNAL_MESSAGE_BYTES_MAX),
    );
    let tls = shared.config.tls.clone();
    let state = shared.info.state.clone();
    servers.spawn(async move {
        let names = &["baton.v1.PrefillWorker"];
        let served = transport::serve(listener, &tls, services, names, state, stop).await;
        if let Err(error) = served {
            tracing::error!(%error, "the control port ended");
        }
    });
}

fn admin_state(shared: &Arc<Shared>, registry: Arc<baton_observability::Registry>) -> AdminState {
    let state = shared.info.state.clone();
    let (alive, refreshed) = (state.clone(), Arc::clone(shared));
    AdminState::new(registry, move || match *state.borrow() {
        WorkerState::Ready => Readiness::Ready,
        other => Readiness::not_ready(other.name()),
    })
    .alive_while(move || *alive.borrow() != WorkerState::Stalled)
    .before_scrape(move || refreshed.metrics.load(&refreshed.engine.load()))
}

pub(crate) fn record(shared: &Shared, control: &str) -> WorkerRecord {
    WorkerRecord {
        id: shared.info.worker_id.clone(),
        epoch: shared.info.epoch,
        role: Role::Prefill,
        state: baton_membership::WorkerState::Ready,
        control: shared
            .config
            .advertise
            .clone()
            .unwrap_or_else(|| control.to_owned()),
        data: shared.info.data_address.clone(),
        protocol: protocol::CURRENT,
        card: (*shared.info.card).clone(),
        capacity: Capacity {
            blocks: shared
                .engine
                .load()
                .blocks
                .iter()
                .map(|counts| counts.total)
                .collect(),
            sequences_max: shared.config.engine.limits.sequences_max,
        },
        topology: shared.config.topology.clone(),
    }
}
