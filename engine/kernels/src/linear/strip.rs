//! The inner loops of a product: some row tiles of one segment times one token tile.

use crate::kernels::Shared;
use crate::matrix::{GROUP, LANES, Segment};
use crate::scratch::{Activations, Buffer};
use crate::simd::{BFloat16, Element, Float16, Float32, Kernel, Simd};
use crate::{Isa, PackedMatrix, WeightType};

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
    pub bias: Option<&'a [f32]>,
    pub out: Shared<f32>,
    /// Whether results are added to what `out` holds.
    pub adds: bool,
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
                WeightType::Q4_0 => run_size::<QuantStrip<Nibbles>>(isa, size, strip),
                WeightType::Q4_1 => run_size::<QuantStrip<NibblesAffine>>(isa, size, strip),
                WeightType::Q5_0 => run_size::<QuantStrip<Bytes>>(isa, size, strip),
                WeightType::Q5_1 => run_size::<QuantStrip<BytesAffine>>(isa, size, strip),
                WeightType::Q8_0 => run_size::<QuantStrip<WideBytes>>(isa, size, strip),
                WeightType::Q4K => run_size::<QuantStrip<NibblesAffineK>>(isa, size, strip),
                WeightType::Q5K => run_size::<QuantStrip<BytesAffineK>>(isa, size, strip),
                WeightType::Q6K => run_size::<QuantStrip<BytesHalfK>>(isa, size, strip),
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

/// What differs between quantised formats once packed.
trait Format {
    /// Two codes share a byte.
    const NIBBLES: bool;
    /// A minimum per group is added.
    const AFFINE: bool;
    /// Scales are f32, not f16.
    const WIDE_SCALES: bool;
    /// Weights have a scale per 16 columns, not 32.
    const HALF_GROUPS: bool;
    /// Codes use all eight bits.
    const WIDE_CODES: bool;
}

macro_rules! formats {
    ($($name:ident: $nibbles:literal $affine:literal $wide_scales:literal $half:literal $wide_codes:literal;)*) => {
        $(struct $name;
        impl Format for $name {
            const NIBBLES: bool = $nibbles;
            const AFFINE: bool = $affine;
            const WIDE_SCALES: bool = $wide_scales;
            const HALF_GROUPS: bool = $half;
            const WIDE_CODES: bool = $wide_codes;
        })*
    };
}

formats! {
    //              nibbles affine wide scales, half groups, wide codes
    Nibbles:        true  false false false false;
    NibblesAffine:  true  true  false false false;
    NibblesAffineK: true  true  true  false false;
    Bytes:          false false false false false;
    WideBytes:      false false false false true;
    BytesAffine:    false true  false false false;
    BytesAffineK:   false true  true  false false;
    BytesHalfK:     false false true  true  false;
}

struct QuantStrip<F>(std::marker::PhantomData<F>);

impl<F: Format> StripKind for QuantStrip<F> {
    #[inline(always)]
    unsafe fn run<S: Simd, const T: usize>(strip: Strip<'_>) {
        let mut tile = strip.first;
        let end = strip.first + strip.tiles;
        // One token alone leaves the dots waiting for each other; more row tiles at once keep the units busy.
        // SAFETY: passed on.
        unsafe {
            if const { S::REGISTERS >= 32 && T == 1 } {
                while tile + ROW_TILES_MAX <= end {
                    quant_tiles::<S, F, ROW_TILES_MAX, T>(&strip, tile);
                    tile += ROW_TILES_MAX;
                }
            }
            while tile < end {
                quant_tiles::<S, F, 1, T>(&strip, tile);
                tile += 1;
            }
        }
    }
}

/// # Safety
/// As [`StripKind::run`]; tiles `tile..tile + R` are in the strip.
#[inline(always)]
unsafe fn quant_tiles<S: Simd, F: Format, const R: usize, const T: usize>(
    strip: &Strip<'_>,
    tile: usize,
) {
    let groups = strip.w.cols() / GROUP;
    let activations = strip.activations;
    let x_codes = strip.part(&activations.codes, groups * GROUP).as_ptr();
    let x_scales = strip.part(&activations.scales, groups).as_ptr();
    let x_scaled_sums = strip.part(&activations.scaled_sums, groups).as_ptr();
    let x_sums = strip.part(&activations.sums, 2 * groups).as_ptr();
    let zero_point = strip.segment.ty.zero_point();
    let tile_bytes = strip.segment.tile_bytes;
    let tiles = strip.w.tiles_from(strip.segment, tile, R);
    let weights = tiles.as_ptr();
    let codes_offset = strip.segment.codes_offset;
    let scale_size = if F::WIDE_SCALES { 4 } else { 2 };
    let planes = if F::AFFINE || F::HALF_GROUPS { 2 } else { 1 };
    let codes_step = if F::NIBBLES { 256 } else { 512 };
    let scales_step = planes * LANES * scale_size;
    // The first token tile brings the weights in, the others find them in the cache.
    let ahead = if strip.token == 0 { R * tile_bytes } else { 0 };
    // SAFETY: for the whole loop: a tile holds the scales and codes of all groups, as packed, and the activations hold
    // `groups` times `T` entries; every pointer below stays within the group's part, but for those of `prefetch`.
    unsafe {
        let mut acc = [[S::splat(0.0); T]; R];
        for g in 0..groups {
            let x = x_codes.add(g * T * GROUP);
            let x_scales = x_scales.add(g * T);
            let sums = x_sums.add(2 * g * T);
            let scales: [*const u8; R] =
                std::array::from_fn(|r| weights.wrapping_add(r * tile_bytes + g * scales_step));
            let codes: [*const u8; R] = std::array::from_fn(|r| {
                weights.wrapping_add(r * tile_bytes + codes_offset + g * codes_step)
            });
            if ahead > 0 {
                for r in 0..R {
                    let step = codes_step + scales_step;
                    let at = weights.wrapping_add(r * tile_bytes + g * step + ahead);
                    for line in 0..step.div_ceil(64) {
                        S::prefetch(at.wrapping_add(line * 64));
                    }
                }
            }
            let mut dot = [[S::splat_i(0); T]; R];
            if !F::AFFINE {
                for t in 0..T {
                    let sum = *sums.add(2 * t)
                        + if F::HALF_GROUPS {
                            0
                        } else {
                            *sums.add(2 * t + 1)
                        };
                    for dot in &mut dot {
                        dot[t] = S::splat_i(-zero_point * sum);
                    }
                }
            }
            if F::NIBBLES {
                for i in 0..4 {
                    let lines: [S::B; R] =
                        std::array::from_fn(|r| S::load_codes(codes[r].add(64 * i)));
                    let low = lines.map(|line| S::low_nibbles(line));
                    for t in 0..T {
                        let x = S::broadcast_codes(x.add(t * GROUP + 4 * i));
                        for r in 0..R {
                            dot[r][t] = S::dot::<false>(dot[r][t], low[r], x);
                        }
                    }
                    let high = lines.map(|line| S::high_nibbles(line));
                    for t in 0..T {
                        let x = S::broadcast_codes(x.add(t * GROUP + 4 * i + 16));
                        for r in 0..R {
                            dot[r][t] = S::dot::<false>(dot[r][t], high[r], x);
                        }
                    }
                }
            } else {
                for i in 0..8 {
                    if F::HALF_GROUPS && i == 4 {
                        for t in 0..T {
                            let dx = S::splat(*x_scales.add(t));
                            let sum = S::splat_i(-zero_point * *sums.add(2 * t + 1));
                            for r in 0..R {
                                let both = S::mul(load_scale::<S, F>(scales[r]), dx);
                                acc[r][t] = S::fma(both, S::to_float(dot[r][t]), acc[r][t]);
                                dot[r][t] = sum;
                            }
                        }
                    }
                    let lines: [S::B; R] =
                        std::array::from_fn(|r| S::load_codes(codes[r].add(64 * i)));
                    for t in 0..T {
                        let x = S::broadcast_codes(x.add(t * GROUP + 4 * i));
                        for r in 0..R {
                            dot[r][t] = if F::WIDE_CODES {
                                S::dot::<true>(dot[r][t], lines[r], x)
                            } else {
                                S::dot::<false>(dot[r][t], lines[r], x)
                            };
                        }
                    }
                }
            }
            for r in 0..R {
                let half = if F::HALF_GROUPS {
                    LANES * scale_size
                } else {
                    0
                };
                let scale = load_scale::<S, F>(scales[r].add(half));
                for t in 0..T {
                    let both = S::mul(scale, S::splat(*x_scales.add(t)));
                    acc[r][t] = S::fma(both, S::to_float(dot[r][t]), acc[r][t]);
                }
                if F::AFFINE {
                    let min = load_scale::<S, F>(scales[r].add(LANES * scale_size));
                    let scaled_sums = x_scaled_sums.add(g * T);
                    for t in 0..T {
                        acc[r][t] = S::fma(min, S::splat(*scaled_sums.add(t)), acc[r][t]);
                    }
                }
            }
        }
        for (r, acc) in acc.into_iter().enumerate() {
            store::<S, T>(strip, tile + r, acc);
        }
    }
}

/// # Safety
/// 16 scales of the format are readable.
#[inline(always)]
unsafe fn load_scale<S: Simd, F: Format>(from: *const u8) -> S::F {
    // SAFETY: the caller's promise.
    unsafe {
        if F::WIDE_SCALES {
            S::load(from.cast())
        } else {
            S::load_f16(from.cast())
        }
    }
}

/// Writes one row tile's outputs, without the filling rows.
///
/// # Safety
/// The processor has `S`'s instruction set, and the outputs are this thread's alone.
#[inline(always)]
unsafe fn store<S: Simd, const T: usize>(strip: &Strip<'_>, tile: usize, acc: [S::F; T]) {
    let rows = (strip.segment.rows - tile * LANES).min(LANES);
    let first_row = strip.segment.first_row + tile * LANES;
    for (t, acc) in acc.into_iter().enumerate() {
        let at = (strip.token + t) * strip.w.rows() + first_row;
        // SAFETY: these `rows` outputs of this token belong to this row tile only.
        let out = unsafe { strip.out.slice(at..at + rows) };
        // SAFETY: the caller's promise; whole tiles have 16 outputs, and as many biases.
        unsafe {
            if rows == LANES {
                let mut acc = acc;
                if let Some(bias) = strip.bias {
                    acc = S::add(acc, S::load(bias[first_row..][..LANES].as_ptr()));
                }
                if strip.adds {
                    acc = S::add(S::load(out.as_ptr()), acc);
                }
                S::store(out.as_mut_ptr(), acc);
                continue;
            }
        }
        // SAFETY: the caller's promise.
        let lanes = unsafe { S::to_array(acc) };
        for (r, out) in out.iter_mut().enumerate() {
            let y = strip
                .bias
                .map_or(lanes[r], |bias| lanes[r] + bias[first_row + r]);
            *out = if strip.adds { *out + y } else { y };
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
