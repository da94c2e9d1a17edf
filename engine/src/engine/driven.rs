//! An engine without a thread: whoever started it gives it its turns.
//!
//! The handle, the inbox, the core and its sink are those of a running engine; only
//! the loop of the thread is cut open, so that a simulator can let time pass between
//! two layers of a step. Made for simulators.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::inbox::{Arrival, Inbox};
use super::pulse::Pulse;
use super::{Engine, Error};
use crate::api::{EventSink, Load};
use crate::config::EngineConfig;
use crate::core::{Core, ModelFacts, StepInFlight};
use crate::kv::KvMemory;
use crate::step::Executor;

/// What a turn did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Nothing is to be done before something arrives.
    Idle,
    /// A step has begun or has come to its next layer; the next turn goes on with it.
    Running,
    /// A step has ended.
    Stepped,
    /// The engine has ended: never give it another turn.
    Ended,
}

/// The part of an engine that its thread owns otherwise.
pub struct DrivenCore {
    core: Core,
    inbox: Arc<Inbox>,
    step: Option<StepInFlight>,
    ended: bool,
}

impl Engine {
    /// An engine that runs by the turns it is given. `on_arrival` is called when a
    /// command has come, or its end was asked for.
    ///
    /// # Errors
    /// As [`Engine::start_with_executor`], without those of the thread.
    pub fn driven(
        executor: Box<dyn Executor>,
        facts: ModelFacts,
        memory: Arc<KvMemory>,
        config: &EngineConfig,
        sink: Box<dyn EventSink>,
        on_arrival: impl Fn() + Send + Sync + 'static,
    ) -> Result<(Self, DrivenCore), Error> {
        config.validate()?;
        let card = facts.card.clone();
        let load = Arc::<Mutex<Load>>::default();
        let inbox = Arc::new(Inbox::new(config.limits.commands_max));
        drop(inbox.on_arrival.set(Arrival(Box::new(on_arrival))));
        let core = Core::new(executor, facts, &memory, config, sink, Arc::clone(&load))?;
        let cache_names = core.cache_names();
        let driven = DrivenCore {
            core,
            inbox: Arc::clone(&inbox),
            step: None,
            ended: false,
        };
        let engine = Self {
            inbox,
            pulse: Arc::new(Pulse::new()),
            load,
            cache_names,
            memory,
            card,
            rates: None,
            thread: Mutex::new(None),
        };
        Ok((engine, driven))
    }
}

impl DrivenCore {
    /// The commands that wait, then a step's beginning; or, inside a step, one layer.
    pub fn turn(&mut self, now: Duration) -> Turn {
        if self.ended {
            return Turn::Ended;
        }
        let inbox = &self.inbox;
        if let Some(mut step) = self.step.take() {
            return match self
                .core
                .advance(&mut step, &mut |keys| inbox.peek_cancels(keys))
            {
                Ok(true) => Turn::Stepped,
                Ok(false) => {
                    self.step = Some(step);
                    Turn::Running
                }
                Err(error) => self.end(Some(error.to_string())),
            };
        }
        let mut commands = Vec::new();
        if !inbox.take(&mut commands, false) {
            return self.end(None);
        }
        for command in commands {
            self.core.handle(command, now);
        }
        match self.core.begin(now) {
            Ok(None) => Turn::Idle,
            Ok(Some(step)) => {
                self.step = Some(step);
                Turn::Running
            }
            Err(error) => self.end(Some(error.to_string())),
        }
    }

    /// Ends the engine as its thread would: nothing is taken any more, and what is left
    /// fails and is released.
    pub fn end(&mut self, error: Option<String>) -> Turn {
        if !std::mem::replace(&mut self.ended, true) {
            self.inbox.close();
            self.step = None;
            self.core.end(error);
        }
        Turn::Ended
    }

    /// The state machine, for looking at.
    pub fn core(&self) -> &Core {
        &self.core
    }
}
