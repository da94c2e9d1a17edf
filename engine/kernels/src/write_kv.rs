//! Storing K and V rows in the pool.
//!
//! Works on addresses inside single slots only, so that other threads and transfers may write other slots meanwhile.

use std::marker::PhantomData;

use crate::Kernels;
use crate::kv::{KV_SPAN, KvDtype, KvView};
use crate::math::LANES;
use crate::simd::{BFloat16, Element, Float16, Float32, Kernel, Simd, dispatch};

impl Kernels {
    /// Stores one K and one V row per slot `(block, slot in block)`, rounded to the pool's dtype.
    ///
    /// *Shapes*: `k`, `v`: `[slots.len(), kv_heads, head_dim]` with `row_stride`. Slots are distinct.
    ///
    /// *Panics* where a slot, a block or the layer is not in the pool, or `k` or `v` is too short.
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
        let isa = self.isa();
        // Threads take K or V of a head each, not rows, so that no two write to the same cache line of K.
        self.for_ranges(2 * heads, slots.len() * dim, &|range| {
            for part in range {
                let rows = Rows {
                    kv,
                    layer,
                    slots,
                    head: part / 2,
                    row_stride,
                    x: if part % 2 == 0 { k } else { v },
                };
                let is_k = part % 2 == 0;
                // SAFETY: the instruction set was checked, and the slots are valid and ours to write by the contract
                // of `KvView::new`.
                unsafe {
                    match shape.dtype {
                        KvDtype::F32 => dispatch(
                            isa,
                            Store::<Float32> {
                                rows,
                                is_k,
                                element: PhantomData,
                            },
                        ),
                        KvDtype::F16 => dispatch(
                            isa,
                            Store::<Float16> {
                                rows,
                                is_k,
                                element: PhantomData,
                            },
                        ),
                        KvDtype::BF16 => dispatch(
                            isa,
                            Store::<BFloat16> {
                                rows,
                                is_k,
                                element: PhantomData,
                            },
                        ),
                    }
                }
            }
        });
    }
}

/// K or V of one head, for all slots.
struct Rows<'a> {
    kv: &'a KvView,
    layer: usize,
    slots: &'a [(u32, u32)],
    head: usize,
    row_stride: usize,
    x: &'a [f32],
}

struct Store<'a, E> {
    rows: Rows<'a>,
    is_k: bool,
    element: PhantomData<E>,
}

impl<E: Element> Kernel for Store<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Rows {
            kv,
            layer,
            slots,
            head,
            row_stride,
            x,
        } = self.rows;
        let dim = kv.shape().head_dim as usize;
        for (t, (block, slot)) in slots.iter().enumerate() {
            assert!(
                *slot < kv.shape().block_size,
                "slot `{slot}` of a block of `{}`",
                kv.shape().block_size
            );
            let slot = *slot as usize;
            // K: the slot's lane of each dimension's vector in its span. V: one row.
            let (base, first, step) = if self.is_k {
                (
                    kv.k(*block, layer, head),
                    slot / KV_SPAN * dim * KV_SPAN + slot % KV_SPAN,
                    KV_SPAN,
                )
            } else {
                (kv.v(*block, layer, head), slot * dim, 1)
            };
            let x = &x[t * row_stride + head * dim..][..dim];
            for (i, x) in x.as_chunks::<LANES>().0.iter().enumerate() {
                // SAFETY: `x` has 16 values. `slot` is inside the block, so all `dim` elements `step` apart are inside
                // this head of the block; writing them is the caller's promise.
                unsafe {
                    let stored = E::narrow::<S>(S::load(x.as_ptr()));
                    let to = base.cast::<E::Stored>().add(first + i * LANES * step);
                    if self.is_k {
                        for (lane, x) in stored.into_iter().enumerate() {
                            to.add(lane * KV_SPAN).write(x);
                        }
                    } else {
                        to.cast::<[E::Stored; LANES]>().write_unaligned(stored);
                    }
                }
            }
        }
    }
}
