//! What one transfer has pushed, by layer and ascending ordinal.
//!
//! A frame names consecutive ordinals of one layer, so everything that is done to the
//! parts of a frame is one look-up and a walk over neighbours: at 4 KiB a part, a look-up
//! for each would cost as much as its checksum.

use std::collections::BTreeMap;

use baton_proto::kv_layout::ByteExtent;

use super::SourceBlock;
use crate::part::{PartKey, PartRange};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartPhase {
    Queued,
    Sent,
    /// The receiver said that it has it.
    Held,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    ordinal: u32,
    pub(super) phase: PartPhase,
    pub(super) sent_before: bool,
    /// Set by [`Parts::set_checksums`] alone.
    crc: Option<u32>,
    pub(super) extent: ByteExtent,
}

impl Part {
    pub(super) fn new(block: SourceBlock, phase: PartPhase) -> Self {
        Self {
            ordinal: block.ordinal,
            phase,
            sent_before: false,
            crc: None,
            extent: block.extent,
        }
    }

    pub(super) fn crc(&self) -> Option<u32> {
        self.crc
    }
}

#[derive(Default)]
struct Layer {
    /// By ordinal.
    parts: Vec<Part>,
    /// Parts without a checksum.
    unchecked: usize,
}

impl Layer {
    fn index(&self, ordinal: u32) -> Option<usize> {
        // Ordinals without gaps are the rule.
        let first = self.parts.first()?.ordinal;
        let guess = ordinal.checked_sub(first)? as usize;
        if self
            .parts
            .get(guess)
            .is_some_and(|part| part.ordinal == ordinal)
        {
            return Some(guess);
        }
        self.parts
            .binary_search_by_key(&ordinal, |part| part.ordinal)
            .ok()
    }

    /// Where the first parts of `first .. first + count` stand, as far as none is missing.
    fn run(&self, first: u32, count: u32) -> std::ops::Range<usize> {
        let Some(start) = self.index(first) else {
            return 0..0;
        };
        let candidates = self.parts[start..].iter().take(count as usize);
        let present = candidates
            .zip(first..)
            .take_while(|(part, ordinal)| part.ordinal == *ordinal)
            .count();
        start..start + present
    }
}

/// The parts of one transfer.
#[derive(Default)]
pub(super) struct Parts {
    layers: BTreeMap<(u16, u32), Layer>,
    len: usize,
}

impl Parts {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// An ordinal of `blocks`, which ascend, that the layer has already.
    pub(super) fn known(&self, group: u16, layer: u32, blocks: &[SourceBlock]) -> Option<u32> {
        let layer = self.layers.get(&(group, layer))?;
        let last = layer.parts.last()?.ordinal;
        let may_be = blocks.iter().filter(|block| block.ordinal <= last);
        may_be
            .map(|block| block.ordinal)
            .find(|ordinal| layer.index(*ordinal).is_some())
    }

    /// Adds parts, which ascend, of which the layer has none.
    pub(super) fn insert(
        &mut self,
        group: u16,
        layer: u32,
        parts: impl ExactSizeIterator<Item = Part>,
    ) {
        let layer = self.layers.entry((group, layer)).or_default();
        self.len += parts.len();
        layer.unchecked += parts.len();
        let seam = layer.parts.len();
        layer.parts.extend(parts);
        let in_order = match seam.checked_sub(1) {
            Some(last) => layer
                .parts
                .get(seam)
                .is_none_or(|next| layer.parts[last].ordinal < next.ordinal),
            None => true,
        };
        if !in_order {
            layer.parts.sort_unstable_by_key(|part| part.ordinal);
        }
    }

    /// The first parts of `range`, as far as none is missing.
    pub(super) fn run(&self, range: PartRange) -> &[Part] {
        let layer = self.layers.get(&(range.group, range.layer));
        layer.map_or(&[], |layer| {
            &layer.parts[layer.run(range.first, range.count)]
        })
    }

    /// As [`Parts::run`], to be changed.
    pub(super) fn run_mut(&mut self, range: PartRange) -> &mut [Part] {
        match self.layers.get_mut(&(range.group, range.layer)) {
            Some(layer) => {
                let run = layer.run(range.first, range.count);
                &mut layer.parts[run]
            }
            None => &mut [],
        }
    }

    /// Takes the checksums of the first parts of `range`.
    pub(super) fn set_checksums(&mut self, range: PartRange, crcs: &[u32]) {
        let Some(layer) = self.layers.get_mut(&(range.group, range.layer)) else {
            return;
        };
        let run = layer.run(range.first, range.count);
        for (part, &crc) in layer.parts[run].iter_mut().zip(crcs) {
            layer.unchecked -= usize::from(part.crc.is_none());
            part.crc = Some(crc);
        }
    }

    /// The first parts without a checksum, consecutive and at most `parts_max`.
    pub(super) fn unchecked(&self, parts_max: u32) -> Option<(PartRange, &[Part])> {
        let (&(group, layer), parts) = self.layers.iter().find(|(_, layer)| layer.unchecked > 0)?;
        let parts = &parts.parts;
        let start = parts.iter().position(|part| part.crc.is_none())?;
        let first = parts[start].ordinal;
        let run = parts[start..].iter().take(parts_max as usize);
        let count = run
            .zip(first..)
            .take_while(|(part, ordinal)| part.crc.is_none() && part.ordinal == *ordinal)
            .count();
        let range = PartRange {
            group,
            layer,
            first,
            count: count as u32,
        };
        Some((range, &parts[start..start + count]))
    }

    /// Every part, in canonical order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (PartKey, &Part)> {
        self.layers.iter().flat_map(|(&(group, layer), parts)| {
            let key = move |part: &Part| PartKey {
                group,
                layer,
                ordinal: part.ordinal,
            };
            parts.parts.iter().map(move |part| (key(part), part))
        })
    }

    /// As [`Parts::iter`], to be changed.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (PartKey, &mut Part)> {
        self.layers.iter_mut().flat_map(|(&(group, layer), parts)| {
            let key = move |part: &Part| PartKey {
                group,
                layer,
                ordinal: part.ordinal,
            };
            parts.parts.iter_mut().map(move |part| (key(part), part))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(ordinals: &[u32]) -> Vec<SourceBlock> {
        let block = |&ordinal| SourceBlock {
            ordinal,
            extent: ByteExtent {
                offset: u64::from(ordinal) * 8,
                len: 8,
                region: 0,
            },
        };
        ordinals.iter().map(block).collect()
    }

    fn push(parts: &mut Parts, layer: u32, ordinals: &[u32]) {
        let blocks = blocks(ordinals);
        assert_eq!(parts.known(0, layer, &blocks), None);
        let new = |block| Part::new(block, PartPhase::Queued);
        parts.insert(0, layer, blocks.into_iter().map(new));
    }

    fn range(layer: u32, first: u32, count: u32) -> PartRange {
        PartRange {
            group: 0,
            layer,
            first,
            count,
        }
    }

    fn ordinals(parts: &[Part]) -> Vec<u32> {
        parts.iter().map(|part| part.ordinal).collect()
    }

    #[test]
    fn a_run_ends_where_a_part_is_missing_whatever_the_order_of_pushing() {
        let mut parts = Parts::default();
        push(&mut parts, 0, &[4, 5]);
        push(&mut parts, 0, &[9]);
        push(&mut parts, 0, &[0, 6, 7]);
        for (asked, found) in [
            (range(0, 4, 2), vec![4, 5]),
            (range(0, 4, 9), vec![4, 5, 6, 7]),
            (range(0, 0, 3), vec![0]),
            (range(0, 9, 1), vec![9]),
            (range(0, 9, u32::MAX), vec![9]),
            (range(0, 1, 1), vec![]),
            (range(0, 8, 2), vec![]),
            (range(1, 4, 1), vec![]),
        ] {
            assert_eq!(ordinals(parts.run(asked)), found, "{asked:?}");
            assert_eq!(ordinals(parts.run_mut(asked)), found, "{asked:?}");
        }
        let keys: Vec<u32> = parts.iter().map(|(key, _)| key.ordinal).collect();
        assert_eq!(keys, [0, 4, 5, 6, 7, 9]);
        assert_eq!(parts.len(), 6);
        for twice in [&[5][..], &[0], &[1, 2, 9], &[7, 100]] {
            assert!(parts.known(0, 0, &blocks(twice)).is_some(), "{twice:?}");
        }
        assert_eq!(parts.known(0, 1, &blocks(&[5])), None);
    }

    #[test]
    fn what_has_no_checksum_is_found_until_nothing_is_left() {
        let mut parts = Parts::default();
        push(&mut parts, 2, &[0, 1, 2, 4]);
        push(&mut parts, 1, &[7]);
        parts.set_checksums(range(2, 1, 1), &[5]);
        let mut found = Vec::new();
        while let Some((range, run)) = parts.unchecked(2) {
            assert_eq!(run.len(), range.count as usize);
            found.push((range.layer, range.first, range.count));
            parts.set_checksums(range, &vec![6; run.len()]);
        }
        assert_eq!(found, [(1, 7, 1), (2, 0, 1), (2, 2, 1), (2, 4, 1)]);
        let crcs: Vec<_> = parts.iter().map(|(_, part)| part.crc()).collect();
        assert_eq!(crcs, [Some(6), Some(6), Some(5), Some(6), Some(6)]);
        // Again, for parts that have one: no count goes astray.
        parts.set_checksums(range(2, 0, 3), &[1, 2, 3]);
        assert!(parts.unchecked(2).is_none());
    }
}
