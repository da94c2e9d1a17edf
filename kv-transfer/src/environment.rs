//! Time and chance as this crate sees them.
//!
//! Everything here that reads a clock or draws an id asks an [`Environment`]: in
//! production the system's, in tests and simulators a frozen clock that only moves
//! when told to and a seeded generator, so that a run can be repeated bit by bit.
//! Secrets (lane keys, nonces) are never drawn from it.

use std::time::Instant;

#[cfg(feature = "test-support")]
use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering},
};

#[cfg(feature = "test-support")]
use rand::{RngCore, SeedableRng, rngs::StdRng};

/// Where the time and fresh ids come from. The default is the system's clock and
/// generator.
#[derive(Clone, Debug, Default)]
pub struct Environment {
    #[cfg(feature = "test-support")]
    seeded: Option<Arc<Seeded>>,
}

#[cfg(feature = "test-support")]
#[derive(Debug)]
struct Seeded {
    start: Instant,
    elapsed_nanos: AtomicU64,
    rng: Mutex<StdRng>,
}

impl Environment {
    /// A clock that stands still until it is moved, and ids that depend on `seed` alone.
    #[cfg(feature = "test-support")]
    pub fn seeded(seed: u64) -> Self {
        Self {
            seeded: Some(Arc::new(Seeded {
                start: Instant::now(),
                elapsed_nanos: AtomicU64::new(0),
                rng: Mutex::new(StdRng::seed_from_u64(seed)),
            })),
        }
    }

    /// Moves a seeded clock to `to`; never backwards. Without effect on the system's.
    #[cfg(feature = "test-support")]
    pub fn advance_to(&self, to: Instant) {
        if let Some(seeded) = &self.seeded {
            let elapsed = to.saturating_duration_since(seeded.start).as_nanos() as u64;
            seeded.elapsed_nanos.fetch_max(elapsed, Ordering::Relaxed);
        }
    }

    /// What time it is.
    pub fn now(&self) -> Instant {
        #[cfg(feature = "test-support")]
        if let Some(seeded) = &self.seeded {
            let elapsed = seeded.elapsed_nanos.load(Ordering::Relaxed);
            return seeded.start + std::time::Duration::from_nanos(elapsed);
        }
        Instant::now()
    }

    /// A fresh id.
    pub(crate) fn id(&self) -> u128 {
        #[cfg(feature = "test-support")]
        if let Some(seeded) = &self.seeded {
            let mut rng = crate::wake::lock(&seeded.rng);
            return u128::from(rng.next_u64()) << 64 | u128::from(rng.next_u64());
        }
        rand::random()
    }
}
