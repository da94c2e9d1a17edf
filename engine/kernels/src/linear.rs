//! Matrix products with packed weights.

use crate::format::read_floats;
use crate::matrix::{LANES, Segment, code_at, scale_and_min};
use crate::reference::{QuantizedRow, quantize};
use crate::{Kernels, PackedMatrix, Scratch};

impl Kernels {
    /// `out[t][r] = sum over k of w[r][k] * x[t][k]`, plus `bias[r]` in a last addition.
    ///
    /// *Shapes*: `x: [tokens, cols]`, `out: [tokens, rows]`, `bias: [rows]`. For quantised weights the activations are
    /// quantised once per row and group of 32 columns.
    pub fn linear(
        &self,
        w: &PackedMatrix,
        x: &[f32],
        tokens: usize,
        bias: Option<&[f32]>,
        out: &mut [f32],
        _scratch: &mut Scratch,
    ) {
        let (rows, cols) = (w.rows(), w.cols());
        assert_eq!(x.len(), tokens * cols, "linear: x is [tokens, cols]");
        assert_eq!(out.len(), tokens * rows, "linear: out is [tokens, rows]");
        assert!(
            bias.is_none_or(|b| b.len() == rows),
            "linear: bias is [rows]"
        );
        for (x, out) in x.chunks_exact(cols).zip(out.chunks_exact_mut(rows)) {
            let quantized = quantize(x);
            for segment in w.segments() {
                for (r, out) in out[segment.first_row..][..segment.rows]
                    .iter_mut()
                    .enumerate()
                {
                    let acc = dot(
                        segment,
                        w.tile(segment, r / LANES),
                        r % LANES,
                        x,
                        &quantized,
                    );
                    *out = bias.map_or(acc, |b| acc + b[segment.first_row + r]);
                }
            }
        }
    }
}

fn dot(segment: &Segment, tile: &[u8], lane: usize, x: &[f32], quantized: &QuantizedRow) -> f32 {
    let mut acc = 0.0f32;
    let ty = segment.ty;
    if !ty.is_quantized() {
        let size = ty.block_bytes();
        for (k, x) in x.iter().enumerate() {
            let mut w = [0.0];
            read_floats(ty, &tile[(k * LANES + lane) * size..][..size], &mut w);
            acc = w[0].mul_add(*x, acc);
        }
        return acc;
    }
    let group = ty.group();
    for g in 0..x.len() / group {
        let (scale, min) = scale_and_min(segment, tile, g, lane);
        let (mut dot, mut sum) = (0i32, 0i32);
        for k in g * group..(g + 1) * group {
            let x = i32::from(quantized.codes[k]);
            dot += (i32::from(code_at(segment, tile, k, lane)) - ty.zero_point()) * x;
            sum += x;
        }
        let x_scale = quantized.scales[g * group / 32];
        acc = (scale * x_scale).mul_add(dot as f32, acc);
        if ty.is_affine() {
            acc = min.mul_add(x_scale * sum as f32, acc);
        }
    }
    acc
}
