//! Float weights to the 8- and 4-bit blocks of model files, once, at load.
//!
//! ```text
//! Q8_0  32 weights: scale f16, codes -127..=127        w ~ scale * code
//! Q4_1  32 weights: scale f16, minimum f16, 0..=15     w ~ scale * code + minimum
//! ```
//!
//! *8 bits*: the scale is the largest magnitude over 127 as f16, taken up where rounding down would clip, so that no
//! weight is off by more than half a scale.
//!
//! *4 bits*: the plain choice is the f16 minimum at or below the least weight and the least f16 scale that reaches the
//! largest; no weight is then off by more than half a scale. From there a short search lowers the squared error: codes
//! are taken with the range stretched or cut a little, the line that fits them best is found by least squares, its two
//! numbers are rounded to f16 and the codes are chosen anew for what was rounded. What is compared is the error of the
//! values that will be multiplied, so the search can only gain.
//!
//! Plain Rust with one order of operations, compiled per instruction set like every kernel: the same file gives the
//! same bits on every machine. Formats beyond these two are read ([`format`](crate::format)), never made.

use half::f16;

use crate::Error;
use crate::Isa;
use crate::format::WeightType;
use crate::math::ROUND_MAGIC;
use crate::simd::{Kernel, Simd, dispatch};

/// Weights that share a scale.
const GROUP: usize = 32;
/// Largest codes.
const CODE_MAX_8: f32 = 127.0;
const CODE_MAX_4: f32 = 15.0;
/// Code steps that the range of a group is first taken for: below 15 the ends stay inside, above they are cut off.
/// Wider or finer grids gained less than 0.1 % of the squared error on normal weights.
const STEPS: [f32; 8] = [13.0, 13.75, 14.5, 15.0, 15.5, 16.25, 17.0, 18.0];
/// Rounds of fitting the line to the best codes anew; most groups stand still after one or two.
const REFINEMENTS: usize = 3;

/// Quantises whole groups of 32 `values` to `to`, which is [`WeightType::Q8_0`] or [`WeightType::Q4_1`].
///
/// # Errors
/// [`Error::NotMade`] for another type, [`Error::IsaUnavailable`], [`Error::ColumnsNotBlocks`] and
/// [`Error::ByteLength`] for lengths that do not fit, and for a value that no f16 scale reaches [`Error::NotFinite`]
/// or [`Error::WeightTooLarge`]; `out` is then partly written.
pub fn quantize_weights(
    isa: Isa,
    to: WeightType,
    values: &[f32],
    out: &mut [u8],
) -> Result<(), Error> {
    if !matches!(to, WeightType::Q8_0 | WeightType::Q4_1) {
        return Err(Error::NotMade { ty: to.name() });
    }
    if !isa.is_available() {
        return Err(Error::IsaUnavailable { isa });
    }
    let expected = to.matrix_bytes(1, values.len())?;
    if out.len() != expected {
        return Err(Error::ByteLength {
            ty: to.name(),
            expected,
            actual: out.len(),
        });
    }
    // SAFETY: the instruction set was checked; the kernel is safe code over slices.
    unsafe { dispatch(isa, QuantizeGroups { to, values, out }) }
}

struct QuantizeGroups<'a> {
    to: WeightType,
    values: &'a [f32],
    out: &'a mut [u8],
}

impl Kernel for QuantizeGroups<'_> {
    type Output = Result<(), Error>;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> Result<(), Error> {
        let groups = self.values.as_chunks::<GROUP>().0;
        let blocks = self.out.chunks_exact_mut(self.to.block_bytes());
        for (group, (x, block)) in groups.iter().zip(blocks).enumerate() {
            let done = match self.to {
                WeightType::Q8_0 => quantize_8(x, block),
                _ => quantize_4(x, block),
            };
            if !done {
                return Err(refusal(x, group * GROUP));
            }
        }
        Ok(())
    }
}

/// Why a group has no block: its first weight that is no number, else its largest.
#[cold]
fn refusal(x: &[f32; GROUP], first: usize) -> Error {
    if let Some(at) = x.iter().position(|x| !x.is_finite()) {
        return Error::NotFinite { at: first + at };
    }
    let largest = (0..GROUP).fold(
        0,
        |best, i| {
            if x[i].abs() > x[best].abs() { i } else { best }
        },
    );
    Error::WeightTooLarge {
        at: first + largest,
    }
}

/// Whether the scale is a number; only then is the block written.
#[inline(always)]
fn quantize_8(x: &[f32; GROUP], block: &mut [u8]) -> bool {
    // On the bits, whose order is that of the magnitudes with NaN above all, so that none slips through.
    let bits = x.map(|x| x.to_bits() & 0x7fff_ffff);
    let largest = f32::from_bits(bits.into_iter().fold(0, u32::max));
    let mut scale = f16::from_f32(largest / CODE_MAX_8);
    if largest > scale.to_f32() * (CODE_MAX_8 + 0.5) {
        scale = above(scale);
    }
    if !largest.is_finite() || !scale.is_finite() {
        return false;
    }
    let scale_value = scale.to_f32();
    block[..2].copy_from_slice(&scale.to_le_bytes());
    for (code, x) in block[2..].iter_mut().zip(x) {
        // Zero by zero only where every weight is zero or too small for any scale.
        let ratio = if scale_value == 0.0 {
            0.0
        } else {
            x / scale_value
        };
        let bounded = ratio.clamp(-CODE_MAX_8, CODE_MAX_8);
        // Ties to even; the integer then stands in the low mantissa bits.
        *code = (bounded + ROUND_MAGIC).to_bits() as u8;
    }
    true
}

/// A line from codes to weights, both of its numbers exact in f16, and what it costs.
#[derive(Clone, Copy)]
struct Line {
    scale: f32,
    min: f32,
    codes: [f32; GROUP],
    /// Sum of the squared differences to the weights.
    error: f32,
}

/// As [`quantize_8`], for both of the line's numbers.
#[inline(always)]
fn quantize_4(x: &[f32; GROUP], block: &mut [u8]) -> bool {
    let low = fold(x, f32::min);
    let high = fold(x, f32::max);
    // `min` and `max` pass over a NaN; a sum does not, nor over an infinity.
    if !sum(x).is_finite() && x.iter().any(|x| !x.is_finite()) {
        return false;
    }
    let min = at_or_below(low);
    let scale = at_or_above((high - min.to_f32()) / CODE_MAX_4);
    if !min.is_finite() || !scale.is_finite() {
        return false;
    }
    let mut best = line(x, scale.to_f32(), min.to_f32());
    let range = high - low;
    let offsets = x.map(|x| x - low);
    let total = sum(&offsets);
    for steps in STEPS {
        let inverse = steps / range;
        if inverse.is_finite() {
            let codes = offsets.map(|offset| round_code(offset * inverse));
            if let Some(found) = fitted(x, low, &offsets, total, &codes)
                && found.error < best.error
            {
                best = found;
            }
        }
    }
    for _ in 0..REFINEMENTS {
        match fitted(x, low, &offsets, total, &best.codes) {
            Some(found) if found.error < best.error => best = found,
            _ => break,
        }
    }
    block[..2].copy_from_slice(&f16::from_f32(best.scale).to_le_bytes());
    block[2..4].copy_from_slice(&f16::from_f32(best.min).to_le_bytes());
    for (i, byte) in block[4..].iter_mut().enumerate() {
        *byte = best.codes[i] as u8 | (best.codes[i + GROUP / 2] as u8) << 4;
    }
    true
}

/// The line of least squares through `codes`, rounded to f16; `None` where there is no rising one.
#[inline(always)]
fn fitted(
    x: &[f32; GROUP],
    low: f32,
    offsets: &[f32; GROUP],
    total: f32,
    codes: &[f32; GROUP],
) -> Option<Line> {
    let n = GROUP as f32;
    let squares: [f32; GROUP] = std::array::from_fn(|i| codes[i] * codes[i]);
    let products: [f32; GROUP] = std::array::from_fn(|i| codes[i] * offsets[i]);
    let codes_sum = sum(codes);
    let spread = n * sum(&squares) - codes_sum * codes_sum;
    let scale = (n * sum(&products) - codes_sum * total) / spread;
    let min = (total - scale * codes_sum) / n + low;
    let (scale, min) = (f16::from_f32(scale), f16::from_f32(min));
    // A flat group gives 0 / 0, a tiny one a scale that rounds to 0.
    let usable = scale.to_f32() > 0.0 && scale.is_finite() && min.is_finite();
    usable.then(|| line(x, scale.to_f32(), min.to_f32()))
}

/// The nearest code of every weight on a line.
#[inline(always)]
fn line(x: &[f32; GROUP], scale: f32, min: f32) -> Line {
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    let codes = x.map(|x| round_code((x - min) * inverse));
    let squares: [f32; GROUP] = std::array::from_fn(|i| {
        let difference = scale * codes[i] + min - x[i];
        difference * difference
    });
    Line {
        scale,
        min,
        codes,
        error: sum(&squares),
    }
}

/// The nearest of 0..=15, ties to even.
#[inline(always)]
fn round_code(x: f32) -> f32 {
    x.clamp(0.0, CODE_MAX_4) + ROUND_MAGIC - ROUND_MAGIC
}

/// Always in this tree, so that lanes may be summed side by side.
#[inline(always)]
fn sum(x: &[f32; GROUP]) -> f32 {
    fold(x, |a, b| a + b)
}

/// Halves are laid over each other until one value is left.
#[inline(always)]
fn fold(x: &[f32; GROUP], of: impl Fn(f32, f32) -> f32) -> f32 {
    let a: [f32; 16] = std::array::from_fn(|i| of(x[i], x[i + 16]));
    let a: [f32; 8] = std::array::from_fn(|i| of(a[i], a[i + 8]));
    let a: [f32; 4] = std::array::from_fn(|i| of(a[i], a[i + 4]));
    of(of(a[0], a[2]), of(a[1], a[3]))
}

fn at_or_below(x: f32) -> f16 {
    let nearest = f16::from_f32(x);
    if nearest.to_f32() > x {
        -above(-nearest)
    } else {
        nearest
    }
}

fn at_or_above(x: f32) -> f16 {
    let nearest = f16::from_f32(x);
    if nearest.to_f32() < x {
        above(nearest)
    } else {
        nearest
    }
}

/// The next f16 upwards, infinity behind the largest.
fn above(x: f16) -> f16 {
    match x.to_bits() {
        // Both zeros.
        0 | 0x8000 => f16::from_bits(1),
        bits if bits & 0x8000 == 0 => f16::from_bits(bits + 1),
        bits => f16::from_bits(bits - 1),
    }
}
