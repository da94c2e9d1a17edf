//! The loop that owns all sequences: plan -> submit -> poll -> sample.
//!
//! ```text
//! admission   what can be served, what it needs, what may wait
//! commands    submit, commit, cancel, release ...           (between steps)
//! carry_out   preempt, admit, reserve, take blocks          (a plan becomes a step)
//! results     computed positions, draws, forks, ends        (a step becomes tokens)
//! pacing      foretold step times, for targets on the gap between tokens
//! outbox      events of one step or command, in their order
//! integrity   every block's claims against every table      (debug builds, tests)
//! ```
//!
//! One owner, no locks, no clock but the `now` it is given: tests drive it command by
//! command and step by step. [`crate::engine::Engine`] runs it on a thread.

mod admission;
mod carry_out;
mod commands;
mod integrity;
mod outbox;
mod pacing;
mod request;
mod results;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_proto::cache_names::CacheNames;
use baton_proto::model_card::ModelCard;
use baton_proto::{Error, ErrorKind, TokenId};

use crate::api::{Event, EventSink, Load, RequestKey, StepStatistics};
use crate::config::{EngineConfig, Limits, Role};
use crate::kv::{KvMemory, Pools};
use crate::sampling::Scratch;
use crate::scheduler::turn::FairClock;
use crate::scheduler::{Plan, SequenceId, Stage};
use crate::step::{self, Executor, StepEvent, StepOutput, StepPlan};

use outbox::Outbox;
use pacing::Pacer;
use request::{Kind, Request, RequestStage, Sequence};

/// What the core must know of a model.
#[derive(Clone, Debug)]
pub struct ModelFacts {
    /// Sizes, layout and name.
    pub card: ModelCard,
    /// Every id that ends a sequence.
    pub eos: Vec<TokenId>,
}

/// Whether there is more to do without a further command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    Worked,
    Idle,
}

/// Lists the requests with a cancel under way; asked between two layers of a step.
pub type Cancels<'a> = &'a mut dyn FnMut(&mut Vec<RequestKey>);

/// Steps that may fail one after the other before the device counts as broken.
const FAILED_STEPS_MAX: u32 = 3;

/// The state of one engine.
pub struct Core {
    executor: Box<dyn Executor>,
    sink: Box<dyn EventSink>,
    load: Arc<Mutex<Load>>,
    cache_names: Arc<CacheNames>,
    role: Role,
    limits: Limits,
    prefix_cache: bool,
    eos: Vec<TokenId>,
    tokenizer_size: u32,
    context_max: u32,
    /// Per model layer: its group and its index there.
    layer_groups: Vec<usize>,

    pools: Pools,
    requests: HashMap<RequestKey, Request>,
    /// By age.
    sequences: BTreeMap<SequenceId, Sequence>,
    /// Requests accepted so far: the age of the next one.
    arrivals: u64,
    fair_clock: FairClock,

    pacer: Pacer,
    /// The end of the step before, if there has been something to do since.
    busy_since: Option<Instant>,
    outbox: Outbox,
    scratch: Scratch,
    totals: Totals,
    failed_steps: u32,
    /// Keys with a cancel under way, kept for its memory.
    cancelled: Vec<RequestKey>,
}

/// What has been counted since the start.
#[derive(Debug, Default)]
struct Totals {
    preemptions: u64,
    prefix_queries_tokens: u64,
    prefix_hits_tokens: u64,
    not_finite: u64,
}

/// A row of the step in flight.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    id: SequenceId,
    key: RequestKey,
    tokens: u32,
    wants_logits: bool,
    /// Whether its blocks are reported layer by layer.
    ships: bool,
}

/// A step between its plan and its end.
pub(crate) struct StepInFlight {
    /// Until it is submitted.
    plan: Option<StepPlan>,
    rows: Vec<InFlight>,
    started: Instant,
    preemptions: u32,
    cut: bool,
}

/// What one poll of a step brought.
enum Layer {
    Next,
    Last(StepOutput),
    Aborted,
}

impl Core {
    /// A core with empty pools of the sizes of `memory`.
    ///
    /// # Errors
    /// A configuration that cannot work with the model, by field.
    pub fn new(
        executor: Box<dyn Executor>,
        facts: ModelFacts,
        memory: &Arc<KvMemory>,
        config: &EngineConfig,
        sink: Box<dyn EventSink>,
        load: Arc<Mutex<Load>>,
    ) -> Result<Self, Error> {
        config.validate()?;
        let layout = memory.layout();
        let blocks: Vec<u32> = (0..memory.groups())
            .map(|group| memory.blocks(group))
            .collect();
        let mut layer_groups = vec![0; layout.layers as usize];
        for (group, layers) in layout.groups.iter().enumerate() {
            for layer in &layers.layers {
                layer_groups[*layer as usize] = group;
            }
        }
        let context_max = match config.context_max {
            Some(wanted) if wanted > facts.card.context_max => {
                return Err(Error::invalid(
                    "context_max",
                    format!("{wanted} is above the model's {}", facts.card.context_max),
                ));
            }
            wanted => wanted.unwrap_or(facts.card.context_max),
        };
        let pacer = Pacer::new(executor.step_clock(), config.limits.itl_target)?;
        let mut core = Self {
            executor,
            sink,
            load,
            cache_names: Arc::default(),
            role: config.role,
            limits: config.limits.clone(),
            prefix_cache: config.prefix_cache,
            eos: facts.eos,
            tokenizer_size: facts.card.tokenizer_size.min(facts.card.vocab_size),
            context_max,
            layer_groups,
            pools: Pools::new(layout, &blocks),
            requests: HashMap::new(),
            sequences: BTreeMap::new(),
            arrivals: 0,
            fair_clock: FairClock::default(),
            pacer,
            busy_since: None,
            outbox: Outbox::default(),
            scratch: Scratch::default(),
            totals: Totals::default(),
            failed_steps: 0,
            cancelled: Vec::new(),
        };
        core.pools.telling().tell_news();
        core.publish_load();
        Ok(core)
    }

    /// What the prefix cache holds, as of the last step or command.
    pub fn cache_names(&self) -> Arc<CacheNames> {
        Arc::clone(&self.cache_names)
    }

    /// Plans and runs one step.
    ///
    /// # Errors
    /// The executor failed several steps in a row; the core must be ended.
    pub fn step(&mut self, now: Duration, cancels: Cancels<'_>) -> Result<Progress, step::Error> {
        let Some(mut step) = self.begin(now)? else {
            return Ok(Progress::Idle);
        };
        while !self.advance(&mut step, cancels)? {}
        Ok(Progress::Worked)
    }

    /// Plans a step; `None` if there is nothing to do. It runs by [`Core::advance`], and
    /// no command is handled until it has ended.
    ///
    /// # Errors
    /// As [`Core::step`].
    pub(crate) fn begin(&mut self, now: Duration) -> Result<Option<StepInFlight>, step::Error> {
        let started = Instant::now();
        let plan = self.plan(now);
        self.note_delay(&plan);
        if plan.is_empty() {
            self.busy_since = None;
            return Ok(None);
        }
        let preemptions = plan.preempt.len() as u32;
        let cut = plan.cut;
        let (plan, rows) = self.carry_out(plan)?;
        // Reservations are wanted by peers now, not after the step.
        self.flush();
        Ok(Some(StepInFlight {
            plan: Some(plan),
            rows,
            started,
            preemptions,
            cut,
        }))
    }

    /// Runs a step up to its next layer; true once it has ended.
    ///
    /// # Errors
    /// As [`Core::step`].
    pub(crate) fn advance(
        &mut self,
        step: &mut StepInFlight,
        cancels: Cancels<'_>,
    ) -> Result<bool, step::Error> {
        let mut statistics = StepStatistics {
            preemptions: step.preemptions,
            ..StepStatistics::default()
        };
        let mut done = None;
        let rows = &step.rows;
        if !rows.is_empty() {
            let submitted = match step.plan.take() {
                Some(plan) => self.executor.submit(&plan).map(drop),
                None => Ok(()),
            };
            match submitted.and_then(|()| self.run_layer(rows, cancels)) {
                Ok(Layer::Next) => return Ok(false),
                Ok(Layer::Last(output)) => {
                    self.failed_steps = 0;
                    (statistics.flops, statistics.bytes) = (output.work.ops(), output.work.bytes());
                    self.take_results(rows, &output, &mut statistics);
                    done = Some(output.work);
                    self.executor.recycle(output);
                }
                Ok(Layer::Aborted) => {}
                Err(error) => self.fail_step(rows, error)?,
            }
        }
        self.flush();
        let ended = Instant::now();
        statistics.duration = ended - step.started;
        if let Some(work) = done {
            let decodes = statistics.decode_tokens > 0;
            // Tokens are as far apart as the ends of steps: what lies between two steps
            // counts, unless nothing was to be done.
            let took = ended - self.busy_since.unwrap_or(step.started);
            statistics.over_prediction = self.pacer.observe(&work, took, decodes);
            self.pacer.cut_steps_total += u64::from(step.cut);
        }
        if !rows.is_empty() || step.preemptions > 0 {
            self.sink.emit(Event::Step(statistics));
        }
        if cfg!(debug_assertions) {
            self.check_integrity();
        }
        self.busy_since = Some(ended);
        Ok(true)
    }

    /// Counts the requests whose start a target puts off, each once: the first in the
    /// queue that it keeps from starting, and all behind it.
    fn note_delay(&mut self, plan: &Plan) {
        self.pacer.delays = plan.delayed.is_some();
        let Some(first) = plan.delayed else { return };
        for sequence in self.sequences.range(first..).map(|(_, sequence)| sequence) {
            let request = self.requests.get_mut(&sequence.key);
            let request = request.expect("a sequence has its request");
            if sequence.stage == Stage::Waiting && !std::mem::replace(&mut request.delayed, true) {
                self.pacer.delayed_total += 1;
                tracing::debug!(key = ?request.key, "waits for room within the target on the gap between tokens");
            }
        }
    }

    /// Polls the step in flight once. It is aborted when nobody wants any of its rows
    /// any more.
    fn run_layer(&mut self, rows: &[InFlight], cancels: Cancels<'_>) -> Result<Layer, step::Error> {
        let layer = match self.executor.poll()? {
            StepEvent::Done(output) => return Ok(Layer::Last(output)),
            StepEvent::LayerDone { layer } => layer,
        };
        for row in rows.iter().filter(|row| row.ships) {
            self.report_layer(row, layer);
        }
        let mut cancelled = std::mem::take(&mut self.cancelled);
        // Those of a step before are no news of this one.
        cancelled.clear();
        cancels(&mut cancelled);
        let unwanted = !cancelled.is_empty() && rows.iter().all(|row| cancelled.contains(&row.key));
        self.cancelled = cancelled;
        if unwanted {
            self.executor.abort();
            return Ok(Layer::Aborted);
        }
        Ok(Layer::Next)
    }

    /// The device lost a step: its requests fail, the others go on. A device that
    /// keeps failing is given up.
    fn fail_step(&mut self, rows: &[InFlight], error: step::Error) -> Result<(), step::Error> {
        tracing::error!(%error, rows = rows.len(), "a step failed");
        self.failed_steps += 1;
        let failure = Error::new(ErrorKind::Internal, error.to_string()).with_reason("STEP_FAILED");
        for row in rows {
            if self.requests.contains_key(&row.key) {
                self.fail(row.key, failure.clone());
            }
        }
        if self.failed_steps >= FAILED_STEPS_MAX {
            Err(error)
        } else {
            Ok(())
        }
    }

    /// What a block is in now, for whoever watches its bytes.
    ///
    /// # Panics
    /// If there is no such group or block.
    #[cfg(feature = "test-support")]
    pub fn block_state(&self, group: usize, block: u32) -> crate::kv::BlockState {
        self.pools.pool(group).state(block)
    }

    /// Fails and releases what is left, oldest first, and emits `Stopped`.
    pub fn end(&mut self, error: Option<String>) {
        // Events a panic kept from being sent would contradict what follows.
        self.outbox = Outbox::default();
        let failure = match &error {
            None => Error::new(ErrorKind::Unavailable, "the worker is stopping")
                .with_reason("ENGINE_STOPPED"),
            Some(message) => {
                Error::new(ErrorKind::Internal, format!("the engine failed: {message}"))
                    .with_reason("ENGINE_FAILED")
            }
        };
        let mut left: Vec<_> = self
            .requests
            .drain()
            .map(|(key, request)| (request.arrival, key))
            .collect();
        left.sort_unstable();
        self.sequences.clear();
        for (_, key) in left {
            self.sink.emit(Event::Failed {
                key,
                error: failure.clone(),
            });
            self.sink.emit(Event::Released { key });
        }
        self.sink.emit(Event::Stopped { error });
    }

    /// Sends what has happened. Who hears it finds the load as it is after it.
    fn flush(&mut self) {
        for tokens in self.outbox.ended() {
            self.pacer.ended(tokens);
        }
        self.publish_load();
        if let Some(news) = self.pools.telling().news() {
            self.cache_names.apply(news);
        }
        self.outbox.flush(&mut *self.sink);
    }

    fn publish_load(&self) {
        let queued = |request: &&Request| request.stage == RequestStage::Queued;
        let waiting = self.requests.values().filter(queued).count() as u32;
        let held = self
            .requests
            .values()
            .filter(|request| request.stage == RequestStage::AwaitingRelease)
            .count() as u32;
        let prefill_tokens_waiting = self
            .sequences
            .values()
            .filter(|sequence| sequence.trunk && sequence.stage != Stage::Reserved)
            .filter(|sequence| self.requests[&sequence.key].kind != Kind::Receive)
            .map(|sequence| sequence.known - sequence.computed)
            .sum();
        let in_place = self.requests.values().filter(|request| {
            matches!(request.stage, RequestStage::Active | RequestStage::Reserved)
        });
        let load = Load {
            requests_running: self.requests.len() as u32 - waiting - held,
            requests_waiting: waiting,
            prefill_tokens_waiting,
            preemptions_total: self.totals.preemptions,
            prefix_queries_tokens_total: self.totals.prefix_queries_tokens,
            prefix_hits_tokens_total: self.totals.prefix_hits_tokens,
            not_finite_total: self.totals.not_finite,
            itl_target: self.pacer.target(in_place),
            slo_delayed_total: self.pacer.delayed_total,
            slo_cut_steps_total: self.pacer.cut_steps_total,
            blocks: self
                .pools
                .groups()
                .map(|group| self.pools.pool(group).counts())
                .collect(),
        };
        *self.load.lock().unwrap_or_else(PoisonError::into_inner) = load;
    }
}
