//! The workers this router knows, how they fare, and the models they serve.
//!
//! Membership says who exists; each worker's own watch stream says whether it
//! lives and how busy it is ([`follow`]). A worker whose stream ends is out of
//! rotation at once; one that falls silent or cannot be reached is lost, and the
//! requests on it are told. Placement decides nothing here.

mod acknowledging;
mod connect;
mod cut_lanes;
mod follow;
mod models;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use baton_membership::{Role, WorkerRecord, WorkerState};
use baton_observability::labels::{MemberState, PoolRole};
use baton_observability::{Readiness, RouterMetrics};
use baton_proto::model_card::ModelCard;
use baton_proto::protocol::ProtocolVersion;
use baton_proto::{Error, ErrorKind, ModelRevision, NumericsId, v1};
use baton_tokenizer::Tokenizer;
use tokio::sync::{Notify, watch};

pub use connect::{Broken, Channel, Connect, Over};
pub use cut_lanes::CutLanes;
pub use follow::{CacheChanges, Follower, Observer, Patience};
pub use models::ServedModel;

use crate::placement::forecast::Standing;
use crate::placement::{Candidate, WorkerKey};

/// What this router's own connection to a worker says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// Not heard of yet.
    New,
    Up,
    /// The stream ended; it may be back in a moment.
    Broken,
    /// Not a word for a while; it may have stopped, or everything has.
    Silent,
    /// Silent, unreachable, or another life is at its address.
    Lost,
}

/// What a worker said last.
#[derive(Clone, Debug)]
pub struct Live {
    pub link: Link,
    /// The worker takes work by its own word.
    pub ready: bool,
    pub load: v1::Load,
    /// Why it is broken or lost.
    pub reason: String,
}

/// One life of one worker.
pub struct Worker {
    pub key: WorkerKey,
    pub role: Role,
    pub protocol: ProtocolVersion,
    pub card: Arc<ModelCard>,
    /// Its address, for messages.
    pub control: String,
    pub channel: Channel,
    sequences_max: u32,
    listed_ready: AtomicBool,
    listed_draining: AtomicBool,
    live: watch::Sender<Live>,
    /// Why this life of it is never given work.
    refused: OnceLock<String>,
    /// Notified when it falls silent or is lost. Every running request waits for that, and
    /// shall not be woken by each word of the worker's load.
    doubted: Notify,
    placed_requests: AtomicU32,
    placed_tokens: AtomicU32,
    /// Requests that it was asked to decode and has not taken yet.
    asked: AtomicU32,
}

impl Worker {
    fn new(record: &WorkerRecord, channel: Channel) -> Self {
        let live = Live {
            link: Link::New,
            ready: false,
            load: v1::Load::default(),
            reason: String::new(),
        };
        let worker = Self {
            key: WorkerKey::new(record.id.clone(), record.epoch),
            role: record.role,
            protocol: record.protocol,
            card: Arc::new(record.card.clone()),
            control: record.control.clone(),
            channel,
            sequences_max: record.capacity.sequences_max,
            listed_ready: AtomicBool::new(false),
            listed_draining: AtomicBool::new(false),
            live: watch::Sender::new(live),
            refused: OnceLock::new(),
            doubted: Notify::new(),
            placed_requests: AtomicU32::new(0),
            placed_tokens: AtomicU32::new(0),
            asked: AtomicU32::new(0),
        };
        worker.list(record.state);
        worker
    }

    fn list(&self, state: WorkerState) {
        self.listed_ready
            .store(state == WorkerState::Ready, Ordering::Relaxed);
        self.listed_draining
            .store(state == WorkerState::Draining, Ordering::Relaxed);
    }

    /// Gives it no work for as long as it lives, because of what it serves. Says so in the
    /// log, once.
    fn refuse(&self, reason: String) {
        if self.refused.set(reason).is_ok() {
            tracing::error!(worker = %self.key.id, address = self.control, model = self.card.name,
                reason = self.refused().unwrap_or_default(), "worker refused");
        }
    }

    /// Why it is refused, if it is.
    pub fn refused(&self) -> Option<&str> {
        self.refused.get().map(String::as_str)
    }

    /// Whether it may be given new work.
    pub fn is_ready(&self) -> bool {
        if self.refused().is_some() {
            return false;
        }
        let live = self.live.borrow();
        self.listed_ready.load(Ordering::Relaxed) && live.link == Link::Up && live.ready
    }

    /// What it is doing, in one word.
    pub fn state(&self) -> MemberState {
        if self.is_ready() {
            return MemberState::Ready;
        }
        match self.live.borrow().link {
            _ if self.refused().is_some() => MemberState::Refused,
            Link::Lost | Link::Broken | Link::Silent => MemberState::Lost,
            _ if self.listed_draining.load(Ordering::Relaxed) => MemberState::Draining,
            Link::Up if self.listed_ready.load(Ordering::Relaxed) => MemberState::Draining,
            Link::New | Link::Up => MemberState::Starting,
        }
    }

    /// What it said last.
    pub fn live(&self) -> Live {
        self.live.borrow().clone()
    }

    /// Resolves when the worker is lost, with the reason; or when it is silent and
    /// `replaceable` says that its work could go elsewhere, which is asked again and
    /// again. Cancel safe.
    pub async fn lost(&self, replaceable: impl Fn() -> bool) -> Error {
        loop {
            let doubted = self.doubted.notified();
            tokio::pin!(doubted);
            doubted.as_mut().enable();
            let (link, reason) = {
                let now = self.live.borrow();
                (now.link, now.reason.clone())
            };
            match link {
                Link::Lost => return lost(reason),
                Link::Silent if replaceable() => return lost(reason),
                Link::Silent => drop(tokio::time::timeout(DOUBT_INTERVAL, doubted).await),
                Link::New | Link::Up | Link::Broken => doubted.await,
            }
        }
    }

    /// What placement sees of it.
    pub fn candidate(&self, cached_tokens: u32) -> Candidate {
        let live = self.live.borrow();
        let reported = live
            .load
            .requests_running
            .saturating_add(live.load.requests_waiting);
        Candidate {
            key: self.key.clone(),
            role: self.role,
            protocol: self.protocol,
            card: Arc::clone(&self.card),
            // What was just sent there is not in its report yet, and what other
            // routers sent is not in our count.
            requests: reported.max(self.placed_requests.load(Ordering::Relaxed)),
            tokens_waiting: live
                .load
                .prefill_tokens_waiting
                .max(self.placed_tokens.load(Ordering::Relaxed)),
            cached_tokens,
            standing: self.standing(&live.load),
        }
    }

    fn standing(&self, load: &v1::Load) -> Standing {
        let available = |counts: &v1::BlockCounts| counts.free.saturating_add(counts.cached);
        // A worker found without the store does not say how much it takes: no bound is known.
        let places = match self.sequences_max {
            0 => u32::MAX,
            most => most,
        };
        let blocks = load.blocks.iter().map(available).min().unwrap_or(u32::MAX);
        Standing {
            prefill_tokens_per_second: load.prefill_tokens_per_second,
            requests_per_second: load.requests_per_second,
            waiting: load.requests_waiting,
            asked: self.asked.load(Ordering::Relaxed),
            places_free: places.saturating_sub(load.requests_running),
            tokens_free: blocks.saturating_mul(self.card.layout.block_size),
        }
    }

    /// Counts a request as sent there until the guard is dropped.
    pub fn place(self: &Arc<Self>, tokens: u32) -> Placed {
        self.placed_requests.fetch_add(1, Ordering::Relaxed);
        self.placed_tokens.fetch_add(tokens, Ordering::Relaxed);
        Placed {
            worker: Arc::clone(self),
            tokens,
            asked: false,
        }
    }

    /// The same, of a request that it is asked to decode.
    pub fn ask(self: &Arc<Self>, tokens: u32) -> Placed {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let mut placed = self.place(tokens);
        placed.asked = true;
        placed
    }
}

fn lost(reason: String) -> Error {
    Error::new(ErrorKind::Unavailable, reason).with_reason("WORKER_LOST")
}

/// How often a silent worker's requests look for another one.
const DOUBT_INTERVAL: Duration = Duration::from_millis(100);

/// A request at a worker, as this router counts it.
pub struct Placed {
    worker: Arc<Worker>,
    tokens: u32,
    asked: bool,
}

impl Placed {
    /// The worker took the request.
    pub fn taken(&mut self) {
        if std::mem::take(&mut self.asked) {
            self.worker.asked.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// The prompt is computed.
    pub fn prefilled(&mut self) {
        let tokens = std::mem::take(&mut self.tokens);
        self.worker
            .placed_tokens
            .fetch_sub(tokens, Ordering::Relaxed);
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        self.taken();
        self.prefilled();
        self.worker.placed_requests.fetch_sub(1, Ordering::Relaxed);
    }
}

/// All workers and tokenizers. Shared; written by [`Follower`] alone.
#[derive(Default)]
pub struct Workers {
    current: RwLock<BTreeMap<WorkerKey, Arc<Worker>>>,
    tokenizers: Mutex<HashMap<String, Arc<Tokenizer>>>,
    /// Held by whoever fetches the tokenizer of a hash, so that it is fetched once.
    fetching: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
    stale: AtomicBool,
    /// Noted by whoever sends requests.
    pub cut_lanes: CutLanes,
}

impl Workers {
    fn current(&self) -> std::sync::RwLockReadGuard<'_, BTreeMap<WorkerKey, Arc<Worker>>> {
        self.current.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The worker of this life, if it is still listed.
    pub fn get(&self, key: &WorkerKey) -> Option<Arc<Worker>> {
        self.current().get(key).cloned()
    }

    /// Every worker that is listed, whatever its state.
    pub fn all(&self) -> Vec<Arc<Worker>> {
        self.current().values().cloned().collect()
    }

    /// The workers of one model revision that take work.
    pub fn ready_of(&self, card: &ModelCard) -> Vec<Arc<Worker>> {
        self.current()
            .values()
            .filter(|worker| worker.card.revision == card.revision && worker.is_ready())
            .cloned()
            .collect()
    }

    /// Whether another worker could take over what this one does. A prompt can also be
    /// computed by a decode worker. With `numerics`, only equal arithmetic counts.
    pub fn can_replace(&self, worker: &Worker, numerics: Option<NumericsId>) -> bool {
        self.ready_of(&worker.card).iter().any(|other| {
            other.key != worker.key
                && (other.role.decodes() || worker.role.prefills())
                && numerics.is_none_or(|wanted| other.card.layout.numerics == wanted)
        })
    }

    /// Whether the list of workers is out of date, as far as can be known.
    pub fn is_stale(&self) -> bool {
        self.stale.load(Ordering::Relaxed)
    }

    /// Every worker of a model revision, whatever its state.
    pub fn of_revision(&self, revision: &ModelRevision) -> Vec<Arc<Worker>> {
        let current = self.current();
        let all = current.values();
        all.filter(|worker| worker.card.revision == *revision)
            .cloned()
            .collect()
    }

    fn tokenizer_by_hash(&self, hash: &str) -> Option<Arc<Tokenizer>> {
        let tokenizers = self
            .tokenizers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        tokenizers.get(hash).cloned()
    }

    fn fetch_lock(&self, hash: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut fetching = self.fetching.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(fetching.entry(hash.to_owned()).or_default())
    }

    fn keep_tokenizer(&self, hash: &str, tokenizer: Arc<Tokenizer>) {
        let used: Vec<String> = self
            .current()
            .values()
            .map(|worker| worker.card.tokenizer_hash.clone())
            .collect();
        let mut tokenizers = self
            .tokenizers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // Those of models that left make room.
        tokenizers.retain(|known, _| used.contains(known));
        tokenizers.insert(hash.to_owned(), tokenizer);
    }

    /// Whether any model can be served.
    pub fn readiness(&self) -> Readiness {
        let current = self.current();
        if current.is_empty() {
            return Readiness::not_ready("no worker");
        }
        let mut decoders = current.values().filter(|worker| worker.role.decodes());
        if decoders.any(|worker| {
            worker.is_ready()
                && self
                    .tokenizer_by_hash(&worker.card.tokenizer_hash)
                    .is_some()
        }) {
            Readiness::Ready
        } else if let Some((worker, reason)) = current
            .values()
            .find_map(|worker| Some((worker, worker.refused()?)))
        {
            let id = &worker.key.id;
            Readiness::not_ready(format!("worker `{id}` is refused: {reason}"))
        } else {
            Readiness::not_ready("no decode worker")
        }
    }

    /// Brings the gauges up to date, before a scrape.
    pub fn publish(&self, metrics: &RouterMetrics) {
        let mut counts: HashMap<(PoolRole, MemberState), i64> = HashMap::new();
        for worker in self.current().values() {
            let role = match worker.role {
                Role::Prefill => PoolRole::Prefill,
                Role::Decode => PoolRole::Decode,
                Role::Mixed => PoolRole::Mixed,
            };
            *counts.entry((role, worker.state())).or_default() += 1;
        }
        for role in PoolRole::ALL {
            for state in MemberState::ALL {
                let count = counts.get(&(*role, *state)).copied().unwrap_or(0);
                metrics.pool_members.get((*role, *state)).set(count);
            }
        }
        metrics.lanes_cut.set(self.cut_lanes.all().len() as i64);
        let stale = self.stale.load(Ordering::Relaxed);
        metrics.membership_stale.set(i64::from(stale));
    }
}
