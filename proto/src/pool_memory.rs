//! The one promise between whoever owns KV pool memory and whoever moves its bytes.
//!
//! The engine owns the pools and knows no transport; a transport moves bytes and
//! knows no engine. Both know this trait, and the [`SharedMemory`] that an owner takes
//! its pool from if other processes of the host are to read it.

mod shared;

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

pub use shared::{SIZE_IS_FINAL, SharedMemory};

/// One pool as raw memory.
#[derive(Clone, Debug)]
pub struct RawRegion {
    pub base: NonNull<u8>,
    pub len: usize,
    /// What another process can map it by, read-only; `None` if none can.
    pub fd: Option<Arc<OwnedFd>>,
}

/// The memory of a worker's KV pools, one region per KV group, in order.
///
/// # Safety
/// An implementation promises that every region stays mapped, initialised, readable
/// and writable for as long as `self` lives, and that no Rust reference to its
/// bytes exists. Who may touch which bytes when is settled by grants (receiving)
/// and pins (sending): an owner never touches blocks that it has granted, and never
/// writes blocks that it has pinned.
#[allow(unsafe_code)]
pub unsafe trait PoolMemory: Send + Sync {
    /// The regions; the same at every call.
    fn regions(&self) -> Vec<RawRegion>;
}
