//! Matrix products with packed weights.
//!
//! ```text
//! for each part of the row tiles (16 rows each), on whatever thread takes it
//!   for each token tile (1 to 12 rows of x; its activations stay in L1)
//!     for each R row tiles                    <- one kernel call (`strip`) is this loop and what is below
//!       acc[R][T] = 0                            16 R rows x T tokens in registers
//!       for each group of 32 columns, upwards
//!         dot[R][T] = -zero point * sum of codes exact integers
//!         dot[R][T] += codes . activation codes  each weight vector is loaded and unpacked once for T tokens
//!         acc[R][T] = fma(dw * dx, dot, acc) (, fma(mw, sx, acc))
//! ```
//!
//! The tiles change speed only: an accumulator belongs to one output and always walks all columns upwards.
//!
//! A product takes its input as rows, or computes it on the way ([`Input`]), and may add to what is there
//! ([`Output`]), so that between two products of a layer nothing passes over memory on its own. Where only the best
//! output of a token is asked for, outputs do not come to memory at all (`best`).

mod best;
mod strip;

use std::ops::Range;

use crate::kernels::{Shared, share_chunks};
use crate::matrix::has_half_groups;
use crate::quantize::cut_tiles;
use crate::scratch::Activations;
use crate::{Activation, Isa, Kernels, PackedMatrix, Scratch};
use best::Best;
use strip::{Destination, Strip};

/// Weights a thread walks per token tile before it takes the next tile: half of a 1 MiB L2 cache.
const CHUNK_BYTES: usize = 512 << 10;
/// Below this many bytes of weights (times tokens) per thread, waking a helper costs more than it saves.
const BYTES_PER_THREAD_MIN: usize = 16 << 10;

/// Sizes of token tiles for a matrix: with the row tiles that `strip` takes for each, accumulators and dots fit in the
/// registers. Types that scale each half of a group leave room for fewer.
fn tile_sizes(isa: Isa, w: &PackedMatrix) -> &'static [usize] {
    match isa {
        Isa::Avx512 if w.segments().iter().all(|s| has_half_groups(s.ty)) => &[8, 6, 4, 3, 2, 1],
        Isa::Avx512 => &[12, 8, 6, 4, 3, 2, 1],
        Isa::Avx2 => &[4, 2, 1],
        Isa::Scalar => &[1],
    }
}

/// What a product reads: `cols` values per token.
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    /// `[tokens, cols]`
    Rows(&'a [f32]),
    /// `x[t] / rms(x[t]) * weight`, with `x: [tokens, cols]` and `weight: [cols]`.
    Normed {
        x: &'a [f32],
        weight: &'a [f32],
        eps: f32,
    },
    /// `act(gate) * up`, with `gate_up: [tokens, 2 * cols]`, each row being all gates, then all ups.
    Gated { gate_up: &'a [f32], act: Activation },
}

impl Input<'_> {
    pub(crate) fn is_plain(&self) -> bool {
        matches!(self, Input::Rows(_))
    }

    pub(crate) fn is_gated(&self) -> bool {
        matches!(self, Input::Gated { .. })
    }

    fn check(&self, tokens: usize, cols: usize) {
        let (len, expected) = match self {
            Input::Rows(x) => (x.len(), tokens * cols),
            Input::Normed { x, weight, .. } => {
                assert_eq!(weight.len(), cols, "linear: the norm's weight is [cols]");
                (x.len(), tokens * cols)
            }
            Input::Gated { gate_up, .. } => (gate_up.len(), 2 * tokens * cols),
        };
        assert_eq!(len, expected, "linear: x is [tokens, cols]");
    }
}

/// What becomes of a product: `[tokens, rows]`.
#[derive(Debug)]
pub enum Output<'a> {
    Set(&'a mut [f32]),
    Add(&'a mut [f32]),
}

impl Kernels {
    /// `out[t][r] = sum over k of w[r][k] * x[t][k]`, plus `bias[r]` in a last addition.
    ///
    /// As [`product`](Self::product) with plain rows in and out.
    pub fn linear(
        &self,
        w: &PackedMatrix,
        x: &[f32],
        tokens: usize,
        bias: Option<&[f32]>,
        out: &mut [f32],
        scratch: &mut Scratch,
    ) {
        self.product(w, Input::Rows(x), tokens, bias, Output::Set(out), scratch);
    }

    /// `y[t][r] = sum over k of w[r][k] * x[t][k]`, plus `bias[r]` in one addition; then `out = y` or `out += y`.
    ///
    /// *Shapes*: `out: [tokens, rows]`, `bias: [rows]`. For quantised weights the activations are quantised once per
    /// row and group of 32 columns.
    pub fn product(
        &self,
        w: &PackedMatrix,
        input: Input<'_>,
        tokens: usize,
        bias: Option<&[f32]>,
        output: Output<'_>,
        scratch: &mut Scratch,
    ) {
        let rows = w.rows();
        input.check(tokens, w.cols());
        let (out, adds) = match output {
            Output::Set(out) => (out, false),
            Output::Add(out) => (out, true),
        };
        assert_eq!(out.len(), tokens * rows, "linear: out is [tokens, rows]");
        assert!(
            bias.is_none_or(|b| b.len() == rows),
            "linear: bias is [rows]"
        );
        let out = Shared::new(out);
        self.run_product(w, input, tokens, scratch, Sink::Rows { bias, out, adds });
    }

    /// What a product does before it multiplies: makes its input ready in the order the loops read it. For benches.
    #[doc(hidden)]
    pub fn prepare(
        &self,
        w: &PackedMatrix,
        input: Input<'_>,
        tokens: usize,
        scratch: &mut Scratch,
    ) {
        let activations = &mut scratch.activations;
        cut_tiles(tokens, tile_sizes(self.isa(), w), &mut activations.tiles);
        let codes = w.segments().iter().any(|s| s.ty.is_quantized());
        let floats = w.segments().iter().any(|s| !s.ty.is_quantized());
        self.prepare_rows(input, tokens, w.cols(), codes, floats, activations);
    }

    fn run_product(
        &self,
        w: &PackedMatrix,
        input: Input<'_>,
        tokens: usize,
        scratch: &mut Scratch,
        sink: Sink<'_>,
    ) {
        if tokens == 0 {
            return;
        }
        self.prepare(w, input, tokens, scratch);
        let activations = &scratch.activations;
        let job = Product {
            isa: self.isa(),
            w,
            activations,
            tokens,
            sink,
        };
        if w.bytes() * tokens < 2 * BYTES_PER_THREAD_MIN {
            job.run_tiles(0..w.tiles());
        } else {
            self.pool()
                .for_ranges(w.tiles().div_ceil(strip::ROW_TILES_MAX), &|range| {
                    job.run_tiles(share_chunks(range, strip::ROW_TILES_MAX, w.tiles()));
                });
        }
    }
}

/// One product, shared by the threads.
struct Product<'a> {
    isa: Isa,
    w: &'a PackedMatrix,
    activations: &'a Activations,
    tokens: usize,
    sink: Sink<'a>,
}

/// Where the outputs of a product go.
#[derive(Clone, Copy)]
enum Sink<'a> {
    Rows {
        bias: Option<&'a [f32]>,
        out: Shared<f32>,
        adds: bool,
    },
    Best(&'a Best<'a>),
}

impl Product<'_> {
    /// Computes the outputs of a range of row tiles, counted over all segments.
    fn run_tiles(&self, range: Range<usize>) {
        for segment in self.w.segments() {
            let from = range.start.max(segment.first_tile);
            let to = range.end.min(segment.first_tile + segment.tiles);
            let chunk = (CHUNK_BYTES / segment.tile_bytes).max(1);
            let mut first = from;
            while first < to {
                let tiles = chunk.min(to - first);
                for (token, size) in &self.activations.tiles {
                    let run = |to: Destination<'_>| {
                        Strip {
                            w: self.w,
                            segment,
                            first: first - segment.first_tile,
                            tiles,
                            activations: self.activations,
                            tokens: self.tokens,
                            token: *token,
                            to,
                        }
                        .run(self.isa, *size);
                    };
                    match self.sink {
                        Sink::Rows { bias, out, adds } => {
                            run(Destination::Rows { bias, out, adds });
                        }
                        Sink::Best(best) => best.of_strip(*token, *size, run),
                    }
                }
                first += tiles;
            }
        }
    }
}
