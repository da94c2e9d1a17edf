//! Worker processes: started, driven, watched, stalled, killed.
//!
//! A killed process is cut off from everything at once: its calls end, its lanes close
//! without a word, its engine gets no more turns, and what is left of its tasks reaches
//! nobody. The next life at its address has an empty pool and another epoch.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use baton_decode_worker::{DecodeWorkerConfig, simulated as decode};
use baton_engine::api::{BlockCounts, EventSink};
use baton_engine::config::{EngineConfig, Limits, PoolSize};
use baton_engine::engine::Engine;
use baton_engine::engine::driven::{DrivenCore, Turn};
use baton_engine::kv::{BlockState, KvMemory};
use baton_kv_transfer::mem::{Link, Network};
use baton_kv_transfer::pool::regions_of;
use baton_kv_transfer::{Access, RegionTable};
use baton_membership::{InProcess, WorkerRecord};
use baton_prefill_worker::{PrefillWorkerConfig, simulated as prefill};
use baton_proto::{Epoch, environment};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tower::util::BoxCloneSyncService;

use crate::model::{self, Device, HashExecutor};
use crate::store::Store;
use crate::trace::{Invariant, Trace};
use crate::wire::{Host, Wire};

/// Which pool a worker is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pool {
    Prefill,
    Decode,
}

impl Pool {
    const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// Which worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Slot {
    pub pool: Pool,
    pub index: u32,
}

impl Slot {
    /// Its id, whatever its life.
    pub fn id(self) -> String {
        format!("{}-{}", self.pool.name(), self.index)
    }

    /// Where its calls go.
    pub fn address(self) -> String {
        format!("{}:1", self.id())
    }

    fn data_address(self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], 7000 + self.index as u16))
    }
}

/// How workers are made.
#[derive(Clone, Debug)]
pub struct WorkerPlan {
    pub pool_tokens: u32,
    pub chunk_tokens: u32,
    pub sequences_max: u32,
    pub queue_requests_max: u32,
    pub prefix_cache: bool,
    /// What a step takes at least, and for each of its tokens.
    pub step: Duration,
    pub token: Duration,
    pub handoff_deadline: Duration,
    /// Tokens of a block, of prefill and of decode workers: unlike ones are laid out anew.
    pub block_sizes: (u32, u32),
    /// What a worker that drains lets run; the rest moves.
    pub drain_grace: Duration,
}

impl WorkerPlan {
    fn block_size(&self, pool: Pool) -> u32 {
        match pool {
            Pool::Prefill => self.block_sizes.0,
            Pool::Decode => self.block_sizes.1,
        }
    }
}

/// What processes live in.
#[derive(Clone)]
pub struct Surroundings {
    pub trace: Trace,
    pub wire: Arc<Wire>,
    pub network: Network,
    pub cluster: InProcess,
    pub store: Arc<Store>,
    pub tokenizer_json: Arc<[u8]>,
}

enum Worker {
    Prefill(prefill::SimulatedWorker),
    Decode(decode::SimulatedWorker),
}

type SharedCore = Arc<Mutex<DrivenCore>>;

/// One life of one worker.
pub struct Process {
    pub slot: Slot,
    /// `name#life`.
    pub name: String,
    worker: Worker,
    core: SharedCore,
    device: Arc<Device>,
    stall: Arc<Stall>,
    life: CancellationToken,
    record: WorkerRecord,
    around: Surroundings,
}

/// Until when a process stands still.
#[derive(Default)]
struct Stall {
    until_us: AtomicU64,
}

impl Process {
    /// Starts a worker and lists it.
    pub async fn start(slot: Slot, life: u32, plan: &WorkerPlan, around: &Surroundings) -> Self {
        let name = format!("{}#{life}", slot.id());
        let epoch = Epoch(environment::random());
        let config = engine_config(slot.pool, plan);
        let block_size = plan.block_size(slot.pool);
        let device = Arc::<Device>::default();
        let arrived = Arc::<Notify>::default();
        let core = Arc::<OnceLock<Weak<Mutex<DrivenCore>>>>::default();
        let mut driven = None;
        let engine = |sink: Box<dyn EventSink>| {
            let layout = model::layout(block_size);
            let memory = KvMemory::allocate(layout.clone(), &config.pool_blocks(&layout))?;
            let executor = HashExecutor::new(&memory, &device);
            let facts = model::facts(&around.tokenizer_json, block_size);
            let wake = Arc::clone(&arrived);
            let (engine, driven_core) = Engine::driven(
                Box::new(executor),
                facts,
                memory,
                &config,
                sink,
                move || wake.notify_one(),
            )?;
            let shared = Arc::new(Mutex::new(driven_core));
            drop(core.set(Arc::downgrade(&shared)));
            driven = Some(shared);
            Ok(engine)
        };
        let watch = LaneWatch {
            name: name.clone(),
            pool: slot.pool,
            core: Arc::clone(&core),
            trace: around.trace.clone(),
        };
        let regions = |engine: &Engine| watch.regions(engine.memory());
        let on_step = Box::new(|_, _| {});
        let tokenizer_json = Arc::clone(&around.tokenizer_json);
        let worker = match slot.pool {
            Pool::Prefill => {
                let outside = prefill::Outside {
                    epoch,
                    network: &around.network,
                    tokenizer_json,
                    on_step,
                };
                let mut config = PrefillWorkerConfig::new(slot.id().into(), config.clone());
                config.drain_grace = plan.drain_grace;
                let worker = prefill::SimulatedWorker::start(config, outside, engine, regions);
                Worker::Prefill(worker.expect("a plan's settings work"))
            }
            Pool::Decode => {
                let outside = decode::Outside {
                    epoch,
                    network: &around.network,
                    data_address: slot.data_address(),
                    tokenizer_json,
                    on_step,
                };
                let mut config = DecodeWorkerConfig::new(slot.id().into(), config.clone());
                config.handoff_deadline = plan.handoff_deadline;
                config.drain_grace = plan.drain_grace;
                config.slow_client_deadline = Duration::from_secs(5);
                let worker = decode::SimulatedWorker::start(config, outside, engine, regions);
                Worker::Decode(worker.expect("a plan's settings work"))
            }
        };
        let process = Self {
            slot,
            record: worker.record(&slot.address()),
            name,
            worker,
            core: driven.expect("the engine was made"),
            device,
            stall: Arc::default(),
            life: CancellationToken::new(),
            around: around.clone(),
        };
        around.wire.listen(
            &slot.address(),
            Host {
                name: process.name.clone(),
                epoch,
                service: process.worker.service(),
                life: process.life.clone(),
            },
        );
        tokio::spawn(process.drive(arrived, plan));
        around
            .trace
            .note(Some(&process.name), format!("starts, epoch {epoch}"));
        let address = slot.address();
        let listed = process.worker.register(&around.cluster, &address);
        listed.await.expect("the record is right");
        process
    }

    /// The engine's thread: turns, and the time that steps take.
    fn drive(&self, arrived: Arc<Notify>, plan: &WorkerPlan) -> impl Future<Output = ()> + use<> {
        let (core, device) = (Arc::clone(&self.core), Arc::clone(&self.device));
        let (life, stall) = (self.life.clone(), Arc::clone(&self.stall));
        let (trace, name) = (self.around.trace.clone(), self.name.clone());
        let (step, token) = (plan.step, plan.token);
        let work = async move {
            let started = Instant::now();
            loop {
                let until = Duration::from_micros(stall.until_us.load(Ordering::Relaxed));
                tokio::time::sleep(until.saturating_sub(trace.now())).await;
                let turn = lock(&core).turn(started.elapsed());
                match turn {
                    Turn::Idle => arrived.notified().await,
                    Turn::Running => {
                        let tokens = device.step_tokens.load(Ordering::Relaxed);
                        tokio::time::sleep((step + token * tokens) / model::LAYERS).await;
                    }
                    Turn::Stepped => {
                        lock(&core).core().check_integrity();
                        tokio::task::yield_now().await;
                    }
                    Turn::Ended => {
                        trace.note(Some(&name), "the engine ends");
                        return;
                    }
                }
            }
        };
        async move {
            tokio::select! {
                biased;
                () = life.cancelled() => {}
                () = work => {}
            }
        }
    }

    /// Ends the process without a word; with `machine`, so that its peers are not even
    /// told that their connections are gone.
    pub fn kill(self, machine: bool) {
        let what = if machine {
            "the machine dies"
        } else {
            "is killed"
        };
        self.around.trace.note(Some(&self.name), what);
        self.end(machine, false);
    }

    fn end(self, machine: bool, left: bool) {
        self.life.cancel();
        self.around.wire.kill(&self.slot.address(), machine);
        match &self.worker {
            Worker::Prefill(worker) => {
                self.around.network.kill_sender(worker.sender().session());
            }
            Worker::Decode(worker) => {
                if machine {
                    worker.link().lose();
                }
                self.around.network.kill_receiver(self.slot.data_address());
            }
        }
        let store = Arc::clone(&self.around.store);
        let (record, worker) = (self.record, self.worker);
        tokio::spawn(async move {
            store.end(record, left).await;
            // Its handle withdraws the record, as the end of its lease does.
            drop(worker);
        });
    }

    /// Marks the worker as leaving.
    pub async fn drain(&self) {
        self.around.trace.note(Some(&self.name), "drains");
        match &self.worker {
            Worker::Prefill(worker) => worker.drain().await,
            Worker::Decode(worker) => worker.drain().await,
        }
    }

    /// Ends a process that has drained.
    pub fn leave(self) {
        self.around.trace.note(Some(&self.name), "leaves");
        self.end(false, true);
    }

    /// The next step is lost.
    pub fn lose_step(&self) {
        self.around.trace.note(Some(&self.name), "will lose a step");
        self.device.loses_step.store(true, Ordering::Relaxed);
    }

    /// The engine stands still for a while; everything else goes on.
    pub fn stall(&self, time: Duration) {
        let ms = time.as_millis();
        let trace = &self.around.trace;
        trace.note(
            Some(&self.name),
            format!("its engine stands still for {ms} ms"),
        );
        let until = (trace.now() + time).as_micros() as u64;
        self.stall.until_us.store(until, Ordering::Relaxed);
    }

    /// The link of the lanes to it, if it receives any.
    pub fn link(&self) -> Option<&Link> {
        match &self.worker {
            Worker::Prefill(_) => None,
            Worker::Decode(worker) => Some(worker.link()),
        }
    }

    /// Requests that it runs.
    pub fn requests(&self) -> usize {
        match &self.worker {
            Worker::Prefill(worker) => worker.requests(),
            Worker::Decode(worker) => worker.requests(),
        }
    }

    /// What it holds although it should hold nothing, in words.
    pub fn leftovers(&self) -> Vec<String> {
        let mut left = Vec::new();
        if self.requests() > 0 {
            left.push(format!("{} requests still run", self.requests()));
        }
        match &self.worker {
            Worker::Prefill(worker) => match worker.sender().transfers_open() {
                0 => {}
                open => left.push(format!("{open} transfers are open")),
            },
            Worker::Decode(worker) => match worker.receiver().grants_live() {
                0 => {}
                live => left.push(format!("{live} grants are live")),
            },
        }
        let engine = match &self.worker {
            Worker::Prefill(worker) => worker.engine(),
            Worker::Decode(worker) => worker.engine(),
        };
        for (group, counts) in engine.load().blocks.iter().enumerate() {
            if counts.free + counts.cached != counts.total {
                left.push(format!("blocks of group {group}: {}", words(counts)));
            }
        }
        left
    }
}

impl Worker {
    fn record(&self, address: &str) -> WorkerRecord {
        match self {
            Self::Prefill(worker) => worker.record(address),
            Self::Decode(worker) => worker.record(address),
        }
    }

    fn service(&self) -> crate::wire::WorkerService {
        match self {
            Self::Prefill(worker) => BoxCloneSyncService::new(worker.service()),
            Self::Decode(worker) => BoxCloneSyncService::new(worker.service()),
        }
    }

    async fn register(
        &self,
        cluster: &InProcess,
        address: &str,
    ) -> Result<(), baton_membership::Error> {
        match self {
            Self::Prefill(worker) => worker.register(cluster, address).await,
            Self::Decode(worker) => worker.register(cluster, address).await,
        }
    }
}

fn lock(core: &Mutex<DrivenCore>) -> std::sync::MutexGuard<'_, DrivenCore> {
    core.lock().unwrap_or_else(PoisonError::into_inner)
}

fn words(counts: &BlockCounts) -> String {
    format!(
        "{} free, {} referenced, {} cached, {} reserved, {} pinned, {} quarantined of {}",
        counts.free,
        counts.referenced,
        counts.cached,
        counts.reserved,
        counts.pinned,
        counts.quarantined,
        counts.total
    )
}

fn engine_config(pool: Pool, plan: &WorkerPlan) -> EngineConfig {
    let role = match pool {
        Pool::Prefill => baton_engine::config::Role::Prefill,
        Pool::Decode => baton_engine::config::Role::Decode,
    };
    EngineConfig {
        pool: PoolSize::Tokens(plan.pool_tokens),
        prefix_cache: plan.prefix_cache,
        limits: Limits {
            chunk_tokens: plan.chunk_tokens,
            step_tokens_max: plan.chunk_tokens + plan.sequences_max,
            sequences_max: plan.sequences_max,
            queue_requests_max: plan.queue_requests_max,
            growth_blocks: 2,
            ..Limits::default()
        },
        ..EngineConfig::new(role, "hash")
    }
}

/// Sees every access of a lane to a worker's pools, before it happens.
struct LaneWatch {
    name: String,
    pool: Pool,
    core: Arc<OnceLock<Weak<Mutex<DrivenCore>>>>,
    trace: Trace,
}

impl LaneWatch {
    fn regions(self, memory: &Arc<KvMemory>) -> RegionTable {
        let watch = Arc::new(self);
        let regions = regions_of(memory).into_iter().enumerate();
        regions
            .map(|(group, region)| {
                let block_bytes = memory.layout().block_bytes(group) as u64;
                let watch = Arc::clone(&watch);
                region.watched(move |access| watch.check(group, block_bytes, access))
            })
            .collect()
    }

    fn check(&self, group: usize, block_bytes: u64, access: Access) {
        let Some(core) = self.core.get().and_then(Weak::upgrade) else {
            return;
        };
        let block = (access.offset / block_bytes) as u32;
        let state = lock(&core).core().block_state(group, block);
        let granted = matches!(state, BlockState::Reserved | BlockState::Quarantined);
        let allowed = match (self.pool, access.write) {
            // What is computed is sent layer by layer: pinned only once it is whole.
            (Pool::Prefill, false) => {
                matches!(state, BlockState::Pinned | BlockState::Referenced)
            }
            (Pool::Prefill, true) => false,
            (Pool::Decode, _) => granted,
        };
        if !allowed {
            let does = if access.write { "writes" } else { "reads" };
            let what = format!("a lane {does} block {block} of group {group}, which is {state:?}");
            self.trace
                .violate(Invariant::NoUseAfterFree, None, Some(&self.name), what);
        }
    }
}
