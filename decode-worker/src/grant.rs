//! From the engine's reserved blocks to what a lane may write, and from a sender's
//! blocks of another type to the engine's arithmetic.

use std::sync::Arc;

use baton_engine::api::GroupReservation;
use baton_engine::kv::{KvMemory, LayerConverter};
use baton_kv_transfer::receiver::{BlockGrant, Convert, GroupGrant, OtherLayouts};
use baton_proto::kv_layout::KvLayout;
use baton_proto::relayout::KvRun;
use baton_proto::{Error, v1};

/// Rounds what arrives as this worker's engine would.
struct Rounded(LayerConverter);

impl Convert for Rounded {
    fn convert(&self, source: &[u8], target: &mut [u8], run: KvRun) {
        self.0.convert(source, target, run);
    }
}

/// What the receiver needs to take blocks of other layouts into pools laid out as `own`.
pub(crate) fn other_layouts(own: &KvLayout) -> OtherLayouts {
    OtherLayouts {
        own: own.clone(),
        converters: Arc::new(|relayout| {
            let converter = LayerConverter::new(relayout)
                .map_err(|error| Error::new(error.kind(), error.to_string()))?;
            Ok(Box::new(Rounded(converter)))
        }),
    }
}

/// The byte extents of every reserved block, per group and model layer.
pub(crate) fn group_grants(memory: &KvMemory, groups: &[GroupReservation]) -> Vec<GroupGrant> {
    groups
        .iter()
        .filter(|reservation| !reservation.blocks.is_empty())
        .map(|reservation| {
            let group = usize::from(reservation.group);
            let layers = memory.layout().groups[group].layers.clone();
            let blocks = reservation
                .blocks
                .iter()
                .map(|reserved| BlockGrant {
                    ordinal: reserved.ordinal,
                    layers: (0..layers.len())
                        .map(|layer| memory.extent(group, reserved.block, layer))
                        .collect(),
                })
                .collect();
            GroupGrant {
                group: reservation.group,
                layers,
                blocks,
            }
        })
        .collect()
}

/// The ordinals of a reservation as ranges for the wire.
pub(crate) fn wanted_ranges(groups: &[GroupReservation]) -> Vec<v1::OrdinalRange> {
    let mut ranges: Vec<v1::OrdinalRange> = Vec::new();
    for reservation in groups {
        let group = u32::from(reservation.group);
        for block in &reservation.blocks {
            match ranges.last_mut() {
                Some(last) if last.group == group && last.first + last.count == block.ordinal => {
                    last.count += 1;
                }
                _ => ranges.push(v1::OrdinalRange {
                    group,
                    first: block.ordinal,
                    count: 1,
                }),
            }
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_engine::api::ReservedBlock;

    #[test]
    fn ordinals_become_runs_per_group() {
        let block = |ordinal| ReservedBlock {
            ordinal,
            block: 9 - ordinal,
            generation: 1,
        };
        let groups = [
            GroupReservation {
                group: 0,
                blocks: vec![block(2), block(3), block(5)],
            },
            GroupReservation {
                group: 1,
                blocks: vec![block(6)],
            },
        ];
        let runs: Vec<(u32, u32, u32)> = wanted_ranges(&groups)
            .iter()
            .map(|range| (range.group, range.first, range.count))
            .collect();
        assert_eq!(runs, [(0, 2, 2), (0, 5, 1), (1, 6, 1)]);
    }
}
