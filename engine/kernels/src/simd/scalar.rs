//! The vector operations in plain Rust: arrays of 16. Runs everywhere, and states what the others must compute.

use half::{bf16, f16};

use super::Simd;
use crate::math::LANES;

#[derive(Clone, Copy)]
pub(crate) struct Scalar;

#[inline(always)]
fn map<T: Copy, U>(a: [T; LANES], b: [T; LANES], f: impl Fn(T, T) -> U) -> [U; LANES] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Simd for Scalar {
    const REGISTERS: usize = 16;
    const QUERIES: usize = 1;
    type F = [f32; LANES];
    type I = [i32; LANES];
    type B = [u8; 64];

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        [x; LANES]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::F {
        // SAFETY: 16 elements are readable, by the trait's contract.
        unsafe { from.cast::<[f32; LANES]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self::F {
        // SAFETY: 16 elements are readable, by the trait's contract.
        let bits = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|b| f16::from_bits(b).to_f32())
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self::F {
        // SAFETY: 16 elements are readable, by the trait's contract.
        let bits = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|b| bf16::from_bits(b).to_f32())
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, x: Self::F) {
        // SAFETY: 16 elements are writable, by the trait's contract.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(x) }
    }

    #[inline(always)]
    unsafe fn to_f16(x: Self::F) -> [u16; LANES] {
        x.map(|x| f16::from_f32(x).to_bits())
    }

    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        map(a, b, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        map(a, b, |a, b| a - b)
    }

    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        map(a, b, |a, b| a * b)
    }

    #[inline(always)]
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F {
        map(a, b, |a, b| a / b)
    }

    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        map(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F {
        map(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    unsafe fn keep(from: i32, to: i32, x: Self::F, other: Self::F) -> Self::F {
        std::array::from_fn(|i| {
            if (from..to).contains(&(i as i32)) {
                x[i]
            } else {
                other[i]
            }
        })
    }

    #[inline(always)]
    unsafe fn pick(a: Self::F, b: Self::F, x: Self::I, y: Self::I) -> Self::I {
        std::array::from_fn(|i| if a[i] > b[i] { x[i] } else { y[i] })
    }

    #[inline(always)]
    unsafe fn splat_i(x: i32) -> Self::I {
        [x; LANES]
    }

    #[inline(always)]
    unsafe fn to_float(x: Self::I) -> Self::F {
        x.map(|x| x as f32)
    }

    #[inline(always)]
    unsafe fn bits(x: Self::F) -> Self::I {
        x.map(|x| x.to_bits() as i32)
    }

    #[inline(always)]
    unsafe fn from_bits(x: Self::I) -> Self::F {
        x.map(|x| f32::from_bits(x as u32))
    }

    #[inline(always)]
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I {
        map(a, b, i32::wrapping_add)
    }

    #[inline(always)]
    unsafe fn sub_i(a: Self::I, b: Self::I) -> Self::I {
        map(a, b, i32::wrapping_sub)
    }

    #[inline(always)]
    unsafe fn half_i(x: Self::I) -> Self::I {
        x.map(|x| x >> 1)
    }

    #[inline(always)]
    unsafe fn to_exponent(x: Self::I) -> Self::I {
        x.map(|x| x << 23)
    }

    #[inline(always)]
    unsafe fn store_halves(high: *mut i8, low: *mut i8, x: [Self::I; 4]) {
        for (n, x) in x.into_iter().enumerate() {
            for (lane, x) in x.into_iter().enumerate() {
                let at = lane / 4 * 16 + 4 * n + lane % 4;
                // SAFETY: 64 bytes each are writable, by the trait's contract.
                unsafe {
                    high.add(at).write((x >> 7 & 0x7f) as i8);
                    low.add(at).write((x & 0x7f) as i8);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn load_codes(from: *const u8) -> Self::B {
        // SAFETY: 64 bytes are readable, by the trait's contract.
        unsafe { from.cast::<[u8; 64]>().read() }
    }

    #[inline(always)]
    unsafe fn low_nibbles(x: Self::B) -> Self::B {
        x.map(|x| x & 15)
    }

    #[inline(always)]
    unsafe fn high_nibbles(x: Self::B) -> Self::B {
        x.map(|x| x >> 4)
    }

    #[inline(always)]
    unsafe fn shift_left(x: Self::B, by: u32) -> Self::B {
        x.map(|x| x << by)
    }

    #[inline(always)]
    unsafe fn shift_right(x: Self::B, by: u32) -> Self::B {
        x.map(|x| x >> by)
    }

    #[inline(always)]
    unsafe fn or_bits(x: Self::B, bits: Self::B, mask: u8) -> Self::B {
        std::array::from_fn(|i| x[i] | bits[i] & mask)
    }

    #[inline(always)]
    unsafe fn keep_bits(x: Self::B, mask: u8) -> Self::B {
        x.map(|x| x & mask)
    }

    #[inline(always)]
    unsafe fn look_up(table: [u8; 16], x: Self::B) -> Self::B {
        x.map(|x| table[usize::from(x & 15)])
    }

    #[inline(always)]
    unsafe fn load_nibbles(from: *const u8) -> (Self::F, Self::F) {
        // SAFETY: 16 bytes are readable, by the trait's contract.
        let bytes = unsafe { from.cast::<[u8; LANES]>().read() };
        (
            bytes.map(|byte| f32::from(byte & 15)),
            bytes.map(|byte| f32::from(byte >> 4)),
        )
    }

    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self::F {
        // SAFETY: 16 bytes are readable, by the trait's contract.
        unsafe { from.cast::<[i8; LANES]>().read() }.map(f32::from)
    }

    #[inline(always)]
    unsafe fn broadcast_codes(from: *const i8) -> Self::I {
        // SAFETY: 4 bytes are readable, by the trait's contract.
        let quad = unsafe { from.cast::<[u8; 4]>().read() };
        [i32::from_le_bytes(quad); LANES]
    }

    #[inline(always)]
    unsafe fn dot<const WIDE: bool>(mut acc: Self::I, w: Self::B, x: Self::I) -> Self::I {
        for (lane, acc) in acc.iter_mut().enumerate() {
            for (i, x) in x[lane].to_le_bytes().into_iter().enumerate() {
                *acc += i32::from(w[4 * lane + i]) * i32::from(x as i8);
            }
        }
        acc
    }

    #[inline(always)]
    unsafe fn max_abs(a: Self::F, b: Self::F) -> f32 {
        let bits = |x: f32| x.to_bits() & 0x7fff_ffff;
        let largest = a.into_iter().chain(b).map(bits).fold(0, u32::max);
        f32::from_bits(largest)
    }

    #[inline(always)]
    unsafe fn low_bytes(x: Self::I) -> [i8; LANES] {
        x.map(|x| x as i8)
    }

    #[inline(always)]
    unsafe fn quarter_sums(codes: *const i8) -> [i32; 4] {
        // SAFETY: 64 codes are readable, by the trait's contract.
        let quarters = unsafe { codes.cast::<[[i8; 16]; 4]>().read() };
        quarters.map(|quarter| quarter.into_iter().map(i32::from).sum())
    }

    #[inline(always)]
    unsafe fn prefetch(_at: *const u8) {}
}
