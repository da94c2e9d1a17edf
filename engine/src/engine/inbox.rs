//! The bounded way into the engine's thread.
//!
//! Submissions are refused when `submissions_max` wait; every other command is
//! always taken, because losing a `Cancel` or `Release` would leak blocks, and
//! their number is bounded by the requests that were accepted. A cancel can be
//! seen without taking it out, so that it reaches a step in flight.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::api::{Command, RequestKey};

/// Why a command was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// Too many submissions wait for the engine; refuse the request as overloaded.
    #[error("the engine's command queue is full")]
    Full,
    /// The engine has ended; nothing it accepted is still held.
    #[error("the engine has stopped")]
    Stopped,
}

#[derive(Debug, Default)]
struct Queue {
    commands: VecDeque<Command>,
    submissions: usize,
    closed: bool,
    /// Since when something waits.
    since: Option<Instant>,
}

/// Commands on their way to the engine's thread.
#[derive(Debug)]
pub(crate) struct Inbox {
    queue: Mutex<Queue>,
    arrived: Condvar,
    /// Whether `queue` may hold a cancel, so that the loop looks without locking.
    cancel: AtomicBool,
    submissions_max: usize,
    /// Called when something has arrived, where no thread waits for it.
    #[cfg(feature = "test-support")]
    pub(crate) on_arrival: std::sync::OnceLock<Arrival>,
}

/// Hears that something has arrived.
#[cfg(feature = "test-support")]
pub(crate) struct Arrival(pub(crate) Box<dyn Fn() + Send + Sync>);

#[cfg(feature = "test-support")]
impl std::fmt::Debug for Arrival {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Arrival")
    }
}

impl Inbox {
    pub(crate) fn new(submissions_max: usize) -> Self {
        Self {
            queue: Mutex::default(),
            arrived: Condvar::new(),
            cancel: AtomicBool::new(false),
            submissions_max,
            #[cfg(feature = "test-support")]
            on_arrival: std::sync::OnceLock::new(),
        }
    }

    fn wake(&self) {
        self.arrived.notify_one();
        #[cfg(feature = "test-support")]
        if let Some(arrival) = self.on_arrival.get() {
            (arrival.0)();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Nothing panics while holding the lock, and a queue is whole between operations.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Never blocks for longer than the lock.
    pub(crate) fn send(&self, command: Command) -> Result<(), SendError> {
        let mut queue = self.lock();
        if queue.closed {
            return Err(SendError::Stopped);
        }
        match &command {
            Command::Submit(_) if queue.submissions >= self.submissions_max => {
                return Err(SendError::Full);
            }
            Command::Submit(_) => queue.submissions += 1,
            Command::Cancel { .. } => self.cancel.store(true, Ordering::Release),
            _ => {}
        }
        queue.commands.push_back(command);
        queue.since.get_or_insert_with(Instant::now);
        drop(queue);
        self.wake();
        Ok(())
    }

    /// Refuses everything from now on and wakes the engine's thread.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.wake();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// How long the first of what waits has waited.
    pub(crate) fn waiting_for(&self) -> Duration {
        self.lock()
            .since
            .map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Moves everything that waits into `commands`; with `wait`, sleeps until there
    /// is something or the inbox is closed. Returns whether it is still open.
    pub(crate) fn take(&self, commands: &mut Vec<Command>, wait: bool) -> bool {
        let mut queue = self.lock();
        while wait && queue.commands.is_empty() && !queue.closed {
            queue = self
                .arrived
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
        }
        queue.submissions = 0;
        queue.since = None;
        self.cancel.store(false, Ordering::Release);
        commands.extend(queue.commands.drain(..));
        !queue.closed
    }

    /// The keys with a cancel under way, without taking the commands.
    pub(crate) fn peek_cancels(&self, keys: &mut Vec<RequestKey>) {
        keys.clear();
        if !self.cancel.load(Ordering::Acquire) {
            return;
        }
        keys.extend(
            self.lock()
                .commands
                .iter()
                .filter_map(|command| match command {
                    Command::Cancel { key } => Some(*key),
                    _ => None,
                }),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn submit(key: u64) -> Command {
        Command::Submit(Box::new(crate::api::Submission {
            key: RequestKey(key),
            request_id: "r".into(),
            work: crate::api::Work::Local,
            prompt: vec![1],
            forced: Vec::new(),
            sampling: baton_proto::sampling::SamplingParams::default(),
            cache_salt: Vec::new(),
            priority: 0,
            use_cache: true,
            itl_target: None,
        }))
    }

    #[test]
    fn submissions_are_bounded_and_control_commands_are_not() {
        let inbox = Inbox::new(2);
        assert_eq!(inbox.send(submit(1)), Ok(()));
        assert_eq!(inbox.send(submit(2)), Ok(()));
        assert_eq!(inbox.send(submit(3)), Err(SendError::Full));
        for _ in 0..100 {
            assert_eq!(inbox.send(Command::Release { key: RequestKey(1) }), Ok(()));
        }
        let mut taken = Vec::new();
        assert!(inbox.take(&mut taken, true));
        assert_eq!(taken.len(), 102);
        assert_eq!(inbox.send(submit(3)), Ok(()));
    }

    #[test]
    fn a_cancel_is_seen_before_it_is_taken_and_none_after() {
        let inbox = Inbox::new(2);
        let mut keys = Vec::new();
        inbox.send(Command::Cancel { key: RequestKey(9) }).unwrap();
        inbox.peek_cancels(&mut keys);
        assert_eq!(keys, [RequestKey(9)]);
        inbox.take(&mut Vec::new(), false);
        inbox.peek_cancels(&mut keys);
        assert!(keys.is_empty());
    }

    #[test]
    fn a_closed_inbox_refuses_but_hands_out_what_it_has() {
        let inbox = Inbox::new(2);
        inbox.send(Command::ClearCache).unwrap();
        inbox.close();
        assert_eq!(inbox.send(Command::ClearCache), Err(SendError::Stopped));
        let mut taken = Vec::new();
        assert!(!inbox.take(&mut taken, true));
        assert_eq!(taken.len(), 1);
    }
}
