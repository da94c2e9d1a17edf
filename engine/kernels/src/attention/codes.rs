//! Attention within one tile over K and V stored as int8 or int4 codes.
//!
//! A stored value is `minimum + scale * code`, scale and minimum being per position and group of up to 64 dimensions
//! (`kv` draws the layout). Codes are multiplied as integers, which is exact, so nothing here depends on an order except
//! the few float operations per span and group:
//!
//! ```text
//! per query and group, once:  amax = largest |q|,  qc = q * (1 / (amax / 127)) rounded
//!                             qs = amax / 127 * scale,  qsum = qs * (sum of qc)
//! scores[q][j] = soft_cap(s), from s = 0, for each group upwards:
//!                s = fma(ks[j] * qs, sum of qc * kc[j], s);  s = fma(kmin[j], qsum, s)        lane = position
//!
//! per row and group:          vsmax = largest visible vs[j],  ws = vsmax / 16383
//! per query and group:        wc[j] = p[j] * (vs[j] * (16383 / vsmax)) rounded
//!                             wmin = sum of p[j] * vmin[j]        16 lanes (position mod 16) in order, one tree
//! acc[q][d] = fma(ws, sum over the tile's visible j of wc[j] * vc[j][d], wmin)                lane = dimension
//! ```
//!
//! Scores are in units of ln 2, as `tile` asks for: log2 e is part of `scale`, or follows the soft cap.
//!
//! The queries' minimum part uses the sum of their codes, not of their values: the rounding of `q` is then weighted by
//! the values of `k`, which centre on zero, and not by its codes, which do not.
//!
//! Weights have 14 bits, because a tile may hold one weight that outshines the sum of all others a hundredfold (the
//! first position of a text often does), and 7 bits would round the others away. They are taken apart as
//! `wc = 128 * high + low`, both of 7 bits, and multiplied in two integer dots whose sums stay exact:
//! `255 * 127 * 256 < 2^24`. Hidden positions have the weight code 0, so what stands there does not matter, and rows of
//! a block need not be told apart.
//!
//! The largest `p` of a tile is 1, so `p * vs` is at most `vsmax`, which is known before any query is looked at. That is
//! why a weight becomes a code in the breath that makes it, and never lies in memory as a float.
//!
//! Why integers at all: a step at depth reads 68 (36) bytes per 64 values from memory, for which it has about 16 (8)
//! cycles on the machines this was built for. Three queries in f32 take 12 cycles of multiply-adds, after widening; in
//! integers 3 for a score and 6 for the sum.

use std::marker::PhantomData;
use std::ops::Range;

use super::tile::{self, Ahead, BLOCK, HEADER, L, M, Place, SOFTMAX_CYCLES, Spans, over_queries};
use super::weights::{CODE_CYCLES, Coder, WEIGHT_CODES, Weights, working_memory};
use super::{AttentionParams, KV_TILE, QUERIES};
use crate::kv::{GROUP_HEADER, KV_GROUP, KV_SPAN};
use crate::math::{LANES, ROUND_MAGIC};
use crate::simd::{Kernel, Simd};

/// What `high` counts.
const WEIGHT_HIGH: f32 = 128.0;
/// Largest code of a query.
pub(crate) const QUERY_MAX: f32 = 127.0;

/// Bytes of one line of codes, a step of 16 dot products (two steps with int4).
pub(super) const LINE: usize = 64;

/// How codes lie in a line.
pub(super) trait Codes {
    /// Two codes share a byte.
    const NIBBLES: bool;
}

pub(super) struct Int8;
pub(super) struct Int4;

impl Codes for Int8 {
    const NIBBLES: bool = false;
}

impl Codes for Int4 {
    const NIBBLES: bool = true;
}

/// Dimensions of each group of a head.
pub(crate) fn groups(head_dim: usize) -> impl Iterator<Item = Range<usize>> {
    (0..head_dim)
        .step_by(KV_GROUP)
        .map(move |first| first..(first + KV_GROUP).min(head_dim))
}

/// The queries of an item, quantised once per call.
///
/// ```text
/// codes [head_dim / 4][queries] of 4 codes | qs [group][queries] | qsum [group][queries]
/// ```
pub(super) struct Queries<'a> {
    pub memory: &'a [f32],
    pub queries: usize,
    pub head_dim: usize,
}

impl Queries<'_> {
    #[inline(always)]
    fn groups(&self) -> usize {
        self.head_dim.div_ceil(KV_GROUP)
    }

    /// Codes of dimensions `4 * quad..` of query `at`.
    #[inline(always)]
    fn codes(&self, quad: usize, at: usize) -> *const i8 {
        self.memory[quad * self.queries + at..].as_ptr().cast()
    }

    #[inline(always)]
    fn scale(&self, group: usize, at: usize) -> *const f32 {
        let scales = self.head_dim / 4 * self.queries;
        self.memory[scales + group * self.queries + at..].as_ptr()
    }

    #[inline(always)]
    fn sum(&self, group: usize, at: usize) -> *const f32 {
        self.scale(group + self.groups(), at)
    }
}

/// Quantises one query and stores it as number `query` of `queries`, as [`Queries`] has it.
pub(super) struct PackQuery<'a> {
    pub memory: &'a mut [f32],
    pub queries: usize,
    pub query: usize,
    pub q: &'a [f32],
    pub score_scale: f32,
}

impl Kernel for PackQuery<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let dim = self.q.len();
        let (codes, scales) = self.memory.split_at_mut(dim / 4 * self.queries);
        let codes: &mut [[i8; 4]] = bytemuck::cast_slice_mut(codes);
        let (scales, sums) = scales.split_at_mut(dim.div_ceil(KV_GROUP) * self.queries);
        for (g, dims) in groups(dim).enumerate() {
            // Filled up with zeros, which change neither maximum nor sum.
            let mut group = [0i8; KV_GROUP];
            let vectors = self.q[dims.clone()].as_chunks::<LANES>().0;
            // SAFETY: the processor's instruction set is the caller's promise, and every vector has 16 values.
            let (scale, sum) = unsafe {
                let largest = vectors.iter().fold(0.0f32, |largest, q| {
                    let q = S::load(q.as_ptr());
                    // On the bits, so that a NaN is the largest and makes the scale NaN.
                    f32::from_bits(largest.to_bits().max(S::max_abs(q, q).to_bits()))
                });
                let scale = largest / QUERY_MAX;
                let inverse = 1.0 / scale;
                // Zero, or so small that its inverse is not a number to multiply by: the group counts as zero.
                if inverse == f32::INFINITY {
                    (0.0, 0.0)
                } else {
                    for (codes, q) in group.as_chunks_mut::<LANES>().0.iter_mut().zip(vectors) {
                        let q = S::mul(S::load(q.as_ptr()), S::splat(inverse));
                        // Rounds to nearest, ties to even; the integer stands in the low bits.
                        *codes = S::low_bytes(S::bits(S::add(q, S::splat(ROUND_MAGIC))));
                    }
                    let scale = scale * self.score_scale;
                    let sum: i32 = S::quarter_sums(group.as_ptr()).iter().sum();
                    (scale, scale * sum as f32)
                }
            };
            scales[g * self.queries + self.query] = scale;
            sums[g * self.queries + self.query] = sum;
            let first = dims.start / 4 * self.queries + self.query;
            let to = codes[first..].iter_mut().step_by(self.queries);
            for (to, quad) in to.zip(group[..dims.len()].as_chunks::<4>().0) {
                *to = *quad;
            }
        }
    }
}

/// One tile for all queries of an item.
pub(super) struct CodeTile<'a, C> {
    pub place: Place<'a>,
    pub q: Queries<'a>,
    /// `[queries][KV_TILE]`
    pub scores: &'a mut [f32],
    /// [`working_memory`].
    pub weights: &'a mut [f32],
    /// One per query; of no meaning where a row sees nothing of the tile.
    pub records: &'a mut [f32],
    /// The tile to ask memory for, if this is worth it.
    pub ahead: Option<Place<'a>>,
    pub codes: PhantomData<C>,
}

impl<C: Codes> Kernel for CodeTile<'_, C> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(mut self) {
        let queries = self.place.queries();
        assert!(queries <= QUERIES && self.scores.len() >= queries * KV_TILE);
        assert!(self.weights.len() >= working_memory(self.place.params.head_dim));
        assert!(self.records.len() >= queries * self.place.record());
        // SAFETY: the processor's instruction set is the caller's promise; the buffers were just checked.
        unsafe {
            let spans = self.place.spans();
            let dim = self.place.params.head_dim;
            let coding = dim.div_ceil(KV_GROUP) * CODE_CYCLES;
            let cycles = queries * spans.count * (dim / 4 + SOFTMAX_CYCLES + coding + dim / 2);
            let ahead = &mut Ahead::new(self.ahead, cycles);
            self.scores::<S>(queries, &spans, ahead);
            self.softmax::<S>(queries, &spans, ahead);
            self.values::<S>(queries, &spans, ahead);
        }
    }
}

impl<C: Codes> CodeTile<'_, C> {
    /// # Safety
    /// The processor has `S`'s instruction set, and `run` has checked the buffers.
    #[inline(always)]
    unsafe fn scores<S: Simd>(&mut self, queries: usize, spans: &Spans, ahead: &mut Ahead) {
        let k = &spans.k[..spans.count];
        let mut span = 0;
        let scores = self.scores[spans.first * KV_SPAN..].as_mut_ptr();
        let (q, params) = (&self.q, *self.place.params);
        // SAFETY: every span holds a visible position, so its block is readable in full, and scores of 16 positions
        // per span fit the tile's `KV_TILE` scores per query.
        unsafe {
            // Several spans at once hide the latency of the dots and share the broadcast of the query's codes.
            while const { S::QUERIES >= 8 } && span + 4 <= k.len() {
                let k: [*const u8; 4] = std::array::from_fn(|i| k[span + i]);
                let to = scores.add(span * KV_SPAN);
                over_queries!(queries, [6 3 2 1], at => score_spans::<S, C, 4>(
                    k, ahead, q, at, &params, to.add(at * KV_TILE)));
                span += 4;
            }
            while span < k.len() {
                let k = [k[span]];
                let to = scores.add(span * KV_SPAN);
                over_queries!(queries, [8 4 2 1], at => score_spans::<S, C, 1>(
                    k, ahead, q, at, &params, to.add(at * KV_TILE)));
                span += 1;
            }
        }
    }

    /// Turns scores into weight codes, and writes maximum and sum of every query.
    ///
    /// # Safety
    /// As [`scores`](Self::scores), which has run.
    #[inline(always)]
    unsafe fn softmax<S: Simd>(&mut self, queries: usize, spans: &Spans, ahead: &mut Ahead) {
        let weights = Weights::new(self.weights);
        let record = self.place.record();
        let groups = self.q.groups();
        let (scores, records) = (self.scores.as_ptr(), &mut self.records);
        // SAFETY: each query has `KV_TILE` scores; blocks lie within the tile; the rest is passed on.
        unsafe {
            for query in 0..queries {
                let visible = self.place.visible(query / self.place.heads);
                let scores = scores.add(query * KV_TILE);
                records[query * record + M] = tile::largest::<S>(scores, &visible);
            }
            let all = spans.first * KV_SPAN..(spans.first + spans.count) * KV_SPAN;
            let mut prepared = None;
            for query in 0..queries {
                let visible = self.place.visible(query / self.place.heads);
                if prepared.as_ref() != Some(&visible) {
                    weights.prepare::<S>(groups, spans, &visible);
                    prepared = Some(visible.clone());
                }
                let record = &mut records[query * record..];
                let mut coder = Coder {
                    weights,
                    groups,
                    query,
                };
                coder.start::<S>();
                let scores = scores.add(query * KV_TILE);
                record[L] =
                    tile::softmax::<S>(scores, &visible, &all, record[M], &mut coder, ahead);
                coder.finish::<S>();
            }
        }
    }

    /// Sums V by the weights into the accumulators.
    ///
    /// # Safety
    /// As [`scores`](Self::scores), and the softmax has run.
    #[inline(always)]
    unsafe fn values<S: Simd>(&mut self, queries: usize, spans: &Spans, ahead: &mut Ahead) {
        let dim = self.place.params.head_dim;
        let record = self.place.record();
        let line_dims = if C::NIBBLES { 2 * LANES } else { LANES };
        let weights = Weights::new(self.weights);
        for (group, dims) in groups(dim).enumerate() {
            let strip = Strip {
                v: &spans.v[..spans.count],
                first_span: spans.first,
                first: groups(dim).count() * GROUP_HEADER + dims.start / line_dims * LINE,
                quad_bytes: dim.div_ceil(line_dims) * LINE,
                weights: weights.codes(group, 0),
                factors: weights.factors(group, 0),
            };
            // SAFETY: as `scores`; weight codes and factors were just written for every query.
            unsafe {
                let acc = self.records.as_mut_ptr().add(HEADER + dims.start);
                let mut d = 0;
                while d < dims.len() {
                    let left = dims.len() - d;
                    let acc = acc.add(d);
                    let strip = Strip {
                        first: strip.first + d / line_dims * LINE,
                        ..strip
                    };
                    if const { S::QUERIES >= 12 } && left >= 4 * LANES {
                        over_queries!(queries, [3 2 1], at => add_values::<S, C, 4>(
                            strip, at, ahead, acc.add(at * record), record));
                        d += 4 * LANES;
                    } else if left >= 2 * LANES {
                        over_queries!(queries, [6 3 2 1], at => add_values::<S, C, 2>(
                            strip, at, ahead, acc.add(at * record), record));
                        d += 2 * LANES;
                    } else {
                        over_queries!(queries, [8 3 2 1], at => add_values::<S, C, 1>(
                            strip, at, ahead, acc.add(at * record), record));
                        d += LANES;
                    }
                }
            }
        }
    }
}

/// Scores of `Q` queries with `N` spans of 16 positions, consecutive in the tile.
///
/// # Safety
/// The processor has `S`'s instruction set; each span holds K of a head as `kv` draws it; `q` holds queries
/// `at..at + Q`; `to` has room for `Q` rows of `N` spans, `KV_TILE` apart.
#[inline(always)]
unsafe fn score_spans<S: Simd, C: Codes, const Q: usize, const N: usize>(
    k: [*const u8; N],
    ahead: &mut Ahead,
    q: &Queries<'_>,
    at: usize,
    params: &AttentionParams,
    to: *mut f32,
) {
    // SAFETY: the caller's promise, in all of it.
    unsafe {
        let headers = q.groups() * GROUP_HEADER;
        let mut quad = 0;
        for (group, dims) in groups(params.head_dim).enumerate() {
            ahead.passed(Q * N * dims.len() / 4);
            let mut dots = [[S::splat_i(0); Q]; N];
            while 4 * quad < dims.end {
                let line = headers + if C::NIBBLES { quad / 2 } else { quad } * LINE;
                let mut lines = [S::load_codes(k[0].add(line)); N];
                for n in 1..N {
                    lines[n] = S::load_codes(k[n].add(line));
                }
                if C::NIBBLES {
                    step::<S, C, Q, N>(
                        &mut dots,
                        lines.map(|x| S::low_nibbles(x)),
                        q.codes(quad, at),
                    );
                    let high = lines.map(|x| S::high_nibbles(x));
                    step::<S, C, Q, N>(&mut dots, high, q.codes(quad + 1, at));
                    quad += 2;
                } else {
                    step::<S, C, Q, N>(&mut dots, lines, q.codes(quad, at));
                    quad += 1;
                }
            }
            let (q_scale, q_sum) = (q.scale(group, at), q.sum(group, at));
            let last = dims.end == params.head_dim;
            for (n, dots) in dots.into_iter().enumerate() {
                let header = k[n].add(group * GROUP_HEADER).cast::<u16>();
                let (scale, minimum) = (S::load_f16(header), S::load_f16(header.add(KV_SPAN)));
                for (i, dot) in dots.into_iter().enumerate() {
                    let to = to.add(i * KV_TILE + n * KV_SPAN);
                    let before = if group == 0 {
                        S::splat(0.0)
                    } else {
                        S::load(to)
                    };
                    let both = S::mul(scale, S::splat(*q_scale.add(i)));
                    let mut score = S::fma(both, S::to_float(dot), before);
                    score = S::fma(minimum, S::splat(*q_sum.add(i)), score);
                    if last {
                        score = tile::capped::<S>(score, params.soft_cap);
                    }
                    S::store(to, score);
                }
            }
        }
    }
}

/// Four dimensions of `N` spans times those of `Q` queries.
///
/// # Safety
/// As [`score_spans`]; `q` holds the queries' four codes one behind the other.
#[inline(always)]
unsafe fn step<S: Simd, C: Codes, const Q: usize, const N: usize>(
    dots: &mut [[S::I; Q]; N],
    lines: [S::B; N],
    q: *const i8,
) {
    for i in 0..Q {
        // SAFETY: the caller's promise.
        unsafe {
            let q = S::broadcast_codes(q.add(4 * i));
            for (dots, line) in dots.iter_mut().zip(lines) {
                dots[i] = dot::<S, C>(dots[i], line, q);
            }
        }
    }
}

/// # Safety
/// As [`Simd::dot`]; int4 codes are below 16.
#[inline(always)]
unsafe fn dot<S: Simd, C: Codes>(acc: S::I, line: S::B, x: S::I) -> S::I {
    // SAFETY: passed on.
    unsafe {
        if C::NIBBLES {
            S::dot::<false>(acc, line, x)
        } else {
            S::dot::<true>(acc, line, x)
        }
    }
}

/// V of some dimensions of a tile, and the weights of all queries.
#[derive(Clone, Copy)]
struct Strip<'a> {
    /// The spans.
    v: &'a [*const u8],
    /// Where the first line lies in a span, and from one four positions to the next.
    first: usize,
    quad_bytes: usize,
    /// The first span's place in the tile.
    first_span: usize,
    /// `[queries][high|low][KV_TILE]`, by position of the tile.
    weights: *const i8,
    /// `[queries]` of `ws` and `wmin`.
    factors: *const f32,
}

/// Weighted sums of `N` vectors of V for queries `at..at + Q`.
///
/// # Safety
/// The processor has `S`'s instruction set; the strip's spans hold V of a head as `kv` draws it, and its weights are
/// there for the queries; `acc` has room for `16 * N` values per query, `record` apart.
#[inline(always)]
unsafe fn add_values<S: Simd, C: Codes, const Q: usize, const N: usize>(
    strip: Strip<'_>,
    at: usize,
    ahead: &mut Ahead,
    acc: *mut f32,
    record: usize,
) {
    // SAFETY: the caller's promise, in all of it.
    unsafe {
        let mut sums = [[[S::splat_i(0); N]; 2]; Q];
        let weights = strip.weights.add(at * WEIGHT_CODES);
        for (i, v) in strip.v.iter().enumerate() {
            let v = v.add(strip.first);
            // In the order of `store_halves`: four positions of one span after the other.
            let span = strip.first_span + i;
            let weights = weights.add((span - span % BLOCK) * KV_SPAN + span % BLOCK * 4);
            // Once per span: asking within would cost the sums their registers.
            ahead.passed(2 * Q * N * KV_SPAN / 4);
            for quad in 0..KV_SPAN / 4 {
                let lines = load_lines::<S, C, N>(v.add(quad * strip.quad_bytes));
                let weights = weights.add(quad * 4 * BLOCK);
                for (q, sums) in sums.iter_mut().enumerate() {
                    for (half, sums) in sums.iter_mut().enumerate() {
                        let w = weights.add(q * WEIGHT_CODES + half * KV_TILE);
                        let w = S::broadcast_codes(w);
                        for n in 0..N {
                            sums[n] = dot::<S, C>(sums[n], lines[n], w);
                        }
                    }
                }
            }
        }
        for (q, [high, low]) in sums.into_iter().enumerate() {
            let factors = strip.factors.add(2 * (at + q));
            let (scale, minimum) = (*factors, *factors.add(1));
            for n in 0..N {
                let dot = S::fma(
                    S::to_float(high[n]),
                    S::splat(WEIGHT_HIGH),
                    S::to_float(low[n]),
                );
                let value = S::fma(S::splat(scale), dot, S::splat(minimum));
                S::store(acc.add(q * record + n * LANES), value);
            }
        }
    }
}

/// `N` vectors of 16 dimensions by 4 positions.
///
/// # Safety
/// The lines that hold them are readable.
#[inline(always)]
unsafe fn load_lines<S: Simd, C: Codes, const N: usize>(from: *const u8) -> [S::B; N] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut lines = [S::load_codes(from); N];
        for (n, line) in lines.iter_mut().enumerate() {
            *line = if !C::NIBBLES {
                S::load_codes(from.add(n * LINE))
            } else if n % 2 == 0 {
                S::low_nibbles(S::load_codes(from.add(n / 2 * LINE)))
            } else {
                S::high_nibbles(S::load_codes(from.add(n / 2 * LINE)))
            };
        }
        lines
    }
}
