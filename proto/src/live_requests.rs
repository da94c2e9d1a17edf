//! Which requests a worker is running, so that a cancel finds them, which cancels
//! came before their start, and which clients went on elsewhere.
//!
//! A cancel may overtake its start on another connection. It then leaves a
//! tombstone for as long as the start could still be on its way, and the start is
//! refused. A client that resumes its stream through another router raises the
//! request's generation: work of lower ones is ended, and kept out likewise. Time is
//! an argument; nothing here waits.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::error::{Error, ErrorKind};
use crate::ids::RequestId;
use crate::work::Fence;

/// How long a cancel waits for its start: longer than any reservation could live.
const TOMBSTONE_LIFE: Duration = Duration::from_secs(60);
/// Oldest tombstones are dropped past this many, of cancels and of fences each.
const TOMBSTONES_MAX: usize = 16_384;

/// The reason of an attempt that a resumed one replaced.
pub const RESUMED_ELSEWHERE: &str = "RESUMED_ELSEWHERE";

/// What an attempt hears that a resumed one replaced.
pub fn resumed_elsewhere() -> Error {
    Error::new(
        ErrorKind::Fenced,
        "the client resumed this request on another connection",
    )
    .with_reason(RESUMED_ELSEWHERE)
}

/// A request's ear for cancels. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    token: CancellationToken,
    reason: Arc<OnceLock<Error>>,
}

impl Stop {
    /// Resolves when the request is to end. Cancel safe.
    pub async fn stopped(&self) {
        self.token.cancelled().await;
    }

    /// Why, if somebody has to be told.
    pub fn reason(&self) -> Option<Error> {
        self.reason.get().cloned()
    }

    /// Whether it is to end.
    pub fn is_stopped(&self) -> bool {
        self.token.is_cancelled()
    }

    fn stop(&self, reason: Option<Error>) {
        if let Some(reason) = reason {
            // The first reason stands.
            let _ = self.reason.set(reason);
        }
        self.token.cancel();
    }
}

#[derive(Debug)]
struct Live {
    stop: Stop,
    fence: Option<Fence>,
}

/// The requests of one worker.
#[derive(Debug, Default)]
pub struct LiveRequests {
    live: BTreeMap<RequestId, Live>,
    tombstones: VecDeque<(Instant, RequestId)>,
    /// Generations below these are kept out; newest last.
    fences: VecDeque<(Instant, Fence)>,
}

impl LiveRequests {
    /// Lists a request; the answer hears of a cancel for it. Work of lower generations
    /// of the same client's request is ended.
    ///
    /// # Errors
    /// [`ErrorKind::Cancelled`] if a cancel came first, [`ErrorKind::Fenced`] if the
    /// id is live already, or (reason [`RESUMED_ELSEWHERE`]) if the client went on
    /// elsewhere.
    pub fn start(
        &mut self,
        id: &RequestId,
        fence: Option<Fence>,
        now: Instant,
    ) -> Result<Stop, Error> {
        self.expire(now);
        if self.tombstones.iter().any(|(_, cancelled)| cancelled == id) {
            return Err(Error::new(
                ErrorKind::Cancelled,
                "the request was cancelled before it started",
            ));
        }
        if let Some(fence) = &fence
            && self.is_fenced(fence)
        {
            return Err(resumed_elsewhere());
        }
        if self.live.contains_key(id) {
            return Err(Error::new(
                ErrorKind::Fenced,
                format!("request `{id}` is running here already"),
            )
            .with_field("work.request_id"));
        }
        if let Some(fence) = &fence {
            self.end_older(fence);
        }
        let stop = Stop::default();
        let live = Live {
            stop: stop.clone(),
            fence,
        };
        self.live.insert(id.clone(), live);
        Ok(stop)
    }

    fn is_fenced(&self, fence: &Fence) -> bool {
        let raised = self.fences.iter().map(|(_, raised)| raised);
        let live = self.live.values().filter_map(|live| live.fence.as_ref());
        raised
            .chain(live)
            .any(|other| other.request == fence.request && other.generation > fence.generation)
    }

    fn end_older(&self, fence: &Fence) -> usize {
        let older = self.live.values().filter(|live| {
            live.fence.as_ref().is_some_and(|live| {
                live.request == fence.request && live.generation < fence.generation
            })
        });
        older
            .map(|live| live.stop.stop(Some(resumed_elsewhere())))
            .count()
    }

    /// Ends the work of lower generations and keeps it out from now on. Returns
    /// whether there was any.
    pub fn raise(&mut self, fence: Fence, now: Instant) -> bool {
        self.expire(now);
        let ended = self.end_older(&fence);
        if self.fences.len() == TOMBSTONES_MAX {
            self.fences.pop_front();
        }
        self.fences.push_back((now, fence));
        ended > 0
    }

    /// Cancels a request, or remembers the cancel. Returns whether it was live.
    pub fn cancel(&mut self, id: &RequestId, now: Instant) -> bool {
        self.expire(now);
        if let Some(live) = self.live.get(id) {
            live.stop.stop(None);
            return true;
        }
        if self.tombstones.len() == TOMBSTONES_MAX {
            self.tombstones.pop_front();
        }
        self.tombstones.push_back((now, id.clone()));
        false
    }

    /// What a `Cancel` call asks for. Returns whether it met anything.
    pub fn take_cancel(&mut self, request: crate::v1::CancelRequest, now: Instant) -> bool {
        match request.fence {
            Some(fence) => self.raise(fence.into(), now),
            None => self.cancel(&RequestId(request.request_id), now),
        }
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

    /// Ends everything, for this reason.
    pub fn end_all(&self, reason: &Error) {
        let live = self.live.values();
        live.for_each(|live| live.stop.stop(Some(reason.clone())));
    }

    fn expire(&mut self, now: Instant) {
        let old = |at: Instant| now.saturating_duration_since(at) > TOMBSTONE_LIFE;
        while self.tombstones.front().is_some_and(|(at, _)| old(*at)) {
            self.tombstones.pop_front();
        }
        while self.fences.front().is_some_and(|(at, _)| old(*at)) {
            self.fences.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fence(generation: u64) -> Option<Fence> {
        Some(Fence {
            request: "client".into(),
            generation,
        })
    }

    #[test]
    fn a_cancel_that_overtakes_its_start_stops_it_once() {
        let mut requests = LiveRequests::default();
        let (id, now) = (RequestId::from("r"), Instant::now());
        assert!(!requests.cancel(&id, now));
        assert_eq!(
            requests.start(&id, None, now).unwrap_err().kind,
            ErrorKind::Cancelled
        );
        let later = now + TOMBSTONE_LIFE + Duration::from_secs(1);
        let stop = requests.start(&id, None, later).unwrap();
        assert_eq!(
            requests.start(&id, None, later).unwrap_err().kind,
            ErrorKind::Fenced
        );
        assert!(requests.cancel(&id, later) && stop.is_stopped());
        assert_eq!(stop.reason(), None);
        requests.end(&id);
        assert!(requests.is_empty());
    }

    #[test]
    fn a_resumed_request_ends_its_older_attempts_and_no_other() {
        let mut requests = LiveRequests::default();
        let now = Instant::now();
        let other = Fence {
            request: "other".into(),
            generation: 1,
        };
        let stranger = requests.start(&"x".into(), Some(other), now).unwrap();
        let older = requests.start(&"a".into(), fence(1), now).unwrap();
        let beside = requests.start(&"a.2".into(), fence(1), now).unwrap();
        let newer = requests.start(&"b".into(), fence(2), now).unwrap();
        for stop in [&older, &beside] {
            assert!(stop.is_stopped());
            assert_eq!(stop.reason().unwrap().reason, RESUMED_ELSEWHERE);
        }
        assert!(!newer.is_stopped() && !stranger.is_stopped());
        // A start of before that comes late, while the newer one runs.
        let late = requests.start(&"a.3".into(), fence(1), now).unwrap_err();
        assert_eq!(late.reason, RESUMED_ELSEWHERE);
        assert!(!newer.is_stopped());
    }

    #[test]
    fn a_raised_fence_keeps_older_attempts_out_where_nothing_runs() {
        let mut requests = LiveRequests::default();
        let now = Instant::now();
        assert!(!requests.raise(fence(5).unwrap(), now));
        let late = requests.start(&"a".into(), fence(4), now).unwrap_err();
        assert_eq!(late.reason, RESUMED_ELSEWHERE);
        let own = requests.start(&"b".into(), fence(5), now).unwrap();
        assert!(!own.is_stopped());
        assert!(requests.raise(fence(6).unwrap(), now) && own.is_stopped());
    }
}
