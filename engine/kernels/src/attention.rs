//! Attention over paged K and V, and writing them.

use half::{bf16, f16};

use crate::kv::{KV_SPAN, KvDtype, KvView};
use crate::{Kernels, Scratch, reference};

/// Positions of a tile: partial results exist per tile and merge in order.
pub const KV_TILE: usize = 256;

/// One query row: where its sequence's K and V lie, and which position it is.
#[derive(Clone, Copy, Debug)]
pub struct AttentionRow<'a> {
    /// Block id per ordinal. Entries wholly in front of the window are never read (`u32::MAX` by convention).
    pub table: &'a [u32],
    /// Position of this query; it sees positions up to and including its own.
    pub position: u32,
}

/// What is the same for all rows of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionParams {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Distance in f32 between two rows of `q`.
    pub q_row_stride: usize,
    pub scale: f32,
    /// Sees positions `> position - window`.
    pub window: Option<u32>,
    /// Scores become `cap * tanh(score / cap)`.
    pub soft_cap: Option<f32>,
}

impl Kernels {
    /// Stores one K and one V row per slot `(block, slot in block)`, rounded to the pool's dtype.
    ///
    /// *Shapes*: `k`, `v`: `[slots.len(), kv_heads, head_dim]` with `row_stride`.
    pub fn write_kv(
        &self,
        kv: &KvView,
        layer: usize,
        slots: &[(u32, u32)],
        k: &[f32],
        v: &[f32],
        row_stride: usize,
    ) {
        let shape = kv.shape();
        let dim = shape.head_dim as usize;
        for (t, (block, slot)) in slots.iter().enumerate() {
            assert!(
                *slot < shape.block_size,
                "slot `{slot}` of a block of `{}`",
                shape.block_size
            );
            let slot = *slot as usize;
            for head in 0..shape.kv_heads as usize {
                let k = &k[t * row_stride + head * dim..][..dim];
                let v = &v[t * row_stride + head * dim..][..dim];
                let (to_k, to_v) = (kv.k(*block, layer, head), kv.v(*block, layer, head));
                for d in 0..dim {
                    let at = (slot / KV_SPAN * dim + d) * KV_SPAN + slot % KV_SPAN;
                    // SAFETY: `slot` is inside the block, so both elements are inside this head of the block, which
                    // is valid and ours to write by the contract of `KvView::new`.
                    unsafe {
                        store(shape.dtype, to_k, at, k[d]);
                        store(shape.dtype, to_v, slot * dim + d, v[d]);
                    }
                }
            }
        }
    }

    /// Attention of `rows.len()` query rows over their sequences.
    ///
    /// *Shapes*: `q: [rows, heads, head_dim]` with `params.q_row_stride`, `out: [rows, heads, head_dim]` dense. Query
    /// head `h` reads kv head `h / (heads / kv_heads)`. Rows of one sequence that follow each other with consecutive
    /// positions and the same `table` slice share the reading of K and V.
    #[allow(clippy::too_many_arguments)]
    pub fn attention(
        &self,
        kv: &KvView,
        layer: usize,
        rows: &[AttentionRow<'_>],
        q: &[f32],
        out: &mut [f32],
        params: &AttentionParams,
        _scratch: &mut Scratch,
    ) {
        let dim = params.head_dim;
        let group = params.heads / params.kv_heads;
        for (t, row) in rows.iter().enumerate() {
            for head in 0..params.heads {
                let q = &q[t * params.q_row_stride + head * dim..][..dim];
                let out = &mut out[(t * params.heads + head) * dim..][..dim];
                reference::attention_head(kv, layer, row, q, head / group, params, out);
            }
        }
    }
}

/// # Safety
/// `base + index` elements is valid for a write.
unsafe fn store(dtype: KvDtype, base: *mut u8, index: usize, value: f32) {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            KvDtype::F32 => base.cast::<f32>().add(index).write(value),
            KvDtype::F16 => base.cast::<f16>().add(index).write(f16::from_f32(value)),
            KvDtype::BF16 => base.cast::<bf16>().add(index).write(bf16::from_f32(value)),
        }
    }
}
