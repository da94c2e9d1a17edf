//! The quantised formats as the inner loops see them: constants of each, and how a group's scales and codes come out of
//! a packed tile (the layout is in `matrix`).

use crate::WeightType;
use crate::matrix::{LANES, block_k_factors, block_k_scales, group_scale_codes, has_half_groups};
use crate::simd::Simd;

/// What differs between quantised formats once packed.
pub(super) trait Format {
    const TYPE: WeightType;
    /// Bits of a code.
    const BITS: usize = Self::TYPE.code_bits();
    /// What codes are looked up in before they are multiplied.
    const TABLE: Option<[u8; 16]> = Self::TYPE.table();
    /// What is multiplied may be 128 or more.
    const WIDE: bool = Self::TYPE.zero_point() >= 128;
    /// A minimum per group is added.
    const AFFINE: bool = Self::TYPE.is_affine();
    /// Scales are codes times a factor per 256 columns.
    const SCALE_CODES: bool = Self::TYPE.has_scale_codes();
    /// Weights have a scale per 16 columns, not 32.
    const HALF_GROUPS: bool = has_half_groups(Self::TYPE);
}

macro_rules! formats {
    ($($name:ident)*) => {
        $(pub(super) struct $name;
        impl Format for $name {
            const TYPE: WeightType = WeightType::$name;
        })*
    };
}

formats! { Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2K Q3K Q4K Q5K Q6K IQ4NL IQ4XS MXFP4 }

/// A group's scale and minimum, or those of its two halves. What a format does not have is never read.
#[derive(Clone, Copy)]
pub(super) struct Scales<S: Simd> {
    pub scales: [S::F; 2],
    pub mins: [S::F; 2],
}

/// # Safety
/// `tile` is a tile of the format with more than `g` groups, and the processor has `S`'s instruction set.
#[inline(always)]
pub(super) unsafe fn load_scales<S: Simd, F: Format>(tile: *const u8, g: usize) -> Scales<S> {
    // SAFETY: the layout in `matrix`: factors in front of the codes of 8 groups, or one or two rows of scales.
    unsafe {
        if !F::SCALE_CODES {
            let at = tile.add(g * LANES * if F::AFFINE { 4 } else { 2 });
            let scale = if const { F::TYPE.has_wide_scales() } {
                S::load_bf16(at.cast())
            } else {
                S::load_f16(at.cast())
            };
            let min = if F::AFFINE {
                S::load_f16(at.add(2 * LANES).cast())
            } else {
                scale
            };
            return Scales {
                scales: [scale; 2],
                mins: [min; 2],
            };
        }
        let block = tile.add(g / 8 * const { block_k_scales(F::TYPE) });
        let at = block
            .add(const { block_k_factors(F::TYPE) } + g % 8 * const { group_scale_codes(F::TYPE) });
        let factor = S::load_f16(block.cast());
        if !F::AFFINE {
            let first = S::mul(factor, S::load_i8(at.cast()));
            let second = if F::HALF_GROUPS {
                S::mul(factor, S::load_i8(at.add(LANES).cast()))
            } else {
                first
            };
            return Scales {
                scales: [first, second],
                mins: [first; 2],
            };
        }
        let min_factor = S::load_f16(block.add(2 * LANES).cast());
        if F::HALF_GROUPS {
            let (first, first_min) = S::load_nibbles(at);
            let (second, second_min) = S::load_nibbles(at.add(LANES));
            return Scales {
                scales: [S::mul(factor, first), S::mul(factor, second)],
                mins: [
                    S::mul(min_factor, first_min),
                    S::mul(min_factor, second_min),
                ],
            };
        }
        Scales {
            scales: [S::mul(factor, S::load_i8(at.cast())); 2],
            mins: [S::mul(min_factor, S::load_i8(at.add(LANES).cast())); 2],
        }
    }
}

/// The codes of four columns: line 0 to 7 of a group.
///
/// # Safety
/// `group` is a group's codes in the format, and the processor has `S`'s instruction set.
#[inline(always)]
pub(super) unsafe fn load_line<S: Simd, F: Format>(group: *const u8, line: usize) -> S::B {
    // SAFETY: the layout in `matrix`.
    unsafe {
        if F::BITS == 8 {
            return S::load_codes(group.add(64 * line));
        }
        if F::BITS < 4 {
            let fields = S::load_codes(group.add(64 * (line / 4)));
            let low = S::keep_bits(S::shift_right(fields, line as u32 % 4 * 2), 3);
            if F::BITS == 2 {
                return low;
            }
            // Moves the bit to position 2.
            let bits = S::load_codes(group.add(128));
            return if line <= 2 {
                S::or_bits(low, S::shift_left(bits, 2 - line as u32), 4)
            } else {
                S::or_bits(low, S::shift_right(bits, line as u32 - 2), 4)
            };
        }
        let both = S::load_codes(group.add(64 * (line % 4)));
        let low = if line < 4 {
            S::low_nibbles(both)
        } else {
            S::high_nibbles(both)
        };
        // Moves the bits to position 4.
        let (plane, at, mask) = match F::BITS {
            5 => (0, line, 0x10),
            6 => (line / 4, line % 4 * 2, 0x30),
            _ => {
                return match const { F::TABLE } {
                    Some(table) => S::look_up(table, low),
                    None => low,
                };
            }
        };
        let bits = S::load_codes(group.add(256 + 64 * plane));
        if at <= 4 {
            S::or_bits(low, S::shift_left(bits, 4 - at as u32), mask)
        } else {
            S::or_bits(low, S::shift_right(bits, at as u32 - 4), mask)
        }
    }
}
