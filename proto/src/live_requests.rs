//! Which requests a worker is running, so that a cancel finds them, and which
//! cancels came before their start.
//!
//! A cancel may overtake its start on another connection. It then leaves a
//! tombstone for as long as the start could still be on its way, and the start is
//! refused. Time is an argument; nothing here waits.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::error::{Error, ErrorKind};
use crate::ids::RequestId;

/// How long a cancel waits for its start: longer than any reservation could live.
const TOMBSTONE_LIFE: Duration = Duration::from_secs(60);
/// Oldest tombstones are dropped past this many.
const TOMBSTONES_MAX: usize = 16_384;

/// The requests of one worker.
#[derive(Debug, Default)]
pub struct LiveRequests {
    live: HashMap<RequestId, CancellationToken>,
    tombstones: VecDeque<(Instant, RequestId)>,
}

impl LiveRequests {
    /// Lists a request; the token is cancelled when a cancel for it arrives.
    ///
    /// # Errors
    /// [`ErrorKind::Cancelled`] if a cancel came first, [`ErrorKind::Fenced`] if the
    /// id is live already.
    pub fn start(&mut self, id: &RequestId, now: Instant) -> Result<CancellationToken, Error> {
        self.expire(now);
        if self.tombstones.iter().any(|(_, cancelled)| cancelled == id) {
            return Err(Error::new(
                ErrorKind::Cancelled,
                "the request was cancelled before it started",
            ));
        }
        if self.live.contains_key(id) {
            return Err(Error::new(
                ErrorKind::Fenced,
                format!("request `{id}` is running here already"),
            )
            .with_field("work.request_id"));
        }
        let token = CancellationToken::new();
        self.live.insert(id.clone(), token.clone());
        Ok(token)
    }

    /// Cancels a request, or remembers the cancel. Returns whether it was live.
    pub fn cancel(&mut self, id: &RequestId, now: Instant) -> bool {
        self.expire(now);
        if let Some(token) = self.live.get(id) {
            token.cancel();
            return true;
        }
        if self.tombstones.len() == TOMBSTONES_MAX {
            self.tombstones.pop_front();
        }
        self.tombstones.push_back((now, id.clone()));
        false
    }

    /// Takes an ended request off the list.
    pub fn end(&mut self, id: &RequestId) {
        self.live.remove(id);
    }

    /// Requests running now.
    pub fn len(&self) -> usize {
        self.live.len()
    }

    /// Whether nothing runs.
    pub fn is_empty(&self) -> bool {
        self.live.is_empty()
    }

    /// Cancels everything (the worker's grace time is over).
    pub fn cancel_all(&self) {
        self.live.values().for_each(CancellationToken::cancel);
    }

    fn expire(&mut self, now: Instant) {
        while let Some((at, _)) = self.tombstones.front()
            && now.saturating_duration_since(*at) > TOMBSTONE_LIFE
        {
            self.tombstones.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cancel_that_overtakes_its_start_stops_it_once() {
        let mut requests = LiveRequests::default();
        let (id, now) = (RequestId::from("r"), Instant::now());
        assert!(!requests.cancel(&id, now));
        assert_eq!(
            requests.start(&id, now).unwrap_err().kind,
            ErrorKind::Cancelled
        );
        let later = now + TOMBSTONE_LIFE + Duration::from_secs(1);
        let token = requests.start(&id, later).unwrap();
        assert_eq!(
            requests.start(&id, later).unwrap_err().kind,
            ErrorKind::Fenced
        );
        assert!(requests.cancel(&id, later) && token.is_cancelled());
        requests.end(&id);
        assert!(requests.is_empty());
    }
}
