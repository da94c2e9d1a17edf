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
use crate::math::{self, LANES};
use crate::simd::{Kernel, Simd, prefetch};

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

    /// The block of a position of the tile, and the slot in it.
    #[inline(always)]
    pub fn block(&self, position: usize) -> (u32, usize) {
        let position = self.tile * KV_TILE + position;
        let size = self.kv.shape().block_size as usize;
        (self.rows[0].table[position / size], position % size)
    }

    /// The spans that hold a position any row sees.
    #[inline(always)]
    pub fn spans(&self) -> Spans {
        let seen = self.seen_by_any();
        let first = seen.start / KV_SPAN;
        let count = seen.end.div_ceil(KV_SPAN) - first;
        let mut spans = Spans {
            first,
            count,
            k: [std::ptr::null(); SPANS],
            v: [std::ptr::null(); SPANS],
        };
        let (span_bytes, v_offset) = (self.kv.span_bytes(), self.kv.v_offset());
        let size = self.kv.shape().block_size as usize;
        let position = self.tile * KV_TILE + first * KV_SPAN;
        let (mut ordinal, slot) = (position / size, position % size);
        let (mut from, per_block) = (slot / KV_SPAN, size / KV_SPAN);
        let mut done = 0;
        while done < count {
            let block = self.rows[0].table[ordinal];
            let k = self.kv.k(block, self.layer, self.kv_head);
            for at in from..per_block.min(from + count - done) {
                // SAFETY: the span is inside the block, so this is inside K and V of the head.
                unsafe {
                    spans.k[done] = k.add(at * span_bytes);
                    spans.v[done] = k.add(at * span_bytes + v_offset);
                }
                done += 1;
            }
            (ordinal, from) = (ordinal + 1, 0);
        }
        spans
    }

    /// Turns the scores of every query that sees anything into weights, and writes maximum and sum.
    ///
    /// # Safety
    /// The processor has `S`'s instruction set; `scores` holds `KV_TILE` and `records` a record per query.
    #[inline(always)]
    pub unsafe fn softmax<S: Simd>(
        &self,
        scores: &mut [f32],
        records: &mut [f32],
        ahead: &mut Ahead,
    ) {
        for row in 0..self.rows.len() {
            let visible = self.visible(row);
            if visible.is_empty() {
                continue;
            }
            for query in row * self.heads..(row + 1) * self.heads {
                let scores = &mut scores[query * KV_TILE..][..KV_TILE];
                let record = &mut records[query * self.record()..][..HEADER];
                // SAFETY: passed on.
                unsafe { softmax::<S>(scores, visible.clone(), record, ahead) };
            }
        }
    }
}

/// Spans of a tile, and where they lie.
pub(super) struct Spans {
    /// The first, counted from the tile's start.
    pub first: usize,
    pub count: usize,
    /// K and V of the first `count`.
    pub k: [*const u8; SPANS],
    pub v: [*const u8; SPANS],
}

/// Asks memory for the tile that is computed next, evenly over the time of the tile at hand.
///
/// A page holds only a few spans of a head, so the processor's own prefetching never gets going; and asking for all at
/// once, or in one phase of a tile only, leaves memory idle in the others. So the phases report how long they took, in
/// cycles as they should be, and each report asks for as many lines as are due.
pub(super) struct Ahead {
    /// K, then V of the next tile's spans.
    spans: [*const u8; 2 * SPANS],
    count: usize,
    span_bytes: usize,
    /// Whether a tile is too large to wait in the first-level cache.
    far: bool,
    /// The next line: its span, and where it lies in there.
    span: usize,
    offset: usize,
    /// Lines per cycle, and lines due, in 65,536ths.
    rate: usize,
    due: usize,
}

impl Ahead {
    /// Nothing to ask for.
    pub const NOTHING: Ahead = Ahead {
        spans: [std::ptr::null(); 2 * SPANS],
        count: 0,
        span_bytes: 0,
        far: false,
        span: 0,
        offset: 0,
        rate: 0,
        due: 0,
    };

    /// Asks for a tile within `cycles`.
    #[inline(always)]
    pub fn new(next: Option<Place<'_>>, cycles: usize) -> Ahead {
        let mut ahead = Ahead::NOTHING;
        let Some(next) = next else {
            return ahead;
        };
        let spans = next.spans();
        ahead.count = 2 * spans.count;
        ahead.spans[..spans.count].copy_from_slice(&spans.k[..spans.count]);
        ahead.spans[spans.count..ahead.count].copy_from_slice(&spans.v[..spans.count]);
        ahead.span_bytes = next.kv.span_bytes();
        ahead.far = ahead.count * ahead.span_bytes > NEAR_BYTES;
        ahead.rate = ((ahead.count * ahead.span_bytes) << 10) / cycles.max(1);
        ahead
    }

    /// About so many cycles have passed.
    #[inline(always)]
    pub fn passed(&mut self, cycles: usize) {
        if self.rate == 0 {
            return;
        }
        self.due += cycles * self.rate;
        while self.due >= 1 << 16 {
            self.due -= 1 << 16;
            let line = self.spans[self.span].wrapping_add(self.offset);
            if self.far {
                prefetch::<true>(line);
            } else {
                prefetch::<false>(line);
            }
            self.offset += 64;
            if self.offset >= self.span_bytes {
                (self.offset, self.span) = (0, self.span + 1);
                if self.span == self.count {
                    self.rate = 0;
                    return;
                }
            }
        }
    }
}

/// Bytes of a tile that may wait in a first-level cache of 32 KiB beside what is computed on. From the second level each
/// line is fetched again when it is used, in competition with those on their way from memory.
const NEAR_BYTES: usize = 20 << 10;

/// Cycles that the softmax takes per 16 scores.
pub(super) const SOFTMAX_CYCLES: usize = 32;

/// Whether all lanes of a span lie in a range of positions.
#[inline(always)]
pub(super) fn is_whole(positions: &Range<usize>, span: usize) -> bool {
    positions.start <= span * KV_SPAN && (span + 1) * KV_SPAN <= positions.end
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
unsafe fn softmax<S: Simd>(
    scores: &mut [f32],
    visible: Range<usize>,
    record: &mut [f32],
    ahead: &mut Ahead,
) {
    let scores = scores.as_mut_ptr();
    let spans = visible.start / KV_SPAN..visible.end.div_ceil(KV_SPAN);
    // SAFETY: spans lie within the query's `KV_TILE` scores.
    unsafe {
        let lowest = S::splat(f32::NEG_INFINITY);
        let mut largest = lowest;
        for span in spans.clone() {
            let mut score = S::load(scores.add(span * KV_SPAN));
            if !is_whole(&visible, span) {
                let (from, to) = lanes(&visible, span);
                score = S::keep(from, to, score, lowest);
            }
            largest = S::max(score, largest);
        }
        let m = S::tree_max(largest);
        let zero = S::splat(0.0);
        let mut sum = zero;
        for span in spans {
            let at = scores.add(span * KV_SPAN);
            let mut p = math::exp::<S>(S::sub(S::load(at), S::splat(m)));
            if !is_whole(&visible, span) {
                let (from, to) = lanes(&visible, span);
                p = S::keep(from, to, p, zero);
            }
            S::store(at, p);
            sum = S::add(sum, p);
            ahead.passed(SOFTMAX_CYCLES);
        }
        record[M] = m;
        record[L] = S::tree_sum(sum);
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
        let mut weights = [0.0; LANES];
        (weights[0], weights[1]) = (total[M] - m, tile[M] - m);
        // SAFETY: the processor's instruction set is the caller's promise; the array has 16 lanes.
        let weights = unsafe { S::to_array(math::exp::<S>(S::load(weights.as_ptr()))) };
        let (old, new) = (weights[0], weights[1]);
        total[L] = tile[L].mul_add(new, total[L] * old);
        total[M] = m;
        for (total, tile) in total[HEADER..].iter_mut().zip(&tile[HEADER..]) {
            *total = tile.mul_add(new, *total * old);
        }
    }
}
