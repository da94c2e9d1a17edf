//! Memory for weights: one behind the other, on huge pages.
//!
//! A step reads all weights front to back. With 4 KiB pages the hardware's prefetching stops at every page's end and
//! most pages miss the TLB; with huge pages, and matrices side by side in the order they are used, it reads on from one
//! matrix into the next. Packed matrices keep the mapping they lie in alive.

use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::Error;

/// The size and alignment of a transparent huge page on x86-64 and aarch64 with 4 KiB pages.
const HUGE_PAGE: usize = 2 << 20;
/// What is mapped at once. Pages nobody writes to cost nothing.
const MAPPING: usize = 64 << 20;
/// Matrices start on cache lines.
const ALIGN: usize = 64;

/// Where matrices are packed to, one behind the other.
#[derive(Debug, Default)]
pub struct WeightMemory {
    mapping: Option<Arc<Mapping>>,
    used: usize,
}

impl WeightMemory {
    pub fn new() -> WeightMemory {
        WeightMemory::default()
    }

    /// `len` zeroed bytes behind those taken last.
    pub(crate) fn take(&mut self, len: usize) -> Result<Region, Error> {
        let mapping = match &self.mapping {
            Some(mapping) if mapping.len - self.used >= len => mapping,
            _ => {
                self.used = 0;
                self.mapping
                    .insert(Arc::new(Mapping::new(len.max(MAPPING))?))
            }
        };
        let region = Region {
            mapping: Arc::clone(mapping),
            start: self.used,
            len,
        };
        self.used = (self.used + len).next_multiple_of(ALIGN).min(mapping.len);
        Ok(region)
    }
}

/// Some bytes of a mapping that nobody else has.
#[derive(Debug)]
pub(crate) struct Region {
    mapping: Arc<Mapping>,
    start: usize,
    len: usize,
}

impl Region {
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the range was cut from the mapping, which `self` keeps; it is written through `bytes_mut` only, which
        // borrows `self` mutably, and no other region covers it.
        unsafe { std::slice::from_raw_parts(self.mapping.start.as_ptr().add(self.start), self.len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `self` is borrowed mutably.
        unsafe {
            std::slice::from_raw_parts_mut(self.mapping.start.as_ptr().add(self.start), self.len)
        }
    }
}

#[derive(Debug)]
struct Mapping {
    /// Aligned to a huge page.
    start: NonNull<u8>,
    len: usize,
    /// What was mapped, which is longer for the sake of alignment.
    base: NonNull<u8>,
    base_len: usize,
}

// SAFETY: a mapping is an address and a length; who touches which bytes is `Region`'s business.
unsafe impl Send for Mapping {}
// SAFETY: as above; a mapping is never changed.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(len: usize) -> Result<Mapping, Error> {
        let refused = |reason: String| Error::Memory { bytes: len, reason };
        let base_len = len
            .checked_next_multiple_of(HUGE_PAGE)
            .and_then(|len| len.checked_add(HUGE_PAGE))
            .ok_or(Error::TooLarge)?;
        // SAFETY: a new anonymous mapping at an address of the system's choice touches no memory of ours.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                base_len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(|error| refused(error.to_string()))?;
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| refused("the system mapped address 0".to_owned()))?;
        let skip = base.as_ptr().align_offset(HUGE_PAGE).min(HUGE_PAGE);
        let mapping = Mapping {
            // SAFETY: `skip` is at most one huge page, which the mapping has in excess.
            start: unsafe { base.add(skip) },
            len: base_len - HUGE_PAGE,
            base,
            base_len,
        };
        // Advice alone: a system without transparent huge pages works, with small ones.
        // SAFETY: the range lies within the mapping just made, and the advice changes no contents.
        let _ = unsafe {
            madvise(
                mapping.start.as_ptr().cast(),
                mapping.len,
                Advice::LinuxHugepage,
            )
        };
        Ok(mapping)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by `new` with this address and length, unmapped only here; regions hold the mapping.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.base_len) };
        debug_assert!(unmapped.is_ok(), "unmap of our own mapping: {unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_follow_each_other_on_cache_lines_and_do_not_overlap() {
        let mut memory = WeightMemory::new();
        let mut first = memory.take(100).unwrap();
        let second = memory.take(64).unwrap();
        first.bytes_mut().fill(7);
        assert_eq!(second.bytes(), [0; 64]);
        let distance = second.bytes().as_ptr().addr() - first.bytes().as_ptr().addr();
        assert_eq!(distance, 128);
        assert!(first.bytes().as_ptr().addr().is_multiple_of(HUGE_PAGE));
    }

    #[test]
    fn a_region_larger_than_a_mapping_has_its_own_and_the_rest_goes_on() {
        let mut memory = WeightMemory::new();
        let small = memory.take(10).unwrap();
        let mut large = memory.take(MAPPING + 1).unwrap();
        large.bytes_mut()[MAPPING] = 1;
        let after = memory.take(10).unwrap();
        assert_eq!(after.bytes(), [0; 10]);
        drop((memory, large));
        assert_eq!(small.bytes(), [0; 10]);
    }

    #[test]
    fn memory_the_system_does_not_have_is_an_error() {
        assert!(WeightMemory::new().take(usize::MAX / 2).is_err());
    }
}
