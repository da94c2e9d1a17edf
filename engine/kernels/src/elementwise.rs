//! The kernels between the matrix products: norms, rotation, activation, caps.
//!
//! What a product reads through a norm or a gated activation is computed by the product itself (`quantize`), row by row
//! with the functions here; only what stands on its own in a step is a kernel of its own.
//!
//! Mostly plain loops: inside `run` the compiler vectorises them for the instruction set at hand, and may not change a
//! bit. Rows are shared out to the threads where there are enough of them.

use crate::kernels::{Kernels, Shared};
use crate::math::{self, LANES, tree_sum};
use crate::rope::rotate_head;
use crate::simd::{Kernel, Simd, dispatch};
use crate::{RopePairing, RopeTable};

/// What is applied to the gate of a gated feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    Silu,
    /// The tanh form of GELU.
    GeluTanh,
}

impl Kernels {
    /// `x[t] += y[t] / rms(y[t]) * weight`, rows of `weight.len()`.
    pub fn add_normed(&self, x: &mut [f32], y: &[f32], weight: &[f32], eps: f32, tokens: usize) {
        let width = weight.len();
        assert_eq!(
            (x.len(), y.len()),
            (tokens * width, tokens * width),
            "add_normed: [tokens, width]"
        );
        let (isa, x) = (self.isa(), Shared::new(x));
        self.for_ranges(tokens, width, &|range| {
            for t in range {
                let row = t * width..(t + 1) * width;
                // SAFETY: rows are disjoint; the instruction set was checked.
                unsafe {
                    let kernel = AddNormed {
                        x: x.slice(row.clone()),
                        y: &y[row],
                        weight,
                        eps,
                    };
                    dispatch(isa, kernel);
                }
            }
        });
    }

    /// RMS normalisation of each head, in place (QK-norm). `x`: `[tokens, heads, head_dim]` with `row_stride`.
    #[allow(clippy::too_many_arguments)]
    pub fn head_norm(
        &self,
        x: &mut [f32],
        row_stride: usize,
        heads: usize,
        head_dim: usize,
        tokens: usize,
        weight: &[f32],
        eps: f32,
    ) {
        assert_eq!(weight.len(), head_dim, "head_norm: weight is [head_dim]");
        assert!(
            heads * head_dim <= row_stride || tokens <= 1,
            "head_norm: rows overlap"
        );
        let (isa, x) = (self.isa(), Shared::new(x));
        self.for_ranges(tokens, heads * head_dim, &|range| {
            for t in range {
                // SAFETY: rows are disjoint, `row_stride` apart; the instruction set was checked.
                unsafe {
                    let row = x.slice(t * row_stride..t * row_stride + heads * head_dim);
                    for head in row.chunks_exact_mut(head_dim) {
                        dispatch(
                            isa,
                            NormInPlace {
                                x: head,
                                weight,
                                eps,
                            },
                        );
                    }
                }
            }
        });
    }

    /// Rotates in place. `x`: `[tokens, heads, head_dim]` with `row_stride`; one position per token. Dimensions of a
    /// head behind `table.dims()` pass through.
    #[allow(clippy::too_many_arguments)]
    pub fn rope(
        &self,
        x: &mut [f32],
        row_stride: usize,
        heads: usize,
        head_dim: usize,
        positions: &[u32],
        table: &RopeTable,
        pairing: RopePairing,
    ) {
        assert!(
            table.dims() <= head_dim,
            "rope rotates `{}` of `{head_dim}` dimensions",
            table.dims()
        );
        assert!(
            heads * head_dim <= row_stride || positions.len() <= 1,
            "rope: rows overlap"
        );
        let (isa, x) = (self.isa(), Shared::new(x));
        self.for_ranges(positions.len(), heads * head_dim, &|range| {
            for t in range {
                let (cos, sin) = table.at(positions[t]);
                // SAFETY: rows are disjoint, `row_stride` apart; the instruction set was checked.
                unsafe {
                    let x = x.slice(t * row_stride..t * row_stride + heads * head_dim);
                    dispatch(
                        isa,
                        Rotate {
                            x,
                            head_dim,
                            cos,
                            sin,
                            pairing,
                        },
                    );
                }
            }
        });
    }

    /// `x = cap * tanh(x / cap)`.
    pub fn soft_cap(&self, x: &mut [f32], cap: f32) {
        let (isa, len, x) = (self.isa(), x.len(), Shared::new(x));
        self.for_ranges(len, 4, &|range| {
            // SAFETY: ranges are disjoint; the instruction set was checked.
            unsafe {
                dispatch(
                    isa,
                    Cap {
                        x: x.slice(range),
                        cap,
                    },
                )
            }
        });
    }
}

/// RMS normalisation of one head where it stands.
struct NormInPlace<'a> {
    x: &'a mut [f32],
    weight: &'a [f32],
    eps: f32,
}

impl Kernel for NormInPlace<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: passed on.
        let scale = unsafe { norm_scale::<S>(self.x, self.eps) };
        for (x, w) in self.x.iter_mut().zip(self.weight) {
            *x = *x * scale * w;
        }
    }
}

struct AddNormed<'a> {
    x: &'a mut [f32],
    y: &'a [f32],
    weight: &'a [f32],
    eps: f32,
}

impl Kernel for AddNormed<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: passed on.
        let scale = unsafe { norm_scale::<S>(self.y, self.eps) };
        for ((x, y), w) in self.x.iter_mut().zip(self.y).zip(self.weight) {
            *x += *y * scale * w;
        }
    }
}

/// `1 / rms(x)`.
///
/// # Safety
/// The processor has `S`'s instruction set.
#[inline(always)]
unsafe fn norm_scale<S: Simd>(x: &[f32], eps: f32) -> f32 {
    let (whole, tail) = x.as_chunks::<LANES>();
    // SAFETY: chunks have 16 values.
    let mut lanes = unsafe {
        let mut sums = S::splat(0.0);
        for x in whole {
            let x = S::load(x.as_ptr());
            sums = S::fma(x, x, sums);
        }
        S::to_array(sums)
    };
    for (lane, x) in lanes.iter_mut().zip(tail) {
        *lane = x.mul_add(*x, *lane);
    }
    let mean = tree_sum(&lanes) / x.len() as f32;
    1.0 / (mean + eps).sqrt()
}

/// `out = x / rms(x) * weight`.
///
/// # Safety
/// The processor has `S`'s instruction set.
#[inline(always)]
pub(crate) unsafe fn norm_row<S: Simd>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    // SAFETY: passed on.
    let scale = unsafe { norm_scale::<S>(x, eps) };
    for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
        *out = *x * scale * w;
    }
}

/// `out = act(gate) * up`.
///
/// # Safety
/// The processor has `S`'s instruction set.
#[inline(always)]
pub(crate) unsafe fn gate_row<S: Simd>(act: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    let gate = Gate { act, gate, up, out };
    // SAFETY: passed on.
    unsafe { gate.run::<S>() };
}

struct Rotate<'a> {
    x: &'a mut [f32],
    head_dim: usize,
    cos: &'a [f32],
    sin: &'a [f32],
    pairing: RopePairing,
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for head in self.x.chunks_exact_mut(self.head_dim) {
            rotate_head(head, self.cos, self.sin, self.pairing);
        }
    }
}

struct Gate<'a> {
    act: Activation,
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [f32],
}

impl Gate<'_> {
    /// # Safety
    /// The processor has `S`'s instruction set.
    #[inline(always)]
    unsafe fn lanes<S: Simd>(
        act: Activation,
        gate: &[f32; LANES],
        up: &[f32; LANES],
    ) -> [f32; LANES] {
        // SAFETY: the caller's promise, and both arrays hold 16 values.
        unsafe {
            let gate = S::load(gate.as_ptr());
            let active = match act {
                Activation::Silu => math::silu::<S>(gate),
                Activation::GeluTanh => math::gelu::<S>(gate),
            };
            S::to_array(S::mul(active, S::load(up.as_ptr())))
        }
    }
}

impl Kernel for Gate<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (gates, gate_tail) = self.gate.as_chunks::<LANES>();
        let (ups, up_tail) = self.up.as_chunks::<LANES>();
        let (outs, out_tail) = self.out.as_chunks_mut::<LANES>();
        for ((gate, up), out) in gates.iter().zip(ups).zip(outs) {
            // SAFETY: passed on.
            *out = unsafe { Self::lanes::<S>(self.act, gate, up) };
        }
        let (mut gate, mut up) = ([0.0; LANES], [0.0; LANES]);
        gate[..gate_tail.len()].copy_from_slice(gate_tail);
        up[..up_tail.len()].copy_from_slice(up_tail);
        // SAFETY: passed on.
        let lanes = unsafe { Self::lanes::<S>(self.act, &gate, &up) };
        out_tail.copy_from_slice(&lanes[..out_tail.len()]);
    }
}

struct Cap<'a> {
    x: &'a mut [f32],
    cap: f32,
}

impl Kernel for Cap<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (whole, tail) = self.x.as_chunks_mut::<LANES>();
        // SAFETY: passed on; all arrays hold 16 values.
        unsafe {
            let cap = S::splat(self.cap);
            for x in whole {
                *x = S::to_array(math::soft_cap::<S>(S::load(x.as_ptr()), cap));
            }
            let mut lanes = [0.0; LANES];
            lanes[..tail.len()].copy_from_slice(tail);
            let lanes = S::to_array(math::soft_cap::<S>(S::load(lanes.as_ptr()), cap));
            tail.copy_from_slice(&lanes[..tail.len()]);
        }
    }
}
