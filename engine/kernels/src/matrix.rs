//! Weights repacked once at load into the layout the inner loops read front to back.
//!
//! Lanes are output rows, so 16 rows form a tile and a vector of the inner loop holds one value of each of them:
//!
//! ```text
//! matrix  = segments, one per source (q|k|v or gate|up keep their own type)
//! segment = tiles of 16 rows; the last is filled up with zero rows
//! tile (quantised) = [ scales ] pad to 64 bytes [ per 32 columns: code lines, bit lines ]
//! tile (float)     = [ per column: weight x16 ]
//!
//! scales  = per 32 columns: scale f16 x16 (, minimum f16 x16); of MXFP4 the scale as bf16
//! scales of types with scale codes = per 256 columns: factor f16 x16 (, minimum's factor f16 x16), then per 32 columns
//!   Q4_K, Q5_K:  scale code i8 x16, minimum code i8 x16
//!   Q3_K, Q6_K:  scale code i8 x16 of the first 16 columns, and of the second
//!   Q2_K:        the same with the minimum code in the upper nibble
//!   IQ4_XS:      scale code i8 x16
//!
//! line of codes = 64 bytes = 16 rows x 4 consecutive columns, what one `vpdpbusd zmm` eats
//!   8-bit codes:  8 lines per 32 columns, line j = columns 4j..4j+4
//!   nibbles:      4 lines per 32 columns, line i = line j=i above in the low nibbles, line j=i+4 in the high ones
//!   5-bit codes:  nibbles, then one line whose bit j is bit 4 of line j's code in the same byte
//!   6-bit codes:  nibbles, then two lines of four 2-bit fields: field k of line h are bits 4 and 5 of line j=4h+k
//!   2-bit codes:  two lines of four 2-bit fields: field k of line h is line j=4h+k
//!   3-bit codes:  the same with bits 0 and 1, then one line whose bit j is bit 2 of line j
//! ```
//!
//! So a matrix takes the bits it has in the file (but for padding, and up to 4 % where scale codes of 6 bits or a scale of
//! 8 take whole bytes), which is what bounds decoding. `pack` fills tiles.
//! This file does not multiply anything but a scale with its factor.

mod pack;

use half::{bf16, f16};

use crate::Error;
use crate::format::{self, WeightType, dequantized};
use crate::memory::{Region, WeightMemory};

/// Rows of a tile: the f32 lanes of the widest vector.
pub(crate) const LANES: usize = 16;
/// Columns that share one activation scale.
pub(crate) const GROUP: usize = 32;

/// Columns of a block of the types with scale codes.
pub(crate) const BLOCK_K: usize = 256;

/// Bytes of the codes of 32 columns and 16 rows.
pub(crate) const fn codes_per_group_of_bits(bits: usize) -> usize {
    GROUP * LANES * bits / 8
}

fn codes_per_group(ty: WeightType) -> usize {
    codes_per_group_of_bits(ty.code_bits())
}

/// Whether a group of 32 columns has two scales, one for each half.
pub(crate) const fn has_half_groups(ty: WeightType) -> bool {
    ty.group() == GROUP / 2
}

/// Bytes of the factors of one block of 256 columns and 16 rows.
pub(crate) const fn block_k_factors(ty: WeightType) -> usize {
    LANES * if ty.is_affine() { 4 } else { 2 }
}

/// Bytes of the codes of scales and minimums of one group of 32 columns and 16 rows.
pub(crate) const fn group_scale_codes(ty: WeightType) -> usize {
    let two = ty.is_affine() || has_half_groups(ty);
    LANES * if two { 2 } else { 1 }
}

/// Bytes of all scales of one block of 256 columns and 16 rows.
pub(crate) const fn block_k_scales(ty: WeightType) -> usize {
    block_k_factors(ty) + BLOCK_K / GROUP * group_scale_codes(ty)
}

/// One matrix as a model file holds it: row-major blocks, `rows` outputs of `cols` inputs.
#[derive(Clone, Copy, Debug)]
pub struct MatrixSource<'a> {
    pub ty: WeightType,
    pub rows: usize,
    pub cols: usize,
    pub bytes: &'a [u8],
}

/// Weights ready for [`Kernels::linear`](crate::Kernels::linear): rows are outputs, columns are inputs.
pub struct PackedMatrix {
    segments: Vec<Segment>,
    packed: Region,
    rows: usize,
    cols: usize,
}

/// The rows of one source within a matrix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub ty: WeightType,
    /// First output row and number of rows, without the filling.
    pub first_row: usize,
    pub rows: usize,
    /// Tiles of all segments before this one.
    pub first_tile: usize,
    pub tiles: usize,
    /// Byte offset of the first tile, and of the codes within each tile.
    offset: usize,
    pub codes_offset: usize,
    pub tile_bytes: usize,
}

impl Segment {
    /// Bytes of scales in a tile.
    fn scales_len(ty: WeightType, cols: usize) -> usize {
        let planes = if ty.is_affine() { 2 } else { 1 };
        if ty.has_scale_codes() {
            cols / BLOCK_K * block_k_scales(ty)
        } else {
            cols / GROUP * planes * LANES * 2
        }
    }

    fn new(source: &MatrixSource<'_>, before: Option<&Segment>) -> Result<Segment, Error> {
        let mut segment = Segment {
            ty: source.ty,
            first_row: before.map_or(0, |s| s.first_row + s.rows),
            rows: source.rows,
            first_tile: before.map_or(0, |s| s.first_tile + s.tiles),
            tiles: source.rows.div_ceil(LANES),
            offset: before.map_or(0, |s| s.offset + s.tiles * s.tile_bytes),
            codes_offset: 0,
            tile_bytes: 0,
        };
        // The source's bytes exist in memory, and a tile is at most four times as large, so nothing here overflows
        // once the first product fits.
        let weights = source.cols.checked_mul(LANES * 8).ok_or(Error::TooLarge)?;
        segment.tile_bytes = if source.ty.is_quantized() {
            segment.codes_offset = Segment::scales_len(source.ty, source.cols).next_multiple_of(64);
            segment.codes_offset + source.cols / GROUP * codes_per_group(source.ty)
        } else {
            (source.cols * LANES * source.ty.block_bytes()).next_multiple_of(64)
        };
        weights.checked_mul(segment.tiles).ok_or(Error::TooLarge)?;
        Ok(segment)
    }
}

impl PackedMatrix {
    /// Checks the sources and takes the memory they need, all zeros.
    fn lay_out(
        sources: &[MatrixSource<'_>],
        memory: &mut WeightMemory,
    ) -> Result<PackedMatrix, Error> {
        let cols = sources.first().ok_or(Error::EmptyMatrix)?.cols;
        let mut segments: Vec<Segment> = Vec::with_capacity(sources.len());
        for source in sources {
            if source.cols != cols {
                return Err(Error::ColumnsDiffer {
                    first: cols,
                    other: source.cols,
                });
            }
            let expected = source.ty.matrix_bytes(source.rows, cols)?;
            if source.bytes.len() != expected {
                return Err(Error::ByteLength {
                    ty: source.ty.name(),
                    expected,
                    actual: source.bytes.len(),
                });
            }
            if source.rows == 0 || cols == 0 {
                return Err(Error::EmptyMatrix);
            }
            segments.push(Segment::new(source, segments.last())?);
        }
        let bytes = segments
            .last()
            .map_or(0, |s| s.offset + s.tiles * s.tile_bytes);
        let rows = segments.iter().map(|s| s.rows).sum();
        Ok(PackedMatrix {
            segments,
            packed: memory.take(bytes)?,
            rows,
            cols,
        })
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes read by one pass over the matrix.
    pub fn bytes(&self) -> usize {
        self.packed.bytes().len()
    }

    /// Outputs whose products are of integers: those of quantised weights.
    pub fn integer_rows(&self) -> usize {
        let integer = |segment: &&Segment| segment.ty.is_quantized();
        self.segments.iter().filter(integer).map(|s| s.rows).sum()
    }

    /// One row as f32, the exact values ggml dequantises to (for the lookup in a tied embedding table).
    ///
    /// # Panics
    /// Where `row` is out of range or `out` is not `cols` long.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert!(
            row < self.rows,
            "row `{row}` of a matrix of `{}`",
            self.rows
        );
        assert_eq!(out.len(), self.cols, "one value per column");
        let (segment, row) = self.locate(row);
        let tile = self.tile(segment, row / LANES);
        let lane = row % LANES;
        if !segment.ty.is_quantized() {
            let size = segment.ty.block_bytes();
            for (k, out) in out.iter_mut().enumerate() {
                let at = (k * LANES + lane) * size;
                format::read_floats(segment.ty, &tile[at..at + size], std::slice::from_mut(out));
            }
            return;
        }
        let ty = segment.ty;
        for (g, out) in out.chunks_exact_mut(ty.group()).enumerate() {
            let (scale, min) = scale_and_min(segment, tile, g, lane);
            for (i, out) in out.iter_mut().enumerate() {
                let integer = ty.integer(code_at(segment, tile, g * ty.group() + i, lane));
                *out = dequantized(ty, integer, scale, min);
            }
        }
    }

    pub(crate) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Tiles of all segments.
    pub(crate) fn tiles(&self) -> usize {
        self.segments.last().map_or(0, |s| s.first_tile + s.tiles)
    }

    pub(crate) fn tile(&self, segment: &Segment, tile: usize) -> &[u8] {
        &self.packed.bytes()[segment.offset + tile * segment.tile_bytes..][..segment.tile_bytes]
    }

    /// `count` tiles, one behind the other.
    pub(crate) fn tiles_from(&self, segment: &Segment, tile: usize, count: usize) -> &[u8] {
        let len = count * segment.tile_bytes;
        &self.packed.bytes()[segment.offset + tile * segment.tile_bytes..][..len]
    }

    /// The segment of a row, and the row within it.
    fn locate(&self, row: usize) -> (&Segment, usize) {
        let at = self.segments.partition_point(|s| s.first_row <= row) - 1;
        (&self.segments[at], row - self.segments[at].first_row)
    }
}

pub(crate) fn code_at(segment: &Segment, tile: &[u8], col: usize, lane: usize) -> u8 {
    let bits = segment.ty.code_bits();
    let group = &tile[segment.codes_offset + col / GROUP * codes_per_group_of_bits(bits)..];
    let (line, byte) = (col % GROUP / 4, lane * 4 + col % 4);
    if bits == 8 {
        return group[line * 64 + byte];
    }
    if bits < 4 {
        let low = group[line / 4 * 64 + byte] >> (line % 4 * 2) & 3;
        return match bits {
            3 => low | (group[128 + byte] >> line & 1) << 2,
            _ => low,
        };
    }
    let low = group[line % 4 * 64 + byte] >> (line / 4 * 4) & 15;
    match bits {
        5 => low | (group[256 + byte] >> line & 1) << 4,
        6 => low | (group[256 + line / 4 * 64 + byte] >> (line % 4 * 2) & 3) << 4,
        _ => low,
    }
}

/// Scale and minimum of a group of [`WeightType::group`] columns.
pub(crate) fn scale_and_min(
    segment: &Segment,
    tile: &[u8],
    group: usize,
    lane: usize,
) -> (f32, f32) {
    let ty = segment.ty;
    let half = |at: usize| f16::from_ne_bytes([tile[at], tile[at + 1]]).to_f32();
    if !ty.has_scale_codes() {
        let planes = if ty.is_affine() { 2 } else { 1 };
        let at = (group * planes * LANES + lane) * 2;
        if ty.has_wide_scales() {
            let scale = bf16::from_ne_bytes([tile[at], tile[at + 1]]);
            return (scale.to_f32(), 0.0);
        }
        let min = if ty.is_affine() {
            half(at + 2 * LANES)
        } else {
            0.0
        };
        return (half(at), min);
    }
    let col = group * ty.group();
    let block = col / BLOCK_K * block_k_scales(ty);
    let place = scale_code_place(ty, col, lane);
    let (scale, min) = match (ty.is_affine(), has_half_groups(ty)) {
        (true, true) => ((tile[place] & 15) as i8, (tile[place] >> 4) as i8),
        (true, false) => (tile[place] as i8, tile[place + LANES] as i8),
        (false, _) => (tile[place] as i8, 0),
    };
    let factor = half(block + 2 * lane);
    let min = if ty.is_affine() {
        half(block + 2 * LANES + 2 * lane) * f32::from(min)
    } else {
        0.0
    };
    (factor * f32::from(scale), min)
}

/// Where the code of a column's scale lies. A minimum's is in the same byte, or 16 bytes behind.
fn scale_code_place(ty: WeightType, col: usize, lane: usize) -> usize {
    let block = col / BLOCK_K * block_k_scales(ty) + block_k_factors(ty);
    let half = if has_half_groups(ty) {
        col % GROUP / 16
    } else {
        0
    };
    block + col % BLOCK_K / GROUP * group_scale_codes(ty) + half * LANES + lane
}
