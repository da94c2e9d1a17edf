//! The inputs of a matrix product: cut into token tiles, quantised to int8, laid out in the order the loops read them.
//!
//! ```text
//! token tile of T rows:  codes        [group of 32][T][32] i8
//!                        scales       [group of 32][T]     f32   dx
//!                        scaled sums  [group of 32][T]     f32   dx * sum of the codes
//!                        sums         [half group ][T]     i32   sum of 16 codes
//! or, for float weights: floats       [col][T]             f32
//! ```
//!
//! A tile starts at `first_token * elements per token` of each array, so tiles of different sizes pack without gaps.

use crate::kernels::{Kernels, Shared};
use crate::matrix::GROUP;
use crate::scratch::Activations;
use crate::simd::{Kernel, Simd, dispatch};

/// Cuts `tokens` in tiles of the given sizes (largest first, ending in 1).
pub(crate) fn cut_tiles(tokens: usize, sizes: &[usize], tiles: &mut Vec<(usize, usize)>) {
    tiles.clear();
    let mut token = 0;
    for size in sizes {
        while tokens - token >= *size {
            tiles.push((token, *size));
            token += size;
        }
    }
}

impl Kernels {
    /// Quantises `x: [tokens, cols]` in the tiles already cut.
    pub(crate) fn quantize_tiles(&self, x: &[f32], cols: usize, to: &mut Activations) {
        let (tokens, groups) = (x.len() / cols, cols / GROUP);
        let codes = Shared::new(to.codes.take(tokens * cols));
        let scales = Shared::new(to.scales.take(tokens * groups));
        let scaled_sums = Shared::new(to.scaled_sums.take(tokens * groups));
        let sums = Shared::new(to.sums.take(tokens * groups * 2));
        let (tiles, isa) = (&to.tiles, self.isa());
        self.for_ranges(tiles.len(), x.len() / tiles.len().max(1), &|range| {
            for (first, size) in &tiles[range] {
                let tile = |width| first * width..(first + size) * width;
                // SAFETY: tiles are disjoint, so are their parts; the instruction set was checked.
                unsafe {
                    let kernel = QuantizeTile {
                        x: &x[tile(cols)],
                        size: *size,
                        cols,
                        codes: codes.slice(tile(cols)),
                        scales: scales.slice(tile(groups)),
                        scaled_sums: scaled_sums.slice(tile(groups)),
                        sums: sums.slice(tile(groups * 2)),
                    };
                    dispatch(isa, kernel);
                }
            }
        });
    }

    /// Lays `x: [tokens, cols]` out as `[col][T]` per tile.
    pub(crate) fn transpose_tiles(&self, x: &[f32], cols: usize, to: &mut Activations) {
        let floats = Shared::new(to.floats.take(x.len()));
        let tiles = &to.tiles;
        self.for_ranges(tiles.len(), x.len() / tiles.len().max(1), &|range| {
            for (first, size) in &tiles[range] {
                let part = first * cols..(first + size) * cols;
                let x = &x[part.clone()];
                // SAFETY: tiles are disjoint, so are their parts.
                let floats = unsafe { floats.slice(part) };
                for (k, column) in floats.chunks_exact_mut(*size).enumerate() {
                    for (t, to) in column.iter_mut().enumerate() {
                        *to = x[t * cols + k];
                    }
                }
            }
        });
    }
}

struct QuantizeTile<'a> {
    x: &'a [f32],
    size: usize,
    cols: usize,
    codes: &'a mut [i8],
    scales: &'a mut [f32],
    scaled_sums: &'a mut [f32],
    sums: &'a mut [i32],
}

impl Kernel for QuantizeTile<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for (t, x) in self.x.chunks_exact(self.cols).enumerate() {
            for (g, x) in x.as_chunks::<GROUP>().0.iter().enumerate() {
                let at = g * self.size + t;
                let codes = &mut self.codes[at * GROUP..][..GROUP];
                let (scale, halves) = quantize_group(x, codes);
                self.scales[at] = scale;
                self.scaled_sums[at] = scale * (halves[0] + halves[1]) as f32;
                self.sums[2 * g * self.size + t] = halves[0];
                self.sums[(2 * g + 1) * self.size + t] = halves[1];
            }
        }
    }
}

/// Codes of 32 values, their scale, and the sums of the first and second 16 codes. Plain Rust that vectorises: the
/// largest magnitude is found on the bits, whose order is that of the values.
#[inline(always)]
fn quantize_group(x: &[f32; GROUP], codes: &mut [i8]) -> (f32, [i32; 2]) {
    let mut lanes = [0u32; 16];
    for half in x.as_chunks::<16>().0 {
        for (lane, x) in lanes.iter_mut().zip(half) {
            *lane = (*lane).max(x.to_bits() & 0x7fff_ffff);
        }
    }
    let largest = f32::from_bits(lanes.into_iter().fold(0, u32::max));
    let mut scale = largest / 127.0;
    let mut inverse = 1.0 / scale;
    // Zero, or so small that its inverse is not a number to multiply by: the group counts as zero.
    if inverse == f32::INFINITY {
        (scale, inverse) = (0.0, 0.0);
    }
    let mut sums = [0i32; 2];
    for ((x, codes), sum) in x
        .as_chunks::<16>()
        .0
        .iter()
        .zip(codes.chunks_exact_mut(16))
        .zip(&mut sums)
    {
        for (x, code) in x.iter().zip(codes) {
            // Rounds to the nearest integer, ties to even, which then stands in the low mantissa bits.
            let rounded = x * inverse + crate::math::ROUND_MAGIC;
            *code = rounded.to_bits() as i8;
            *sum += i32::from(*code);
        }
    }
    (scale, sums)
}
