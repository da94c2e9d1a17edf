//! The handle of a running engine: one OS thread that owns a [`Core`].
//!
//! ```text
//! worker --send(Command)--> inbox --> engine thread: [commands] plan submit poll sample --> EventSink
//!        <--load()--------- snapshot <--'
//! ```
//!
//! The thread sleeps while there is nothing to compute. A panic inside it fails
//! every request it holds, says so in `Stopped`, and ends the thread; commands sent
//! afterwards are refused, so no worker waits for an engine that is gone.

#[cfg(feature = "test-support")]
pub mod driven;
mod inbox;
mod pulse;

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use baton_proto::cache_names::CacheNames;
use baton_proto::kv_layout::KvLayout;
use baton_proto::model_card::ModelCard;

use crate::api::{Command, EventSink, Load};
use crate::config::EngineConfig;
use crate::core::{Core, ModelFacts, Progress};
use crate::kv::KvMemory;
use crate::step::Executor;
use crate::step_time::DeviceRates;

use inbox::Inbox;
pub use inbox::SendError;
use pulse::Pulse;

/// What ending an engine may take: its step in flight, on a slow machine.
const ENDED_WITHIN: Duration = Duration::from_secs(10);

/// Why an engine could not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("engine configuration: {0}")]
    Config(#[from] baton_proto::Error),
    #[error("kv pool: {0}")]
    Kv(#[from] crate::kv::Error),
    #[error("start engine thread: {0}")]
    Thread(std::io::Error),
}

/// A running engine. Dropping it stops it.
#[derive(Debug)]
pub struct Engine {
    inbox: Arc<Inbox>,
    pulse: Arc<Pulse>,
    load: Arc<Mutex<Load>>,
    cache_names: Arc<CacheNames>,
    memory: Arc<KvMemory>,
    card: ModelCard,
    rates: Option<DeviceRates>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Engine {
    /// Starts an engine over an executor. `facts.card.layout` and `memory` agree.
    ///
    /// # Errors
    /// A configuration that cannot work with the model, or no thread to be had.
    pub fn start_with_executor(
        executor: Box<dyn Executor>,
        facts: ModelFacts,
        memory: Arc<KvMemory>,
        config: &EngineConfig,
        sink: Box<dyn EventSink>,
    ) -> Result<Self, Error> {
        config.validate()?;
        let card = facts.card.clone();
        let load = Arc::<Mutex<Load>>::default();
        let inbox = Arc::new(Inbox::new(config.limits.commands_max));
        let pulse = Arc::new(Pulse::new());
        let core = Core::new(executor, facts, &memory, config, sink, Arc::clone(&load))?;
        let cache_names = core.cache_names();
        let thread = std::thread::Builder::new()
            .name("baton-engine".to_owned())
            .spawn({
                let (inbox, pulse) = (Arc::clone(&inbox), Arc::clone(&pulse));
                let cores = config.cores.clone();
                move || {
                    pin_to(&cores);
                    run(core, &inbox, &pulse);
                }
            })
            .map_err(Error::Thread)?;
        Ok(Self {
            inbox,
            pulse,
            load,
            cache_names,
            memory,
            card,
            rates: None,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Hands a command over; never waits for the engine. A `Cancel` is seen by a step
    /// in flight between two layers.
    ///
    /// # Errors
    /// [`SendError::Full`] for a submission too many (refuse it as overloaded),
    /// [`SendError::Stopped`] once the engine has ended.
    pub fn send(&self, command: Command) -> Result<(), SendError> {
        self.inbox.send(command)
    }

    /// How full the engine is, as of its last step or command.
    pub fn load(&self) -> Load {
        self.load
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// What the prefix cache holds, as of the last step or command.
    pub fn cache_names(&self) -> &Arc<CacheNames> {
        &self.cache_names
    }

    /// The KV pools' memory, for lanes.
    pub fn memory(&self) -> &Arc<KvMemory> {
        &self.memory
    }

    /// The model this engine serves.
    pub fn card(&self) -> &ModelCard {
        &self.card
    }

    pub(crate) fn with_device_rates(mut self, rates: DeviceRates) -> Self {
        self.rates = Some(rates);
        self
    }

    /// What its device does at best with this model's work; `None` for an executor whose
    /// device is not known.
    pub fn device_rates(&self) -> Option<DeviceRates> {
        self.rates
    }

    /// How its KV pools are laid out.
    pub fn layout(&self) -> &KvLayout {
        self.memory.layout()
    }

    /// For how long its thread has had something to do and not moved: between two layers
    /// at the most, while all is well. Zero once it has ended.
    pub fn still_for(&self) -> Duration {
        if self.is_stopped() {
            return Duration::ZERO;
        }
        let working = self.pulse.still_for();
        working.unwrap_or_else(|| self.inbox.waiting_for())
    }

    /// Whether the engine takes no more commands, because it was stopped or failed.
    pub fn is_stopped(&self) -> bool {
        self.inbox.is_closed()
    }

    /// Ends the engine: requests it still holds fail as unavailable and are released,
    /// `Stopped` is emitted, the thread is joined. Idempotent. Must not be called from
    /// the event sink, which runs on that thread.
    ///
    /// Returns whether the thread has ended. One that does not move any more is left to
    /// the process's end after ten seconds, with everything it holds.
    pub fn stop(&self) -> bool {
        self.inbox.close();
        let mut held = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(thread) = held.take() else {
            return true;
        };
        let since = Instant::now();
        while !thread.is_finished() {
            if since.elapsed() > ENDED_WITHIN {
                tracing::error!("the engine thread does not end; it is left behind");
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        // The thread catches its own panics, so joining fails only if that code itself panicked.
        if thread.join().is_err() {
            tracing::error!("the engine thread panicked while it was ending");
        }
        true
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The engine thread: commands, then a step, until closed or broken.
fn run(mut core: Core, inbox: &Inbox, pulse: &Pulse) {
    let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| {
        let started = Instant::now();
        let mut commands = Vec::new();
        let mut idle = false;
        while inbox.take(&mut commands, idle) {
            pulse.beat();
            for command in commands.drain(..) {
                core.handle(command, started.elapsed());
            }
            let progress = core.step(started.elapsed(), &mut |keys| {
                pulse.beat();
                inbox.peek_cancels(keys);
            });
            idle = match progress {
                Ok(Progress::Worked) => false,
                Ok(Progress::Idle) => {
                    pulse.rest();
                    true
                }
                Err(error) => return Some(error.to_string()),
            };
        }
        None
    }));
    // From here on nobody's command is accepted and then forgotten.
    inbox.close();
    let error = outcome.unwrap_or_else(|panic| Some(format!("panic: {}", panic_message(&*panic))));
    if let Some(error) = &error {
        tracing::error!(%error, "the engine stops");
    }
    // The sink itself may be what panicked; it is not asked twice.
    if std::panic::catch_unwind(AssertUnwindSafe(|| core.end(error))).is_err() {
        tracing::error!("the event sink panicked while the engine was ending");
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

/// Pins the calling thread. A core the process may not use is not worth failing for.
fn pin_to(cores: &[usize]) {
    if cores.is_empty() {
        return;
    }
    let mut set = rustix::thread::CpuSet::new();
    for core in cores {
        if *core < rustix::thread::CpuSet::MAX_CPU {
            set.set(*core);
        }
    }
    if let Err(error) = rustix::thread::sched_setaffinity(None, &set) {
        tracing::warn!(?cores, %error, "the engine thread could not be pinned");
    }
}
