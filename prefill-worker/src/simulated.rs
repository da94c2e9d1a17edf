//! A prefill worker whose outside is a simulator's: no ports, no threads.
//!
//! The service, the requests' tasks, the engine's core, the sender and the routes between
//! them are those of [`crate::PrefillWorker`]; given from outside are the engine's turns,
//! the lanes, and whatever carries its calls.

use std::sync::Arc;

use baton_engine::api::EventSink;
use baton_engine::engine::Engine;
use baton_engine::routes::EventRoutes;
use baton_kv_transfer::RegionTable;
use baton_kv_transfer::mem::Network;
use baton_kv_transfer::sender::{Sender, SenderConfig};
use baton_membership::{Membership, WorkerRecord};
use baton_observability::WorkerMetrics;
use baton_proto::v1::prefill_worker_server::{self, PrefillWorkerServer};
use baton_proto::{Epoch, v1};

use crate::config::PrefillWorkerConfig;
use crate::metrics::Metrics;
use crate::service::Service;
use crate::ship::wire_form;
use crate::worker::{Error, Parts, Shared, record};

/// What a simulator gives.
pub struct Outside<'a> {
    pub epoch: Epoch,
    /// The network that lanes go over.
    pub network: &'a Network,
    /// JSON of the tokenizer specification.
    pub tokenizer_json: Arc<[u8]>,
    /// Told of each step that ended, by its prompt and decode tokens.
    pub on_step: Box<dyn Fn(u32, u32) + Send + Sync>,
}

/// A prefill worker in a simulation.
pub struct SimulatedWorker {
    shared: Arc<Shared>,
}

impl SimulatedWorker {
    /// A worker over the engine that `engine` makes for the sink it is given, and the
    /// regions of its pools.
    ///
    /// # Errors
    /// Whatever the parts report.
    pub fn start(
        config: PrefillWorkerConfig,
        outside: Outside<'_>,
        engine: impl FnOnce(Box<dyn EventSink>) -> Result<Engine, baton_engine::engine::Error>,
        regions: impl FnOnce(&Engine) -> RegionTable,
    ) -> Result<Self, Error> {
        let metrics = Metrics(WorkerMetrics::new(&mut Default::default()));
        let on_step = outside.on_step;
        let routes = EventRoutes::new(
            move |step| on_step(step.prefill_tokens, step.decode_tokens),
            |_| {},
        );
        let engine = engine(routes.sink())?;
        let sender = Sender::start(SenderConfig {
            environment: outside.network.environment().clone(),
            network: Some(outside.network.clone()),
            ..SenderConfig::new(regions(&engine))
        });
        let form = wire_form(config.kv_wire, engine.layout())?;
        let shared = Shared::new(Parts {
            config,
            epoch: outside.epoch,
            tokenizer_json: outside.tokenizer_json,
            engine,
            routes,
            sender,
            form,
            metrics,
        });
        shared.set_ready();
        Ok(Self { shared })
    }

    /// Lists the worker under the address that its calls find it by.
    ///
    /// # Errors
    /// As the membership's.
    pub async fn register(
        &self,
        membership: &dyn Membership,
        control: &str,
    ) -> Result<(), baton_membership::Error> {
        let registration = membership.register(self.record(control)).await?;
        self.shared.registered(registration);
        Ok(())
    }

    /// What it is listed as.
    pub fn record(&self, control: &str) -> WorkerRecord {
        record(&self.shared, control)
    }

    /// Its gRPC service.
    pub fn service(&self) -> PrefillWorkerServer<impl prefill_worker_server::PrefillWorker> {
        PrefillWorkerServer::new(Service {
            shared: Arc::clone(&self.shared),
        })
    }

    /// Its lanes to decode workers.
    pub fn sender(&self) -> &Sender {
        &self.shared.sender
    }

    /// Its engine.
    pub fn engine(&self) -> &Engine {
        &self.shared.engine
    }

    /// How full it is.
    pub fn load(&self) -> v1::Load {
        self.shared.load()
    }

    /// Requests that it runs.
    pub fn requests(&self) -> usize {
        self.shared.live().len()
    }

    /// Says that it is leaving.
    pub async fn drain(&self) {
        self.shared.start_draining().await;
    }
}
