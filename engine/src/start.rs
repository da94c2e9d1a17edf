//! Puts an engine together from a model: pools, kernels, executor, thread.

use std::sync::Arc;

use baton_kernels::{Isa, Kernels};
use baton_proto::ErrorKind;

use crate::api::EventSink;
use crate::config::EngineConfig;
use crate::core::ModelFacts;
use crate::decoder::CpuExecutor;
use crate::device::{DeviceLimits, DeviceThreads};
use crate::engine::{Engine, Error};
use crate::kv::KvMemory;
use crate::model::Model;
use crate::step_time::DeviceRates;
use crate::step_work::ModelCost;

impl Engine {
    /// Starts an engine of `model` on the CPU. Maps the pools and starts the kernels'
    /// threads, which takes milliseconds, and takes a brief look at what those threads
    /// can do at best, which takes some tens of them the first time in a process.
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
        let blocks = config.pool_blocks(&layout);
        let memory = KvMemory::allocate_as(layout.clone(), &blocks, config.pool_sharing)?;
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
        let rates = measured_rates(&config, isa, executor.cost());
        let executor = executor.with_rates(rates);
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
            product_gops = (rates.product_ops_per_second / 1e9).round(),
            read_gb_per_second = (rates.bytes_per_second / 1e9).round(),
            "engine starts"
        );
        let facts = ModelFacts {
            card,
            eos: model.eos().to_vec(),
        };
        let engine = Self::start_with_executor(Box::new(executor), facts, memory, &config, sink)?;
        Ok(engine.with_device_rates(rates))
    }
}

/// What the threads of `config` do at best with work like `cost`. An engine without
/// measured limits still works, so assumed ones are better than none.
fn measured_rates(config: &EngineConfig, isa: Isa, cost: &ModelCost) -> DeviceRates {
    let pinned = config.cores.len() == config.threads;
    let threads = DeviceThreads {
        isa,
        threads: config.threads,
        cores: if pinned {
            config.cores.clone()
        } else {
            Vec::new()
        },
    };
    match DeviceLimits::brief(&threads, cost.weight_bytes()) {
        Ok(limits) => limits.rates(cost),
        Err(error) => {
            tracing::warn!(%error, "the device's limits are assumed, not measured");
            DeviceRates::assumed(config.threads)
        }
    }
}
