//! [`KvMemory`] as the transports see it.
#![allow(unsafe_code)]

use baton_proto::pool_memory::{PoolMemory, RawRegion};

use super::KvMemory;

// SAFETY: the regions are mappings that `KvMemory` unmaps only when it is
// dropped; they are zeroed and thus initialised, and no reference ever spans them.
// The block pool never hands a reserved, quarantined or pinned block to a sequence
// that writes it.
unsafe impl PoolMemory for KvMemory {
    fn regions(&self) -> Vec<RawRegion> {
        (0..self.layout().groups.len())
            .map(|group| (self.region(group), self.fd(group)))
            .map(|(region, fd)| RawRegion {
                base: region.ptr,
                len: region.len,
                fd,
            })
            .collect()
    }
}
