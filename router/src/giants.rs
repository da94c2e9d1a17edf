//! Long inputs, a few at a time.
//!
//! Reading a body of megabytes, rendering and tokenizing it takes from milliseconds to
//! seconds of a core. None of it is done on the threads that serve, and of long inputs
//! no more at once than leave most cores to the streams that run: twenty that come
//! together take turns. Short ones never wait for long ones.

use std::sync::Arc;

use baton_proto::{Error, ErrorKind, environment};
use tokio::sync::Semaphore;

/// An input above this is long: about as much as a context of sixty thousand tokens.
const LONG_BYTES: usize = 256 << 10;
/// Of the cores, the share that works on long inputs.
const SHARE: usize = 4;

/// The places for long inputs.
pub struct Giants {
    places: Arc<Semaphore>,
}

impl Default for Giants {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            places: Arc::new(Semaphore::new((cores / SHARE).max(1))),
        }
    }
}

impl Giants {
    /// Does `work` on an input of `bytes`, off the threads that serve. A long one keeps its
    /// place until it is done, also if nobody waits for it any more.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] if the work panicked.
    ///
    /// *Cancel safety*: dropped before its turn, the work is not done.
    pub async fn work<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Error> {
        let lost = |what: String| Error::new(ErrorKind::Internal, what);
        let place = if bytes > LONG_BYTES {
            let place = Arc::clone(&self.places).acquire_owned().await;
            Some(place.map_err(|error| lost(error.to_string()))?)
        } else {
            None
        };
        environment::off_runtime(move || {
            let done = work();
            drop(place);
            done
        })
        .await
        .map_err(|error| lost(format!("read the request: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn long_inputs_take_turns_and_short_ones_do_not_wait() {
        let giants = Giants {
            places: Arc::new(Semaphore::new(1)),
        };
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (free, held) = std::sync::mpsc::channel::<()>();
        let long = giants.work(LONG_BYTES + 1, {
            let (now, most) = (Arc::clone(&now), Arc::clone(&most));
            move || {
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                held.recv().unwrap();
                now.fetch_sub(1, Ordering::SeqCst);
            }
        });
        let second = giants.work(LONG_BYTES + 1, {
            let (now, most) = (Arc::clone(&now), Arc::clone(&most));
            move || {
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                now.fetch_sub(1, Ordering::SeqCst);
            }
        });
        let short = async {
            // Done although the only place is taken; then that one ends.
            tokio::time::sleep(Duration::from_millis(20)).await;
            giants.work(LONG_BYTES, || ()).await.unwrap();
            free.send(()).unwrap();
        };
        let (long, second, ()) = tokio::join!(long, second, short);
        long.unwrap();
        second.unwrap();
        assert_eq!(most.load(Ordering::SeqCst), 1);
        let panicked = giants.work(1, || panic!("on purpose")).await;
        assert_eq!(panicked.unwrap_err().kind, ErrorKind::Internal);
    }
}
