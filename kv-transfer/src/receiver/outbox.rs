//! What a receiver wants to say on one lane, until the lane's thread says it.

use std::collections::VecDeque;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::codec::{Control, Kind, Scope};
use crate::wake::{Bell, lock};

/// Frames queued at most. A peer that sends and never reads runs into it and loses
/// its lane, so the queue bounds what a bad peer can make us hold.
const FRAMES_MAX: usize = 4096;

/// Control frames on their way to a sender.
pub(crate) struct Outbox {
    queue: Mutex<VecDeque<(Scope, Control)>>,
    overflowed: AtomicBool,
    bell: Bell,
}

impl Outbox {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            queue: Mutex::new(VecDeque::new()),
            overflowed: AtomicBool::new(false),
            bell: Bell::new()?,
        })
    }

    /// An outbox whose listener parks on `bell`.
    pub(crate) fn ringing(bell: Bell) -> Self {
        Self {
            queue: Mutex::new(VecDeque::new()),
            overflowed: AtomicBool::new(false),
            bell,
        }
    }

    pub(crate) fn bell(&self) -> &Bell {
        &self.bell
    }

    /// Queues a frame. A newer `Ack`, `Refused` or `Pong` of the same scope replaces
    /// the queued one; when full, the frame is dropped and the lane ends.
    pub(crate) fn push(&self, scope: Scope, control: Control) {
        let mut queue = lock(&self.queue);
        if matches!(control.kind(), Kind::Ack | Kind::Refused | Kind::Pong)
            && let Some(queued) = queue
                .iter_mut()
                .find(|(to, queued)| *to == scope && queued.kind() == control.kind())
        {
            queued.1 = control;
        } else if queue.len() < FRAMES_MAX {
            queue.push_back((scope, control));
        } else {
            self.overflowed.store(true, Ordering::Relaxed);
        }
        drop(queue);
        self.bell.ring();
    }

    pub(crate) fn pop(&self) -> Option<(Scope, Control)> {
        lock(&self.queue).pop_front()
    }

    pub(crate) fn overflowed(&self) -> bool {
        self.overflowed.load(Ordering::Relaxed)
    }
}
