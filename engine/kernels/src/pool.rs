//! The helper threads of one engine.
//!
//! One job at a time. A job is cut in parts; every thread begins with its own share of them and then takes what is left
//! of the others'. The caller works too, and waits only for helpers that have begun: where another process holds a
//! helper's core, the caller does the helper's parts itself instead of waiting for the scheduler. Nothing is allocated
//! or locked in a call. A thread that waits spins for [`SPIN`] (calls of one step follow each other within
//! microseconds) and then parks, so an idle engine costs nothing.
//!
//! ```text
//! gate = epoch (32 bits) | closed (1) | helpers inside (31)
//! caller:  write job, gate = (epoch + 1, open, 0), unpark sleepers, work, close the gate, wait until nobody is inside
//! helper:  wait for a new epoch, step in if the gate is open, work, step out, the last one unparks a sleeping caller
//! ```

use std::cell::{Cell, UnsafeCell};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::Error;

/// Longer than the gap between two kernels of a step, shorter than what another process would miss.
const SPIN: Duration = Duration::from_micros(20);

/// Parts of a job per thread, where there are enough items: small enough to even out a slow thread.
const PARTS_PER_THREAD: usize = 4;

const CLOSED: u64 = 1 << 31;
const INSIDE: u64 = CLOSED - 1;

/// Threads of one engine. Not `Sync`: there is one job slot, and one caller at a time.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    not_sync: std::marker::PhantomData<Cell<()>>,
}

type Job<'a> = dyn Fn(usize) + Sync + 'a;

/// Alone on its cache lines (two, because processors fetch pairs).
#[repr(align(128))]
#[derive(Default)]
struct Padded<T>(T);

struct Shared {
    gate: Padded<AtomicU64>,
    stop: AtomicBool,
    panicked: AtomicBool,
    caller_sleeps: AtomicBool,
    sleeping: Vec<AtomicBool>,
    /// Per thread, the next part of its share that nobody has taken.
    next: Vec<Padded<AtomicUsize>>,
    /// Written by the caller while the gate is closed and nobody is inside, read by helpers that are inside.
    slot: UnsafeCell<Slot>,
}

struct Slot {
    job: Option<*const Job<'static>>,
    caller: Thread,
}

// SAFETY: `slot` is handed over by the gate (released when it opens, acquired when a helper steps in) and back likewise
// (stepping out, and the caller's wait), so it is never written while another thread may read it. The job behind the
// pointer is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

impl Pool {
    /// Starts `helpers` threads; `core(i)` says where helper `i` is pinned.
    pub fn new(helpers: usize, core: impl Fn(usize) -> Option<usize>) -> Result<Pool, Error> {
        let shared = Arc::new(Shared {
            gate: Padded(AtomicU64::new(CLOSED)),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            caller_sleeps: AtomicBool::new(false),
            sleeping: (0..helpers).map(|_| AtomicBool::new(false)).collect(),
            next: (0..=helpers).map(|_| Padded::default()).collect(),
            slot: UnsafeCell::new(Slot {
                job: None,
                caller: thread::current(),
            }),
        });
        let mut pool = Pool {
            shared,
            helpers: Vec::new(),
            not_sync: std::marker::PhantomData,
        };
        let (tx, rx) = mpsc::channel();
        for helper in 0..helpers {
            let (shared, tx, core) = (Arc::clone(&pool.shared), tx.clone(), core(helper));
            let handle = thread::Builder::new()
                .name(format!("kernel-{}", helper + 1))
                .spawn(move || {
                    let pinned = core.map_or(Ok(()), pin_current_thread);
                    let ready = pinned.is_ok();
                    // The receiver is gone only where another helper failed first, and then `stop` is set.
                    let _ = tx.send(pinned);
                    if ready {
                        shared.help(helper);
                    }
                })
                .map_err(|error| Error::Thread {
                    reason: error.to_string(),
                })?;
            pool.helpers.push(handle);
        }
        for _ in 0..helpers {
            rx.recv().map_err(|error| Error::Thread {
                reason: error.to_string(),
            })??;
        }
        Ok(pool)
    }

    /// Threads, the caller's included.
    pub fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Runs `work(range)` for ranges that together are `0..items`, each once, on whatever threads are free.
    pub fn for_ranges(&self, items: usize, work: &(dyn Fn(Range<usize>) + Sync)) {
        let threads = self.threads();
        let parts = items.min(PARTS_PER_THREAD * threads);
        if threads == 1 || parts <= 1 {
            work(0..items);
            return;
        }
        let next = &self.shared.next;
        for (thread, next) in next.iter().enumerate() {
            // Nobody is inside, and opening the gate publishes it.
            next.0
                .store(share(parts, thread, threads).start, Ordering::Relaxed);
        }
        self.run(&|thread| {
            for owner in (thread..threads).chain(0..thread) {
                let end = share(parts, owner, threads).end;
                // A counter runs past its end at most once per thread and call.
                while next[owner].0.load(Ordering::Relaxed) < end {
                    let part = next[owner].0.fetch_add(1, Ordering::Relaxed);
                    if part >= end {
                        break;
                    }
                    work(share(items, part, parts));
                }
            }
        });
    }

    /// Runs `job(0)` here, and `job(i)` on each helper that steps in before it is over. Helpers may not come at all, so
    /// a job must share out its work as it goes, and `job(0)` must end only when none is left to begin.
    pub fn run(&self, job: &Job<'_>) {
        if self.helpers.is_empty() {
            job(0);
            return;
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes, and no helper touches the job once the gate is closed and nobody is
        // inside, which `Finish` sees to before this frame ends, by return or by panic.
        let erased: *const Job<'static> =
            unsafe { std::mem::transmute::<*const Job<'_>, *const Job<'static>>(job) };
        // SAFETY: the previous run closed the gate and waited, and `Pool` is not `Sync`, so nobody else uses the slot.
        unsafe {
            let slot = &mut *shared.slot.get();
            slot.job = Some(erased);
            if slot.caller.id() != thread::current().id() {
                slot.caller = thread::current();
            }
        }
        shared.open();
        for (handle, sleeping) in self.helpers.iter().zip(&shared.sleeping) {
            // Once per sleep: until the system gives it a core, a second call would be for nothing.
            if sleeping.load(Ordering::SeqCst) && sleeping.swap(false, Ordering::SeqCst) {
                handle.thread().unpark();
            }
        }
        let finish = Finish { shared };
        job(0);
        drop(finish);
        assert!(
            !shared.panicked.load(Ordering::Relaxed),
            "a kernel panicked on a helper thread"
        );
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.open();
        for handle in self.helpers.drain(..) {
            handle.thread().unpark();
            // A helper cannot panic outside of a job, and panics of jobs are caught.
            let _ = handle.join();
        }
    }
}

/// Closes the gate and waits for the helpers inside, when dropped.
struct Finish<'a> {
    shared: &'a Shared,
}

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        let shared = self.shared;
        let inside = || shared.gate.0.load(Ordering::SeqCst) & INSIDE;
        if shared.gate.0.fetch_or(CLOSED, Ordering::SeqCst) & INSIDE == 0
            || spin_until(|| inside() == 0)
        {
            return;
        }
        shared.caller_sleeps.store(true, Ordering::SeqCst);
        while inside() != 0 {
            thread::park();
        }
        shared.caller_sleeps.store(false, Ordering::Relaxed);
    }
}

impl Shared {
    /// Opens the gate for the next job. Sequentially consistent with the helpers' `sleeping`: either they see the new
    /// epoch or the caller sees them sleeping.
    fn open(&self) {
        let epoch = (self.gate.0.load(Ordering::Relaxed) >> 32) + 1;
        self.gate.0.store(epoch << 32, Ordering::SeqCst);
    }

    /// Steps in if the gate is still open for `epoch`.
    fn enter(&self, epoch: u64) -> bool {
        self.gate
            .0
            .try_update(Ordering::SeqCst, Ordering::Relaxed, |gate| {
                (gate >> 32 == epoch && gate & CLOSED == 0).then_some(gate + 1)
            })
            .is_ok()
    }

    fn help(&self, helper: usize) {
        let epoch = |order| self.gate.0.load(order) >> 32;
        let mut seen = 0;
        loop {
            if !spin_until(|| epoch(Ordering::Acquire) != seen) {
                loop {
                    self.sleeping[helper].store(true, Ordering::SeqCst);
                    if epoch(Ordering::SeqCst) != seen {
                        break;
                    }
                    thread::park();
                }
                self.sleeping[helper].store(false, Ordering::Relaxed);
            }
            seen = epoch(Ordering::Acquire);
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            if !self.enter(seen) {
                continue;
            }
            // SAFETY: we are inside, so the job was written before the gate opened, and the caller leaves the slot
            // alone until we step out.
            let (job, caller) = unsafe {
                let slot = &*self.slot.get();
                (slot.job, slot.caller.clone())
            };
            if let Some(job) = job {
                // SAFETY: `run` keeps the job alive until we step out.
                let job = unsafe { &*job };
                if catch_unwind(AssertUnwindSafe(|| job(helper + 1))).is_err() {
                    self.panicked.store(true, Ordering::Relaxed);
                }
            }
            let before = self.gate.0.fetch_sub(1, Ordering::SeqCst);
            if before & INSIDE == 1 && self.caller_sleeps.load(Ordering::SeqCst) {
                caller.unpark();
            }
        }
    }
}

/// The part of `0..items` that is one of `parts`: contiguous and as even as can be.
fn share(items: usize, part: usize, parts: usize) -> Range<usize> {
    items * part / parts..items * (part + 1) / parts
}

/// Whether the condition came true within [`SPIN`].
fn spin_until(condition: impl Fn() -> bool) -> bool {
    // The clock is read every 64 rounds, about a microsecond.
    let mut deadline = None;
    loop {
        for _ in 0..64 {
            if condition() {
                return true;
            }
            std::hint::spin_loop();
        }
        let now = Instant::now();
        if now > *deadline.get_or_insert(now + SPIN) {
            return false;
        }
    }
}

#[cfg(target_os = "linux")]
pub(crate) fn pin_current_thread(core: usize) -> Result<(), Error> {
    use rustix::thread::{CpuSet, sched_setaffinity};
    if core >= CpuSet::MAX_CPU {
        return Err(Error::Pin {
            core,
            reason: "no such core".to_owned(),
        });
    }
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set).map_err(|error| Error::Pin {
        core,
        reason: error.to_string(),
    })
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn pin_current_thread(core: usize) -> Result<(), Error> {
    Err(Error::Pin {
        core,
        reason: "pinning is only known on Linux".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn every_item_is_worked_on_once_whether_helpers_spin_or_sleep() {
        let pool = Pool::new(3, |_| None).unwrap();
        for round in 0..2000 {
            let items = round % 37;
            let calls: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
            pool.for_ranges(items, &|range| {
                for call in &calls[range] {
                    call.fetch_add(1, Ordering::Relaxed);
                }
            });
            assert!(calls.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            if round % 500 == 0 {
                // Long enough for helpers to park; correctness does not depend on it.
                thread::sleep(SPIN * 20);
            }
        }
    }

    #[test]
    fn the_caller_does_not_wait_for_a_helper_that_does_not_come() {
        let pool = Pool::new(1, |_| None).unwrap();
        // The only helper leaves for good.
        pool.shared.stop.store(true, Ordering::SeqCst);
        pool.shared.open();
        pool.helpers[0].thread().unpark();
        while !pool.helpers[0].is_finished() {
            thread::yield_now();
        }
        let done = AtomicUsize::new(0);
        pool.for_ranges(100, &|range| {
            done.fetch_add(range.len(), Ordering::Relaxed);
        });
        assert_eq!(done.load(Ordering::Relaxed), 100);
    }

    #[test]
    fn a_panic_on_a_helper_reaches_the_caller_after_all_have_finished() {
        let pool = Pool::new(1, |_| None).unwrap();
        let came = AtomicBool::new(false);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            pool.run(&|i| {
                if i == 0 {
                    while !came.load(Ordering::SeqCst) {
                        thread::yield_now();
                    }
                } else {
                    came.store(true, Ordering::SeqCst);
                    panic!("broken on purpose");
                }
            });
        }));
        assert!(outcome.is_err());
    }

    #[test]
    fn refuses_a_core_that_does_not_exist() {
        assert!(matches!(
            Pool::new(1, |_| Some(1_000_000)),
            Err(Error::Pin {
                core: 1_000_000,
                ..
            })
        ));
    }
}
