//! Memory for weights: one behind the other, on huge pages.
//!
//! A step reads all weights front to back. With 4 KiB pages the hardware's prefetching stops at every page's end and
//! most pages miss the TLB; with huge pages, and matrices side by side in the order they are used, it reads on from one
//! matrix into the next. Packed matrices keep the mapping they lie in alive.

use std::sync::Arc;

use crate::{Error, HugePages};

/// What is mapped at once. Pages nobody writes to cost nothing.
const MAPPING: usize = 64 << 20;
/// Matrices start on cache lines.
const ALIGN: usize = 64;

/// Where matrices are packed to, one behind the other.
#[derive(Debug, Default)]
pub struct WeightMemory {
    mapping: Option<Arc<HugePages>>,
    used: usize,
}

impl WeightMemory {
    pub fn new() -> WeightMemory {
        WeightMemory::default()
    }

    /// `len` zeroed bytes behind those taken last.
    pub(crate) fn take(&mut self, len: usize) -> Result<Region, Error> {
        let mapping = match &self.mapping {
            Some(mapping) if mapping.len() - self.used >= len => mapping,
            _ => {
                self.used = 0;
                let bytes = len.max(MAPPING);
                let mapping =
                    HugePages::map(bytes).map_err(|error| Error::memory(bytes, &error))?;
                self.mapping.insert(Arc::new(mapping))
            }
        };
        let region = Region {
            mapping: Arc::clone(mapping),
            start: self.used,
            len,
        };
        self.used = (self.used + len).next_multiple_of(ALIGN).min(mapping.len());
        Ok(region)
    }
}

/// Some bytes of a mapping that nobody else has.
#[derive(Debug)]
pub(crate) struct Region {
    mapping: Arc<HugePages>,
    start: usize,
    len: usize,
}

impl Region {
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the range was cut from the mapping, which `self` keeps; it is written through `bytes_mut` only, which
        // borrows `self` mutably, and no other region covers it.
        unsafe {
            std::slice::from_raw_parts(self.mapping.start().as_ptr().add(self.start), self.len)
        }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `self` is borrowed mutably.
        unsafe {
            std::slice::from_raw_parts_mut(self.mapping.start().as_ptr().add(self.start), self.len)
        }
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
        assert!(
            first
                .bytes()
                .as_ptr()
                .addr()
                .is_multiple_of(HugePages::SIZE)
        );
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
