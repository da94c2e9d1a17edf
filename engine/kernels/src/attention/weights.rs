//! What lies between scores and weighted sums where V is codes: the weights, made into codes as they come.
//!
//! `codes` states the arithmetic. The part of a weight's code that no query has a say in, `vs * (16383 / vsmax)`, is made
//! once for all queries that see the same positions; a query's weights then take one multiply-add each to become codes,
//! and one more for their share of the minimums.

use std::ops::Range;

use super::codes::LINE;
use super::tile::{BLOCK, SPANS, Spans, TakeWeights, is_whole, lanes};
use super::{KV_TILE, QUERIES};
use crate::kv::{GROUP_HEADER, KV_GROUP, KV_SPAN};
use crate::math::{LANES, ROUND_MAGIC};
use crate::simd::Simd;

/// Largest code of a weight.
pub(crate) const WEIGHT_MAX: f32 = 16_383.0;

/// Bytes of a query's weight codes in a tile: high, then low.
pub(super) const WEIGHT_CODES: usize = 2 * KV_TILE;

/// Cycles that 16 weights of a group take to become codes.
pub(super) const CODE_CYCLES: usize = 6;

/// f32 of working memory.
pub(super) fn working_memory(head_dim: usize) -> usize {
    head_dim.div_ceil(KV_GROUP) * Weights::PER_GROUP
}

/// Working memory of a tile's weights, one part per group:
///
/// ```text
/// vs * (16383 / vsmax) [KV_TILE] | vmin [KV_TILE] | sums of p * vmin [16] | ws, wmin [QUERIES] | ws
/// codes [QUERIES][high|low][KV_TILE], in the order of `store_halves`
/// ```
///
/// What concerns positions lies by position of the tile.
#[derive(Clone, Copy)]
pub(super) struct Weights(*mut f32);

impl Weights {
    const MINIMUMS: usize = KV_TILE;
    const SUMS: usize = 2 * KV_TILE;
    const FACTORS: usize = Self::SUMS + LANES;
    const SCALE: usize = Self::FACTORS + 2 * QUERIES;
    const CODES: usize = (Self::SCALE + 1).next_multiple_of(LINE / 4);
    const PER_GROUP: usize = Self::CODES + QUERIES * WEIGHT_CODES / 4;

    pub fn new(memory: &mut [f32]) -> Weights {
        Weights(memory.as_mut_ptr())
    }

    /// Element `at` of a group's part.
    #[inline(always)]
    fn part(self, group: usize, at: usize) -> *mut f32 {
        self.0.wrapping_add(group * Self::PER_GROUP + at)
    }

    #[inline(always)]
    pub fn codes(self, group: usize, query: usize) -> *mut i8 {
        self.part(group, Self::CODES + query * WEIGHT_CODES / 4)
            .cast()
    }

    #[inline(always)]
    pub fn factors(self, group: usize, query: usize) -> *mut f32 {
        self.part(group, Self::FACTORS + 2 * query)
    }

    /// Reads the scales and minimums of V for rows that see these positions. Hidden ones become 0.
    ///
    /// # Safety
    /// The processor has `S`'s instruction set; the spans of V start with headers of so many groups, for which there is
    /// memory.
    #[inline(always)]
    pub unsafe fn prepare<S: Simd>(self, groups: usize, spans: &Spans, visible: &Range<usize>) {
        // SAFETY: the caller's promise; spans lie within the tile.
        unsafe {
            let zero = S::splat(0.0);
            for group in 0..groups {
                let (scales, minimums) = (self.part(group, 0), self.part(group, Self::MINIMUMS));
                let mut largest = zero;
                for (i, v) in spans.v[..spans.count].iter().enumerate() {
                    let span = spans.first + i;
                    let header = v.add(group * GROUP_HEADER).cast::<u16>();
                    let mut scale = S::load_f16(header);
                    let mut minimum = S::load_f16(header.add(KV_SPAN));
                    if !is_whole(visible, span..span + 1) {
                        let (from, to) = lanes(visible, span);
                        scale = S::keep(from, to, scale, zero);
                        minimum = S::keep(from, to, minimum, zero);
                    }
                    S::store(scales.add(span * KV_SPAN), scale);
                    S::store(minimums.add(span * KV_SPAN), minimum);
                    largest = S::max(scale, largest);
                }
                let largest = S::tree_max(largest);
                let inverse = WEIGHT_MAX / largest;
                // Nothing to see, or scales so small that their inverse is not a number to multiply by.
                let inverse = if inverse == f32::INFINITY {
                    0.0
                } else {
                    inverse
                };
                for i in 0..spans.count {
                    let scale = scales.add((spans.first + i) * KV_SPAN);
                    S::store(scale, S::mul(S::load(scale), S::splat(inverse)));
                }
                // What a block has beyond the spans.
                let end = spans.first + spans.count;
                let before = spans.first / BLOCK * BLOCK..spans.first;
                for span in before.chain(end..end.next_multiple_of(BLOCK).min(SPANS)) {
                    S::store(scales.add(span * KV_SPAN), zero);
                    S::store(minimums.add(span * KV_SPAN), zero);
                }
                self.part(group, Self::SCALE).write(largest / WEIGHT_MAX);
            }
        }
    }
}

/// Makes codes of one query's weights.
pub(super) struct Coder {
    pub weights: Weights,
    pub groups: usize,
    pub query: usize,
}

impl Coder {
    /// # Safety
    /// The processor has `S`'s instruction set, and there is memory for all groups.
    #[inline(always)]
    pub unsafe fn start<S: Simd>(&mut self) {
        for group in 0..self.groups {
            let sums = self.weights.part(group, Weights::SUMS);
            // SAFETY: the caller's promise.
            unsafe { S::store(sums, S::splat(0.0)) };
        }
    }

    /// # Safety
    /// As [`start`](Self::start).
    #[inline(always)]
    pub unsafe fn finish<S: Simd>(&mut self) {
        for group in 0..self.groups {
            // SAFETY: the caller's promise.
            unsafe {
                let sums = S::load(self.weights.part(group, Weights::SUMS));
                let factors = self.weights.factors(group, self.query);
                factors.write(*self.weights.part(group, Weights::SCALE));
                factors.add(1).write(S::tree_sum(sums));
            }
        }
    }
}

impl<S: Simd> TakeWeights<S> for Coder {
    #[inline(always)]
    unsafe fn take(&mut self, span: usize, weights: [S::F; BLOCK]) {
        // SAFETY: the trait's contract; the block lies within the tile, for which there is memory in each group.
        unsafe {
            for group in 0..self.groups {
                let part = |at| self.weights.part(group, at + span * KV_SPAN);
                let (scales, minimums) = (part(0), part(Weights::MINIMUMS));
                let sums = self.weights.part(group, Weights::SUMS);
                let mut sum = S::load(sums);
                let mut codes = [S::splat_i(0); BLOCK];
                for (i, p) in weights.into_iter().enumerate() {
                    let scale = S::load(scales.add(i * KV_SPAN));
                    // Rounds to nearest, ties to even; the integer stands in the low bits.
                    codes[i] = S::bits(S::fma(p, scale, S::splat(ROUND_MAGIC)));
                    sum = S::fma(p, S::load(minimums.add(i * KV_SPAN)), sum);
                }
                S::store(sums, sum);
                let high = self.weights.codes(group, self.query).add(span * KV_SPAN);
                S::store_halves(high, high.add(KV_TILE), codes);
            }
        }
    }
}
