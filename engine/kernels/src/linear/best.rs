//! The best output of each token, without the outputs: what a greedy choice needs of the output head.
//!
//! ```text
//! on whatever thread, for each strip (some row tiles times one token tile)
//!   per token and lane: best value and its row tile so far     a compare and two blends per 16 outputs
//!   per token: the best of the lanes, as a key, into the token's slot by an atomic maximum
//!
//! key = order of the value (32 bits) | order of the row, lowest last (32 bits)
//! ```
//!
//! A maximum of keys does not depend on who comes first, so neither threads nor strips change a result: the lowest row
//! of those with the highest value, as if the outputs were looked through one after the other. Zeros of both signs are
//! equal. A value that is not finite, in any row, takes the slot for good; the caller then looks at the outputs.

use std::sync::atomic::{AtomicU64, Ordering};

use super::strip::Destination;
use super::{Input, Sink};
use crate::kernels::Shared;
use crate::math::{self, LANES};
use crate::simd::Simd;
use crate::{Kernels, PackedMatrix, Scratch};

/// A slot nothing was put to: less than every key.
const NOTHING: u64 = 0;
/// A slot whose token has an output that is not finite: more than every key.
const NOT_FINITE: u64 = u64::MAX;

/// Largest token tile.
const TOKENS_MAX: usize = 12;

/// Which outputs may be the best, and what is done to them first.
#[derive(Clone, Copy, Debug)]
pub(super) struct BestLimits {
    /// Rows at or above it are looked at, but never the best.
    pub known: usize,
    pub soft_cap: Option<f32>,
}

/// One token's best by lanes: of the rows `16 i + lane`.
#[derive(Clone, Copy, Debug)]
pub(super) struct BestLanes {
    values: [f32; LANES],
    /// First row of the tile that has the value.
    rows: [i32; LANES],
    /// A sum of products with 0: NaN once a value was not finite.
    probe: [f32; LANES],
}

impl BestLanes {
    const NONE: BestLanes = BestLanes {
        values: [f32::NEG_INFINITY; LANES],
        rows: [0; LANES],
        probe: [0.0; LANES],
    };

    /// Takes the outputs of one row tile: `rows` of them, from `first_row`. Tiles come upwards.
    ///
    /// # Safety
    /// The processor has `S`'s instruction set.
    #[inline(always)]
    pub unsafe fn take<S: Simd>(
        &mut self,
        outputs: S::F,
        first_row: usize,
        rows: usize,
        limits: BestLimits,
    ) {
        // SAFETY: the caller's promise; all arrays have 16 elements.
        unsafe {
            let mut outputs = outputs;
            if let Some(cap) = limits.soft_cap {
                outputs = math::soft_cap::<S>(outputs, S::splat(cap));
            }
            if rows < LANES {
                outputs = S::keep(0, rows as i32, outputs, S::splat(0.0));
            }
            let probe = S::load(self.probe.as_ptr());
            let probe = S::add(probe, S::mul(outputs, S::splat(0.0)));
            S::store(self.probe.as_mut_ptr(), probe);
            let allowed = limits.known.saturating_sub(first_row).min(rows);
            if allowed < LANES {
                let never = S::splat(f32::NEG_INFINITY);
                outputs = S::keep(0, allowed as i32, outputs, never);
            }
            let values = S::load(self.values.as_ptr());
            let first = S::from_bits(S::splat_i(first_row as i32));
            let before = S::load(self.rows.as_ptr().cast());
            let picked = S::pick(outputs, values, S::bits(first), S::bits(before));
            S::store(self.rows.as_mut_ptr().cast(), S::from_bits(picked));
            S::store(self.values.as_mut_ptr(), S::max(outputs, values));
        }
    }

    fn key(&self) -> u64 {
        if self.probe.iter().any(|probe| probe.is_nan()) {
            return NOT_FINITE;
        }
        let lanes = self.values.iter().zip(&self.rows).enumerate();
        lanes
            .filter(|(_, (value, _))| **value > f32::NEG_INFINITY)
            .map(|(lane, (value, row))| key(*value, *row as u32 + lane as u32))
            .max()
            .unwrap_or(NOTHING)
    }
}

/// Higher values first, then lower rows; all finite values give keys between the two constants.
fn key(value: f32, row: u32) -> u64 {
    // A negative zero becomes a positive one.
    let bits = (value + 0.0).to_bits();
    let order = if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    };
    u64::from(order) << 32 | u64::from(!row)
}

/// The slots of one call.
pub(super) struct Best<'a> {
    slots: &'a [AtomicU64],
    limits: BestLimits,
}

impl Best<'_> {
    /// Runs a strip, and puts what its tokens have to their slots.
    pub fn of_strip(&self, token: usize, size: usize, run: impl FnOnce(Destination<'_>)) {
        let mut lanes = [BestLanes::NONE; TOKENS_MAX];
        run(Destination::Best {
            lanes: Shared::new(&mut lanes[..size]),
            limits: self.limits,
        });
        for (slot, lanes) in self.slots[token..][..size].iter().zip(&lanes) {
            // The end of the job publishes it.
            slot.fetch_max(lanes.key(), Ordering::Relaxed);
        }
    }
}

impl Kernels {
    /// Per token, the lowest row below `known` with the highest output of the product `w * input`, each output capped
    /// first where `soft_cap` is given; none where `known` is 0. `out` is replaced. Returns false where an output of any
    /// row, known or not, is not finite; `out` then holds nothing of use.
    ///
    /// The same as [`product`](Self::product), [`soft_cap`](Self::soft_cap) and a search, but for memory.
    #[allow(clippy::too_many_arguments)]
    pub fn arg_max(
        &self,
        w: &PackedMatrix,
        input: Input<'_>,
        tokens: usize,
        soft_cap: Option<f32>,
        known: usize,
        out: &mut Vec<Option<u32>>,
        scratch: &mut Scratch,
    ) -> bool {
        assert!(
            i32::try_from(w.rows()).is_ok(),
            "arg_max: `{}` rows",
            w.rows()
        );
        input.check(tokens, w.cols());
        let mut slots = std::mem::take(&mut scratch.best);
        slots.clear();
        slots.resize_with(tokens, || AtomicU64::new(NOTHING));
        let best = Best {
            slots: &slots,
            limits: BestLimits { known, soft_cap },
        };
        self.run_product(w, input, tokens, scratch, Sink::Best(&best));
        out.clear();
        out.extend(slots.iter().map(|slot| {
            let key = slot.load(Ordering::Relaxed);
            (key != NOTHING).then_some(!(key as u32))
        }));
        let finite = slots
            .iter()
            .all(|slot| slot.load(Ordering::Relaxed) != NOT_FINITE);
        scratch.best = slots;
        finite
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_order_by_value_then_by_the_lower_row() {
        let ascending = [
            f32::MIN,
            -1.5,
            -f32::MIN_POSITIVE,
            0.0,
            1e-40,
            2.0,
            f32::MAX,
        ];
        for pair in ascending.windows(2) {
            assert!(key(pair[0], 0) < key(pair[1], 7), "{pair:?}");
        }
        assert!(key(1.0, 3) > key(1.0, 4));
        assert_eq!(key(-0.0, 5), key(0.0, 5));
        assert!(key(f32::MIN, u32::MAX) > NOTHING && key(f32::MAX, 0) < NOT_FINITE);
    }
}
