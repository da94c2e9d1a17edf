//! How one decode worker is set up.

use std::net::SocketAddr;
use std::time::Duration;

use baton_engine::config::EngineConfig;
use baton_kv_transfer::{NixlLibrary, TransportChoice};
use baton_proto::WorkerId;
use baton_proto::transport::TlsSettings;

/// The settings of one decode worker.
#[derive(Clone, Debug)]
pub struct DecodeWorkerConfig {
    pub worker_id: WorkerId,
    /// gRPC port. Port 0 takes a free one.
    pub listen: SocketAddr,
    /// `host:port` that routers use; the bound address if absent.
    pub advertise: Option<String>,
    /// Port that prefill workers of other processes send KV to; `None` takes KV from
    /// this process alone.
    pub data_listen: Option<SocketAddr>,
    /// How KV of other processes may arrive. Default auto.
    pub kv_transport: TransportChoice,
    /// For [`TransportChoice::Nixl`], which is TCP without it. Default `None`.
    pub nixl: Option<NixlLibrary>,
    /// `host:port` that prefill workers use; the bound data address if absent.
    pub data_advertise: Option<String>,
    /// HTTP port with /livez, /readyz and /metrics.
    pub admin_listen: Option<SocketAddr>,
    pub tls: TlsSettings,
    pub engine: EngineConfig,
    /// From the grant until the commit must be here, and again how long a failed
    /// handoff's reservation waits for the router's decision.
    pub handoff_deadline: Duration,
    /// How long a reader may stay behind before its request is cancelled.
    pub slow_client_deadline: Duration,
    /// How long a draining worker lets its streams run.
    pub drain_grace: Duration,
    /// Where this worker stands (rack, host), for placement.
    pub topology: String,
}

impl DecodeWorkerConfig {
    /// Loopback ports, no TLS, default times.
    pub fn new(worker_id: WorkerId, engine: EngineConfig) -> Self {
        let free = SocketAddr::from(([127, 0, 0, 1], 0));
        Self {
            worker_id,
            listen: free,
            advertise: None,
            data_listen: Some(free),
            kv_transport: TransportChoice::default(),
            nixl: None,
            data_advertise: None,
            admin_listen: None,
            tls: TlsSettings::default(),
            engine,
            handoff_deadline: Duration::from_secs(30),
            slow_client_deadline: Duration::from_secs(30),
            drain_grace: Duration::from_secs(30),
            topology: String::new(),
        }
    }
}
