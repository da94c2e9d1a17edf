//! What lies between the workers of a run.

use std::time::{Duration, Instant};

use baton_kv_transfer::DataPort;
use baton_kv_transfer::fault_proxy::FaultProxy;
use baton_kv_transfer::mem::{Link, Network};

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
    },
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
