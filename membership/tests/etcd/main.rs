//! Membership against a real etcd that the tests start, kill, freeze and empty.
//!
//! Time here is real: etcd has its own clock. Every wait is for a condition with
//! a limit; the pauses are outages of a stated length, not synchronisation.

mod etcd_server;
mod link;
mod links;
mod members;
mod secured;

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_etcd::Client;
use baton_membership::etcd::Faults;
use baton_membership::{
    Capacity, Error, Etcd, EtcdConfig, Membership, Registration, RegistrationState, Role, View,
    WorkerRecord, WorkerState,
};
use baton_proto::kv_layout::{KvDtype, KvGroup, KvGroupKind, KvLayout};
use baton_proto::model_card::ModelCard;
use baton_proto::{Epoch, ModelRevision, NumericsId, protocol};
use etcd_server::EtcdServer;
use link::Link;
use tokio::sync::watch;

const TTL: Duration = Duration::from_secs(2);
/// Longer than a lease lasts.
const LEASE_IS_OVER: Duration = Duration::from_secs(5);
/// For things that take milliseconds, on a busy machine.
const SOON: Duration = Duration::from_secs(15);

fn config(endpoint: &str) -> EtcdConfig {
    let mut config = EtcdConfig::new(vec![endpoint.to_owned()], "test");
    config.ttl = TTL;
    config
}

fn join(endpoint: &str) -> Etcd {
    Etcd::start(config(endpoint)).unwrap()
}

fn record(id: &str, epoch: u64) -> WorkerRecord {
    WorkerRecord {
        id: id.into(),
        epoch: Epoch(epoch),
        role: Role::Decode,
        state: WorkerState::Ready,
        control: "127.0.0.1:7001".to_owned(),
        data: "127.0.0.1:7002".to_owned(),
        protocol: protocol::CURRENT,
        card: ModelCard {
            name: "m".to_owned(),
            revision: ModelRevision("m@1".to_owned()),
            architecture: "llama".to_owned(),
            vocab_size: 512,
            tokenizer_size: 512,
            context_max: 2048,
            parameters: 1000,
            created: 0,
            weight_bytes: 4000,
            layout: KvLayout {
                block_size: 16,
                dtype: KvDtype::F16,
                scale_group: 0,
                kv_heads: 2,
                head_dim: 64,
                layers: 1,
                groups: vec![KvGroup {
                    kind: KvGroupKind::Full,
                    layers: vec![0],
                }],
                numerics: NumericsId([1; 16]),
                origin: None,
                shard: None,
            },
            tokenizer_hash: "t".to_owned(),
        },
        capacity: Capacity {
            blocks: vec![100],
            sequences_max: 8,
        },
        topology: String::new(),
    }
}

const KEY_A: &str = "/baton/v1/test/0/workers/decode/a";

async fn until(
    view: &mut watch::Receiver<Arc<View>>,
    within: Duration,
    what: &str,
    condition: impl FnMut(&Arc<View>) -> bool,
) -> Arc<View> {
    let seen = tokio::time::timeout(within, view.wait_for(condition)).await;
    if let Ok(seen) = seen {
        return Arc::clone(&seen.unwrap());
    }
    drop(seen);
    panic!(
        "not within {within:?}: {what}; the view is {}",
        show(&view.borrow())
    )
}

async fn until_state(registration: &Registration, within: Duration, state: RegistrationState) {
    let mut states = registration.watch_state();
    if tokio::time::timeout(within, states.wait_for(|now| *now == state))
        .await
        .is_err()
    {
        panic!(
            "not {state:?} within {within:?} but {:?}",
            registration.state()
        );
    }
}

fn show(view: &View) -> String {
    let workers: Vec<_> = view
        .workers
        .values()
        .map(|w| format!("{} {}", w.id, w.epoch))
        .collect();
    format!("{workers:?} stale: {}", view.stale_since.is_some())
}

fn ids(view: &View) -> Vec<&str> {
    view.workers.keys().map(|id| id.as_str()).collect()
}

fn fresh(view: &View) -> bool {
    view.stale_since.is_none()
}

/// Notes every view in which `id` is missing, until it is asked.
struct Witness {
    stop: tokio_util::sync::CancellationToken,
    task: tokio::task::JoinHandle<Vec<String>>,
}

impl Witness {
    fn of(mut view: watch::Receiver<Arc<View>>, id: &str) -> Self {
        let id = baton_proto::WorkerId::from(id);
        let stop = tokio_util::sync::CancellationToken::new();
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            let mut missing = Vec::new();
            loop {
                tokio::select! {
                    () = stopped.cancelled() => return missing,
                    changed = view.changed() => if changed.is_err() { return missing },
                }
                let now = view.borrow_and_update();
                if !now.workers.contains_key(&id) {
                    missing.push(show(&now));
                }
            }
        });
        Self { stop, task }
    }

    async fn assert_never_missing(self) {
        self.stop.cancel();
        let missing = self.task.await.unwrap();
        assert!(missing.is_empty(), "the worker was dropped: {missing:?}");
    }
}

async fn lease_of(client: &Client, key: &str) -> Option<i64> {
    Some(life_of(client, key).await?.1)
}

/// The revision that a key was made at, and its lease.
async fn life_of(client: &Client, key: &str) -> Option<(i64, i64)> {
    let found = client.get(key).await.unwrap()?;
    Some((found.create_revision, found.lease))
}

/// The same once it was gone and is there again.
async fn next_life(client: &Client, key: &str, before: i64) -> (i64, i64) {
    let waited = Instant::now();
    loop {
        match life_of(client, key).await {
            Some(life) if life.0 != before => return life,
            _ => tokio::time::sleep(Duration::from_millis(20)).await,
        }
        assert!(waited.elapsed() < SOON, "`{key}` does not come back");
    }
}

#[tokio::test]
async fn joining_changing_and_leaving_are_seen() {
    let server = EtcdServer::start().await;
    let (workers, router) = (join(&server.url()), join(&server.url()));
    let mut view = router.watch();
    assert!(!fresh(&view.borrow()), "nothing was listed yet");

    let a = workers.register(record("a", 1)).await.unwrap();
    let b = workers.register(record("b", 1)).await.unwrap();
    until(&mut view, SOON, "both joined", |v| {
        ids(v) == ["a", "b"] && fresh(v)
    })
    .await;
    a.registered().await.unwrap();

    a.set_state(WorkerState::Draining).await.unwrap();
    let draining = |v: &Arc<View>| v.workers[&"a".into()].state == WorkerState::Draining;
    until(&mut view, SOON, "a drains", draining).await;

    a.leave().await.unwrap();
    until(&mut view, SOON, "a left", |v| ids(v) == ["b"]).await;
    drop(b);
    until(&mut view, SOON, "b was dropped", |v| v.workers.is_empty()).await;

    // Another generation is another world.
    let mut other = config(&server.url());
    other.generation = "1".to_owned();
    let other = Etcd::start(other).unwrap();
    let c = other.register(record("c", 1)).await.unwrap();
    c.registered().await.unwrap();
    assert!(view.borrow().workers.is_empty());

    other.close().await;
    assert_eq!(c.state(), RegistrationState::Left);
    assert_eq!(
        other.register(record("d", 1)).await.unwrap_err(),
        Error::Closed
    );
    let client = server.client().await;
    let left = client.list("/baton", 1 << 20).await.unwrap();
    assert_eq!(left.count, 0, "closing withdraws and waits");
}

#[tokio::test]
async fn a_revoked_lease_brings_the_same_record_under_a_new_one() {
    let server = EtcdServer::start().await;
    let (workers, router) = (join(&server.url()), join(&server.url()));
    let a = workers.register(record("a", 77)).await.unwrap();
    a.registered().await.unwrap();
    let mut view = router.watch();
    until(&mut view, SOON, "joined", |v| ids(v) == ["a"]).await;

    let client = server.client().await;
    // That it was gone is seen in etcd itself: a view may have it again before one looks.
    let (first, lease) = life_of(&client, KEY_A).await.unwrap();
    client.lease_revoke(lease).await.unwrap();
    let (second, new) = next_life(&client, KEY_A, first).await;
    assert_ne!(new, lease);
    let back = until(&mut view, SOON, "back", |v| ids(v) == ["a"]).await;
    assert_eq!(back.workers[&"a".into()].epoch, Epoch(77));
    until_state(&a, SOON, RegistrationState::Registered).await;

    // A key deleted by hand comes back too.
    assert!(client.delete(KEY_A).await.unwrap());
    next_life(&client, KEY_A, second).await;
    until_state(&a, SOON, RegistrationState::Registered).await;
    // The view follows: what comes after it comes to a view that has seen it.
    let b = workers.register(record("b", 1)).await.unwrap();
    until(&mut view, SOON, "put back", |v| ids(v) == ["a", "b"]).await;
    drop(b);
}

#[tokio::test]
async fn a_worker_that_dies_is_gone_after_its_ttl() {
    let server = EtcdServer::start().await;
    let link = Link::to(server.port()).await;
    let (workers, router) = (join(&link.url()), join(&server.url()));
    let a = workers.register(record("a", 1)).await.unwrap();
    a.registered().await.unwrap();
    let mut view = router.watch();
    until(&mut view, SOON, "joined", |v| ids(v) == ["a"]).await;

    link.cut();
    let cut = Instant::now();
    until(&mut view, TTL + SOON, "expired", |v| v.workers.is_empty()).await;
    assert!(cut.elapsed() > TTL / 2, "{:?}", cut.elapsed());
    until_state(&a, SOON, RegistrationState::Pending).await;
    let error = a.set_state(WorkerState::Draining).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");

    link.restore();
    // What was asked for meanwhile is what is published.
    let draining = |v: &Arc<View>| {
        v.workers
            .get(&"a".into())
            .is_some_and(|w| w.state == WorkerState::Draining)
    };
    until(&mut view, SOON, "back by itself", draining).await;
}

#[tokio::test]
async fn a_killed_etcd_leaves_the_view_in_use_until_it_is_back() {
    let mut server = EtcdServer::start().await;
    let (workers, router) = (join(&server.url()), join(&server.url()));
    let a = workers.register(record("a", 1)).await.unwrap();
    let mut view = router.watch();
    until(&mut view, SOON, "joined", |v| ids(v) == ["a"] && fresh(v)).await;
    let witness = Witness::of(router.watch(), "a");
    let before = router.health();

    server.kill();
    until(&mut view, SOON, "stale", |v| !fresh(v)).await;
    assert!(!router.health().fresh && router.health().last_error.is_some());
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(ids(&view.borrow()), ["a"]);
    server.restart().await;
    until(&mut view, SOON, "fresh", |v| fresh(v)).await;
    until_state(&a, SOON, RegistrationState::Registered).await;
    // It is really kept alive again.
    tokio::time::sleep(LEASE_IS_OVER).await;
    assert_eq!(ids(&view.borrow()), ["a"]);
    witness.assert_never_missing().await;
    let health = router.health();
    assert!(health.fresh);
    assert!(health.lists - before.lists < 40, "a busy loop: {health:?}");
}

#[tokio::test]
async fn an_etcd_that_lost_its_data_gets_the_workers_back() {
    let mut server = EtcdServer::start().await;
    // So that the new history is recognised by its lower revision.
    let client = server.client().await;
    for n in 0..20 {
        client.put(format!("/junk/{n}"), "x").await.unwrap();
    }
    let (workers, router) = (join(&server.url()), join(&server.url()));
    let a = workers.register(record("a", 5)).await.unwrap();
    let b = workers.register(record("b", 5)).await.unwrap();
    let mut view = router.watch();
    until(&mut view, SOON, "joined", |v| {
        ids(v) == ["a", "b"] && fresh(v)
    })
    .await;
    let witness = Witness::of(router.watch(), "a");

    server.kill();
    server.erase();
    server.restart().await;
    let client = server.client().await;
    let again = Instant::now();
    while lease_of(&client, KEY_A).await.is_none() {
        assert!(again.elapsed() < TTL + SOON, "not registered again");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let back = until(&mut view, TTL + SOON, "fresh", |v| fresh(v)).await;
    assert_eq!(ids(&back), ["a", "b"]);
    assert_eq!(back.workers[&"a".into()].epoch, Epoch(5));
    until_state(&a, SOON, RegistrationState::Registered).await;
    until_state(&b, SOON, RegistrationState::Registered).await;
    witness.assert_never_missing().await;
}

#[tokio::test]
async fn a_frozen_etcd_drops_nobody_although_it_ends_their_leases() {
    let server = EtcdServer::start().await;
    let link = Link::to(server.port()).await;
    let workers = join(&link.url());
    let mut patient = config(&server.url());
    patient.grace.outage = Duration::from_secs(4);
    let router = Etcd::start(patient).unwrap();
    let a = workers.register(record("a", 1)).await.unwrap();
    let mut view = router.watch();
    until(&mut view, SOON, "joined", |v| ids(v) == ["a"] && fresh(v)).await;
    let lease = lease_of(&server.client().await, KEY_A).await;
    let witness = Witness::of(router.watch(), "a");

    server.freeze();
    // The pings find it after 4 s, the list that follows fails after 3 s more.
    until(&mut view, 2 * SOON, "stale", |v| !fresh(v)).await;
    // The worker comes back after the router, so that its record is gone for a while.
    link.cut();
    server.thaw();
    let client = server.client().await;
    let thawed = Instant::now();
    while lease_of(&client, KEY_A).await.is_some() || !router.health().fresh {
        assert!(thawed.elapsed() < SOON, "the lease did not end");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    link.restore();
    until(&mut view, SOON, "fresh", |v| fresh(v)).await;
    until_state(&a, SOON, RegistrationState::Registered).await;
    assert_ne!(lease_of(&client, KEY_A).await, lease);
    assert_eq!(ids(&view.borrow()), ["a"]);
    witness.assert_never_missing().await;
}

#[tokio::test]
async fn what_changed_behind_a_cut_and_a_compaction_is_found() {
    let server = EtcdServer::start().await;
    let link = Link::to(server.port()).await;
    let (workers, router) = (join(&server.url()), join(&link.url()));
    let a = workers.register(record("a", 1)).await.unwrap();
    let b = workers.register(record("b", 1)).await.unwrap();
    let mut view = router.watch();
    until(&mut view, SOON, "joined", |v| {
        ids(v) == ["a", "b"] && fresh(v)
    })
    .await;

    link.cut();
    until(&mut view, SOON, "stale", |v| !fresh(v)).await;
    a.leave().await.unwrap();
    let c = workers.register(record("c", 1)).await.unwrap();
    c.registered().await.unwrap();
    let mut moved = record("b", 1);
    moved.control = "127.0.0.1:9999".to_owned();
    b.update(moved).await.unwrap();
    let client = server.client().await;
    let mut revision = 0;
    for n in 0..1000 {
        // Half of it where the workers are.
        let key = if n % 2 == 0 {
            format!("/junk/{n}")
        } else {
            format!("{KEY_A}-junk{n}")
        };
        revision = client.put(key, "not a record").await.unwrap();
    }
    client.compact(revision, true).await.unwrap();
    assert_eq!(ids(&view.borrow()), ["a", "b"], "kept while cut");

    let before = router.health();
    link.restore();
    let restored = Instant::now();
    let now = until(&mut view, SOON, "repaired", |v| {
        ids(v) == ["b", "c"] && fresh(v)
    })
    .await;
    assert_eq!(now.workers[&"b".into()].control, "127.0.0.1:9999");
    // The watch works again, and nothing spins.
    c.leave().await.unwrap();
    until(&mut view, SOON, "c left", |v| ids(v) == ["b"]).await;
    let lists = router.health().lists - before.lists;
    assert!(lists < 10, "{lists} lists in {:?}", restored.elapsed());
}

#[tokio::test]
async fn a_compaction_between_list_and_watch_starts_over() {
    let server = EtcdServer::start().await;
    let client = server.client().await;
    let mut revision = 0;
    for n in 0..10 {
        revision = client.put("/junk", n.to_string()).await.unwrap();
    }
    client.compact(revision, false).await.unwrap();
    let mut config = config(&server.url());
    config.faults = Faults {
        first_watch_revision: Some(2),
        ..Faults::default()
    };
    let router = Etcd::start(config).unwrap();
    let mut view = router.watch();
    until(&mut view, SOON, "fresh", |v| fresh(v)).await;
    let workers = join(&server.url());
    let a = workers.register(record("a", 1)).await.unwrap();
    a.registered().await.unwrap();
    until(&mut view, SOON, "joined", |v| ids(v) == ["a"]).await;
    a.leave().await.unwrap();
    until(&mut view, SOON, "the second watch works", |v| {
        v.workers.is_empty()
    })
    .await;
    // The cancelled one and a good one: had the old revision been asked for
    // again, lists would have stood in for the watch.
    let health = router.health();
    assert_eq!(health.watches, 2, "{health:?}");
    assert!(health.lists <= 3, "{health:?}");
}

#[tokio::test]
async fn a_lost_delete_is_repaired_by_the_periodic_list() {
    let server = EtcdServer::start().await;
    let workers = join(&server.url());
    let router = |relist: Duration| {
        let mut config = config(&server.url());
        config.relist_interval = relist;
        config.faults = Faults {
            lose_deletes: true,
            ..Faults::default()
        };
        Etcd::start(config).unwrap()
    };
    let (often, never) = (
        router(Duration::from_millis(500)),
        router(Duration::from_secs(3600)),
    );
    let a = workers.register(record("a", 1)).await.unwrap();
    let (mut repaired, mut blind) = (often.watch(), never.watch());
    until(&mut repaired, SOON, "joined", |v| ids(v) == ["a"]).await;
    until(&mut blind, SOON, "joined", |v| ids(v) == ["a"]).await;
    a.leave().await.unwrap();
    until(&mut repaired, SOON, "repaired", |v| v.workers.is_empty()).await;
    assert!(often.health().repairs >= 1);
    assert_eq!(
        ids(&blind.borrow()),
        ["a"],
        "the delete was not lost, so nothing was shown"
    );
}

#[tokio::test]
async fn of_two_workers_with_one_id_the_later_is_listed_and_the_earlier_told() {
    let server = EtcdServer::start().await;
    let (one, two, router) = (
        join(&server.url()),
        join(&server.url()),
        join(&server.url()),
    );
    let old = one.register(record("a", 1)).await.unwrap();
    old.registered().await.unwrap();
    let mut view = router.watch();
    until(&mut view, SOON, "the first", |v| ids(v) == ["a"]).await;

    let new = two.register(record("a", 2)).await.unwrap();
    let epoch = |v: &Arc<View>| v.workers.get(&"a".into()).map(|w| w.epoch);
    until(&mut view, SOON, "the second", |v| {
        epoch(v) == Some(Epoch(2))
    })
    .await;
    until_state(&old, SOON, RegistrationState::Superseded { by: Epoch(2) }).await;
    let superseded = Error::Superseded {
        id: "a".into(),
        by: Epoch(2),
    };
    assert_eq!(old.registered().await, Err(superseded.clone()));
    assert_eq!(old.set_state(WorkerState::Draining).await, Err(superseded));
    old.leave().await.unwrap();
    // Nobody takes it back, and the earlier one's end removes nothing.
    let witness = Witness::of(router.watch(), "a");
    tokio::time::sleep(LEASE_IS_OVER).await;
    assert_eq!(epoch(&view.borrow()), Some(Epoch(2)));
    assert_eq!(new.state(), RegistrationState::Registered);
    witness.assert_never_missing().await;
}

#[tokio::test]
async fn a_restart_faster_than_the_lease_replaces_the_old_life_at_once() {
    let server = EtcdServer::start().await;
    let link = Link::to(server.port()).await;
    let router = join(&server.url());
    let mut view = router.watch();
    let dead = join(&link.url());
    let old = dead.register(record("a", 1)).await.unwrap();
    until(&mut view, SOON, "first life", |v| ids(v) == ["a"]).await;
    let client = server.client().await;
    let lease = lease_of(&client, KEY_A).await.unwrap();
    // As kill -9: nothing is withdrawn.
    link.cut();
    let mut restarted = record("a", 2);
    restarted.data = "127.0.0.1:7999".to_owned();
    let workers = join(&server.url());
    let new = workers.register(restarted).await.unwrap();
    new.registered().await.unwrap();
    let now = until(&mut view, SOON, "second life", |v| {
        v.workers
            .get(&"a".into())
            .is_some_and(|w| w.epoch == Epoch(2))
    })
    .await;
    // It did not wait for the end of that lease.
    let left = client.lease_left(lease).await.unwrap();
    assert!(left > 0, "the first life's lease has ended");
    assert_eq!(now.workers[&"a".into()].data, "127.0.0.1:7999");
    // The end of the first life's lease does not take the second's record.
    let witness = Witness::of(router.watch(), "a");
    tokio::time::sleep(LEASE_IS_OVER).await;
    // And were it only partitioned, it learns that it is replaced.
    link.restore();
    until_state(&old, SOON, RegistrationState::Superseded { by: Epoch(2) }).await;
    witness.assert_never_missing().await;
}

#[tokio::test]
async fn starting_before_etcd_is_no_error() {
    let mut server = EtcdServer::start().await;
    server.kill();
    let cluster = join(&server.url());
    let a = cluster.register(record("a", 1)).await.unwrap();
    let mut view = cluster.watch();
    let wait = tokio::time::timeout(Duration::from_secs(1), a.registered()).await;
    assert!(wait.is_err() && a.state() == RegistrationState::Pending);
    assert!(!fresh(&view.borrow()) && view.borrow().workers.is_empty());
    server.restart().await;
    until(&mut view, SOON, "joined", |v| ids(v) == ["a"] && fresh(v)).await;
    a.registered().await.unwrap();
}

#[tokio::test]
async fn leaving_while_etcd_is_away_ends_in_time_with_an_error() {
    let mut server = EtcdServer::start().await;
    let cluster = join(&server.url());
    let a = cluster.register(record("a", 1)).await.unwrap();
    a.registered().await.unwrap();
    server.kill();
    let started = Instant::now();
    let error = a.leave().await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    cluster.close().await;
    assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
}
