//! The inputs of a matrix product: made ready row by row, quantised to int8, laid out in the order the loops read them.
//!
//! ```text
//! token tile of T rows:  codes        [group of 32][T][32] i8
//!                        scales       [group of 32][T]     f32   dx
//!                        scaled sums  [group of 32][T]     f32   dx * sum of the codes
//!                        sums         [group of 32][T][2]  i32   sums of 16 codes
//! or, for float weights: floats       [col][T]             f32
//! ```
//!
//! A tile starts at `first_token * elements per token` of each array, so tiles of different sizes pack without gaps.
//!
//! What a product reads is often a norm of the residual stream, or a gated activation. Both are computed here, a row at
//! a time in a buffer that stays in the L1 cache, instead of in a pass over memory of their own.

use crate::elementwise::{gate_row, norm_row};
use crate::kernels::{Kernels, Shared};
use crate::linear::Input;
use crate::math::{LANES, ROUND_MAGIC};
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
    /// Makes the rows of `input` ready in the tiles already cut: as codes, as floats, or both.
    pub(crate) fn prepare_rows(
        &self,
        input: Input<'_>,
        tokens: usize,
        cols: usize,
        codes: bool,
        floats: bool,
        to: &mut Activations,
    ) {
        let groups = cols / GROUP;
        let len = |wanted: bool, per_token: usize| if wanted { tokens * per_token } else { 0 };
        let arrays = Arrays {
            codes: Shared::new(to.codes.take(len(codes, cols))),
            scales: Shared::new(to.scales.take(len(codes, groups))),
            scaled_sums: Shared::new(to.scaled_sums.take(len(codes, groups))),
            sums: Shared::new(to.sums.take(len(codes, 2 * groups))),
            floats: Shared::new(to.floats.take(len(floats, cols))),
        };
        let (tiles, isa) = (&to.tiles, self.isa());
        let rows = Shared::new(
            to.rows
                .take(tokens * if input.is_plain() { 0 } else { cols }),
        );
        // Quantising touches every element a few times, and an exponential costs as much as sixteen of them.
        let elements = cols * if input.is_gated() { 16 } else { 2 };
        self.for_ranges(tokens, elements, &|range| {
            for token in range {
                let row = if input.is_plain() {
                    0..0
                } else {
                    token * cols..(token + 1) * cols
                };
                let tile = tiles.partition_point(|(first, _)| *first <= token) - 1;
                let (first, size) = tiles[tile];
                // SAFETY: the row is this token's alone, and so are its places in the arrays, which were taken for
                // `tokens`; the instruction set was checked.
                unsafe {
                    let kernel = PrepareRow {
                        input,
                        token,
                        cols,
                        row: rows.slice(row),
                        arrays: &arrays,
                        first,
                        size,
                        codes,
                        floats,
                    };
                    dispatch(isa, kernel);
                }
            }
        });
    }
}

struct Arrays {
    codes: Shared<i8>,
    scales: Shared<f32>,
    scaled_sums: Shared<f32>,
    sums: Shared<i32>,
    floats: Shared<f32>,
}

struct PrepareRow<'a> {
    input: Input<'a>,
    token: usize,
    cols: usize,
    /// Where a row is computed; empty where it only has to be read.
    row: &'a mut [f32],
    arrays: &'a Arrays,
    /// The token tile: its first token and its size.
    first: usize,
    size: usize,
    codes: bool,
    floats: bool,
}

impl Kernel for PrepareRow<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (token, cols, size) = (self.token, self.cols, self.size);
        let row = self.row;
        // SAFETY: the processor has the instruction set; a kernel of rows reads and writes `cols` elements of each.
        let x: &[f32] = unsafe {
            match self.input {
                Input::Rows(x) => &x[token * cols..(token + 1) * cols],
                Input::Normed { x, weight, eps } => {
                    norm_row::<S>(&x[token * cols..(token + 1) * cols], weight, eps, row);
                    row
                }
                Input::Gated { gate_up, act } => {
                    let both = &gate_up[2 * token * cols..2 * (token + 1) * cols];
                    gate_row::<S>(act, &both[..cols], &both[cols..], row);
                    row
                }
            }
        };
        let within = token - self.first;
        if self.codes {
            let groups = cols / GROUP;
            let at = |per_token: usize| self.first * per_token;
            // SAFETY: the arrays were taken for all tokens; this token's elements are at `within` of each group.
            unsafe {
                let codes = self.arrays.codes.at(at(cols) + within * GROUP);
                let scales = self.arrays.scales.at(at(groups) + within);
                let scaled_sums = self.arrays.scaled_sums.at(at(groups) + within);
                let sums = self.arrays.sums.at(at(2 * groups) + 2 * within);
                let (groups, _) = x.as_chunks::<GROUP>();
                let (pairs, last) = groups.as_chunks::<2>();
                let write = |g: usize, from: &Quantized, half: usize| {
                    let group = &from.codes[half * GROUP..];
                    codes
                        .add(g * size * GROUP)
                        .copy_from_nonoverlapping(group.as_ptr(), GROUP);
                    let halves = [from.sums[2 * half], from.sums[2 * half + 1]];
                    let scale = from.scales[half];
                    scales.add(g * size).write(scale);
                    scaled_sums
                        .add(g * size)
                        .write(scale * (halves[0] + halves[1]) as f32);
                    sums.add(2 * g * size).cast::<[i32; 2]>().write(halves);
                };
                let mut quantized = Quantized::default();
                for (i, pair) in pairs.iter().enumerate() {
                    quantized.set::<S>(pair);
                    write(2 * i, &quantized, 0);
                    write(2 * i + 1, &quantized, 1);
                }
                for x in last {
                    quantized.set::<S>(&[*x, *x]);
                    write(groups.len() - 1, &quantized, 0);
                }
            }
        }
        if self.floats {
            // SAFETY: as above.
            unsafe {
                let floats = self.arrays.floats.at(self.first * cols + within);
                for (k, x) in x.iter().enumerate() {
                    floats.add(k * size).write(*x);
                }
            }
        }
    }
}

/// Two groups of 32 values as codes, their scales, and the sums of 16 codes each.
struct Quantized {
    codes: [i8; 2 * GROUP],
    scales: [f32; 2],
    sums: [i32; 4],
}

impl Default for Quantized {
    fn default() -> Self {
        Quantized {
            codes: [0; 2 * GROUP],
            scales: [0.0; 2],
            sums: [0; 4],
        }
    }
}

impl Quantized {
    /// # Safety
    /// The processor has `S`'s instruction set.
    #[inline(always)]
    unsafe fn set<S: Simd>(&mut self, pair: &[[f32; GROUP]; 2]) {
        for (half, x) in pair.iter().enumerate() {
            // SAFETY: a group has 32 values, and its codes 32 places.
            unsafe {
                let (low, high) = (S::load(x.as_ptr()), S::load(x.as_ptr().add(LANES)));
                let largest = S::max_abs(low, high);
                let mut scale = largest / 127.0;
                let mut inverse = 1.0 / scale;
                // Zero, or so small that its inverse is not a number to multiply by: the group counts as zero.
                if inverse == f32::INFINITY {
                    (scale, inverse) = (0.0, 0.0);
                }
                self.scales[half] = scale;
                // Rounds to the nearest integer, ties to even, which then stands in the low mantissa bits.
                let (inverse, magic) = (S::splat(inverse), S::splat(ROUND_MAGIC));
                let to = self.codes.as_mut_ptr().add(half * GROUP);
                let rounded = S::bits(S::add(S::mul(low, inverse), magic));
                to.cast::<[i8; LANES]>().write(S::low_bytes(rounded));
                let rounded = S::bits(S::add(S::mul(high, inverse), magic));
                to.add(LANES)
                    .cast::<[i8; LANES]>()
                    .write(S::low_bytes(rounded));
            }
        }
        // SAFETY: there are 64 codes.
        self.sums = unsafe { S::quarter_sums(self.codes.as_ptr()) };
    }
}
