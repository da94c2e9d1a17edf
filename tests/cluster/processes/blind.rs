//! A router is cut off from etcd while everything changes there, and etcd forgets its history: it
//! serves on whom it reaches, and knows what is true within two seconds of being let back.
//!
//! What a lost delete and a compaction between list and watch do is shown beside etcd's client,
//! in the tests of membership.
//!
//! Seen to fail: with a follower that watches on from now without a list, and with one that lists
//! a hundred times a second.

use std::time::{Duration, Instant};

use baton_tests::link::{Link, Pace};
use baton_tests::models;
use baton_tests::pace::{Stopwatch, crowded};
use baton_tests::process::{Launcher, Pool, RouterProcess};
use futures::future::join_all;

use super::place::Place;
use super::{RELEASED_WITHIN, SPLIT, Traffic, ask, known};

const SOON: Duration = Duration::from_secs(20);
const REPAIRED_WITHIN: Duration = crowded(Duration::from_secs(2));
/// Whoever leaves is not gone because its lease has ended.
const LEASE: &str = "--etcd-ttl-s=60";
const JUNK: u32 = 1000;
/// Over which etcd's messages are counted afterwards.
const QUIET: Duration = Duration::from_secs(3);
/// Of four workers that keep their leases alive and look at their keys, and a router that has
/// nothing to ask; a busy loop makes thousands.
const MESSAGES_A_SECOND_MAX: f64 = 25.0;

/// Id, epoch and address of every worker.
type Listed = Vec<(String, u64, String)>;

async fn by_router(router: &RouterProcess) -> Listed {
    let cluster = router.http().get("/cluster").await.json();
    let workers = cluster["workers"].as_array().expect("workers").iter();
    let mut listed: Listed = workers
        .map(|worker| {
            let text = |key: &str| worker[key].as_str().expect(key).to_owned();
            let epoch = u64::from_str_radix(&text("epoch"), 16).expect("an epoch");
            (text("id"), epoch, text("control"))
        })
        .collect();
    listed.sort();
    listed
}

async fn by_etcd(launcher: &Launcher) -> Listed {
    let waited = Stopwatch::start();
    let workers = loop {
        if let Some(workers) = launcher.etcd.workers().await {
            break workers;
        }
        assert!(waited.elapsed() < SOON, "etcd does not answer");
    };
    let one = |(record, _): (baton_membership::WorkerRecord, i64)| {
        (record.id.to_string(), record.epoch.0, record.control)
    };
    workers.into_iter().map(one).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_could_not_see_etcd_knows_all_of_it_again() {
    let cases = known(&models::fixture("rand"), 0xb11d, 16, 24);
    let launcher = Launcher::start().await;
    let mut p0 = Place::new(Pool::Prefill, "p0", &[]);
    let mut p1 = Place::new(Pool::Prefill, "p1", &[]);
    let mut d0 = Place::new(Pool::Decode, "d0", &[]);
    let mut d1 = Place::new(Pool::Decode, "d1", &[]);
    join_all([&mut p0, &mut p1, &mut d0, &mut d1].map(|place| place.start(&launcher))).await;
    let link = Link::to(launcher.etcd.address()).await;
    let etcd = format!("--etcd=http://{}", link.address());
    let router = launcher.router(&[SPLIT[0], SPLIT[1], &etcd]).await;
    router.wait_workers("rand", (2, 2), SOON).await;
    assert_eq!(by_router(&router).await, by_etcd(&launcher).await);

    link.set(Pace::Closed);
    let waited = Stopwatch::start();
    while router.metric("baton_membership_stale").await != 1.0 {
        assert!(waited.elapsed() < SOON, "the cut is not seen");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // Another decode worker comes, one dies and its lease ends, a prefill worker is elsewhere now.
    let lease = launcher.etcd.lease_of("d1").await.expect("registered");
    let mut d2 = launcher.worker(Pool::Decode, "d2", "rand", &[LEASE]).await;
    d1.kill().await;
    launcher.etcd.revoke(lease).await;
    p1.kill().await;
    let mut p1 = Place::new(Pool::Prefill, "p1", &[]);
    p1.start(&launcher).await;
    // Each under its life of now.
    let mut truth = Listed::new();
    for worker in [d0.worker(), &d2, p0.worker(), p1.worker()] {
        let (id, life) = (worker.process.name.clone(), worker.describe().await);
        truth.push((id, life.epoch, worker.control.to_string()));
    }
    let waited = Stopwatch::start();
    while by_etcd(&launcher).await != truth {
        assert!(waited.elapsed() < SOON, "not everybody is registered");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    launcher.etcd.fill_and_compact(JUNK).await;
    assert_ne!(by_router(&router).await, truth);
    // Those whom it knows and reaches serve.
    router.wait_workers("rand", (1, 1), SOON).await;
    for one in cases.iter().take(4) {
        ask(router.grpc(), "rand", one).await.unwrap();
    }

    let traffic = Traffic::start(&router.grpc(), "rand", &cases, 2);
    link.set(Pace::Free);
    let restored = Stopwatch::start();
    while by_router(&router).await != truth {
        assert!(
            restored.elapsed() < REPAIRED_WITHIN,
            "the router lists {:?}, etcd {truth:?}",
            by_router(&router).await
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    router.wait_metric("baton_membership_stale", 0.0).await;
    router.wait_workers("rand", (2, 2), SOON).await;
    let before = launcher.etcd.messages().await;
    let counted = Instant::now();
    tokio::time::sleep(QUIET).await;
    let messages = launcher.etcd.messages().await - before;
    let counted = counted.elapsed();
    let most = MESSAGES_A_SECOND_MAX * counted.as_secs_f64();
    assert!(messages < most, "{messages} messages in {counted:?}");

    // The watch goes on where the list ended: who leaves now is seen to leave.
    d2.process.terminate();
    assert_eq!(d2.process.exit_code().await, 0);
    let left = Stopwatch::start();
    while by_router(&router).await.iter().any(|(id, ..)| id == "d2") {
        assert!(left.elapsed() < REPAIRED_WITHIN, "`d2` is still listed");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let failures = traffic.stop().await;
    assert!(failures.is_empty(), "{failures:?}");
    // The prefill worker serves where it is now.
    p0.kill().await;
    router.wait_workers("rand", (1, 1), SOON).await;
    // What it has sent is counted once it was thanked for.
    p1.worker().wait_released(RELEASED_WITHIN).await;
    let before = p1.worker().load().await.handoffs_total;
    for one in cases.iter().take(4) {
        ask(router.grpc(), "rand", one).await.unwrap();
    }
    p1.worker().wait_released(RELEASED_WITHIN).await;
    assert_eq!(p1.worker().load().await.handoffs_total, before + 4);
    for worker in [p1.worker(), d0.worker()] {
        worker.wait_released(RELEASED_WITHIN).await;
    }
}
