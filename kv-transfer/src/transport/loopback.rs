//! The transport inside one process: a direct copy from source to granted blocks.
//!
//! Receivers list themselves under their process token; a sender that finds the
//! token here calls the receiver's end of the lane on its own thread. The copy runs
//! under the receiver's write guard and the sender's read guard, and checksums are
//! computed on both ends exactly as over a socket. Holding the token is the proof
//! that the sender was told by the receiver's worker.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, Weak};
use std::time::Duration;

use super::{Lane, OutFrame, OutQueue};
use crate::codec::{Control, Scope};
use crate::error::Error;
use crate::receiver::Shared;
use crate::receiver::lane::ReceiverLane;
use crate::receiver::outbox::Outbox;
use crate::sender::TransportKind;
use crate::streaming::Slices;
use crate::ticket::{ProcessToken, SessionId};
use crate::wake::{Bell, lock};

/// Receivers of this process. Global because the two ends are started independently
/// and share nothing but the token that travelled over the control plane.
static RECEIVERS: LazyLock<Mutex<HashMap<ProcessToken, Weak<Shared>>>> =
    LazyLock::new(Mutex::default);

/// Lets senders of this process find `receiver`.
pub(crate) fn list(token: ProcessToken, receiver: &Arc<Shared>) {
    lock(&RECEIVERS).insert(token, Arc::downgrade(receiver));
}

/// Undoes [`list`]; lanes that are open see it at their next call.
pub(crate) fn unlist(token: ProcessToken) {
    lock(&RECEIVERS).remove(&token);
}

/// Whether `token` names a receiver of this process.
pub(crate) fn is_listed(token: ProcessToken) -> bool {
    lock(&RECEIVERS)
        .get(&token)
        .is_some_and(|receiver| receiver.strong_count() > 0)
}

/// A lane to a receiver of this process.
pub(crate) struct LoopbackLane {
    token: ProcessToken,
    receiver: ReceiverLane,
}

impl LoopbackLane {
    /// Opens a lane whose replies ring `bell`.
    ///
    /// # Errors
    /// [`Error::PeerLost`] if the receiver is gone.
    pub(crate) fn open(
        token: ProcessToken,
        session: SessionId,
        bell: &Bell,
    ) -> Result<Self, Error> {
        let shared = lock(&RECEIVERS)
            .get(&token)
            .and_then(Weak::upgrade)
            .ok_or_else(|| Error::PeerLost("the receiver has stopped".to_owned()))?;
        let outbox = Arc::new(Outbox::ringing(bell.clone()));
        let receiver = ReceiverLane::new(shared, session, outbox, TransportKind::Loopback);
        Ok(Self { token, receiver })
    }

    fn data(&mut self, frame: OutFrame) -> Result<(), Error> {
        match frame {
            OutFrame::Control { scope, control, .. } => self.receiver.control(scope, control),
            OutFrame::Data { header, source, .. } => {
                let mut incoming = self.receiver.data(header)?;
                source.with_slices(0, |slices| {
                    let mut slices = Slices::of(slices);
                    incoming.take(|buffer| slices.fill(buffer));
                });
                self.receiver.finish(incoming);
                Ok(())
            }
        }
    }
}

impl Lane for LoopbackLane {
    fn flush(&mut self, queue: &mut OutQueue, _more: bool) -> Result<bool, Error> {
        if !is_listed(self.token) {
            return Err(Error::PeerLost("the receiver has stopped".to_owned()));
        }
        // A lane inside one process is never silent.
        let now = self.receiver.now();
        self.receiver.heard(now);
        let mut moved = false;
        loop {
            queue.drop_ended();
            let Some(frame) = queue.pop() else {
                break;
            };
            self.data(frame)?;
            moved = true;
        }
        if moved {
            self.receiver.idle();
        }
        Ok(moved)
    }

    fn receive(&mut self) -> Result<Option<(Scope, Control)>, Error> {
        if self.receiver.outbox().overflowed() {
            return Err(Error::Protocol("too many replies".to_owned()));
        }
        Ok(self.receiver.outbox().pop())
    }

    fn park(&mut self, bell: &Bell, _want_flush: bool, timeout: Duration) -> Result<(), Error> {
        bell.park(&[], timeout)
            .map_err(|error| Error::io("park", error))?;
        Ok(())
    }
}
