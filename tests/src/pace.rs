//! Time as the machine really ran.
//!
//! A bound such as "within 50 ms" is about the code, not about a machine that stood
//! still meanwhile or was given to others. A [`Stopwatch`] leaves such gaps out: a
//! thread of the test wakes every few milliseconds, and what it oversleeps is nobody's
//! fault in here.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What a bound that is meant for an idle machine of four cores is here: machines that run tests
/// have two, are slower, and stand still for half a second now and then.
pub const fn crowded(idle: Duration) -> Duration {
    Duration::from_millis(idle.as_millis() as u64 * 5)
}

const NAP: Duration = Duration::from_millis(5);

/// Measures until it is dropped.
pub struct Stopwatch {
    started: Instant,
    overslept_us: Arc<AtomicU64>,
    ended: Arc<AtomicBool>,
}

impl Stopwatch {
    /// Starts to measure.
    pub fn start() -> Self {
        let watch = Self {
            started: Instant::now(),
            overslept_us: Arc::default(),
            ended: Arc::default(),
        };
        let (overslept_us, ended) = (Arc::clone(&watch.overslept_us), Arc::clone(&watch.ended));
        std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                let before = Instant::now();
                std::thread::sleep(NAP);
                let over = before.elapsed().saturating_sub(NAP);
                let over = u64::try_from(over.as_micros()).unwrap_or(u64::MAX);
                overslept_us.fetch_add(over, Ordering::Relaxed);
            }
        });
        watch
    }

    /// The time since the start, without the gaps.
    pub fn elapsed(&self) -> Duration {
        let overslept = Duration::from_micros(self.overslept_us.load(Ordering::Relaxed));
        self.started.elapsed().saturating_sub(overslept)
    }
}

impl Drop for Stopwatch {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopwatch_counts_what_ran() {
        let watch = Stopwatch::start();
        std::thread::sleep(Duration::from_millis(300));
        let measured = watch.elapsed();
        assert!(measured <= Duration::from_secs(2), "{measured:?}");
        // On a crowded machine each nap takes several times as long as it should.
        assert!(measured >= Duration::from_millis(10), "{measured:?}");
    }
}
