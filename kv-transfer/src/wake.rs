//! How one thread wakes another that is parked on file descriptors.
//!
//! A lane's thread waits for its socket and for its [`Bell`] in one `poll`, so that
//! pushes, replies and shutdown reach it without a second thread or a busy loop.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

/// Locks, also after a panic elsewhere: every critical section here leaves its state
/// whole at each step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tells whoever drives the lanes of a simulation on this thread that a bell was rung.
#[cfg(feature = "test-support")]
pub(crate) mod rung {
    use std::cell::{Cell, RefCell};
    use std::task::{Context, Poll, Waker};

    thread_local! {
        static RUNG: Cell<bool> = const { Cell::new(false) };
        static LISTENER: RefCell<Option<Waker>> = const { RefCell::new(None) };
    }

    pub(super) fn note() {
        RUNG.set(true);
        if let Some(listener) = LISTENER.take() {
            listener.wake();
        }
    }

    /// Ready once for all that was rung since the last time.
    pub(crate) fn poll(cx: &mut Context<'_>) -> Poll<()> {
        if RUNG.take() {
            return Poll::Ready(());
        }
        LISTENER.set(Some(cx.waker().clone()));
        Poll::Pending
    }
}

/// Rung by any thread, heard by one.
#[derive(Clone)]
pub(crate) struct Bell(Arc<OwnedFd>);

impl Bell {
    pub(crate) fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Self(Arc::new(fd)))
    }

    /// Wakes the listener, now or the next time it parks.
    pub(crate) fn ring(&self) {
        #[cfg(feature = "test-support")]
        rung::note();
        // The only failure is a full counter, and then the bell is ringing already.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }

    fn silence(&self) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&*self.0, &mut count);
    }

    /// Parks until the bell rings, one of `sockets` has what is waited for, or
    /// `timeout` is over. Returns which sockets are ready.
    pub(crate) fn park(
        &self,
        sockets: &[(BorrowedFd<'_>, PollFlags)],
        timeout: Duration,
    ) -> io::Result<Vec<PollFlags>> {
        let timeout = Timespec {
            tv_sec: timeout.as_secs().min(3600) as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        let mut fds: Vec<PollFd<'_>> = sockets
            .iter()
            .map(|(fd, flags)| PollFd::from_borrowed_fd(*fd, *flags))
            .collect();
        fds.push(PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN));
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        if fds.last().is_some_and(|bell| !bell.revents().is_empty()) {
            self.silence();
        }
        Ok(fds[..sockets.len()].iter().map(PollFd::revents).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bell_rung_before_parking_is_heard_once() {
        let bell = Bell::new().unwrap();
        bell.ring();
        bell.ring();
        let started = std::time::Instant::now();
        bell.park(&[], Duration::from_secs(10)).unwrap();
        assert!(started.elapsed() < Duration::from_secs(5));
        bell.park(&[], Duration::from_millis(20)).unwrap();
        assert!(started.elapsed() >= Duration::from_millis(20));
    }
}
