//! The vector operations on AVX-512 with VNNI: one register per vector.
//!
//! The whole file is the trait's contract: its functions may only run where the processor has the features and the
//! pointers are good, so the blocks inside repeat no reasons.
#![allow(unsafe_op_in_unsafe_fn)]

use std::arch::x86_64::*;

use super::Simd;

/// Round to nearest, ties to even.
const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

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
pub(crate) struct Avx512;

impl Simd for Avx512 {
    const REGISTERS: usize = 32;
    const QUERIES: usize = 12;
    type F = __m512;
    type I = __m512i;
    type B = __m512i;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        _mm512_set1_ps(x)
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        _mm512_loadu_ps(from)
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self::F {
        _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self::F {
        let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, x: Self::F) {
        _mm512_storeu_ps(to, x);
    }

    #[inline(always)]
    unsafe fn to_f16(x: Self::F) -> [u16; 16] {
        let mut halves = [0; 16];
        _mm256_storeu_si256(halves.as_mut_ptr().cast(), _mm512_cvtps_ph::<NEAREST>(x));
        halves
    }

    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        _mm512_add_ps(a, b)
    }

    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        _mm512_sub_ps(a, b)
    }

    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        _mm512_mul_ps(a, b)
    }

    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        _mm512_div_ps(a, b)
    }

    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        _mm512_fmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        _mm512_max_ps(a, b)
    }

    #[inline(always)]
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        _mm512_min_ps(a, b)
    }

    #[inline(always)]
    unsafe fn keep(from: i32, to: i32, x: Self::F, other: Self::F) -> Self::F {
        let below = |n: i32| {
            if n <= 0 {
                0u32
            } else if n >= 16 {
                0xffff
            } else {
                (1 << n) - 1
            }
        };
        let mask = (below(to) & !below(from)) as __mmask16;
        _mm512_mask_blend_ps(mask, other, x)
    }

    #[inline(always)]
    unsafe fn pick(a: Self::F, b: Self::F, x: Self::I, y: Self::I) -> Self::I {
        _mm512_mask_blend_epi32(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b), y, x)
    }

    #[inline(always)]
    unsafe fn splat_i(x: i32) -> Self::I {
        _mm512_set1_epi32(x)
    }

    #[inline(always)]
    unsafe fn to_float(x: Self::I) -> Self::F {
        _mm512_cvtepi32_ps(x)
    }

    #[inline(always)]
    unsafe fn bits(x: Self::F) -> Self::I {
        _mm512_castps_si512(x)
    }

    #[inline(always)]
    unsafe fn from_bits(x: Self::I) -> Self::F {
        _mm512_castsi512_ps(x)
    }

    #[inline(always)]
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I {
        _mm512_add_epi32(a, b)
    }

    #[inline(always)]
    unsafe fn sub_i(a: Self::I, b: Self::I) -> Self::I {
        _mm512_sub_epi32(a, b)
    }

    #[inline(always)]
    unsafe fn half_i(x: Self::I) -> Self::I {
        _mm512_srai_epi32::<1>(x)
    }

    #[inline(always)]
    unsafe fn to_exponent(x: Self::I) -> Self::I {
        _mm512_slli_epi32::<23>(x)
    }

    #[inline(always)]
    unsafe fn times_power_of_two(x: Self::F, _n: Self::I, n_float: Self::F) -> Self::F {
        _mm512_scalef_ps(x, n_float)
    }

    #[inline(always)]
    unsafe fn store_halves(high: *mut i8, low: *mut i8, x: [Self::I; 4]) {
        // Packing saturates, so what else stands in a lane goes first.
        let code = |x| _mm512_and_si512(x, _mm512_set1_epi32(0x3fff));
        let a = _mm512_packs_epi32(code(x[0]), code(x[1]));
        let b = _mm512_packs_epi32(code(x[2]), code(x[3]));
        let packed = _mm512_packus_epi16(_mm512_srli_epi16::<7>(a), _mm512_srli_epi16::<7>(b));
        _mm512_storeu_si512(high.cast(), packed);
        let seven = _mm512_set1_epi16(0x7f);
        let packed = _mm512_packus_epi16(_mm512_and_si512(a, seven), _mm512_and_si512(b, seven));
        _mm512_storeu_si512(low.cast(), packed);
    }

    #[inline(always)]
    unsafe fn load_codes(from: *const u8) -> Self::B {
        _mm512_loadu_si512(from.cast())
    }

    #[inline(always)]
    unsafe fn low_nibbles(x: Self::B) -> Self::B {
        _mm512_and_si512(x, _mm512_set1_epi8(15))
    }

    #[inline(always)]
    unsafe fn high_nibbles(x: Self::B) -> Self::B {
        _mm512_and_si512(_mm512_srli_epi16::<4>(x), _mm512_set1_epi8(15))
    }

    #[inline(always)]
    unsafe fn shift_left(x: Self::B, by: u32) -> Self::B {
        _mm512_sll_epi16(x, _mm_cvtsi32_si128(by as i32))
    }

    #[inline(always)]
    unsafe fn shift_right(x: Self::B, by: u32) -> Self::B {
        _mm512_srl_epi16(x, _mm_cvtsi32_si128(by as i32))
    }

    #[inline(always)]
    unsafe fn or_bits(x: Self::B, bits: Self::B, mask: u8) -> Self::B {
        _mm512_or_si512(x, _mm512_and_si512(bits, _mm512_set1_epi8(mask as i8)))
    }

    #[inline(always)]
    unsafe fn keep_bits(x: Self::B, mask: u8) -> Self::B {
        _mm512_and_si512(x, _mm512_set1_epi8(mask as i8))
    }

    #[inline(always)]
    unsafe fn look_up(table: [u8; 16], x: Self::B) -> Self::B {
        let table = _mm_loadu_si128(table.as_ptr().cast());
        _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), x)
    }

    #[inline(always)]
    unsafe fn load_nibbles(from: *const u8) -> (Self::F, Self::F) {
        let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
        (
            _mm512_cvtepi32_ps(_mm512_and_si512(bytes, _mm512_set1_epi32(15))),
            _mm512_cvtepi32_ps(_mm512_srli_epi32::<4>(bytes)),
        )
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self::F {
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())))
    }

    #[inline(always)]
    unsafe fn broadcast_codes(from: *const i8) -> Self::I {
        _mm512_set1_epi32(from.cast::<i32>().read_unaligned())
    }

    #[inline(always)]
    unsafe fn dot<const WIDE: bool>(acc: Self::I, w: Self::B, x: Self::I) -> Self::I {
        // The form without saturation: exact for all u8 and i8.
        _mm512_dpbusd_epi32(acc, w, x)
    }

    #[inline(always)]
    unsafe fn max_abs(a: Self::F, b: Self::F) -> f32 {
        let sign = _mm512_set1_epi32(i32::MIN);
        let a = _mm512_andnot_si512(sign, _mm512_castps_si512(a));
        let b = _mm512_andnot_si512(sign, _mm512_castps_si512(b));
        f32::from_bits(_mm512_reduce_max_epu32(_mm512_max_epu32(a, b)))
    }

    #[inline(always)]
    unsafe fn low_bytes(x: Self::I) -> [i8; 16] {
        let mut bytes = [0; 16];
        _mm_storeu_si128(bytes.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(x));
        bytes
    }

    #[inline(always)]
    unsafe fn quarter_sums(codes: *const i8) -> [i32; 4] {
        let codes = _mm512_loadu_si512(codes.cast());
        let sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), codes);
        let sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32::<0b10_11_00_01>(sums));
        let sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32::<0b01_00_11_10>(sums));
        let mut quarters = [0; 4];
        let firsts = _mm512_maskz_compress_epi32(0b0001_0001_0001_0001, sums);
        _mm_storeu_si128(quarters.as_mut_ptr().cast(), _mm512_castsi512_si128(firsts));
        quarters
    }

    #[inline(always)]
    unsafe fn tree_sum(x: Self::F) -> f32 {
        fold_tree!(
            _mm512_castps512_ps256(x),
            _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(x))),
            _mm256_add_ps,
            _mm_add_ps
        )
    }

    #[inline(always)]
    unsafe fn tree_max(x: Self::F) -> f32 {
        fold_tree!(
            _mm512_castps512_ps256(x),
            _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(x))),
            _mm256_max_ps,
            _mm_max_ps
        )
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
}
