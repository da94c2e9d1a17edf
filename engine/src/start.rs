//! Puts an engine together from a model: pools, kernels, executor, thread.

use std::sync::Arc;

use baton_kernels::{Isa, Kernels};
use baton_proto::ErrorKind;

use crate::api::EventSink;
use crate::config::EngineConfig;
use crate::core::ModelFacts;
use crate::decoder::CpuExecutor;
use crate::engine::{Engine, Error};
use crate::kv::KvMemory;
use crate::model::Model;

impl Engine {
    /// Starts an engine of `model` on the CPU. Maps the pools and starts the kernels'
    /// threads, which takes milliseconds.
    ///
    /// # Errors
    /// A configuration that cannot work with the model, no memory for the pools, no
    /// thread to be had.
    pub fn start(
        model: Arc<Model>,
        config: EngineConfig,
        sink: Box<dyn EventSink>,
    ) -> Result<Self, Error> {
        config.validate()?;
        let device = |error: &dyn std::fmt::Display| {
            Error::Config(baton_proto::Error::new(
                ErrorKind::Internal,
                error.to_string(),
            ))
        };
        let layout = model.kv_layout(config.block_size, config.kv_dtype);
        let memory = KvMemory::allocate(layout.clone(), &config.pool_blocks(&layout))?;
        let isa = config.isa.unwrap_or_else(Isa::detect);
        let kernels = if config.cores.len() == config.threads {
            Kernels::with_cores(isa, &config.cores)
        } else {
            Kernels::new(isa, config.threads)
        }
        .map_err(|error| device(&error))?;
        let step_tokens_max = config.limits.step_tokens_max as usize;
        let executor = CpuExecutor::new(&model, Arc::clone(&memory), kernels, step_tokens_max)
            .map_err(|error| device(&error))?;
        let mut card = model.card(&config.model_name, layout);
        if let Some(context_max) = config.context_max {
            card.context_max = card.context_max.min(context_max);
        }
        tracing::info!(
            role = ?config.role,
            %isa,
            threads = config.threads,
            cores = ?config.cores,
            kv_bytes = (0..memory.layout().groups.len()).map(|group| memory.region(group).len).sum::<usize>(),
            "engine starts"
        );
        let facts = ModelFacts {
            card,
            eos: model.eos().to_vec(),
        };
        Self::start_with_executor(Box::new(executor), facts, memory, &config, sink)
    }
}
