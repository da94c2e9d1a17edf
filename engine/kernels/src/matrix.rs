//! Weights repacked once at load into the layout the inner loops read front to back.
//!
//! Lanes are output rows, so 16 rows form a tile and a vector of the inner loop holds one value of each of them:
//!
//! ```text
//! matrix  = segments, one per source (q|k|v or gate|up keep their own type)
//! segment = tiles of 16 rows; the last is filled up with zero rows
//! tile (quantised) = [ per group: scale x16 (, minimum x16) ] pad to 64 bytes [ per 32 columns: code lines ]
//! tile (float)     = [ per column: weight x16 ]
//!
//! code line = 64 bytes = 16 rows x 4 consecutive columns, what one `vpdpbusd zmm` eats
//!   byte codes:   8 lines per 32 columns, line i = columns 4i..4i+4
//!   nibble codes: 4 lines per 32 columns, line i = columns 4i..4i+4 low, 16+4i..16+4i+4 high
//! ```
//!
//! 5- and 6-bit codes become bytes. Scales stay f16 where the file has f16 (exact); K types, whose scales are a product
//! rounded to f32, keep f32. This file does not multiply anything.

use half::f16;

use crate::Error;
use crate::format::{self, DecodedBlock, WeightType, decode_block, dequantized};
use crate::memory::{Region, WeightMemory};

/// Rows of a tile: the f32 lanes of the widest vector.
pub(crate) const LANES: usize = 16;
/// Columns that share one activation scale.
pub(crate) const GROUP: usize = 32;

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
    pub fn scale_bytes(&self) -> usize {
        match self.ty {
            WeightType::Q4K | WeightType::Q5K | WeightType::Q6K => 4,
            _ => 2,
        }
    }

    /// Whether two codes share a byte.
    pub fn is_nibbles(&self) -> bool {
        matches!(
            self.ty,
            WeightType::Q4_0 | WeightType::Q4_1 | WeightType::Q4K
        )
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
            let per_group =
                LANES * segment.scale_bytes() * if source.ty.is_affine() { 2 } else { 1 };
            segment.codes_offset =
                (source.cols / source.ty.group() * per_group).next_multiple_of(64);
            segment.codes_offset + source.cols * LANES / if segment.is_nibbles() { 2 } else { 1 }
        } else {
            (source.cols * LANES * source.ty.block_bytes()).next_multiple_of(64)
        };
        weights.checked_mul(segment.tiles).ok_or(Error::TooLarge)?;
        Ok(segment)
    }
}

impl PackedMatrix {
    /// As [`pack_in`](Self::pack_in), in memory of its own.
    ///
    /// # Errors
    /// As [`pack_in`](Self::pack_in).
    pub fn pack(sources: &[MatrixSource<'_>]) -> Result<PackedMatrix, Error> {
        PackedMatrix::pack_in(sources, &mut WeightMemory::new())
    }

    /// Repacks sources stacked along rows. They share `cols` and may differ in type. Matrices of one model are packed
    /// in the order of their use, so that reading one leads into the next.
    ///
    /// # Errors
    /// [`Error::EmptyMatrix`], [`Error::ColumnsDiffer`], [`Error::ColumnsNotBlocks`], [`Error::ByteLength`],
    /// [`Error::TooLarge`], [`Error::Memory`]. Memory is only asked for once all sources have been checked, and is at most four times
    /// theirs plus one tile each.
    pub fn pack_in(
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
        let mut region = memory.take(bytes)?;
        let packed = region.bytes_mut();
        for (segment, source) in segments.iter().zip(sources) {
            let tiles = &mut packed[segment.offset..][..segment.tiles * segment.tile_bytes];
            let row_bytes = source.bytes.len() / source.rows;
            for (tile, rows) in tiles
                .chunks_exact_mut(segment.tile_bytes)
                .zip(source.bytes.chunks(row_bytes * LANES))
            {
                for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
                    if segment.ty.is_quantized() {
                        pack_quantized_row(segment, row, lane, tile);
                    } else {
                        pack_float_row(segment.ty.block_bytes(), row, lane, tile);
                    }
                }
            }
        }
        let rows = segments.iter().map(|s| s.rows).sum();
        Ok(PackedMatrix {
            segments,
            packed: region,
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
                let code =
                    i32::from(code_at(segment, tile, g * ty.group() + i, lane)) - ty.zero_point();
                *out = dequantized(ty, code, scale, min);
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

/// Where the code of a column lies within the codes of a tile, and whether it is the high nibble.
fn code_place(nibbles: bool, col: usize, lane: usize) -> (usize, bool) {
    let (group, within) = (col / GROUP, col % GROUP);
    if nibbles {
        let high = within >= 16;
        let within = within % 16;
        (group * 256 + within / 4 * 64 + lane * 4 + within % 4, high)
    } else {
        (group * 512 + within / 4 * 64 + lane * 4 + within % 4, false)
    }
}

pub(crate) fn code_at(segment: &Segment, tile: &[u8], col: usize, lane: usize) -> u8 {
    let (at, high) = code_place(segment.is_nibbles(), col, lane);
    let byte = tile[segment.codes_offset + at];
    match (segment.is_nibbles(), high) {
        (false, _) => byte,
        (true, false) => byte & 15,
        (true, true) => byte >> 4,
    }
}

fn scale_place(segment: &Segment, group: usize, lane: usize) -> (usize, usize) {
    let size = segment.scale_bytes();
    let planes = if segment.ty.is_affine() { 2 } else { 1 };
    let scale = (group * planes * LANES + lane) * size;
    (scale, scale + LANES * size)
}

pub(crate) fn scale_and_min(
    segment: &Segment,
    tile: &[u8],
    group: usize,
    lane: usize,
) -> (f32, f32) {
    let (scale, min) = scale_place(segment, group, lane);
    let read = |at: usize| {
        if segment.scale_bytes() == 4 {
            f32::from_ne_bytes([tile[at], tile[at + 1], tile[at + 2], tile[at + 3]])
        } else {
            f16::from_ne_bytes([tile[at], tile[at + 1]]).to_f32()
        }
    };
    (
        read(scale),
        if segment.ty.is_affine() {
            read(min)
        } else {
            0.0
        },
    )
}

fn pack_quantized_row(segment: &Segment, row: &[u8], lane: usize, tile: &mut [u8]) {
    let ty = segment.ty;
    let nibbles = segment.is_nibbles();
    let groups = ty.block_elements() / ty.group();
    let mut decoded = DecodedBlock::default();
    for (block, bytes) in row.chunks_exact(ty.block_bytes()).enumerate() {
        decode_block(ty, bytes, &mut decoded);
        for g in 0..groups {
            let (scale, min) = scale_place(segment, block * groups + g, lane);
            write_scale(segment, &mut tile[scale..], decoded.scales[g]);
            if ty.is_affine() {
                write_scale(segment, &mut tile[min..], decoded.mins[g]);
            }
        }
        let codes = &mut tile[segment.codes_offset..];
        for (i, quad) in decoded.codes[..ty.block_elements()]
            .chunks_exact(4)
            .enumerate()
        {
            let (at, high) = code_place(nibbles, block * ty.block_elements() + i * 4, lane);
            for (to, code) in codes[at..at + 4].iter_mut().zip(quad) {
                *to |= if high { code << 4 } else { *code };
            }
        }
    }
}

fn write_scale(segment: &Segment, to: &mut [u8], value: f32) {
    if segment.scale_bytes() == 4 {
        to[..4].copy_from_slice(&value.to_ne_bytes());
    } else {
        // Exact: the value was an f16 in the file.
        to[..2].copy_from_slice(&f16::from_f32(value).to_ne_bytes());
    }
}

fn pack_float_row(size: usize, row: &[u8], lane: usize, tile: &mut [u8]) {
    for (k, value) in row.chunks_exact(size).enumerate() {
        let to = &mut tile[(k * LANES + lane) * size..][..size];
        to.copy_from_slice(value);
    }
}

// Files are little-endian and float weights are copied as they are.
const _: () = assert!(
    cfg!(target_endian = "little"),
    "packed weights assume little-endian"
);
