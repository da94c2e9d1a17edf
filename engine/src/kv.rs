//! KV memory: the pools' bytes, who holds which block, and which prefixes are cached.
//!
//! ```text
//! memory        the bytes: one region per KvGroup, raw, for kernels and lanes
//! block_pool    the state of every block of one group, its eviction and the prefix index
//! space         how much memory there can be at all
//! convert       a peer's layers of another type as ours
//! tables        a sequence's blocks in all groups: grow, share, copy on write, look-up
//! ```
//!
//! Nothing here knows sequences' tokens beyond their hashes, schedules or moves
//! bytes; the core does.

pub mod block_pool;
pub mod convert;
pub mod memory;
mod pool_memory;
mod space;
pub mod tables;

pub use block_pool::{BlockPool, BlockState};
pub use convert::LayerConverter;
pub use memory::{KvMemory, PoolSharing, Region};
pub use tables::{Hit, Pools, Tables};

/// Why a pool could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("kv layout: {0}")]
    Layout(#[from] baton_proto::Error),
    #[error("`{given}` pool sizes for `{groups}` kv groups")]
    GroupCount { given: usize, groups: usize },
    #[error("kv group {group}: `{blocks}` blocks, at least 1 and at most `{max}` are allowed")]
    BlockCount { group: usize, blocks: u32, max: u32 },
    #[error("kv group {group}: the kernels refuse the layout: {source}")]
    Kernels {
        group: usize,
        source: baton_kernels::Error,
    },
    #[error("convert kv of another type: {0}")]
    Convert(baton_kernels::Error),
    #[error(
        "the pools need `{bytes}` bytes, this process can have `{most}` at most: \
         fewer tokens of kv, or a smaller type"
    )]
    NoSpace { bytes: u64, most: u64 },
    #[error("kv group {group}: map `{bytes}` bytes: {source}")]
    Map {
        group: usize,
        bytes: usize,
        source: std::io::Error,
    },
}

impl Error {
    /// What the caller should do about it.
    pub fn kind(&self) -> baton_proto::ErrorKind {
        match self {
            Self::Map { .. } => baton_proto::ErrorKind::Overloaded,
            _ => baton_proto::ErrorKind::Invalid,
        }
    }
}
