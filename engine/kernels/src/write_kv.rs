//! Storing K and V rows in the pool, rounded to floats or quantised to codes.
//!
//! Works on addresses inside single slots only, so that other threads and transfers may write other slots meanwhile: no
//! byte of the pool belongs to two positions, not even with int4.
//!
//! A group of codes is stored as `minimum + scale * code`: the minimum and the scale are rounded to f16 first and the
//! codes are chosen for the rounded ones, so that their rounding costs range at one end, not precision everywhere.

mod convert;

use std::marker::PhantomData;

use half::f16;

pub use convert::{KvConverter, KvSpans};

use crate::Kernels;
use crate::attention::codes::groups;
use crate::kv::{GROUP_HEADER, KV_GROUP, KV_SPAN, KvDtype, KvView};
use crate::math::{LANES, ROUND_MAGIC};
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
                macro_rules! store {
                    ($kernel:ident::<$element:ty>) => {{
                        let kernel = $kernel::<$element> {
                            rows,
                            is_k,
                            element: PhantomData,
                        };
                        // SAFETY: the instruction set was checked, and the slots are valid and ours to write by the
                        // contract of `KvView::new`.
                        unsafe { dispatch(isa, kernel) }
                    }};
                }
                match shape.dtype {
                    KvDtype::F32 => store!(Store::<Float32>),
                    KvDtype::F16 => store!(Store::<Float16>),
                    KvDtype::BF16 => store!(Store::<BFloat16>),
                    KvDtype::Int8 => store!(StoreCodes::<Int8>),
                    KvDtype::Int4 => store!(StoreCodes::<Int4>),
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

impl Rows<'_> {
    /// Row `t` of the input.
    #[inline(always)]
    fn row(&self, t: usize) -> &[f32] {
        let dim = self.kv.shape().head_dim as usize;
        &self.x[t * self.row_stride + self.head * dim..][..dim]
    }

    /// The span row `t` is stored in, and its slot there.
    #[inline(always)]
    fn place(&self, t: usize, is_k: bool) -> (*mut u8, usize) {
        let (block, slot) = self.slots[t];
        let shape = self.kv.shape();
        assert!(
            slot < shape.block_size,
            "slot `{slot}` of a block of `{}`",
            shape.block_size
        );
        let base = if is_k {
            self.kv.k(block, self.layer, self.head)
        } else {
            self.kv.v(block, self.layer, self.head)
        };
        let slot = slot as usize;
        // SAFETY: the slot is inside the block, so its span is inside this head of the block.
        let span = unsafe { base.add(slot / KV_SPAN * shape.span_bytes()) };
        (span, slot % KV_SPAN)
    }
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
        let dim = self.rows.kv.shape().head_dim as usize;
        for t in 0..self.rows.slots.len() {
            let (span, slot) = self.rows.place(t, self.is_k);
            // K: the slot's lane of each dimension's vector. V: one row.
            let (first, step) = if self.is_k {
                (slot, KV_SPAN)
            } else {
                (slot * dim, 1)
            };
            let x = self.rows.row(t);
            for (i, x) in x.as_chunks::<LANES>().0.iter().enumerate() {
                // SAFETY: `x` has 16 values. `slot` is inside the span, so all `dim` elements `step` apart are inside
                // it; writing them is the caller's promise.
                unsafe {
                    let stored = E::narrow::<S>(S::load(x.as_ptr()));
                    let to = span.cast::<E::Stored>().add(first + i * LANES * step);
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

/// Largest code of a format, and whether two share a byte.
trait Levels {
    const MAX: f32;
    const NIBBLES: bool;
}

struct Int8;
struct Int4;

impl Levels for Int8 {
    const MAX: f32 = 255.0;
    const NIBBLES: bool = false;
}

impl Levels for Int4 {
    const MAX: f32 = 15.0;
    const NIBBLES: bool = true;
}

/// Slots whose codes share the lines of V.
const QUAD: usize = 4;
/// Bytes of a line of codes: four of each of 16 slots of K, or of 16 dimensions (32 with int4) of V.
const LINE: usize = 64;

struct StoreCodes<'a, C> {
    rows: Rows<'a>,
    is_k: bool,
    element: PhantomData<C>,
}

impl<C: Levels> Kernel for StoreCodes<'_, C> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let dim = self.rows.kv.shape().head_dim as usize;
        let headers = groups(dim).count() * GROUP_HEADER;
        let line_dims = if C::NIBBLES { 2 * LANES } else { LANES };
        let mut t = 0;
        while t < self.rows.slots.len() {
            // Four positions of V fill whole lines; K of one slot is four bytes here and there, whatever comes with it.
            let count = if !self.is_k && self.rows.is_quad(t) {
                QUAD
            } else {
                1
            };
            let (span, slot) = self.rows.place(t, self.is_k);
            for (g, dims) in groups(dim).enumerate() {
                let mut codes = [[0u8; KV_GROUP]; QUAD];
                // SAFETY: the processor's instruction set is the caller's promise; the slots' entries of the group's
                // header and lines lie inside their span, as `kv` draws it; writing them is the caller's promise.
                unsafe {
                    let header = span.add(g * GROUP_HEADER).cast::<u16>().add(slot);
                    for (i, codes) in codes[..count].iter_mut().enumerate() {
                        let x = &self.rows.row(t + i)[dims.clone()];
                        let (scale, minimum) = quantize::<S>(x, C::MAX, codes);
                        header.add(i).write(scale);
                        header.add(KV_SPAN + i).write(minimum);
                    }
                    if self.is_k {
                        let dims_of_step = line_dims / 4;
                        let first = headers + dims.start / dims_of_step * LINE + 4 * slot;
                        let steps = dims.len() / dims_of_step;
                        store_k::<C>(&codes[0], span.add(first), steps);
                    } else {
                        let of_quad = slot / QUAD * dim.div_ceil(line_dims);
                        let first = headers + (of_quad + dims.start / line_dims) * LINE;
                        let lines = dims.len().div_ceil(line_dims);
                        store_v::<C>(&codes[..count], span.add(first + slot % QUAD), lines);
                    }
                }
            }
            t += count;
        }
    }
}

impl Rows<'_> {
    /// Whether rows `t..t + 4` are the four positions of a line of V.
    #[inline(always)]
    fn is_quad(&self, t: usize) -> bool {
        let Some(slots) = self.slots.get(t..t + QUAD) else {
            return false;
        };
        let (block, slot) = slots[0];
        let follows = |i: usize| slots[i].0 == block && slots[i].1 == slot + i as u32;
        // Block sizes are multiples of four, so the other three are in the block if the first is.
        (slot as usize).is_multiple_of(QUAD) && (1..QUAD).all(follows)
    }
}

/// Writes one slot's codes of K, four bytes in each of `steps` lines: four dimensions, with int4 in the low nibbles, and
/// four more in the high ones.
///
/// # Safety
/// The slot's bytes of the lines from `to` on are writable.
#[inline(always)]
unsafe fn store_k<C: Levels>(codes: &[u8; KV_GROUP], to: *mut u8, steps: usize) {
    let quads = codes.as_chunks::<4>().0;
    let quad = |i: usize| u32::from_le_bytes(quads[i]);
    for step in 0..steps {
        let four = if C::NIBBLES {
            quad(2 * step) | quad(2 * step + 1) << 4
        } else {
            quad(step)
        };
        // SAFETY: the caller's promise.
        unsafe {
            to.add(step * LINE)
                .cast::<[u8; 4]>()
                .write(four.to_le_bytes())
        };
    }
}

/// Writes codes of V of one slot or all four of a quad, a byte per slot and dimension; with int4 16 dimensions are in the
/// low nibbles of a line and the next 16, which may be the filling zeros, in the high ones.
///
/// # Safety
/// The slots' bytes of the lines from `to` on are writable.
#[inline(always)]
unsafe fn store_v<C: Levels>(codes: &[[u8; KV_GROUP]], to: *mut u8, lines: usize) {
    let byte = |slot: usize, line: usize, d: usize| {
        let codes = &codes[slot];
        if C::NIBBLES {
            codes[2 * line * LANES + d] | codes[(2 * line + 1) * LANES + d] << 4
        } else {
            codes[line * LANES + d]
        }
    };
    for line in 0..lines {
        // SAFETY: the caller's promise.
        unsafe {
            let to = to.add(line * LINE);
            if codes.len() == QUAD {
                let fours: [u32; LANES] = std::array::from_fn(|d| {
                    let of = |slot| byte(slot, line, d);
                    u32::from_le_bytes([of(0), of(1), of(2), of(3)])
                });
                to.cast::<[u8; LINE]>()
                    .write(bytemuck::cast(fours.map(u32::to_le)));
            } else {
                for d in 0..LANES {
                    to.add(QUAD * d).write(byte(0, line, d));
                }
            }
        }
    }
}

/// Codes `0..=max` of a group of up to 64 values. Returns the bits of scale and minimum as f16. A group with a value
/// that is not finite, or beyond f16, has a scale or a minimum that is not finite either.
///
/// # Safety
/// The processor has `S`'s instruction set.
#[inline(always)]
unsafe fn quantize<S: Simd>(x: &[f32], max: f32, codes: &mut [u8; KV_GROUP]) -> (u16, u16) {
    let vectors = x.as_chunks::<LANES>().0;
    // SAFETY: the caller's promise; every vector has 16 values.
    unsafe {
        let negative = |x| S::sub(S::splat(-0.0), x);
        let mut most = S::splat(f32::NEG_INFINITY);
        // The least, negated.
        let mut least = most;
        let mut largest = 0;
        for x in vectors {
            let x = S::load(x.as_ptr());
            most = S::max(x, most);
            least = S::max(negative(x), least);
            largest = S::max_abs(x, x).to_bits().max(largest);
        }
        if largest >= f32::INFINITY.to_bits() {
            return (f16::NAN.to_bits(), f16::NAN.to_bits());
        }
        let (most, least) = (S::tree_max(most), -S::tree_max(least));
        let (minimum_bits, minimum) = round::<S>(least);
        let (scale_bits, scale) = round::<S>((most - minimum) / max);
        let inverse = 1.0 / scale;
        // Else all values are the minimum, or so near that an f16 cannot tell them apart.
        if inverse.is_finite() {
            for (codes, x) in codes.as_chunks_mut::<LANES>().0.iter_mut().zip(vectors) {
                let above = S::sub(S::load(x.as_ptr()), S::splat(minimum));
                let code = S::mul(above, S::splat(inverse));
                let code = S::min(S::max(code, S::splat(0.0)), S::splat(max));
                // Rounds to nearest, ties to even; the integer stands in the low bits.
                let code = S::bits(S::add(code, S::splat(ROUND_MAGIC)));
                *codes = S::low_bytes(code).map(|code| code as u8);
            }
        }
        (scale_bits, minimum_bits)
    }
}

/// A value rounded to f16: its bits, and what they stand for.
///
/// # Safety
/// The processor has `S`'s instruction set.
#[inline(always)]
unsafe fn round<S: Simd>(x: f32) -> (u16, f32) {
    // SAFETY: the caller's promise; `bits` has 16 elements.
    unsafe {
        let bits = S::to_f16(S::splat(x));
        (bits[0], S::to_array(S::load_f16(bits.as_ptr()))[0])
    }
}
