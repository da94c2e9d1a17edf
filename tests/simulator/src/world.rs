//! One run: a cluster from a scenario, its faults, its end, and the look at what is left.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_kv_transfer::mem::{Conditions, Network};
use baton_membership::InProcess;
use baton_proto::environment::{self, Defect};
use baton_proto::worker_info::LEAVE_TIME;
use baton_router::Frontend;
use serde::Serialize;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::client::{Client, Ending, Served};
use crate::process::{Pool, Process, Slot, Surroundings};
use crate::routers::Routers;
use crate::scenario::{Fault, Scenario};
use crate::store::Store;
use crate::trace::{Invariant, Line, PanicNet, Trace, Violation};
use crate::wire::{Path, Wire};
use crate::{lanes, model};

/// Until every worker is in rotation.
const START: Duration = Duration::from_secs(10);
/// After the last answer: leases, orphaned reservations and cut connections end by then.
const SETTLE: Duration = Duration::from_secs(20);
/// The whole run, in its own time.
const WHOLE: Duration = Duration::from_secs(600);

/// What became of a run.
#[derive(Clone, Debug)]
pub struct Run {
    pub scenario: Scenario,
    pub lines: Vec<Line>,
    pub violations: Vec<Violation>,
    pub counts: Counts,
    /// By number.
    pub served: Vec<Served>,
    /// The run's own time.
    pub took: Duration,
}

/// What happened, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    pub completed: u64,
    pub refused: u64,
    pub failed: u64,
    pub cancelled: u64,
    pub unanswered: u64,
    pub faults: u64,
    /// Placements after the first of a request.
    pub retries: u64,
    /// Handoffs that were committed.
    pub handoffs: u64,
}

impl Counts {
    /// All requests, however they ended.
    pub fn requests(&self) -> u64 {
        self.completed + self.refused + self.failed + self.cancelled + self.unanswered
    }

    /// Adds another run's.
    pub fn add(&mut self, other: &Self) {
        let Self {
            completed,
            refused,
            failed,
            cancelled,
            unanswered,
            faults,
            retries,
            handoffs,
        } = other;
        self.completed += completed;
        self.refused += refused;
        self.failed += failed;
        self.cancelled += cancelled;
        self.unanswered += unanswered;
        self.faults += faults;
        self.retries += retries;
        self.handoffs += handoffs;
    }
}

/// Runs a seed on this thread.
pub fn run(seed: u64, defect: Option<Defect>) -> Run {
    run_scenario(Scenario::new(seed), defect)
}

/// Runs a scenario on this thread.
pub fn run_scenario(scenario: Scenario, defect: Option<Defect>) -> Run {
    let _chance = environment::simulate(scenario.seed, defect);
    let panics = PanicNet::spread();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without sockets asks nothing of the system");
    let (trace, (counts, served)) = runtime.block_on(async {
        let trace = Trace::begin();
        let whole = simulate(&scenario, &trace);
        let counts = tokio::time::timeout(WHOLE, whole).await;
        let counts = counts.unwrap_or_else(|_| {
            trace.violate(Invariant::Answered, None, None, "the run does not end");
            Default::default()
        });
        (trace, counts)
    });
    let took = runtime.block_on(async { trace.now() });
    for panic in panics.take() {
        runtime.block_on(async { trace.violate(Invariant::NoPanic, None, None, panic) });
    }
    drop(runtime);
    let (lines, violations) = trace.take();
    Run {
        scenario,
        lines,
        violations,
        counts,
        served,
        took,
    }
}

/// The workers, by where they stand.
struct Cluster {
    around: Surroundings,
    scenario: Scenario,
    routers: Arc<Routers>,
    processes: Mutex<BTreeMap<Slot, Process>>,
    lives: Mutex<BTreeMap<Slot, u32>>,
}

impl Cluster {
    fn processes(&self) -> MutexGuard<'_, BTreeMap<Slot, Process>> {
        self.processes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    async fn start(&self, slot: Slot) {
        let life = {
            let mut lives = self.lives.lock().unwrap_or_else(PoisonError::into_inner);
            let life = lives.entry(slot).or_default();
            *life += 1;
            *life
        };
        let process = Process::start(slot, life, &self.scenario.worker, &self.around).await;
        if let Some(link) = process.link() {
            link.set(Conditions {
                latency: self.scenario.pace.latency,
                jitter: self.scenario.pace.jitter,
                bytes_per_second: 20 << 20,
                ..Conditions::default()
            });
        }
        let before = self.processes().insert(slot, process);
        assert!(before.is_none(), "one life at a time");
    }

    /// Takes a worker away; `None` if it is away already.
    fn take(&self, slot: Slot) -> Option<Process> {
        self.processes().remove(&slot)
    }

    fn path(&self, router: u32, slot: Slot) -> Arc<Path> {
        self.around.wire.path(router, &slot.address())
    }

    fn note(&self, slot: Slot, text: impl Into<String>) {
        self.around.trace.note(Some(&slot.id()), text);
    }

    /// Makes one thing go wrong, and right again.
    async fn suffer(self: Arc<Self>, at: Duration, fault: Fault) {
        tokio::time::sleep(at).await;
        match fault {
            Fault::Kill {
                worker,
                machine,
                back_after,
            } => {
                let Some(process) = self.take(worker) else {
                    return;
                };
                process.kill(machine);
                tokio::time::sleep(back_after).await;
                self.start(worker).await;
            }
            Fault::Drain { worker, back_after } => {
                let Some(process) = self.take(worker) else {
                    return;
                };
                process.drain().await;
                let most = Instant::now() + self.scenario.worker.drain_grace + LEAVE_TIME;
                while process.requests() > 0 && Instant::now() < most {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                process.leave();
                tokio::time::sleep(back_after).await;
                self.start(worker).await;
            }
            Fault::Stall { worker, time } => {
                if let Some(process) = self.processes().get(&worker) {
                    process.stall(time);
                }
            }
            Fault::LoseStep { worker } => {
                if let Some(process) = self.processes().get(&worker) {
                    process.lose_step();
                }
            }
            Fault::Dark {
                router,
                worker,
                time,
            } => {
                self.note(
                    worker,
                    format!("cut off from router-{router} for {} ms", time.as_millis()),
                );
                let path = self.path(router, worker);
                path.darken(true);
                tokio::time::sleep(time).await;
                path.darken(false);
            }
            Fault::Reset { router, worker } => {
                self.note(worker, format!("its connection to router-{router} breaks"));
                self.path(router, worker).reset();
            }
            Fault::Slow {
                router,
                worker,
                pace,
                time,
            } => {
                let ms = pace.latency.as_millis();
                self.note(worker, format!("{ms} ms away from router-{router}"));
                let path = self.path(router, worker);
                path.set_pace(pace);
                tokio::time::sleep(time).await;
                path.set_pace(self.scenario.pace);
            }
            Fault::Lane { worker, faults } => {
                self.note(worker, format!("its lanes hurt {faults:?}"));
                if let Some(link) = self.processes().get(&worker).and_then(Process::link) {
                    faults.into_iter().for_each(|fault| link.inject(fault));
                }
                self.around.network.poke();
            }
            Fault::LaneCut { worker } => {
                self.note(worker, "its lanes break");
                if let Some(link) = self.processes().get(&worker).and_then(Process::link) {
                    link.cut();
                }
                self.around.network.poke();
            }
            Fault::LaneDark { worker, time } => {
                self.note(
                    worker,
                    format!("its lanes are dark for {} ms", time.as_millis()),
                );
                let link = {
                    let processes = self.processes();
                    processes.get(&worker).and_then(Process::link).cloned()
                };
                let Some(link) = link else { return };
                link.darken(true);
                self.around.network.poke();
                tokio::time::sleep(time).await;
                link.darken(false);
                self.around.network.poke();
            }
            Fault::KillRouter { router, back_after } => {
                if self.routers.kill(router) {
                    tokio::time::sleep(back_after).await;
                    self.routers.start(router);
                }
            }
            Fault::StoreDown { time } => {
                let ms = time.as_millis();
                self.around
                    .trace
                    .note(None, format!("the store is gone for {ms} ms"));
                self.around.store.set_up(false);
                tokio::time::sleep(time).await;
                self.around.store.set_up(true);
                self.around.trace.note(None, "the store is back");
            }
            Fault::StoreCompacted => {
                self.around.trace.note(None, "the store is compacted");
                self.around.store.compact();
            }
        }
    }

    /// What is held although nothing should be.
    fn leftovers(&self) -> Vec<(String, String)> {
        let processes = self.processes();
        let of = |process: &Process| {
            let left = process.leftovers().into_iter();
            left.map(|what| (process.name.clone(), what))
                .collect::<Vec<_>>()
        };
        processes.values().flat_map(of).collect()
    }
}

async fn simulate(scenario: &Scenario, trace: &Trace) -> (Counts, Vec<Served>) {
    let cluster = build(scenario, trace).await;
    let routers = Arc::clone(&cluster.routers);
    for number in 0..scenario.routers {
        routers.start(number);
    }
    for frontend in routers.frontends() {
        if !is_ready(&frontend, scenario).await {
            let what = "the workers never came into rotation";
            trace.violate(Invariant::Answered, None, None, what);
            return Default::default();
        }
    }
    trace.note(None, format!("ready: {}", scenario.summary()));

    let mut faults = JoinSet::new();
    for plan in &scenario.faults {
        faults.spawn(Arc::clone(&cluster).suffer(plan.at, plan.fault.clone()));
    }
    let mut clients = JoinSet::new();
    for plan in &scenario.requests {
        let client = Client::new(plan.clone(), trace, scenario.mood);
        clients.spawn(client.run(Arc::clone(&routers)));
    }
    let mut counts = Counts {
        faults: scenario.faults.len() as u64,
        ..Counts::default()
    };
    let mut served = Vec::new();
    while let Some(ended) = clients.join_next().await {
        if let Ok(ended) = &ended {
            served.push(*ended);
        }
        match ended.map(|served| served.ending) {
            Ok(Ending::Completed) => counts.completed += 1,
            Ok(Ending::Refused) => counts.refused += 1,
            Ok(Ending::Failed) => counts.failed += 1,
            Ok(Ending::Cancelled) => counts.cancelled += 1,
            // A client that panicked is told of by its panic.
            Ok(Ending::Unanswered) | Err(_) => counts.unanswered += 1,
        }
    }
    while faults.join_next().await.is_some() {}
    settle(&cluster, trace).await;
    counts.retries = routers.retries();
    counts.handoffs = cluster.around.wire.commits();
    routers.stop().await;
    // Its senders hold the network, and it holds them.
    cluster.around.network.end();
    served.sort_unstable_by_key(|served| served.number);
    (counts, served)
}

/// The workers, their network and their store.
async fn build(scenario: &Scenario, trace: &Trace) -> Arc<Cluster> {
    let network = Network::new(scenario.seed);
    tokio::spawn(lanes::drive(network.clone()));
    let wire = Wire::new(scenario.seed, scenario.pace, trace.clone());
    let members = InProcess::new();
    let store = Store::new(scenario.lease);
    tokio::spawn(Arc::clone(&store).mirror(members.clone()));
    let routers = Routers::new(
        Arc::clone(&wire),
        Arc::clone(&store),
        members.clone(),
        scenario.router.clone(),
        trace.clone(),
    );
    let around = Surroundings {
        trace: trace.clone(),
        wire,
        network,
        cluster: members,
        store,
        tokenizer_json: model::tokenizer_json(),
    };
    let cluster = Arc::new(Cluster {
        around,
        scenario: scenario.clone(),
        routers: Arc::new(routers),
        processes: Mutex::default(),
        lives: Mutex::default(),
    });
    for (pool, count) in [
        (Pool::Decode, scenario.decode),
        (Pool::Prefill, scenario.prefill),
    ] {
        for index in 0..count {
            cluster.start(Slot { pool, index }).await;
        }
    }
    cluster
}

async fn is_ready(frontend: &Frontend, scenario: &Scenario) -> bool {
    let step = Duration::from_millis(5);
    for _ in 0..START.as_millis() / step.as_millis() {
        let all = frontend.models().iter().any(|model| {
            (model.prefill_workers, model.decode_workers) == (scenario.prefill, scenario.decode)
        });
        if all {
            return true;
        }
        tokio::time::sleep(step).await;
    }
    false
}

/// Everything is well again and nobody asks for anything: all must come back.
async fn settle(cluster: &Cluster, trace: &Trace) {
    let step = Duration::from_millis(100);
    let in_flight = || cluster.routers.requests_in_flight();
    for _ in 0..SETTLE.as_millis() / step.as_millis() {
        if in_flight() == 0 && cluster.leftovers().is_empty() {
            break;
        }
        tokio::time::sleep(step).await;
    }
    for (worker, what) in cluster.leftovers() {
        trace.violate(Invariant::NoBlockLost, None, Some(&worker), what);
    }
    if in_flight() != 0 {
        let what = format!("the router counts {} requests in flight", in_flight());
        trace.violate(Invariant::Answered, None, None, what);
    }
    let conflicts = cluster.routers.conflicts();
    if conflicts > 0 {
        let what = format!("workers contradicted each other {conflicts} times");
        trace.violate(Invariant::RightTokens, None, None, what);
    }
}
