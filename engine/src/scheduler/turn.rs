//! Whose turn it is among those that wait: priorities, and between tenants their tokens.
//!
//! Start-time fair queueing: a request's *tag* is the count of tokens at which its turn
//! comes if every tenant gets the same, worked out once, when it arrives. A tenant's next
//! tag lies behind the tokens of its last request; one that had nothing to do starts where
//! the others are, and cannot save up. So a tenant with a thousand requests delays
//! another's next one by one request, not by a thousand.
//!
//! A higher priority goes first, whatever the tags say. Who waits rises by one every
//! [`RISE_EVERY`], though not above the highest that waits: there the tags decide, and its
//! own is old. So no priority starves.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Duration;

use super::{SequenceView, Stage};

/// Waiting for this long is worth one priority.
const RISE_EVERY: Duration = Duration::from_secs(2);

/// Hands out tags.
#[derive(Debug, Default)]
pub(crate) struct FairClock {
    /// The least tag that may have its turn next.
    now: u64,
    /// Where the last request of a tenant ends; tenants behind `now` need no entry.
    ends: HashMap<Vec<u8>, u64>,
}

impl FairClock {
    /// The tag of a tenant's request that is going to take `tokens`.
    pub(crate) fn enter(&mut self, tenant: &[u8], tokens: u64) -> u64 {
        let end = self.ends.get(tenant).copied().unwrap_or(0);
        let tag = end.max(self.now);
        self.ends
            .insert(tenant.to_vec(), tag.saturating_add(tokens));
        tag
    }

    /// The request of this tag had its turn; `waiting` is the least tag of those that
    /// still wait. Of those the clock never gets ahead, whatever a priority let pass.
    pub(crate) fn served(&mut self, tag: u64, waiting: Option<u64>) {
        let now = waiting.map_or(tag, |waiting| waiting.min(tag));
        if now > self.now {
            self.now = now;
            self.ends.retain(|_, end| *end > now);
        }
    }

    /// Tokens that others have to get before this tag's turn comes.
    pub(crate) fn ahead_of(&self, tag: u64) -> u64 {
        tag.saturating_sub(self.now)
    }
}

/// Priorities as they count at `now`, among sequences that wait.
pub(super) struct Levels {
    highest: i32,
    now: Duration,
}

impl Levels {
    pub(super) fn new(sequences: &[SequenceView], now: Duration) -> Self {
        let waiting = sequences.iter().filter(|view| view.stage == Stage::Waiting);
        Self {
            highest: waiting.map(|view| view.priority).max().unwrap_or(0),
            now,
        }
    }

    /// Higher goes first.
    pub(super) fn of(&self, view: &SequenceView) -> i32 {
        let waited = self.now.saturating_sub(view.arrived).as_secs() / RISE_EVERY.as_secs();
        let risen = i64::from(view.priority).saturating_add_unsigned(waited);
        // Who holds blocks keeps its own, which may lie above all that wait.
        let most = self.highest.max(view.priority);
        risen.min(i64::from(most)) as i32
    }
}

/// Those that wait and are not held back, in the order of their turns.
pub(super) fn queue(sequences: &[SequenceView], now: Duration) -> Vec<&SequenceView> {
    let levels = Levels::new(sequences, now);
    let mut queue: Vec<&SequenceView> = sequences
        .iter()
        .filter(|view| view.stage == Stage::Waiting && !view.held_back)
        .collect();
    queue.sort_by_key(|view| (Reverse(levels.of(view)), view.ahead, view.id));
    queue
}

#[cfg(test)]
mod tests {
    use super::super::testing::waiting;
    use super::*;

    fn order(sequences: &[SequenceView], now_s: u64) -> Vec<u64> {
        let queue = queue(sequences, Duration::from_secs(now_s));
        queue.iter().map(|view| view.id.arrival).collect()
    }

    #[test]
    fn a_tenant_with_many_requests_delays_another_by_one() {
        let mut clock = FairClock::default();
        let tags: Vec<u64> = (0..5).map(|_| clock.enter(b"many", 100)).collect();
        assert_eq!(tags, [0, 100, 200, 300, 400]);
        clock.served(tags[0], Some(tags[1]));
        clock.served(tags[4], Some(tags[1]));
        assert_eq!(clock.ahead_of(tags[2]), 100, "no further than who waits");
        clock.served(tags[1], Some(tags[2]));
        let other = clock.enter(b"one", 100);
        assert_eq!(other, 100, "it starts where the first one is");
        assert_eq!(clock.ahead_of(tags[2]), 100);
        assert_eq!(clock.ahead_of(other), 0);
        assert_eq!(clock.enter(b"one", 1), 200);
    }

    #[test]
    fn nobody_saves_up_and_nobody_is_remembered_for_ever() {
        let mut clock = FairClock::default();
        clock.enter(b"a", 10);
        let late = clock.enter(b"b", 1_000_000);
        clock.served(late, None);
        for step in 0..50 {
            let tag = clock.enter(format!("t{step}").as_bytes(), 10);
            clock.served(tag, None);
        }
        let tag = clock.enter(b"b", 5);
        clock.served(tag, None);
        assert_eq!(clock.ends.len(), 1);
        assert_eq!(clock.enter(b"a", 10), tag);
    }

    #[test]
    fn tokens_weigh_not_requests() {
        let mut clock = FairClock::default();
        let long = [clock.enter(b"long", 1000), clock.enter(b"long", 1000)];
        let short: Vec<u64> = (0..12).map(|_| clock.enter(b"short", 100)).collect();
        let before = short.iter().filter(|tag| **tag < long[1]).count();
        assert_eq!(before, 10);
    }

    #[test]
    fn a_higher_priority_goes_first_and_a_low_one_in_the_end() {
        let with = |arrival, priority, ahead, arrived_s| SequenceView {
            priority,
            ahead,
            arrived: Duration::from_secs(arrived_s),
            ..waiting(arrival, 10)
        };
        let low = with(1, -1, 0, 0);
        let mut views = vec![low, with(2, 0, 50, 0), with(3, 0, 40, 0), with(4, 1, 90, 0)];
        assert_eq!(order(&views, 0), [4, 3, 2, 1]);
        // Fresh ones of the highest priority keep coming: the low one catches up.
        views[3] = with(4, 1, 90, 4);
        assert_eq!(order(&views, 4), [1, 3, 2, 4]);
        // Time alone changes nothing among equals: the tokens do.
        let equals = [with(1, 0, 70, 0), with(2, 0, 10, 60)];
        assert_eq!(order(&equals, 60), [2, 1]);
    }
}
