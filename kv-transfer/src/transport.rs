//! What the handoff asks of a transport: to move frames, and nothing else.
//!
//! A transport opens a [`Lane`] to a receiver and moves what is queued in an
//! [`OutQueue`] towards it, and control frames back. It holds no retry, no
//! deadline and no policy: a failing call means the lane is gone, and the handoff
//! layer decides what follows.

pub(crate) mod connect;
pub(crate) mod loopback;
pub(crate) mod nixl;
pub(crate) mod shared_memory;
pub(crate) mod stream;
pub(crate) mod tcp;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::codec::{Control, HEADER_BYTES, Header, Scope};
use crate::error::Error;
use crate::sender::source::Source;
use crate::wake::Bell;

/// When the peer counts as last heard, for an end that looks again at `now` after
/// `turned_at`. An end that slept for longer than its pings let it was starved, and the
/// peer perhaps with it: time in which it did not listen is no silence.
pub(crate) fn heard_despite_sleep(
    heard_at: Instant,
    turned_at: Instant,
    now: Instant,
    ping_interval: Duration,
) -> Instant {
    let slept = now.saturating_duration_since(turned_at);
    (heard_at + slept.saturating_sub(2 * ping_interval)).min(now)
}

/// The sender's end of one open lane.
pub(crate) trait Lane: Send {
    /// Moves queued frames towards the receiver as far as that goes without blocking.
    /// `more` says that the queue will be filled again at once. Returns whether
    /// anything moved.
    ///
    /// # Errors
    /// Any: the lane is gone.
    fn flush(&mut self, queue: &mut OutQueue, more: bool) -> Result<bool, Error>;

    /// The next frame from the receiver, if one is here.
    ///
    /// # Errors
    /// Any: the lane is gone.
    fn receive(&mut self) -> Result<Option<(Scope, Control)>, Error>;

    /// Parks until the bell rings, a frame came, `timeout` is over, or, if
    /// `want_flush`, the lane can take bytes again.
    ///
    /// # Errors
    /// Any: the lane is gone.
    fn park(&mut self, bell: &Bell, want_flush: bool, timeout: Duration) -> Result<(), Error>;
}

/// One frame on its way out.
pub(crate) enum OutFrame {
    Control {
        scope: Scope,
        control: Control,
        bytes: Vec<u8>,
    },
    Data {
        header: Header,
        bytes: [u8; HEADER_BYTES],
        source: Source,
    },
}

impl OutFrame {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Control { bytes, .. } => bytes.len(),
            Self::Data { source, .. } => HEADER_BYTES + source.len(),
        }
    }

    fn is_ended(&self) -> bool {
        match self {
            Self::Control { .. } => false,
            Self::Data { source, .. } => source.is_ended(),
        }
    }
}

/// Frames in the order in which they leave.
#[derive(Default)]
pub(crate) struct OutQueue {
    frames: VecDeque<OutFrame>,
    /// Bytes of the first frame that have left.
    sent: usize,
    /// Bytes that have not left.
    bytes: usize,
    /// Frames at the front that later urgent ones must not pass.
    urgent: usize,
}

impl OutQueue {
    pub(crate) fn push_control(&mut self, scope: Scope, control: Control) {
        let bytes = control.encode(scope);
        self.push(OutFrame::Control {
            scope,
            control,
            bytes,
        });
    }

    /// Queues a frame that goes before everything that is not: one that says nothing
    /// about the data frames it passes.
    pub(crate) fn push_urgent(&mut self, scope: Scope, control: Control) {
        let bytes = control.encode(scope);
        self.bytes += bytes.len();
        let frame = OutFrame::Control {
            scope,
            control,
            bytes,
        };
        // The first one may have left in part.
        let at = self.urgent.max(usize::from(self.sent > 0));
        self.frames.insert(at.min(self.frames.len()), frame);
        self.urgent = at + 1;
    }

    pub(crate) fn push_data(&mut self, header: Header, source: Source) {
        self.push(OutFrame::Data {
            header,
            bytes: header.encode(),
            source,
        });
    }

    fn push(&mut self, frame: OutFrame) {
        self.bytes += frame.len();
        self.frames.push_back(frame);
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn begins_with_control(&self) -> bool {
        matches!(self.frames.front(), Some(OutFrame::Control { .. }))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Drops data frames of transfers that have ended. One that has partly left stays,
    /// so that the lane keeps in step.
    pub(crate) fn drop_ended(&mut self) {
        let mut index = 0;
        let Self {
            frames,
            sent,
            bytes,
            urgent: _,
        } = self;
        frames.retain(|frame| {
            let under_way = index == 0 && *sent > 0;
            index += 1;
            let keep = under_way || !frame.is_ended();
            if !keep {
                *bytes -= frame.len();
            }
            keep
        });
    }

    /// The frames from the first one on, and how many bytes of it have left.
    pub(crate) fn frames(&self) -> (impl Iterator<Item = &OutFrame>, usize) {
        (self.frames.iter(), self.sent)
    }

    /// Takes the whole first frame.
    pub(crate) fn pop(&mut self) -> Option<OutFrame> {
        let frame = self.frames.pop_front()?;
        self.bytes -= frame.len() - self.sent;
        self.sent = 0;
        self.urgent = self.urgent.saturating_sub(1);
        Some(frame)
    }

    /// Takes note that `bytes` more bytes have left.
    pub(crate) fn advance(&mut self, bytes: usize) {
        let mut left = bytes;
        while let Some(first) = self.frames.front() {
            let open = first.len() - self.sent;
            if left < open {
                self.sent += left;
                self.bytes -= left;
                return;
            }
            left -= open;
            self.pop();
        }
        debug_assert_eq!(left, 0, "more bytes left than were queued");
    }
}
