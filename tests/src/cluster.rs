//! A cluster inside the test's process, its counters, and the leak probe.

use std::sync::Arc;
use std::time::Duration;

use baton::cluster::{Cluster, ClusterPlan};
use baton_decode_worker::DecodeWorkerConfig;
use baton_engine::config::{EngineConfig, PoolSize, Role};
use baton_engine::model::Model;
use baton_prefill_worker::PrefillWorkerConfig;
use baton_proto::kv_layout::KvDtype;
use baton_proto::v1;
use baton_router::{Frontend, RouterConfig};
use tokio_util::sync::CancellationToken;

/// What a test varies.
#[derive(Clone, Debug)]
pub struct Setup {
    pub prefill_workers: u32,
    pub decode_workers: u32,
    pub block_size: u32,
    pub kv_dtype: KvDtype,
    pub chunk_tokens: u32,
    pub prefill_kv_tokens: u32,
    pub decode_kv_tokens: u32,
    pub sequences_max: u32,
    pub prefix_cache: bool,
    /// Blocks promised beyond a prompt. 0 lets every growth compete.
    pub growth_blocks: u32,
    /// Longest prompt plus output, if it is not the model's own.
    pub context_max: Option<u32>,
    /// 0 sends every prompt to the prefill pool, `u32::MAX` none.
    pub local_prefill_tokens_max: u32,
    pub router: RouterConfig,
    pub handoff_deadline: Duration,
}

impl Default for Setup {
    /// One worker a pool, 16-token f32 blocks, everything through the prefill pool.
    fn default() -> Self {
        Self {
            prefill_workers: 1,
            decode_workers: 1,
            block_size: 16,
            kv_dtype: KvDtype::F32,
            chunk_tokens: 64,
            prefill_kv_tokens: 16 * 1024,
            decode_kv_tokens: 16 * 1024,
            sequences_max: 64,
            prefix_cache: true,
            growth_blocks: 4,
            context_max: None,
            local_prefill_tokens_max: 0,
            // Equality is what is tested, on machines that may be crowded: patience here
            // hides nothing, since every wait that matters has a test of its own.
            router: RouterConfig {
                worker_silence_ms: 30_000,
                worker_lost_ms: 60_000,
                answer_timeout_ms: 60_000,
                stream_gap_ms: 30_000,
                ..RouterConfig::default()
            },
            handoff_deadline: Duration::from_secs(10),
        }
    }
}

impl Setup {
    fn engine(&self, role: Role, name: &str) -> EngineConfig {
        let mut config = EngineConfig::new(role, name);
        config.block_size = self.block_size;
        config.kv_dtype = self.kv_dtype;
        config.prefix_cache = self.prefix_cache;
        config.context_max = self.context_max;
        config.pool = PoolSize::Tokens(match role {
            Role::Prefill => self.prefill_kv_tokens,
            Role::Decode => self.decode_kv_tokens,
        });
        config.limits.chunk_tokens = self.chunk_tokens;
        config.limits.sequences_max = self.sequences_max;
        config.limits.growth_blocks = self.growth_blocks;
        config.limits.step_tokens_max = self.chunk_tokens + self.sequences_max;
        config
    }

    /// The plan of a cluster that serves a model under `name`.
    pub fn plan(&self, name: &str) -> ClusterPlan {
        let router = RouterConfig {
            local_prefill_tokens_max: self.local_prefill_tokens_max,
            ..self.router.clone()
        };
        let decode = (0..self.decode_workers)
            .map(|index| {
                let engine = self.engine(Role::Decode, name);
                let mut config = DecodeWorkerConfig::new(format!("decode-{index}").into(), engine);
                config.handoff_deadline = self.handoff_deadline;
                config
            })
            .collect();
        let prefill = (0..self.prefill_workers)
            .map(|index| {
                let engine = self.engine(Role::Prefill, name);
                PrefillWorkerConfig::new(format!("prefill-{index}").into(), engine)
            })
            .collect();
        ClusterPlan {
            router,
            prefill,
            decode,
        }
    }

    /// Starts the cluster.
    ///
    /// # Panics
    /// If it does not start.
    pub async fn start(&self, model: &Arc<Model>) -> TestCluster {
        self.start_as(model, "test").await
    }

    /// Starts the cluster, whose model is called `name`.
    ///
    /// # Panics
    /// If it does not start.
    pub async fn start_as(&self, model: &Arc<Model>, name: &str) -> TestCluster {
        let cluster = Cluster::start(self.plan(name), Arc::clone(model))
            .await
            .expect("the cluster starts");
        TestCluster { cluster }
    }
}

/// A running cluster.
pub struct TestCluster {
    pub cluster: Cluster,
}

/// Sums over all workers, for proving which path was taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub handoffs: u64,
    pub local_prefills: u64,
    pub preemptions: u64,
    pub prefix_hits_tokens: u64,
    /// Requests or blocks that something still holds.
    pub held: u64,
}

impl TestCluster {
    /// The front door's API.
    pub fn frontend(&self) -> Frontend {
        self.cluster.frontend()
    }

    /// The load of every worker, prefill first.
    pub fn loads(&self) -> Vec<v1::Load> {
        let prefill = self
            .cluster
            .prefill_workers()
            .iter()
            .map(|worker| worker.load());
        let decode = self
            .cluster
            .decode_workers()
            .iter()
            .map(|worker| worker.load());
        prefill.chain(decode).collect()
    }

    /// The sums now. Handoffs count once, at the receiver.
    pub fn counters(&self) -> Counters {
        let mut sums = Counters::default();
        for worker in self.cluster.decode_workers() {
            let load = worker.load();
            sums.handoffs += load.handoffs_total;
            sums.local_prefills += load.local_prefills_total;
        }
        for load in self.loads() {
            sums.preemptions += load.preemptions_total;
            sums.prefix_hits_tokens += load.prefix_hits_tokens_total;
            sums.held += held(&load);
        }
        sums
    }

    /// Waits until no worker holds anything for a request. Only the pauses between two
    /// looks count, so that a machine that stands still meanwhile is no leak.
    ///
    /// # Panics
    /// If something is still held after `patience`: a leak.
    pub async fn wait_released(&self, patience: Duration) {
        const PAUSE: Duration = Duration::from_millis(5);
        let mut waited = Duration::ZERO;
        while self.counters().held > 0 {
            assert!(
                waited < patience,
                "still held after {patience:?}: {:?}",
                self.loads()
            );
            tokio::time::sleep(PAUSE).await;
            waited += PAUSE;
        }
        for load in self.loads() {
            for blocks in &load.blocks {
                assert_eq!(blocks.free + blocks.cached, blocks.total, "{load:?}");
            }
        }
    }

    /// Stops everything and reports what failed.
    ///
    /// # Panics
    /// If a role ended badly.
    pub async fn stop(self) {
        let stop = CancellationToken::new();
        stop.cancel();
        self.cluster.run(None, stop).await.expect("a clean end");
    }
}

/// Requests and blocks that a load says are in use.
pub fn held(load: &v1::Load) -> u64 {
    let blocks: u32 = load
        .blocks
        .iter()
        .map(|blocks| blocks.referenced + blocks.reserved + blocks.pinned + blocks.quarantined)
        .sum();
    u64::from(blocks) + u64::from(load.requests_running) + u64::from(load.requests_waiting)
}
