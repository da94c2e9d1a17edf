//! How fast a worker gets prompts computed and requests ended, learned as it goes.
//!
//! A router foretells a request's wait from it. Time is an argument; nothing here waits.

use std::time::{Duration, Instant};

/// Time at work that is remembered: past it, half of what is known is forgotten.
const REMEMBERED: Duration = Duration::from_secs(4);
/// What requests are counted over: one span, and the one before.
const SPAN: Duration = Duration::from_secs(2);

/// Tokens for each second in which at least one prompt was being computed, so that
/// prompts that are computed side by side, and pauses between them, count right.
#[derive(Clone, Debug, Default)]
pub struct PromptPace {
    running: u32,
    since: Option<Instant>,
    busy: Duration,
    tokens: f64,
}

impl PromptPace {
    /// A prompt's computation begins.
    pub fn begin(&mut self, now: Instant) {
        self.pass(now);
        self.running += 1;
    }

    /// It is over, after `tokens` were computed. Each beginning has one end.
    pub fn end(&mut self, tokens: u32, now: Instant) {
        self.pass(now);
        self.running = self.running.saturating_sub(1);
        self.tokens += f64::from(tokens);
        if self.busy > REMEMBERED {
            self.busy /= 2;
            self.tokens /= 2.0;
        }
    }

    fn pass(&mut self, now: Instant) {
        if self.running > 0
            && let Some(since) = self.since
        {
            self.busy += now.saturating_duration_since(since);
        }
        self.since = Some(now);
    }

    /// Tokens a second; 0 before the first prompt.
    pub fn tokens_per_second(&self) -> f64 {
        if self.busy.is_zero() {
            return 0.0;
        }
        self.tokens / self.busy.as_secs_f64()
    }
}

/// How often something happened over the last seconds.
#[derive(Clone, Debug, Default)]
pub struct Rate {
    span: Option<Instant>,
    events: f64,
    before: Option<f64>,
}

impl Rate {
    /// It happened `events` times.
    pub fn count(&mut self, events: f64, now: Instant) {
        self.turn(now);
        self.events += events;
    }

    fn turn(&mut self, now: Instant) {
        let since = *self.span.get_or_insert(now);
        let passed = now.saturating_duration_since(since);
        if passed >= SPAN {
            let events = std::mem::take(&mut self.events);
            self.before = (passed < 2 * SPAN).then_some(events);
            self.span = Some(now);
        }
    }

    /// Events a second; `None` where too little is known: nothing happened lately, or
    /// `least` has not passed since the first.
    pub fn per_second(&mut self, least: Duration, now: Instant) -> Option<f64> {
        self.turn(now);
        let since = self
            .span
            .map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        let (events, time) = match self.before {
            Some(before) => (self.events + before, since + SPAN),
            None => (self.events, since),
        };
        (events > 0.0 && time >= least).then(|| events / time.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_side_by_side_and_pauses_do_not_change_the_pace() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut pace = PromptPace::default();
        assert_eq!(pace.tokens_per_second(), 0.0);
        pace.begin(at(0));
        pace.begin(at(0));
        pace.end(100, at(50));
        pace.end(100, at(100));
        // A pause of ten seconds.
        pace.begin(at(10_100));
        pace.end(200, at(10_200));
        assert!((pace.tokens_per_second() - 2000.0).abs() < 1.0, "{pace:?}");
        // It becomes ten times slower, and that is soon what counts.
        for round in 0..10 {
            pace.begin(at(20_000 + round * 2000));
            pace.end(400, at(22_000 + round * 2000));
        }
        let now = pace.tokens_per_second();
        assert!((200.0..300.0).contains(&now), "{now}");
    }

    #[test]
    fn a_rate_is_that_of_the_last_seconds() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let second = Duration::from_secs(1);
        let mut rate = Rate::default();
        assert_eq!(rate.per_second(second, at(0)), None);
        for step in 0..30 {
            rate.count(1.0, at(step * 100));
        }
        let now = rate.per_second(second, at(3000)).unwrap();
        assert!((9.0..11.0).contains(&now), "{now}");
        // Long ago says nothing.
        assert_eq!(rate.per_second(second, at(60_000)), None);
    }
}
