//! A raw view of one KvGroup's pool memory, and where things lie in it.
//!
//! ```text
//! pool  = [block][layer][K|V][kv head][spans of 16 positions]
//!
//! f32, f16, bf16
//!   K span = [head_dim][16 positions]                                  lane = position
//!   V span = [16 positions][head_dim]                                  lane = dimension
//!
//! int8, int4: a value is minimum + scale * code, both per position, head and up to 64 dimensions (a group)
//!   K span = [group][scale|minimum][16 positions] f16, then codes [dim / 4][16 positions][4 dims]
//!   V span = [group][scale|minimum][16 positions] f16, then codes [position / 4][dim / 16][16 dims][4 positions]
//! ```
//!
//! 64 bytes of codes are one step of a dot product for 16 outputs: four dimensions of 16 keys, or four positions of 16
//! dimensions. With int4 such a line holds two steps, the first in the low and the second in the high nibbles, and both
//! belong to the same position, so that every byte of the pool belongs to one position only. Heads of an odd multiple of
//! 16 dimensions leave half of their last line unused.
//!
//! The view hands out pointers only: other threads write other blocks of the same pool at the same time, so no
//! reference may span it. Which slots may be read or written is decided by the block pool, not here.

use crate::Error;

/// Positions of a K span; every block size is a multiple.
pub const KV_SPAN: usize = 16;

/// Most dimensions that share a scale and a minimum in int8 and int4; a head's last group has what is left.
pub const KV_GROUP: usize = 64;

/// Bytes of a group's scales and minimums in a span: f16 each, for 16 positions.
pub(crate) const GROUP_HEADER: usize = 2 * KV_SPAN * 2;

/// How K and V elements are stored: as floats rounded to nearest even, or as codes between a minimum and a maximum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvDtype {
    F32,
    F16,
    BF16,
    Int8,
    Int4,
}

impl KvDtype {
    /// Alignment that elements need in memory.
    fn align(self) -> usize {
        match self {
            KvDtype::F32 => 4,
            KvDtype::F16 | KvDtype::BF16 | KvDtype::Int8 | KvDtype::Int4 => 2,
        }
    }
}

/// The shape of a KV pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    pub blocks: u32,
    /// Positions of a block: a multiple of 16.
    pub block_size: u32,
    /// Layers of the group.
    pub layers: u32,
    pub kv_heads: u32,
    /// A multiple of 16.
    pub head_dim: u32,
    pub dtype: KvDtype,
}

impl KvShape {
    /// Bytes of K (or V) of one head for 16 positions.
    pub fn span_bytes(&self) -> usize {
        let dim = self.head_dim as usize;
        let headers = dim.div_ceil(KV_GROUP) * GROUP_HEADER;
        match self.dtype {
            KvDtype::F32 => KV_SPAN * dim * 4,
            KvDtype::F16 | KvDtype::BF16 => KV_SPAN * dim * 2,
            KvDtype::Int8 => headers + KV_SPAN * dim,
            KvDtype::Int4 => headers + KV_SPAN * dim.next_multiple_of(32) / 2,
        }
    }

    /// Bytes of K (or V) of one head in one block.
    pub fn head_bytes(&self) -> usize {
        self.block_size as usize / KV_SPAN * self.span_bytes()
    }

    /// Bytes of one layer in one block.
    pub fn layer_bytes(&self) -> usize {
        2 * self.kv_heads as usize * self.head_bytes()
    }

    /// Bytes of one block.
    pub fn block_bytes(&self) -> usize {
        self.layers as usize * self.layer_bytes()
    }

    /// Whether kernels can work on such blocks.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.block_size == 0 || !(self.block_size as usize).is_multiple_of(KV_SPAN) {
            return Err(Error::KvBlockSize {
                block_size: self.block_size,
            });
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(16) {
            return Err(Error::KvHeadDim {
                head_dim: self.head_dim,
            });
        }
        if self.layers == 0 || self.kv_heads == 0 {
            return Err(Error::KvEmpty);
        }
        Ok(())
    }
}

/// One KvGroup's pool memory. Copies are views of the same memory.
#[derive(Clone, Copy, Debug)]
pub struct KvView {
    base: *mut u8,
    shape: KvShape,
    /// What the shape says, worked out once: tiles ask for it all the time.
    block_bytes: usize,
    layer_bytes: usize,
    head_bytes: usize,
    span_bytes: usize,
}

// SAFETY: the view is an address and numbers; who may access what behind it at which time is the contract of
// `KvView::new`, whatever thread it is on.
unsafe impl Send for KvView {}
// SAFETY: as above; the view itself is never changed.
unsafe impl Sync for KvView {}

impl KvView {
    /// A view of the pool at `base`.
    ///
    /// # Errors
    /// [`Error::KvBlockSize`], [`Error::KvHeadDim`], [`Error::KvEmpty`], [`Error::KvAlignment`] (the element's own
    /// alignment is required; 64 bytes are faster).
    ///
    /// # Safety
    /// `base` points to `shape.blocks * shape.block_bytes()` bytes, initialised (zeroes will do), that stay valid as
    /// long as any copy of the view is used. While a kernel runs, nobody else writes a slot it reads (positions
    /// `<=` the row's own and inside its window, in the blocks of its table), and nobody reads or writes a slot it
    /// writes.
    pub unsafe fn new(base: *mut u8, shape: KvShape) -> Result<KvView, Error> {
        shape.check()?;
        let align = shape.dtype.align();
        if !base.addr().is_multiple_of(align) {
            return Err(Error::KvAlignment { align });
        }
        Ok(KvView {
            base,
            shape,
            block_bytes: shape.block_bytes(),
            layer_bytes: shape.layer_bytes(),
            head_bytes: shape.head_bytes(),
            span_bytes: shape.span_bytes(),
        })
    }

    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Start of K of a head in a block. Panics where an index is out of range.
    #[inline]
    pub(crate) fn k(&self, block: u32, layer: usize, kv_head: usize) -> *mut u8 {
        let shape = &self.shape;
        assert!(
            block < shape.blocks
                && layer < shape.layers as usize
                && kv_head < shape.kv_heads as usize,
            "KV block `{block}`, layer `{layer}`, head `{kv_head}` outside of {shape:?}"
        );
        let offset = block as usize * self.block_bytes
            + layer * self.layer_bytes
            + kv_head * self.head_bytes;
        // SAFETY: the indices are in range, so the offset is within the memory `new` was promised.
        unsafe { self.base.add(offset) }
    }

    /// Start of V of a head in a block. Panics where an index is out of range.
    #[inline]
    pub(crate) fn v(&self, block: u32, layer: usize, kv_head: usize) -> *mut u8 {
        let k = self.k(block, layer, kv_head);
        // SAFETY: V of a head lies one half layer behind its K, in the same layer of the same block.
        unsafe { k.add(self.v_offset()) }
    }

    /// Bytes from K of a head to its V.
    #[inline]
    pub(crate) fn v_offset(&self) -> usize {
        self.shape.kv_heads as usize * self.head_bytes
    }

    /// Bytes of K (or V) of one head in one span.
    #[inline]
    pub(crate) fn span_bytes(&self) -> usize {
        self.span_bytes
    }
}
