//! From a file's row-major blocks to tiles, 16 rows at a time.
//!
//! ```text
//! for each tile, on whatever thread takes it
//!   for each block column
//!     decode the block of each of the 16 rows     codes a byte each, scales
//!     scales                                      one value per row, side by side
//!     for each group of 32 columns
//!       line j = columns 4j..4j+4 of 16 rows      a transposition of 32-bit words
//!       the 8 lines in the bits they need         whole lines at a time
//! ```
//!
//! What is packed does not depend on the threads: a tile is a function of its rows alone. The tests hold every tile to
//! the layout written down code by code. Nothing here is read again once a model is loaded.

use std::ops::Range;

use half::{bf16, f16};

use super::{
    GROUP, LANES, MatrixSource, PackedMatrix, Segment, block_k_scales, codes_per_group_of_bits,
    has_half_groups, scale_code_place,
};
use crate::format::{DecodedBlock, decode_block};
use crate::kernels::Shared;
use crate::memory::WeightMemory;
use crate::pool::Pool;
use crate::simd::{Kernel, Simd, dispatch};
use crate::{Error, Isa, Kernels};

/// Columns of float weights that are interleaved at once, so that the tile's part stays in the L1 cache.
const FLOAT_COLS: usize = 64;

/// Line j of a group: columns `4j..4j + 4` of each of the 16 rows, a byte each, the first column lowest.
type Lines = [[u32; LANES]; 8];

impl Kernels {
    /// Packs sources stacked along rows, behind what was packed to `memory` before. They share `cols` and may differ in
    /// type. Matrices of one model are packed in the order of their use, so that reading one leads into the next.
    ///
    /// # Errors
    /// [`Error::EmptyMatrix`], [`Error::ColumnsDiffer`], [`Error::ColumnsNotBlocks`], [`Error::ByteLength`],
    /// [`Error::TooLarge`], [`Error::Memory`]. Memory is only asked for once all sources have been checked, and is at most four times
    /// theirs plus one tile each.
    pub fn pack(
        &self,
        sources: &[MatrixSource<'_>],
        memory: &mut WeightMemory,
    ) -> Result<PackedMatrix, Error> {
        let mut matrix = PackedMatrix::lay_out(sources, memory)?;
        matrix.fill(sources, self.isa(), Some(self.pool()));
        Ok(matrix)
    }
}

impl PackedMatrix {
    /// As [`Kernels::pack`], by this thread alone and in memory of its own.
    ///
    /// # Errors
    /// As [`Kernels::pack`].
    pub fn pack(sources: &[MatrixSource<'_>]) -> Result<PackedMatrix, Error> {
        let mut matrix = PackedMatrix::lay_out(sources, &mut WeightMemory::new())?;
        matrix.fill(sources, Isa::detect(), None);
        Ok(matrix)
    }

    /// Fills the tiles, which are zero, from the sources they were laid out for; on this thread where there is no pool.
    fn fill(&mut self, sources: &[MatrixSource<'_>], isa: Isa, pool: Option<&Pool>) {
        let cols = self.cols;
        let packed = self.packed.bytes_mut();
        for (segment, source) in self.segments.iter().zip(sources) {
            let tiles =
                Shared::new(&mut packed[segment.offset..][..segment.tiles * segment.tile_bytes]);
            let row_bytes = source.bytes.len() / source.rows;
            let pack = |range: Range<usize>| {
                let rows = range.start * LANES..source.rows.min(range.end * LANES);
                // SAFETY: ranges are disjoint, and so are their tiles; the instruction set is one this processor has.
                unsafe {
                    let kernel = PackTiles {
                        segment,
                        cols,
                        rows: &source.bytes[rows.start * row_bytes..rows.end * row_bytes],
                        row_bytes,
                        tiles: tiles.slice(
                            range.start * segment.tile_bytes..range.end * segment.tile_bytes,
                        ),
                    };
                    dispatch(isa, kernel);
                }
            };
            match pool {
                Some(pool) => pool.for_ranges(segment.tiles, &pack),
                None => pack(0..segment.tiles),
            }
        }
    }
}

/// Some tiles of a segment and the rows they are made of; the last tile may have fewer than 16.
struct PackTiles<'a> {
    segment: &'a Segment,
    cols: usize,
    rows: &'a [u8],
    row_bytes: usize,
    tiles: &'a mut [u8],
}

impl Kernel for PackTiles<'_> {
    type Output = ();

    /// Plain loops over whole lines, which the compiler turns into vectors of the instruction set.
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let segment = self.segment;
        let rows = self.rows.chunks(self.row_bytes * LANES);
        for (tile, rows) in self.tiles.chunks_exact_mut(segment.tile_bytes).zip(rows) {
            match (segment.ty.is_quantized(), segment.ty.code_bits()) {
                (true, 2) => quantized_tile::<2>(segment, rows, self.row_bytes, tile),
                (true, 3) => quantized_tile::<3>(segment, rows, self.row_bytes, tile),
                (true, 4) => quantized_tile::<4>(segment, rows, self.row_bytes, tile),
                (true, 5) => quantized_tile::<5>(segment, rows, self.row_bytes, tile),
                (true, 6) => quantized_tile::<6>(segment, rows, self.row_bytes, tile),
                (true, _) => quantized_tile::<8>(segment, rows, self.row_bytes, tile),
                (false, _) if segment.ty.block_bytes() == 2 => {
                    float_tile::<2>(self.cols, rows, tile);
                }
                (false, _) => float_tile::<4>(self.cols, rows, tile),
            }
        }
    }
}

#[inline(always)]
fn quantized_tile<const BITS: usize>(
    segment: &Segment,
    rows: &[u8],
    row_bytes: usize,
    tile: &mut [u8],
) {
    let ty = segment.ty;
    let groups = ty.block_elements() / GROUP;
    let (scales, codes) = tile.split_at_mut(segment.codes_offset);
    let mut codes = codes.chunks_exact_mut(codes_per_group_of_bits(BITS));
    // Rows that are not there keep codes of zero.
    let mut decoded: [DecodedBlock; LANES] = std::array::from_fn(|_| DecodedBlock::default());
    for block in 0..row_bytes / ty.block_bytes() {
        for (lane, (row, decoded)) in rows.chunks_exact(row_bytes).zip(&mut decoded).enumerate() {
            decode_block(
                ty,
                &row[block * ty.block_bytes()..][..ty.block_bytes()],
                decoded,
            );
            put_scales(segment, block, lane, decoded, scales);
        }
        for (group, codes) in (0..groups).zip(&mut codes) {
            put_lines::<BITS>(&lines(&decoded, group), codes);
        }
    }
}

/// The scales of a row's block.
#[inline(always)]
fn put_scales(
    segment: &Segment,
    block: usize,
    lane: usize,
    decoded: &DecodedBlock,
    scales: &mut [u8],
) {
    let ty = segment.ty;
    // Exact: the value was an f16 in the file.
    let mut put = |at: usize, value: f32| {
        scales[at..at + 2].copy_from_slice(&f16::from_f32(value).to_ne_bytes());
    };
    if !ty.has_scale_codes() {
        let planes = if ty.is_affine() { 2 } else { 1 };
        let at = (block * planes * LANES + lane) * 2;
        if ty.has_wide_scales() {
            // Exact: a power of two, subnormal ones included.
            let scale = bf16::from_f32(decoded.scales[0]);
            scales[at..at + 2].copy_from_slice(&scale.to_ne_bytes());
            return;
        }
        put(at, decoded.scales[0]);
        if ty.is_affine() {
            put(at + 2 * LANES, decoded.mins[0]);
        }
        return;
    }
    let at = block * block_k_scales(ty) + 2 * lane;
    put(at, decoded.factor);
    if ty.is_affine() {
        put(at + 2 * LANES, decoded.min_factor);
    }
    for g in 0..ty.block_elements() / ty.group() {
        let col = block * ty.block_elements() + g * ty.group();
        let place = scale_code_place(ty, col, lane);
        let (scale, min) = (decoded.scale_codes[g] as u8, decoded.min_codes[g] as u8);
        match (ty.is_affine(), has_half_groups(ty)) {
            (true, true) => scales[place] = scale | min << 4,
            (true, false) => (scales[place], scales[place + LANES]) = (scale, min),
            (false, _) => scales[place] = scale,
        }
    }
}

#[inline(always)]
fn lines(decoded: &[DecodedBlock; LANES], group: usize) -> Lines {
    let mut lines = [[0; LANES]; 8];
    for (lane, decoded) in decoded.iter().enumerate() {
        let (words, _) = decoded.codes[group * GROUP..][..GROUP].as_chunks::<4>();
        for (line, word) in lines.iter_mut().zip(words) {
            line[lane] = u32::from_le_bytes(*word);
        }
    }
    lines
}

/// Writes the lines of a group as nibbles and the planes of their higher bits, or as they are. Codes are below
/// `2^BITS`, so no bit crosses into the next byte but those that the masks drop.
#[inline(always)]
fn put_lines<const BITS: usize>(lines: &Lines, codes: &mut [u8]) {
    let mut put = |at: usize, line: [u32; LANES]| {
        for (to, word) in codes[64 * at..][..64].chunks_exact_mut(4).zip(line) {
            to.copy_from_slice(&word.to_le_bytes());
        }
    };
    if BITS == 8 {
        for (at, line) in lines.iter().enumerate() {
            put(at, *line);
        }
        return;
    }
    // Bits `first..first + width` of each line, side by side in the bytes of as many lines as that takes.
    let planes = |first: usize, width: usize| {
        let (mask, per_plane) = (0x0101_0101 * ((1 << width) - 1), 8 / width);
        (0..width).map(move |plane| {
            let mut bits = [0; LANES];
            for field in 0..per_plane {
                let line = &lines[plane * per_plane + field];
                for (bits, word) in bits.iter_mut().zip(line) {
                    *bits |= (word >> first & mask) << (field * width);
                }
            }
            bits
        })
    };
    if BITS < 4 {
        for (plane, bits) in planes(0, 2).enumerate() {
            put(plane, bits);
        }
    } else {
        const NIBBLES: u32 = 0x0f0f_0f0f;
        for i in 0..4 {
            let (low, high) = (&lines[i], &lines[i + 4]);
            put(
                i,
                std::array::from_fn(|lane| low[lane] & NIBBLES | (high[lane] & NIBBLES) << 4),
            );
        }
    }
    let (at, first, width) = match BITS {
        3 => (2, 2, 1),
        5 => (4, 4, 1),
        6 => (4, 4, 2),
        _ => return,
    };
    for (plane, bits) in planes(first, width).enumerate() {
        put(at + plane, bits);
    }
}

/// Interleaves the rows of float weights of `SIZE` bytes.
#[inline(always)]
fn float_tile<const SIZE: usize>(cols: usize, rows: &[u8], tile: &mut [u8]) {
    for first in (0..cols).step_by(FLOAT_COLS) {
        let count = FLOAT_COLS.min(cols - first);
        let tile = &mut tile[first * LANES * SIZE..][..count * LANES * SIZE];
        for (lane, row) in rows.chunks_exact(cols * SIZE).enumerate() {
            let (weights, _) = row[first * SIZE..][..count * SIZE].as_chunks::<SIZE>();
            let (columns, _) = tile.as_chunks_mut::<SIZE>();
            for (weight, to) in weights
                .iter()
                .zip(columns[lane..].iter_mut().step_by(LANES))
            {
                *to = *weight;
            }
        }
    }
}

// Files are little-endian and float weights are copied as they are.
const _: () = assert!(
    cfg!(target_endian = "little"),
    "packed weights assume little-endian"
);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::WeightType;

    /// The layout code by code, as `matrix` describes it.
    fn plain_tile(segment: &Segment, cols: usize, rows: &[u8], row_bytes: usize) -> Vec<u8> {
        let ty = segment.ty;
        let mut tile = vec![0; segment.tile_bytes];
        for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
            if !ty.is_quantized() {
                let size = ty.block_bytes();
                for k in 0..cols {
                    tile[(k * LANES + lane) * size..][..size]
                        .copy_from_slice(&row[k * size..][..size]);
                }
                continue;
            }
            let mut decoded = DecodedBlock::default();
            for (block, bytes) in row.chunks_exact(ty.block_bytes()).enumerate() {
                decode_block(ty, bytes, &mut decoded);
                put_scales(segment, block, lane, &decoded, &mut tile);
                for i in 0..ty.block_elements() {
                    let codes = &mut tile[segment.codes_offset..];
                    let col = block * ty.block_elements() + i;
                    put_code(ty.code_bits(), codes, col, lane, decoded.codes[i]);
                }
            }
        }
        tile
    }

    fn put_code(bits: usize, codes: &mut [u8], col: usize, lane: usize, code: u8) {
        let group = &mut codes[col / GROUP * codes_per_group_of_bits(bits)..];
        let (line, byte) = (col % GROUP / 4, lane * 4 + col % 4);
        if bits == 8 {
            group[line * 64 + byte] = code;
            return;
        }
        if bits < 4 {
            group[line / 4 * 64 + byte] |= (code & 3) << (line % 4 * 2);
        } else {
            group[line % 4 * 64 + byte] |= (code & 15) << (line / 4 * 4);
        }
        match bits {
            3 => group[128 + byte] |= (code >> 2) << line,
            5 => group[256 + byte] |= (code >> 4) << line,
            6 => group[256 + line / 4 * 64 + byte] |= (code >> 4) << (line % 4 * 2),
            _ => {}
        }
    }

    #[test]
    fn tiles_are_those_of_the_layout_written_code_by_code() {
        let mut state = 1u64;
        let mut random = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 56) as u8
        };
        for ty in WeightType::ALL {
            for (rows, blocks) in [(1, 1), (16, 1), (17, 2), (53, 3), (200, 1)] {
                let cols = if ty.is_quantized() {
                    blocks * ty.block_elements()
                } else {
                    blocks * 37
                };
                let mut bytes = vec![0; ty.matrix_bytes(rows, cols).unwrap()];
                bytes.fill_with(&mut random);
                let sources = [
                    MatrixSource {
                        ty: WeightType::F32,
                        rows: 3,
                        cols,
                        bytes: &vec![0; 12 * cols],
                    },
                    MatrixSource {
                        ty,
                        rows,
                        cols,
                        bytes: &bytes,
                    },
                ];
                let mut expected = Vec::new();
                let row_bytes = bytes.len() / rows;
                for isa in Isa::available() {
                    for threads in [1, 3] {
                        let kernels = Kernels::new(isa, threads).unwrap();
                        let matrix = kernels.pack(&sources, &mut WeightMemory::new()).unwrap();
                        let segment = &matrix.segments[1];
                        if expected.is_empty() {
                            for rows in bytes.chunks(row_bytes * LANES) {
                                expected.extend(plain_tile(segment, cols, rows, row_bytes));
                            }
                        }
                        let packed = matrix.tiles_from(segment, 0, segment.tiles);
                        assert!(
                            packed == expected,
                            "{} {rows}x{cols} {isa} {threads}",
                            ty.name()
                        );
                    }
                }
                let alone = PackedMatrix::pack(&sources).unwrap();
                let packed = alone.tiles_from(&alone.segments[1], 0, alone.segments[1].tiles);
                assert!(packed == expected, "{} {rows}x{cols}", ty.name());
            }
        }
    }
}
