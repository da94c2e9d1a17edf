//! Worker and etcd are both well; what is between them is not.

use std::time::Duration;

use baton_membership::{Etcd, Membership, RegistrationState};

use crate::etcd_server::EtcdServer;
use crate::link::Link;
use crate::{SOON, Witness, config, ids, join, record, until, until_state};

const TTL: Duration = Duration::from_secs(3);
/// A lease was renewed at most this long ago, so that it outlives any cut of `TTL - RENEWED`.
const RENEWED: Duration = Duration::from_secs(1);

fn through(link: &Link) -> Etcd {
    let mut config = config(&link.url());
    config.ttl = TTL;
    Etcd::start(config).unwrap()
}

#[tokio::test]
async fn cuts_shorter_than_a_lease_drop_nobody_and_longer_ones_not_for_good() {
    let server = EtcdServer::start().await;
    let router = join(&server.url());
    // Side by side: each cut meets another moment between two renewals.
    let names = ["a", "b", "c", "d", "e", "f"];
    let mut workers = Vec::new();
    for (at, name) in (1..).zip(names) {
        let link = Link::to(server.port()).await;
        let cluster = through(&link);
        let registered = cluster.register(record(name, at)).await.unwrap();
        workers.push((link, cluster, registered));
    }
    let mut view = router.watch();
    until(&mut view, SOON, "all joined", |v| ids(v) == names).await;

    let witnesses = names.map(|name| Witness::of(router.watch(), name));
    for round in 0..3 {
        for (link, ..) in &workers {
            tokio::time::sleep(Duration::from_millis(20 + 20 * round)).await;
            link.cut();
        }
        // What is left of the shortest lease, less the longest wait before it is tried again.
        tokio::time::sleep(TTL - RENEWED - Duration::from_millis(1300)).await;
        workers.iter().for_each(|(link, ..)| link.restore());
        for (_, _, registered) in &workers {
            until_state(registered, SOON, RegistrationState::Registered).await;
        }
        // Renewed again, all of them.
        tokio::time::sleep(RENEWED).await;
    }
    for witness in witnesses {
        witness.assert_never_missing().await;
    }

    workers.iter().for_each(|(link, ..)| link.cut());
    until(&mut view, TTL + SOON, "all gone", |v| v.workers.is_empty()).await;
    workers.iter().for_each(|(link, ..)| link.restore());
    until(&mut view, SOON, "all back", |v| ids(v) == names).await;
}

#[tokio::test]
async fn an_etcd_that_answers_late_keeps_the_worker() {
    let server = EtcdServer::start().await;
    let router = join(&server.url());
    let link = Link::to(server.port()).await;
    let cluster = through(&link);
    let a = cluster.register(record("a", 1)).await.unwrap();
    let mut view = router.watch();
    until(&mut view, SOON, "joined", |v| ids(v) == ["a"]).await;
    let witness = Witness::of(router.watch(), "a");
    // Later than a third of the lease, by when an answer is missed.
    link.delay_answers(Duration::from_millis(1200));
    tokio::time::sleep(4 * TTL).await;
    assert_eq!(ids(&view.borrow()), ["a"]);
    link.delay_answers(Duration::ZERO);
    until_state(&a, SOON, RegistrationState::Registered).await;
    witness.assert_never_missing().await;
}
