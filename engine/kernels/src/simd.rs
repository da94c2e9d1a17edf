//! The small set of vector operations the kernels are written over, and the one place that picks the instruction set.
//!
//! Every vector has 16 f32 lanes on every instruction set (two registers on AVX2, an array in plain Rust), so one
//! algorithm serves all and its order of operations cannot differ. Each operation is one IEEE operation per lane, or
//! exact integer arithmetic.
//!
//! A kernel is a struct with its operands and [`Kernel::run`]; [`dispatch`] compiles it once per instruction set. Code
//! below `run` is `inline(always)`, because only what is inlined into the `target_feature` function may use its
//! instructions; loops in plain Rust are vectorised there as well, with the same bits, since the compiler may neither
//! reorder nor fuse float operations.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

use crate::Isa;
use crate::math::LANES;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
pub(crate) use scalar::Scalar;

/// Vector operations of one instruction set.
///
/// # Safety
/// For every function: the processor has the instruction set ([`dispatch`] is called with an [`Isa`] that was checked
/// when `Kernels` was made), and pointers are valid for what is read or written: 16 elements unless said otherwise, at
/// any alignment.
pub(crate) trait Simd: Copy {
    /// Vector registers, for 16 lanes or fewer.
    const REGISTERS: usize;
    /// Attention queries whose accumulators the registers hold.
    const QUERIES: usize;
    /// 16 f32.
    type F: Copy;
    /// 16 i32.
    type I: Copy;
    /// 64 unsigned codes: 4 consecutive columns of each of 16 rows.
    type B: Copy;

    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn load(from: *const f32) -> Self::F;
    unsafe fn load_f16(from: *const u16) -> Self::F;
    unsafe fn load_bf16(from: *const u16) -> Self::F;
    unsafe fn store(to: *mut f32, x: Self::F);
    /// Each lane rounded to the nearest f16, ties to even.
    unsafe fn to_f16(x: Self::F) -> [u16; LANES];
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a > b ? a : b`, so `b` where either is NaN.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    /// `a < b ? a : b`, so `b` where either is NaN.
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    /// Lanes `from..to` of `x`, the others of `other`.
    unsafe fn keep(from: i32, to: i32, x: Self::F, other: Self::F) -> Self::F;

    /// `a > b ? x : y`, so `y` where `a` or `b` is NaN.
    unsafe fn pick(a: Self::F, b: Self::F, x: Self::I, y: Self::I) -> Self::I;

    unsafe fn splat_i(x: i32) -> Self::I;
    /// Exact below 2^24.
    unsafe fn to_float(x: Self::I) -> Self::F;
    unsafe fn bits(x: Self::F) -> Self::I;
    unsafe fn from_bits(x: Self::I) -> Self::F;
    unsafe fn add_i(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn sub_i(a: Self::I, b: Self::I) -> Self::I;
    /// `x >> 1` keeping the sign.
    unsafe fn half_i(x: Self::I) -> Self::I;
    /// `x << 23`.
    unsafe fn to_exponent(x: Self::I) -> Self::I;

    /// `x * 2^n`, rounded once, for `x` in 0.5..2 and an integer `n` in -250..=250, given both ways.
    #[inline(always)]
    unsafe fn times_power_of_two(x: Self::F, n: Self::I, _n_float: Self::F) -> Self::F {
        // SAFETY: the trait's contract.
        unsafe {
            let power = |n| Self::from_bits(Self::to_exponent(Self::add_i(n, Self::splat_i(127))));
            // In two steps, the first exact, so that results below the normal range and infinity come out by themselves.
            let half = Self::half_i(n);
            Self::mul(Self::mul(x, power(half)), power(Self::sub_i(n, half)))
        }
    }

    /// Writes bits 7 to 13 of each lane to `high` and bits 0 to 6 to `low`: 64 bytes each. Lane `4 * i + j` of `x[n]` goes
    /// to byte `16 * i + 4 * n + j`, so that four neighbours stay together and no half of a register is crossed.
    unsafe fn store_halves(high: *mut i8, low: *mut i8, x: [Self::I; 4]);

    /// Reads 64 bytes.
    unsafe fn load_codes(from: *const u8) -> Self::B;
    unsafe fn low_nibbles(x: Self::B) -> Self::B;
    unsafe fn high_nibbles(x: Self::B) -> Self::B;
    /// 16-bit lanes; bits that cross from one byte to the next are for [`or_bits`](Self::or_bits) or
    /// [`keep_bits`](Self::keep_bits) to drop.
    unsafe fn shift_left(x: Self::B, by: u32) -> Self::B;
    /// As [`shift_left`](Self::shift_left).
    unsafe fn shift_right(x: Self::B, by: u32) -> Self::B;
    /// `x | (bits & mask)`, the same mask for every byte, with no bit that another byte's bits reach.
    unsafe fn or_bits(x: Self::B, bits: Self::B, mask: u8) -> Self::B;
    /// `x & mask`, as [`or_bits`](Self::or_bits).
    unsafe fn keep_bits(x: Self::B, mask: u8) -> Self::B;
    /// `table[x]` of every byte; all are below 16.
    unsafe fn look_up(table: [u8; 16], x: Self::B) -> Self::B;
    /// Reads 16 bytes; their low nibbles and their high ones.
    unsafe fn load_nibbles(from: *const u8) -> (Self::F, Self::F);
    /// Reads 16 signed bytes.
    unsafe fn load_i8(from: *const i8) -> Self::F;
    /// Reads 4 signed codes, the same for all lanes.
    unsafe fn broadcast_codes(from: *const i8) -> Self::I;
    /// Lane r: `acc[r] + sum over i in 0..4 of w[4r + i] * x[i]`, exact. Without `WIDE` the codes `w` are below 128.
    /// Codes `x` are in `-127..=127`.
    unsafe fn dot<const WIDE: bool>(acc: Self::I, w: Self::B, x: Self::I) -> Self::I;

    /// The largest of `abs(a)` and `abs(b)` over all lanes, compared as bits: NaN counts as larger than infinity.
    unsafe fn max_abs(a: Self::F, b: Self::F) -> f32;
    /// The low byte of each lane.
    unsafe fn low_bytes(x: Self::I) -> [i8; LANES];
    /// Sums of the 16 codes in each quarter of 64.
    unsafe fn quarter_sums(codes: *const i8) -> [i32; 4];
    /// Asks for a cache line to be brought into the L2 cache. Any address is allowed.
    unsafe fn prefetch(at: *const u8);

    /// [`math::tree_sum`](crate::math::tree_sum) of the lanes.
    #[inline(always)]
    unsafe fn tree_sum(x: Self::F) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { crate::math::tree_sum(&Self::to_array(x)) }
    }

    /// [`math::tree_max`](crate::math::tree_max) of the lanes.
    #[inline(always)]
    unsafe fn tree_max(x: Self::F) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { crate::math::tree_max(&Self::to_array(x)) }
    }

    /// The lanes in memory.
    #[inline(always)]
    unsafe fn to_array(x: Self::F) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        // SAFETY: `lanes` has 16 elements.
        unsafe { Self::store(lanes.as_mut_ptr(), x) };
        lanes
    }
}

/// Asks for the cache line at an address, which need not be valid, to come to the first-level cache, or with `FAR` to the
/// second. Never changes a result.
#[inline(always)]
pub(crate) fn prefetch<const FAR: bool>(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch accesses nothing, and SSE is part of the architecture.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        if FAR {
            _mm_prefetch::<_MM_HINT_T1>(at.cast());
        } else {
            _mm_prefetch::<_MM_HINT_T0>(at.cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// How a float is stored, in packed weights or in a KV pool.
pub(crate) trait Element {
    const BYTES: usize;
    /// One element in memory.
    type Stored: Copy;
    /// # Safety
    /// 16 elements are readable and the processor has `S`'s instruction set.
    unsafe fn load<S: Simd>(from: *const u8) -> S::F;
    /// Rounds to nearest, ties to even.
    ///
    /// # Safety
    /// The processor has `S`'s instruction set.
    unsafe fn narrow<S: Simd>(x: S::F) -> [Self::Stored; LANES];
}

pub(crate) struct Float32;
pub(crate) struct Float16;
pub(crate) struct BFloat16;

impl Element for Float32 {
    const BYTES: usize = 4;
    type Stored = f32;
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { S::load(from.cast()) }
    }
    #[inline(always)]
    unsafe fn narrow<S: Simd>(x: S::F) -> [f32; LANES] {
        // SAFETY: the caller's promise.
        unsafe { S::to_array(x) }
    }
}

impl Element for Float16 {
    const BYTES: usize = 2;
    type Stored = u16;
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { S::load_f16(from.cast()) }
    }
    #[inline(always)]
    unsafe fn narrow<S: Simd>(x: S::F) -> [u16; LANES] {
        // SAFETY: the caller's promise.
        unsafe { S::to_f16(x) }
    }
}

impl Element for BFloat16 {
    const BYTES: usize = 2;
    type Stored = u16;
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const u8) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { S::load_bf16(from.cast()) }
    }
    #[inline(always)]
    unsafe fn narrow<S: Simd>(x: S::F) -> [u16; LANES] {
        // SAFETY: the caller's promise.
        unsafe { S::to_array(x).map(|x| half::bf16::from_f32(x).to_bits()) }
    }
}

/// Operands of a kernel, and what it does with them.
pub(crate) trait Kernel {
    type Output;

    /// # Safety
    /// The processor has `S`'s instruction set. Implementations are `inline(always)`.
    unsafe fn run<S: Simd>(self) -> Self::Output;
}

/// Runs a kernel on an instruction set this processor has.
///
/// # Safety
/// `isa.is_available()`, and whatever the kernel's operands demand.
#[inline(always)]
pub(crate) unsafe fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    match isa {
        // SAFETY: the caller's promise, in all three.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { run_avx512(kernel) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { run_avx2(kernel) },
        // SAFETY: as above.
        _ => unsafe { run_scalar(kernel) },
    }
}

/// # Safety
/// The processor has these features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(crate) unsafe fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller's promise.
    unsafe { kernel.run::<Avx512>() }
}

/// # Safety
/// The processor has these features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller's promise.
    unsafe { kernel.run::<Avx2>() }
}

/// # Safety
/// The kernel's own demands.
pub(crate) unsafe fn run_scalar<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: plain Rust needs no feature.
    unsafe { kernel.run::<Scalar>() }
}
