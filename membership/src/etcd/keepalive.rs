//! Keeps one lease alive, whatever else is being asked of etcd meanwhile.
//!
//! Every third of a TTL the lease is renewed. An answer that does not come within such a
//! third tells that the stream may be dead, so a fresh one is opened, which renews as well: an
//! etcd that answers late keeps its workers, and a stream that ended without a word is noticed.

use std::time::{Duration, Instant};

use etcd_client::{Client, LeaseKeepAliveStream, LeaseKeeper};
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use super::connector::{CallError, bounded};

const WHAT: &str = "keep the lease alive";

/// When etcd last confirmed a lease, and for how long; `None` if it never did.
pub(super) type Confirmed = watch::Sender<Option<(Instant, Duration)>>;

/// A third of a TTL: between two renewals, and what an answer may take.
pub(super) fn third(ttl: Duration) -> Duration {
    (ttl / 3).max(Duration::from_millis(100))
}

/// One lease and its stream.
pub(super) struct Keepalive {
    client: Client,
    id: i64,
    ttl: Duration,
    every: Duration,
    confirmed: Confirmed,
    keeper: LeaseKeeper,
    answers: LeaseKeepAliveStream,
}

impl Keepalive {
    /// Opens the stream; its first answer has the lease's whole life to arrive, since a slow etcd
    /// has renewed the lease all the same.
    ///
    /// # Errors
    /// Whatever etcd says, that there is no such lease ([`CallError::is_lease_lost`]) included.
    pub(super) async fn open(
        mut client: Client,
        id: i64,
        ttl: Duration,
        every: Duration,
        confirmed: Confirmed,
    ) -> Result<Self, CallError> {
        let (keeper, answers) = renew(&mut client, id, ttl, &confirmed).await?;
        Ok(Self {
            client,
            id,
            ttl,
            every,
            confirmed,
            keeper,
            answers,
        })
    }

    /// Renews for as long as etcd lets it; returns why it does not, `None` if the lease is gone.
    pub(super) async fn run(mut self) -> Option<CallError> {
        let tick = self.every;
        let mut beat = tokio::time::interval(tick);
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            beat.tick().await;
            let asked = Instant::now();
            let answer = bounded(WHAT, tick, async {
                self.keeper.keep_alive().await?;
                self.answers.message().await
            });
            match answer.await {
                Ok(Some(answer)) if answer.ttl() > 0 => {
                    let ttl = Duration::from_secs(answer.ttl().unsigned_abs());
                    self.confirmed.send_replace(Some((asked, ttl)));
                }
                Ok(Some(_)) => return None,
                // The stream ended without a word: the lease may still be there.
                Ok(None) => return Some(CallError::StreamEnded { what: WHAT }),
                Err(CallError::Timeout { .. }) => {
                    let again = renew(&mut self.client, self.id, self.ttl, &self.confirmed);
                    match again.await {
                        Ok(streams) => (self.keeper, self.answers) = streams,
                        Err(error) => return Some(error),
                    }
                }
                Err(error) => return Some(error),
            }
        }
    }
}

async fn renew(
    client: &mut Client,
    id: i64,
    ttl: Duration,
    confirmed: &Confirmed,
) -> Result<(LeaseKeeper, LeaseKeepAliveStream), CallError> {
    let asked = Instant::now();
    let streams = bounded(WHAT, ttl, client.lease_keep_alive(id)).await?;
    confirmed.send_replace(Some((asked, ttl)));
    Ok(streams)
}
