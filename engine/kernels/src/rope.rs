//! Rotary position embedding: tables computed once, rotation in place.
//!
//! Angles are computed in f64 and rounded to f32 once, so every instruction set multiplies by the same numbers. Scaling
//! rules (linear, NTK, llama3, YaRN) are the model loader's: it hands over one divisor per frequency and a factor.

use crate::Error;

/// Which two dimensions of a head form a rotated pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopePairing {
    /// Pairs `2i, 2i + 1`: GGUF files of the llama family.
    Interleaved,
    /// Pairs `i, i + dims / 2`: NeoX, and Hugging Face folders.
    Halves,
}

/// Cosines and sines per position and frequency.
#[derive(Debug)]
pub struct RopeTable {
    /// Rotated dimensions of a head.
    dims: usize,
    positions: usize,
    /// Shape: `[positions, dims / 2]`.
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// Frequency `i` of `dims / 2` is `base^(-2i / dims) / factors[i]`; an empty `factors` means all 1. Cosines and
    /// sines are multiplied by `attn_factor` (YaRN's magnitude; 1 otherwise). Takes
    /// `max_positions * dims * 4` bytes.
    ///
    /// # Errors
    /// [`Error::RopeDims`], [`Error::RopeFactors`].
    pub fn new(
        dims: usize,
        base: f64,
        max_positions: usize,
        factors: &[f32],
        attn_factor: f32,
    ) -> Result<RopeTable, Error> {
        if dims == 0 || !dims.is_multiple_of(2) {
            return Err(Error::RopeDims { dims });
        }
        let half = dims / 2;
        if !factors.is_empty() && factors.len() != half {
            return Err(Error::RopeFactors {
                expected: half,
                actual: factors.len(),
            });
        }
        let frequencies: Vec<f64> = (0..half)
            .map(|i| {
                let factor = factors.get(i).map_or(1.0, |f| f64::from(*f));
                base.powf(-2.0 * i as f64 / dims as f64) / factor
            })
            .collect();
        let mut cos = Vec::with_capacity(max_positions * half);
        let mut sin = Vec::with_capacity(max_positions * half);
        for position in 0..max_positions {
            for frequency in &frequencies {
                let (s, c) = (position as f64 * frequency).sin_cos();
                cos.push((c * f64::from(attn_factor)) as f32);
                sin.push((s * f64::from(attn_factor)) as f32);
            }
        }
        Ok(RopeTable {
            dims,
            positions: max_positions,
            cos,
            sin,
        })
    }

    /// Dimensions of a head that are rotated; the rest pass through.
    pub fn dims(&self) -> usize {
        self.dims
    }

    /// Positions `0..max_positions` can be rotated.
    pub fn max_positions(&self) -> usize {
        self.positions
    }

    /// Cosines and sines of one position. Panics where it is out of range.
    #[inline]
    pub(crate) fn at(&self, position: u32) -> (&[f32], &[f32]) {
        let position = position as usize;
        assert!(
            position < self.positions,
            "position `{position}` of a rope table of `{}`",
            self.positions
        );
        let half = self.dims / 2;
        (
            &self.cos[position * half..][..half],
            &self.sin[position * half..][..half],
        )
    }
}

/// Rotates one head in place. `x` holds the whole head.
#[inline(always)]
pub(crate) fn rotate_head(x: &mut [f32], cos: &[f32], sin: &[f32], pairing: RopePairing) {
    let half = cos.len();
    let x = &mut x[..2 * half];
    match pairing {
        RopePairing::Halves => {
            let (low, high) = x.split_at_mut(half);
            for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                let (x0, x1) = (*a, *b);
                *a = (-x1).mul_add(*s, x0 * c);
                *b = x0.mul_add(*s, x1 * c);
            }
        }
        RopePairing::Interleaved => {
            for ((pair, c), s) in x.chunks_exact_mut(2).zip(cos).zip(sin) {
                let (x0, x1) = (pair[0], pair[1]);
                pair[0] = (-x1).mul_add(*s, x0 * c);
                pair[1] = x0.mul_add(*s, x1 * c);
            }
        }
    }
}
