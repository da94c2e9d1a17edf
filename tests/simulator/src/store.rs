//! A membership store that comes and goes, and the routers' ways to follow it.
//!
//! Workers register with [`InProcess`]; what it lists is written into keys with revisions
//! as into etcd. Each router follows the keys with the same [`Tracker`] that follows etcd:
//! lists, events, outages, grace periods. A worker that died keeps its record until its
//! lease has ended; during an outage nothing is written, nothing is told, and no lease ends.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use baton_membership::view::{Event, Item, Listing, Tracker};
use baton_membership::{
    Change, Error, Grace, Health, InProcess, Keyspace, Membership, Registration, View,
    WorkerRecord, diff,
};
use baton_proto::Epoch;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

/// From a change in the store to its follower.
const NEWS: Duration = Duration::from_millis(5);
/// Until a follower notices that the store does not answer.
const NOTICE: Duration = Duration::from_millis(700);

/// The keys, and whether anybody can reach them.
pub struct Store {
    keys: Keyspace,
    /// How long a dead worker's record stays.
    ttl: Duration,
    state: Mutex<State>,
    changed: Notify,
}

struct State {
    up: bool,
    revision: i64,
    items: BTreeMap<String, (i64, WorkerRecord)>,
    log: Vec<Event>,
    /// Lives whose leases have ended.
    ended: BTreeSet<u64>,
    /// Watches that were opened before this many compactions have to list again.
    compactions: u64,
}

impl Store {
    /// An empty store that can be reached.
    pub fn new(ttl: Duration) -> Arc<Self> {
        Arc::new(Self {
            keys: Keyspace::new("simulated", "0").expect("two plain names"),
            ttl,
            state: Mutex::new(State {
                up: true,
                revision: 1,
                items: BTreeMap::new(),
                log: Vec::new(),
                ended: BTreeSet::new(),
                compactions: 0,
            }),
            changed: Notify::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Cuts it off, or brings it back.
    pub fn set_up(&self, up: bool) {
        self.lock().up = up;
        self.changed.notify_waiters();
    }

    /// Every watch is told that it is too old.
    pub fn compact(&self) {
        self.lock().compactions += 1;
        self.changed.notify_waiters();
    }

    async fn wait_until_up(&self) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.lock().up {
                return;
            }
            changed.await;
        }
    }

    /// Writes what `cluster` lists into keys, for as long as the run goes.
    pub async fn mirror(self: Arc<Self>, cluster: InProcess) {
        let mut view = cluster.watch();
        let mut last = View::default();
        loop {
            self.wait_until_up().await;
            let now = Arc::clone(&view.borrow_and_update());
            for change in diff(&last, &now) {
                match change {
                    Change::Joined(id) | Change::Updated(id) | Change::Restarted { id, .. } => {
                        self.put(&now.workers[&id]);
                    }
                    Change::Left(id) => self.delete(&last.workers[&id]),
                }
            }
            last = (*now).clone();
            if view.changed().await.is_err() {
                return;
            }
        }
    }

    fn put(&self, record: &WorkerRecord) {
        let mut state = self.lock();
        if state.ended.contains(&record.epoch.0) {
            return;
        }
        state.revision += 1;
        let (key, revision) = (self.keys.key(record.role, &record.id), state.revision);
        state.items.insert(key.clone(), (revision, record.clone()));
        state.log.push(Event::Put(Item {
            key,
            revision,
            value: record.to_json(),
        }));
        drop(state);
        self.changed.notify_waiters();
    }

    fn delete(&self, record: &WorkerRecord) {
        let key = self.keys.key(record.role, &record.id);
        let mut state = self.lock();
        let listed = state.items.get(&key).map(|(_, listed)| listed.epoch);
        if listed != Some(record.epoch) {
            return;
        }
        state.items.remove(&key);
        state.revision += 1;
        let revision = state.revision;
        state.log.push(Event::Delete { key, revision });
        drop(state);
        self.changed.notify_waiters();
    }

    /// A worker's process has ended; its record goes at once (it left), or when its lease
    /// does.
    pub async fn end(self: Arc<Self>, record: WorkerRecord, left: bool) {
        if !left {
            tokio::time::sleep(self.ttl).await;
        }
        self.wait_until_up().await;
        self.lock().ended.insert(record.epoch.0);
        self.delete(&record);
    }

    /// The epoch listed for a worker, for looking at.
    pub fn listed(&self, record: &WorkerRecord) -> Option<Epoch> {
        let key = self.keys.key(record.role, &record.id);
        self.lock().items.get(&key).map(|(_, listed)| listed.epoch)
    }
}

/// One router's way to follow the store.
pub struct Following {
    cluster: InProcess,
    view: watch::Sender<Arc<View>>,
}

impl Following {
    /// Begins to follow; the task ends with the run.
    pub fn start(store: Arc<Store>, cluster: InProcess) -> Arc<Self> {
        let following = Arc::new(Self {
            cluster,
            view: watch::Sender::new(Arc::default()),
        });
        tokio::spawn(Arc::clone(&following).follow(store));
        following
    }

    async fn follow(self: Arc<Self>, store: Arc<Store>) {
        let grace = Grace {
            outage: store.ttl,
            reset: 3 * store.ttl,
        };
        let now = || Instant::now().into_std();
        let mut tracker = Tracker::new(store.keys.clone(), grace, now());
        // Events up to here are known; `None` while nothing is watched.
        let mut cursor: Option<usize> = None;
        let mut compactions = 0;
        loop {
            let changed = store.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let up = store.lock().up;
            if up {
                tokio::time::sleep(NEWS).await;
                let state = store.lock();
                if cursor.is_none() || state.compactions > compactions {
                    compactions = state.compactions;
                    cursor = Some(state.log.len());
                    tracker.apply_list(now(), listing(&state));
                } else if let Some(cursor) = &mut cursor {
                    for event in &state.log[*cursor..] {
                        tracker.apply_event(now(), event.clone());
                    }
                    *cursor = state.log.len();
                }
            } else if cursor.take().is_some() {
                tokio::time::sleep(NOTICE).await;
                tracker.mark_stale(now());
            }
            tracker.expire(now());
            let last = Arc::clone(&self.view.borrow());
            if let Some(next) = tracker.next_view(&last) {
                self.view.send_replace(Arc::new(next));
            }
            match tracker.next_expiry() {
                Some(expiry) => {
                    let expiry = Instant::from_std(expiry).max(Instant::now() + NEWS);
                    tokio::select! {
                        biased;
                        () = &mut changed => {}
                        () = tokio::time::sleep_until(expiry) => {}
                    }
                }
                None => changed.await,
            }
        }
    }
}

fn listing(state: &State) -> Listing {
    let items = state.items.iter().map(|(key, (revision, record))| Item {
        key: key.clone(),
        revision: *revision,
        value: record.to_json(),
    });
    Listing {
        store: 1,
        revision: state.revision,
        items: items.collect(),
    }
}

#[async_trait]
impl Membership for Following {
    async fn register(&self, record: WorkerRecord) -> Result<Registration, Error> {
        self.cluster.register(record).await
    }

    fn watch(&self) -> watch::Receiver<Arc<View>> {
        self.view.subscribe()
    }

    fn health(&self) -> Health {
        Health {
            fresh: self.view.borrow().stale_since.is_none(),
            ..Health::default()
        }
    }

    async fn close(&self) {}
}
