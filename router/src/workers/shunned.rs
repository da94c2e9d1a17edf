//! Decode workers that a prefill worker could not reach a moment ago.
//!
//! Their health checks go another way and say nothing of it, and an idle worker attracts
//! requests. So for a while others are preferred, and what has blocks reserved there is
//! computed there; where there are no others, they are asked all the same. Whose fault it was
//! is not decided here: a prefill worker that reaches nobody shuns all alike, and that changes
//! nothing.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::placement::WorkerKey;

/// Whoever is the first to ask a worker again afterwards may wait for a second.
const SHUNNED_FOR: Duration = Duration::from_secs(10);

/// Who is shunned, and until when. At most one entry for each worker that was ever placed and
/// is not older than [`SHUNNED_FOR`].
#[derive(Default)]
pub struct Shunned(Mutex<HashMap<WorkerKey, Instant>>);

impl Shunned {
    /// From now on.
    pub fn shun(&self, worker: WorkerKey, now: Instant) {
        self.lock().insert(worker, now + SHUNNED_FOR);
    }

    /// Everybody who is shunned now.
    pub fn all(&self, now: Instant) -> Vec<WorkerKey> {
        let mut shunned = self.lock();
        shunned.retain(|_, until| now < *until);
        shunned.keys().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<WorkerKey, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use baton_proto::Epoch;

    use super::*;

    #[test]
    fn a_worker_is_shunned_for_a_while_and_in_this_life_alone() {
        let key = |epoch| WorkerKey::new("d".into(), Epoch(epoch));
        let (shunned, start) = (Shunned::default(), Instant::now());
        assert!(shunned.all(start).is_empty());
        shunned.shun(key(1), start);
        assert_eq!(shunned.all(start), [key(1)]);
        assert_ne!(shunned.all(start), [key(2)]);
        // Once more: the time begins anew.
        let again = start + SHUNNED_FOR / 2;
        shunned.shun(key(1), again);
        assert_eq!(shunned.all(start + SHUNNED_FOR), [key(1)]);
        assert!(shunned.all(again + SHUNNED_FOR).is_empty());
    }
}
