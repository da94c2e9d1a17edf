//! A worker whose lease ends although it lives: it stood still for too long, could not reach
//! etcd, or somebody took the lease away. It is back under a new lease by itself, and no client
//! is wronged meanwhile.
//!
//! Seen to fail: with a worker that takes a time to live of 0 for an answer, and does not look at
//! its key.

use std::time::Duration;

use baton_tests::link::{Link, Pace};
use baton_tests::models;
use baton_tests::pace::{Stopwatch, crowded};
use baton_tests::process::{Launcher, Pool, RouterProcess, Worker};
use futures::future::join_all;

use super::{RELEASED_WITHIN, SPLIT, Traffic, ask, known};

const SOON: Duration = Duration::from_secs(20);
const TTL: Duration = Duration::from_secs(3);
const TTL_FLAG: &str = "--etcd-ttl-s=3";
/// From waking, or from the lease's end, to the next lease.
const BACK_WITHIN: Duration = crowded(Duration::from_secs(2));
/// A lease outlives a silence of its TTL by a third and a second; etcd looks for those that are
/// over twice a second.
const OVER_WITHIN: Duration = crowded(Duration::from_secs(6));

/// Two workers of each kind, the last of which reaches etcd over the link.
async fn cluster() -> (Launcher, Link, Vec<Worker>, RouterProcess) {
    let launcher = Launcher::start().await;
    let link = Link::to(launcher.etcd.address()).await;
    let etcd = format!("--etcd=http://{}", link.address());
    let workers = join_all([
        launcher.worker(Pool::Prefill, "p0", "rand", &[TTL_FLAG]),
        launcher.worker(Pool::Prefill, "p1", "rand", &[TTL_FLAG]),
        launcher.worker(Pool::Decode, "d0", "rand", &[TTL_FLAG]),
        launcher.worker(Pool::Decode, "d1", "rand", &[TTL_FLAG, &etcd]),
    ])
    .await;
    let router = launcher.router(&SPLIT).await;
    router.wait_workers("rand", (2, 2), SOON).await;
    (launcher, link, workers, router)
}

/// Waits until the worker's lease is not that one: none, or a new one.
async fn until_lease(launcher: &Launcher, id: &str, not: i64, new: bool, patience: Duration) {
    let waited = Stopwatch::start();
    loop {
        let now = launcher.etcd.lease_of(id).await;
        if now != Some(not) && now.is_some() == new {
            return;
        }
        assert!(
            waited.elapsed() < patience,
            "after {patience:?} `{id}` has the lease {now:?}; it was {not}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_slept_through_its_lease_takes_a_new_one() {
    let cases = known(&models::fixture("rand"), 0x1ea5e, 24, 40);
    let (launcher, _link, mut workers, router) = cluster().await;
    let epochs = async |workers: &[Worker]| {
        let described = workers.iter().map(|worker| worker.describe());
        let described = join_all(described).await;
        Vec::from_iter(described.into_iter().map(|one| one.epoch))
    };
    let lives = epochs(&workers).await;
    let traffic = Traffic::start(&router.grpc(), "rand", &cases, 4);
    // A decode worker with streams on it, then a prefill worker that sends to both.
    for (at, left) in [(3, (2, 1)), (1, (1, 2))] {
        let id = workers[at].process.name.clone();
        let lease = launcher.etcd.lease_of(&id).await.expect("registered");
        traffic.wait_answered(4).await;
        workers[at].process.freeze();
        router.wait_workers("rand", left, SOON).await;
        until_lease(&launcher, &id, lease, false, OVER_WITHIN).await;
        traffic.wait_answered(8).await;
        workers[at].process.thaw();
        until_lease(&launcher, &id, lease, true, BACK_WITHIN).await;
        router.wait_workers("rand", (2, 2), BACK_WITHIN).await;
        // It gets work again, and what it had before has moved.
        let before = workers[at].load().await.handoffs_total;
        let waited = Stopwatch::start();
        while workers[at].load().await.handoffs_total == before {
            assert!(waited.elapsed() < SOON, "`{id}` gets no work");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    let failures = traffic.stop().await;
    assert!(failures.is_empty(), "{failures:?}");
    // The lives are the same: a lease is a listing, and its end ends nothing.
    assert_eq!(epochs(&workers).await, lives);
    for worker in &mut workers {
        assert!(worker.process.runs());
        worker.wait_released(RELEASED_WITHIN).await;
    }
    assert_eq!(router.metric("baton_token_conflicts_total").await, 0.0);
    for one in cases.iter().take(8) {
        ask(router.grpc(), "rand", one).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_ends_or_is_taken_away_costs_no_request() {
    let cases = known(&models::fixture("rand"), 0x1ea5f, 24, 40);
    let (launcher, link, mut workers, router) = cluster().await;
    let view = launcher.etcd.follow();
    let traffic = Traffic::start(&router.grpc(), "rand", &cases, 4);
    // One that cannot reach etcd for longer than its lease, and then can.
    let lease = launcher.etcd.lease_of("d1").await.expect("registered");
    link.set(Pace::Closed);
    until_lease(&launcher, "d1", lease, false, OVER_WITHIN).await;
    traffic.wait_answered(4).await;
    link.set(Pace::Free);
    until_lease(&launcher, "d1", lease, true, BACK_WITHIN).await;
    router.wait_workers("rand", (2, 2), BACK_WITHIN).await;
    for at in [3, 1, 2, 0] {
        let id = workers[at].process.name.clone();
        let lease = launcher.etcd.lease_of(&id).await.expect("registered");
        traffic.wait_answered(2).await;
        launcher.etcd.revoke(lease).await;
        until_lease(&launcher, &id, lease, true, BACK_WITHIN).await;
        router.wait_workers("rand", (2, 2), BACK_WITHIN).await;
        traffic.wait_answered(2).await;
    }
    baton_tests::process::wait_listed(&view, &["d0", "d1", "p0", "p1"], SOON).await;
    let failures = traffic.stop().await;
    assert!(failures.is_empty(), "{failures:?}");
    for worker in &mut workers {
        assert!(worker.process.runs());
        worker.wait_released(RELEASED_WITHIN).await;
    }
    // All of their leases are kept alive, for longer than one lasts.
    let leases = async || {
        let workers = launcher.etcd.workers().await.expect("it answers");
        Vec::from_iter(workers.into_iter().map(|(_, lease)| lease))
    };
    // A machine that stands still for that long ends a lease as well, but not each time.
    let mut kept = false;
    for _ in 0..3 {
        let before = leases().await;
        tokio::time::sleep(2 * TTL).await;
        kept = before.len() == 4 && leases().await == before;
        if kept {
            break;
        }
    }
    assert!(kept, "leases end that nobody has touched");
}
