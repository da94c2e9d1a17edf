//! A whole cluster inside one process: one copy of the weights, real gRPC between
//! the roles on loopback ports, in-process membership, KV handed over by copy.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use baton_decode_worker::{DecodeWorker, DecodeWorkerConfig};
use baton_engine::config::Role;
use baton_engine::model::Model;
use baton_membership::{InProcess, Membership};
use baton_observability::{AdminState, Readiness, Registry};
use baton_prefill_worker::{PrefillWorker, PrefillWorkerConfig};
use baton_router::{Frontend, Router, RouterConfig};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::cli::{EngineArgs, PoolArgs, SloArgs};
use crate::settings::{ServedModel, engine_config};

/// What an answer gets to leave its connection after its request was ended.
const DOOR_CLOSE_TIME: Duration = Duration::from_secs(1);

/// What a cluster is made of.
pub struct ClusterPlan {
    pub router: RouterConfig,
    pub prefill: Vec<PrefillWorkerConfig>,
    pub decode: Vec<DecodeWorkerConfig>,
}

impl ClusterPlan {
    /// Workers as the flags ask for, with the machine's cores dealt out among them.
    pub fn from_flags(
        router: RouterConfig,
        engine: &EngineArgs,
        pools: &PoolArgs,
        slo: SloArgs,
        model_name: &str,
    ) -> Self {
        let cores = allowed_cores();
        let workers = (pools.prefill_workers + pools.decode_workers) as usize;
        let mut deal = Deal::new(&cores, workers);
        // Decode first: where cores do not divide evenly it gets the larger share,
        // because every stream waits for it.
        let decode = (0..pools.decode_workers)
            .map(|index| {
                let mut config = engine_config(engine, Role::Decode, model_name);
                config.limits.itl_target = slo.itl_target();
                deal.next(&mut config, pools.decode_threads, pools.no_pin);
                DecodeWorkerConfig::new(format!("decode-{index}").into(), config)
            })
            .collect();
        let prefill = (0..pools.prefill_workers)
            .map(|index| {
                let mut config = engine_config(engine, Role::Prefill, model_name);
                deal.next(&mut config, pools.prefill_threads, pools.no_pin);
                PrefillWorkerConfig::new(format!("prefill-{index}").into(), config)
            })
            .collect();
        Self {
            router,
            prefill,
            decode,
        }
    }
}

/// Deals cores out to workers: each gets a run of its own, or, where there are
/// fewer cores than workers, none is pinned.
struct Deal<'a> {
    cores: &'a [usize],
    workers: usize,
    dealt: usize,
    next_core: usize,
}

impl<'a> Deal<'a> {
    fn new(cores: &'a [usize], workers: usize) -> Self {
        Self {
            cores,
            workers,
            dealt: 0,
            next_core: 0,
        }
    }

    fn next(
        &mut self,
        config: &mut baton_engine::config::EngineConfig,
        threads: Option<u32>,
        no_pin: bool,
    ) {
        let left = self.workers - self.dealt;
        let share = (self.cores.len() - self.next_core).div_ceil(left.max(1));
        let own = &self.cores[self.next_core..(self.next_core + share).min(self.cores.len())];
        self.dealt += 1;
        self.next_core += own.len();
        config.threads = threads.map_or(own.len().max(1), |threads| threads as usize);
        if !no_pin && own.len() >= config.threads {
            config.cores = own[..config.threads].to_vec();
        }
    }
}

/// Cores this process may run on.
fn allowed_cores() -> Vec<usize> {
    match rustix::thread::sched_getaffinity(None) {
        Ok(set) => (0..rustix::thread::CpuSet::MAX_CPU)
            .filter(|core| set.is_set(*core))
            .collect(),
        Err(_) => Vec::new(),
    }
}

/// From started roles to a router that would use them all; milliseconds on an idle machine.
pub const START_PATIENCE: Duration = Duration::from_secs(30);

/// A running cluster.
pub struct Cluster {
    router: Router,
    prefill: Vec<PrefillWorker>,
    decode: Vec<DecodeWorker>,
    membership: Arc<InProcess>,
}

impl Cluster {
    /// Starts every role and waits until a request would be served.
    ///
    /// # Errors
    /// Whatever a role reports, or none of them ready in time.
    pub async fn start(plan: ClusterPlan, model: Arc<Model>) -> anyhow::Result<Self> {
        let cluster = Self::launch(plan, model).await?;
        cluster.wait_ready(START_PATIENCE).await?;
        Ok(cluster)
    }

    /// Starts every role; the router may not know them all yet.
    ///
    /// # Errors
    /// Whatever a role reports.
    pub async fn launch(plan: ClusterPlan, model: Arc<Model>) -> anyhow::Result<Self> {
        let membership = Arc::new(InProcess::new());
        let shared: Arc<dyn Membership> = membership.clone();
        let mut decode = Vec::new();
        for config in plan.decode {
            decode.push(
                DecodeWorker::start(config, Arc::clone(&model), Arc::clone(&shared))
                    .await
                    .context("start decode worker")?,
            );
        }
        let mut prefill = Vec::new();
        for config in plan.prefill {
            prefill.push(
                PrefillWorker::start(config, Arc::clone(&model), Arc::clone(&shared))
                    .await
                    .context("start prefill worker")?,
            );
        }
        let router = Router::start(plan.router, shared).context("start router")?;
        Ok(Self {
            router,
            prefill,
            decode,
            membership,
        })
    }

    /// Waits until the router would use every worker.
    ///
    /// # Errors
    /// It does not, within `patience`; the router's reason.
    pub async fn wait_ready(&self, patience: Duration) -> anyhow::Result<()> {
        let frontend = self.frontend();
        let (prefill, decode) = (self.prefill.len() as u32, self.decode.len() as u32);
        let started = tokio::time::Instant::now();
        loop {
            let complete = frontend
                .models()
                .iter()
                .any(|model| model.prefill_workers >= prefill && model.decode_workers >= decode);
            if complete && frontend.readiness() == Readiness::Ready {
                return Ok(());
            }
            if started.elapsed() > patience {
                let reason = match frontend.readiness() {
                    Readiness::Ready => "not all of them take work".to_owned(),
                    Readiness::NotReady(reason) => reason,
                };
                bail!("the router did not see its workers within {patience:?}: {reason}");
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// The router's API below its front doors.
    pub fn frontend(&self) -> Frontend {
        self.router.frontend()
    }

    /// The prefill workers, in the plan's order.
    pub fn prefill_workers(&self) -> &[PrefillWorker] {
        &self.prefill
    }

    /// The decode workers, in the plan's order.
    pub fn decode_workers(&self) -> &[DecodeWorker] {
        &self.decode
    }

    /// Serves the front doors until `shutdown`; the cluster itself goes on.
    ///
    /// # Errors
    /// As [`serve_doors`].
    pub async fn serve(&self, doors: Doors, shutdown: CancellationToken) -> anyhow::Result<()> {
        serve_doors(&self.router, Some(doors), self.admin_state(), shutdown).await
    }

    /// Metrics and readiness of all roles as one endpoint.
    pub fn admin_state(&self) -> AdminState {
        let frontend = self.frontend();
        let mut registries: Vec<Arc<Registry>> = vec![frontend.registry()];
        let router = frontend.clone();
        let mut refreshers: Vec<Box<dyn Fn() + Send + Sync>> =
            vec![Box::new(move || router.refresh_metrics())];
        for worker in &self.prefill {
            registries.push(worker.registry());
            refreshers.push(Box::new(worker.refresh_metrics()));
        }
        for worker in &self.decode {
            registries.push(worker.registry());
            refreshers.push(Box::new(worker.refresh_metrics()));
        }
        AdminState::new(frontend.registry(), move || frontend.readiness())
            .with_registries(registries)
            .before_scrape(move || refreshers.iter().for_each(|refresh| refresh()))
    }

    /// Runs until `shutdown`, a broken front door or a failed engine, then drains and
    /// stops: first the router, which lets running streams end, then the workers.
    ///
    /// # Errors
    /// The failure of a front door or of a worker.
    pub async fn run(
        self,
        doors: Option<Doors>,
        shutdown: CancellationToken,
    ) -> anyhow::Result<()> {
        let admin = self.admin_state();
        let Self {
            router,
            prefill,
            decode,
            membership,
        } = self;
        let router_stop = shutdown.child_token();
        let workers_stop = CancellationToken::new();
        let mut workers = JoinSet::new();
        for worker in prefill {
            let stop = workers_stop.clone();
            workers.spawn(async move { worker.run(stop).await.context("prefill worker") });
        }
        for worker in decode {
            let stop = workers_stop.clone();
            workers.spawn(async move { worker.run(stop).await.context("decode worker") });
        }
        let mut result = {
            let serving = serve_doors(&router, doors, admin, router_stop.clone());
            tokio::pin!(serving);
            tokio::select! {
                served = &mut serving => served,
                Some(ended) = workers.join_next() => {
                    router_stop.cancel();
                    let served = serving.await;
                    ended.context("worker task").flatten().and(served)
                }
            }
        };
        router.stop().await;
        workers_stop.cancel();
        while let Some(ended) = workers.join_next().await {
            result = result.and(ended.context("worker task").flatten());
        }
        membership.close().await;
        result
    }
}

/// The listeners of a router's front doors.
pub struct Doors {
    pub http: TcpListener,
    pub grpc: TcpListener,
}

/// Serves the front doors until `shutdown` and lets running streams end within the
/// router's drain time; until they have, whoever comes is refused. One door that breaks
/// closes the other.
///
/// # Errors
/// Settings a door cannot be opened with, or a door that broke.
pub async fn serve_doors(
    router: &Router,
    doors: Option<Doors>,
    admin: AdminState,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let Some(Doors { http, grpc }) = doors else {
        shutdown.cancelled().await;
        return Ok(());
    };
    let http = async {
        let close = CancellationToken::new();
        let serving = baton_router::http::serve(router.frontend(), http, admin, close.clone());
        let overdue = async {
            shutdown.cancelled().await;
            // A client that reads slowly has until then as well.
            let over = router.drain() + DOOR_CLOSE_TIME;
            drop(tokio::time::timeout_at(over, router.see_out()).await);
            close.cancel();
            tokio::time::sleep_until(over).await;
        };
        let served = tokio::select! {
            served = serving => served,
            () = overdue => Ok(()),
        };
        shutdown.cancel();
        served.context("HTTP front door")
    };
    let grpc = async {
        let served = router.serve_grpc(grpc, shutdown.clone()).await;
        shutdown.cancel();
        served.context("gRPC front door")
    };
    let (http, grpc) = tokio::join!(http, grpc);
    http.and(grpc)
}

/// Loads a model and starts a cluster of it without front doors, for one process's
/// own use.
///
/// # Errors
/// As [`Cluster::start`].
pub async fn start_private(
    served: &ServedModel,
    engine: &EngineArgs,
    pools: &PoolArgs,
) -> anyhow::Result<Cluster> {
    let plan = ClusterPlan::from_flags(
        RouterConfig::default(),
        engine,
        pools,
        SloArgs::default(),
        &served.name,
    );
    Cluster::start(plan, Arc::clone(&served.model)).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_engine::config::EngineConfig;

    fn deal(cores: &[usize], workers: usize) -> Vec<(usize, Vec<usize>)> {
        let mut deal = Deal::new(cores, workers);
        (0..workers)
            .map(|_| {
                let mut config = EngineConfig::new(Role::Decode, "m");
                deal.next(&mut config, None, false);
                (config.threads, config.cores)
            })
            .collect()
    }

    #[test]
    fn cores_are_dealt_without_overlap() {
        assert_eq!(deal(&[0, 1], 2), [(1, vec![0]), (1, vec![1])]);
        assert_eq!(deal(&[0, 1], 1), [(2, vec![0, 1])]);
        assert_eq!(deal(&[0, 1, 2], 2), [(2, vec![0, 1]), (1, vec![2])]);
        let scarce = deal(&[0], 2);
        assert_eq!(scarce, [(1, vec![0]), (1, vec![])]);
    }
}
