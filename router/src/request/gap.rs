//! The bound on the gap that a client sees when a worker of its stream dies.
//!
//! ```text
//! last token   death   noticed   placed again        next token
//!     |----------|--------|---------|-------------------|
//!                |<-- Timeouts::gap + what computing is foretold to take -->|
//! ```
//!
//! Past it the stream ends with an error and a hint: its client has a resume token, and may
//! be served sooner at another router or a little later. Where nothing can be foretold the
//! limits of the stages hold. Gaps without a death (preemption, a slow client) are others'.

use std::time::Duration;

use baton_proto::{Error, ErrorKind};

use super::{Action, Request, TokenLog};

/// When to come back if it is not known how long computing takes.
const RETRY_AFTER_DEFAULT: Duration = Duration::from_secs(1);

/// What is known of gaps.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Gap {
    /// When the last token was handed on.
    last_token: Option<Duration>,
    /// Since when the client gets nothing, because a worker died.
    since: Option<Duration>,
    /// What the placement in hand is foretold to take to its first token.
    foretold: Option<Duration>,
}

impl Request {
    /// How long the next token will take from now, by where the request was just placed.
    pub fn foretold(&mut self, wait: Option<Duration>) {
        self.gap.foretold = wait;
    }

    /// A worker that the stream needed has failed.
    pub(super) fn interrupted(&mut self) {
        if self.logs.iter().all(TokenLog::is_empty) {
            return;
        }
        // It has not died before its last token, nor before its silence began.
        let noticed = self.now.saturating_sub(self.spec.timeouts.silence);
        let since = self.gap.last_token.unwrap_or(self.now).max(noticed);
        self.gap.since = Some(since);
    }

    /// A token goes to the client.
    pub(super) fn went_on(&mut self) {
        self.gap.last_token = Some(self.now);
        self.gap.since = None;
    }

    /// When the gap has lasted long enough; `None` while there is none.
    pub(super) fn gap_ends(&self) -> Option<Duration> {
        let (since, foretold) = (self.gap.since?, self.gap.foretold?);
        Some(since + self.spec.timeouts.gap + foretold)
    }

    /// The client is told to come back, rather than kept waiting.
    pub(super) fn end_stalled(&mut self, out: &mut Vec<Action>) {
        let since = self.gap.since.unwrap_or(self.now);
        let waited = self.now.saturating_sub(since).as_millis();
        let foretold = self.gap.foretold.unwrap_or_default();
        let cause = self.last_error.take();
        let cause = cause.map_or("its worker failed".to_owned(), |error| error.message);
        let message = format!(
            "no token for {waited} ms since {cause}; computing it again was foretold to take {} ms",
            foretold.as_millis()
        );
        let error = Error::new(ErrorKind::Unavailable, message)
            .with_reason("STREAM_STALLED")
            .with_retry_after(foretold.max(RETRY_AFTER_DEFAULT));
        self.fail(error, out);
    }
}
