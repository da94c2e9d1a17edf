//! Pools as a worker has them, with every block used and in shuffled order.
//!
//! A part is K and V of one layer in one block; the layers of a block lie side by side, and
//! parts travel layer by layer. So neighbours on the way are strangers in memory at both
//! ends, as they are in a pool that has been in use for a while.
#![allow(unsafe_code)]

use std::hint::black_box;
use std::sync::Arc;

use anyhow::Context as _;
use baton_engine::kv::{KvMemory, PoolSharing};
use baton_kv_transfer::RegionTable;
use baton_kv_transfer::pool::regions_of;
use baton_kv_transfer::streaming::copy_checked;
use baton_proto::NumericsId;
use baton_proto::kv_layout::{ByteExtent, KvDtype, KvGroup, KvGroupKind, KvLayout};
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{RngCore as _, SeedableRng as _};

pub const LAYERS: u32 = 16;

/// One pool. Nobody but this bench knows it, and no transfer runs while it borrows bytes.
pub struct Arena {
    memory: Arc<KvMemory>,
    /// The block behind each ordinal.
    blocks: Vec<u32>,
}

impl Arena {
    /// A pool of about `total` bytes whose blocks are shuffled by `seed`.
    pub fn new(
        part_bytes: u32,
        total: u64,
        sharing: PoolSharing,
        seed: u64,
    ) -> anyhow::Result<Self> {
        let count = (total / u64::from(part_bytes) / u64::from(LAYERS)).max(1);
        let count = u32::try_from(count).context("`--total`: too many blocks")?;
        let memory = KvMemory::allocate_as(layout(part_bytes), &[count], sharing);
        let memory = memory.context("`--total`")?;
        let mut blocks: Vec<u32> = (0..count).collect();
        blocks.shuffle(&mut StdRng::seed_from_u64(seed));
        Ok(Self { memory, blocks })
    }

    /// As workers hand it to their lanes.
    pub fn regions(&self) -> RegionTable {
        regions_of(&self.memory)
    }

    pub fn bytes(&self) -> u64 {
        self.memory.bytes() as u64
    }

    /// Blocks of it.
    pub fn ordinals(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Where one layer of one ordinal lies.
    pub fn extent(&self, ordinal: u32, layer: u32) -> ByteExtent {
        self.memory
            .extent(0, self.blocks[ordinal as usize], layer as usize)
    }

    /// Writes bytes drawn from `seed` to all of it.
    pub fn fill(&mut self, seed: u64) {
        StdRng::seed_from_u64(seed).fill_bytes(self.whole_mut());
    }

    fn whole(&self) -> &[u8] {
        let region = self.memory.region(0);
        // SAFETY: mapped and initialised for as long as `self.memory` lives; nobody writes
        // it meanwhile, since that takes `&mut self` or a transfer, and none runs.
        unsafe { std::slice::from_raw_parts(region.ptr.as_ptr(), region.len) }
    }

    fn whole_mut(&mut self) -> &mut [u8] {
        let region = self.memory.region(0);
        // SAFETY: as `whole`; `&mut self` keeps other borrows of the bytes away.
        unsafe { std::slice::from_raw_parts_mut(region.ptr.as_ptr(), region.len) }
    }

    /// Every part, in the order in which parts travel.
    pub fn parts(&self) -> Vec<&[u8]> {
        let whole = self.whole();
        let extents = self.extents();
        let part = |extent: ByteExtent| &whole[extent.offset as usize..][..extent.len as usize];
        extents.map(part).collect()
    }

    /// Every part, for writing, in the order in which parts travel.
    pub fn parts_mut(&mut self) -> Vec<&mut [u8]> {
        let part_bytes = self.extent(0, 0).len as usize;
        let places: Vec<usize> = self
            .extents()
            .map(|extent| extent.offset as usize / part_bytes)
            .collect();
        let whole = self.whole_mut();
        let mut parts: Vec<Option<&mut [u8]>> = whole.chunks_mut(part_bytes).map(Some).collect();
        let parts = places.into_iter().filter_map(|place| parts[place].take());
        parts.collect()
    }

    /// The part that travels first.
    pub fn first_part(&self) -> &[u8] {
        let extent = self.extent(0, 0);
        &self.whole()[extent.offset as usize..][..extent.len as usize]
    }

    /// The same, for writing.
    pub fn first_part_mut(&mut self) -> &mut [u8] {
        let extent = self.extent(0, 0);
        &mut self.whole_mut()[extent.offset as usize..][..extent.len as usize]
    }

    fn extents(&self) -> impl Iterator<Item = ByteExtent> + '_ {
        let ordinals = 0..self.ordinals();
        (0..LAYERS).flat_map(move |layer| {
            let ordinals = ordinals.clone();
            ordinals.map(move |ordinal| self.extent(ordinal, layer))
        })
    }

    /// One copy of everything, as it lies.
    pub fn copy_whole(&mut self, from: &Self) {
        black_box(self.whole_mut()).copy_from_slice(black_box(from.whole()));
    }

    /// A copy of each part to where it belongs here.
    pub fn copy_parts(&mut self, from: &Self) {
        for (to, from) in self.parts_mut().into_iter().zip(from.parts()) {
            black_box(to).copy_from_slice(black_box(from));
        }
    }

    /// The same, with a checksum of each part: what one end of a transfer has to do.
    pub fn copy_parts_checked(&mut self, from: &Self) {
        black_box(copy_checked(&from.parts(), &mut self.parts_mut()));
    }

    /// Whether all bytes are the same.
    pub fn is_like(&self, other: &Self) -> bool {
        self.whole() == other.whole()
    }

    /// Whether each part is that of `other`.
    pub fn holds_parts_of(&self, other: &Self) -> bool {
        self.parts() == other.parts()
    }
}

/// A layout whose parts have `part_bytes` bytes.
fn layout(part_bytes: u32) -> KvLayout {
    let (block_size, head_dim) = (16, 64);
    // K and V of f16.
    let head_bytes = 2 * block_size * head_dim * 2;
    KvLayout {
        block_size,
        dtype: KvDtype::F16,
        scale_group: 0,
        kv_heads: part_bytes / head_bytes,
        head_dim,
        layers: LAYERS,
        groups: vec![KvGroup {
            kind: KvGroupKind::Full,
            layers: (0..LAYERS).collect(),
        }],
        numerics: NumericsId([0; 16]),
        origin: None,
        shard: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_as_large_as_asked_and_found_by_name_after_a_copy() {
        for part_bytes in [4 << 10, 64 << 10] {
            // Enough blocks that two shuffles differ.
            let total = 32 << 20;
            let mut from = Arena::new(part_bytes, total, PoolSharing::Private, 1).unwrap();
            let mut to = Arena::new(part_bytes, total, PoolSharing::Lendable, 2).unwrap();
            from.fill(3);
            to.fill(4);
            assert_eq!(from.bytes(), total);
            assert_eq!(from.parts()[0].len(), part_bytes as usize);
            to.copy_parts(&from);
            assert!(to.holds_parts_of(&from) && !to.is_like(&from));
            to.fill(5);
            to.copy_parts_checked(&from);
            assert!(to.holds_parts_of(&from));
            to.copy_whole(&from);
            assert!(to.is_like(&from) && !to.holds_parts_of(&from));
        }
    }
}
