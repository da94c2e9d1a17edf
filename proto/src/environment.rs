//! Chance and threads as the control plane sees them.
//!
//! What a router or worker draws by chance, and what it moves off its runtime's
//! threads, goes through here. In production that is the system's generator and the
//! runtime's pool of blocking threads. With the feature `test-support` a simulation
//! seeds the calling thread: chance then depends on the seed alone, work is done where
//! it is asked for, and one of the [`Defect`]s can be planted to show that it is found.
//! Secrets (API keys, lane keys) are never drawn from here.

use rand::distr::{Distribution, StandardUniform};
use tokio::task::JoinError;

#[cfg(feature = "test-support")]
use rand::{Rng as _, SeedableRng as _, rngs::StdRng};

/// A protection that a simulation can take away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Defect {
    /// A worker takes work that names another life of it.
    EpochUnchecked,
    /// A decode worker gives a cancelled request's blocks back while a lane may write them.
    FreeBeforeQuiet,
    /// A router sends what a second worker repeats once more to the client.
    RetryNotDeduplicated,
}

#[cfg(feature = "test-support")]
struct Simulated {
    rng: StdRng,
    defect: Option<Defect>,
}

#[cfg(feature = "test-support")]
thread_local! {
    static SIMULATED: std::cell::RefCell<Option<Simulated>> = const { std::cell::RefCell::new(None) };
}

/// Makes the calling thread a simulation's until the returned value is dropped.
#[cfg(feature = "test-support")]
pub fn simulate(seed: u64, defect: Option<Defect>) -> impl Drop {
    struct Guard;
    impl Drop for Guard {
        fn drop(&mut self) {
            SIMULATED.set(None);
        }
    }
    SIMULATED.set(Some(Simulated {
        rng: StdRng::seed_from_u64(seed),
        defect,
    }));
    Guard
}

/// A number by chance.
pub fn random<T>() -> T
where
    StandardUniform: Distribution<T>,
{
    #[cfg(feature = "test-support")]
    {
        let seeded = SIMULATED.with_borrow_mut(|simulated| {
            let simulated = simulated.as_mut()?;
            Some(simulated.rng.random())
        });
        if let Some(value) = seeded {
            return value;
        }
    }
    rand::random()
}

/// Whether a simulation has planted this defect. Never in production.
#[inline]
pub fn has(defect: Defect) -> bool {
    #[cfg(feature = "test-support")]
    return SIMULATED.with_borrow(|simulated| {
        simulated
            .as_ref()
            .is_some_and(|simulated| simulated.defect == Some(defect))
    });
    #[cfg(not(feature = "test-support"))]
    {
        let _ = defect;
        false
    }
}

/// Does `work` of more than a moment without holding up other tasks.
///
/// # Errors
/// The work panicked, or the runtime is shutting down.
pub async fn off_runtime<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    #[cfg(feature = "test-support")]
    if SIMULATED.with_borrow(Option::is_some) {
        return Ok(work());
    }
    tokio::task::spawn_blocking(work).await
}
