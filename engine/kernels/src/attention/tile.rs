//! What all kinds of attention tiles share: which positions are seen and where they lie, the softmax within a tile, and
//! the merging of tiles.
//!
//! ```text
//! scores[q][j], in units of ln 2                                  `floats` or `codes`
//! m = max over visible j                                          exact, so any order
//! p[q][j] = 2^(scores - m), 0 where not visible
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
pub(super) const SOFTMAX_CYCLES: usize = 18;

/// Spans whose weights are made together. A tile is whole blocks of them.
pub(super) const BLOCK: usize = 4;

/// The blocks of a range of positions of a tile, each by its first span.
#[inline(always)]
fn blocks(positions: &Range<usize>) -> impl Iterator<Item = usize> {
    let width = BLOCK * KV_SPAN;
    (positions.start / width * BLOCK..positions.end.div_ceil(width) * BLOCK).step_by(BLOCK)
}

/// Whether all lanes of some spans lie in a range of positions.
#[inline(always)]
pub(super) fn is_whole(positions: &Range<usize>, spans: Range<usize>) -> bool {
    positions.start <= spans.start * KV_SPAN && spans.end * KV_SPAN <= positions.end
}

/// The lanes of a span that lie in a range of positions.
#[inline(always)]
pub(super) fn lanes(positions: &Range<usize>, span: usize) -> (i32, i32) {
    let first = (span * KV_SPAN) as i32;
    (positions.start as i32 - first, positions.end as i32 - first)
}

/// A score under the soft cap, in units of ln 2; without a cap [`AttentionParams::score_scale`] has seen to these.
///
/// # Safety
/// The processor has `S`'s instruction set.
#[inline(always)]
pub(super) unsafe fn capped<S: Simd>(score: S::F, cap: Option<f32>) -> S::F {
    match cap {
        // SAFETY: the caller's promise.
        Some(cap) => unsafe {
            S::mul(
                math::soft_cap::<S>(score, S::splat(cap)),
                S::splat(math::LOG2_E),
            )
        },
        None => score,
    }
}

/// What becomes of the weights of one query.
pub(super) trait TakeWeights<S: Simd> {
    /// Takes those of the block that starts at `span`.
    ///
    /// # Safety
    /// The processor has `S`'s instruction set.
    unsafe fn take(&mut self, span: usize, weights: [S::F; BLOCK]);
}

/// The largest of one query's visible scores.
///
/// # Safety
/// The processor has `S`'s instruction set, and `scores` has `KV_TILE` elements.
#[inline(always)]
pub(super) unsafe fn largest<S: Simd>(scores: *const f32, visible: &Range<usize>) -> f32 {
    // SAFETY: the caller's promise; blocks lie within the tile.
    unsafe {
        let lowest = S::splat(f32::NEG_INFINITY);
        // One per span of a block, as each waits for the one before.
        let mut largest = [lowest; BLOCK];
        for first in blocks(visible) {
            let whole = is_whole(visible, first..first + BLOCK);
            for (i, largest) in largest.iter_mut().enumerate() {
                let mut score = S::load(scores.add((first + i) * KV_SPAN));
                if !whole {
                    let (from, to) = lanes(visible, first + i);
                    score = S::keep(from, to, score, lowest);
                }
                *largest = S::max(score, *largest);
            }
        }
        let [a, b, c, d] = largest;
        S::tree_max(S::max(S::max(a, b), S::max(c, d)))
    }
}

/// Turns one query's scores into weights and returns their sum: of all blocks that hold a position of `within`, with 0
/// for those that are not visible.
///
/// # Safety
/// The processor has `S`'s instruction set, `scores` has `KV_TILE` elements, and `within` lies in the tile.
#[inline(always)]
pub(super) unsafe fn softmax<S: Simd>(
    scores: *const f32,
    visible: &Range<usize>,
    within: &Range<usize>,
    largest: f32,
    taker: &mut impl TakeWeights<S>,
    ahead: &mut Ahead,
) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let zero = S::splat(0.0);
        let largest = S::splat(largest);
        let mut sum = zero;
        for first in blocks(within) {
            let mut weights = [zero; BLOCK];
            for (i, weight) in weights.iter_mut().enumerate() {
                let score = S::load(scores.add((first + i) * KV_SPAN));
                *weight = math::exp2::<S>(S::sub(score, largest));
            }
            if !is_whole(visible, first..first + BLOCK) {
                for (i, weight) in weights.iter_mut().enumerate() {
                    let (from, to) = lanes(visible, first + i);
                    *weight = S::keep(from, to, *weight, zero);
                }
            }
            for weight in weights {
                sum = S::add(sum, weight);
            }
            taker.take(first, weights);
            ahead.passed(BLOCK * SOFTMAX_CYCLES);
        }
        S::tree_sum(sum)
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

/// Merges the next tile of some queries into the total of those before.
pub(super) struct Merge<'a> {
    /// Records, as many in both.
    pub tile: &'a [f32],
    pub total: &'a mut [f32],
    /// f32 of a record.
    pub record: usize,
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        assert!(self.tile.len() == self.total.len() && self.record >= HEADER);
        let batch = LANES * self.record;
        for (tile, total) in self.tile.chunks(batch).zip(self.total.chunks_mut(batch)) {
            let records = tile
                .chunks_exact(self.record)
                .zip(total.chunks_exact_mut(self.record));
            // What the maximum of both is above each, in a lane per query.
            let (mut old, mut new) = ([0.0; LANES], [0.0; LANES]);
            for (i, (tile, total)) in records.enumerate() {
                let m = if total[M] > tile[M] {
                    total[M]
                } else {
                    tile[M]
                };
                (old[i], new[i]) = (total[M] - m, tile[M] - m);
                total[M] = m;
            }
            // SAFETY: the processor's instruction set is the caller's promise; the arrays have 16 lanes, and
            // accumulators are whole vectors.
            unsafe {
                let old = S::to_array(math::exp2::<S>(S::load(old.as_ptr())));
                let new = S::to_array(math::exp2::<S>(S::load(new.as_ptr())));
                let records = tile
                    .chunks_exact(self.record)
                    .zip(total.chunks_exact_mut(self.record));
                for ((tile, total), (old, new)) in records.zip(old.into_iter().zip(new)) {
                    total[L] = tile[L].mul_add(new, total[L] * old);
                    let tile = tile[HEADER..].as_chunks::<LANES>().0;
                    let total = total[HEADER..].as_chunks_mut::<LANES>().0;
                    for (tile, total) in tile.iter().zip(total) {
                        let before = S::mul(S::load(total.as_ptr()), S::splat(old));
                        let sum = S::fma(S::load(tile.as_ptr()), S::splat(new), before);
                        S::store(total.as_mut_ptr(), sum);
                    }
                }
            }
        }
    }
}

/// Writes `acc / l` of some queries.
pub(super) struct Finish<'a> {
    pub records: &'a [f32],
    /// f32 of a record.
    pub record: usize,
    /// `[queries][head_dim]`
    pub out: &'a mut [f32],
}

impl Kernel for Finish<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let rows = self.out.chunks_exact_mut(self.record - HEADER);
        for (out, record) in rows.zip(self.records.chunks_exact(self.record)) {
            let inverse = 1.0 / record[L];
            let acc = record[HEADER..].as_chunks::<LANES>().0;
            for (out, acc) in out.as_chunks_mut::<LANES>().0.iter_mut().zip(acc) {
                // SAFETY: the processor's instruction set is the caller's promise, and both have 16 values.
                unsafe {
                    let value = S::mul(S::load(acc.as_ptr()), S::splat(inverse));
                    S::store(out.as_mut_ptr(), value);
                }
            }
        }
    }
}
