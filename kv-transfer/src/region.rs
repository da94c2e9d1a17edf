//! The raw memory that blocks live in, and the only place where bytes of it are
//! turned into slices.
//!
//! The engine owns the pools; it hands this crate one [`MemoryRegion`] per KV
//! group. A [`ByteExtent`] names a run of bytes in one of them. This file checks
//! bounds; *when* an extent may be touched is decided by the guards of the
//! receiver and the sender, never here.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use baton_proto::kv_layout::ByteExtent;

use crate::error::Error;

/// One KV pool as raw memory, indexed by [`ByteExtent::region`].
#[derive(Clone)]
pub struct MemoryRegion {
    base: *mut u8,
    len: usize,
    /// Keeps the allocation alive for as long as any lane may touch it.
    _keep: Arc<dyn Any + Send + Sync>,
    /// What another process can map it by.
    fd: Option<Arc<OwnedFd>>,
    #[cfg(feature = "test-support")]
    watch: Option<Watch>,
}

/// Told of every access to a region, before it happens.
#[cfg(feature = "test-support")]
type Watch = Arc<dyn Fn(Access) + Send + Sync>;

/// Bytes of a region that a lane is about to read or write.
#[cfg(feature = "test-support")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    pub offset: u64,
    pub len: u32,
    pub write: bool,
}

// SAFETY: the region is an address and a length; the bytes are only touched through
// `RegionTable::{read, write}`, whose callers hold the guard that orders accesses,
// and `_keep` is itself Send and keeps the allocation alive.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above; a shared region offers no access to its bytes by itself.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Describes `len` bytes at `base`.
    ///
    /// # Safety
    /// The caller promises for the life of `keep`:
    /// - `base .. base + len` is one allocation, initialised, readable and writable;
    /// - while an extent of it is granted to a [`crate::receiver::Receiver`] (from
    ///   `grant` until `Completed`, or until `revoke` returns), nobody else reads
    ///   or writes those bytes and no other grant names them;
    /// - while an extent of it is pushed to a [`crate::sender::Transfer`] (from
    ///   `push` until `quiesced` resolves), nobody writes those bytes.
    pub unsafe fn new(base: *mut u8, len: usize, keep: Arc<dyn Any + Send + Sync>) -> Self {
        Self {
            base,
            len,
            _keep: keep,
            fd: None,
            #[cfg(feature = "test-support")]
            watch: None,
        }
    }

    /// The same region, which other processes can map by `fd`.
    pub(crate) fn shared(self, fd: Arc<OwnedFd>) -> Self {
        Self {
            fd: Some(fd),
            ..self
        }
    }

    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(|fd| fd.as_fd())
    }

    /// The same region, with a word to `watch` before each access of a lane.
    #[cfg(feature = "test-support")]
    pub fn watched(self, watch: impl Fn(Access) + Send + Sync + 'static) -> Self {
        Self {
            watch: Some(Arc::new(watch)),
            ..self
        }
    }

    #[cfg(feature = "test-support")]
    fn tell(&self, extent: ByteExtent, from: usize, write: bool) {
        if let Some(watch) = &self.watch {
            watch(Access {
                offset: extent.offset + from as u64,
                len: extent.len - from as u32,
                write,
            });
        }
    }

    #[cfg(not(feature = "test-support"))]
    fn tell(&self, _extent: ByteExtent, _from: usize, _write: bool) {}

    /// Where it lies.
    #[cfg(feature = "nixl")]
    pub(crate) fn address(&self) -> usize {
        self.base as usize
    }

    /// Bytes of the region.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryRegion({} bytes)", self.len)
    }
}

/// Every region of one side, in the order that [`ByteExtent::region`] counts in.
pub type RegionTable = Vec<MemoryRegion>;

/// Checks that `extent` lies inside `regions` and is of a size a frame can carry.
///
/// # Errors
/// [`Error::Extent`] with the extent's numbers.
pub(crate) fn check(regions: &[MemoryRegion], extent: ByteExtent) -> Result<(), Error> {
    let end = extent.offset.checked_add(u64::from(extent.len));
    let fits = regions
        .get(usize::from(extent.region))
        .zip(end)
        .is_some_and(|(region, end)| end <= region.len as u64);
    if fits && extent.len > 0 && extent.len as usize <= crate::codec::PAYLOAD_BYTES_MAX {
        Ok(())
    } else {
        Err(Error::Extent {
            region: extent.region,
            offset: extent.offset,
            len: extent.len,
        })
    }
}

/// The bytes `from .. len` of a checked extent, for reading.
///
/// # Safety
/// The caller holds a read guard of the transfer that the extent was pushed to,
/// for as long as the slice lives, and the extent passed [`check`] against `regions`.
pub(crate) unsafe fn read(regions: &[MemoryRegion], extent: ByteExtent, from: usize) -> &[u8] {
    debug_assert!(check(regions, extent).is_ok() && from <= extent.len as usize);
    let region = &regions[usize::from(extent.region)];
    region.tell(extent, from, false);
    // SAFETY: `check` bounded offset + len by the region, `from` by the extent; the
    // guard excludes writers (promise of `MemoryRegion::new`).
    unsafe {
        std::slice::from_raw_parts(
            region.base.add(extent.offset as usize + from).cast_const(),
            extent.len as usize - from,
        )
    }
}

/// The bytes `from .. len` of a checked extent, for writing.
///
/// # Safety
/// The caller holds the write guard of the ticket that the extent was granted to,
/// for as long as the slice lives, asks for each byte at most once within it, and the extent
/// passed [`check`] against `regions`.
#[allow(clippy::mut_from_ref)]
pub(crate) unsafe fn write(regions: &[MemoryRegion], extent: ByteExtent, from: usize) -> &mut [u8] {
    debug_assert!(check(regions, extent).is_ok() && from <= extent.len as usize);
    let region = &regions[usize::from(extent.region)];
    region.tell(extent, from, true);
    // SAFETY: `check` bounded offset + len by the region, `from` by the extent; the
    // write guard is exclusive per ticket and no two grants share bytes.
    unsafe {
        std::slice::from_raw_parts_mut(
            region.base.add(extent.offset as usize + from),
            extent.len as usize - from,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_outside_the_region_are_refused() {
        let mut bytes = vec![0u8; 64];
        // SAFETY: `bytes` outlives `regions`; nothing touches it meanwhile.
        let regions = vec![unsafe { MemoryRegion::new(bytes.as_mut_ptr(), 64, Arc::new(())) }];
        let extent = |offset, len, region| ByteExtent {
            offset,
            len,
            region,
        };
        assert!(check(&regions, extent(0, 64, 0)).is_ok());
        for bad in [
            extent(0, 65, 0),
            extent(u64::MAX, 2, 0),
            extent(0, 1, 1),
            extent(3, 0, 0),
        ] {
            assert!(check(&regions, bad).is_err(), "{bad:?}");
        }
    }
}
