//! The vector operations on AVX2 with FMA and F16C: two registers per vector.
//!
//! The whole file is the trait's contract: its functions may only run where the processor has the features and the
//! pointers are good, so the blocks inside repeat no reasons.
#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::x86_64::*;

use super::Simd;

/// Folds halves onto each other: 16 lanes, 8, 4, 2.
macro_rules! fold_tree {
    ($low:expr, $high:expr, $op256:ident, $op128:ident) => {{
        let x = $op256($low, $high);
        let x = $op128(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = $op128(x, _mm_movehl_ps(x, x));
        let x = $op128(x, _mm_shuffle_ps::<1>(x, x));
        _mm_cvtss_f32(x)
    }};
}

#[derive(Clone, Copy)]
pub(crate) struct Avx2;

/// Applies an intrinsic to both halves.
macro_rules! both {
    ($f:path, $a:expr) => {
        [$f($a[0]), $f($a[1])]
    };
    ($f:path, $a:expr, $b:expr) => {
        [$f($a[0], $b[0]), $f($a[1], $b[1])]
    };
    ($f:path, $a:expr, $b:expr, $c:expr) => {
        [$f($a[0], $b[0], $c[0]), $f($a[1], $b[1], $c[1])]
    };
}

impl Simd for Avx2 {
    const REGISTERS: usize = 16;
    const QUERIES: usize = 3;
    type F = [__m256; 2];
    type I = [__m256i; 2];
    type B = [__m256i; 2];

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        [_mm256_set1_ps(x); 2]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))]
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self::F {
        [
            _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast())),
        ]
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self::F {
        let widen =
            |bits| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)));
        [
            widen(_mm_loadu_si128(from.cast())),
            widen(_mm_loadu_si128(from.add(8).cast())),
        ]
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, x: Self::F) {
        _mm256_storeu_ps(to, x[0]);
        _mm256_storeu_ps(to.add(8), x[1]);
    }

    #[inline(always)]
    unsafe fn to_f16(x: Self::F) -> [u16; 16] {
        let mut halves = [0u16; 16];
        let to = halves.as_mut_ptr();
        _mm_storeu_si128(
            to.cast(),
            _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x[0]),
        );
        _mm_storeu_si128(
            to.add(8).cast(),
            _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x[1]),
        );
        halves
    }

    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_add_ps, a, b)
    }

    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_sub_ps, a, b)
    }

    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_mul_ps, a, b)
    }

    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_div_ps, a, b)
    }

    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        both!(_mm256_fmadd_ps, a, b, c)
    }

    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_max_ps, a, b)
    }

    #[inline(always)]
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_min_ps, a, b)
    }

    #[inline(always)]
    unsafe fn keep(from: i32, to: i32, x: Self::F, other: Self::F) -> Self::F {
        let low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        let lanes = [low, _mm256_add_epi32(low, _mm256_set1_epi32(8))];
        let pick = |lanes, x, other| {
            let not_before = _mm256_cmpgt_epi32(lanes, _mm256_set1_epi32(from - 1));
            let before_end = _mm256_cmpgt_epi32(_mm256_set1_epi32(to), lanes);
            _mm256_blendv_ps(
                other,
                x,
                _mm256_castsi256_ps(_mm256_and_si256(not_before, before_end)),
            )
        };
        [
            pick(lanes[0], x[0], other[0]),
            pick(lanes[1], x[1], other[1]),
        ]
    }

    #[inline(always)]
    unsafe fn pick(a: Self::F, b: Self::F, x: Self::I, y: Self::I) -> Self::I {
        let mask = |i: usize| _mm256_castps_si256(_mm256_cmp_ps::<_CMP_GT_OQ>(a[i], b[i]));
        [
            _mm256_blendv_epi8(y[0], x[0], mask(0)),
            _mm256_blendv_epi8(y[1], x[1], mask(1)),
        ]
    }

    #[inline(always)]
    unsafe fn splat_i(x: i32) -> Self::I {
        [_mm256_set1_epi32(x); 2]
    }

    #[inline(always)]
    unsafe fn to_float(x: Self::I) -> Self::F {
        both!(_mm256_cvtepi32_ps, x)
    }

    #[inline(always)]
    unsafe fn bits(x: Self::F) -> Self::I {
        both!(_mm256_castps_si256, x)
    }

    #[inline(always)]
    unsafe fn from_bits(x: Self::I) -> Self::F {
        both!(_mm256_castsi256_ps, x)
    }

    #[inline(always)]
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_add_epi32, a, b)
    }

    #[inline(always)]
    unsafe fn sub_i(a: Self::I, b: Self::I) -> Self::I {
        both!(_mm256_sub_epi32, a, b)
    }

    #[inline(always)]
    unsafe fn half_i(x: Self::I) -> Self::I {
        both!(_mm256_srai_epi32::<1>, x)
    }

    #[inline(always)]
    unsafe fn to_exponent(x: Self::I) -> Self::I {
        both!(_mm256_slli_epi32::<23>, x)
    }

    #[inline(always)]
    unsafe fn store_halves(high: *mut i8, low: *mut i8, x: [Self::I; 4]) {
        let mask = _mm256_set1_epi32(0x3fff);
        let seven = _mm256_set1_epi16(0x7f);
        // Packing saturates, so what else stands in a lane goes first.
        let code = x.map(|x| [_mm256_and_si256(x[0], mask), _mm256_and_si256(x[1], mask)]);
        let a = both!(_mm256_packs_epi32, code[0], code[1]);
        let b = both!(_mm256_packs_epi32, code[2], code[3]);
        let top = |x| _mm256_srli_epi16::<7>(x);
        let packed = both!(_mm256_packus_epi16, a.map(top), b.map(top));
        _mm256_storeu_si256(high.cast(), packed[0]);
        _mm256_storeu_si256(high.add(32).cast(), packed[1]);
        let bottom = |x| _mm256_and_si256(x, seven);
        let packed = both!(_mm256_packus_epi16, a.map(bottom), b.map(bottom));
        _mm256_storeu_si256(low.cast(), packed[0]);
        _mm256_storeu_si256(low.add(32).cast(), packed[1]);
    }

    #[inline(always)]
    unsafe fn load_codes(from: *const u8) -> Self::B {
        [
            _mm256_loadu_si256(from.cast()),
            _mm256_loadu_si256(from.add(32).cast()),
        ]
    }

    #[inline(always)]
    unsafe fn low_nibbles(x: Self::B) -> Self::B {
        let mask = _mm256_set1_epi8(15);
        [_mm256_and_si256(x[0], mask), _mm256_and_si256(x[1], mask)]
    }

    #[inline(always)]
    unsafe fn high_nibbles(x: Self::B) -> Self::B {
        Self::low_nibbles(both!(_mm256_srli_epi16::<4>, x))
    }

    #[inline(always)]
    unsafe fn shift_left(x: Self::B, by: u32) -> Self::B {
        let by = _mm_cvtsi32_si128(by as i32);
        [_mm256_sll_epi16(x[0], by), _mm256_sll_epi16(x[1], by)]
    }

    #[inline(always)]
    unsafe fn shift_right(x: Self::B, by: u32) -> Self::B {
        let by = _mm_cvtsi32_si128(by as i32);
        [_mm256_srl_epi16(x[0], by), _mm256_srl_epi16(x[1], by)]
    }

    #[inline(always)]
    unsafe fn or_bits(x: Self::B, bits: Self::B, mask: u8) -> Self::B {
        let mask = _mm256_set1_epi8(mask as i8);
        [
            _mm256_or_si256(x[0], _mm256_and_si256(bits[0], mask)),
            _mm256_or_si256(x[1], _mm256_and_si256(bits[1], mask)),
        ]
    }

    #[inline(always)]
    unsafe fn keep_bits(x: Self::B, mask: u8) -> Self::B {
        let mask = _mm256_set1_epi8(mask as i8);
        [_mm256_and_si256(x[0], mask), _mm256_and_si256(x[1], mask)]
    }

    #[inline(always)]
    unsafe fn look_up(table: [u8; 16], x: Self::B) -> Self::B {
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
        [
            _mm256_shuffle_epi8(table, x[0]),
            _mm256_shuffle_epi8(table, x[1]),
        ]
    }

    #[inline(always)]
    unsafe fn load_nibbles(from: *const u8) -> (Self::F, Self::F) {
        let bytes = _mm_loadu_si128(from.cast());
        let bytes = [
            _mm256_cvtepu8_epi32(bytes),
            _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes)),
        ];
        let low = |x| _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(15)));
        let high = |x| _mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(x));
        (
            [low(bytes[0]), low(bytes[1])],
            [high(bytes[0]), high(bytes[1])],
        )
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self::F {
        let bytes = _mm_loadu_si128(from.cast());
        let high = _mm_unpackhi_epi64(bytes, bytes);
        [
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high)),
        ]
    }

    #[inline(always)]
    unsafe fn broadcast_codes(from: *const i8) -> Self::I {
        [_mm256_set1_epi32(from.cast::<i32>().read_unaligned()); 2]
    }

    #[inline(always)]
    unsafe fn dot<const WIDE: bool>(acc: Self::I, w: Self::B, x: Self::I) -> Self::I {
        [
            dot_half::<WIDE>(acc[0], w[0], x[0]),
            dot_half::<WIDE>(acc[1], w[1], x[1]),
        ]
    }

    #[inline(always)]
    unsafe fn max_abs(a: Self::F, b: Self::F) -> f32 {
        let abs = |x| _mm256_andnot_si256(_mm256_set1_epi32(i32::MIN), _mm256_castps_si256(x));
        let low = _mm256_max_epu32(abs(a[0]), abs(a[1]));
        let high = _mm256_max_epu32(abs(b[0]), abs(b[1]));
        let x = _mm256_max_epu32(low, high);
        let x = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
        let x = _mm_max_epu32(x, _mm_shuffle_epi32::<0b01_00_11_10>(x));
        let x = _mm_max_epu32(x, _mm_shuffle_epi32::<0b10_11_00_01>(x));
        f32::from_bits(_mm_cvtsi128_si32(x) as u32)
    }

    #[inline(always)]
    unsafe fn low_bytes(x: Self::I) -> [i8; 16] {
        let mut lanes = [0i32; 16];
        _mm256_storeu_si256(lanes.as_mut_ptr().cast(), x[0]);
        _mm256_storeu_si256(lanes.as_mut_ptr().add(8).cast(), x[1]);
        lanes.map(|lane| lane as i8)
    }

    #[inline(always)]
    unsafe fn quarter_sums(codes: *const i8) -> [i32; 4] {
        let half = |at: *const i8| {
            let codes = _mm256_loadu_si256(at.cast());
            let pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes);
            let fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
            let eights = _mm256_add_epi32(fours, _mm256_shuffle_epi32::<0b10_11_00_01>(fours));
            let all = _mm256_add_epi32(eights, _mm256_shuffle_epi32::<0b01_00_11_10>(eights));
            [
                _mm256_extract_epi32::<0>(all),
                _mm256_extract_epi32::<4>(all),
            ]
        };
        let (low, high) = (half(codes), half(codes.add(32)));
        [low[0], low[1], high[0], high[1]]
    }

    #[inline(always)]
    unsafe fn tree_sum(x: Self::F) -> f32 {
        fold_tree!(x[0], x[1], _mm256_add_ps, _mm_add_ps)
    }

    #[inline(always)]
    unsafe fn tree_max(x: Self::F) -> f32 {
        fold_tree!(x[0], x[1], _mm256_max_ps, _mm_max_ps)
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
}

/// `vpmaddubsw` adds two u8*i8 products in a saturating i16. Codes below 128 cannot saturate it: 2 * 127 * 127 = 32258.
/// Wider codes are cut in the low seven bits and the top bit, which cannot either: 2 * 128 * 127 = 32512.
#[inline(always)]
unsafe fn dot_half<const WIDE: bool>(acc: __m256i, w: __m256i, x: __m256i) -> __m256i {
    let ones = _mm256_set1_epi16(1);
    if WIDE {
        let low = _mm256_maddubs_epi16(_mm256_and_si256(w, _mm256_set1_epi8(0x7f)), x);
        let top = _mm256_maddubs_epi16(_mm256_and_si256(w, _mm256_set1_epi8(-128)), x);
        let sum = _mm256_add_epi32(_mm256_madd_epi16(low, ones), _mm256_madd_epi16(top, ones));
        _mm256_add_epi32(acc, sum)
    } else {
        _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), ones))
    }
}
