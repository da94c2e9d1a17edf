//! How much of one transfer may be under way: bytes and parts that were sent and that
//! the receiver has not consumed.
//!
//! The receiver acknowledges bytes; what parts they were is remembered here. A window that
//! is full opens again only for a frame of some size, so that single parts do not trickle
//! out, and one that stays full is taken for one whose bytes were lost.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::codec::{COALESCE_BYTES, FRAME_PARTS_MAX};

/// A full window that nothing was acknowledged of for this long makes the sender ask
/// what is missing: bytes that were lost are never acknowledged. A lane keeps its order,
/// so on a slow one the answer comes after everything that is still under way.
const STALL_MAX: Duration = Duration::from_secs(1);

/// The window of one transfer on one lane.
pub(super) struct Window {
    bytes_max: u64,
    parts_max: usize,
    /// Payload bytes sent and consumed since the receiver said what it lacks.
    sent: u64,
    consumed: u64,
    /// Frames sent and not consumed: the value of `sent` at their ends, and their parts.
    in_flight: VecDeque<(u64, usize)>,
    parts: usize,
    moved_at: Instant,
    /// Since when something was under way all the time, and `consumed` then.
    busy_since: (Instant, u64),
}

impl Window {
    pub(super) fn new(bytes_max: u64, parts_max: usize, now: Instant) -> Self {
        Self {
            bytes_max,
            parts_max,
            sent: 0,
            consumed: 0,
            in_flight: VecDeque::new(),
            parts: 0,
            moved_at: now,
            busy_since: (now, 0),
        }
    }

    /// Nothing is under way: both ends count anew.
    pub(super) fn restart(&mut self, now: Instant) {
        *self = Self::new(self.bytes_max, self.parts_max, now);
    }

    /// Bytes and parts a frame may have. At least one part, whatever its size, if nothing
    /// is under way.
    pub(super) fn room(&self) -> (u64, usize) {
        let in_flight = self.sent.saturating_sub(self.consumed);
        (
            self.bytes_max.saturating_sub(in_flight),
            self.parts_max.saturating_sub(self.parts),
        )
    }

    /// Whether a frame that begins with a part of `len` bytes has to wait.
    pub(super) fn is_full(&self, len: u32) -> bool {
        let bytes = (COALESCE_BYTES as u64).min(self.bytes_max / 2);
        let parts = (FRAME_PARTS_MAX as usize).min(self.parts_max.div_ceil(2));
        let (bytes_room, parts_room) = self.room();
        let over = bytes_room < bytes.max(len.into()) || parts_room < parts;
        !self.in_flight.is_empty() && over
    }

    /// When a window that is full now, and stays so, is taken for a stalled one.
    pub(super) fn stalls_at(&self) -> Instant {
        self.moved_at + STALL_MAX
    }

    pub(super) fn sent(&mut self, bytes: u64, parts: usize, now: Instant) {
        if self.in_flight.is_empty() {
            self.moved_at = now;
            self.busy_since = (now, self.sent);
        }
        self.sent += bytes;
        self.parts += parts;
        self.in_flight.push_back((self.sent, parts));
    }

    /// The receiver has read `consumed` bytes in all. If that is news, returns how many of
    /// them were read since the window was last empty, and how long ago that was.
    pub(super) fn acknowledged(&mut self, consumed: u64, now: Instant) -> Option<(u64, Duration)> {
        let consumed = consumed.min(self.sent);
        if consumed <= self.consumed {
            return None;
        }
        self.consumed = consumed;
        self.moved_at = now;
        let past = |(end, _): &mut (u64, usize)| *end <= consumed;
        while let Some((_, parts)) = self.in_flight.pop_front_if(past) {
            self.parts -= parts;
        }
        let (since, before) = self.busy_since;
        Some((
            consumed.saturating_sub(before),
            now.saturating_duration_since(since),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_window_opens_for_frames_and_not_for_single_parts() {
        let now = Instant::now();
        let mut window = Window::new(1 << 20, 100, now);
        assert!(!window.is_full(u32::MAX), "one part always leaves");
        for _ in 0..4 {
            assert!(!window.is_full(4096));
            window.sent(256 << 10, 10, now);
        }
        assert!(window.is_full(4096));
        window.acknowledged(8192, now);
        assert_eq!(window.room(), (8192, 60));
        assert!(window.is_full(4096), "two parts would leave");
        window.acknowledged(256 << 10, now);
        assert!(!window.is_full(4096));
        assert_eq!(window.room(), (256 << 10, 70));
    }

    #[test]
    fn parts_count_as_well_as_bytes() {
        let now = Instant::now();
        let mut window = Window::new(1 << 30, 4, now);
        window.sent(40, 3, now);
        assert!(window.is_full(10));
        window.acknowledged(39, now);
        assert!(window.is_full(10), "the frame is not consumed");
        window.acknowledged(40, now);
        assert!(!window.is_full(10));
    }

    #[test]
    fn acknowledgements_that_repeat_or_lie_change_nothing() {
        let now = Instant::now();
        let later = now + Duration::from_secs(9);
        let mut window = Window::new(100, 100, now);
        window.sent(60, 1, now);
        let heard = |window: &mut Window, consumed, at| window.acknowledged(consumed, at);
        let in_time = (60, Duration::from_secs(1));
        assert_eq!(heard(&mut window, 60, now + in_time.1), Some(in_time));
        assert_eq!(heard(&mut window, 60, later), None);
        assert_eq!(heard(&mut window, u64::MAX, later), None);
        assert_eq!(heard(&mut window, 3, later), None);
        assert_eq!(window.room(), (100, 100));
        assert_eq!(window.stalls_at(), now + in_time.1 + STALL_MAX);
    }
}
