//! The unit that is placed, checked and counted: one layer of one block.
//!
//! A *part* is named by (KV group, model layer, block ordinal), never by an
//! address. Parts have one canonical order, by that triple, which the root digest
//! and the list of missing parts both use.

/// Names one layer of one block inside a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PartKey {
    pub group: u16,
    /// Model layer, not the index inside the group.
    pub layer: u32,
    pub ordinal: u32,
}

/// Consecutive ordinals of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PartRange {
    pub group: u16,
    pub layer: u32,
    pub first: u32,
    pub count: u32,
}

impl PartRange {
    /// The parts of the range, ascending.
    pub fn keys(self) -> impl ExactSizeIterator<Item = PartKey> + Clone {
        (0..self.count).map(move |index| PartKey {
            group: self.group,
            layer: self.layer,
            ordinal: self.first.wrapping_add(index),
        })
    }

    /// The key of the last part; `None` for an empty range or one past `u32::MAX`.
    pub fn last(self) -> Option<PartKey> {
        let ordinal = self.first.checked_add(self.count.checked_sub(1)?)?;
        Some(PartKey {
            group: self.group,
            layer: self.layer,
            ordinal,
        })
    }
}

/// Which parts a receiver still lacks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Missing {
    /// In canonical order.
    pub ranges: Vec<PartRange>,
    /// Whether `ranges` is the whole list. If not, every part after the last one
    /// listed counts as missing: sending it again is harmless.
    pub complete: bool,
}

impl Missing {
    /// Nothing is missing.
    pub fn nothing() -> Self {
        Self {
            ranges: Vec::new(),
            complete: true,
        }
    }

    /// Whether nothing is missing.
    pub fn is_nothing(&self) -> bool {
        self.complete && self.ranges.is_empty()
    }

    /// Whether `key` has to be sent.
    pub fn contains(&self, key: PartKey) -> bool {
        let after = self.ranges.partition_point(|range| {
            (range.group, range.layer, range.first) <= (key.group, key.layer, key.ordinal)
        });
        let inside = after.checked_sub(1).is_some_and(|index| {
            let range = self.ranges[index];
            (range.group, range.layer) == (key.group, key.layer)
                && key.ordinal - range.first < range.count
        });
        let beyond = || {
            self.ranges
                .last()
                .and_then(|range| range.last())
                .is_none_or(|last| key > last)
        };
        inside || (!self.complete && beyond())
    }
}

/// Bytes of one part in the root digest.
const ENTRY_BYTES: usize = 14;
/// Parts whose checksums are digested at once: a call for a few bytes costs ten times what
/// the bytes cost.
const ENTRIES_MAX: usize = 128;

/// CRC-32C of `bytes`.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// CRC-32C over a payload that arrives in pieces.
pub(crate) struct Crc32c(crc_fast::Digest);

impl Crc32c {
    pub(crate) fn new() -> Self {
        Self(crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi))
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(crate) fn value(&self) -> u32 {
        self.0.finalize() as u32
    }
}

/// The payload checksum of a data frame: CRC-32C over the little-endian CRC-32Cs of
/// its parts, in order. Each byte is thus read once, and both ends learn each
/// part's own checksum, which the root digest needs.
pub(crate) fn frame_crc(part_crcs: impl Iterator<Item = u32>) -> u32 {
    let mut crc = Crc32c::new();
    let mut bytes = [0; ENTRIES_MAX * size_of::<u32>()];
    let mut filled = 0;
    for part in part_crcs {
        if filled == bytes.len() {
            crc.update(&bytes);
            filled = 0;
        }
        bytes[filled..][..size_of::<u32>()].copy_from_slice(&part.to_le_bytes());
        filled += size_of::<u32>();
    }
    crc.update(&bytes[..filled]);
    crc.value()
}

/// The root digest of a transfer: CRC-32C over (group, layer, ordinal, crc) of every
/// part in canonical order, all little endian.
pub(crate) struct RootDigest {
    crc: Crc32c,
    entries: [u8; ENTRIES_MAX * ENTRY_BYTES],
    filled: usize,
}

impl RootDigest {
    pub(crate) fn new() -> Self {
        Self {
            crc: Crc32c::new(),
            entries: [0; ENTRIES_MAX * ENTRY_BYTES],
            filled: 0,
        }
    }

    pub(crate) fn part(&mut self, key: PartKey, crc: u32) {
        if self.filled == self.entries.len() {
            self.crc.update(&self.entries);
            self.filled = 0;
        }
        let entry = &mut self.entries[self.filled..][..ENTRY_BYTES];
        entry[..2].copy_from_slice(&key.group.to_le_bytes());
        entry[2..6].copy_from_slice(&key.layer.to_le_bytes());
        entry[6..10].copy_from_slice(&key.ordinal.to_le_bytes());
        entry[10..].copy_from_slice(&crc.to_le_bytes());
        self.filled += ENTRY_BYTES;
    }

    pub(crate) fn value(mut self) -> u32 {
        self.crc.update(&self.entries[..self.filled]);
        self.crc.value()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(layer: u32, first: u32, count: u32) -> PartRange {
        PartRange {
            group: 0,
            layer,
            first,
            count,
        }
    }

    fn key(layer: u32, ordinal: u32) -> PartKey {
        PartKey {
            group: 0,
            layer,
            ordinal,
        }
    }

    #[test]
    fn crc32c_has_the_published_check_value() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        let mut pieces = Crc32c::new();
        pieces.update(b"1234");
        pieces.update(b"56789");
        assert_eq!(pieces.value(), 0xE306_9283);
    }

    #[test]
    fn the_root_digest_is_the_checksum_of_all_entries() {
        for parts in [0, 1, ENTRIES_MAX, ENTRIES_MAX + 1, 3 * ENTRIES_MAX + 5] {
            let mut bytes = Vec::new();
            let mut root = RootDigest::new();
            for ordinal in 0..parts as u32 {
                root.part(key(3, ordinal), ordinal * 7);
                bytes.extend_from_slice(&0u16.to_le_bytes());
                for field in [3, ordinal, ordinal * 7] {
                    bytes.extend_from_slice(&field.to_le_bytes());
                }
            }
            assert_eq!(root.value(), crc32c(&bytes), "{parts}");
        }
    }

    #[test]
    fn missing_says_which_parts_to_send() {
        let missing = Missing {
            ranges: vec![range(0, 4, 2), range(2, 0, 1)],
            complete: true,
        };
        for (part, wanted) in [
            (key(0, 3), false),
            (key(0, 4), true),
            (key(0, 5), true),
            (key(0, 6), false),
            (key(1, 4), false),
            (key(2, 0), true),
            (key(9, 9), false),
        ] {
            assert_eq!(missing.contains(part), wanted, "{part:?}");
        }
    }

    #[test]
    fn a_cut_list_counts_everything_after_it_as_missing() {
        let missing = Missing {
            ranges: vec![range(0, 4, 2)],
            complete: false,
        };
        assert!(!missing.contains(key(0, 0)));
        assert!(missing.contains(key(0, 6)) && missing.contains(key(7, 0)));
    }
}
