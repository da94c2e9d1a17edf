//! A decode worker whose outside is a simulator's: no ports, no threads.
//!
//! The service, the requests' tasks, the engine's core, the grant table and the routes
//! between them are those of [`crate::DecodeWorker`]; given from outside are the engine's
//! turns, the lanes, and whatever carries its calls.

use std::net::SocketAddr;
use std::sync::Arc;

use baton_engine::api::EventSink;
use baton_engine::engine::Engine;
use baton_engine::routes::EventRoutes;
use baton_kv_transfer::mem::{Link, Network};
use baton_kv_transfer::receiver::{Receiver, ReceiverConfig};
use baton_kv_transfer::{DataPortConfig, LayoutDigest};
use baton_membership::{Membership, WorkerRecord};
use baton_observability::WorkerMetrics;
use baton_proto::v1::decode_worker_server::{self, DecodeWorkerServer};
use baton_proto::{Epoch, v1};

use crate::config::DecodeWorkerConfig;
use crate::grant::other_layouts;
use crate::metrics::Metrics;
use crate::service::Service;
use crate::worker::{Error, Parts, Shared, TicketRoutes, record};

/// What a simulator gives.
pub struct Outside<'a> {
    pub epoch: Epoch,
    /// The network that lanes come over, and where they find the worker.
    pub network: &'a Network,
    pub data_address: SocketAddr,
    /// JSON of the tokenizer specification.
    pub tokenizer_json: Arc<[u8]>,
    /// Told of each step that ended, by its prompt and decode tokens.
    pub on_step: Box<dyn Fn(u32, u32) + Send + Sync>,
}

/// A decode worker in a simulation.
pub struct SimulatedWorker {
    shared: Arc<Shared>,
    link: Link,
}

impl SimulatedWorker {
    /// A worker over the engine that `engine` makes for the sink it is given. `watch`
    /// may change the receiver's settings before it starts.
    ///
    /// # Errors
    /// Whatever the parts report.
    pub fn start(
        config: DecodeWorkerConfig,
        outside: Outside<'_>,
        engine: impl FnOnce(Box<dyn EventSink>) -> Result<Engine, baton_engine::engine::Error>,
        regions: impl FnOnce(&Engine) -> baton_kv_transfer::RegionTable,
    ) -> Result<Self, Error> {
        let metrics = Metrics(WorkerMetrics::new(&mut Default::default()));
        let on_step = outside.on_step;
        let routes = EventRoutes::new(
            move |step| on_step(step.prefill_tokens, step.decode_tokens),
            |_| {},
        );
        let engine = engine(routes.sink())?;
        let tickets = Arc::new(TicketRoutes::default());
        let digest = LayoutDigest::of(engine.layout());
        let mut receiver = ReceiverConfig::new(outside.epoch, digest, regions(&engine));
        receiver.other_layouts = Some(other_layouts(engine.layout()));
        let port = DataPortConfig {
            address: outside.data_address,
            ..DataPortConfig::default()
        };
        let (receiver, link) = outside.network.receiver(receiver, port, tickets.sink())?;
        let shared = Shared::new(Parts {
            config,
            epoch: outside.epoch,
            data_address: outside.data_address.to_string(),
            tokenizer_json: outside.tokenizer_json,
            engine,
            routes,
            receiver,
            tickets,
            metrics,
        })?;
        shared.set_ready();
        Ok(Self { shared, link })
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
    pub fn service(&self) -> DecodeWorkerServer<impl decode_worker_server::DecodeWorker> {
        DecodeWorkerServer::new(Service {
            shared: Arc::clone(&self.shared),
        })
    }

    /// The link that all lanes to it share.
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// Its grant table.
    pub fn receiver(&self) -> &Receiver {
        &self.shared.receiver
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
