//! `exp` for arguments up to 0 with the same bits on every machine.
//!
//! The system's `exp` may differ by a bit between C libraries, and a draw that lands
//! on such a bit would differ between workers. These are IEEE operations in a fixed
//! order, without fused multiply-add.

use std::f64::consts::LOG2_E;

/// ln 2 split so that `k * LN2_HIGH` is exact for every k that occurs
/// (Cody and Waite; the constants of fdlibm's `e_exp.c`).
const LN2_HIGH: f64 = 6.931_471_803_691_238e-1;
const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;

/// Below it the result is taken as 0: exp(-708) is the smallest normal number, 1e-308.
const UNDERFLOW: f64 = -708.0;

/// 1/n! for n = 0..=13: the Taylor series, below 1 ulp on |r| <= ln 2 / 2.
const INVERSE_FACTORIALS: [f64; 14] = [
    1.0,
    1.0,
    1.0 / 2.0,
    1.0 / 6.0,
    1.0 / 24.0,
    1.0 / 120.0,
    1.0 / 720.0,
    1.0 / 5_040.0,
    1.0 / 40_320.0,
    1.0 / 362_880.0,
    1.0 / 3_628_800.0,
    1.0 / 39_916_800.0,
    1.0 / 479_001_600.0,
    1.0 / 6_227_020_800.0,
];

/// e^x for x <= 0.
#[inline]
pub(super) fn exp(x: f64) -> f64 {
    debug_assert!(x <= 0.0, "exp of `{x}`");
    if x < UNDERFLOW {
        return 0.0;
    }
    let k = (x * LOG2_E - 0.5) as i64;
    let r = (x - k as f64 * LN2_HIGH) - k as f64 * LN2_LOW;
    let mut sum = INVERSE_FACTORIALS[13];
    for coefficient in INVERSE_FACTORIALS[..13].iter().rev() {
        sum = sum * r + coefficient;
    }
    sum * f64::from_bits(((1023 + k) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::exp;

    #[test]
    fn agrees_with_the_system_to_a_few_units_in_the_last_place() {
        let mut x = 0.0_f64;
        while x > -707.0 {
            let (ours, theirs) = (exp(x), x.exp());
            assert!(
                (ours - theirs).abs() <= 4.0 * f64::EPSILON * theirs,
                "{x}: {ours} {theirs}"
            );
            x -= 0.013_7;
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-1e300), 0.0);
        assert_eq!(exp(f64::NEG_INFINITY), 0.0);
    }
}
