//! Worker and etcd are both well; what is between them is not.
//!
//! Seen to fail: with leases that last no longer than the TTL.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_membership::{Etcd, Membership, RegistrationState, View};
use baton_proto::Epoch;
use tokio::task::JoinSet;

use crate::etcd_server::EtcdServer;
use crate::link::Link;
use crate::{SOON, Witness, config, ids, join, lease_of, record, until, until_state};

const TTL: Duration = Duration::from_secs(3);
/// Between two renewals.
const RENEWED: Duration = Duration::from_secs(1);

fn through(link: &Link) -> Etcd {
    let mut config = config(&link.url());
    config.ttl = TTL;
    Etcd::start(config).unwrap()
}

/// Twenty cuts of each length, each at another moment between two renewals: those below the TTL
/// drop nobody, after a longer one everybody is back by itself, as the same life.
#[tokio::test]
async fn cuts_below_the_ttl_drop_nobody_and_longer_ones_not_for_good() {
    /// A lease outlasts the TTL by a renewal's time and a second; this is without the first.
    const HELD: Duration = Duration::from_millis(3800);
    const CUTS_MS: [u64; 3] = [2500, 2900, 3500];
    let server = EtcdServer::start().await;
    let router = join(&server.url());
    let names: Vec<String> = (0..20).map(|at| format!("w{at:02}")).collect();
    let mut workers = Vec::new();
    for name in &names {
        let link = Link::to(server.port()).await;
        let cluster = through(&link);
        let registered = cluster.register(record(name, 7)).await.unwrap();
        workers.push(Arc::new((link, cluster, registered)));
    }
    let all =
        |v: &Arc<View>| ids(v) == names && v.workers.values().all(|one| one.epoch == Epoch(7));
    let mut view = router.watch();
    until(&mut view, SOON, "all joined", all).await;

    for cut in CUTS_MS.map(Duration::from_millis) {
        let witnesses: Vec<_> = names
            .iter()
            .map(|name| Witness::of(router.watch(), name))
            .collect();
        let mut cuts = JoinSet::new();
        for (at, worker) in (0..).zip(&workers) {
            let worker = Arc::clone(worker);
            let client = server.client().await;
            let key = format!("/baton/v1/test/0/workers/decode/w{at:02}");
            cuts.spawn(async move {
                let (link, _, registered) = &*worker;
                let lease = lease_of(&client, &key).await.expect("it is registered");
                // Over one renewal's time, all of them.
                tokio::time::sleep(RENEWED * at / 20).await;
                let began = Instant::now();
                link.cut();
                tokio::time::sleep(cut).await;
                link.restore();
                // A renewal brings it back to its whole length, of five seconds; one that ended
                // has less than none.
                loop {
                    let left = client.lease_left(lease).await.unwrap();
                    if !(0..4).contains(&left) {
                        break;
                    }
                    assert!(began.elapsed() < cut + SOON, "no renewal");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                let lasted = began.elapsed();
                until_state(registered, SOON, RegistrationState::Registered).await;
                lasted
            });
        }
        let longest = cuts.join_all().await.into_iter().max().unwrap();
        until(&mut view, SOON, "all back", all).await;
        for witness in witnesses {
            // A machine that stood still cuts for longer than it is told to, and renews later.
            if cut < TTL && longest < HELD {
                witness.assert_never_missing().await;
            }
        }
    }
    workers.iter().for_each(|worker| worker.0.cut());
    until(&mut view, TTL + 2 * SOON, "all gone", |v| {
        v.workers.is_empty()
    })
    .await;
    workers.iter().for_each(|worker| worker.0.restore());
    until(&mut view, SOON, "all back for good", all).await;
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
