//! When ready layers leave: in groups that are worth waking both ends for.
//!
//! A frame costs each end a wake-up and system calls, however small it is. So blocks whose
//! bytes are final wait for others until the link needs about [`GROUP_WIRE_TIME`] for them
//! all, but never longer than [`HOLD_MAX`], and not at all once the commit was asked for.
//! Whatever a prompt's last layer leaves behind is at most one group: about that much of a
//! transfer stays visible, and a prompt whose KV needs less goes as a whole.
//!
//! How fast the link is, is learned from what the receiver acknowledges. Until then
//! nothing is held.

use std::time::{Duration, Instant};

const GROUP_WIRE_TIME: Duration = Duration::from_millis(1);
/// Where computing is slower than this between two layers, holding a layer back gains
/// nothing that anybody would notice.
const HOLD_MAX: Duration = Duration::from_millis(20);
/// The time for fewer bytes says more about waking up than about the link. What a short
/// prompt's chunk brings counts: a larger sample soon corrects it, since a faster one is
/// believed at once.
const SAMPLE_BYTES_MIN: u64 = 16 << 10;
/// How much of a slower sample is believed. What disturbs a sample only lowers it.
const SLOWER: f64 = 0.125;

/// How fast one lane moves bytes to their place, as far as was seen.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinkSpeed {
    bytes_per_s: Option<f64>,
}

impl LinkSpeed {
    /// The receiver had consumed `bytes` after `time` in which bytes were under way.
    pub fn seen(&mut self, bytes: u64, time: Duration) {
        if bytes < SAMPLE_BYTES_MIN || time.is_zero() {
            return;
        }
        let sample = bytes as f64 / time.as_secs_f64();
        self.bytes_per_s = Some(match self.bytes_per_s {
            Some(known) if sample < known => known + (sample - known) * SLOWER,
            _ => sample,
        });
    }

    /// What `bytes` need on this link; `None` while it is unknown.
    pub fn time_for(self, bytes: u64) -> Option<Duration> {
        let rate = self.bytes_per_s?;
        Some(Duration::from_secs_f64(bytes as f64 / rate))
    }

    /// Bytes that are worth leaving together; 0 while the link is unknown.
    pub fn group_bytes(self) -> u64 {
        let bytes = self.bytes_per_s.unwrap_or(0.0) * GROUP_WIRE_TIME.as_secs_f64();
        bytes as u64
    }
}

/// Whether what is queued of one transfer leaves, or waits for more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Gathering {
    /// Nothing is queued, or the lane has not looked at it.
    #[default]
    Idle,
    Holding {
        since: Instant,
    },
    /// All that is queued goes, also what comes meanwhile.
    Leaving,
}

impl Gathering {
    /// Decides at `now` for a queue that is `full` (a whole group, or the last one) or not.
    pub(super) fn leaves(&mut self, full: bool, now: Instant) -> bool {
        let since = match *self {
            Self::Leaving => return true,
            Self::Holding { since } => since,
            Self::Idle => now,
        };
        *self = if full || since + HOLD_MAX <= now {
            Self::Leaving
        } else {
            Self::Holding { since }
        };
        *self == Self::Leaving
    }

    /// When what is held leaves at the latest.
    pub(super) fn due(self) -> Option<Instant> {
        match self {
            Self::Holding { since } => Some(since + HOLD_MAX),
            Self::Idle | Self::Leaving => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_what_the_link_moves_in_its_time() {
        let mut link = LinkSpeed::default();
        assert_eq!(link.group_bytes(), 0, "an unknown link holds nothing back");
        link.seen(1000, Duration::from_millis(1));
        assert_eq!(link.group_bytes(), 0, "a few bytes say nothing");
        link.seen(1 << 20, Duration::from_millis(1));
        assert_eq!(link.group_bytes(), 1 << 20);
        link.seen(1 << 20, Duration::from_millis(2));
        let eased = link.group_bytes();
        assert!((1 << 19..1 << 20).contains(&eased), "{eased}");
        for _ in 0..100 {
            link.seen(1 << 20, Duration::from_millis(2));
        }
        assert!(link.group_bytes().abs_diff(1 << 19) < 100);
        link.seen(2 << 20, Duration::from_millis(1));
        assert_eq!(link.group_bytes(), 2 << 20, "a faster sample is the truth");
    }

    #[test]
    fn what_is_held_leaves_when_the_group_is_full_or_its_time_is_over() {
        let now = Instant::now();
        let mut gathering = Gathering::default();
        assert!(!gathering.leaves(false, now));
        assert_eq!(gathering.due(), Some(now + HOLD_MAX));
        assert!(!gathering.leaves(false, now + HOLD_MAX / 2));
        assert!(gathering.leaves(false, now + HOLD_MAX));
        assert_eq!(gathering.due(), None);
        let mut gathering = Gathering::default();
        assert!(!gathering.leaves(false, now));
        assert!(gathering.leaves(true, now));
        assert!(gathering.leaves(false, now), "the rest goes along");
    }

    #[test]
    fn layers_leave_in_groups_and_the_last_one_with_the_commit() {
        use super::super::SourceBlock;
        use super::super::state::{Limits, NextFrame, SenderState};
        use crate::part::Missing;
        use baton_proto::kv_layout::ByteExtent;

        const LAYER_BYTES: u32 = (SAMPLE_BYTES_MIN / 5 * 2) as u32;
        let now = Instant::now();
        let limits = Limits {
            queue_parts_max: 1000,
            queue_bytes_max: 1 << 30,
            in_flight_bytes_max: 1 << 30,
            in_flight_parts_max: 1000,
            reconnect_max: Duration::from_secs(2),
        };
        let mut state = SenderState::new(limits, now, Duration::from_secs(9));
        state.connected();
        // An empty list that goes on: everything is missing.
        state.opened(Missing::default(), now);
        let mut link = LinkSpeed::default();
        link.seen(SAMPLE_BYTES_MIN, GROUP_WIRE_TIME);
        state.set_link(link);
        let push = |state: &mut SenderState, layer: u32| {
            let extent = ByteExtent {
                offset: u64::from(layer * LAYER_BYTES),
                len: LAYER_BYTES,
                region: 0,
            };
            let block = SourceBlock { ordinal: 0, extent };
            state.push(0, layer, &[block]).unwrap();
        };
        let leaves = |state: &mut SenderState, now| match state.next_frame(u64::MAX, now) {
            NextFrame::Frame(plan) => Some(plan.range.layer),
            _ => None,
        };
        push(&mut state, 0);
        assert!(state.needs_a_look(), "somebody must mind the time");
        assert_eq!(leaves(&mut state, now), None);
        push(&mut state, 1);
        assert!(!state.needs_a_look());
        push(&mut state, 2);
        assert!(state.needs_a_look(), "a group is whole");
        for layer in 0..3 {
            assert_eq!(leaves(&mut state, now), Some(layer));
        }
        assert_eq!(leaves(&mut state, now), None);
        // One that nothing follows leaves when its time is over.
        push(&mut state, 3);
        assert_eq!(leaves(&mut state, now), None);
        let due = state.wake_at().unwrap();
        assert_eq!(due, now + HOLD_MAX);
        assert_eq!(leaves(&mut state, due), Some(3));
        // The prompt's end holds nothing back.
        push(&mut state, 4);
        assert_eq!(leaves(&mut state, due), None);
        state.commit(bytes::Bytes::new());
        assert_eq!(leaves(&mut state, due), Some(4));
    }
}
