//! NIXL: one process reads another's memory over whatever fabric UCX finds, RDMA included.
//!
//! A prefill worker *lends*: its [`NixlLender`] registers the pools once, with an agent whose
//! name and keys go to a receiver inside an authenticated lane. A decode worker *pulls*: each
//! lane of its data port has an agent of its own, reads what a frame offers into a staging
//! area, and from there the bytes go the way of all others: copied under the write guard,
//! checked, acknowledged. So no device ever writes into a block, and a lane that ends takes
//! its agent, and every read that may still be under way, with it.
//!
//! The library is opened when a flag names it; nothing of it is linked. Without the cargo
//! feature `nixl` everything here is refused by name. NIXL authenticates and encrypts nothing:
//! use it on a fabric that is trusted, also with TLS on the lanes.

#[cfg(not(feature = "nixl"))]
mod absent;
#[cfg(feature = "nixl")]
mod agent;
#[cfg(any(feature = "nixl", test))]
mod library;
pub(crate) mod pull;
mod ring;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;

#[cfg(not(feature = "nixl"))]
use absent as agent;
pub(crate) use agent::Reads;

use crate::codec::{CONTROL_BYTES_MAX, Control};
use crate::region::RegionTable;

/// Bytes at the sender that a receiver reads first, to see that the way leads there.
pub(crate) const PROBE_BYTES: usize = 32;
/// Regions one sender may lend.
pub(crate) const REGIONS_MAX: usize = 64;

/// Why NIXL cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NixlError {
    /// The program has no code for it.
    #[error("this program was built without NIXL: build it with `--features nixl`")]
    NotBuilt,
    /// Neither a library nor a folder that has one.
    #[error(
        "there is no libnixl_capi.so at `{0}`: name the file, its folder, or the Python \
         environment or site-packages folder that nixl-cu12 or nixl-cu13 is installed in"
    )]
    NotFound(PathBuf),
    /// The dynamic linker refused it.
    #[error("`{path}` cannot be opened: {reason}")]
    Open { path: PathBuf, reason: String },
    /// It is too old, or too new.
    #[error("`{path}` lacks `{name}`, which this program calls: use NIXL 1.5")]
    EntryPoint { path: PathBuf, name: &'static str },
    /// NIXL itself said no.
    #[error("NIXL cannot {what}: {reason}")]
    Failed { what: &'static str, reason: String },
}

/// NIXL's library, opened and found usable.
#[derive(Clone, Debug)]
pub struct NixlLibrary {
    loaded: agent::Loaded,
}

impl NixlLibrary {
    /// Opens the library at `path`: the file, or a folder that it is in, among them a Python
    /// environment's. An agent with the UCX backend is made and dropped, so that what is
    /// missing shows here.
    ///
    /// # Errors
    /// [`NixlError`], which says what is missing. A process opens one library: a second
    /// path is refused.
    pub fn open(path: &Path) -> Result<Self, NixlError> {
        Ok(Self {
            loaded: agent::Loaded::open(path)?,
        })
    }
}

/// This process' pools, registered with a NIXL agent for receivers to read. Cheap to clone;
/// the last clone ends the agent.
#[derive(Clone)]
pub struct NixlLender {
    lent: Arc<agent::Lent>,
}

impl NixlLender {
    /// Registers every region; on RDMA that pins them.
    ///
    /// # Errors
    /// [`NixlError::Failed`].
    pub fn new(library: &NixlLibrary, regions: &RegionTable) -> Result<Self, NixlError> {
        let lent = Arc::new(agent::Lent::new(&library.loaded, regions)?);
        let lender = Self { lent };
        let bytes = lender.control().encode(crate::codec::Scope::LANE).len();
        if regions.len() > REGIONS_MAX || bytes > CONTROL_BYTES_MAX {
            return Err(NixlError::Failed {
                what: "describe this worker's memory to others",
                reason: format!("`{}` regions take `{bytes}` bytes", regions.len()),
            });
        }
        Ok(lender)
    }

    /// What a receiver has to know.
    pub(crate) fn control(&self) -> Control {
        Control::Lend(self.lent.lend())
    }

    /// The same, for tests that say it themselves.
    #[cfg(feature = "test-support")]
    pub fn lend(&self) -> Lend {
        self.lent.lend()
    }
}

impl fmt::Debug for NixlLender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NixlLender(..)")
    }
}

/// Memory that its owner lends over NIXL, as a lane's first frame says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lend {
    /// What lies at `probe_at`.
    pub probe: [u8; PROBE_BYTES],
    pub probe_at: u64,
    /// Address and length of each region, in the order that extents count in.
    pub regions: Vec<(u64, u64)>,
    /// What NIXL at the other end needs to know of the owner's agent.
    pub metadata: Bytes,
}

/// A name that no other agent has, in this life of the process or another.
#[cfg(feature = "nixl")]
fn agent_name(role: &str) -> String {
    format!("baton-{role}-{:032x}", rand::random::<u128>())
}
