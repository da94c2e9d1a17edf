//! Memory that another process of this host has lent, and the region that lends it.
//!
//! What is lent is a [`SharedMemory`]: read-only for us, of a final size, gone with its last
//! mapping.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use baton_proto::kv_layout::ByteExtent;
pub use baton_proto::pool_memory::SharedMemory;

use baton_proto::pool_memory::SIZE_IS_FINAL;
use rustix::fs::{fcntl_get_seals, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::region::MemoryRegion;
use crate::streaming::{self, Ahead, Run};

/// A mapped run of bytes, unmapped with its last owner.
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address and a length; whoever touches the bytes says how that is ordered.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(fd: BorrowedFd<'_>, len: usize, protection: ProtFlags) -> io::Result<Self> {
        // SAFETY: a fresh mapping at an address of the kernel's choice touches nothing else.
        let base = unsafe { mmap(null_mut(), len, protection, MapFlags::SHARED, fd, 0) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that `new` made, and nobody else unmaps it. It fails
        // for a wrong address or length only.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// The segment as a region that a sender can lend to receivers of this host.
///
/// # Safety
/// The promises of [`MemoryRegion::new`]; that it stays mapped is kept here.
pub unsafe fn region_of(memory: &Arc<SharedMemory>) -> MemoryRegion {
    let keep: Arc<SharedMemory> = Arc::clone(memory);
    // SAFETY: the mapping lives as long as `keep` and is initialised, readable and
    // writable; the rest is the caller's promise.
    let region = unsafe { MemoryRegion::new(memory.base().as_ptr(), memory.len(), keep) };
    region.shared(Arc::clone(memory.fd()))
}

/// What a peer has lent: its regions, for reading.
pub(crate) struct PeerMemory(Vec<Mapping>);

impl PeerMemory {
    /// Maps segments that came from a peer.
    ///
    /// # Errors
    /// [`io::ErrorKind::PermissionDenied`] unless their sizes are final.
    pub(crate) fn map(fds: &[OwnedFd]) -> io::Result<Self> {
        let map = |fd: &OwnedFd| {
            if !fcntl_get_seals(fd)?.contains(SIZE_IS_FINAL) {
                return Err(io::ErrorKind::PermissionDenied.into());
            }
            let len = usize::try_from(fstat(fd)?.st_size).map_err(io::Error::other)?;
            Mapping::new(fd.as_fd(), len, ProtFlags::READ)
        };
        fds.iter().map(map).collect::<io::Result<_>>().map(Self)
    }

    /// Whether `extent` lies in what was lent.
    pub(crate) fn holds(&self, extent: ByteExtent) -> bool {
        let end = extent.offset.checked_add(u64::from(extent.len));
        let region = self.0.get(usize::from(extent.region));
        let fits = region
            .zip(end)
            .is_some_and(|(mapping, end)| end <= mapping.len as u64);
        fits && extent.len > 0
    }

    /// The bytes of `extents`, all of which it [`PeerMemory::holds`], in order.
    pub(crate) fn read<'a>(
        &'a self,
        extents: &'a [ByteExtent],
    ) -> PeerBytes<'a, impl Iterator<Item = Run>> {
        let run = |extent: &ByteExtent| {
            let base = self.0[usize::from(extent.region)].base.as_ptr();
            // Not touched: a hint needs no bounds.
            let base = base.wrapping_add(extent.offset as usize);
            Run::new(base, extent.len as usize)
        };
        PeerBytes {
            memory: self,
            extents,
            from: 0,
            ahead: Ahead::of(extents.iter().map(run)),
        }
    }
}

/// Bytes of a peer, read in order.
pub(crate) struct PeerBytes<'a, I> {
    memory: &'a PeerMemory,
    /// The first one from `from` on.
    extents: &'a [ByteExtent],
    from: usize,
    ahead: Ahead<I>,
}

impl<I: Iterator<Item = Run>> PeerBytes<'_, I> {
    /// Fills `buffer` with the next bytes, as far as there are any.
    pub(crate) fn fill(&mut self, mut buffer: &mut [u8]) {
        while let Some((extent, rest)) = self.extents.split_first() {
            assert!(self.memory.holds(*extent), "an extent nobody looked at");
            let len = extent.len as usize;
            let step = buffer.len().min(len - self.from).min(streaming::step(len));
            self.ahead.reader_takes(step);
            let base = self.memory.0[usize::from(extent.region)].base;
            // SAFETY: inside the mapping (`holds`) and the buffer. The peer may write
            // meanwhile if it breaks its promise; no reference to its bytes is made, and
            // what was copied is checked by its checksum.
            unsafe {
                let source = base.as_ptr().add(extent.offset as usize + self.from);
                std::ptr::copy_nonoverlapping(source, buffer.as_mut_ptr(), step);
            }
            buffer = &mut buffer[step..];
            self.from += step;
            if self.from == len {
                (self.extents, self.from) = (rest, 0);
            }
            if buffer.is_empty() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    fn extent(offset: u64, len: u32, region: u16) -> ByteExtent {
        ByteExtent {
            offset,
            len,
            region,
        }
    }

    fn filled(len: usize) -> SharedMemory {
        let memory = SharedMemory::new(len).unwrap();
        for index in 0..len {
            // SAFETY: inside the mapping, which nobody else knows.
            unsafe { memory.base().add(index).write(index as u8) };
        }
        memory
    }

    fn lent(memory: &SharedMemory) -> Vec<OwnedFd> {
        vec![memory.fd().try_clone().unwrap()]
    }

    #[test]
    fn a_peer_sees_the_bytes_and_only_what_was_lent() {
        let memory = filled(64);
        let peer = PeerMemory::map(&lent(&memory)).unwrap();
        assert!(peer.holds(extent(0, 64, 0)));
        for outside in [
            extent(0, 65, 0),
            extent(u64::MAX, 2, 0),
            extent(0, 0, 0),
            extent(0, 1, 1),
        ] {
            assert!(!peer.holds(outside), "{outside:?}");
        }
        let mut out = [0; 9];
        let (first, second) = out.split_at_mut(3);
        let extents = [extent(10, 4, 0), extent(40, 4, 0)];
        let mut bytes = peer.read(&extents);
        bytes.fill(first);
        bytes.fill(second);
        assert_eq!(out, [10, 11, 12, 13, 40, 41, 42, 43, 0]);
    }

    #[test]
    fn a_peer_can_neither_write_nor_resize_what_was_lent() {
        let memory = filled(64);
        let fds = lent(&memory);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        assert!(Mapping::new(fds[0].as_fd(), 64, protection).is_err());
        assert!(ftruncate(&fds[0], 0).is_err());
        assert!(ftruncate(&fds[0], 128).is_err());
    }

    #[test]
    fn a_segment_that_could_shrink_is_not_mapped() {
        let fd = memfd_create("loose", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, 64).unwrap();
        assert!(PeerMemory::map(&[fd]).is_err());
    }
}
