//! Keeps one lease alive, whatever else is being asked of etcd meanwhile.
//!
//! Every third of a TTL the lease is renewed. An answer that does not come within such a
//! third tells that the stream may be dead, so a fresh one is opened, which renews as well: an
//! etcd that answers late keeps its workers, and a stream that ended without a word is noticed.

use std::time::{Duration, Instant};

use baton_etcd::{Client, KeepAlive};
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
    stream: KeepAlive,
}

impl Keepalive {
    /// Opens the stream; its first answer has the lease's whole life to arrive, since a slow etcd
    /// has renewed the lease all the same.
    ///
    /// # Errors
    /// Whatever etcd says, that there is no such lease ([`CallError::is_lease_lost`]) included.
    pub(super) async fn open(
        client: Client,
        id: i64,
        ttl: Duration,
        every: Duration,
        confirmed: Confirmed,
    ) -> Result<Self, CallError> {
        let stream = renew(&client, id, ttl, &confirmed).await?;
        Ok(Self {
            client,
            id,
            ttl,
            every,
            confirmed,
            stream,
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
            match bounded(WHAT, tick, self.stream.renew()).await {
                Ok(Some(ttl)) => drop(self.confirmed.send_replace(Some((asked, ttl)))),
                Ok(None) => return None,
                Err(CallError::Timeout { .. }) => {
                    let again = renew(&self.client, self.id, self.ttl, &self.confirmed);
                    match again.await {
                        Ok(stream) => self.stream = stream,
                        Err(error) => return Some(error),
                    }
                }
                // A stream that ended without a word included: the lease may still be there.
                Err(error) => return Some(error),
            }
        }
    }
}

async fn renew(
    client: &Client,
    id: i64,
    ttl: Duration,
    confirmed: &Confirmed,
) -> Result<KeepAlive, CallError> {
    let asked = Instant::now();
    let stream = bounded(WHAT, ttl, client.keep_alive(id)).await?;
    confirmed.send_replace(Some((asked, ttl)));
    Ok(stream)
}
