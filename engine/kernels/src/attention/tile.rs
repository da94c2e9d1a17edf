//! The arithmetic of attention within one tile of positions, and the merging of tiles.
//!
//! ```text
//! scores[q][j] = soft_cap(scale * fma over d of q[d] * k[j][d])    lane = position; d upwards
//! m = max over visible j                                          exact, so any order
//! p[q][j] = exp(scores - m), 0 where not visible
//! l = sum of p                                                    16 lanes (position mod 16) in order, one tree
//! acc[q][d] = fma over visible j of p[j] * v[j][d]                lane = dimension; j upwards
//! ```
//!
//! Positions a row does not see never enter its arithmetic, whatever is stored there: their scores are replaced, and
//! the last line walks each row's own positions only. Rows of a block differ in their first and last few positions;
//! those are walked row by row, the common ones together.

use std::marker::PhantomData;
use std::ops::Range;

use super::{AttentionParams, AttentionRow, KV_TILE};
use crate::kv::{KV_SPAN, KvView};
use crate::math::{self, LANES, tree_max, tree_sum};
use crate::simd::{Element, Kernel, Simd};

/// A record is the state of one query: maximum and sum in the header (filled up to a cache line), then the accumulator.
pub(super) const HEADER: usize = 16;
pub(super) const M: usize = 0;
pub(super) const L: usize = 1;

/// One tile for all queries of an item.
pub(super) struct Tile<'a, E> {
    pub kv: &'a KvView,
    pub layer: usize,
    pub kv_head: usize,
    pub rows: &'a [AttentionRow<'a>],
    /// Heads per row; query = row * heads + head.
    pub heads: usize,
    pub params: &'a AttentionParams,
    pub tile: usize,
    /// `[head_dim][queries]`
    pub q: &'a [f32],
    /// `[queries][KV_TILE]`
    pub scores: &'a mut [f32],
    /// One per query; left alone where a row sees nothing of the tile.
    pub records: &'a mut [f32],
    pub element: PhantomData<E>,
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

impl<E: Element> Kernel for Tile<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(mut self) {
        let queries = self.rows.len() * self.heads;
        let dim = self.params.head_dim;
        assert!(self.q.len() >= dim * queries && self.scores.len() >= queries * KV_TILE);
        assert!(self.records.len() >= queries * (HEADER + dim));
        // SAFETY: the processor's instruction set is the caller's promise; the buffers were just checked.
        unsafe {
            self.scores::<S>(queries);
            for row in 0..self.rows.len() {
                let visible = self.visible(row);
                if visible.is_empty() {
                    continue;
                }
                for query in row * self.heads..(row + 1) * self.heads {
                    self.softmax::<S>(query, visible.clone());
                }
            }
            self.values::<S>();
        }
    }
}

impl<E: Element> Tile<'_, E> {
    /// Positions of the tile a row sees, counted from the tile's start.
    #[inline(always)]
    fn visible(&self, row: usize) -> Range<usize> {
        let start = self.tile * KV_TILE;
        let visible = self.rows[row].visible(self.params.window);
        visible.start.clamp(start, start + KV_TILE) - start
            ..visible.end.clamp(start, start + KV_TILE) - start
    }

    /// Positions any row sees. Rows ascend, so the first row starts first and the last ends last.
    #[inline(always)]
    fn seen_by_any(&self) -> Range<usize> {
        self.visible(0).start..self.visible(self.rows.len() - 1).end
    }

    /// The block of a position of the tile, and the slot in it.
    #[inline(always)]
    fn place(&self, position: usize) -> (u32, usize) {
        let position = self.tile * KV_TILE + position;
        let size = self.kv.shape().block_size as usize;
        (self.rows[0].table[position / size], position % size)
    }

    /// K of the span that starts at a position.
    #[inline(always)]
    fn span(&self, position: usize) -> *const u8 {
        let (block, slot) = self.place(position);
        let offset = slot * self.params.head_dim * E::BYTES;
        // SAFETY: `slot` is inside the block, so this is inside K of the head.
        unsafe { self.kv.k(block, self.layer, self.kv_head).add(offset) }
    }

    /// # Safety
    /// The processor has `S`'s instruction set, and `run` has checked the buffers.
    #[inline(always)]
    unsafe fn scores<S: Simd>(&mut self, queries: usize) {
        let seen = self.seen_by_any();
        let spans = seen.start / KV_SPAN..seen.end.div_ceil(KV_SPAN);
        let mut span = spans.start;
        let (q, scores) = (self.q.as_ptr(), self.scores.as_mut_ptr());
        let params = *self.params;
        // SAFETY: every span holds a visible position, so its block is readable in full, and scores of 16 positions
        // per span fit the tile's `KV_TILE` scores per query.
        unsafe {
            // Few queries alone cannot hide the latency of their sums, so they take several spans at once.
            while const { S::QUERIES >= 8 } && span + 4 <= spans.end && queries <= 3 {
                let k: [*const u8; 4] = std::array::from_fn(|i| self.span((span + i) * KV_SPAN));
                let to = scores.add(span * KV_SPAN);
                over_queries!(queries, [3 2 1], at => score_spans::<S, E, 4>(
                    k, q.add(at), queries, &params, to.add(at * KV_TILE)));
                span += 4;
            }
            while const { S::QUERIES >= 3 } && span + 2 <= spans.end && queries <= 6 {
                let k: [*const u8; 2] = std::array::from_fn(|i| self.span((span + i) * KV_SPAN));
                let to = scores.add(span * KV_SPAN);
                over_queries!(queries, [6 4 3 2 1], at => score_spans::<S, E, 2>(
                    k, q.add(at), queries, &params, to.add(at * KV_TILE)));
                span += 2;
            }
            while span < spans.end {
                let k = [self.span(span * KV_SPAN)];
                let to = scores.add(span * KV_SPAN);
                over_queries!(queries, [8 4 2 1], at => score_spans::<S, E, 1>(
                    k, q.add(at), queries, &params, to.add(at * KV_TILE)));
                span += 1;
            }
        }
    }

    /// Turns a query's scores into weights, and writes maximum and sum.
    ///
    /// # Safety
    /// As [`scores`](Self::scores).
    #[inline(always)]
    unsafe fn softmax<S: Simd>(&mut self, query: usize, visible: Range<usize>) {
        let scores = self.scores[query * KV_TILE..][..KV_TILE].as_mut_ptr();
        let spans = visible.start / KV_SPAN..visible.end.div_ceil(KV_SPAN);
        let lanes = |span: usize| {
            let first = (span * KV_SPAN) as i32;
            (visible.start as i32 - first, visible.end as i32 - first)
        };
        // SAFETY: spans lie within the query's `KV_TILE` scores.
        unsafe {
            let lowest = S::splat(f32::NEG_INFINITY);
            let mut largest = lowest;
            for span in spans.clone() {
                let (from, to) = lanes(span);
                let score = S::keep(from, to, S::load(scores.add(span * KV_SPAN)), lowest);
                largest = S::max(score, largest);
            }
            let m = tree_max(&S::to_array(largest));
            let zero = S::splat(0.0);
            let mut sum = zero;
            for span in spans {
                let (from, to) = lanes(span);
                let at = scores.add(span * KV_SPAN);
                let p = S::keep(
                    from,
                    to,
                    math::exp::<S>(S::sub(S::load(at), S::splat(m))),
                    zero,
                );
                S::store(at, p);
                sum = S::add(sum, p);
            }
            let record = query * (HEADER + self.params.head_dim);
            self.records[record + M] = m;
            self.records[record + L] = tree_sum(&S::to_array(sum));
        }
    }

    /// Sums V by the weights into the accumulators.
    ///
    /// # Safety
    /// As [`scores`](Self::scores), and `softmax` has run.
    #[inline(always)]
    unsafe fn values<S: Simd>(&mut self) {
        let record = HEADER + self.params.head_dim;
        let count = self.rows.len();
        for query in 0..count * self.heads {
            self.records[query * record + HEADER..(query + 1) * record].fill(0.0);
        }
        // Rows ascend, so what all see lies between the last row's start and the first row's end.
        let common = self.visible(count - 1).start..self.visible(0).end;
        // Per row: what it sees before, all together: what all see, per row: what it sees behind.
        for piece in 0..=2 * count {
            let (positions, rows) = match piece {
                _ if piece == count && !common.is_empty() => (common.clone(), 0..count),
                _ if piece == count => continue,
                _ => {
                    let row = piece % (count + 1);
                    let visible = self.visible(row);
                    let positions = match (common.is_empty(), piece < count) {
                        (true, true) => visible,
                        (true, false) => continue,
                        (false, true) => visible.start..common.start,
                        (false, false) => common.end..visible.end,
                    };
                    (positions, row..row + 1)
                }
            };
            // SAFETY: passed on; the positions are visible to the rows.
            unsafe { self.accumulate::<S>(positions, rows) };
        }
    }

    /// Adds positions to the accumulators of some rows.
    ///
    /// # Safety
    /// As [`values`](Self::values); all `positions` are visible to all `rows`.
    #[inline(always)]
    unsafe fn accumulate<S: Simd>(&mut self, positions: Range<usize>, rows: Range<usize>) {
        let dim = self.params.head_dim;
        let record = HEADER + dim;
        let block_size = self.kv.shape().block_size as usize;
        let queries = rows.len() * self.heads;
        let first_query = rows.start * self.heads;
        let mut position = positions.start;
        while position < positions.end {
            let (block, slot) = self.place(position);
            let run = (block_size - slot).min(positions.end - position);
            // SAFETY: the run's rows of V are inside the block, which is readable; weights and accumulators are inside
            // their buffers, as `run` checked.
            unsafe {
                let v = self
                    .kv
                    .v(block, self.layer, self.kv_head)
                    .add(slot * dim * E::BYTES)
                    .cast_const();
                let p = self.scores.as_ptr().add(first_query * KV_TILE + position);
                let acc = self.records.as_mut_ptr().add(first_query * record + HEADER);
                let mut d = 0;
                while d < dim {
                    let (v, acc) = (v.add(d * E::BYTES), acc.add(d));
                    // Eight queries by four vectors would be all 32 registers.
                    if const { S::QUERIES >= 8 } && queries < 8 && dim - d >= 4 * LANES {
                        over_queries!(queries, [6 4 3 2 1], at => add_values::<S, E, 4>(
                            v, dim, run, p.add(at * KV_TILE), acc.add(at * record), record));
                        d += 4 * LANES;
                    } else if const { S::QUERIES >= 3 } && dim - d >= 2 * LANES {
                        over_queries!(queries, [8 3 2 1], at => add_values::<S, E, 2>(
                            v, dim, run, p.add(at * KV_TILE), acc.add(at * record), record));
                        d += 2 * LANES;
                    } else {
                        over_queries!(queries, [4 1], at => add_values::<S, E, 1>(
                            v, dim, run, p.add(at * KV_TILE), acc.add(at * record), record));
                        d += LANES;
                    }
                }
            }
            position += run;
        }
    }
}

/// Scores of `Q` queries with `N` spans of 16 positions, consecutive in the tile.
///
/// # Safety
/// The processor has `S`'s instruction set; each span holds `[head_dim][16]` elements; `q` holds `[head_dim][stride]`
/// from the first of the `Q` on; `to` has room for `Q` rows of `N` spans, `KV_TILE` apart.
#[inline(always)]
unsafe fn score_spans<S: Simd, E: Element, const Q: usize, const N: usize>(
    k: [*const u8; N],
    q: *const f32,
    stride: usize,
    params: &AttentionParams,
    to: *mut f32,
) {
    // SAFETY: the caller's promise, in all of it.
    unsafe {
        let mut acc = [[S::splat(0.0); Q]; N];
        for d in 0..params.head_dim {
            let mut lanes = [S::splat(0.0); N];
            for n in 0..N {
                lanes[n] = E::load::<S>(k[n].add(d * KV_SPAN * E::BYTES));
            }
            let q = q.add(d * stride);
            for (acc, lanes) in acc.iter_mut().zip(lanes) {
                for (i, acc) in acc.iter_mut().enumerate() {
                    *acc = S::fma(S::splat(*q.add(i)), lanes, *acc);
                }
            }
        }
        for (n, acc) in acc.into_iter().enumerate() {
            for (i, acc) in acc.into_iter().enumerate() {
                let mut score = S::mul(acc, S::splat(params.scale));
                if let Some(cap) = params.soft_cap {
                    score = math::soft_cap::<S>(score, S::splat(cap));
                }
                S::store(to.add(i * KV_TILE + n * KV_SPAN), score);
            }
        }
    }
}

/// Adds `run` positions of `N` vectors of V to `Q` accumulators.
///
/// # Safety
/// The processor has `S`'s instruction set; `v` holds `run` rows `dim` elements apart; `p` holds `run` weights per
/// query, `KV_TILE` apart; `acc` holds `16 * N` values per query, `record` apart.
#[inline(always)]
unsafe fn add_values<S: Simd, E: Element, const Q: usize, const N: usize>(
    v: *const u8,
    dim: usize,
    run: usize,
    p: *const f32,
    acc: *mut f32,
    record: usize,
) {
    // SAFETY: the caller's promise, in all of it.
    unsafe {
        let mut sums = [[S::splat(0.0); N]; Q];
        for (i, sums) in sums.iter_mut().enumerate() {
            for (n, sum) in sums.iter_mut().enumerate() {
                *sum = S::load(acc.add(i * record + n * LANES));
            }
        }
        for j in 0..run {
            let mut lanes = [S::splat(0.0); N];
            for (n, lanes) in lanes.iter_mut().enumerate() {
                *lanes = E::load::<S>(v.add((j * dim + n * LANES) * E::BYTES));
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                let p = S::splat(*p.add(i * KV_TILE + j));
                for (sum, lanes) in sums.iter_mut().zip(lanes) {
                    *sum = S::fma(p, lanes, *sum);
                }
            }
        }
        for (i, sums) in sums.into_iter().enumerate() {
            for (n, sum) in sums.into_iter().enumerate() {
                S::store(acc.add(i * record + n * LANES), sum);
            }
        }
    }
}

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
