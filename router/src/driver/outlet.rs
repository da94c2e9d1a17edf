//! The way to one client: a bounded channel of events, and the error that ends it.
//!
//! The error has a place of its own, so that a full channel cannot keep it back.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use baton_proto::{Error, v1};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Why an event did not reach the channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Undelivered {
    Gone,
    Deadline,
    /// The channel stayed full for this long.
    Slow(Duration),
}

/// The sending end.
pub struct Outlet {
    events: mpsc::Sender<v1::GenerateEvent>,
    error: Arc<OnceLock<Error>>,
    gone: CancellationToken,
    patience: Duration,
    /// After one failure nothing is sent any more.
    dead: Option<Undelivered>,
}

/// The client's end.
pub struct Inlet {
    pub events: mpsc::Receiver<v1::GenerateEvent>,
    pub error: Arc<OnceLock<Error>>,
    /// Cancelled when the client goes.
    pub gone: CancellationToken,
}

impl Outlet {
    /// A channel of `buffer` events whose client may leave it full for `patience`.
    pub fn new(buffer: usize, patience: Duration) -> (Self, Inlet) {
        let (tx, rx) = mpsc::channel(buffer);
        let error = Arc::new(OnceLock::new());
        let gone = CancellationToken::new();
        let outlet = Self {
            events: tx,
            error: Arc::clone(&error),
            gone: gone.clone(),
            patience,
            dead: None,
        };
        let inlet = Inlet {
            events: rx,
            error,
            gone,
        };
        (outlet, inlet)
    }

    /// Resolves when the client is gone. Cancel safe.
    pub async fn gone(&self) {
        self.gone.cancelled().await;
    }

    /// Sends, waiting while the channel is full.
    ///
    /// # Errors
    /// Why it was not sent; nothing can be sent after that.
    pub async fn send(
        &mut self,
        event: v1::GenerateEvent,
        deadline: Instant,
    ) -> Result<(), Undelivered> {
        if let Some(dead) = self.dead {
            return Err(dead);
        }
        let sent = match self.events.try_send(event) {
            Ok(()) => Ok(()),
            Err(mpsc::error::TrySendError::Closed(_)) => Err(Undelivered::Gone),
            Err(mpsc::error::TrySendError::Full(event)) => {
                tokio::select! {
                    biased;
                    () = self.gone.cancelled() => Err(Undelivered::Gone),
                    sent = self.events.send(event) => sent.map_err(|_| Undelivered::Gone),
                    () = tokio::time::sleep_until(deadline) => Err(Undelivered::Deadline),
                    () = tokio::time::sleep(self.patience) => Err(Undelivered::Slow(self.patience)),
                }
            }
        };
        self.dead = sent.err();
        sent
    }

    /// Ends the stream, with an error or without.
    pub fn end(self, error: Option<Error>) {
        if let Some(error) = error {
            // The only place that sets it.
            let _ = self.error.set(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_full_channel_is_waited_for_but_not_for_ever() {
        let patience = Duration::from_millis(30);
        let (mut outlet, mut inlet) = Outlet::new(1, patience);
        let far = Instant::now() + Duration::from_secs(600);
        let event = v1::GenerateEvent::default;
        outlet.send(event(), far).await.unwrap();
        let begun = Instant::now();
        assert_eq!(
            outlet.send(event(), far).await,
            Err(Undelivered::Slow(patience))
        );
        assert!(begun.elapsed() >= patience);
        outlet.end(Some(Error::invalid("x", "y")));
        assert!(inlet.events.recv().await.is_some());
        assert!(inlet.events.recv().await.is_none());
        assert_eq!(inlet.error.get().unwrap().field, "x");
    }

    #[tokio::test]
    async fn the_deadline_and_the_client_end_the_wait() {
        let event = v1::GenerateEvent::default;
        let soon = || Instant::now() + Duration::from_millis(10);
        let (mut outlet, inlet) = Outlet::new(1, Duration::from_secs(30));
        outlet.send(event(), soon()).await.unwrap();
        assert_eq!(
            outlet.send(event(), soon()).await,
            Err(Undelivered::Deadline)
        );
        inlet.gone.cancel();
        let (mut outlet, inlet) = Outlet::new(1, Duration::from_secs(30));
        outlet.send(event(), soon()).await.unwrap();
        inlet.gone.cancel();
        assert_eq!(outlet.send(event(), soon()).await, Err(Undelivered::Gone));
    }
}
