//! The end of a request: told to the client, the metrics and the log, and waited for
//! at its workers.

use std::time::Duration;

use baton_observability::labels::{RetryWhen, Success};
use baton_proto::{Error, ErrorKind};
use tokio::time::Instant;

use super::Driver;
use crate::request::{DecodeEvent, PrefillEvent};
use crate::text::ChoiceText;

/// How long a finished or cancelled decode call may take to say its last word.
/// Blocks are promised back within a second of a client's going.
const LAST_WORD: Duration = Duration::from_secs(1);

impl Driver {
    /// Tells the client, the metrics and the log how it ended, then waits a moment
    /// for the decode worker's last word.
    pub(super) async fn finish(mut self) {
        self.prefill = None;
        self.aside = None;
        let cancelled = self.outcome.is_none();
        let outcome = self
            .outcome
            .take()
            .unwrap_or_else(|| Err(Error::new(ErrorKind::Cancelled, "the client is gone")));
        self.count(&outcome);
        let Self {
            shared,
            job,
            tally,
            timing,
            texts,
            outlet,
            closing,
            closing_prefill,
            ..
        } = self;
        let output_tokens: u32 = texts.iter().map(ChoiceText::tokens).sum();
        timing.log(
            &job.model.card.name,
            job.prompt.len(),
            output_tokens,
            &outcome,
        );
        tally.end(outcome.as_ref().err());
        drop(job.permit);
        outlet.end(outcome.err());
        let asked = Instant::now();
        let prefill = async {
            if let Some(mut session) = closing_prefill {
                let ended = |event: &PrefillEvent| {
                    matches!(
                        event,
                        PrefillEvent::HandedOff { .. } | PrefillEvent::Failed { .. }
                    )
                };
                while let Some((event, _)) = session.next().await
                    && !ended(&event)
                {}
            }
        };
        let decode = async {
            if let Some(mut session) = closing {
                let ended = |event: &DecodeEvent| {
                    matches!(
                        event,
                        DecodeEvent::Ended { .. } | DecodeEvent::Failed { .. }
                    )
                };
                while let Some(event) = session.next().await
                    && !ended(&event)
                {}
                if cancelled {
                    let release = &shared.metrics.cancel_to_release;
                    release.observe_duration(asked.elapsed());
                }
            }
        };
        let both = async { tokio::join!(prefill, decode) };
        if tokio::time::timeout(LAST_WORD, both).await.is_err() {
            tracing::debug!("a worker did not say its last word");
        }
    }

    fn count(&self, outcome: &Result<(), Error>) {
        let success = |ok: bool| if ok { Success::Ok } else { Success::Failed };
        let metrics = self.metrics();
        self.timing.ended(metrics);
        if self.job.resumed.is_some() {
            let resumed = metrics.resumed_requests.get(success(outcome.is_ok()));
            resumed.inc();
        }
        // All but the last try failed; the last one shares the request's fate.
        if self.retries > 0 {
            let when = if self.mid_stream {
                RetryWhen::MidStream
            } else {
                RetryWhen::BeforeFirstToken
            };
            let failed = metrics.retries.get((when, Success::Failed));
            failed.inc_by(self.retries - 1);
            metrics.retries.get((when, success(outcome.is_ok()))).inc();
        }
        let moved = metrics.migrations.get(Success::Ok);
        moved.inc_by(self.moves);
        if self.migrations > 0 {
            let failed = metrics.migrations.get(Success::Failed);
            failed.inc_by(self.migrations - 1);
            metrics.migrations.get(success(outcome.is_ok())).inc();
        }
    }
}
