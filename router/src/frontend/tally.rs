//! Counts each request once, however it ends.

use baton_observability::RouterMetrics;
use baton_observability::labels::Outcome;
use baton_proto::{Error, ErrorKind};

/// The one count of a request. Dropped without an end, it was cancelled.
pub struct Tally {
    metrics: RouterMetrics,
    outcome: Outcome,
}

impl Tally {
    /// A request that just came in.
    pub fn new(metrics: &RouterMetrics) -> Self {
        Self {
            metrics: metrics.clone(),
            outcome: Outcome::Cancelled,
        }
    }

    /// The request ended well, or with an error.
    pub fn end(mut self, error: Option<&Error>) {
        self.outcome = error.map_or(Outcome::Ok, outcome);
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        self.metrics.requests.get(self.outcome).inc();
    }
}

fn outcome(error: &Error) -> Outcome {
    match (error.kind, error.reason.as_str()) {
        (ErrorKind::TooLarge, _) => Outcome::TooLarge,
        (
            ErrorKind::Unavailable,
            "NO_DECODE_WORKER" | "NO_WORKERS" | "MODEL_STARTING" | "MODEL_REFUSED",
        ) => Outcome::NoDecode,
        (ErrorKind::Unavailable, "NO_PREFILL_WORKER") => Outcome::NoPrefill,
        (ErrorKind::Unavailable, "DRAINING") => Outcome::Draining,
        (ErrorKind::Unavailable, "HANDOFF_TIMEOUT" | "LAYOUT_MISMATCH") => Outcome::KvTransfer,
        (kind, _) => Outcome::from_grpc_code(kind.grpc_code()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_observability::Registry;

    #[test]
    fn every_request_is_counted_once() {
        let metrics = RouterMetrics::new(&mut Registry::default());
        Tally::new(&metrics).end(None);
        drop(Tally::new(&metrics));
        let error = Error::new(ErrorKind::Unavailable, "x").with_reason("NO_DECODE_WORKER");
        Tally::new(&metrics).end(Some(&error));
        for outcome in [Outcome::Ok, Outcome::Cancelled, Outcome::NoDecode] {
            assert_eq!(metrics.requests.get(outcome).get(), 1, "{outcome:?}");
        }
    }
}
