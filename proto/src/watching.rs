//! The stream on which a worker tells routers how it fares, and which of them know that it
//! leaves.
//!
//! ```text
//! router              worker
//!   | -- Watch -------> |
//!   | <-- event ------- |   at once, then at every interval and change of state
//!   | <-- draining ---- |   SIGTERM, or Drain
//!   |  places nothing there any more
//!   | -- AcknowledgeDrain(the stream's number) -> |
//! ```
//!
//! Only once every router has said that may the worker close its port: nothing that was
//! placed there then finds it closed. A router that says nothing (it is of an older version,
//! or stands still) costs [`ACKNOWLEDGED_WITHIN`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use crate::block_hash::BlockHash;
use crate::cache_names::CacheDelta;
use crate::ids::WorkerId;
use crate::v1;
use crate::worker_info::{ResponseStream, WorkerInfo};

/// The longest silence of a watch stream; a router that hears nothing for a few of
/// these judges the worker dead.
pub const WATCH_INTERVAL: Duration = Duration::from_millis(250);

/// How long a worker that leaves waits to hear that routers know.
pub const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(1);

/// Blocks that one event of a watch stream names: 256 KiB.
const NAMES_PER_EVENT: usize = 16_384;

/// Who reads a worker's watch streams, and whether they know that it leaves. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Watchers(Arc<State>);

#[derive(Debug, Default)]
struct State {
    streams: Mutex<Streams>,
    changed: Notify,
    gone: CancellationToken,
}

#[derive(Debug, Default)]
struct Streams {
    last: u64,
    /// Those whose reader promised to acknowledge, by number; whether it did.
    open: BTreeMap<u64, bool>,
}

/// How many routers know that a worker leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Told {
    pub acknowledged: u32,
    pub silent: u32,
}

impl Watchers {
    fn streams(&self) -> MutexGuard<'_, Streams> {
        let streams = self.0.streams.lock();
        streams.unwrap_or_else(PoisonError::into_inner)
    }

    /// A stream begins; its reader is waited for if it promises to acknowledge.
    fn open(&self, acknowledges: bool) -> Watcher {
        let mut streams = self.streams();
        streams.last += 1;
        let number = streams.last;
        if acknowledges {
            streams.open.insert(number, false);
        }
        Watcher {
            watchers: self.clone(),
            number,
        }
    }

    /// The reader of stream `number` gives the worker no more work. Whether it is open.
    pub fn acknowledge(&self, number: u64) -> bool {
        let known = match self.streams().open.get_mut(&number) {
            Some(acknowledged) => {
                *acknowledged = true;
                true
            }
            None => false,
        };
        self.0.changed.notify_waiters();
        known
    }

    /// Ends every stream, for which a server that closes would wait: the worker goes.
    pub fn end(&self) {
        self.0.gone.cancel();
    }

    /// Who knows by now.
    pub fn told(&self) -> Told {
        let streams = self.streams();
        let acknowledged = streams.open.values().filter(|known| **known).count() as u32;
        Told {
            acknowledged,
            silent: streams.open.len() as u32 - acknowledged,
        }
    }

    /// Waits until every reader knows that `worker` leaves or has gone, for
    /// [`ACKNOWLEDGED_WITHIN`] at most. Cancel safe.
    pub async fn all_know(&self, worker: &WorkerId) -> Told {
        let all = async {
            loop {
                let changed = self.0.changed.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                if self.told().silent == 0 {
                    return;
                }
                changed.await;
            }
        };
        let in_time = tokio::time::timeout(ACKNOWLEDGED_WITHIN, all).await;
        let told = self.told();
        if in_time.is_err() {
            tracing::warn!(%worker, silent = told.silent,
                "routers did not acknowledge that it drains; what they send is refused");
        }
        told
    }
}

/// One open stream.
struct Watcher {
    watchers: Watchers,
    number: u64,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.watchers.streams().open.remove(&self.number);
        self.watchers.0.changed.notify_waiters();
    }
}

impl WorkerInfo {
    /// The answer to `Watch`: a snapshot at once, then one per interval or change of
    /// state. Ends when the worker goes.
    pub fn watch_stream(&self, request: v1::WatchRequest) -> ResponseStream<v1::WatchEvent> {
        let (tx, rx) = tokio::sync::mpsc::channel(4);
        let info = self.clone();
        let watcher = self.watchers.open(request.acknowledges_drain);
        // Ends with its reader: every send fails once the stream is dropped.
        tokio::spawn(async move {
            // The whole of it, or it would be dropped before the stream begins.
            let watcher = watcher;
            let mut state = info.state.clone();
            let mut sequence = 0_u64;
            let mut position = None;
            loop {
                let delta = info.cache.since(position);
                position = Some(delta.position);
                let mut pieces: Vec<_> = cache_changes(&delta).into_iter().map(Some).collect();
                if pieces.is_empty() {
                    pieces.push(None);
                }
                for cache in pieces {
                    let event = v1::WatchEvent {
                        epoch: info.epoch.0,
                        sequence,
                        state: state.borrow_and_update().name().to_owned(),
                        load: Some((info.load)()),
                        cache,
                        watch: watcher.number,
                    };
                    sequence += 1;
                    if tx.send(Ok(event)).await.is_err() {
                        return;
                    }
                }
                tokio::select! {
                    biased;
                    changed = state.changed() => if changed.is_err() { return },
                    () = tokio::time::sleep(WATCH_INTERVAL) => {}
                    () = tx.closed() => return,
                    () = info.watchers.0.gone.cancelled() => return,
                }
            }
        });
        Box::pin(ReceiverStream::new(rx))
    }

    /// The answer to `AcknowledgeDrain`.
    pub fn drain_acknowledged(
        &self,
        request: v1::AcknowledgeDrainRequest,
    ) -> v1::AcknowledgeDrainResponse {
        v1::AcknowledgeDrainResponse {
            known: self.watchers.acknowledge(request.watch),
        }
    }
}

/// What changed in a cache as it travels, in pieces; nothing where nothing changed.
fn cache_changes(delta: &CacheDelta) -> Vec<v1::CacheChanges> {
    let bytes = |names: &[BlockHash]| names.iter().flat_map(|name| name.0).collect();
    let stored = delta
        .stored
        .chunks(NAMES_PER_EVENT)
        .map(|names| v1::CacheChanges {
            stored: bytes(names),
            ..v1::CacheChanges::default()
        });
    let removed = delta
        .removed
        .chunks(NAMES_PER_EVENT)
        .map(|names| v1::CacheChanges {
            removed: bytes(names),
            ..v1::CacheChanges::default()
        });
    let mut pieces: Vec<_> = stored.chain(removed).collect();
    if delta.snapshot {
        if pieces.is_empty() {
            pieces.push(v1::CacheChanges::default());
        }
        pieces[0].snapshot = true;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(acknowledged: u32, silent: u32) -> Told {
        Told {
            acknowledged,
            silent,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_promised_to_acknowledge_is_waited_for_until_it_does_or_goes() {
        let watchers = Watchers::default();
        let worker = WorkerId::from("w");
        assert_eq!(watchers.all_know(&worker).await, told(0, 0), "nobody reads");
        let (one, two) = (watchers.open(true), watchers.open(true));
        let _old = watchers.open(false);
        let waiting = {
            let (watchers, worker) = (watchers.clone(), worker.clone());
            tokio::spawn(async move { watchers.all_know(&worker).await })
        };
        tokio::time::sleep(ACKNOWLEDGED_WITHIN / 4).await;
        assert!(watchers.acknowledge(one.number));
        assert!(!watchers.acknowledge(99));
        tokio::time::sleep(ACKNOWLEDGED_WITHIN / 4).await;
        assert!(!waiting.is_finished());
        drop(two);
        assert_eq!(waiting.await.unwrap(), told(1, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_router_that_stands_still_is_waited_for_a_second() {
        let watchers = Watchers::default();
        let _frozen = watchers.open(true);
        let before = tokio::time::Instant::now();
        assert_eq!(watchers.all_know(&"w".into()).await, told(0, 1));
        assert_eq!(before.elapsed(), ACKNOWLEDGED_WITHIN);
    }
}
