//! What lies between the workers of a run.

use std::time::{Duration, Instant};

use baton_kv_transfer::fault_proxy::FaultProxy;
use baton_kv_transfer::mem::{Link, Network};
use baton_kv_transfer::sender::{SenderConfig, TransportKind};
use baton_kv_transfer::{DataPort, DataPortConfig};

use crate::pool::Pool;

/// What lies between the workers.
pub enum Fabric {
    Mem {
        network: Network,
        link: Link,
    },
    Tcp {
        port: Option<DataPort>,
        proxy: FaultProxy,
        leases: Leases,
    },
    Shared {
        /// Ends with the world.
        _port: DataPort,
        leases: Leases,
        lending: Lending,
    },
}

/// How receivers come by memory that is lent to them.
#[derive(Clone, Debug)]
pub enum Lending {
    /// They map it.
    SharedMemory,
    /// They read it over NIXL.
    #[cfg(feature = "nixl")]
    Nixl(baton_kv_transfer::NixlLibrary),
}

impl Lending {
    pub fn transport(&self) -> TransportKind {
        match self {
            Self::SharedMemory => TransportKind::SharedMemory,
            #[cfg(feature = "nixl")]
            Self::Nixl(_) => TransportKind::Nixl,
        }
    }

    /// Whether a lane takes long to begin.
    pub fn is_slow_to_start(&self) -> bool {
        !matches!(self, Self::SharedMemory)
    }

    /// Gives a sender time for a lane that takes long to begin.
    pub fn be_patient(&self, config: &mut SenderConfig) {
        if self.is_slow_to_start() {
            config.connect_timeout = Leases::LONG.silence;
            config.reconnect_max = Leases::LONG.lease;
        }
    }

    /// What another process is told, to do the same.
    pub fn name(&self) -> String {
        format!("{:?}", self.transport())
    }

    /// A pool that can be lent like this.
    pub fn pool(&self, blocks: usize, layers: u32, part_bytes: u32) -> Pool {
        match self {
            Self::SharedMemory => Pool::shared(blocks, layers, part_bytes),
            #[cfg(feature = "nixl")]
            Self::Nixl(_) => Pool::new(blocks, layers, part_bytes),
        }
    }

    pub fn sender(&self, config: &mut SenderConfig) {
        config.transports = vec![self.transport()];
        #[cfg(feature = "nixl")]
        if let Self::Nixl(library) = self {
            let lender = baton_kv_transfer::NixlLender::new(library, &config.regions);
            config.nixl = Some(lender.unwrap());
        }
    }

    pub fn port(&self, config: &mut DataPortConfig) {
        #[cfg(feature = "nixl")]
        if let Self::Nixl(library) = self {
            config.nixl = Some(library.clone());
        }
        let _ = config;
    }
}

/// Times of the lanes over TCP.
#[derive(Clone, Copy)]
pub struct Leases {
    pub ping: Duration,
    pub silence: Duration,
    pub lease: Duration,
}

impl Leases {
    /// For runs that have to see a peer's death; a starved thread looks like one.
    pub const SHORT: Self = Self {
        ping: Duration::from_millis(50),
        silence: Duration::from_millis(250),
        lease: Duration::from_millis(400),
    };
    /// For runs in which nobody dies, however busy the machine is.
    pub const LONG: Self = Self {
        ping: Duration::from_millis(250),
        silence: Duration::from_secs(10),
        lease: Duration::from_secs(15),
    };
}

impl Fabric {
    /// Lets go of what holds itself.
    pub fn end(&self) {
        if let Self::Mem { network, .. } = self {
            network.end();
        }
    }

    pub fn now(&self) -> Instant {
        match self {
            Self::Mem { network, .. } => network.now(),
            Self::Tcp { .. } | Self::Shared { .. } => Instant::now(),
        }
    }

    /// Tells that the workers did something.
    pub fn poke(&self) {
        if let Self::Mem { network, .. } = self {
            network.poke();
        }
    }

    /// Lets the lanes work, at most until then.
    pub fn step(&self, until: Instant) {
        match self {
            Self::Mem { network, .. } => drop(network.step(until)),
            Self::Tcp { .. } | Self::Shared { .. } => {
                let left = until.saturating_duration_since(Instant::now());
                std::thread::sleep(left.min(Duration::from_millis(1)));
            }
        }
    }
}
