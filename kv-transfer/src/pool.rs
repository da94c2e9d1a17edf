//! From an owner's pool memory to the regions that lanes touch.
#![allow(unsafe_code)]

use std::sync::Arc;

use baton_proto::pool_memory::PoolMemory;

use crate::region::{MemoryRegion, RegionTable};

/// The regions of `memory`, which stays alive for as long as any of them.
pub fn regions_of<M: PoolMemory + 'static>(memory: &Arc<M>) -> RegionTable {
    memory
        .regions()
        .into_iter()
        .map(|region| {
            let keep = Arc::clone(memory);
            // SAFETY: `PoolMemory` promises that the region is mapped, initialised,
            // readable and writable while `keep` lives, that no reference to it
            // exists, and that its owner leaves granted blocks alone and does not
            // write pinned ones.
            let mapped = unsafe { MemoryRegion::new(region.base.as_ptr(), region.len, keep) };
            match region.fd {
                Some(fd) => mapped.shared(fd),
                None => mapped,
            }
        })
        .collect()
}
