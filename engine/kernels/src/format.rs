//! The weight formats of model files (ggml blocks), as integers and scales.
//!
//! One decoder per format (`decode`) turns a row of blocks into what the arithmetic contract speaks of: unsigned codes
//! that stand for integers, and per group of columns a scale and (for affine types) a minimum. A code stands for itself
//! less a zero point, or is the index of a table of 16 integers. Loading, packing and the reference all start from it.
//! Nothing here is fast; it runs once per weight.
//!
//! *Source*: the block layouts of ggml (`ggml-common.h`, `ggml-quants.c`).

mod decode;

use half::{bf16, f16};

use crate::Error;

pub(crate) use decode::{DecodedBlock, decode_block};

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
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
    IQ4NL,
    IQ4XS,
    MXFP4,
}

/// The integers that the codes of IQ4_NL and IQ4_XS stand for.
const TABLE_IQ4: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];
/// Those of MXFP4, which are the values of E2M1 doubled.
const TABLE_MXFP4: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

impl WeightType {
    pub const ALL: [WeightType; 16] = [
        WeightType::F32,
        WeightType::F16,
        WeightType::BF16,
        WeightType::Q4_0,
        WeightType::Q4_1,
        WeightType::Q5_0,
        WeightType::Q5_1,
        WeightType::Q8_0,
        WeightType::Q2K,
        WeightType::Q3K,
        WeightType::Q4K,
        WeightType::Q5K,
        WeightType::Q6K,
        WeightType::IQ4NL,
        WeightType::IQ4XS,
        WeightType::MXFP4,
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
            WeightType::Q2K => "Q2_K",
            WeightType::Q3K => "Q3_K",
            WeightType::Q4K => "Q4_K",
            WeightType::Q5K => "Q5_K",
            WeightType::Q6K => "Q6_K",
            WeightType::IQ4NL => "IQ4_NL",
            WeightType::IQ4XS => "IQ4_XS",
            WeightType::MXFP4 => "MXFP4",
        }
    }

    /// Weights in one block.
    pub const fn block_elements(self) -> usize {
        match self {
            WeightType::F32 | WeightType::F16 | WeightType::BF16 => 1,
            _ if self.has_scale_codes() => 256,
            _ => 32,
        }
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        match self {
            WeightType::F32 => 4,
            WeightType::F16 | WeightType::BF16 => 2,
            WeightType::MXFP4 => 17,
            WeightType::Q4_0 | WeightType::IQ4NL => 18,
            WeightType::Q4_1 => 20,
            WeightType::Q5_0 => 22,
            WeightType::Q5_1 => 24,
            WeightType::Q8_0 => 34,
            WeightType::Q2K => 84,
            WeightType::Q3K => 110,
            WeightType::IQ4XS => 136,
            WeightType::Q4K => 144,
            WeightType::Q5K => 176,
            WeightType::Q6K => 210,
        }
    }

    /// Whether a weight is an integer times a scale.
    pub const fn is_quantized(self) -> bool {
        !matches!(self, WeightType::F32 | WeightType::F16 | WeightType::BF16)
    }

    /// Columns that share one scale; 0 for float types.
    pub const fn group(self) -> usize {
        match self {
            WeightType::F32 | WeightType::F16 | WeightType::BF16 => 0,
            WeightType::Q2K | WeightType::Q3K | WeightType::Q6K => 16,
            _ => 32,
        }
    }

    /// What the unsigned bytes that the kernels multiply by are above the integers they stand for; 0 for affine and
    /// float types. Such a byte is the code itself, or what [`table`](Self::table) has for it.
    pub const fn zero_point(self) -> i32 {
        match self {
            WeightType::Q3K => 4,
            WeightType::Q4_0 => 8,
            WeightType::MXFP4 => 12,
            WeightType::Q5_0 => 16,
            WeightType::Q6K => 32,
            WeightType::Q8_0 | WeightType::IQ4NL | WeightType::IQ4XS => 128,
            _ => 0,
        }
    }

    /// Bits of a weight, its scales aside.
    pub const fn bits(self) -> usize {
        if self.is_quantized() {
            self.code_bits()
        } else {
            8 * self.block_bytes()
        }
    }

    /// Bits of a code.
    pub(crate) const fn code_bits(self) -> usize {
        match self {
            WeightType::Q2K => 2,
            WeightType::Q3K => 3,
            WeightType::Q4_0 | WeightType::Q4_1 | WeightType::Q4K => 4,
            WeightType::IQ4NL | WeightType::IQ4XS | WeightType::MXFP4 => 4,
            WeightType::Q5_0 | WeightType::Q5_1 | WeightType::Q5K => 5,
            WeightType::Q6K => 6,
            _ => 8,
        }
    }

    /// What codes stand for, plus the zero point, where they are no integers themselves.
    pub(crate) const fn table(self) -> Option<[u8; 16]> {
        let values = match self {
            WeightType::IQ4NL | WeightType::IQ4XS => TABLE_IQ4,
            WeightType::MXFP4 => TABLE_MXFP4,
            _ => return None,
        };
        let mut table = [0; 16];
        let mut code = 0;
        while code < 16 {
            table[code] = (values[code] as i32 + self.zero_point()) as u8;
            code += 1;
        }
        Some(table)
    }

    /// The integer that a code stands for.
    pub(crate) fn integer(self, code: u8) -> i32 {
        let byte = match self.table() {
            Some(table) => table[usize::from(code)],
            None => code,
        };
        i32::from(byte) - self.zero_point()
    }

    /// Whether a group's scale is a small integer times a factor of its block of 256 columns.
    pub(crate) const fn has_scale_codes(self) -> bool {
        matches!(
            self,
            WeightType::Q2K
                | WeightType::Q3K
                | WeightType::Q4K
                | WeightType::Q5K
                | WeightType::Q6K
                | WeightType::IQ4XS
        )
    }

    /// Whether a scale is a power of two that f16 may be too narrow for. All of them are bf16 numbers.
    pub(crate) const fn has_wide_scales(self) -> bool {
        matches!(self, WeightType::MXFP4)
    }

    /// Whether a minimum is added per group.
    pub const fn is_affine(self) -> bool {
        matches!(
            self,
            WeightType::Q4_1
                | WeightType::Q5_1
                | WeightType::Q2K
                | WeightType::Q4K
                | WeightType::Q5K
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
            let integer = ty.integer(decoded.codes[i]);
            *out = dequantized(ty, integer, decoded.scales[group], decoded.mins[group]);
        }
    }
    Ok(())
}

/// One weight from its integer: one multiplication, and for affine types one addition, each rounded.
#[inline]
pub(crate) fn dequantized(ty: WeightType, integer: i32, scale: f32, min: f32) -> f32 {
    let scaled = scale * integer as f32;
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
