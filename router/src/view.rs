//! The cluster as one router sees it, for people and scripts: `GET /cluster`, `baton top`.

use baton_observability::Readiness;
use baton_observability::labels::Label as _;
use serde::{Deserialize, Serialize};

use crate::frontend::Frontend;
use crate::workers::{Link, Worker};

/// What a router knows at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterView {
    pub router: RouterView,
    /// By id, then epoch. Two of one id are two lives of it.
    pub workers: Vec<WorkerView>,
}

/// The router itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RouterView {
    /// Whether new work is welcome, and why not.
    pub ready: bool,
    pub reason: String,
    /// The list of workers cannot be refreshed; the last known one is used.
    pub membership_stale: bool,
    /// Requests accepted and not yet ended, those that wait for a worker included.
    pub requests_in_flight: u64,
    pub requests_waiting: u64,
    pub prompt_tokens_waiting: u64,
    pub prompt_tokens_total: u64,
    pub generation_tokens_total: u64,
}

/// One life of one worker.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerView {
    pub id: String,
    /// Sixteen hexadecimal digits, another for each life.
    pub epoch: String,
    /// `prefill`, `decode` or `mixed`.
    pub role: String,
    /// `starting`, `ready`, `draining`, `lost` or `refused`.
    pub state: String,
    /// Why it is out of rotation: what its connection says, or why it is refused.
    pub reason: String,
    pub model: String,
    /// host:port of its services.
    pub control: String,
    pub requests_running: u32,
    pub requests_waiting: u32,
    pub prefill_tokens_waiting: u32,
    pub blocks: BlockView,
    pub preemptions_total: u64,
    pub prefix_queries_tokens_total: u64,
    pub prefix_hits_tokens_total: u64,
    pub handoffs_total: u64,
    pub local_prefills_total: u64,
}

/// KV blocks by state, over all block groups of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BlockView {
    pub total: u64,
    pub free: u64,
    pub referenced: u64,
    pub cached: u64,
    pub reserved: u64,
    pub pinned: u64,
    pub quarantined: u64,
}

impl ClusterView {
    /// What `frontend`'s router knows now.
    pub fn of(frontend: &Frontend) -> Self {
        let metrics = frontend.metrics();
        let count = |gauge: i64| u64::try_from(gauge).unwrap_or(0);
        let (ready, reason) = match frontend.readiness() {
            Readiness::Ready => (true, String::new()),
            Readiness::NotReady(reason) => (false, reason),
        };
        let workers = frontend.workers();
        Self {
            router: RouterView {
                ready,
                reason,
                membership_stale: workers.is_stale(),
                requests_in_flight: count(metrics.requests_in_flight.get()),
                requests_waiting: count(metrics.queue_requests.get()),
                prompt_tokens_waiting: count(metrics.queue_tokens.get()),
                prompt_tokens_total: metrics.prompt_tokens.get(),
                generation_tokens_total: metrics.generation_tokens.get(),
            },
            workers: workers.all().iter().map(|worker| view(worker)).collect(),
        }
    }
}

fn view(worker: &Worker) -> WorkerView {
    let live = worker.live();
    let load = &live.load;
    let mut blocks = BlockView::default();
    for group in &load.blocks {
        blocks.total += u64::from(group.total);
        blocks.free += u64::from(group.free);
        blocks.referenced += u64::from(group.referenced);
        blocks.cached += u64::from(group.cached);
        blocks.reserved += u64::from(group.reserved);
        blocks.pinned += u64::from(group.pinned);
        blocks.quarantined += u64::from(group.quarantined);
    }
    WorkerView {
        id: worker.key.id.to_string(),
        epoch: worker.key.epoch().to_string(),
        role: worker.role.name().to_owned(),
        state: worker.state().pairs()[0].1.to_owned(),
        reason: match live.link {
            _ if worker.refused().is_some() => worker.refused().unwrap_or_default().to_owned(),
            Link::Up | Link::New => String::new(),
            Link::Broken | Link::Silent | Link::Lost => live.reason.clone(),
        },
        model: worker.card.name.clone(),
        control: worker.control.clone(),
        requests_running: load.requests_running,
        requests_waiting: load.requests_waiting,
        prefill_tokens_waiting: load.prefill_tokens_waiting,
        blocks,
        preemptions_total: load.preemptions_total,
        prefix_queries_tokens_total: load.prefix_queries_tokens_total,
        prefix_hits_tokens_total: load.prefix_hits_tokens_total,
        handoffs_total: load.handoffs_total,
        local_prefills_total: load.local_prefills_total,
    }
}
