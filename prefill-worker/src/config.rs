//! How one prefill worker is set up.

use std::net::SocketAddr;
use std::time::Duration;

use baton_engine::config::EngineConfig;
use baton_kv_transfer::{NixlLibrary, TransportChoice, WireChoice};
use baton_proto::WorkerId;
use baton_proto::transport::TlsSettings;

/// The settings of one prefill worker.
#[derive(Clone, Debug)]
pub struct PrefillWorkerConfig {
    pub worker_id: WorkerId,
    /// gRPC port. Port 0 takes a free one.
    pub listen: SocketAddr,
    /// `host:port` that routers use; the bound address if absent.
    pub advertise: Option<String>,
    /// HTTP port with /livez, /readyz and /metrics.
    pub admin_listen: Option<SocketAddr>,
    pub tls: TlsSettings,
    pub engine: EngineConfig,
    /// How KV leaves. Memory is shared only if the engine's pools are lendable. Default auto.
    pub kv_transport: TransportChoice,
    /// What K and V are over TCP, for requests that need not be exact. Default native.
    pub kv_wire: WireChoice,
    /// For [`TransportChoice::Nixl`], which is TCP without it. Default `None`.
    pub nixl: Option<NixlLibrary>,
    /// How long a draining worker lets its prompts and handoffs run.
    pub drain_grace: Duration,
    /// Where this worker stands (rack, host), for placement.
    pub topology: String,
}

impl PrefillWorkerConfig {
    /// Loopback ports, no TLS, default times.
    pub fn new(worker_id: WorkerId, engine: EngineConfig) -> Self {
        let free = SocketAddr::from(([127, 0, 0, 1], 0));
        Self {
            worker_id,
            listen: free,
            advertise: None,
            admin_listen: None,
            tls: TlsSettings::default(),
            engine,
            kv_transport: TransportChoice::default(),
            kv_wire: WireChoice::default(),
            nixl: None,
            drain_grace: Duration::from_secs(30),
            topology: String::new(),
        }
    }
}
