//! Whether the engine's thread moves: it leaves a mark at each turn and between two layers.
//!
//! A device that hangs, a thread that is stopped or a lock that is never given back leave a
//! process that answers every call and computes nothing. Others read here for how long.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The mark. Written by the engine's thread alone.
#[derive(Debug)]
pub(crate) struct Pulse {
    started: Instant,
    /// Nanoseconds from `started` to the last mark; 0 while there is nothing to do.
    moved: AtomicU64,
}

impl Pulse {
    pub(crate) fn new() -> Self {
        Self {
            started: Instant::now(),
            moved: AtomicU64::new(0),
        }
    }

    /// The thread is at work and has come on.
    pub(crate) fn beat(&self) {
        let now = self.started.elapsed().as_nanos() as u64;
        // One number, read by itself: no order is needed.
        self.moved.store(now.max(1), Ordering::Relaxed);
    }

    /// The thread waits for something to do.
    pub(crate) fn rest(&self) {
        self.moved.store(0, Ordering::Relaxed);
    }

    /// Since the last mark; `None` while there is nothing to do.
    pub(crate) fn still_for(&self) -> Option<Duration> {
        match self.moved.load(Ordering::Relaxed) {
            0 => None,
            moved => {
                let moved = Duration::from_nanos(moved);
                Some(self.started.elapsed().saturating_sub(moved))
            }
        }
    }
}
