//! The helper threads of one engine.
//!
//! One job at a time: every thread, the caller included, runs the same function with its own index, and the call
//! returns once all are done. Nothing is allocated or locked in a call. A thread that waits spins for
//! [`SPIN`] (calls of one step follow each other within microseconds) and then parks, so an idle engine costs nothing.
//!
//! ```text
//! caller:  write job, pending = helpers, epoch += 1, unpark sleepers, run job(0), wait for pending = 0
//! helper:  wait for a new epoch, run job(index), pending -= 1, the last one unparks a sleeping caller
//! ```

use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::Error;

/// Longer than the gap between two kernels of a step, shorter than what another process would miss.
const SPIN: Duration = Duration::from_micros(20);

/// Threads of one engine. Not `Sync`: there is one job slot, and one caller at a time.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
    not_sync: std::marker::PhantomData<Cell<()>>,
}

type Job<'a> = dyn Fn(usize) + Sync + 'a;

struct Shared {
    epoch: AtomicU32,
    /// Helpers that have not finished the current job.
    pending: AtomicU32,
    stop: AtomicBool,
    panicked: AtomicBool,
    caller_sleeps: AtomicBool,
    sleeping: Vec<AtomicBool>,
    /// Written by the caller while `pending` is 0, read by helpers between a new epoch and their decrement.
    slot: UnsafeCell<Slot>,
}

struct Slot {
    job: Option<*const Job<'static>>,
    caller: Thread,
}

// SAFETY: `slot` is handed over by `epoch` (release, acquire) and back by `pending` (likewise), so it is never written
// while another thread may read it. The job behind the pointer is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

impl Pool {
    /// Starts `helpers` threads; `core(i)` says where helper `i` is pinned.
    pub fn new(helpers: usize, core: impl Fn(usize) -> Option<usize>) -> Result<Pool, Error> {
        let shared = Arc::new(Shared {
            epoch: AtomicU32::new(0),
            pending: AtomicU32::new(0),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            caller_sleeps: AtomicBool::new(false),
            sleeping: (0..helpers).map(|_| AtomicBool::new(false)).collect(),
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

    /// Runs `job(i)` for every thread index `i`, index 0 here.
    pub fn run(&self, job: &Job<'_>) {
        if self.helpers.is_empty() {
            job(0);
            return;
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes, and no helper touches the job after `pending` reaches 0, which `Finish`
        // waits for before this frame ends, by return or by panic.
        let erased: *const Job<'static> =
            unsafe { std::mem::transmute::<*const Job<'_>, *const Job<'static>>(job) };
        // SAFETY: the previous run ended with `pending` 0, and `Pool` is not `Sync`, so nobody else uses the slot.
        unsafe {
            let slot = &mut *shared.slot.get();
            slot.job = Some(erased);
            if slot.caller.id() != thread::current().id() {
                slot.caller = thread::current();
            }
        }
        shared
            .pending
            .store(self.helpers.len() as u32, Ordering::Relaxed);
        // Sequentially consistent with the helpers' `sleeping`: either they see the epoch or we see them sleeping.
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        for (handle, sleeping) in self.helpers.iter().zip(&shared.sleeping) {
            if sleeping.load(Ordering::SeqCst) {
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
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        for handle in self.helpers.drain(..) {
            handle.thread().unpark();
            // A helper cannot panic outside of a job, and panics of jobs are caught.
            let _ = handle.join();
        }
    }
}

/// Waits for the helpers when dropped.
struct Finish<'a> {
    shared: &'a Shared,
}

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        let shared = self.shared;
        if spin_until(|| shared.pending.load(Ordering::Acquire) == 0) {
            return;
        }
        shared.caller_sleeps.store(true, Ordering::SeqCst);
        while shared.pending.load(Ordering::SeqCst) != 0 {
            thread::park();
        }
        shared.caller_sleeps.store(false, Ordering::Relaxed);
    }
}

impl Shared {
    fn help(&self, helper: usize) {
        let mut seen = 0;
        loop {
            if !spin_until(|| self.epoch.load(Ordering::Acquire) != seen) {
                self.sleeping[helper].store(true, Ordering::SeqCst);
                while self.epoch.load(Ordering::SeqCst) == seen {
                    thread::park();
                }
                self.sleeping[helper].store(false, Ordering::Relaxed);
            }
            // One epoch at a time: the next is not published before this job's `pending` is 0.
            seen = self.epoch.load(Ordering::Acquire);
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            // SAFETY: a new epoch without `stop` means a job was written before it, and the caller leaves the slot
            // alone until our decrement.
            let (job, caller) = unsafe {
                let slot = &*self.slot.get();
                (slot.job, slot.caller.clone())
            };
            if let Some(job) = job {
                // SAFETY: `run` keeps the job alive until our decrement.
                let job = unsafe { &*job };
                if catch_unwind(AssertUnwindSafe(|| job(helper + 1))).is_err() {
                    self.panicked.store(true, Ordering::Relaxed);
                }
            }
            if self.pending.fetch_sub(1, Ordering::SeqCst) == 1
                && self.caller_sleeps.load(Ordering::SeqCst)
            {
                caller.unpark();
            }
        }
    }
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
fn pin_current_thread(core: usize) -> Result<(), Error> {
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
fn pin_current_thread(core: usize) -> Result<(), Error> {
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
    fn runs_every_index_once_per_job_whether_helpers_spin_or_sleep() {
        let pool = Pool::new(3, |_| None).unwrap();
        for round in 0..2000 {
            let calls: [AtomicUsize; 4] = Default::default();
            pool.run(&|i| {
                calls[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(calls.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            if round % 500 == 0 {
                // Long enough for helpers to park; correctness does not depend on it.
                thread::sleep(SPIN * 20);
            }
        }
    }

    #[test]
    fn a_panic_on_a_helper_reaches_the_caller_after_all_have_finished() {
        let pool = Pool::new(1, |_| None).unwrap();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            pool.run(&|i| assert!(i == 0, "broken on purpose"));
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
