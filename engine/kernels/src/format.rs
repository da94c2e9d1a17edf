//! The weight formats of model files (ggml blocks), as integers and scales.
//!
//! One decoder per format turns a row of blocks into what the arithmetic contract speaks of: unsigned codes with an
//! integer zero point, and per group of columns a scale and (for affine types) a minimum. Loading, packing and the
//! reference all start from it. Nothing here is fast; it runs once per weight.
//!
//! *Source*: the block layouts of ggml (`ggml-common.h`, `ggml-quants.c`).

use half::{bf16, f16};

use crate::Error;

/// How weights are stored in a model file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)]
pub enum WeightType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

impl WeightType {
    pub const ALL: [WeightType; 11] = [
        WeightType::F32,
        WeightType::F16,
        WeightType::BF16,
        WeightType::Q4_0,
        WeightType::Q4_1,
        WeightType::Q5_0,
        WeightType::Q5_1,
        WeightType::Q8_0,
        WeightType::Q4K,
        WeightType::Q5K,
        WeightType::Q6K,
    ];

    /// The name ggml and GGUF tools print.
    pub fn name(self) -> &'static str {
        match self {
            WeightType::F32 => "F32",
            WeightType::F16 => "F16",
            WeightType::BF16 => "BF16",
            WeightType::Q4_0 => "Q4_0",
            WeightType::Q4_1 => "Q4_1",
            WeightType::Q5_0 => "Q5_0",
            WeightType::Q5_1 => "Q5_1",
            WeightType::Q8_0 => "Q8_0",
            WeightType::Q4K => "Q4_K",
            WeightType::Q5K => "Q5_K",
            WeightType::Q6K => "Q6_K",
        }
    }

    /// Weights in one block.
    pub fn block_elements(self) -> usize {
        match self {
            WeightType::F32 | WeightType::F16 | WeightType::BF16 => 1,
            WeightType::Q4K | WeightType::Q5K | WeightType::Q6K => 256,
            _ => 32,
        }
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        match self {
            WeightType::F32 => 4,
            WeightType::F16 | WeightType::BF16 => 2,
            WeightType::Q4_0 => 18,
            WeightType::Q4_1 => 20,
            WeightType::Q5_0 => 22,
            WeightType::Q5_1 => 24,
            WeightType::Q8_0 => 34,
            WeightType::Q4K => 144,
            WeightType::Q5K => 176,
            WeightType::Q6K => 210,
        }
    }

    /// Whether a weight is an integer code times a scale.
    pub fn is_quantized(self) -> bool {
        !matches!(self, WeightType::F32 | WeightType::F16 | WeightType::BF16)
    }

    /// Columns that share one scale; 0 for float types.
    pub fn group(self) -> usize {
        match self {
            WeightType::F32 | WeightType::F16 | WeightType::BF16 => 0,
            WeightType::Q6K => 16,
            _ => 32,
        }
    }

    /// What is subtracted from a code before scaling; 0 for affine and float types.
    pub fn zero_point(self) -> i32 {
        match self {
            WeightType::Q4_0 => 8,
            WeightType::Q5_0 => 16,
            WeightType::Q6K => 32,
            WeightType::Q8_0 => 128,
            _ => 0,
        }
    }

    /// Bits of a code.
    pub(crate) fn code_bits(self) -> usize {
        match self {
            WeightType::Q4_0 | WeightType::Q4_1 | WeightType::Q4K => 4,
            WeightType::Q5_0 | WeightType::Q5_1 | WeightType::Q5K => 5,
            WeightType::Q6K => 6,
            _ => 8,
        }
    }

    /// Whether a group's scale is a small integer times a factor of its block of 256 columns.
    pub(crate) fn has_scale_codes(self) -> bool {
        matches!(self, WeightType::Q4K | WeightType::Q5K | WeightType::Q6K)
    }

    /// Whether a minimum is added per group.
    pub fn is_affine(self) -> bool {
        matches!(
            self,
            WeightType::Q4_1 | WeightType::Q5_1 | WeightType::Q4K | WeightType::Q5K
        )
    }

    /// Bytes of `rows` rows of `cols` weights.
    ///
    /// # Errors
    /// [`Error::ColumnsNotBlocks`], [`Error::TooLarge`].
    pub fn matrix_bytes(self, rows: usize, cols: usize) -> Result<usize, Error> {
        if !cols.is_multiple_of(self.block_elements()) {
            return Err(Error::ColumnsNotBlocks {
                ty: self.name(),
                cols,
                block: self.block_elements(),
            });
        }
        (cols / self.block_elements())
            .checked_mul(self.block_bytes())
            .and_then(|row| row.checked_mul(rows))
            .ok_or(Error::TooLarge)
    }
}

/// Dequantises whole blocks to f32, value for value as ggml does.
///
/// # Errors
/// [`Error::ColumnsNotBlocks`] where `out` is not whole blocks, [`Error::ByteLength`] where `bytes` does not fit `out`.
pub fn dequantize(ty: WeightType, bytes: &[u8], out: &mut [f32]) -> Result<(), Error> {
    let expected = ty.matrix_bytes(1, out.len())?;
    if bytes.len() != expected {
        return Err(Error::ByteLength {
            ty: ty.name(),
            expected,
            actual: bytes.len(),
        });
    }
    if !ty.is_quantized() {
        read_floats(ty, bytes, out);
        return Ok(());
    }
    let block = ty.block_elements();
    let mut decoded = DecodedBlock::default();
    for (bytes, out) in bytes
        .chunks_exact(ty.block_bytes())
        .zip(out.chunks_exact_mut(block))
    {
        decode_block(ty, bytes, &mut decoded);
        for (i, out) in out.iter_mut().enumerate() {
            let group = i / ty.group();
            let code = i32::from(decoded.codes[i]) - ty.zero_point();
            *out = dequantized(ty, code, decoded.scales[group], decoded.mins[group]);
        }
    }
    Ok(())
}

/// One weight from its code: one multiplication, and for affine types one addition, each rounded.
#[inline]
pub(crate) fn dequantized(ty: WeightType, code: i32, scale: f32, min: f32) -> f32 {
    let scaled = scale * code as f32;
    if ty.is_affine() { scaled + min } else { scaled }
}

/// Widens float weights; `bytes` holds exactly `out.len()` of them, little-endian, at any alignment.
pub(crate) fn read_floats(ty: WeightType, bytes: &[u8], out: &mut [f32]) {
    match ty {
        WeightType::F32 => {
            for (b, out) in bytes.chunks_exact(4).zip(out) {
                *out = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        WeightType::F16 => {
            for (b, out) in bytes.chunks_exact(2).zip(out) {
                *out = f16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        WeightType::BF16 => {
            for (b, out) in bytes.chunks_exact(2).zip(out) {
                *out = bf16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        _ => unreachable!("float types only"),
    }
}

/// One block as codes, scales and minimums. Unused tails keep old values.
pub(crate) struct DecodedBlock {
    /// `code - zero_point` is the integer weight.
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
        WeightType::Q8_0 => {
            out.scales[0] = half_at(bytes, 0);
            for (code, byte) in out.codes.iter_mut().zip(&bytes[2..34]) {
                *code = byte ^ 0x80;
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
            for (scale, code) in out.scales.iter_mut().zip(out.scale_codes) {
                *scale = out.factor * f32::from(code);
            }
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
