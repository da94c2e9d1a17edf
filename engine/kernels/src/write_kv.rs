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

/// Most codes of a format, less one.
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
        for t in 0..self.rows.slots.len() {
            let (span, slot) = self.rows.place(t, self.is_k);
            let x = self.rows.row(t);
            // Where four codes (K: dimensions) or one (V) of this slot lie in a line, and how far it is from one line of
            // 16 dimensions of V (32 with int4) to the next of the same dimensions: see `kv`.
            let (lane, quad_lines) = if self.is_k {
                (4 * slot, 0)
            } else if C::NIBBLES {
                (slot % 4, dim.div_ceil(2 * LANES))
            } else {
                (slot % 4, dim / LANES)
            };
            let lines = headers + slot / 4 * quad_lines * 64 + lane;
            for (g, dims) in groups(dim).enumerate() {
                let mut codes = [0u8; KV_GROUP];
                let (scale, minimum) = quantize(&x[dims.clone()], C::MAX, &mut codes);
                // SAFETY: the slot's entries of the group's header and lines lie inside its span; writing them is the
                // caller's promise.
                unsafe {
                    let header = span.add(g * GROUP_HEADER).cast::<u16>().add(slot);
                    header.write(scale);
                    header.add(KV_SPAN).write(minimum);
                    // 16 dimensions, `codes[16 * i..]`, are four steps of K or one of V.
                    for i in 0..dims.len() / LANES {
                        let d = dims.start + i * LANES;
                        let codes = codes[i * LANES..][..LANES].as_ptr();
                        let next = if C::NIBBLES { codes.add(LANES) } else { codes };
                        match (self.is_k, C::NIBBLES) {
                            (true, false) => {
                                for quad in 0..4 {
                                    let to = span.add(lines + (d / 4 + quad) * 64);
                                    to.cast::<[u8; 4]>()
                                        .write(codes.add(4 * quad).cast::<[u8; 4]>().read());
                                }
                            }
                            (true, true) => {
                                for pair in 0..2 {
                                    let to = span.add(lines + (d / 8 + pair) * 64);
                                    for j in 0..4 {
                                        let at = codes.add(8 * pair + j);
                                        to.add(j).write(at.read() | at.add(4).read() << 4);
                                    }
                                }
                            }
                            (false, false) => {
                                let to = span.add(lines + d / LANES * 64);
                                for j in 0..LANES {
                                    to.add(4 * j).write(codes.add(j).read());
                                }
                            }
                            (false, true) if i % 2 == 0 => {
                                let to = span.add(lines + d / (2 * LANES) * 64);
                                // A group's codes are filled up with zeros, so an odd last 16 pair with those.
                                for j in 0..LANES {
                                    to.add(4 * j)
                                        .write(codes.add(j).read() | next.add(j).read() << 4);
                                }
                            }
                            (false, true) => {}
                        }
                    }
                }
            }
        }
    }
}

/// Codes `0..=max` of a group of up to 64 values. Returns the bits of scale and minimum as f16. A group with a value
/// that is not finite, or beyond f16, has a scale or a minimum that is not finite either.
#[inline(always)]
fn quantize(x: &[f32], max: f32, codes: &mut [u8; KV_GROUP]) -> (u16, u16) {
    let (mut least, mut most, mut finite) = (f32::INFINITY, f32::NEG_INFINITY, true);
    for x in x {
        least = if *x < least { *x } else { least };
        most = if *x > most { *x } else { most };
        finite &= x.is_finite();
    }
    if !finite {
        return (f16::NAN.to_bits(), f16::NAN.to_bits());
    }
    let minimum = f16::from_f32(least);
    let scale = f16::from_f32((most - minimum.to_f32()) / max);
    let inverse = 1.0 / scale.to_f32();
    // All values are the minimum, or so near that an f16 cannot tell them apart.
    if inverse.is_finite() {
        for (code, x) in codes.iter_mut().zip(x) {
            let code_float = (x - minimum.to_f32()) * inverse;
            let code_float = if code_float > 0.0 { code_float } else { 0.0 };
            let code_float = if code_float < max { code_float } else { max };
            // Rounds to nearest, ties to even; the integer stands in the low bits.
            *code = (code_float + ROUND_MAGIC).to_bits() as u8;
        }
    }
    (scale.to_bits(), minimum.to_bits())
}
