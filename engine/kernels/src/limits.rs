//! What this machine can do at best: the ceilings that kernels are measured against.
//!
//! ```text
//! int8   a loop of nothing but the kernels' integer dot product, all operands in registers
//! f32    the same of fused multiply-adds
//! f16    the same of f16 multiply-adds, where the processor has them
//! read   every thread reads its own part of a working set, front to back, again and again
//! ```
//!
//! A ceiling is the best of several rounds, since noise only ever slows a loop down; a
//! round takes as long as its slowest thread. Threads are the meter's own, one per thread
//! of the engine that is to be judged and on the same cores, so that a figure says what
//! these threads together could do.
//!
//! Read rates depend on the working set: what fits a cache is read from there. Hence a
//! rate per size, on huge pages, as weights and KV have them.
//!
//! This file judges nothing: which kernel reaches what share is its caller's question.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::pool::pin_current_thread;
use crate::simd::{Kernel, Simd, dispatch};
use crate::{Error, HugePages, Isa};

/// A round shorter than this says more about threads waking up than about the loop.
const ROUND: Duration = Duration::from_millis(3);
const ROUNDS_MIN: usize = 3;

/// What the arithmetic units do at best, in operations per second, a multiply-add counting 2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ComputeLimits {
    pub int8_ops_per_second: f64,
    pub f32_ops_per_second: f64,
    /// `None` where f16 is only a storage format.
    pub f16_ops_per_second: Option<f64>,
}

/// How fast a working set of some size is read at best.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReadLimit {
    pub bytes: usize,
    pub bytes_per_second: f64,
}

/// The read rate at a working set of `bytes`, between those of the two sizes around it.
/// `limits` ascend in size; without any the rate is 0.
pub fn read_rate_at(limits: &[ReadLimit], bytes: f64) -> f64 {
    let above = limits.iter().position(|limit| limit.bytes as f64 >= bytes);
    match above {
        None => limits.last().map_or(0.0, |limit| limit.bytes_per_second),
        Some(0) => limits[0].bytes_per_second,
        Some(at) => {
            // Caches end where sizes double, so between two sizes their logarithm counts.
            let (low, high) = (&limits[at - 1], &limits[at]);
            let share =
                (bytes / low.bytes as f64).ln() / (high.bytes as f64 / low.bytes as f64).ln();
            low.bytes_per_second + share * (high.bytes_per_second - low.bytes_per_second)
        }
    }
}

/// Measures the limits of some threads.
#[derive(Clone, Debug)]
pub struct LimitMeter {
    isa: Isa,
    threads: usize,
    cores: Vec<usize>,
    /// What one figure may take, the touching of its memory aside.
    budget: Duration,
}

impl LimitMeter {
    /// A meter of `threads` threads. `cores` pins them, one each, or is empty. `budget` is
    /// about what each figure takes: 15 ms give a figure within some percent, 100 ms a good one.
    ///
    /// # Errors
    /// [`Error::IsaUnavailable`], [`Error::NoThreads`].
    pub fn new(
        isa: Isa,
        threads: usize,
        cores: &[usize],
        budget: Duration,
    ) -> Result<LimitMeter, Error> {
        if !isa.is_available() {
            return Err(Error::IsaUnavailable { isa });
        }
        if threads == 0 {
            return Err(Error::NoThreads);
        }
        Ok(LimitMeter {
            isa,
            threads,
            cores: cores.to_vec(),
            budget,
        })
    }

    /// Measures the arithmetic units.
    ///
    /// # Errors
    /// [`Error::Thread`], [`Error::Pin`].
    pub fn compute(&self) -> Result<ComputeLimits, Error> {
        let isa = self.isa;
        // Enough chains to hide an instruction's latency, no more than the registers hold.
        let wide = isa == Isa::Avx512;
        let chains = if wide { 12 } else { 4 };
        let int8 = self.rate(chains * DOT_OPS, &|passes| {
            // SAFETY: the instruction set was checked by `new`.
            unsafe {
                if wide {
                    dispatch(isa, Dots::<12> { passes });
                } else {
                    dispatch(isa, Dots::<4> { passes });
                }
            }
        })?;
        let f32 = self.rate(chains * FMA_OPS, &|passes| {
            // SAFETY: the instruction set was checked by `new`.
            unsafe {
                if wide {
                    dispatch(isa, Fmas::<12> { passes });
                } else {
                    dispatch(isa, Fmas::<4> { passes });
                }
            }
        })?;
        Ok(ComputeLimits {
            int8_ops_per_second: int8,
            f32_ops_per_second: f32,
            f16_ops_per_second: self.f16()?,
        })
    }

    #[cfg(target_arch = "x86_64")]
    fn f16(&self) -> Result<Option<f64>, Error> {
        if self.isa != Isa::Avx512 || !is_x86_feature_detected!("avx512fp16") {
            return Ok(None);
        }
        // SAFETY: the feature was just seen.
        let f16 = self.rate(12 * F16_OPS, &|passes| unsafe { f16_fmas(passes) })?;
        Ok(Some(f16))
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn f16(&self) -> Result<Option<f64>, Error> {
        Ok(None)
    }

    /// Measures reading working sets of these sizes, in bytes over all threads. Takes
    /// memory of the largest size while it runs.
    ///
    /// # Errors
    /// [`Error::Thread`], [`Error::Pin`], [`Error::Memory`].
    pub fn read(&self, sizes: &[usize]) -> Result<Vec<ReadLimit>, Error> {
        let part = |bytes: usize| (bytes / self.threads).next_multiple_of(READ_STEP);
        let largest = part(sizes.iter().copied().max().unwrap_or(0)).max(READ_STEP);
        let bytes = largest * self.threads;
        let memory = HugePages::map(bytes).map_err(|error| Error::memory(bytes, &error))?;
        let own = |thread: usize| Part::of(&memory, thread * largest);
        // Each thread touches its own part first, which therefore lies near it.
        self.timed(1, &|thread| own(thread).touch(largest))?;
        sizes
            .iter()
            .map(|bytes| {
                let part = part(*bytes).max(READ_STEP);
                let isa = self.isa;
                let pass = |thread: usize, passes: usize| {
                    for _ in 0..passes {
                        let from = own(thread).0;
                        // SAFETY: the instruction set was checked by `new`; `part` bytes from here are this
                        // thread's and lie in the memory, which outlives the call.
                        black_box(unsafe { dispatch(isa, Read { from, bytes: part }) });
                    }
                };
                // The second time is the rate at which the caches are what they will be.
                let _ = self.timed(1, &|thread| pass(thread, 1))?;
                let once = self.timed(1, &|thread| pass(thread, 1))?;
                let passes = (ROUND.as_secs_f64() / once).ceil().clamp(1.0, 1e6) as usize;
                let rounds = self.rounds(once * passes as f64);
                let seconds = self.timed(rounds, &|thread| pass(thread, passes))?;
                Ok(ReadLimit {
                    bytes: *bytes,
                    bytes_per_second: (part * self.threads * passes) as f64 / seconds,
                })
            })
            .collect()
    }

    fn rounds(&self, seconds: f64) -> usize {
        ((self.budget.as_secs_f64() / seconds) as usize).clamp(ROUNDS_MIN, 1000)
    }

    /// Operations per second over all threads of a loop that does `ops` in a pass.
    fn rate(&self, ops: usize, run: &(dyn Fn(usize) + Sync)) -> Result<f64, Error> {
        let probe = 1000;
        let once = self.timed(2, &|_| run(probe))? / probe as f64;
        let passes = (ROUND.as_secs_f64() / once).ceil().clamp(1.0, 1e9) as usize;
        let rounds = self.rounds(once * passes as f64);
        let seconds = self.timed(rounds, &|_| run(passes))?;
        Ok((ops * passes * self.threads) as f64 / seconds)
    }

    /// Runs `work(thread)` on every thread at once, `rounds` times; seconds of the best
    /// round, which takes as long as its slowest thread.
    fn timed(&self, rounds: usize, work: &(dyn Fn(usize) + Sync)) -> Result<f64, Error> {
        let gate = Gate::new(self.threads);
        let turns = |thread: usize| -> Result<Vec<f64>, Error> {
            // Before the first turn, so that no thread is timed on a core it leaves.
            if let Some(core) = self.cores.get(thread) {
                pin_current_thread(*core).inspect_err(|_| gate.give_up())?;
            }
            let mut times = Vec::with_capacity(rounds);
            for round in 1..=rounds {
                if !gate.pass(round) {
                    break;
                }
                let start = Instant::now();
                work(thread);
                times.push(start.elapsed().as_secs_f64());
            }
            Ok(times)
        };
        let turns = &turns;
        let times: Vec<Vec<f64>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads)
                .map(|thread| {
                    std::thread::Builder::new()
                        .name(format!("limit-{thread}"))
                        .spawn_scoped(scope, move || turns(thread))
                        .inspect_err(|_| gate.give_up())
                        .map_err(|error| Error::Thread {
                            reason: error.to_string(),
                        })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread?.join().expect("a measuring loop does not panic"))
                .collect::<Result<_, Error>>()
        })?;
        let round = |round: usize| times.iter().map(|times| times[round]).fold(0.0, f64::max);
        Ok((0..rounds).map(round).fold(f64::INFINITY, f64::min))
    }
}

/// Where threads wait for each other before a turn. Unlike a barrier it can be given up,
/// so that a thread that could not be started leaves nobody waiting.
struct Gate {
    threads: usize,
    arrivals: AtomicUsize,
    given_up: AtomicBool,
}

impl Gate {
    fn new(threads: usize) -> Gate {
        Gate {
            threads,
            arrivals: AtomicUsize::new(0),
            given_up: AtomicBool::new(false),
        }
    }

    /// Waits until all threads have come to turn `round`, counted from 1; whether to take it.
    fn pass(&self, round: usize) -> bool {
        self.arrivals.fetch_add(1, Ordering::AcqRel);
        while self.arrivals.load(Ordering::Acquire) < round * self.threads {
            if self.given_up.load(Ordering::Relaxed) {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
    }
}

/// Operations of one dot product of vectors, one multiply-add of f32 and one of f16.
const DOT_OPS: usize = 128;
const FMA_OPS: usize = 32;
#[cfg(target_arch = "x86_64")]
const F16_OPS: usize = 64;

/// Codes that change from pass to pass, lest the compiler multiply instead of adding.
static CODES: [u8; 1024] = [3; 1024];

/// `CHAINS` independent sums of integer dot products.
struct Dots<const CHAINS: usize> {
    passes: usize,
}

impl<const CHAINS: usize> Kernel for Dots<CHAINS> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let codes = black_box(&CODES);
        // SAFETY: the caller's promise; the codes are 16 vectors of 64 bytes.
        unsafe {
            // One operand per chain: products that chains share would be computed once.
            let xs: [i32; CHAINS] =
                black_box(std::array::from_fn(|chain| 0x0102_0304 + chain as i32));
            let xs = xs.map(|x| S::splat_i(x));
            let mut sums = [S::splat_i(0); CHAINS];
            for pass in 0..self.passes {
                let w = S::load_codes(codes.as_ptr().add(pass % 16 * 64));
                for (sum, x) in sums.iter_mut().zip(xs) {
                    *sum = S::dot::<false>(*sum, w, x);
                }
            }
            black_box(sums);
        }
    }
}

/// `CHAINS` independent sums of f32 multiply-adds.
struct Fmas<const CHAINS: usize> {
    passes: usize,
}

impl<const CHAINS: usize> Kernel for Fmas<CHAINS> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: the caller's promise.
        unsafe {
            let (a, b) = (S::splat(black_box(0.5)), S::splat(black_box(1e-3)));
            let mut sums = [S::splat(0.0); CHAINS];
            for _ in 0..self.passes {
                for sum in &mut sums {
                    *sum = S::fma(*sum, a, b);
                }
            }
            black_box(sums);
        }
    }
}

/// Twelve independent sums of f16 multiply-adds. Not of the kernels' trait: none of them
/// computes in f16 yet.
///
/// # Safety
/// The processor has the feature.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512fp16")]
unsafe fn f16_fmas(passes: usize) {
    use std::arch::x86_64::*;
    // 0.5 and about 0.001.
    let vector = |bits: i16| _mm512_castsi512_ph(_mm512_set1_epi16(black_box(bits)));
    let (a, b) = (vector(0x3800), vector(0x1419));
    let mut sums = [vector(0); 12];
    for _ in 0..passes {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ph(*sum, a, b);
        }
    }
    black_box(sums);
}

/// Bytes read between two looks at the end.
const READ_STEP: usize = 1024;

/// Adds up `bytes` from `from` on, a multiple of [`READ_STEP`].
struct Read {
    from: *const u8,
    bytes: usize,
}

impl Kernel for Read {
    type Output = [f32; 16];

    #[inline(always)]
    unsafe fn run<S: Simd>(self) -> [f32; 16] {
        // SAFETY: the caller's promise; every step lies within the bytes.
        unsafe {
            let mut sums = [S::splat_i(0); 8];
            for step in (0..self.bytes).step_by(READ_STEP) {
                let from = self.from.add(step).cast::<f32>();
                for vector in 0..READ_STEP / 64 {
                    let x = S::bits(S::load(from.add(vector * 16)));
                    sums[vector % 8] = S::add_i(sums[vector % 8], x);
                }
            }
            let mut all = sums[0];
            for sum in &sums[1..] {
                all = S::add_i(all, *sum);
            }
            S::to_array(S::from_bits(all))
        }
    }
}

/// A thread's part of the memory.
struct Part(*mut u8);

impl Part {
    fn touch(&self, bytes: usize) {
        // SAFETY: the part has that many bytes, and its thread alone uses them.
        unsafe { self.0.write_bytes(1, bytes) };
    }
}

impl Part {
    fn of(memory: &HugePages, at: usize) -> Part {
        assert!(at < memory.len(), "part at `{at}`");
        // SAFETY: in bounds.
        Part(unsafe { memory.start().as_ptr().add(at) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BRIEF: Duration = Duration::from_millis(1);

    #[test]
    fn every_instruction_set_has_limits_above_zero() {
        for isa in Isa::available() {
            for threads in [1, 3] {
                let meter = LimitMeter::new(isa, threads, &[], BRIEF).unwrap();
                let limits = meter.compute().unwrap();
                let rates = [limits.int8_ops_per_second, limits.f32_ops_per_second];
                assert!(rates.iter().all(|rate| rate.is_finite() && *rate > 0.0));
                let read = meter.read(&[1, 100_000, 1 << 20]).unwrap();
                assert_eq!(read[1].bytes, 100_000);
                assert!(read.iter().all(|limit| limit.bytes_per_second > 0.0));
            }
        }
    }

    #[test]
    fn between_two_sizes_the_rate_is_between_theirs() {
        let limits = [(1 << 20, 100.0), (4 << 20, 60.0), (64 << 20, 20.0)].map(
            |(bytes, bytes_per_second)| ReadLimit {
                bytes,
                bytes_per_second,
            },
        );
        let at = |bytes: usize| read_rate_at(&limits, bytes as f64);
        assert_eq!([at(1), at(1 << 20), at(4 << 20)], [100.0, 100.0, 60.0]);
        assert!((at(2 << 20) - 80.0).abs() < 1e-9);
        assert!((at(16 << 20) - 40.0).abs() < 1e-9);
        assert_eq!([at(64 << 20), at(1 << 30)], [20.0, 20.0]);
        assert_eq!(read_rate_at(&[], 1e6), 0.0);
    }

    #[test]
    fn the_read_loop_sees_every_vector() {
        let memory: Vec<u32> = (0..2 * READ_STEP as u32 / 4).collect();
        let expected: Vec<u32> = (0..16)
            .map(|lane| memory.iter().skip(lane).step_by(16).sum())
            .collect();
        for isa in Isa::available() {
            let read = Read {
                from: memory.as_ptr().cast(),
                bytes: memory.len() * 4,
            };
            // SAFETY: the set is available and the memory that long.
            let sums = unsafe { dispatch(isa, read) };
            assert_eq!(sums.map(f32::to_bits).to_vec(), expected, "{isa}");
        }
    }

    #[test]
    fn a_meter_that_cannot_work_is_refused() {
        let none = LimitMeter::new(Isa::Scalar, 0, &[], BRIEF);
        assert!(matches!(none, Err(Error::NoThreads)));
        let meter = LimitMeter::new(Isa::Scalar, 2, &[0, 1_000_000], BRIEF).unwrap();
        assert!(matches!(meter.compute(), Err(Error::Pin { .. })));
    }
}
