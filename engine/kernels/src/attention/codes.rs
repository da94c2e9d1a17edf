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
//! per query and group:        w[j] = p[j] * vs[j],  wmax = largest w,  ws = wmax / 16383
//!                             wc[j] = w[j] * (16383 / wmax) rounded
//!                             wmin = sum of p[j] * vmin[j]        16 lanes (position mod 16) in order, one tree
//! acc[q][d] = fma(ws, sum over the tile's visible j of wc[j] * vc[j][d], wmin)                lane = dimension
//! ```
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
//! Why integers at all: a step at depth reads 68 (36) bytes per 64 values from memory, for which it has about 16 (8)
//! cycles on the machines this was built for. Three queries in f32 take 12 cycles of multiply-adds, after widening; in
//! integers 3 for a score and 6 for the sum.

use std::marker::PhantomData;
use std::ops::Range;

use super::tile::{Ahead, HEADER, Place, SOFTMAX_CYCLES, Spans, is_whole, lanes, over_queries};
use super::{AttentionParams, KV_TILE, QUERIES};
use crate::kv::{GROUP_HEADER, KV_GROUP, KV_SPAN};
use crate::math::{self, LANES, ROUND_MAGIC};
use crate::simd::{Kernel, Simd};

/// Largest code of a weight.
pub(crate) const WEIGHT_MAX: f32 = 16_383.0;
/// What `high` counts.
const WEIGHT_HIGH: f32 = 128.0;
/// Largest code of a query.
const QUERY_MAX: f32 = 127.0;

/// Bytes of one line of codes, a step of 16 dot products (two steps with int4).
const LINE: usize = 64;
/// Bytes of a query's weight codes in a tile: high, then low.
const WEIGHT_CODES: usize = 2 * KV_TILE;

/// Queries whose weights are made together.
const WEIGHED: usize = 4;

/// Cycles that making 16 weights of a group takes.
const WEIGH_CYCLES: usize = 20;

/// f32 of working memory per item: weights of some queries, then the codes of all.
pub(super) const WEIGHTS: usize = WEIGHED * KV_TILE + QUERIES * WEIGHT_CODES / 4;

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

/// Codes of one group of a query, one per value. Returns `(qs, qsum)`.
#[inline(always)]
pub(crate) fn quantize_query(q: &[f32], score_scale: f32, codes: &mut [i8]) -> (f32, f32) {
    // On the bits, so that a NaN is the largest and makes the scale NaN.
    let largest = f32::from_bits(q.iter().map(|q| q.abs().to_bits()).max().unwrap_or(0));
    let scale = largest / QUERY_MAX;
    let inverse = 1.0 / scale;
    // Zero, or so small that its inverse is not a number to multiply by: the group counts as zero.
    if inverse == f32::INFINITY {
        codes.fill(0);
        return (0.0, 0.0);
    }
    let mut sum = 0;
    for (code, q) in codes.iter_mut().zip(q) {
        // Rounds to nearest, ties to even; the integer stands in the low bits.
        *code = (q * inverse + ROUND_MAGIC).to_bits() as i8;
        sum += i32::from(*code);
    }
    let scale = scale * score_scale;
    (scale, scale * sum as f32)
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
    /// Stores one query as number `query` of `queries`.
    #[inline(always)]
    pub fn pack(memory: &mut [f32], queries: usize, query: usize, q: &[f32], score_scale: f32) {
        let (codes, scales) = memory.split_at_mut(q.len() / 4 * queries);
        let codes: &mut [[i8; 4]] = bytemuck::cast_slice_mut(codes);
        let (scales, sums) = scales.split_at_mut(q.len().div_ceil(KV_GROUP) * queries);
        for (g, dims) in groups(q.len()).enumerate() {
            let mut group = [0i8; KV_GROUP];
            let group = &mut group[..dims.len()];
            let (scale, sum) = quantize_query(&q[dims.clone()], score_scale, group);
            scales[g * queries + query] = scale;
            sums[g * queries + query] = sum;
            for (i, quad) in group.as_chunks::<4>().0.iter().enumerate() {
                codes[(dims.start / 4 + i) * queries + query] = *quad;
            }
        }
    }

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

/// One tile for all queries of an item.
pub(super) struct CodeTile<'a, C> {
    pub place: Place<'a>,
    pub q: Queries<'a>,
    /// `[queries][KV_TILE]`
    pub scores: &'a mut [f32],
    /// [`WEIGHTS`] of working memory.
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
        assert!(self.weights.len() >= WEIGHTS);
        assert!(self.records.len() >= queries * self.place.record());
        // SAFETY: the processor's instruction set is the caller's promise; the buffers were just checked.
        unsafe {
            let spans = self.place.spans();
            let dim = self.place.params.head_dim;
            let weigh = dim.div_ceil(KV_GROUP) * WEIGH_CYCLES;
            let cycles = queries * spans.count * (dim / 4 + SOFTMAX_CYCLES + weigh + dim / 2);
            let ahead = &mut Ahead::new(self.ahead, cycles);
            self.scores::<S>(queries, &spans, ahead);
            self.place.softmax::<S>(self.scores, self.records, ahead);
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
                over_queries!(queries, [3 2 1], at => score_spans::<S, C, 4>(
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

    /// Sums V by the weights into the accumulators.
    ///
    /// # Safety
    /// As [`scores`](Self::scores), and the softmax has run.
    #[inline(always)]
    unsafe fn values<S: Simd>(&mut self, queries: usize, spans: &Spans, ahead: &mut Ahead) {
        let dim = self.place.params.head_dim;
        let record = self.place.record();
        let line_dims = if C::NIBBLES { 2 * LANES } else { LANES };
        let (weights, codes) = self.weights.split_at_mut(WEIGHED * KV_TILE);
        for (group, dims) in groups(dim).enumerate() {
            let mut factors = [(0.0, 0.0); QUERIES];
            let weighing = Weighing {
                place: &self.place,
                spans,
                header: group * GROUP_HEADER,
                p: self.scores.as_ptr(),
                weights: weights.as_mut_ptr(),
                codes: codes.as_mut_ptr().cast(),
            };
            // SAFETY: passed on; the buffers were checked.
            unsafe {
                over_queries!(queries, [4 3 2 1], at => weigh::<S, C, 1>(
                    &weighing, at, &mut factors[at..], ahead));
            }
            let strip = Strip {
                v: &spans.v[..spans.count],
                first: groups(dim).count() * GROUP_HEADER + dims.start / line_dims * LINE,
                quad_bytes: dim.div_ceil(line_dims) * LINE,
                weights: codes.as_ptr().cast(),
            };
            // SAFETY: as `scores`; weight codes of all spans of `v` were just written for every query.
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
                    if const { S::QUERIES >= 8 } && left >= 4 * LANES {
                        over_queries!(queries, [3 2 1], at => add_values::<S, C, 4>(
                            strip, at, &factors, ahead, acc.add(at * record), record));
                        d += 4 * LANES;
                    } else if left >= 2 * LANES {
                        over_queries!(queries, [6 3 2 1], at => add_values::<S, C, 2>(
                            strip, at, &factors, ahead, acc.add(at * record), record));
                        d += 2 * LANES;
                    } else {
                        over_queries!(queries, [8 3 2 1], at => add_values::<S, C, 1>(
                            strip, at, &factors, ahead, acc.add(at * record), record));
                        d += LANES;
                    }
                }
            }
        }
    }
}

/// What weights of a group are made from.
struct Weighing<'a> {
    place: &'a Place<'a>,
    spans: &'a Spans,
    /// Where the group's header lies in a span.
    header: usize,
    /// `[queries][KV_TILE]`
    p: *const f32,
    /// `[WEIGHED][KV_TILE]`, for use in between.
    weights: *mut f32,
    /// `[queries][high|low][KV_TILE]`, from the first span on.
    codes: *mut i8,
}

/// Weight codes and the factors `(ws, wmin)` of queries `at..at + Q` for one group. `C` and `N` are of no meaning.
///
/// # Safety
/// The processor has `S`'s instruction set; the spans of V start with their groups' headers; the buffers hold what
/// `x` says, and `factors` has `Q` entries.
#[inline(always)]
unsafe fn weigh<S: Simd, C: Codes, const Q: usize, const N: usize>(
    x: &Weighing<'_>,
    at: usize,
    factors: &mut [(f32, f32)],
    ahead: &mut Ahead,
) {
    let visible: [Range<usize>; Q] =
        std::array::from_fn(|q| x.place.visible((at + q) / x.place.heads));
    // Rows ascend.
    let seen_by_all = visible[Q - 1].start..visible[0].end;
    // SAFETY: the caller's promise; spans lie within the tile.
    unsafe {
        let zero = S::splat(0.0);
        let (mut largest, mut minimums) = ([zero; Q], [zero; Q]);
        for (i, v) in x.spans.v[..x.spans.count].iter().enumerate() {
            let span = x.spans.first + i;
            ahead.passed(Q * WEIGH_CYCLES);
            let header = v.add(x.header).cast::<u16>();
            let (scale, minimum) = (S::load_f16(header), S::load_f16(header.add(KV_SPAN)));
            let whole = is_whole(&seen_by_all, span);
            for q in 0..Q {
                let mut p = S::load(x.p.add((at + q) * KV_TILE + span * KV_SPAN));
                let (mut scale, mut minimum) = (scale, minimum);
                if !whole {
                    let (from, to) = lanes(&visible[q], span);
                    p = S::keep(from, to, p, zero);
                    scale = S::keep(from, to, scale, zero);
                    minimum = S::keep(from, to, minimum, zero);
                }
                let weight = S::mul(p, scale);
                S::store(x.weights.add(q * KV_TILE + i * KV_SPAN), weight);
                largest[q] = S::max(weight, largest[q]);
                minimums[q] = S::fma(p, minimum, minimums[q]);
            }
        }
        for q in 0..Q {
            let largest = S::tree_max(largest[q]);
            let inverse = WEIGHT_MAX / largest;
            // Nothing to see, or scales so small that their inverse is not a number to multiply by.
            let inverse = if inverse == f32::INFINITY {
                0.0
            } else {
                inverse
            };
            let codes = x.codes.add((at + q) * WEIGHT_CODES);
            for i in 0..x.spans.count {
                let weight = S::load(x.weights.add(q * KV_TILE + i * KV_SPAN));
                // Rounds to nearest, ties to even; the integer stands in the low bits.
                let code = S::bits(S::fma(weight, S::splat(inverse), S::splat(ROUND_MAGIC)));
                let high = codes.add(i * KV_SPAN);
                S::store_halves(high, high.add(KV_TILE), code);
            }
            factors[q] = (largest / WEIGHT_MAX, S::tree_sum(minimums[q]));
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
                    if let (true, Some(cap)) = (last, params.soft_cap) {
                        score = math::soft_cap::<S>(score, S::splat(cap));
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
    /// `[queries][high|low][KV_TILE]`, from the first span on.
    weights: *const i8,
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
    factors: &[(f32, f32); QUERIES],
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
            // Once per span: asking within would cost the sums their registers.
            ahead.passed(2 * Q * N * KV_SPAN / 4);
            for quad in 0..KV_SPAN / 4 {
                let lines = load_lines::<S, C, N>(v.add(quad * strip.quad_bytes));
                let weights = weights.add(i * KV_SPAN + quad * 4);
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
            let (scale, minimum) = factors[at + q];
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
