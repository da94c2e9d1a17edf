//! Matrix products with packed weights.
//!
//! ```text
//! for each thread's tiles of 16 rows, in chunks that stay in the L2 cache
//!   for each token tile (1 to 12 rows of x; its activations stay in L1)
//!     for each row tile                       <- one kernel call is this loop and what is below
//!       acc[T] = 0                               16 rows x T tokens in registers
//!       for each group of 32 columns, upwards
//!         dot[T] = -zero point * sum of codes    exact integers
//!         dot[T] += codes . activation codes     each weight vector is loaded and unpacked once for T tokens
//!         acc[T] = fma(dw * dx, dot, acc) (, fma(mw, sx, acc))
//! ```
//!
//! The token tile changes speed only: an accumulator belongs to one output and always walks all columns upwards.

use crate::kernels::{Shared, share};
use crate::matrix::{GROUP, LANES, Segment};
use crate::quantize::cut_tiles;
use crate::scratch::{Activations, Buffer};
use crate::simd::{BFloat16, Element, Float16, Float32, Kernel, Simd};
use crate::{Isa, Kernels, PackedMatrix, Scratch, WeightType};

/// Weights a thread walks per token tile before it takes the next tile: half of a 1 MiB L2 cache.
const CHUNK_BYTES: usize = 512 << 10;
/// Below this many bytes of weights per thread, waking a helper costs more than it saves.
const BYTES_PER_THREAD_MIN: usize = 16 << 10;

/// Sizes of token tiles per instruction set: accumulators and dots of a tile fit in the registers.
fn tile_sizes(isa: Isa) -> &'static [usize] {
    match isa {
        Isa::Avx512 => &[12, 8, 6, 4, 3, 2, 1],
        Isa::Avx2 => &[4, 2, 1],
        Isa::Scalar => &[1],
    }
}

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
        scratch: &mut Scratch,
    ) {
        let (rows, cols) = (w.rows(), w.cols());
        assert_eq!(x.len(), tokens * cols, "linear: x is [tokens, cols]");
        assert_eq!(out.len(), tokens * rows, "linear: out is [tokens, rows]");
        assert!(
            bias.is_none_or(|b| b.len() == rows),
            "linear: bias is [rows]"
        );
        if tokens == 0 {
            return;
        }
        let activations = &mut scratch.activations;
        cut_tiles(tokens, tile_sizes(self.isa()), &mut activations.tiles);
        if w.segments().iter().any(|s| s.ty.is_quantized()) {
            self.quantize_tiles(x, cols, activations);
        }
        if w.segments().iter().any(|s| !s.ty.is_quantized()) {
            self.transpose_tiles(x, cols, activations);
        }
        let job = Linear {
            isa: self.isa(),
            w,
            activations,
            tokens,
            bias,
            out: Shared::new(out),
        };
        let threads = self
            .threads()
            .min(w.bytes() * tokens / BYTES_PER_THREAD_MIN);
        if threads <= 1 {
            job.run_tiles(0..w.tiles());
        } else {
            self.pool().run(&|thread| {
                if thread < threads {
                    job.run_tiles(share(w.tiles(), thread, threads));
                }
            });
        }
    }
}

/// One product, shared by the threads.
struct Linear<'a> {
    isa: Isa,
    w: &'a PackedMatrix,
    activations: &'a Activations,
    tokens: usize,
    bias: Option<&'a [f32]>,
    out: Shared<f32>,
}

impl Linear<'_> {
    /// Computes the outputs of a range of row tiles, counted over all segments.
    fn run_tiles(&self, range: std::ops::Range<usize>) {
        for segment in self.w.segments() {
            let from = range.start.max(segment.first_tile);
            let to = range.end.min(segment.first_tile + segment.tiles);
            let chunk = (CHUNK_BYTES / segment.tile_bytes).max(1);
            let mut first = from;
            while first < to {
                let tiles = chunk.min(to - first);
                for (token, size) in &self.activations.tiles {
                    self.run_strip(segment, first - segment.first_tile, tiles, *token, *size);
                }
                first += tiles;
            }
        }
    }

    /// Some row tiles of one segment times one token tile.
    fn run_strip(&self, segment: &Segment, first: usize, tiles: usize, token: usize, size: usize) {
        let strip = Strip {
            w: self.w,
            segment,
            first,
            tiles,
            activations: self.activations,
            tokens: self.tokens,
            token,
            bias: self.bias,
            out: self.out,
        };
        // SAFETY: the instruction set was checked when `Kernels` was made. The activations of the token tile were just
        // laid out for `size` tokens, and the row tiles are this thread's alone.
        unsafe {
            match segment.ty {
                WeightType::F32 => run_size::<FloatStrip<Float32>>(self.isa, size, strip),
                WeightType::F16 => run_size::<FloatStrip<Float16>>(self.isa, size, strip),
                WeightType::BF16 => run_size::<FloatStrip<BFloat16>>(self.isa, size, strip),
                WeightType::Q4_0 => run_size::<QuantStrip<Nibbles>>(self.isa, size, strip),
                WeightType::Q4_1 => run_size::<QuantStrip<NibblesAffine>>(self.isa, size, strip),
                WeightType::Q5_0 => run_size::<QuantStrip<Bytes>>(self.isa, size, strip),
                WeightType::Q5_1 => run_size::<QuantStrip<BytesAffine>>(self.isa, size, strip),
                WeightType::Q8_0 => run_size::<QuantStrip<WideBytes>>(self.isa, size, strip),
                WeightType::Q4K => run_size::<QuantStrip<NibblesAffineK>>(self.isa, size, strip),
                WeightType::Q5K => run_size::<QuantStrip<BytesAffineK>>(self.isa, size, strip),
                WeightType::Q6K => run_size::<QuantStrip<BytesHalfK>>(self.isa, size, strip),
            }
        }
    }
}

/// Operands of one strip: `tiles` row tiles of a segment times one token tile.
#[derive(Clone, Copy)]
struct Strip<'a> {
    w: &'a PackedMatrix,
    segment: &'a Segment,
    first: usize,
    tiles: usize,
    activations: &'a Activations,
    /// Tokens of the whole call, and the first of this tile.
    tokens: usize,
    token: usize,
    bias: Option<&'a [f32]>,
    out: Shared<f32>,
}

impl Strip<'_> {
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

/// Picks the code compiled for a token tile of `size`, one of [`tile_sizes`].
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
        let groups = strip.w.cols() / GROUP;
        let activations = strip.activations;
        let x_codes = strip.part(&activations.codes, groups * GROUP).as_ptr();
        let x_scales = strip.part(&activations.scales, groups).as_ptr();
        let x_scaled_sums = strip.part(&activations.scaled_sums, groups).as_ptr();
        let x_sums = strip.part(&activations.sums, 2 * groups).as_ptr();
        let zero_point = strip.segment.ty.zero_point();
        for tile in strip.first..strip.first + strip.tiles {
            let bytes = strip.w.tile(strip.segment, tile);
            let mut scales = bytes.as_ptr();
            let mut codes = bytes[strip.segment.codes_offset..].as_ptr();
            let scale_size = if F::WIDE_SCALES { 4 } else { 2 };
            // SAFETY: for the whole loop: a tile holds the scales and codes of all groups, as packed, and the
            // activations hold `groups` times `T` entries; every pointer below stays within the group's part.
            unsafe {
                let mut acc = [S::splat(0.0); T];
                for g in 0..groups {
                    let x = x_codes.add(g * T * GROUP);
                    let x_scales = x_scales.add(g * T);
                    let sums = x_sums.add(2 * g * T);
                    let mut dot = [S::splat_i(0); T];
                    if !F::AFFINE {
                        for (t, dot) in dot.iter_mut().enumerate() {
                            let sum =
                                *sums.add(t) + if F::HALF_GROUPS { 0 } else { *sums.add(T + t) };
                            *dot = S::splat_i(-zero_point * sum);
                        }
                    }
                    let scale = load_scale::<S, F>(scales);
                    if F::NIBBLES {
                        for i in 0..4 {
                            let line = S::load_codes(codes.add(64 * i));
                            let (low, high) = (S::low_nibbles(line), S::high_nibbles(line));
                            for (t, dot) in dot.iter_mut().enumerate() {
                                let x = x.add(t * GROUP + 4 * i);
                                *dot = S::dot::<false>(*dot, low, S::broadcast_codes(x));
                                *dot = S::dot::<false>(*dot, high, S::broadcast_codes(x.add(16)));
                            }
                        }
                        codes = codes.add(256);
                    } else {
                        for i in 0..8 {
                            if F::HALF_GROUPS && i == 4 {
                                for t in 0..T {
                                    let both = S::mul(scale, S::splat(*x_scales.add(t)));
                                    acc[t] = S::fma(both, S::to_float(dot[t]), acc[t]);
                                    dot[t] = S::splat_i(-zero_point * *sums.add(T + t));
                                }
                            }
                            let line = S::load_codes(codes.add(64 * i));
                            for (t, dot) in dot.iter_mut().enumerate() {
                                let x = S::broadcast_codes(x.add(t * GROUP + 4 * i));
                                *dot = if F::WIDE_CODES {
                                    S::dot::<true>(*dot, line, x)
                                } else {
                                    S::dot::<false>(*dot, line, x)
                                };
                            }
                        }
                        codes = codes.add(512);
                    }
                    let scale = if F::HALF_GROUPS {
                        load_scale::<S, F>(scales.add(LANES * scale_size))
                    } else {
                        scale
                    };
                    for t in 0..T {
                        let both = S::mul(scale, S::splat(*x_scales.add(t)));
                        acc[t] = S::fma(both, S::to_float(dot[t]), acc[t]);
                    }
                    if F::AFFINE {
                        let min = load_scale::<S, F>(scales.add(LANES * scale_size));
                        let scaled_sums = x_scaled_sums.add(g * T);
                        for (t, acc) in acc.iter_mut().enumerate() {
                            *acc = S::fma(min, S::splat(*scaled_sums.add(t)), *acc);
                        }
                    }
                    let planes = if F::AFFINE || F::HALF_GROUPS { 2 } else { 1 };
                    scales = scales.add(planes * LANES * scale_size);
                }
                store::<S, T>(&strip, tile, acc);
            }
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
        // SAFETY: the caller's promise.
        let lanes = unsafe { S::to_array(acc) };
        match strip.bias {
            None => out.copy_from_slice(&lanes[..rows]),
            Some(bias) => {
                for ((out, lane), bias) in out.iter_mut().zip(lanes).zip(&bias[first_row..][..rows])
                {
                    *out = lane + bias;
                }
            }
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
            if T <= 4 {
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
