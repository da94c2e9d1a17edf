//! What all kinds of attention tiles share: which positions are seen and where they lie, the softmax within a tile, and
//! the merging of tiles.
//!
//! ```text
//! scores[q][j]                                                    `floats` or `codes`
//! m = max over visible j                                          exact, so any order
//! p[q][j] = exp(scores - m), 0 where not visible
//! l = sum of p                                                    16 lanes (position mod 16) in order, one tree
//! acc[q][d] = sum over visible j of p[j] * v[j][d]                `floats` or `codes`
//! ```
//!
//! Positions a row does not see never enter its arithmetic, whatever is stored there: their scores are replaced here,
//! and what stands behind them is not multiplied in.

use std::ops::Range;

use super::{AttentionParams, AttentionRow, KV_TILE};
use crate::kv::{KV_SPAN, KvView};
use crate::math::{self, tree_max, tree_sum};
use crate::simd::{Kernel, Simd};

/// A record is the state of one query: maximum and sum in the header (filled up to a cache line), then the accumulator.
pub(super) const HEADER: usize = 16;
pub(super) const M: usize = 0;
pub(super) const L: usize = 1;

/// Spans of a tile.
pub(super) const SPANS: usize = KV_TILE / KV_SPAN;

/// One tile of one item: its queries, and where K and V of its positions lie.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub kv: &'a KvView,
    pub layer: usize,
    pub kv_head: usize,
    pub rows: &'a [AttentionRow<'a>],
    /// Heads per row; query = row * heads + head.
    pub heads: usize,
    pub params: &'a AttentionParams,
    pub tile: usize,
}

impl Place<'_> {
    #[inline(always)]
    pub fn queries(&self) -> usize {
        self.rows.len() * self.heads
    }

    /// f32 of one query's record.
    #[inline(always)]
    pub fn record(&self) -> usize {
        HEADER + self.params.head_dim
    }

    /// Positions of the tile a row sees, counted from the tile's start.
    #[inline(always)]
    pub fn visible(&self, row: usize) -> Range<usize> {
        let start = self.tile * KV_TILE;
        let visible = self.rows[row].visible(self.params.window);
        visible.start.clamp(start, start + KV_TILE) - start
            ..visible.end.clamp(start, start + KV_TILE) - start
    }

    /// Positions any row sees. Rows ascend, so the first row starts first and the last ends last.
    #[inline(always)]
    pub fn seen_by_any(&self) -> Range<usize> {
        self.visible(0).start..self.visible(self.rows.len() - 1).end
    }

    /// Spans that hold a position any row sees.
    #[inline(always)]
    pub fn spans(&self) -> Range<usize> {
        let seen = self.seen_by_any();
        seen.start / KV_SPAN..seen.end.div_ceil(KV_SPAN)
    }

    /// The block of a position of the tile, and the slot in it.
    #[inline(always)]
    pub fn block(&self, position: usize) -> (u32, usize) {
        let position = self.tile * KV_TILE + position;
        let size = self.kv.shape().block_size as usize;
        (self.rows[0].table[position / size], position % size)
    }

    /// K of a span.
    #[inline(always)]
    pub fn k(&self, span: usize) -> *const u8 {
        let (block, slot) = self.block(span * KV_SPAN);
        let offset = slot / KV_SPAN * self.kv.shape().span_bytes();
        // SAFETY: `slot` is inside the block, so this is inside K of the head.
        unsafe { self.kv.k(block, self.layer, self.kv_head).add(offset) }
    }

    /// V of a span.
    #[inline(always)]
    pub fn v(&self, span: usize) -> *const u8 {
        let (block, slot) = self.block(span * KV_SPAN);
        let offset = slot / KV_SPAN * self.kv.shape().span_bytes();
        // SAFETY: as for `k`.
        unsafe { self.kv.v(block, self.layer, self.kv_head).add(offset) }
    }

    /// Turns the scores of every query that sees anything into weights, and writes maximum and sum.
    ///
    /// # Safety
    /// The processor has `S`'s instruction set; `scores` holds `KV_TILE` and `records` a record per query.
    #[inline(always)]
    pub unsafe fn softmax<S: Simd>(&self, scores: &mut [f32], records: &mut [f32]) {
        for row in 0..self.rows.len() {
            let visible = self.visible(row);
            if visible.is_empty() {
                continue;
            }
            for query in row * self.heads..(row + 1) * self.heads {
                let scores = &mut scores[query * KV_TILE..][..KV_TILE];
                let record = &mut records[query * self.record()..][..HEADER];
                // SAFETY: passed on.
                unsafe { softmax::<S>(scores, visible.clone(), record) };
            }
        }
    }
}

/// The lanes of a span that lie in a range of positions.
#[inline(always)]
pub(super) fn lanes(positions: &Range<usize>, span: usize) -> (i32, i32) {
    let first = (span * KV_SPAN) as i32;
    (positions.start as i32 - first, positions.end as i32 - first)
}

/// Turns one query's scores into weights.
///
/// # Safety
/// The processor has `S`'s instruction set, and `scores` has `KV_TILE` elements.
#[inline(always)]
unsafe fn softmax<S: Simd>(scores: &mut [f32], visible: Range<usize>, record: &mut [f32]) {
    let scores = scores.as_mut_ptr();
    let spans = visible.start / KV_SPAN..visible.end.div_ceil(KV_SPAN);
    // SAFETY: spans lie within the query's `KV_TILE` scores.
    unsafe {
        let lowest = S::splat(f32::NEG_INFINITY);
        let mut largest = lowest;
        for span in spans.clone() {
            let (from, to) = lanes(&visible, span);
            let score = S::keep(from, to, S::load(scores.add(span * KV_SPAN)), lowest);
            largest = S::max(score, largest);
        }
        let m = tree_max(&S::to_array(largest));
        let zero = S::splat(0.0);
        let mut sum = zero;
        for span in spans {
            let (from, to) = lanes(&visible, span);
            let at = scores.add(span * KV_SPAN);
            let p = math::exp::<S>(S::sub(S::load(at), S::splat(m)));
            let p = S::keep(from, to, p, zero);
            S::store(at, p);
            sum = S::add(sum, p);
        }
        record[M] = m;
        record[L] = tree_sum(&S::to_array(sum));
    }
}

/// Runs a const-generic function over `$count` queries, as many at a time as it is compiled for (`$size`, largest first,
/// ending in 1) and the registers hold.
macro_rules! over_queries {
    ($count:expr, [$($size:literal)*], $at:ident => $f:ident::<$s:ty, $e:ty, $n:literal> $args:tt) => {{
        let count = $count;
        let mut $at = 0;
        while $at < count {
            $(if const { $size == 1 || $size <= <$s>::QUERIES } && count - $at >= $size {
                over_queries!(@call $f::<$s, $e, $size, $n> $args);
                $at += $size;
                continue;
            })*
        }
    }};
    (@call $f:ident::<$s:ty, $e:ty, $q:literal, $n:literal> ($($args:expr),* $(,)?)) => {
        $f::<$s, $e, $q, $n>($($args),*)
    };
}
pub(super) use over_queries;

/// Merges the next tile of one query into the total of those before.
pub(super) struct Merge<'a> {
    pub tile: &'a [f32],
    pub total: &'a mut [f32],
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (tile, total) = (self.tile, self.total);
        let m = if total[M] > tile[M] {
            total[M]
        } else {
            tile[M]
        };
        // SAFETY: the processor's instruction set is the caller's promise.
        let weight = |from: f32| unsafe { S::to_array(math::exp::<S>(S::splat(from - m)))[0] };
        let (old, new) = (weight(total[M]), weight(tile[M]));
        total[L] = tile[L].mul_add(new, total[L] * old);
        total[M] = m;
        for (total, tile) in total[HEADER..].iter_mut().zip(&tile[HEADER..]) {
            *total = tile.mul_add(new, *total * old);
        }
    }
}
