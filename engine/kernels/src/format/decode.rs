//! One block of each quantised format as codes, scales and minimums.
//!
//! Value for value what ggml computes: factors are widened from f16, and each scale and minimum is rounded once.
//!
//! *Source*: `ggml-common.h` for the layouts, `ggml-quants.c` for their meaning.

use half::f16;

use super::WeightType;

/// One block as codes, scales and minimums. Unused tails keep old values.
pub(crate) struct DecodedBlock {
    /// What [`WeightType::integer`] takes.
    pub codes: [u8; 256],
    /// Per group of [`WeightType::group`] columns.
    pub scales: [f32; 16],
    /// Per group; added once per weight. 0 for types that are not affine.
    pub mins: [f32; 16],
    /// K types only: `scales[g] = factor * scale_codes[g]` and `mins[g] = min_factor * min_codes[g]`, each rounded
    /// once. The factors are f16 numbers.
    pub factor: f32,
    pub min_factor: f32,
    pub scale_codes: [i8; 16],
    pub min_codes: [i8; 16],
}

impl Default for DecodedBlock {
    fn default() -> Self {
        DecodedBlock {
            codes: [0; 256],
            scales: [0.0; 16],
            mins: [0.0; 16],
            factor: 0.0,
            min_factor: 0.0,
            scale_codes: [0; 16],
            min_codes: [0; 16],
        }
    }
}

/// Decodes one quantised block; `bytes` holds exactly `ty.block_bytes()`.
pub(crate) fn decode_block(ty: WeightType, bytes: &[u8], out: &mut DecodedBlock) {
    match ty {
        WeightType::Q4_0 => {
            out.scales[0] = half_at(bytes, 0);
            nibbles(&bytes[2..18], &mut out.codes[..32]);
        }
        WeightType::Q4_1 => {
            out.scales[0] = half_at(bytes, 0);
            out.mins[0] = half_at(bytes, 2);
            nibbles(&bytes[4..20], &mut out.codes[..32]);
        }
        WeightType::Q5_0 => {
            out.scales[0] = half_at(bytes, 0);
            nibbles(&bytes[6..22], &mut out.codes[..32]);
            fifth_bits(&bytes[2..6], &mut out.codes[..32]);
        }
        WeightType::Q5_1 => {
            out.scales[0] = half_at(bytes, 0);
            out.mins[0] = half_at(bytes, 2);
            nibbles(&bytes[8..24], &mut out.codes[..32]);
            fifth_bits(&bytes[4..8], &mut out.codes[..32]);
        }
        WeightType::IQ4NL => {
            out.scales[0] = half_at(bytes, 0);
            nibbles(&bytes[2..18], &mut out.codes[..32]);
        }
        WeightType::MXFP4 => {
            out.scales[0] = half_power_of_two(bytes[0]);
            nibbles(&bytes[1..17], &mut out.codes[..32]);
        }
        WeightType::Q8_0 => {
            out.scales[0] = half_at(bytes, 0);
            for (code, byte) in out.codes.iter_mut().zip(&bytes[2..34]) {
                *code = byte ^ 0x80;
            }
        }
        WeightType::Q2K => {
            (out.factor, out.min_factor) = (half_at(bytes, 80), -half_at(bytes, 82));
            for (g, byte) in bytes[..16].iter().enumerate() {
                (out.scale_codes[g], out.min_codes[g]) = ((byte & 15) as i8, (byte >> 4) as i8);
                out.mins[g] = out.min_factor * f32::from(out.min_codes[g]);
            }
            scales_of_codes(16, out);
            pairs_of_bits(&bytes[16..80], &mut out.codes);
        }
        WeightType::Q3K => {
            out.factor = half_at(bytes, 108);
            q3_scales(&bytes[96..108], &mut out.scale_codes);
            scales_of_codes(16, out);
            pairs_of_bits(&bytes[32..96], &mut out.codes);
            // Bit g of byte i is the third bit of the i-th of the g-th 32 codes.
            for (g, codes) in out.codes.chunks_exact_mut(32).enumerate() {
                for (code, high) in codes.iter_mut().zip(&bytes[..32]) {
                    *code |= (high >> g & 1) << 2;
                }
            }
        }
        WeightType::IQ4XS => {
            out.factor = half_at(bytes, 0);
            let high = u16::from_le_bytes([bytes[2], bytes[3]]);
            for g in 0..8 {
                let low = bytes[4 + g / 2] >> (g % 2 * 4) & 15;
                let code = low | ((high >> (2 * g) & 3) << 4) as u8;
                out.scale_codes[g] = code as i8 - 32;
            }
            scales_of_codes(8, out);
            for (bytes, codes) in bytes[8..]
                .chunks_exact(16)
                .zip(out.codes.chunks_exact_mut(32))
            {
                nibbles(bytes, codes);
            }
        }
        WeightType::Q4K => {
            k_scales(bytes, out);
            for chunk in 0..4 {
                nibbles(
                    &bytes[16 + 32 * chunk..][..32],
                    &mut out.codes[64 * chunk..][..64],
                );
            }
        }
        WeightType::Q5K => {
            k_scales(bytes, out);
            for chunk in 0..4 {
                let codes = &mut out.codes[64 * chunk..][..64];
                nibbles(&bytes[48 + 32 * chunk..][..32], codes);
                for (i, high) in bytes[16..48].iter().enumerate() {
                    codes[i] |= (high >> (2 * chunk) & 1) << 4;
                    codes[i + 32] |= (high >> (2 * chunk + 1) & 1) << 4;
                }
            }
        }
        WeightType::Q6K => {
            out.factor = half_at(bytes, 208);
            for (code, byte) in out.scale_codes.iter_mut().zip(&bytes[192..208]) {
                *code = *byte as i8;
            }
            scales_of_codes(16, out);
            for part in 0..2 {
                let low = &bytes[64 * part..][..64];
                let high = &bytes[128 + 32 * part..][..32];
                let codes = &mut out.codes[128 * part..][..128];
                for i in 0..32 {
                    codes[i] = low[i] & 15 | (high[i] & 3) << 4;
                    codes[i + 32] = low[i + 32] & 15 | (high[i] >> 2 & 3) << 4;
                    codes[i + 64] = low[i] >> 4 | (high[i] >> 4 & 3) << 4;
                    codes[i + 96] = low[i + 32] >> 4 | (high[i] >> 6) << 4;
                }
            }
        }
        WeightType::F32 | WeightType::F16 | WeightType::BF16 => {
            unreachable!("quantised types only")
        }
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Low nibbles are the first half of `codes`, high nibbles the second.
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(bytes.len());
    for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
        *low = byte & 15;
        *high = byte >> 4;
    }
}

/// Bit `i` of a little-endian word is bit 4 of code `i`.
fn fifth_bits(bytes: &[u8], codes: &mut [u8]) {
    let word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    for (i, code) in codes.iter_mut().enumerate() {
        *code |= (word >> i & 1) as u8 * 16;
    }
}

/// Two bits of each of 256 codes: field k of byte i of the p-th 32 bytes belongs to code `128 p + 32 k + i`.
fn pairs_of_bits(bytes: &[u8], codes: &mut [u8; 256]) {
    for (bytes, codes) in bytes.chunks_exact(32).zip(codes.chunks_exact_mut(128)) {
        for (k, codes) in codes.chunks_exact_mut(32).enumerate() {
            for (code, byte) in codes.iter_mut().zip(bytes) {
                *code = byte >> (2 * k) & 3;
            }
        }
    }
}

/// The sixteen 6-bit scales of Q3_K: eight bytes of low nibbles, four of pairs of high bits; 32 stands for 0.
fn q3_scales(bytes: &[u8], codes: &mut [i8; 16]) {
    for (g, code) in codes.iter_mut().enumerate() {
        let low = bytes[g % 8] >> (g / 8 * 4) & 15;
        let high = bytes[8 + g % 4] >> (g / 4 * 2) & 3;
        *code = (low | high << 4) as i8 - 32;
    }
}

/// Scales of the first `groups` groups from the block's factor.
fn scales_of_codes(groups: usize, out: &mut DecodedBlock) {
    for (scale, code) in out.scales[..groups].iter_mut().zip(out.scale_codes) {
        *scale = out.factor * f32::from(code);
    }
}

/// Half of `2^(exponent - 127)`, since the table of MXFP4 has its values doubled. The two least are subnormal; the
/// largest, which the OCX specification calls no number, is `2^127` as in ggml.
fn half_power_of_two(exponent: u8) -> f32 {
    f32::from_bits(match exponent {
        0 | 1 => 0x0020_0000 << exponent,
        _ => (u32::from(exponent) - 1) << 23,
    })
}

/// The eight 6-bit scales and minimums of Q4_K and Q5_K, times the block's two f16 factors.
fn k_scales(bytes: &[u8], out: &mut DecodedBlock) {
    (out.factor, out.min_factor) = (half_at(bytes, 0), -half_at(bytes, 2));
    let q = &bytes[4..16];
    for j in 0..8 {
        let (scale, min) = if j < 4 {
            (q[j] & 63, q[j + 4] & 63)
        } else {
            (
                q[j + 4] & 15 | q[j - 4] >> 6 << 4,
                q[j + 4] >> 4 | q[j] >> 6 << 4,
            )
        };
        (out.scale_codes[j], out.min_codes[j]) = (scale as i8, min as i8);
        out.scales[j] = out.factor * f32::from(scale);
        out.mins[j] = out.min_factor * f32::from(min);
    }
}
