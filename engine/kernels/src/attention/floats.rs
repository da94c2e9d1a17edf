//! Attention within one tile over K and V stored as floats.
//!
//! ```text
//! scores[q][j] = soft_cap(scale * fma over d of q[d] * k[j][d])    lane = position; d upwards; times log2 e
//! acc[q][d] = fma over visible j of p[j] * v[j][d]                lane = dimension; j upwards
//! ```
//!
//! K lies transposed within spans of 16 positions, so that a vector is one dimension of 16 keys and a score needs no sum
//! across lanes; V lies by position, so that a vector is 16 dimensions of one position. Each vector is widened to f32
//! once for all queries in registers.
//!
//! The last line walks each row's own positions only. Rows of a block differ in their first and last few positions;
//! those are walked row by row, the common ones together.

use std::marker::PhantomData;
use std::ops::Range;

use super::tile::{
    self, Ahead, BLOCK, HEADER, L, M, Place, SOFTMAX_CYCLES, Spans, TakeWeights, over_queries,
};
use super::{AttentionParams, KV_TILE};
use crate::kv::KV_SPAN;
use crate::math::LANES;
use crate::simd::{Element, Kernel, Simd};

/// One tile for all queries of an item.
pub(super) struct FloatTile<'a, E> {
    pub place: Place<'a>,
    /// `[head_dim][queries]`
    pub q: &'a [f32],
    /// `[queries][KV_TILE]`
    pub scores: &'a mut [f32],
    /// One per query; left alone where a row sees nothing of the tile.
    pub records: &'a mut [f32],
    /// The tile to ask memory for, if this is worth it.
    pub ahead: Option<Place<'a>>,
    pub element: PhantomData<E>,
}

impl<E: Element> Kernel for FloatTile<'_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(mut self) {
        let queries = self.place.queries();
        let dim = self.place.params.head_dim;
        assert!(self.q.len() >= dim * queries && self.scores.len() >= queries * KV_TILE);
        assert!(self.records.len() >= queries * self.place.record());
        // SAFETY: the processor's instruction set is the caller's promise; the buffers were just checked.
        unsafe {
            let spans = self.place.spans();
            let cycles = queries * spans.count * (2 * dim + SOFTMAX_CYCLES);
            let ahead = &mut Ahead::new(self.ahead, cycles);
            self.scores::<S>(queries, &spans, ahead);
            self.softmax::<S>(ahead);
            self.values::<S>(ahead);
        }
    }
}

impl<E: Element> FloatTile<'_, E> {
    /// # Safety
    /// The processor has `S`'s instruction set, and `run` has checked the buffers.
    #[inline(always)]
    unsafe fn scores<S: Simd>(&mut self, queries: usize, spans: &Spans, ahead: &mut Ahead) {
        let k = &spans.k[..spans.count];
        let mut span = 0;
        let (q, scores) = (self.q.as_ptr(), self.scores.as_mut_ptr());
        // SAFETY: a tile has as many scores per query as positions.
        let scores = unsafe { scores.add(spans.first * KV_SPAN) };
        let params = *self.place.params;
        // SAFETY: every span holds a visible position, so its block is readable in full, and scores of 16 positions
        // per span fit the tile's `KV_TILE` scores per query.
        unsafe {
            // Few queries alone cannot hide the latency of their sums, so they take several spans at once.
            while const { S::QUERIES >= 8 } && span + 4 <= k.len() && queries <= 3 {
                let k: [*const u8; 4] = std::array::from_fn(|i| k[span + i]);
                let to = scores.add(span * KV_SPAN);
                over_queries!(queries, [3 2 1], at => score_spans::<S, E, 4>(
                    k, ahead, q.add(at), queries, &params, to.add(at * KV_TILE)));
                span += 4;
            }
            while const { S::QUERIES >= 3 } && span + 2 <= k.len() {
                let k: [*const u8; 2] = std::array::from_fn(|i| k[span + i]);
                let to = scores.add(span * KV_SPAN);
                over_queries!(queries, [12 6 4 3 2 1], at => score_spans::<S, E, 2>(
                    k, ahead, q.add(at), queries, &params, to.add(at * KV_TILE)));
                span += 2;
            }
            while span < k.len() {
                let k = [k[span]];
                let to = scores.add(span * KV_SPAN);
                over_queries!(queries, [8 4 2 1], at => score_spans::<S, E, 1>(
                    k, ahead, q.add(at), queries, &params, to.add(at * KV_TILE)));
                span += 1;
            }
        }
    }

    /// Turns the scores of every query that sees anything into weights, and writes maximum and sum.
    ///
    /// # Safety
    /// As [`scores`](Self::scores), which has run.
    #[inline(always)]
    unsafe fn softmax<S: Simd>(&mut self, ahead: &mut Ahead) {
        let record = self.place.record();
        let heads = self.place.heads;
        let scores = self.scores.as_mut_ptr();
        for query in 0..self.place.queries() {
            let visible = self.place.visible(query / heads);
            if visible.is_empty() {
                continue;
            }
            // SAFETY: the query's scores, `KV_TILE` of them; the rest is passed on.
            unsafe {
                let scores = scores.add(query * KV_TILE);
                let m = tile::largest::<S>(scores, &visible);
                let taker = &mut Store(scores);
                let sum = tile::softmax::<S>(scores, &visible, &visible, m, taker, ahead);
                let record = &mut self.records[query * record..];
                (record[M], record[L]) = (m, sum);
            }
        }
    }

    /// Sums V by the weights into the accumulators.
    ///
    /// # Safety
    /// As [`scores`](Self::scores), and `softmax` has run.
    #[inline(always)]
    unsafe fn values<S: Simd>(&mut self, ahead: &mut Ahead) {
        let record = self.place.record();
        let count = self.place.rows.len();
        for query in 0..count * self.place.heads {
            self.records[query * record + HEADER..(query + 1) * record].fill(0.0);
        }
        // Rows ascend, so what all see lies between the last row's start and the first row's end.
        let common = self.place.visible(count - 1).start..self.place.visible(0).end;
        // Per row: what it sees before, all together: what all see, per row: what it sees behind.
        for piece in 0..=2 * count {
            let (positions, rows) = match piece {
                _ if piece == count && !common.is_empty() => (common.clone(), 0..count),
                _ if piece == count => continue,
                _ => {
                    let row = piece % (count + 1);
                    let visible = self.place.visible(row);
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
            unsafe { self.accumulate::<S>(positions, rows, ahead) };
        }
    }

    /// Adds positions to the accumulators of some rows.
    ///
    /// # Safety
    /// As [`values`](Self::values); all `positions` are visible to all `rows`.
    #[inline(always)]
    unsafe fn accumulate<S: Simd>(
        &mut self,
        positions: Range<usize>,
        rows: Range<usize>,
        ahead: &mut Ahead,
    ) {
        let dim = self.place.params.head_dim;
        let record = self.place.record();
        let block_size = self.place.kv.shape().block_size as usize;
        let queries = rows.len() * self.place.heads;
        let first_query = rows.start * self.place.heads;
        let mut position = positions.start;
        while position < positions.end {
            let (block, slot) = self.place.block(position);
            let run = (block_size - slot).min(positions.end - position);
            // SAFETY: the run's rows of V are inside the block, which is readable; weights and accumulators are inside
            // their buffers, as `run` checked.
            unsafe {
                let v = self
                    .place
                    .kv
                    .v(block, self.place.layer, self.place.kv_head)
                    .add(slot * dim * E::BYTES)
                    .cast_const();
                let p = self.scores.as_ptr().add(first_query * KV_TILE + position);
                let acc = self.records.as_mut_ptr().add(first_query * record + HEADER);
                let mut d = 0;
                while d < dim {
                    let (v, acc) = (v.add(d * E::BYTES), acc.add(d));
                    if const { S::QUERIES >= 12 } && queries < 12 && dim - d >= 4 * LANES {
                        over_queries!(queries, [6 4 3 2 1], at => add_values::<S, E, 4>(
                            v, dim, run, ahead, p.add(at * KV_TILE), acc.add(at * record), record));
                        d += 4 * LANES;
                    } else if const { S::QUERIES >= 3 } && dim - d >= 2 * LANES {
                        over_queries!(queries, [12 8 3 2 1], at => add_values::<S, E, 2>(
                            v, dim, run, ahead, p.add(at * KV_TILE), acc.add(at * record), record));
                        d += 2 * LANES;
                    } else {
                        over_queries!(queries, [4 1], at => add_values::<S, E, 1>(
                            v, dim, run, ahead, p.add(at * KV_TILE), acc.add(at * record), record));
                        d += LANES;
                    }
                }
            }
            position += run;
        }
    }
}

/// Writes a query's weights where its scores were.
struct Store(*mut f32);

impl<S: Simd> TakeWeights<S> for Store {
    #[inline(always)]
    unsafe fn take(&mut self, span: usize, weights: [S::F; BLOCK]) {
        for (i, weight) in weights.into_iter().enumerate() {
            // SAFETY: the block lies within the query's `KV_TILE` scores.
            unsafe { S::store(self.0.add((span + i) * KV_SPAN), weight) };
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
    ahead: &mut Ahead,
    q: *const f32,
    stride: usize,
    params: &AttentionParams,
    to: *mut f32,
) {
    // SAFETY: the caller's promise, in all of it.
    unsafe {
        let mut acc = [[S::splat(0.0); N]; Q];
        for dims in (0..params.head_dim).step_by(LANES) {
            ahead.passed(N * Q * LANES);
            for d in dims..dims + LANES {
                let mut lanes = [S::splat(0.0); N];
                for n in 0..N {
                    lanes[n] = E::load::<S>(k[n].add(d * KV_SPAN * E::BYTES));
                }
                let q = q.add(d * stride);
                for (i, acc) in acc.iter_mut().enumerate() {
                    let q = S::splat(*q.add(i));
                    for (acc, lanes) in acc.iter_mut().zip(lanes) {
                        *acc = S::fma(q, lanes, *acc);
                    }
                }
            }
        }
        for (i, acc) in acc.into_iter().enumerate() {
            for (n, acc) in acc.into_iter().enumerate() {
                let score = S::mul(acc, S::splat(params.score_scale()));
                let score = tile::capped::<S>(score, params.soft_cap);
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
    ahead: &mut Ahead,
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
        for first in (0..run).step_by(LANES) {
            let end = run.min(first + LANES);
            ahead.passed(N * Q * (end - first));
            for j in first..end {
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
        }
        for (i, sums) in sums.into_iter().enumerate() {
            for (n, sum) in sums.into_iter().enumerate() {
                S::store(acc.add(i * record + n * LANES), sum);
            }
        }
    }
}
