//! The inner loops of a product: some row tiles of one segment times one token tile. What differs between formats is
//! in `format`.

mod format;

use crate::kernels::Shared;
use crate::linear::best::{BestLanes, BestLimits};
use crate::matrix::{GROUP, LANES, Segment, codes_per_group_of_bits};
use crate::scratch::{Activations, Buffer};
use crate::simd::{BFloat16, Element, Float16, Float32, Kernel, Simd};
use crate::{Isa, PackedMatrix, WeightType};
use format::{
    Format, IQ4NL, IQ4XS, MXFP4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, load_line,
    load_scales,
};

/// Row tiles the loops take at once at most.
pub(super) const ROW_TILES_MAX: usize = 4;

/// Operands of one strip: `tiles` row tiles of a segment times one token tile.
#[derive(Clone, Copy)]
pub(super) struct Strip<'a> {
    pub w: &'a PackedMatrix,
    pub segment: &'a Segment,
    pub first: usize,
    pub tiles: usize,
    pub activations: &'a Activations,
    /// Tokens of the whole call, and the first of this tile.
    pub tokens: usize,
    pub token: usize,
    pub to: Destination<'a>,
}

/// What becomes of a product's outputs.
#[derive(Clone, Copy)]
pub(super) enum Destination<'a> {
    /// `out = y + bias`, or added to what `out: [tokens, rows]` holds.
    Rows {
        bias: Option<&'a [f32]>,
        out: Shared<f32>,
        adds: bool,
    },
    /// Only the best of each token is kept, by lanes: one entry per token of the tile.
    Best {
        lanes: Shared<BestLanes>,
        limits: BestLimits,
    },
}

impl Strip<'_> {
    /// Computes the strip, whose token tile has `size` tokens.
    pub fn run(self, isa: Isa, size: usize) {
        let strip = self;
        // SAFETY: the instruction set was checked when `Kernels` was made. The activations of the token tile were just
        // laid out for `size` tokens, and the row tiles are this thread's alone.
        unsafe {
            match strip.segment.ty {
                WeightType::F32 => run_size::<FloatStrip<Float32>>(isa, size, strip),
                WeightType::F16 => run_size::<FloatStrip<Float16>>(isa, size, strip),
                WeightType::BF16 => run_size::<FloatStrip<BFloat16>>(isa, size, strip),
                WeightType::Q4_0 => run_size::<QuantStrip<Q4_0>>(isa, size, strip),
                WeightType::Q4_1 => run_size::<QuantStrip<Q4_1>>(isa, size, strip),
                WeightType::Q5_0 => run_size::<QuantStrip<Q5_0>>(isa, size, strip),
                WeightType::Q5_1 => run_size::<QuantStrip<Q5_1>>(isa, size, strip),
                WeightType::Q8_0 => run_size::<QuantStrip<Q8_0>>(isa, size, strip),
                WeightType::Q2K => run_size::<QuantStrip<Q2K>>(isa, size, strip),
                WeightType::Q3K => run_size::<QuantStrip<Q3K>>(isa, size, strip),
                WeightType::Q4K => run_size::<QuantStrip<Q4K>>(isa, size, strip),
                WeightType::Q5K => run_size::<QuantStrip<Q5K>>(isa, size, strip),
                WeightType::Q6K => run_size::<QuantStrip<Q6K>>(isa, size, strip),
                WeightType::IQ4NL => run_size::<QuantStrip<IQ4NL>>(isa, size, strip),
                WeightType::IQ4XS => run_size::<QuantStrip<IQ4XS>>(isa, size, strip),
                WeightType::MXFP4 => run_size::<QuantStrip<MXFP4>>(isa, size, strip),
            }
        }
    }

    /// The token tile's part of an activation array with `per_token` elements per token, up to the array's end.
    #[inline(always)]
    fn part<'a, T: bytemuck::Pod>(&self, array: &'a Buffer<T>, per_token: usize) -> &'a [T] {
        &array.get(self.tokens * per_token)[self.token * per_token..]
    }
}

/// A strip with its weight format as a type.
trait StripKind {
    /// # Safety
    /// The processor has `S`'s instruction set and the strip's activations are laid out for `T` tokens.
    unsafe fn run<S: Simd, const T: usize>(strip: Strip<'_>);
}

struct SizedStrip<'a, K, const T: usize>(Strip<'a>, std::marker::PhantomData<K>);

impl<K: StripKind, const T: usize> Kernel for SizedStrip<'_, K, T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: passed on.
        unsafe { K::run::<S, T>(self.0) }
    }
}

/// Picks the code compiled for a token tile of `size`, one of [`super::tile_sizes`].
///
/// # Safety
/// As [`StripKind::run`].
unsafe fn run_size<K: StripKind>(isa: Isa, size: usize, strip: Strip<'_>) {
    macro_rules! sized {
        ($run:ident, $($t:literal)*) => {
            match size {
                // SAFETY: the caller's promise.
                $($t => unsafe { crate::simd::$run(SizedStrip::<K, $t>(strip, std::marker::PhantomData)) },)*
                _ => unreachable!("token tiles are cut to the sizes compiled"),
            }
        };
    }
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => sized!(run_avx512, 1 2 3 4 6 8 12),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => sized!(run_avx2, 1 2 4),
        _ => sized!(run_scalar, 1),
    }
}

struct QuantStrip<F>(std::marker::PhantomData<F>);

impl<F: Format> StripKind for QuantStrip<F> {
    #[inline(always)]
    unsafe fn run<S: Simd, const T: usize>(strip: Strip<'_>) {
        let mut tile = strip.first;
        let end = strip.first + strip.tiles;
        // SAFETY: passed on.
        unsafe {
            // One token alone leaves the dots waiting for each other; more row tiles at once keep the units busy.
            if const { S::REGISTERS >= 32 && T == 1 } {
                let operands = Operands::new(&strip, ROW_TILES_MAX);
                while tile + ROW_TILES_MAX <= end {
                    quant_tiles::<S, F, ROW_TILES_MAX, T>(&strip, &operands, tile);
                    tile += ROW_TILES_MAX;
                }
            }
            let operands = Operands::new(&strip, 1);
            while tile < end {
                quant_tiles::<S, F, 1, T>(&strip, &operands, tile);
                tile += 1;
            }
        }
    }
}

/// What the row tiles of a strip have in common, found once: a row tile of a few hundred columns takes about a thousand
/// cycles, and finding this again for each would be a tenth of them.
struct Operands {
    groups: usize,
    x_codes: *const i8,
    x_scales: *const f32,
    x_scaled_sums: *const f32,
    x_sums: *const i32,
    zero_point: i32,
    /// The strip's first row tile, and from there to the next.
    weights: *const u8,
    tile_bytes: usize,
    codes_offset: usize,
    /// How far ahead of the weights memory is asked for more, and how many lines of each row tile.
    ahead: usize,
    lines: usize,
}

impl Operands {
    /// Of a strip that is walked `row_tiles` at a time.
    #[inline(always)]
    fn new(strip: &Strip<'_>, row_tiles: usize) -> Operands {
        let groups = strip.w.cols() / GROUP;
        let activations = strip.activations;
        let tile_bytes = strip.segment.tile_bytes;
        // The first token tile brings the weights in, the others find them in the cache.
        let brings = strip.token == 0;
        Operands {
            groups,
            x_codes: strip.part(&activations.codes, groups * GROUP).as_ptr(),
            x_scales: strip.part(&activations.scales, groups).as_ptr(),
            x_scaled_sums: strip.part(&activations.scaled_sums, groups).as_ptr(),
            x_sums: strip.part(&activations.sums, 2 * groups).as_ptr(),
            zero_point: strip.segment.ty.zero_point(),
            weights: strip
                .w
                .tiles_from(strip.segment, strip.first, strip.tiles)
                .as_ptr(),
            tile_bytes,
            codes_offset: strip.segment.codes_offset,
            ahead: row_tiles * tile_bytes,
            lines: if brings { tile_bytes / 64 } else { 0 },
        }
    }
}

/// # Safety
/// As [`StripKind::run`]; tiles `tile..tile + R` are in the strip, whose operands these are.
// A token's index selects from several arrays side by side.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn quant_tiles<S: Simd, F: Format, const R: usize, const T: usize>(
    strip: &Strip<'_>,
    operands: &Operands,
    tile: usize,
) {
    let Operands {
        groups,
        x_codes,
        x_scales,
        x_scaled_sums,
        x_sums,
        zero_point,
        tile_bytes,
        codes_offset,
        lines,
        ..
    } = *operands;
    let weights = operands
        .weights
        .wrapping_add((tile - strip.first) * tile_bytes);
    let codes_step = const { codes_per_group_of_bits(F::BITS) };
    // Lines are asked for evenly: `due` grows by their number with each group, and one is due per `groups`.
    let mut next = weights.wrapping_add(operands.ahead);
    let mut due = 0;
    // SAFETY: for the whole loop: a tile holds the scales and codes of all groups, as packed, and the activations hold
    // `groups` times `T` entries; every pointer below stays within the group's part, but for those of `prefetch`.
    unsafe {
        let mut acc = [[S::splat(0.0); T]; R];
        for g in 0..groups {
            let x = x_codes.add(g * T * GROUP);
            let x_scales = x_scales.add(g * T);
            let sums = x_sums.add(2 * g * T);
            let mut scales = [load_scales::<S, F>(weights, g); R];
            for r in 1..R {
                scales[r] = load_scales::<S, F>(weights.wrapping_add(r * tile_bytes), g);
            }
            let codes: [*const u8; R] = std::array::from_fn(|r| {
                weights.wrapping_add(r * tile_bytes + codes_offset + g * codes_step)
            });
            due += lines;
            let from = next;
            while due >= groups {
                due -= groups;
                next = next.wrapping_add(64);
            }
            // All of one row tile before the next: memory is faster with runs than with leaps between row tiles.
            let run = next.addr() - from.addr();
            for r in 0..R {
                for at in (0..run).step_by(64) {
                    S::prefetch(from.wrapping_add(r * tile_bytes + at));
                }
            }
            let mut dot = [[S::splat_i(0); T]; R];
            if !F::AFFINE {
                for t in 0..T {
                    let second = if F::HALF_GROUPS {
                        0
                    } else {
                        *sums.add(2 * t + 1)
                    };
                    let start = S::splat_i(-zero_point * (*sums.add(2 * t) + second));
                    for dot in &mut dot {
                        dot[t] = start;
                    }
                }
            }
            for step in 0..8 {
                // Lines that share a load follow each other, unless the first half of the columns goes first.
                let line = if F::HALF_GROUPS || F::BITS == 8 {
                    step
                } else {
                    step / 2 + step % 2 * 4
                };
                if F::HALF_GROUPS && step == 4 {
                    for t in 0..T {
                        let dx = S::splat(*x_scales.add(t));
                        let start = S::splat_i(-zero_point * *sums.add(2 * t + 1));
                        for r in 0..R {
                            let both = S::mul(scales[r].scales[0], dx);
                            acc[r][t] = S::fma(both, S::to_float(dot[r][t]), acc[r][t]);
                            dot[r][t] = start;
                        }
                        if F::AFFINE {
                            let sum = S::splat(*x_scales.add(t) * *sums.add(2 * t) as f32);
                            for r in 0..R {
                                acc[r][t] = S::fma(scales[r].mins[0], sum, acc[r][t]);
                            }
                        }
                    }
                }
                // Loops instead of closures: a closure that is not inlined loses the instruction set.
                let mut w = [load_line::<S, F>(codes[0], line); R];
                for r in 1..R {
                    w[r] = load_line::<S, F>(codes[r], line);
                }
                for t in 0..T {
                    let x = S::broadcast_codes(x.add(t * GROUP + 4 * line));
                    for r in 0..R {
                        dot[r][t] = if F::WIDE {
                            S::dot::<true>(dot[r][t], w[r], x)
                        } else {
                            S::dot::<false>(dot[r][t], w[r], x)
                        };
                    }
                }
            }
            for r in 0..R {
                let last = if F::HALF_GROUPS { 1 } else { 0 };
                for t in 0..T {
                    let both = S::mul(scales[r].scales[last], S::splat(*x_scales.add(t)));
                    acc[r][t] = S::fma(both, S::to_float(dot[r][t]), acc[r][t]);
                }
                if F::AFFINE {
                    let scaled_sums = x_scaled_sums.add(g * T);
                    for t in 0..T {
                        let sum = if F::HALF_GROUPS {
                            *x_scales.add(t) * *sums.add(2 * t + 1) as f32
                        } else {
                            *scaled_sums.add(t)
                        };
                        acc[r][t] = S::fma(scales[r].mins[last], S::splat(sum), acc[r][t]);
                    }
                }
            }
        }
        for (r, acc) in acc.into_iter().enumerate() {
            store::<S, T>(strip, tile + r, acc);
        }
    }
}

/// Takes one row tile's outputs where they go, without the filling rows.
///
/// # Safety
/// The processor has `S`'s instruction set, and the outputs are this thread's alone.
#[inline(always)]
unsafe fn store<S: Simd, const T: usize>(strip: &Strip<'_>, tile: usize, acc: [S::F; T]) {
    let rows = (strip.segment.rows - tile * LANES).min(LANES);
    let first_row = strip.segment.first_row + tile * LANES;
    let (bias, to, adds) = match strip.to {
        Destination::Rows { bias, out, adds } => (bias, out, adds),
        Destination::Best { lanes, limits } => {
            for (t, acc) in acc.into_iter().enumerate() {
                // SAFETY: the lanes are this thread's alone; otherwise the caller's promise.
                unsafe { lanes.slice(t..t + 1)[0].take::<S>(acc, first_row, rows, limits) };
            }
            return;
        }
    };
    let width = strip.w.rows();
    let first = strip.token * width + first_row;
    if rows == LANES {
        // SAFETY: the caller's promise; these 16 outputs of each token are this row tile's alone, and those of the last
        // token end within all outputs, so the others do.
        unsafe {
            let bias = bias.map(|bias| S::load(bias[first_row..][..LANES].as_ptr()));
            to.at(first + (T - 1) * width + LANES);
            let mut out = to.at(first);
            for mut acc in acc {
                if let Some(bias) = bias {
                    acc = S::add(acc, bias);
                }
                if adds {
                    acc = S::add(S::load(out), acc);
                }
                S::store(out, acc);
                out = out.wrapping_add(width);
            }
        }
        return;
    }
    for (t, acc) in acc.into_iter().enumerate() {
        let at = first + t * width;
        // SAFETY: these `rows` outputs of this token are this row tile's alone.
        let out = unsafe { to.slice(at..at + rows) };
        // SAFETY: the caller's promise.
        let lanes = unsafe { S::to_array(acc) };
        for (r, out) in out.iter_mut().enumerate() {
            let y = bias.map_or(lanes[r], |bias| lanes[r] + bias[first_row + r]);
            *out = if adds { *out + y } else { y };
        }
    }
}

struct FloatStrip<E>(std::marker::PhantomData<E>);

impl<E: Element> StripKind for FloatStrip<E> {
    #[inline(always)]
    unsafe fn run<S: Simd, const T: usize>(strip: Strip<'_>) {
        // One tile has T chains of additions, each waiting for the last: four tiles at once keep the units busy where
        // T is small.
        let mut tile = strip.first;
        let end = strip.first + strip.tiles;
        // SAFETY: passed on.
        unsafe {
            if const { S::REGISTERS >= 32 && T <= 4 } {
                while tile + 4 <= end {
                    float_tiles::<S, E, 4, T>(&strip, tile);
                    tile += 4;
                }
            }
            while tile < end {
                float_tiles::<S, E, 1, T>(&strip, tile);
                tile += 1;
            }
        }
    }
}

/// # Safety
/// As [`StripKind::run`]; tiles `tile..tile + R` are in the strip.
#[inline(always)]
unsafe fn float_tiles<S: Simd, E: Element, const R: usize, const T: usize>(
    strip: &Strip<'_>,
    tile: usize,
) {
    let weights: [*const u8; R] =
        std::array::from_fn(|r| strip.w.tile(strip.segment, tile + r).as_ptr());
    // SAFETY: for the whole loop: a tile holds 16 weights per column, the activations `T` values per column.
    unsafe {
        let mut acc = [[S::splat(0.0); T]; R];
        let cols = strip.w.cols();
        let x = strip.part(&strip.activations.floats, cols).as_ptr();
        for k in 0..cols {
            let x: [S::F; T] = broadcast::<S, T>(x.add(k * T));
            for r in 0..R {
                let w = E::load::<S>(weights[r].add(k * LANES * E::BYTES));
                for t in 0..T {
                    acc[r][t] = S::fma(w, x[t], acc[r][t]);
                }
            }
        }
        for (r, acc) in acc.into_iter().enumerate() {
            store::<S, T>(strip, tile + r, acc);
        }
    }
}

/// # Safety
/// `T` values are readable and the processor has `S`'s instruction set.
#[inline(always)]
unsafe fn broadcast<S: Simd, const T: usize>(from: *const f32) -> [S::F; T] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut x = [S::splat(0.0); T];
        for (t, x) in x.iter_mut().enumerate() {
            *x = S::splat(*from.add(t));
        }
        x
    }
}
