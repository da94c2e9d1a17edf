//! The bytes of the KV pools.
//!
//! One zeroed region per KvGroup, mapped once: on huge pages of this process alone, or,
//! where other processes of the host are to read it, of a [`SharedMemory`], which most
//! systems keep on small pages. So a worker shares only a pool that is read by peers (that of
//! a prefill worker), and only while the transport that reads it is on. Kernels write
//! it through [`baton_kernels::KvView`], data lanes through raw extents, at the
//! same time in different blocks; therefore no Rust reference ever spans it. Which
//! bytes may be touched when is decided by the block pool and the worker's grant
//! table, not here.
#![allow(unsafe_code)]

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use baton_kernels::{HugePages, KvShape, KvView};
use baton_proto::kv_layout::{ByteExtent, KvLayout};
use baton_proto::pool_memory::SharedMemory;

use super::convert::kernel_dtype;
use super::{Error, space};
use crate::step::BLOCK_NONE;

/// Who can read a pool's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PoolSharing {
    /// This process alone.
    #[default]
    Private,
    /// Also processes of this host that it is lent to, without the right to write.
    Lendable,
}

/// One pool's memory. Plain numbers: keep the [`KvMemory`] alive while it is used.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    /// Start of block 0, aligned to a page: a huge one if the pool is private.
    pub ptr: NonNull<u8>,
    /// Bytes of all blocks.
    pub len: usize,
}

// SAFETY: a region is an address and a length; dereferencing it is unsafe and the
// dereferencing code's own duty.
unsafe impl Send for Region {}
// SAFETY: as above; a region is never changed.
unsafe impl Sync for Region {}

/// A region, its kernel view and the mapping behind it.
#[derive(Debug)]
struct Pool {
    region: Region,
    view: KvView,
    blocks: u32,
    /// Kept for as long as the region is used.
    mapping: Mapping,
}

/// What a region lies in.
#[derive(Debug)]
enum Mapping {
    Private(HugePages),
    Lendable(SharedMemory),
}

impl Mapping {
    fn new(len: usize, sharing: PoolSharing) -> std::io::Result<Self> {
        if sharing == PoolSharing::Lendable {
            return Ok(Self::Lendable(SharedMemory::new(len)?));
        }
        let pages = HugePages::map(len)?;
        if !pages.is_advised() {
            tracing::debug!("no huge pages for the kv pool");
        }
        Ok(Self::Private(pages))
    }

    fn start(&self) -> NonNull<u8> {
        match self {
            Self::Private(pages) => pages.start(),
            Self::Lendable(memory) => memory.base(),
        }
    }
}

/// The memory of all KV pools of one engine.
#[derive(Debug)]
pub struct KvMemory {
    layout: KvLayout,
    pools: Vec<Pool>,
}

impl KvMemory {
    /// Maps zeroed memory for `blocks[group]` blocks of each group of `layout`, for this
    /// process alone.
    ///
    /// # Errors
    /// As [`KvMemory::allocate_as`].
    pub fn allocate(layout: KvLayout, blocks: &[u32]) -> Result<Arc<Self>, Error> {
        Self::allocate_as(layout, blocks, PoolSharing::Private)
    }

    /// Maps zeroed memory for `blocks[group]` blocks of each group of `layout`.
    ///
    /// Pages are touched on first use, so a large pool costs nothing until it fills; one that
    /// can never fill is refused.
    ///
    /// # Errors
    /// A layout or size that cannot be used, or memory the system refuses or does not have.
    pub fn allocate_as(
        layout: KvLayout,
        blocks: &[u32],
        sharing: PoolSharing,
    ) -> Result<Arc<Self>, Error> {
        layout.validate()?;
        if blocks.len() != layout.groups.len() {
            return Err(Error::GroupCount {
                given: blocks.len(),
                groups: layout.groups.len(),
            });
        }
        let bytes = |(group, blocks): (usize, &u32)| {
            (layout.block_bytes(group) as u64).saturating_mul(u64::from(*blocks))
        };
        let bytes = blocks.iter().enumerate().map(bytes);
        let bytes = bytes.fold(0, u64::saturating_add);
        if let Some(most) = space::memory_max().filter(|most| bytes > *most) {
            return Err(Error::NoSpace { bytes, most });
        }
        let pools = blocks
            .iter()
            .enumerate()
            .map(|(group, blocks)| Pool::map(&layout, group, *blocks, sharing))
            .collect::<Result<_, _>>()?;
        Ok(Arc::new(Self { layout, pools }))
    }

    /// How K and V lie in the pools.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Number of KV groups, hence of regions.
    pub fn groups(&self) -> usize {
        self.pools.len()
    }

    /// Blocks of `group`'s pool.
    ///
    /// # Panics
    /// If there is no such group; so do the other accessors.
    pub fn blocks(&self, group: usize) -> u32 {
        self.pools[group].blocks
    }

    /// The raw memory of `group`'s pool.
    pub fn region(&self, group: usize) -> Region {
        self.pools[group].region
    }

    /// What other processes can map `group`'s pool by; `None` if it is private.
    pub(super) fn fd(&self, group: usize) -> Option<Arc<OwnedFd>> {
        match &self.pools[group].mapping {
            Mapping::Private(_) => None,
            Mapping::Lendable(memory) => Some(Arc::clone(memory.fd())),
        }
    }

    /// The kernels' view of `group`'s pool.
    pub fn view(&self, group: usize) -> KvView {
        self.pools[group].view
    }

    /// Where K and V of one layer lie in one block. `layer_index` counts within the
    /// group, not within the model.
    ///
    /// # Panics
    /// If the block or the layer is outside of the pool.
    pub fn extent(&self, group: usize, block: u32, layer_index: usize) -> ByteExtent {
        assert!(
            block < self.pools[group].blocks
                && layer_index < self.layout.groups[group].layers.len(),
            "kv group `{group}` has no block `{block}` with layer `{layer_index}`"
        );
        let layer_bytes = self.layout.layer_bytes();
        let offset = block as usize * self.layout.block_bytes(group) + layer_index * layer_bytes;
        ByteExtent {
            offset: offset as u64,
            len: u32::try_from(layer_bytes).expect("checked when the pool was mapped"),
            region: u16::try_from(group).expect("checked when the pool was mapped"),
        }
    }

    /// Bytes of all pools together.
    pub fn bytes(&self) -> usize {
        self.pools.iter().map(|pool| pool.region.len).sum()
    }
}

impl Pool {
    fn map(
        layout: &KvLayout,
        group: usize,
        blocks: u32,
        sharing: PoolSharing,
    ) -> Result<Self, Error> {
        let block_bytes = layout.block_bytes(group);
        // An extent's length is a u32 and its region a u16; block ids end below BLOCK_NONE.
        let max =
            (isize::MAX as usize / 2 / block_bytes.max(1)).min(BLOCK_NONE as usize - 1) as u32;
        let refused = || Error::BlockCount { group, blocks, max };
        if blocks == 0 || blocks > max || group > usize::from(u16::MAX) {
            return Err(refused());
        }
        u32::try_from(layout.layer_bytes()).map_err(|_| refused())?;

        let len = blocks as usize * block_bytes;
        let mapping = Mapping::new(len, sharing).map_err(|source| Error::Map {
            group,
            bytes: len,
            source,
        })?;
        let ptr = mapping.start();
        let shape = KvShape {
            blocks,
            block_size: layout.block_size,
            layers: layout.groups[group].layers.len() as u32,
            kv_heads: layout.kv_heads,
            head_dim: layout.head_dim,
            dtype: kernel_dtype(layout.dtype),
        };
        // SAFETY: `len` zeroed bytes start at `ptr` and live as long as this pool.
        // Who touches which slot when is kept apart by the block pool's states.
        let view = unsafe { KvView::new(ptr.as_ptr(), shape) };
        let view = view.map_err(|source| Error::Kernels { group, source })?;
        Ok(Self {
            region: Region { ptr, len },
            view,
            blocks,
            mapping,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_proto::NumericsId;
    use baton_proto::kv_layout::{KvDtype, KvGroup, KvGroupKind};
    use baton_proto::pool_memory::PoolMemory as _;

    fn layout() -> KvLayout {
        KvLayout {
            block_size: 16,
            dtype: KvDtype::F16,
            scale_group: 0,
            kv_heads: 2,
            head_dim: 16,
            layers: 3,
            groups: vec![
                KvGroup {
                    kind: KvGroupKind::Full,
                    layers: vec![0, 2],
                },
                KvGroup {
                    kind: KvGroupKind::SlidingWindow { window: 32 },
                    layers: vec![1],
                },
            ],
            numerics: NumericsId([0; 16]),
            origin: None,
            shard: None,
        }
    }

    #[test]
    fn extents_tile_each_region_without_gap() {
        let memory = KvMemory::allocate(layout(), &[5, 3]).unwrap();
        for group in 0..2 {
            let mut next = 0;
            for block in 0..memory.blocks(group) {
                for layer in 0..memory.layout().groups[group].layers.len() {
                    let extent = memory.extent(group, block, layer);
                    assert_eq!((extent.offset, usize::from(extent.region)), (next, group));
                    next += u64::from(extent.len);
                }
            }
            assert_eq!(next as usize, memory.region(group).len);
        }
    }

    #[test]
    fn layout_and_kernels_agree_on_every_size() {
        for dtype in KvDtype::ALL {
            for head_dim in [16, 48, 64, 80, 96, 128, 256] {
                let layout = KvLayout {
                    dtype,
                    scale_group: dtype.scale_group(),
                    head_dim,
                    ..layout()
                };
                let memory = KvMemory::allocate(layout.clone(), &[2, 1]).unwrap();
                for group in 0..2 {
                    let shape = *memory.view(group).shape();
                    assert_eq!(
                        shape.head_bytes(),
                        layout.head_bytes(),
                        "{dtype} {head_dim}"
                    );
                    assert_eq!(shape.block_bytes(), layout.block_bytes(group));
                    assert_eq!(shape.layer_bytes(), layout.layer_bytes());
                }
                assert_eq!(
                    baton_kernels::KV_GROUP as u32,
                    baton_proto::kv_layout::SCALE_GROUP
                );
            }
        }
    }

    #[test]
    fn memory_starts_zeroed_aligned_and_writable_to_the_last_byte() {
        for (sharing, page) in [
            (PoolSharing::Private, HugePages::SIZE),
            (PoolSharing::Lendable, 4096),
        ] {
            let memory = KvMemory::allocate_as(layout(), &[5, 3], sharing).unwrap();
            for group in 0..2 {
                let Region { ptr, len } = memory.region(group);
                assert_eq!(ptr.as_ptr() as usize % page, 0);
                // SAFETY: this test alone uses the memory, within its length.
                unsafe {
                    assert!((0..len).all(|at| ptr.add(at).read() == 0));
                    ptr.add(len - 1).write(7);
                    assert_eq!(ptr.add(len - 1).read(), 7);
                }
            }
        }
    }

    #[test]
    fn only_a_lendable_pool_can_be_mapped_by_others() {
        for (sharing, lent) in [(PoolSharing::Private, false), (PoolSharing::Lendable, true)] {
            let memory = KvMemory::allocate_as(layout(), &[5, 3], sharing).unwrap();
            for (group, region) in memory.regions().into_iter().enumerate() {
                assert_eq!(region.len, memory.region(group).len);
                assert_eq!(region.fd.is_some(), lent, "{sharing:?}");
            }
        }
    }

    #[test]
    fn wrong_sizes_are_refused() {
        let error = KvMemory::allocate(layout(), &[5]).unwrap_err();
        assert!(matches!(
            error,
            Error::GroupCount {
                given: 1,
                groups: 2
            }
        ));
        let error = KvMemory::allocate(layout(), &[5, 0]).unwrap_err();
        assert!(matches!(
            error,
            Error::BlockCount {
                group: 1,
                blocks: 0,
                ..
            }
        ));
        for sharing in [PoolSharing::Private, PoolSharing::Lendable] {
            // Some terabytes: as much as may be asked for, and more than there is.
            let error = KvMemory::allocate_as(layout(), &[u32::MAX - 1, 3], sharing);
            let Err(Error::NoSpace { bytes, most }) = error else {
                panic!("{error:?}");
            };
            assert!(bytes > most);
        }
        let broken = KvLayout {
            head_dim: 20,
            ..layout()
        };
        let error = KvMemory::allocate(broken, &[5, 3]).unwrap_err();
        assert!(matches!(error, Error::Kernels { group: 0, .. }));
    }
}
