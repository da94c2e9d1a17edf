//! The transcendental functions of a decoder, as one fixed sequence of operations each.
//!
//! The C library's `expf` differs between machines and vectorised forms; these do not, because every step is a single
//! IEEE operation that all instruction sets have. `exp` is within 2 ulp over the whole range, infinite above 88.8 and
//! zero below -104; `exp2` is within 5 ulp where it is asked for; `tanh` is within 6 ulp.

use crate::simd::Simd;

/// Lanes of every reduction: element `i` goes to lane `i % 16`, in order.
pub const LANES: usize = 16;

/// Below, the result rounds to zero; above, to infinity.
pub const EXP_MIN: f32 = -105.0;
pub const EXP_MAX: f32 = 89.0;
pub const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// 1.5 * 2^23: adding it rounds to an integer (ties to even) that stands in the low mantissa bits.
pub const ROUND_MAGIC: f32 = 12_582_912.0;
/// ln 2 in two parts; the first has 9 trailing zero bits, so that its product with a small integer is exact.
pub const LN2_HIGH: f32 = 0.693_359_4;
pub const LN2_LOW: f32 = -2.121_944_4e-4;
/// exp(r) = 1 + r + r^2 * P(r) for |r| <= ln 2 / 2, highest power first. *Source*: Cephes `expf`.
pub const EXP_POLY: [f32; 6] = [
    1.987_569_1e-4,
    1.398_199_9e-3,
    8.333_452e-3,
    4.166_579_6e-2,
    1.666_666_5e-1,
    5.000_000_3e-1,
];

/// Below, `exp2` stays what it is here: 2^-125, which is nothing beside 1.
pub const EXP2_MIN: f32 = -125.0;
/// Adding it rounds to an integer as [`ROUND_MAGIC`] does; the low bits are then those of the integer's power of two.
pub const EXP2_MAGIC: f32 = ROUND_MAGIC + 127.0;
/// 2^r for |r| <= 1/2, highest power first: the least relative error (4.4e-7) among those that are 1 at 0.
pub const EXP2_POLY: [f32; 6] = [
    1.112_549_4e-3,
    9.666_283e-3,
    5.557_400_4e-2,
    2.402_235_1e-1,
    6.931_428_3e-1,
    1.0,
];

/// Beyond, tanh is 1 in f32.
pub const TANH_MAX: f32 = 9.0;
/// tanh(x) = x * P(x^2) / Q(x^2), highest power first. *Source*: Eigen, `generic_fast_tanh_float`.
pub const TANH_P: [f32; 7] = [
    -2.760_768_5e-16,
    2.000_188e-13,
    -8.604_672e-11,
    5.122_297e-8,
    1.485_722_4e-5,
    6.372_619_3e-4,
    4.893_524_6e-3,
];
pub const TANH_Q: [f32; 4] = [1.198_258_4e-6, 1.185_347_1e-4, 2.268_434_6e-3, 4.893_525e-3];

/// gelu(x) = x * sigmoid(x * (LINEAR + CUBIC * x^2)), which is the tanh form: 2 sqrt(2 / pi) and that times 0.044715.
pub const GELU_LINEAR: f32 = 1.595_769_2;
pub const GELU_CUBIC: f32 = 0.071_354_814;

/// Sum of 16 lanes in the one order used everywhere: halves fold onto each other.
#[inline(always)]
pub fn tree_sum(lanes: &[f32; LANES]) -> f32 {
    let mut v = *lanes;
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            v[i] += v[i + width];
        }
    }
    v[0]
}

/// Largest of 16 lanes.
#[inline(always)]
pub fn tree_max(lanes: &[f32; LANES]) -> f32 {
    let mut v = *lanes;
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            v[i] = if v[i] > v[i + width] {
                v[i]
            } else {
                v[i + width]
            };
        }
    }
    v[0]
}

/// `exp` of each lane.
///
/// # Safety
/// The processor has `S`'s instruction set.
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::F) -> S::F {
    // SAFETY: the caller's promise, in all operations.
    unsafe {
        // The bound first: a NaN in `x` stays.
        let x = S::min(S::splat(EXP_MAX), S::max(S::splat(EXP_MIN), x));
        let magic = S::splat(ROUND_MAGIC);
        let shifted = S::fma(x, S::splat(LOG2_E), magic);
        let n = S::sub_i(S::bits(shifted), S::bits(magic));
        let n_float = S::sub(shifted, magic);
        let r = S::fma(n_float, S::splat(-LN2_HIGH), x);
        let r = S::fma(n_float, S::splat(-LN2_LOW), r);
        let mut p = S::splat(EXP_POLY[0]);
        for c in &EXP_POLY[1..] {
            p = S::fma(p, r, S::splat(*c));
        }
        let p = S::add(S::fma(p, S::mul(r, r), r), S::splat(1.0));
        S::times_power_of_two(p, n, n_float)
    }
}

/// `2^x` of each lane, for `x` below 127; a NaN stays. Half the work of [`exp`]: the integer part needs no second step,
/// the rest no product with a logarithm.
///
/// # Safety
/// The processor has `S`'s instruction set.
#[inline(always)]
pub(crate) unsafe fn exp2<S: Simd>(x: S::F) -> S::F {
    // SAFETY: the caller's promise, in all operations.
    unsafe {
        // The bound first: a NaN in `x` stays.
        let x = S::max(S::splat(EXP2_MIN), x);
        let magic = S::splat(EXP2_MAGIC);
        let shifted = S::add(x, magic);
        let r = S::sub(x, S::sub(shifted, magic));
        let mut p = S::splat(EXP2_POLY[0]);
        for c in &EXP2_POLY[1..] {
            p = S::fma(p, r, S::splat(*c));
        }
        S::mul(p, S::from_bits(S::to_exponent(S::bits(shifted))))
    }
}

/// `cap * tanh(x / cap)` of each lane.
///
/// # Safety
/// The processor has `S`'s instruction set.
#[inline(always)]
pub(crate) unsafe fn soft_cap<S: Simd>(x: S::F, cap: S::F) -> S::F {
    // SAFETY: the caller's promise.
    unsafe { S::mul(tanh::<S>(S::div(x, cap)), cap) }
}

/// # Safety
/// The processor has `S`'s instruction set.
#[inline(always)]
unsafe fn tanh<S: Simd>(x: S::F) -> S::F {
    // SAFETY: the caller's promise, in all operations.
    unsafe {
        let x = S::min(S::splat(TANH_MAX), S::max(S::splat(-TANH_MAX), x));
        let x2 = S::mul(x, x);
        let mut p = S::splat(TANH_P[0]);
        for c in &TANH_P[1..] {
            p = S::fma(p, x2, S::splat(*c));
        }
        let mut q = S::splat(TANH_Q[0]);
        for c in &TANH_Q[1..] {
            q = S::fma(q, x2, S::splat(*c));
        }
        S::div(S::mul(p, x), q)
    }
}

/// `x / (1 + exp(-x))` of each lane.
///
/// # Safety
/// The processor has `S`'s instruction set.
#[inline(always)]
pub(crate) unsafe fn silu<S: Simd>(x: S::F) -> S::F {
    // SAFETY: the caller's promise.
    unsafe { S::div(x, S::add(S::splat(1.0), exp::<S>(negate::<S>(x)))) }
}

/// The tanh form of GELU of each lane, as `x * sigmoid`.
///
/// # Safety
/// The processor has `S`'s instruction set.
#[inline(always)]
pub(crate) unsafe fn gelu<S: Simd>(x: S::F) -> S::F {
    // SAFETY: the caller's promise.
    unsafe {
        let inner = S::mul(
            x,
            S::fma(S::mul(x, x), S::splat(GELU_CUBIC), S::splat(GELU_LINEAR)),
        );
        S::div(x, S::add(S::splat(1.0), exp::<S>(negate::<S>(inner))))
    }
}

/// # Safety
/// The processor has `S`'s instruction set.
#[inline(always)]
unsafe fn negate<S: Simd>(x: S::F) -> S::F {
    // SAFETY: the caller's promise.
    unsafe { S::sub(S::splat(-0.0), x) }
}
