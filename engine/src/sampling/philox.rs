//! Philox4x32-10: a counter-based random generator.
//!
//! A block of random bits is a function of (counter, key) alone, so any draw can be
//! made anywhere, in any order, without state.
//!
//! Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3"
//! (SC 2011), section 4.2.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// The golden ratio and sqrt(3) - 1: the Weyl sequence of the round keys.
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: u32 = 10;

/// The 128 random bits of `counter` under `key`.
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut a, mut b, mut c, mut d] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..ROUNDS {
        let first = u64::from(MULTIPLIERS[0]) * u64::from(a);
        let second = u64::from(MULTIPLIERS[1]) * u64::from(c);
        let (first_high, first_low) = ((first >> 32) as u32, first as u32);
        let (second_high, second_low) = ((second >> 32) as u32, second as u32);
        (a, b, c, d) = (
            second_high ^ b ^ k0,
            second_low,
            first_high ^ d ^ k1,
            first_low,
        );
        k0 = k0.wrapping_add(WEYL[0]);
        k1 = k1.wrapping_add(WEYL[1]);
    }
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::philox4x32_10;

    /// Random123 1.14, `tests/kat_vectors`, lines `philox4x32 10`.
    #[test]
    fn equals_the_published_vectors() {
        let vectors = [
            (
                [0; 4],
                [0; 2],
                [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
            ),
            (
                [u32::MAX; 4],
                [u32::MAX; 2],
                [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            ),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in vectors {
            assert_eq!(philox4x32_10(counter, key), expected);
        }
    }
}
