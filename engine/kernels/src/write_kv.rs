//! Storing K and V rows in the pool.
//!
//! Works on addresses inside single slots only, so that other threads and transfers may write other slots meanwhile.

use half::{bf16, f16};

use crate::Kernels;
use crate::kv::{KV_SPAN, KvDtype, KvView};
use crate::simd::{Kernel, Simd, dispatch};

impl Kernels {
    /// Stores one K and one V row per slot `(block, slot in block)`, rounded to the pool's dtype.
    ///
    /// *Shapes*: `k`, `v`: `[slots.len(), kv_heads, head_dim]` with `row_stride`. Slots are distinct.
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
        let (heads, dim) = (shape.kv_heads as usize, shape.head_dim as usize);
        for (_, slot) in slots {
            assert!(
                *slot < shape.block_size,
                "slot `{slot}` of a block of `{}`",
                shape.block_size
            );
        }
        let isa = self.isa();
        // Threads take K or V of a head each, not rows, so that no two write to the same cache line of K.
        self.for_ranges(2 * heads, slots.len() * dim * 4, &|range| {
            for part in range {
                let (head, is_k) = (part / 2, part % 2 == 0);
                let rows = if is_k { k } else { v };
                for (t, (block, slot)) in slots.iter().enumerate() {
                    let slot = *slot as usize;
                    let x = &rows[t * row_stride + head * dim..][..dim];
                    // Offset of the first element and distance between elements, in elements.
                    let (base, at, step) = if is_k {
                        (
                            kv.k(*block, layer, head),
                            slot / KV_SPAN * dim * KV_SPAN + slot % KV_SPAN,
                            KV_SPAN,
                        )
                    } else {
                        (kv.v(*block, layer, head), slot * dim, 1)
                    };
                    // SAFETY: `slot` is inside the block, so all `dim` elements are inside this head of the block,
                    // which is valid and ours to write by the contract of `KvView::new`. The instruction set was
                    // checked.
                    unsafe {
                        dispatch(
                            isa,
                            Scatter {
                                dtype: shape.dtype,
                                x,
                                base,
                                at,
                                step,
                            },
                        )
                    };
                }
            }
        });
    }
}

struct Scatter<'a> {
    dtype: KvDtype,
    x: &'a [f32],
    base: *mut u8,
    at: usize,
    step: usize,
}

impl Kernel for Scatter<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for (d, x) in self.x.iter().enumerate() {
            let index = self.at + d * self.step;
            // SAFETY: the caller's promise.
            unsafe {
                match self.dtype {
                    KvDtype::F32 => self.base.cast::<f32>().add(index).write(*x),
                    KvDtype::F16 => self.base.cast::<f16>().add(index).write(f16::from_f32(*x)),
                    KvDtype::BF16 => self
                        .base
                        .cast::<bf16>()
                        .add(index)
                        .write(bf16::from_f32(*x)),
                }
            }
        }
    }
}
