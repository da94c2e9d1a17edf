//! The view's rules, one example each, and a store with random histories.

use super::*;
use crate::record::tests::record;
use crate::record::{Role, WorkerState};
use proptest::prelude::*;

const OUTAGE: Duration = Duration::from_secs(1);
const GRACE: Duration = Duration::from_secs(10);

struct Fixture {
    tracker: Tracker,
    view: View,
    now: Instant,
}

impl Fixture {
    fn new() -> Self {
        let now = Instant::now();
        let keys = Keyspace::new("c", "0").unwrap();
        let mut fixture = Self {
            tracker: Tracker::new(
                keys,
                Grace {
                    outage: OUTAGE,
                    reset: GRACE,
                },
                now,
            ),
            view: View::default(),
            now,
        };
        fixture.refresh();
        fixture
    }

    fn refresh(&mut self) -> Vec<Change> {
        let Some(next) = self.tracker.next_view(&self.view) else {
            return Vec::new();
        };
        assert!(next.version > self.view.version);
        let changes = diff(&self.view, &next);
        self.view = next;
        changes
    }

    fn list(&mut self, revision: i64, items: Vec<Item>) -> Vec<Change> {
        self.tracker.apply_list(
            self.now,
            Listing {
                store: 7,
                revision,
                items,
            },
        );
        self.refresh()
    }

    fn event(&mut self, event: Event) -> Vec<Change> {
        self.tracker.apply_event(self.now, event);
        self.refresh()
    }

    fn epochs(&self) -> Vec<(String, u64)> {
        let epoch = |(id, record): (&WorkerId, &WorkerRecord)| (id.to_string(), record.epoch.0);
        self.view.workers.iter().map(epoch).collect()
    }
}

fn put(id: &str, epoch: u64, revision: i64) -> Item {
    item(&record(id, epoch), revision)
}

fn item(record: &WorkerRecord, revision: i64) -> Item {
    let key = Keyspace::new("c", "0")
        .unwrap()
        .key(record.role, &record.id);
    Item {
        key,
        revision,
        value: record.to_json(),
    }
}

fn delete(id: &str, revision: i64) -> Event {
    Event::Delete {
        key: put(id, 0, 0).key,
        revision,
    }
}

#[test]
fn the_first_list_makes_it_fresh_and_events_follow() {
    let mut f = Fixture::new();
    assert!(f.view.stale_since.is_some());
    assert_eq!(
        f.list(5, vec![put("a", 1, 4)]),
        [Change::Joined("a".into())]
    );
    assert_eq!(f.view.stale_since, None);
    let restarted = Change::Restarted {
        id: "a".into(),
        from: Epoch(1),
        to: Epoch(2),
    };
    assert_eq!(f.event(Event::Put(put("a", 2, 6))), [restarted]);
    let mut draining = record("a", 2);
    draining.state = WorkerState::Draining;
    assert_eq!(
        f.event(Event::Put(item(&draining, 7))),
        [Change::Updated("a".into())]
    );
    assert_eq!(f.event(delete("a", 8)), [Change::Left("a".into())]);
}

#[test]
fn an_older_revision_never_replaces_a_newer_one() {
    let mut f = Fixture::new();
    f.list(10, vec![put("a", 2, 9)]);
    assert_eq!(f.event(Event::Put(put("a", 1, 8))), []);
    assert_eq!(f.event(delete("a", 9)), []);
    // Gone by the list, so an event from before it must not bring it back.
    f.list(20, vec![]);
    assert_eq!(f.event(Event::Put(put("a", 2, 15))), []);
    assert!(f.view.workers.is_empty());
}

#[test]
fn silence_marks_and_removes_nothing() {
    let mut f = Fixture::new();
    f.list(5, vec![put("a", 1, 4)]);
    f.tracker.mark_stale(f.now + GRACE);
    f.refresh();
    f.tracker.mark_stale(f.now + 2 * GRACE);
    f.tracker.expire(f.now + 100 * GRACE);
    f.refresh();
    assert_eq!(f.epochs(), [("a".to_owned(), 1)]);
    assert_eq!(f.view.stale_since, Some(f.now + GRACE));
    f.list(5, vec![put("a", 1, 4)]);
    assert_eq!(f.view.stale_since, None);
}

#[test]
fn a_list_removes_what_vanished_during_a_cut() {
    let mut f = Fixture::new();
    f.list(5, vec![put("a", 1, 4), put("b", 1, 5)]);
    f.tracker.mark_stale(f.now);
    let changes = f.list(1005, vec![put("b", 1, 5), put("c", 1, 900)]);
    assert_eq!(changes, [Change::Joined("c".into())]);
    f.now += OUTAGE;
    f.tracker.expire(f.now);
    assert_eq!(f.refresh(), [Change::Left("a".into())]);
    assert_eq!(f.view.stale_since, None);
}

#[test]
fn a_lease_that_ended_during_an_outage_leaves_time_to_register_again() {
    let mut f = Fixture::new();
    f.list(5, vec![put("a", 1, 4), put("b", 1, 5)]);
    f.tracker.mark_stale(f.now);
    f.list(5, vec![put("a", 1, 4), put("b", 1, 5)]);
    assert_eq!(f.event(delete("a", 6)), []);
    assert_eq!(f.event(delete("b", 7)), []);
    assert!(f.view.stale_since.is_some());
    assert_eq!(f.event(Event::Put(put("a", 1, 8))), []);
    f.now += OUTAGE;
    f.tracker.expire(f.now);
    assert_eq!(f.refresh(), [Change::Left("b".into())]);
    // Later, a delete is a delete.
    assert_eq!(f.event(delete("a", 9)), [Change::Left("a".into())]);
}

#[test]
fn a_list_without_an_outage_removes_at_once() {
    let mut f = Fixture::new();
    f.list(5, vec![put("a", 1, 4)]);
    assert_eq!(f.list(6, vec![]), [Change::Left("a".into())]);
}

#[test]
fn a_store_without_its_data_does_not_empty_the_view() {
    let mut f = Fixture::new();
    f.list(50, vec![put("a", 1, 40), put("b", 1, 41)]);
    assert_eq!(f.list(1, vec![]), []);
    assert_eq!(f.epochs().len(), 2);
    assert!(f.view.stale_since.is_some(), "the view is a memory now");
    f.event(Event::Put(put("a", 1, 2)));
    assert!(f.view.stale_since.is_some());
    // Another list in between does not end the grace of the one still missing.
    f.list(2, vec![put("a", 1, 2)]);
    assert_eq!(f.epochs().len(), 2);
    assert_eq!(f.tracker.next_expiry(), Some(f.now + GRACE));
    f.tracker.expire(f.now + GRACE);
    assert_eq!(f.refresh(), [Change::Left("b".into())]);
    assert_eq!(f.view.stale_since, None);
}

#[test]
fn a_reset_store_whose_workers_came_back_is_fresh() {
    let mut f = Fixture::new();
    f.list(50, vec![put("a", 1, 40)]);
    f.list(1, vec![]);
    assert_eq!(f.event(Event::Put(put("a", 1, 2))), []);
    assert_eq!(f.view.stale_since, None);
    // Its old revision 40 no longer outranks the new history.
    assert_eq!(f.event(delete("a", 3)), [Change::Left("a".into())]);
}

#[test]
fn one_id_in_two_pools_is_reported_and_the_latest_is_listed() {
    let mut f = Fixture::new();
    let mut other = record("a", 2);
    other.role = Role::Prefill;
    f.list(9, vec![put("a", 1, 4), item(&other, 8)]);
    assert_eq!(f.tracker.duplicates(), [WorkerId::from("a")]);
    assert_eq!(f.epochs(), [("a".to_owned(), 2)]);
    f.event(Event::Delete {
        key: item(&other, 8).key,
        revision: 10,
    });
    assert_eq!(f.epochs(), [("a".to_owned(), 1)]);
    assert!(f.tracker.duplicates().is_empty());
}

#[test]
fn junk_and_misfiled_records_are_skipped() {
    let mut f = Fixture::new();
    let junk = Item {
        value: b"{}".to_vec(),
        ..put("a", 1, 3)
    };
    let misfiled = Item {
        key: put("b", 1, 0).key,
        ..put("a", 1, 3)
    };
    f.list(5, vec![junk, misfiled, put("c", 1, 4)]);
    assert_eq!(f.epochs(), [("c".to_owned(), 1)]);
}

proptest! {
    /// A store with random writes; its events arrive late, some never, lists
    /// come in between. After the last list the view is the store, and no
    /// event from before it changes that.
    #[test]
    fn a_list_repairs_everything_and_old_events_break_nothing(
        steps in prop::collection::vec((0_u8..4, 1_u64..5, any::<bool>(), any::<bool>()), 1..60)
    ) {
        let mut f = Fixture::new();
        let mut store: BTreeMap<String, Item> = BTreeMap::new();
        let mut revision = 1;
        let mut history = Vec::new();
        for (worker, epoch, is_delete, delivered) in steps {
            revision += 1;
            let item = put(&format!("w{worker}"), epoch, revision);
            let event = if is_delete {
                store.remove(&item.key);
                Event::Delete { key: item.key, revision }
            } else {
                store.insert(item.key.clone(), item.clone());
                Event::Put(item)
            };
            history.push(event.clone());
            if delivered {
                f.event(event);
            } else if epoch == 1 {
                f.list(revision, store.values().cloned().collect());
            }
        }
        f.list(revision, store.values().cloned().collect());
        let mut expected = Vec::new();
        for item in store.values() {
            let record = WorkerRecord::from_json(&item.value).unwrap();
            expected.push((record.id.to_string(), record.epoch.0));
        }
        prop_assert_eq!(f.epochs(), expected.clone());
        for event in history {
            f.event(event);
        }
        prop_assert_eq!(f.epochs(), expected);
    }
}
