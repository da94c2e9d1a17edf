//! etcd stops, comes back without its data, or stands still, for several lives of a lease, while
//! requests come steadily: routers serve on who they know, a worker that dies meanwhile is found
//! by its connection, and everybody who lives is listed again without anybody's help.
//!
//! Each outage lasts some leases and not half a minute; nothing in here counts longer.
//!
//! Seen to fail: with a follower that takes an etcd it cannot reach for an empty one.

use std::sync::Arc;
use std::time::Duration;

use baton_proto::Error;
use baton_tests::models;
use baton_tests::pace::{Stopwatch, crowded};
use baton_tests::process::{Launcher, Pool, RouterProcess};
use futures::future::join_all;
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::MissedTickBehavior;

use super::place::Place;
use super::{Known, RELEASED_WITHIN, SPLIT, known};

const SOON: Duration = Duration::from_secs(20);
const TTL: Duration = Duration::from_secs(2);
const FLAGS: [&str; 1] = ["--etcd-ttl-s=2"];
const OUTAGE: Duration = Duration::from_secs(5);
const LISTED_WITHIN: Duration = crowded(Duration::from_secs(5));
/// 20 requests a second, as long as the machine answers that many.
const BETWEEN_REQUESTS: Duration = Duration::from_millis(50);
const UNANSWERED_MAX: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Outage {
    /// Killed, and started with its data.
    Stopped,
    /// Killed, and started with nothing.
    Emptied,
    /// Its sockets are open.
    Frozen,
}

/// Requests that come however the ones before them fare, unless too many of those wait.
struct Steady {
    stop: watch::Sender<bool>,
    clients: JoinHandle<(usize, Vec<Error>)>,
}

impl Steady {
    fn start(router: &RouterProcess, cases: &Arc<Vec<Known>>) -> Self {
        let stop = watch::Sender::new(false);
        let (mut stopped, client, cases) = (stop.subscribe(), router.grpc(), Arc::clone(cases));
        let clients = tokio::spawn(async move {
            let mut asked = JoinSet::new();
            let mut every = tokio::time::interval(BETWEEN_REQUESTS);
            every.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let may_ask = Arc::new(Semaphore::new(UNANSWERED_MAX));
            for index in 0.. {
                tokio::select! {
                    _ = stopped.wait_for(|stop| *stop) => break,
                    _ = every.tick() => {
                        let Ok(permit) = Arc::clone(&may_ask).try_acquire_owned() else {
                            continue;
                        };
                        let (client, cases) = (client.clone(), Arc::clone(&cases));
                        asked.spawn(async move {
                            let _permit = permit;
                            super::ask(client, "rand", &cases[index % cases.len()]).await
                        });
                    }
                }
            }
            let answers = asked.join_all().await;
            let count = answers.len();
            (count, answers.into_iter().filter_map(Result::err).collect())
        });
        Self { stop, clients }
    }

    /// How many came, and what failed.
    async fn stop(self) -> (usize, Vec<Error>) {
        self.stop.send_replace(true);
        self.clients.await.expect("no wrong token")
    }
}

async fn until_stale(router: &RouterProcess, stale: f64) {
    let waited = Stopwatch::start();
    while router.metric("baton_membership_stale").await != stale {
        assert!(waited.elapsed() < SOON, "stale is not {stale}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until etcd itself lists these workers and no other.
async fn until_listed(launcher: &Launcher, ids: &[&str], patience: Duration) {
    let waited = Stopwatch::start();
    loop {
        let workers = launcher.etcd.workers().await;
        let workers = workers.map(|workers| {
            let ids = workers.into_iter().map(|(record, _)| record.id.to_string());
            Vec::from_iter(ids)
        });
        if workers.as_ref().is_some_and(|now| now == ids) {
            return;
        }
        assert!(
            waited.elapsed() < patience,
            "after {patience:?} etcd lists {workers:?}, not {ids:?}"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_outage_of_etcd_costs_a_request_or_a_worker() {
    let cases = known(&models::fixture("rand"), 0x0e7cd, 24, 24);
    let mut launcher = Launcher::start().await;
    let mut places = [
        Place::new(Pool::Prefill, "p0", &FLAGS),
        Place::new(Pool::Prefill, "p1", &FLAGS),
        Place::new(Pool::Decode, "d0", &FLAGS),
        Place::new(Pool::Decode, "d1", &FLAGS),
    ];
    join_all(places.iter_mut().map(|place| place.start(&launcher))).await;
    let router = launcher.router(&SPLIT).await;
    router.wait_workers("rand", (2, 2), SOON).await;
    until_stale(&router, 0.0).await;

    for outage in [Outage::Stopped, Outage::Emptied, Outage::Frozen] {
        let traffic = Steady::start(&router, &cases);
        let began = Stopwatch::start();
        match outage {
            Outage::Stopped | Outage::Emptied => launcher.etcd.kill().await,
            Outage::Frozen => launcher.etcd.freeze(),
        }
        let dies = outage == Outage::Stopped;
        if dies {
            places[3].kill().await;
            router.wait_workers("rand", (2, 1), SOON).await;
        }
        until_stale(&router, 1.0).await;
        tokio::time::sleep(OUTAGE.saturating_sub(began.elapsed())).await;
        let alive = (2, if dies { 1 } else { 2 });
        router.wait_workers("rand", alive, SOON).await;

        match outage {
            Outage::Stopped => launcher.restart_etcd(),
            Outage::Emptied => {
                launcher.etcd.erase();
                launcher.restart_etcd();
            }
            Outage::Frozen => launcher.etcd.thaw(),
        }
        let mut ids = vec!["d0", "d1", "p0", "p1"];
        ids.retain(|id| !dies || *id != "d1");
        until_listed(&launcher, &ids, TTL + LISTED_WITHIN).await;
        until_stale(&router, 0.0).await;
        router.wait_workers("rand", alive, SOON).await;
        let (count, failures) = traffic.stop().await;
        assert!(failures.is_empty(), "{outage:?}: {failures:?}");
        println!("{outage:?}: {count} requests, none failed");
        if dies {
            places[3].start(&launcher).await;
            router.wait_workers("rand", (2, 2), SOON).await;
        }
    }
    for place in &places {
        place.worker().wait_released(RELEASED_WITHIN).await;
        assert!(place.worker().load().await.handoffs_total > 0);
    }
}
