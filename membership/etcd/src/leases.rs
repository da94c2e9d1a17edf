//! Leases: granted, revoked, kept alive.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use crate::api;
use crate::api::lease_client::LeaseClient;
use crate::connect::{Client, Error};

impl Client {
    /// Grants a lease under an id of the caller's choice; the life that it has.
    ///
    /// # Errors
    /// Whatever etcd or the connection says.
    pub async fn lease_grant(&self, id: i64, seconds: i64) -> Result<Duration, Error> {
        let request = api::LeaseGrantRequest { id, ttl: seconds };
        let granted = self.call(request, async |link, request| {
            LeaseClient::new(link).lease_grant(request).await
        });
        Ok(life(granted.await?.ttl).unwrap_or_default())
    }

    /// Ends a lease and all records under it.
    ///
    /// # Errors
    /// Whatever etcd or the connection says; `NotFound` for a lease that is not there.
    pub async fn lease_revoke(&self, id: i64) -> Result<(), Error> {
        let request = api::LeaseRevokeRequest { id };
        let revoked = self.call(request, async |link, request| {
            LeaseClient::new(link).lease_revoke(request).await
        });
        revoked.await.map(drop)
    }

    /// The seconds that a lease has left; -1 if it is not there.
    ///
    /// # Errors
    /// Whatever etcd or the connection says.
    pub async fn lease_left(&self, id: i64) -> Result<i64, Error> {
        let request = api::LeaseTimeToLiveRequest { id, keys: false };
        let left = self.call(request, async |link, request| {
            LeaseClient::new(link).lease_time_to_live(request).await
        });
        Ok(left.await?.ttl)
    }

    /// Opens a stream that renews a lease, and renews it for the first time.
    ///
    /// # Errors
    /// [`Error::LeaseNotFound`], or whatever etcd or the connection says.
    pub async fn keep_alive(&self, id: i64) -> Result<KeepAlive, Error> {
        let open = self.call(id, async |link, id| {
            // One renewal is under way at a time; an unanswered one makes a new stream.
            let (renewals, asked) = mpsc::channel(2);
            // There is room for it, and nobody else has the other end yet.
            let _ = renewals.try_send(api::LeaseKeepAliveRequest { id });
            let asked = ReceiverStream::new(asked);
            let opened = LeaseClient::new(link).lease_keep_alive(asked).await?;
            Ok(opened.map(|answers| (renewals, answers)))
        });
        let (renewals, answers) = open.await?;
        let mut opened = KeepAlive {
            id,
            renewals,
            answers,
        };
        match opened.answer().await? {
            Some(_) => Ok(opened),
            None => Err(Error::LeaseNotFound),
        }
    }
}

/// One stream of renewals.
#[derive(Debug)]
pub struct KeepAlive {
    id: i64,
    renewals: mpsc::Sender<api::LeaseKeepAliveRequest>,
    answers: Streaming<api::LeaseKeepAliveResponse>,
}

impl KeepAlive {
    /// Renews the lease: the life it has now, `None` if it is gone.
    ///
    /// # Errors
    /// [`Error::StreamEnded`], or whatever etcd or the connection says.
    ///
    /// *Cancel safety*: not cancel-safe; the answer to a renewal that was dropped would be taken
    /// for the next one's, so open another stream then.
    pub async fn renew(&mut self) -> Result<Option<Duration>, Error> {
        let renewal = api::LeaseKeepAliveRequest { id: self.id };
        let sent = self.renewals.send(renewal).await;
        sent.map_err(|_| Error::StreamEnded)?;
        self.answer().await
    }

    async fn answer(&mut self) -> Result<Option<Duration>, Error> {
        match self.answers.message().await? {
            Some(answer) => Ok(life(answer.ttl)),
            None => Err(Error::StreamEnded),
        }
    }
}

/// Seconds as etcd says them; a lease that is gone has none.
fn life(seconds: i64) -> Option<Duration> {
    (seconds > 0).then(|| Duration::from_secs(seconds.unsigned_abs()))
}
