//! What is known of all workers, and how lists and events change it.
//!
//! Pure: [`Tracker`] takes what the store said and the time, and makes the
//! [`View`]. Three rules hold whatever arrives in whatever order:
//!
//! - A record of an older revision never replaces a newer one; an event that a
//!   list already contains is ignored.
//! - Nothing is removed because the store is silent. Only a delete event, or a
//!   list the worker is missing from, removes it.
//! - A store that comes back from an outage may have ended the leases of workers
//!   that live, and one that lost its data lists nobody. What is missing then
//!   stays for a grace period, in which the workers register again; the view is
//!   marked stale until nobody is missing.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_proto::{Epoch, WorkerId};

use crate::record::{Keyspace, WorkerRecord};

/// All workers as last seen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct View {
    pub workers: BTreeMap<WorkerId, WorkerRecord>,
    /// Since when the view may be out of date; `None` while it is followed.
    pub stale_since: Option<Instant>,
    /// Goes up with each change.
    pub version: u64,
}

/// A difference between two views.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    Joined(WorkerId),
    /// The same life with another record (state, capacity).
    Updated(WorkerId),
    /// Another life under the same id: everything known of the old one is void.
    Restarted {
        id: WorkerId,
        from: Epoch,
        to: Epoch,
    },
    Left(WorkerId),
}

/// What happened to workers between two views.
pub fn diff(old: &View, new: &View) -> Vec<Change> {
    let mut changes = Vec::new();
    for (id, record) in &old.workers {
        match new.workers.get(id) {
            None => changes.push(Change::Left(id.clone())),
            Some(now) if now.epoch != record.epoch => changes.push(Change::Restarted {
                id: id.clone(),
                from: record.epoch,
                to: now.epoch,
            }),
            Some(now) if now != record => changes.push(Change::Updated(id.clone())),
            Some(_) => {}
        }
    }
    let joined = new
        .workers
        .keys()
        .filter(|id| !old.workers.contains_key(*id));
    changes.extend(joined.cloned().map(Change::Joined));
    changes
}

/// One key as the store holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    pub key: String,
    /// When it was last written.
    pub revision: i64,
    pub value: Vec<u8>,
}

/// All keys at one revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// Names the store's history; another value means another store.
    pub store: u64,
    pub revision: i64,
    pub items: Vec<Item>,
}

/// One change the store reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Put(Item),
    Delete { key: String, revision: i64 },
}

struct Entry {
    revision: i64,
    record: WorkerRecord,
    /// Kept although a list did not have it, until then.
    missing_until: Option<Instant>,
}

/// How long workers stay that the store does not have any more, after what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grace {
    /// The store could not be reached; its clocks may have run on meanwhile.
    pub outage: Duration,
    /// The store lost its data.
    pub reset: Duration,
}

/// Follows a store's lists and events.
pub struct Tracker {
    keys: Keyspace,
    grace: Grace,
    entries: BTreeMap<String, Entry>,
    store: u64,
    /// Revision of the last list; events up to it are already contained.
    listed: i64,
    /// Highest revision seen at all.
    seen: i64,
    /// The store has not answered since.
    unreachable_since: Option<Instant>,
    /// Since when workers are in the view that the store does not have.
    missing_since: Option<Instant>,
    /// Until when a delete may be the end of a lease during an outage.
    deletes_held_until: Option<Instant>,
    version: u64,
}

impl Tracker {
    /// Knows nothing yet, and is stale since `now`.
    pub fn new(keys: Keyspace, grace: Grace, now: Instant) -> Self {
        Self {
            keys,
            grace,
            entries: BTreeMap::new(),
            store: 0,
            listed: 0,
            seen: 0,
            unreachable_since: Some(now),
            missing_since: None,
            deletes_held_until: None,
            version: 0,
        }
    }

    /// Takes a full list. Returns how many entries differed from what was known.
    pub fn apply_list(&mut self, now: Instant, listing: Listing) -> usize {
        let known_store = self.store != 0;
        let reset = known_store && (listing.store != self.store || listing.revision < self.seen);
        if reset {
            tracing::warn!(
                revision = listing.revision,
                known = self.seen,
                "the store lost its history, workers that it does not list stay for a while"
            );
        }
        let outage = self.unreachable_since.take().is_some() && known_store;
        (self.store, self.listed, self.seen) = (listing.store, listing.revision, listing.revision);
        if outage {
            self.deletes_held_until = Some(now + self.grace.outage);
        }
        let hold = match (reset, outage) {
            (true, _) => Some(now + self.grace.reset),
            (false, true) => Some(now + self.grace.outage),
            (false, false) => None,
        };

        let mut changed = 0;
        let mut fresh = BTreeMap::new();
        for item in listing.items {
            let Some((key, entry)) = self.decode(item) else {
                continue;
            };
            let old = self.entries.remove(&key);
            if old.is_none_or(|old| old.record != entry.record) {
                changed += 1;
            }
            fresh.insert(key, entry);
        }
        for (key, mut entry) in std::mem::take(&mut self.entries) {
            if let Some(hold) = hold {
                entry.missing_until.get_or_insert(hold);
            }
            if reset {
                // The old history's revision must not outrank the new one's.
                entry.revision = 0;
            }
            if entry.missing_until.is_some_and(|until| until > now) {
                fresh.insert(key, entry);
            } else {
                changed += 1;
            }
        }
        self.entries = fresh;
        self.settle(now);
        changed
    }

    /// Takes one event of the watch.
    pub fn apply_event(&mut self, now: Instant, event: Event) {
        let revision = match &event {
            Event::Put(item) => item.revision,
            Event::Delete { revision, .. } => *revision,
        };
        if revision <= self.listed {
            return;
        }
        self.seen = self.seen.max(revision);
        match event {
            Event::Delete { key, .. } => {
                let held = self.deletes_held_until.filter(|until| *until > now);
                match (self.entries.get_mut(&key), held) {
                    (Some(entry), _) if entry.revision >= revision => {}
                    (Some(entry), Some(until)) => {
                        entry.revision = revision;
                        entry.missing_until.get_or_insert(until);
                    }
                    _ => drop(self.entries.remove(&key)),
                }
            }
            Event::Put(item) => {
                let known = self
                    .entries
                    .get(&item.key)
                    .map_or(0, |entry| entry.revision);
                if known < revision
                    && let Some((key, entry)) = self.decode(item)
                {
                    self.entries.insert(key, entry);
                }
            }
        }
        self.settle(now);
    }

    /// The store cannot be reached: what is known stays, marked.
    pub fn mark_stale(&mut self, now: Instant) {
        self.unreachable_since.get_or_insert(now);
    }

    /// When [`Tracker::expire`] has something to do.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.entries
            .values()
            .filter_map(|entry| entry.missing_until)
            .min()
    }

    /// Drops workers whose grace period is over.
    pub fn expire(&mut self, now: Instant) {
        self.entries
            .retain(|_, entry| entry.missing_until.is_none_or(|until| until > now));
        self.settle(now);
    }

    /// The view as of now, if it differs from `last` in any worker or in being stale.
    pub fn next_view(&mut self, last: &View) -> Option<View> {
        let mut best: BTreeMap<WorkerId, &Entry> = BTreeMap::new();
        for entry in self.entries.values() {
            let id = &entry.record.id;
            match best.get(id) {
                Some(other) if other.revision >= entry.revision => {}
                _ => drop(best.insert(id.clone(), entry)),
            }
        }
        let workers: BTreeMap<_, _> = best
            .into_iter()
            .map(|(id, entry)| (id, entry.record.clone()))
            .collect();
        let stale_since = [self.unreachable_since, self.missing_since]
            .into_iter()
            .flatten()
            .min();
        if workers == last.workers && stale_since == last.stale_since {
            return None;
        }
        self.version = self.version.max(last.version) + 1;
        Some(View {
            workers,
            stale_since,
            version: self.version,
        })
    }

    /// Ids that more than one key claims: the same id in two pools. The latest
    /// written is in the view.
    pub fn duplicates(&self) -> Vec<WorkerId> {
        let mut ids: Vec<_> = self
            .entries
            .values()
            .map(|entry| &entry.record.id)
            .collect();
        ids.sort();
        let mut twice: Vec<WorkerId> = ids
            .windows(2)
            .filter(|pair| pair[0] == pair[1])
            .map(|pair| pair[0].clone())
            .collect();
        twice.dedup();
        twice
    }

    /// Notes whether anybody is missing.
    fn settle(&mut self, now: Instant) {
        self.missing_since = self
            .next_expiry()
            .map(|_| self.missing_since.unwrap_or(now));
    }

    fn decode(&self, item: Item) -> Option<(String, Entry)> {
        let record = match WorkerRecord::from_json(&item.value) {
            Ok(record) => record,
            Err(error) => {
                tracing::warn!(key = item.key, %error, "skip a record that cannot be read");
                return None;
            }
        };
        if self.keys.key(record.role, &record.id) != item.key {
            tracing::warn!(key = item.key, worker = %record.id, "skip a record under another worker's key");
            return None;
        }
        Some((
            item.key,
            Entry {
                revision: item.revision,
                record,
                missing_until: None,
            },
        ))
    }
}

#[cfg(test)]
mod tests;
