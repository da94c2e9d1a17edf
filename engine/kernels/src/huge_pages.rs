//! Zeroed memory on huge pages, where the system has them.
//!
//! Weights, KV pools and the working sets of the limit measurements lie in it. Pages nobody writes to cost nothing. Who
//! touches which bytes, and when, is the owner's business: this hands out an address.

use std::io;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// An anonymous private mapping, unmapped when dropped.
#[derive(Debug)]
pub struct HugePages {
    /// Aligned to a huge page.
    start: NonNull<u8>,
    len: usize,
    /// What was mapped, which is one huge page longer for the sake of alignment.
    base: NonNull<u8>,
    advised: bool,
}

// SAFETY: a mapping is an address and a length; dereferencing it is unsafe and the dereferencing code's own duty.
unsafe impl Send for HugePages {}
// SAFETY: as above; a mapping is never changed.
unsafe impl Sync for HugePages {}

impl HugePages {
    /// The size and alignment of a transparent huge page on x86-64 and aarch64 with 4 KiB pages.
    pub const SIZE: usize = 2 << 20;

    /// Maps at least one byte, `len` of them.
    ///
    /// # Errors
    /// What the system says, or that `len` is beyond the address space.
    pub fn map(len: usize) -> io::Result<HugePages> {
        let base_len = len
            .checked_add(HugePages::SIZE)
            .ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: a new anonymous mapping at an address of the system's choice touches no memory of ours.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                base_len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        let base = NonNull::new(base.cast::<u8>()).expect("the system never maps address 0");
        // Advice alone: a system without transparent huge pages works, with small ones.
        // SAFETY: the advice covers the mapping just made and changes no contents.
        let advice = unsafe { madvise(base.as_ptr().cast(), base_len, Advice::LinuxHugepage) };
        let skip = base.as_ptr().align_offset(HugePages::SIZE);
        Ok(HugePages {
            // SAFETY: the mapping is one huge page longer than `len`, so the aligned start and `len` bytes after it
            // stay inside.
            start: unsafe { base.add(skip) },
            len,
            base,
            advised: advice.is_ok(),
        })
    }

    /// The first byte, at a multiple of [`SIZE`](Self::SIZE).
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Whether the system has huge pages to offer.
    pub fn is_advised(&self) -> bool {
        self.advised
    }

    /// Bytes from there on.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        // SAFETY: made by `map` with this address and length, unmapped only here; who uses its bytes holds it.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len + HugePages::SIZE) };
        debug_assert!(unmapped.is_ok(), "unmap of our own mapping: {unmapped:?}");
    }
}
