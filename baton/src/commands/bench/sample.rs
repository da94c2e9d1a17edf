//! What the client saw of one request, and the gaps between its tokens.
//!
//! All times are of one monotonic clock, counted from the start of the run, and are
//! read when a message has arrived, before it is looked into.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_observability::latency::RequestLatency;
use baton_proto::v1;
use serde::Serialize;

use super::answers::Answer;

/// The one clock of a run.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// A clock that stands at zero now.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Time since the start.
    pub fn now(self) -> Duration {
        self.0.elapsed()
    }

    /// The runtime's name for a time of this clock.
    pub fn instant(self, at: Duration) -> tokio::time::Instant {
        tokio::time::Instant::from_std(self.0 + at)
    }
}

/// One message that carried tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    pub at: Duration,
    /// Tokens in it. Over SSE always 1, since the wire does not say.
    pub tokens: u32,
}

/// Why a request did not end as asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// A stable name to count by.
    pub reason: String,
    /// The first such message is shown.
    pub message: String,
}

impl Failure {
    /// A failure of this reason.
    pub fn new(reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
            message: message.into(),
        }
    }
}

/// What the server says the handoff of one prompt took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Handoff {
    pub mb: f64,
    /// From the first token's drawing to the decode worker's acceptance.
    pub exposed_ms: f64,
    /// That as a share of what the bytes need on the link, if that is known.
    pub exposed_share: Option<f64>,
}

impl Handoff {
    /// From the wire.
    pub fn of(wire: v1::Handoff) -> Self {
        let known = wire.at_link_speed_us > 0;
        Self {
            mb: wire.bytes as f64 / 1e6,
            exposed_ms: wire.exposed_us as f64 / 1e3,
            exposed_share: known.then(|| wire.exposed_us as f64 / wire.at_link_speed_us as f64),
        }
    }
}

/// One request as the client saw it.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// Which of the run's requests it was.
    pub index: usize,
    pub sent: Duration,
    pub arrivals: Vec<Arrival>,
    pub answer: Answer,
    pub ended: Duration,
    pub prompt_tokens: u32,
    /// Prompt tokens that the server says it took from a cache.
    pub cached_tokens: u32,
    /// New tokens as the server counts them, if it says.
    pub reported_tokens: Option<u32>,
    /// How the server says it placed the request.
    pub path: Option<String>,
    pub handoff: Option<Handoff>,
    pub failure: Option<Failure>,
}

impl Sample {
    /// Tokens received.
    pub fn tokens(&self) -> u32 {
        self.arrivals.iter().map(|arrival| arrival.tokens).sum()
    }

    /// The first token's receipt.
    pub fn first_token(&self) -> Option<Duration> {
        self.arrivals.first().map(|arrival| arrival.at)
    }

    /// The figures of a request that succeeded.
    pub fn latency(&self) -> Option<RequestLatency> {
        let (first, last) = (self.arrivals.first()?, self.arrivals.last()?);
        self.failure.is_none().then(|| RequestLatency {
            ttft: first.at.saturating_sub(self.sent),
            decode: last.at.saturating_sub(first.at),
            tokens: self.tokens(),
        })
    }
}

/// Failures by reason, with the first message of each.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Failures(pub BTreeMap<String, Reason>);

/// How often a reason occurred.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reason {
    pub count: u64,
    pub first_message: String,
}

impl Failures {
    /// Counts one.
    pub fn add(&mut self, failure: &Failure) {
        self.0
            .entry(failure.reason.clone())
            .or_insert_with(|| Reason {
                count: 0,
                first_message: failure.message.clone(),
            })
            .count += 1;
    }
}

/// The time between two tokens of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    pub from: Duration,
    pub to: Duration,
}

impl Gap {
    /// Its length in milliseconds.
    pub fn ms(self) -> f64 {
        (self.to - self.from).as_secs_f64() * 1e3
    }
}

/// The gaps between a stream's tokens, in order, one fewer than there are tokens.
///
/// Tokens of one message were received together: the first of them ends the gap
/// since the message before, the others come after no time at all.
pub fn gaps(arrivals: &[Arrival]) -> impl Iterator<Item = Gap> + '_ {
    let mut before: Option<Duration> = None;
    arrivals
        .iter()
        .filter(|arrival| arrival.tokens > 0)
        .flat_map(move |arrival| {
            let to = arrival.at;
            let waited = before.replace(to).map(|from| Gap { from, to });
            let together = Gap { from: to, to };
            waited
                .into_iter()
                .chain((1..arrival.tokens).map(move |_| together))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrival(at: u64, tokens: u32) -> Arrival {
        Arrival {
            at: Duration::from_millis(at),
            tokens,
        }
    }

    #[test]
    fn tokens_of_one_message_follow_each_other_at_once() {
        let arrivals = [arrival(10, 1), arrival(30, 3), arrival(45, 1)];
        let found: Vec<f64> = gaps(&arrivals).map(Gap::ms).collect();
        assert_eq!(found, [20.0, 0.0, 0.0, 15.0]);
        let first_together: Vec<f64> = gaps(&[arrival(10, 2), arrival(11, 1)])
            .map(Gap::ms)
            .collect();
        assert_eq!(first_together, [0.0, 1.0]);
        assert_eq!(gaps(&[arrival(3, 1)]).count(), 0);
        assert_eq!(gaps(&[]).count(), 0);
        // There is one gap fewer than tokens, and they span the stream.
        let span: f64 = gaps(&arrivals).map(Gap::ms).sum();
        assert_eq!(span, 35.0);
    }

    #[test]
    fn a_failed_or_empty_request_has_no_latency() {
        let mut sample = Sample {
            sent: Duration::from_millis(5),
            arrivals: vec![arrival(25, 1), arrival(65, 2)],
            ..Sample::default()
        };
        let latency = sample.latency().unwrap();
        assert_eq!(latency.ttft, Duration::from_millis(20));
        assert_eq!(latency.tpot(), Some(Duration::from_millis(20)));
        sample.failure = Some(Failure::new("UNAVAILABLE", "gone"));
        assert_eq!(sample.latency(), None);
        assert_eq!(Sample::default().latency(), None);
    }

    #[test]
    fn failures_are_counted_by_reason_and_the_first_message_is_kept() {
        let mut failures = Failures::default();
        for message in ["first", "second"] {
            failures.add(&Failure::new("OVERLOADED", message));
        }
        failures.add(&Failure::new("INTERNAL", "other"));
        assert_eq!(failures.0["OVERLOADED"].count, 2);
        assert_eq!(failures.0["OVERLOADED"].first_message, "first");
        assert_eq!(failures.0["INTERNAL"].count, 1);
    }
}
