//! The follower's loop: list, watch from the next revision, list again after any trouble.
//!
//! ```text
//!          ┌────────────── wait (back-off) ◄── error: view kept, marked stale
//!          ▼                                       ▲
//!        list ──► watch from revision + 1 ── error, end, cancelled, compacted
//!                   │        ▲
//!                   └ events ┘   every `relist_interval`: list, repair
//! ```
//!
//! A watch that breaks is followed by a list at once, and only a list that fails
//! makes the view stale; but a watch that keeps breaking waits longer each time.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_etcd::api::{self, KeyValue, event::EventType};
use baton_etcd::{WatchFrom, Watching};
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::Faults;
use super::connector::{CallError, Connector};
use crate::Health;
use crate::backoff::Backoff;
use crate::view::{Change, Event, Item, Listing, Tracker, View, diff};

const BACKOFF_FIRST: Duration = Duration::from_millis(50);
/// A view is at most this much later than etcd's return (plus the list itself).
const BACKOFF_MAX: Duration = Duration::from_millis(500);
/// A watch that held this long counts as a success.
const WATCH_HELD: Duration = Duration::from_secs(5);
/// Largest list, bytes: about ten thousand workers.
const LIST_BYTES_MAX: usize = 64 << 20;

pub(super) struct Follower {
    pub(super) connector: Arc<Connector>,
    pub(super) prefix: String,
    pub(super) relist_interval: Duration,
    pub(super) request_timeout: Duration,
    pub(super) faults: Faults,
    pub(super) tracker: Tracker,
    pub(super) view: watch::Sender<Arc<View>>,
    pub(super) health: Arc<Mutex<Health>>,
    pub(super) shutdown: CancellationToken,
}

/// Why a watch ended.
enum Broken {
    /// etcd dropped the history it needs.
    Compacted {
        revision: i64,
    },
    Ended(String),
}

impl Follower {
    pub(super) async fn run(mut self) {
        let shutdown = self.shutdown.clone();
        let mut backoff = Backoff::new(BACKOFF_FIRST, BACKOFF_MAX);
        loop {
            let wait = tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                wait = self.follow(&mut backoff) => wait,
            };
            tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    /// One round: a list and a watch until it breaks. Returns how long to wait before the next.
    async fn follow(&mut self, backoff: &mut Backoff) -> Duration {
        let revision = match self.list().await {
            Ok((revision, _)) => revision,
            Err(error) => {
                self.unreachable(&error, backoff.failures()).await;
                return backoff.next(rand::random());
            }
        };
        let started = Instant::now();
        let broken = match self.open_watch(revision + 1).await {
            Ok(stream) => self.watch(stream).await,
            Err(error) => {
                self.connector.note(&error).await;
                Broken::Ended(error.to_string())
            }
        };
        if started.elapsed() >= WATCH_HELD {
            backoff.reset();
        }
        match broken {
            Broken::Compacted { revision } => {
                tracing::info!(revision, "the watch's history was compacted, list again");
            }
            Broken::Ended(reason) => {
                tracing::info!(reason, "the watch ended, list again");
                self.with_health(|health| health.last_error = Some(reason));
            }
        }
        backoff.next(rand::random())
    }

    /// Reads all records and applies them. Returns the list's revision and how
    /// many records differed.
    async fn list(&mut self) -> Result<(i64, usize), CallError> {
        self.with_health(|health| health.lists += 1);
        let client = self.connector.client().await?;
        let list = client.list(self.prefix.as_str(), LIST_BYTES_MAX);
        let answer = self.connector.call("list workers", list).await?;
        let (store, revision) = answer
            .header
            .map_or((0, 0), |header| (header.cluster_id, header.revision));
        let items = answer.kvs.into_iter().map(item).collect();
        let changed = self.tracker.apply_list(
            Instant::now(),
            Listing {
                store,
                revision,
                items,
            },
        );
        self.publish();
        self.with_health(|health| (health.fresh, health.last_error) = (true, None));
        Ok((revision, changed))
    }

    async fn open_watch(&mut self, revision: i64) -> Result<Watching, CallError> {
        let revision = self.faults.first_watch_revision.take().unwrap_or(revision);
        self.with_health(|health| health.watches += 1);
        let client = self.connector.client().await?;
        let open = client.watch(WatchFrom {
            prefix: self.prefix.as_bytes().to_vec(),
            revision,
            without_deletes: self.faults.lose_deletes,
            bytes_max: LIST_BYTES_MAX,
        });
        self.connector.call("watch workers", open).await
    }

    /// Applies events until the watch breaks.
    async fn watch(&mut self, mut stream: Watching) -> Broken {
        let mut relist = tokio::time::interval(self.relist_interval);
        relist.set_missed_tick_behavior(MissedTickBehavior::Delay);
        relist.reset();
        loop {
            let expiry = self.tracker.next_expiry();
            tokio::select! {
                // `message` is cancel-safe.
                message = stream.message() => match message {
                    Ok(Some(message)) if message.canceled => {
                        return match message.compact_revision {
                            0 => Broken::Ended(format!("cancelled: `{}`", message.cancel_reason)),
                            revision => Broken::Compacted { revision },
                        };
                    }
                    Ok(Some(message)) => {
                        for event in message.events.into_iter().filter_map(event) {
                            self.tracker.apply_event(Instant::now(), event);
                        }
                        self.publish();
                    }
                    Ok(None) => return Broken::Ended("the stream ended".to_owned()),
                    Err(error) => return Broken::Ended(error.to_string()),
                },
                _ = relist.tick() => match self.list().await {
                    Ok((_, 0)) => {}
                    Ok((_, changed)) => {
                        // Events that are still under way count as well, so this
                        // is a hint, not a proof.
                        tracing::info!(changed, "the periodic list differed from the watch");
                        self.with_health(|health| health.repairs += changed as u64);
                    }
                    Err(error) => return Broken::Ended(error.to_string()),
                },
                () = sleep_until(expiry) => {
                    self.tracker.expire(Instant::now());
                    self.publish();
                }
            }
        }
    }

    /// Keeps the view and marks it.
    async fn unreachable(&mut self, error: &CallError, failures: u32) {
        self.connector.note(error).await;
        // Said once per outage; the reason stays readable in the health.
        if failures == 0 {
            tracing::warn!(%error, timeout = ?self.request_timeout,
                "etcd cannot be reached, the last view stays in use");
        }
        self.tracker.mark_stale(Instant::now());
        self.publish();
        self.with_health(|health| {
            (health.fresh, health.last_error) = (false, Some(error.to_string()));
        });
    }

    /// Publishes the view if it changed, and logs what did.
    fn publish(&mut self) {
        let last = Arc::clone(&self.view.borrow());
        let Some(next) = self.tracker.next_view(&last) else {
            return;
        };
        let mut joined_or_left = false;
        for change in diff(&last, &next) {
            match change {
                Change::Updated(_) => {}
                Change::Restarted { id, from, to } => {
                    tracing::warn!(worker = %id, %from, %to, "worker has another epoch");
                }
                Change::Joined(id) => {
                    joined_or_left = true;
                    tracing::info!(worker = %id, "worker joined");
                }
                Change::Left(id) => {
                    joined_or_left = true;
                    tracing::info!(worker = %id, "worker left");
                }
            }
        }
        if joined_or_left {
            for id in self.tracker.duplicates() {
                tracing::error!(worker = %id, "two pools list one worker id, the latest is used");
            }
        }
        self.view.send_replace(Arc::new(next));
    }

    fn with_health(&self, change: impl FnOnce(&mut Health)) {
        change(&mut self.health.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

async fn sleep_until(when: Option<Instant>) {
    match when {
        Some(when) => tokio::time::sleep_until(when.into()).await,
        None => std::future::pending().await,
    }
}

fn item(kv: KeyValue) -> Item {
    Item {
        key: String::from_utf8_lossy(&kv.key).into_owned(),
        revision: kv.mod_revision,
        value: kv.value,
    }
}

fn event(event: api::Event) -> Option<Event> {
    let kind = event.r#type();
    let item = item(event.kv?);
    Some(match kind {
        EventType::Put => Event::Put(item),
        EventType::Delete => Event::Delete {
            key: item.key,
            revision: item.revision,
        },
    })
}
