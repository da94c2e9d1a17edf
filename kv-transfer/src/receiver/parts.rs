//! Which parts a grant consists of, where each goes, and which have arrived.
//!
//! Parts are numbered in canonical order (group, layer, ordinal), so that
//! consecutive ordinals of a layer are consecutive numbers and the root digest is
//! one walk over the numbers.
//!
//! Parts are the sender's. If its layout is another one ([`PartTable::arrange`]), the
//! table numbers what such a sender sends for the blocks granted, and says which pieces
//! of the blocks each part fills.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use baton_proto::kv_layout::ByteExtent;

use super::grant::{GroupGrant, Progress};
use super::relayout::{Plan, Target};
use crate::codec::control::MISSING_RANGES_MAX;
use crate::error::Error;
use crate::part::{Missing, PartKey, PartRange, RootDigest};

struct Group {
    group: u16,
    /// Ascending model layers.
    layers: Vec<u32>,
    /// Ascending ordinals.
    ordinals: Vec<u32>,
    /// Number of the group's first part.
    base: usize,
}

/// The parts of one grant.
pub struct PartTable {
    groups: Vec<Group>,
    /// By part number.
    extents: Vec<ByteExtent>,
    /// By part number; meaningful where `received` is set.
    crcs: Vec<u32>,
    /// One bit per part number.
    received: Vec<u64>,
    parts_received: usize,
    bytes_received: u64,
    /// How the parts become the blocks granted, if they are not their layers.
    relaid: Option<Box<Relaid>>,
}

struct Relaid {
    plan: Arc<Plan>,
    /// The table of a sender with the receiver's layout.
    own: PartTable,
    /// Whether every position of the blocks arrives that lies inside the prompt.
    whole: bool,
}

impl PartTable {
    /// No parts at all.
    pub fn empty() -> Self {
        Self {
            groups: Vec::new(),
            extents: Vec::new(),
            crcs: Vec::new(),
            received: Vec::new(),
            parts_received: 0,
            bytes_received: 0,
            relaid: None,
        }
    }

    /// Numbers the parts of `groups`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if groups, layers or ordinals do not ascend, or a block does
    /// not have one extent per layer.
    pub fn new(groups: &[GroupGrant]) -> Result<Self, Error> {
        let mut table = Self::empty();
        if !groups.is_sorted_by(|one, next| one.group < next.group) {
            return Err(Error::Invalid("groups do not ascend".to_owned()));
        }
        for grant in groups {
            let group = grant.group;
            if !grant.layers.is_sorted_by(|one, next| one < next) {
                return Err(Error::Invalid(format!(
                    "layers of group `{group}` do not ascend"
                )));
            }
            if !grant
                .blocks
                .is_sorted_by(|one, next| one.ordinal < next.ordinal)
            {
                return Err(Error::Invalid(format!(
                    "ordinals of group `{group}` do not ascend"
                )));
            }
            if let Some(block) = grant
                .blocks
                .iter()
                .find(|b| b.layers.len() != grant.layers.len())
            {
                return Err(Error::Invalid(format!(
                    "block `{}` of group `{group}` has `{}` extents for `{}` layers",
                    block.ordinal,
                    block.layers.len(),
                    grant.layers.len()
                )));
            }
            table.groups.push(Group {
                group,
                layers: grant.layers.clone(),
                ordinals: grant.blocks.iter().map(|block| block.ordinal).collect(),
                base: table.extents.len(),
            });
            for layer in 0..grant.layers.len() {
                table
                    .extents
                    .extend(grant.blocks.iter().map(|block| block.layers[layer]));
            }
        }
        table.crcs = vec![0; table.extents.len()];
        table.received = vec![0; table.extents.len().div_ceil(64)];
        Ok(table)
    }

    /// Numbers the parts that a sender of `plan`'s layout sends for a prompt of `tokens`,
    /// or, without a plan, those of a sender with the receiver's layout. Whatever had
    /// arrived in another arrangement is forgotten.
    ///
    /// The groups were checked against the receiver's layout when they were granted.
    pub fn arrange(&mut self, plan: Option<&Arc<Plan>>, tokens: u32) {
        let now = self.relaid.as_ref().map(|relaid| &relaid.plan);
        let same = match (now, plan) {
            (None, None) => true,
            (Some(now), Some(plan)) => now.relayout.sender() == plan.relayout.sender(),
            _ => false,
        };
        if same {
            return;
        }
        let table = std::mem::replace(self, Self::empty());
        let mut own = match table.relaid {
            Some(relaid) => relaid.own,
            None => table,
        };
        own.clear();
        *self = match plan {
            Some(plan) => Self::relaid(own, plan, tokens),
            None => own,
        };
    }

    fn relaid(own: Self, plan: &Arc<Plan>, tokens: u32) -> Self {
        let mut table = Self::empty();
        let mut whole = true;
        let relayout = &plan.relayout;
        let [sent, kept] =
            [relayout.sender(), relayout.receiver()].map(|layout| u64::from(layout.block_size));
        for group in &own.groups {
            let mut ordinals = BTreeSet::new();
            for run in runs(&group.ordinals) {
                let sends = relayout.sent_ordinals(usize::from(group.group), &run, tokens);
                whole &= u64::from(sends.start) * sent <= u64::from(run.start) * kept;
                ordinals.extend(sends);
            }
            let extent = ByteExtent {
                offset: 0,
                len: relayout.sent_bytes() as u32,
                region: group.group,
            };
            let base = table.extents.len();
            let parts = group.layers.len() * ordinals.len();
            table.extents.resize(base + parts, extent);
            table.groups.push(Group {
                group: group.group,
                layers: group.layers.clone(),
                ordinals: ordinals.into_iter().collect(),
                base,
            });
        }
        table.crcs = vec![0; table.extents.len()];
        table.received = vec![0; table.extents.len().div_ceil(64)];
        table.relaid = Some(Box::new(Relaid {
            plan: Arc::clone(plan),
            own,
            whole,
        }));
        table
    }

    /// How parts become blocks, unless they are layers of them.
    pub fn plan(&self) -> Option<&Arc<Plan>> {
        self.relaid.as_ref().map(|relaid| &relaid.plan)
    }

    /// Whether the blocks, once filled, are what a sender with the receiver's layout would
    /// have made of them.
    pub fn fills_as_its_own(&self) -> bool {
        let relaid = self.relaid.as_ref();
        relaid.is_none_or(|relaid| relaid.whole && relaid.plan.keeps_bits())
    }

    /// The granted places that part `number` of a re-laid-out sender fills.
    pub fn targets(&self, number: usize) -> Vec<Target> {
        let Some(relaid) = &self.relaid else {
            return Vec::new();
        };
        // The groups of both tables are the same, in one order, and so are their layers.
        let after = self.groups.partition_point(|group| group.base <= number);
        let Some(at) = after.checked_sub(1) else {
            return Vec::new();
        };
        let (group, own) = (&self.groups[at], &relaid.own.groups[at]);
        let layer = (number - group.base) / group.ordinals.len();
        let ordinal = group.ordinals[(number - group.base) % group.ordinals.len()];
        let target = |overlap: baton_proto::relayout::Overlap| {
            let index = own.ordinals.binary_search(&overlap.ordinal).ok()?;
            Some(Target {
                extent: relaid.own.extents[own.base + layer * own.ordinals.len() + index],
                run: overlap.run,
            })
        };
        let overlaps = relaid.plan.relayout.overlaps(ordinal);
        overlaps.filter_map(target).collect()
    }

    /// The numbers of the parts of `range`; `None` unless all of them are granted.
    pub fn numbers(&self, range: PartRange) -> Option<Range<usize>> {
        let last = range.last()?;
        let group = self
            .groups
            .iter()
            .find(|group| group.group == range.group)?;
        let layer = group.layers.binary_search(&range.layer).ok()?;
        let first = group.ordinals.binary_search(&range.first).ok()?;
        let end = first.checked_add(range.count as usize)?;
        // Ordinals ascend without repeats, so the ends agree only if all do.
        if group.ordinals.get(end - 1) != Some(&last.ordinal) {
            return None;
        }
        let base = group.base + layer * group.ordinals.len();
        Some(base + first..base + end)
    }

    pub fn extent(&self, number: usize) -> ByteExtent {
        self.extents[number]
    }

    pub fn is_received(&self, number: usize) -> bool {
        self.received[number / 64] & (1 << (number % 64)) != 0
    }

    /// Marks a part as arrived; whether it is news.
    pub fn receive(&mut self, number: usize, crc: u32) -> bool {
        if self.is_received(number) {
            return false;
        }
        self.received[number / 64] |= 1 << (number % 64);
        self.crcs[number] = crc;
        self.parts_received += 1;
        self.bytes_received += u64::from(self.extents[number].len);
        true
    }

    /// Forgets everything that arrived.
    pub fn clear(&mut self) {
        self.received.fill(0);
        self.parts_received = 0;
        self.bytes_received = 0;
    }

    pub fn is_complete(&self) -> bool {
        self.parts_received == self.extents.len()
    }

    pub fn progress(&self) -> Progress {
        Progress {
            parts_total: self.extents.len() as u64,
            parts_received: self.parts_received as u64,
            bytes_received: self.bytes_received,
        }
    }

    /// The digest over all parts; only meaningful once [`PartTable::is_complete`].
    pub fn root(&self) -> u32 {
        let mut digest = RootDigest::new();
        for (key, number) in self.keys() {
            digest.part(key, self.crcs[number]);
        }
        digest.value()
    }

    /// What has not arrived, as ranges in canonical order, cut at what one frame holds.
    pub fn missing(&self) -> Missing {
        let mut ranges: Vec<PartRange> = Vec::new();
        for (key, number) in self.keys() {
            if self.is_received(number) {
                continue;
            }
            let (group, layer) = (key.group, key.layer);
            let full = ranges.len() == MISSING_RANGES_MAX;
            match ranges.last_mut() {
                Some(last)
                    if (last.group, last.layer) == (group, layer)
                        && last.first + last.count == key.ordinal =>
                {
                    last.count += 1;
                }
                _ if full => {
                    return Missing {
                        ranges,
                        complete: false,
                    };
                }
                _ => ranges.push(PartRange {
                    group,
                    layer,
                    first: key.ordinal,
                    count: 1,
                }),
            }
        }
        Missing {
            ranges,
            complete: true,
        }
    }

    fn keys(&self) -> impl Iterator<Item = (PartKey, usize)> + '_ {
        self.groups.iter().flat_map(|group| {
            group
                .layers
                .iter()
                .enumerate()
                .flat_map(move |(layer_index, &layer)| {
                    let base = group.base + layer_index * group.ordinals.len();
                    group
                        .ordinals
                        .iter()
                        .enumerate()
                        .map(move |(index, &ordinal)| {
                            (
                                PartKey {
                                    group: group.group,
                                    layer,
                                    ordinal,
                                },
                                base + index,
                            )
                        })
                })
        })
    }
}

/// Ascending ordinals as runs without gaps.
fn runs(ordinals: &[u32]) -> Vec<Range<u32>> {
    let mut runs: Vec<Range<u32>> = Vec::new();
    for ordinal in ordinals {
        match runs.last_mut() {
            Some(last) if last.end == *ordinal => last.end += 1,
            _ => runs.push(*ordinal..ordinal.saturating_add(1)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::receiver::grant::BlockGrant;

    fn table(layers: &[u32], ordinals: &[u32]) -> PartTable {
        let extent = |len| ByteExtent {
            offset: 0,
            len,
            region: 0,
        };
        let blocks = ordinals
            .iter()
            .map(|&ordinal| BlockGrant {
                ordinal,
                layers: vec![extent(8); layers.len()],
            })
            .collect();
        PartTable::new(&[GroupGrant {
            group: 3,
            layers: layers.to_vec(),
            blocks,
        }])
        .unwrap()
    }

    fn range(layer: u32, first: u32, count: u32) -> PartRange {
        PartRange {
            group: 3,
            layer,
            first,
            count,
        }
    }

    #[test]
    fn only_granted_ordinals_have_numbers() {
        let table = table(&[0, 2], &[4, 5, 9]);
        assert_eq!(table.numbers(range(2, 4, 2)), Some(3..5));
        assert_eq!(table.numbers(range(0, 9, 1)), Some(2..3));
        for outside in [
            range(1, 4, 1),
            range(0, 5, 2),
            range(0, 4, 3),
            range(0, 6, 1),
            range(0, 9, 2),
            range(0, 4, 0),
        ] {
            assert_eq!(table.numbers(outside), None, "{outside:?}");
        }
        assert_eq!(
            table.numbers(PartRange {
                group: 0,
                ..range(0, 4, 1)
            }),
            None
        );
    }

    #[test]
    fn missing_shrinks_to_nothing() {
        let mut table = table(&[0, 1], &[0, 1, 2]);
        assert_eq!(table.missing().ranges, [range(0, 0, 3), range(1, 0, 3)]);
        assert!(table.receive(1, 7) && !table.receive(1, 7));
        assert_eq!(
            table.missing().ranges,
            [range(0, 0, 1), range(0, 2, 1), range(1, 0, 3)]
        );
        for number in 0..6 {
            table.receive(number, 7);
        }
        assert!(table.missing().is_nothing() && table.is_complete());
        assert_eq!(table.progress().bytes_received, 48);
    }

    #[test]
    fn contradictory_grants_are_refused() {
        let block = |ordinal, extents| BlockGrant {
            ordinal,
            layers: vec![
                ByteExtent {
                    offset: 0,
                    len: 8,
                    region: 0
                };
                extents
            ],
        };
        let group = |layers: &[u32], blocks: Vec<BlockGrant>| GroupGrant {
            group: 0,
            layers: layers.to_vec(),
            blocks,
        };
        for bad in [
            vec![group(&[1, 1], vec![block(0, 2)])],
            vec![group(&[0], vec![block(1, 1), block(0, 1)])],
            vec![group(&[0, 1], vec![block(0, 1)])],
            vec![group(&[0], vec![]), group(&[0], vec![])],
        ] {
            assert!(PartTable::new(&bad).is_err(), "{bad:?}");
        }
    }
}
