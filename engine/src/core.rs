//! The loop that owns all sequences: plan -> submit -> poll -> sample.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_proto::model_card::ModelCard;
use baton_proto::{ErrorKind, TokenId};

use crate::api::{Command, Event, EventSink, Load, Rejection, RequestKey};
use crate::config::EngineConfig;
use crate::kv::KvMemory;
use crate::step::Executor;

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

/// The state of one engine.
pub struct Core {
    sink: Box<dyn EventSink>,
}

impl Core {
    /// A core with empty pools.
    ///
    /// # Errors
    /// A configuration that cannot work with the model.
    pub fn new(
        _executor: Box<dyn Executor>,
        _facts: ModelFacts,
        _memory: &Arc<KvMemory>,
        _config: &EngineConfig,
        sink: Box<dyn EventSink>,
        _load: Arc<Mutex<Load>>,
    ) -> Result<Self, baton_proto::Error> {
        Ok(Self { sink })
    }

    /// Takes one command.
    pub fn handle(&mut self, command: Command, _now: Duration) {
        if let Command::Submit(submission) = command {
            let error = baton_proto::Error::new(ErrorKind::Unavailable, "no scheduler is built in");
            let rejection = Rejection {
                error,
                retry_after: None,
            };
            self.sink.emit(Event::Rejected {
                key: submission.key,
                rejection,
            });
        }
    }

    /// Plans and runs one step.
    ///
    /// # Errors
    /// The executor failed beyond repair.
    pub fn step(
        &mut self,
        _now: Duration,
        _cancels: &mut dyn FnMut(&mut Vec<RequestKey>),
    ) -> Result<Progress, crate::step::Error> {
        Ok(Progress::Idle)
    }

    /// Fails and releases what is left and emits `Stopped`.
    pub fn end(&mut self, error: Option<String>) {
        self.sink.emit(Event::Stopped { error });
    }
}
