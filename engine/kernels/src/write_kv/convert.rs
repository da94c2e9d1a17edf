//! K and V of one type as K and V of another: the stored values are read as f32 and stored again by the rule of
//! [`Kernels::write_kv`](crate::Kernels::write_kv), so that a converted slot has the bits that the target's own kernels
//! give such values.
//!
//! Works on single layers of single blocks, wherever they lie, on the caller's thread: what a peer sends is converted
//! while the engine computes. Which spans go where is the caller's plan.

use std::marker::PhantomData;

use super::{Int4, Int8, Rows, Store, StoreCodes};
use crate::attention::codes::groups;
use crate::kv::{GROUP_HEADER, KV_SPAN, KvDtype, KvShape, KvView};
use crate::math::LANES;
use crate::simd::{BFloat16, Element, Float16, Float32, Kernel, Simd, dispatch};
use crate::{Error, Isa};

/// The heads and spans that one layer of a source block and one of a target block share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvSpans {
    pub from_span: u32,
    pub to_span: u32,
    pub spans: u32,
    pub from_head: u32,
    pub to_head: u32,
    pub heads: u32,
}

/// Converts between two shapes whose heads have the same size.
#[derive(Clone, Copy, Debug)]
pub struct KvConverter {
    isa: Isa,
    from: KvShape,
    to: KvShape,
}

impl KvConverter {
    /// A converter; the shapes' numbers of blocks and layers do not matter.
    ///
    /// # Errors
    /// [`Error::IsaUnavailable`], [`Error::KvBlockSize`], [`Error::KvHeadDim`] (also where the heads differ in size),
    /// [`Error::KvEmpty`].
    pub fn new(isa: Isa, from: KvShape, to: KvShape) -> Result<KvConverter, Error> {
        if !isa.is_available() {
            return Err(Error::IsaUnavailable { isa });
        }
        let single = |shape: KvShape| KvShape {
            blocks: 1,
            layers: 1,
            ..shape
        };
        let (from, to) = (single(from), single(to));
        from.check()?;
        to.check()?;
        if from.head_dim != to.head_dim {
            return Err(Error::KvHeadDim {
                head_dim: from.head_dim,
            });
        }
        Ok(KvConverter { isa, from, to })
    }

    /// Writes the slots of `spans` in `target`, one layer of a target block, from `source`, one layer of a source block.
    ///
    /// *Panics* where a span or head is outside of its block, a length is not a layer's, or `target` does not have its
    /// elements' alignment.
    pub fn convert(&self, source: &[u8], target: &mut [u8], spans: &KvSpans) {
        let (from, to) = (&self.from, &self.to);
        assert_eq!(source.len(), from.layer_bytes(), "one layer of {from:?}");
        assert_eq!(target.len(), to.layer_bytes(), "one layer of {to:?}");
        let inside = |shape: &KvShape, span: u32, head: u32| {
            let spans_end = u64::from(span) + u64::from(spans.spans);
            let heads_end = u64::from(head) + u64::from(spans.heads);
            assert!(
                spans_end <= u64::from(shape.block_size) / KV_SPAN as u64
                    && heads_end <= u64::from(shape.kv_heads),
                "{spans:?} is outside of {shape:?}"
            );
        };
        inside(from, spans.from_span, spans.from_head);
        inside(to, spans.to_span, spans.to_head);
        // SAFETY: `target` is one layer of one block, ours alone for the time of this call, which is as long as the view
        // is used.
        let view = unsafe { KvView::new(target.as_mut_ptr(), *to) }
            .expect("checked, but for the alignment");
        let (heads, dim) = (to.kv_heads as usize, to.head_dim as usize);
        // One span of all heads at a time, as rows.
        let mut rows = vec![0.0; KV_SPAN * heads * dim];
        for span in 0..spans.spans {
            for is_k in [true, false] {
                for head in 0..spans.heads {
                    let kv = if is_k { 0 } else { from.kv_heads };
                    let at = (kv + spans.from_head + head) as usize * from.head_bytes()
                        + (spans.from_span + span) as usize * from.span_bytes();
                    let column = (spans.to_head + head) as usize * dim;
                    self.read(
                        &source[at..][..from.span_bytes()],
                        is_k,
                        &mut rows[column..],
                        heads * dim,
                    );
                }
                for head in 0..spans.heads {
                    let head = (spans.to_head + head) as usize;
                    self.store(&view, spans.to_span + span, head, is_k, &rows);
                }
            }
        }
    }

    /// The 16 rows of a span, `row_stride` apart.
    fn read(&self, span: &[u8], is_k: bool, rows: &mut [f32], row_stride: usize) {
        let dim = self.from.head_dim as usize;
        macro_rules! read {
            ($kernel:ident::<$element:ty>) => {{
                let kernel = $kernel::<$element> {
                    span,
                    dim,
                    is_k,
                    rows,
                    row_stride,
                    element: PhantomData,
                };
                // SAFETY: `new` checked the instruction set; the slices are as long as the kernel needs.
                unsafe { dispatch(self.isa, kernel) }
            }};
        }
        match self.from.dtype {
            KvDtype::F32 => read!(Read::<Float32>),
            KvDtype::F16 => read!(Read::<Float16>),
            KvDtype::BF16 => read!(Read::<BFloat16>),
            KvDtype::Int8 => read!(ReadCodes::<Int8>),
            KvDtype::Int4 => read!(ReadCodes::<Int4>),
        }
    }

    /// Stores rows of all heads' width as the slots of a span.
    fn store(&self, view: &KvView, span: u32, head: usize, is_k: bool, x: &[f32]) {
        let first = span * KV_SPAN as u32;
        let slots: [(u32, u32); KV_SPAN] = std::array::from_fn(|slot| (0, first + slot as u32));
        let rows = Rows {
            kv: view,
            layer: 0,
            slots: &slots,
            head,
            row_stride: (self.to.kv_heads * self.to.head_dim) as usize,
            x,
        };
        macro_rules! store {
            ($kernel:ident::<$element:ty>) => {{
                let kernel = $kernel::<$element> {
                    rows,
                    is_k,
                    element: PhantomData,
                };
                // SAFETY: `new` checked the instruction set; the slots are in the view, which is ours alone.
                unsafe { dispatch(self.isa, kernel) }
            }};
        }
        match self.to.dtype {
            KvDtype::F32 => store!(Store::<Float32>),
            KvDtype::F16 => store!(Store::<Float16>),
            KvDtype::BF16 => store!(Store::<BFloat16>),
            KvDtype::Int8 => store!(StoreCodes::<Int8>),
            KvDtype::Int4 => store!(StoreCodes::<Int4>),
        }
    }
}

/// The rows of one span of floats.
struct Read<'a, E> {
    span: &'a [u8],
    dim: usize,
    is_k: bool,
    rows: &'a mut [f32],
    row_stride: usize,
    element: PhantomData<E>,
}

impl<E: Element> Kernel for Read<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let vectors = self.span.chunks_exact(LANES * E::BYTES).enumerate();
        for (i, vector) in vectors {
            // SAFETY: `vector` is 16 elements; the caller has the instruction set.
            let lanes = unsafe { S::to_array(E::load::<S>(vector.as_ptr())) };
            if self.is_k {
                for (slot, x) in lanes.into_iter().enumerate() {
                    self.rows[slot * self.row_stride + i] = x;
                }
            } else {
                let at = i * LANES;
                let row = at / self.dim * self.row_stride + at % self.dim;
                self.rows[row..][..LANES].copy_from_slice(&lanes);
            }
        }
    }
}

/// The rows of one span of codes.
struct ReadCodes<'a, C> {
    span: &'a [u8],
    dim: usize,
    is_k: bool,
    rows: &'a mut [f32],
    row_stride: usize,
    element: PhantomData<C>,
}

impl<C: super::Levels> Kernel for ReadCodes<'_, C> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let lines = &self.span[groups(self.dim).count() * GROUP_HEADER..];
        let mut v_steps = self.dim.div_ceil(LANES);
        if C::NIBBLES {
            v_steps = v_steps.next_multiple_of(2);
        }
        for (g, dims) in groups(self.dim).enumerate() {
            let header = &self.span[g * GROUP_HEADER..][..GROUP_HEADER];
            // SAFETY: the header is 16 scales and 16 minimums, as f16; the caller has the instruction set.
            let (scales, minimums) = unsafe {
                let scales = header.as_ptr().cast::<u16>();
                let minimums = scales.add(KV_SPAN);
                (
                    S::to_array(S::load_f16(scales)),
                    S::to_array(S::load_f16(minimums)),
                )
            };
            for slot in 0..KV_SPAN {
                let row = &mut self.rows[slot * self.row_stride..][dims.clone()];
                for (x, d) in row.iter_mut().zip(dims.clone()) {
                    // A step is four dimensions of all slots (K), or 16 dimensions of four slots (V): see `kv`.
                    let (step, byte) = if self.is_k {
                        (d / 4, slot * 4 + d % 4)
                    } else {
                        (slot / 4 * v_steps + d / LANES, d % LANES * 4 + slot % 4)
                    };
                    let code = match (C::NIBBLES, step % 2) {
                        (false, _) => lines[step * 64 + byte],
                        (true, 0) => lines[step / 2 * 64 + byte] & 15,
                        (true, _) => lines[step / 2 * 64 + byte] >> 4,
                    };
                    *x = scales[slot].mul_add(f32::from(code), minimums[slot]);
                }
            }
        }
    }
}
