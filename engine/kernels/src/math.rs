//! The transcendental functions of a decoder, as one fixed sequence of operations each.
//!
//! The C library's `expf` differs between machines and vectorised forms; these do not, because every step is a single
//! IEEE operation that all instruction sets have. `exp` is within 2 ulp over the whole range, infinite above 88.8 and
//! zero below -104; `tanh` is within 6 ulp.

/// Lanes of every reduction: element `i` goes to lane `i % 16`, in order.
pub const LANES: usize = 16;

/// Below, the result rounds to zero; above, to infinity.
pub const EXP_MIN: f32 = -105.0;
pub const EXP_MAX: f32 = 89.0;
pub const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// 1.5 * 2^23: adding it rounds to an integer (ties to even) that stands in the low mantissa bits.
pub const ROUND_MAGIC: f32 = 12_582_912.0;
/// ln 2 in two parts; the first has 9 trailing zero bits, so that its product with a small integer is exact.
pub const LN2_HIGH: f32 = 0.693_359_375;
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
pub const GELU_LINEAR: f32 = 1.595_769_1;
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
