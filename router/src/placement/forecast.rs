//! How long a placed request will wait for its first token. Pure.
//!
//! ```text
//! wait at D for blocks and a place  +  (tokens that wait at P + own uncached) / P's pace
//! ```
//!
//! The first token goes to the client before its KV has reached the decode worker, so the
//! transfer is no part of it. Of workers that have computed nothing yet nothing is foretold.
//! Requests of other priorities count like any: a wait is foretold too long rather than
//! too short.

use std::time::Duration;

use super::{Candidate, Placement, WorkerKey};

/// What is known of a worker's way of getting on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Standing {
    /// Prompt tokens it computes a second; 0 if that is not known.
    pub prefill_tokens_per_second: f64,
    /// Requests that end there a second; 0 if that is not known.
    pub requests_per_second: f64,
    /// Requests that wait there by its own word.
    pub waiting: u32,
    /// Requests that this router sent there and that it has not taken yet.
    pub asked: u32,
    /// Requests that could start there now, by its places.
    pub places_free: u32,
    /// Tokens whose KV it has room for.
    pub tokens_free: u32,
}

impl Standing {
    /// Until a request of `tokens` gets its place; `None` where it cannot be told.
    fn wait(&self, tokens: u32) -> Option<Duration> {
        let by_room = self.tokens_free / tokens.max(1);
        let places = self.places_free.min(by_room);
        let before = if self.waiting > 0 {
            // It keeps requests waiting, whatever seems free: for room, or for its target
            // on the gap between tokens.
            self.waiting.max(self.asked) + 1
        } else {
            (self.asked + 1).saturating_sub(places)
        };
        match before {
            0 => Some(Duration::ZERO),
            _ if self.requests_per_second <= 0.0 => None,
            _ => Some(seconds(f64::from(before) / self.requests_per_second)),
        }
    }
}

/// The longest forecast; beyond it all waits are alike.
const LONGEST: f64 = 3600.0;

fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds.clamp(0.0, LONGEST))
}

/// From now to the first token of a prompt of `tokens`; `None` where it cannot be told.
pub fn first_token(
    candidates: &[Candidate],
    placement: &Placement,
    tokens: u32,
) -> Option<Duration> {
    let find = |key: &WorkerKey| candidates.iter().find(|worker| worker.key == *key);
    let decode = find(&placement.decode)?;
    let computing = match &placement.prefill {
        Some(prefill) => find(prefill)?,
        None => decode,
    };
    let pace = computing.standing.prefill_tokens_per_second;
    if pace <= 0.0 {
        return None;
    }
    let own = tokens - computing.cached_tokens.min(tokens);
    let waiting = f64::from(computing.tokens_waiting) + f64::from(own);
    Some(decode.standing.wait(tokens)? + seconds(waiting / pace))
}

/// How far forecasts were off lately: what most of them have to be multiplied by to
/// be kept. Follows a quantile of real over foretold time: up by a step when one is
/// exceeded, down by a small part of it when not.
#[derive(Clone, Copy, Debug)]
pub struct Margin(f64);

/// Forecasts that are to be kept, of a hundred.
const KEPT_OF_100: f64 = 95.0;
/// How fast the margin follows.
const STEP: f64 = 0.05;
const MARGIN_RANGE: (f64, f64) = (1.0, 4.0);
/// Shorter forecasts are mostly what no forecast is about: calls, and timers.
const LEARNED_FROM: Duration = Duration::from_millis(20);

impl Default for Margin {
    fn default() -> Self {
        Self(1.1)
    }
}

impl Margin {
    /// A forecast, with what usually comes on top.
    pub fn over(self, forecast: Duration) -> Duration {
        forecast.mul_f64(self.0)
    }

    /// A forecast came out.
    pub fn learn(&mut self, foretold: Duration, took: Duration) {
        if foretold < LEARNED_FROM {
            return;
        }
        let exceeded = took > foretold.mul_f64(self.0);
        let step = if exceeded {
            KEPT_OF_100
        } else {
            KEPT_OF_100 - 100.0
        };
        let now = self.0 * (1.0 + STEP * step / 100.0);
        self.0 = now.clamp(MARGIN_RANGE.0, MARGIN_RANGE.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::tests::{key, worker};

    fn placement(prefill: Option<&str>) -> Placement {
        Placement {
            decode: key("d"),
            prefill: prefill.map(key),
        }
    }

    /// `p` with so many tokens waiting and cached, and `d`.
    fn pair(waiting: u32, cached: u32, decode: Standing) -> Vec<Candidate> {
        let mut prefill = worker("p", 0, waiting, cached);
        prefill.standing.prefill_tokens_per_second = 1000.0;
        let mut decoder = worker("d", 0, 0, 0);
        decoder.standing = decode;
        vec![prefill, decoder]
    }

    const ROOM: Standing = Standing {
        prefill_tokens_per_second: 500.0,
        requests_per_second: 10.0,
        waiting: 0,
        asked: 0,
        places_free: 4,
        tokens_free: 1000,
    };

    fn ms(candidates: &[Candidate], prefill: Option<&str>) -> Option<u128> {
        first_token(candidates, &placement(prefill), 200).map(|time| time.as_millis())
    }

    #[test]
    fn the_queue_and_what_is_not_cached_are_computed_first() {
        assert_eq!(ms(&pair(0, 0, ROOM), Some("p")), Some(200));
        assert_eq!(ms(&pair(800, 0, ROOM), Some("p")), Some(1000));
        assert_eq!(ms(&pair(800, 150, ROOM), Some("p")), Some(850));
        assert_eq!(ms(&pair(800, 0, ROOM), None), Some(400), "at its own pace");
    }

    #[test]
    fn a_place_and_its_blocks_are_waited_for() {
        let wait = |change: fn(&mut Standing)| {
            let mut standing = ROOM;
            change(&mut standing);
            ms(&pair(0, 0, standing), Some("p"))
        };
        assert_eq!(wait(|d| d.asked = 3), Some(200));
        assert_eq!(wait(|d| d.asked = 4), Some(300));
        assert_eq!(wait(|d| d.places_free = 0), Some(300));
        assert_eq!(wait(|d| d.tokens_free = 399), Some(200));
        assert_eq!(wait(|d| d.tokens_free = 199), Some(300));
        // It keeps requests back although there is room: for its target.
        assert_eq!(wait(|d| d.waiting = 5), Some(800));
    }

    #[test]
    fn what_is_not_known_is_not_foretold() {
        let standing = Standing {
            requests_per_second: 0.0,
            ..ROOM
        };
        assert_eq!(ms(&pair(0, 0, standing), Some("p")), Some(200));
        let waiting = Standing {
            waiting: 1,
            ..standing
        };
        assert_eq!(ms(&pair(0, 0, waiting), Some("p")), None);
        let mut new = pair(0, 0, ROOM);
        new[0].standing.prefill_tokens_per_second = 0.0;
        assert_eq!(ms(&new, Some("p")), None);
    }

    #[test]
    fn the_margin_comes_to_keep_nineteen_of_twenty() {
        let mut margin = Margin::default();
        let second = Duration::from_secs(1);
        // Real times spread evenly from 0.5 to 1.5 of the foretold ones.
        let took = |n: u32| Duration::from_millis(500 + u64::from(n * 37 % 101) * 10);
        for n in 0..2000 {
            margin.learn(second, took(n));
        }
        let kept = (0..101).filter(|n| took(*n) <= margin.over(second)).count();
        assert!((88..=101).contains(&kept), "{kept} of 101 at {margin:?}");
        let before = margin.0;
        margin.learn(Duration::from_millis(2), second);
        assert_eq!(margin.0, before, "too short to learn from");
    }
}
