//! The thread that drives one lane, and the sender's grip on it.

use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::SenderConfig;
use super::driver::{Driver, Inbox, Peer, Step};
use super::transfer::TransferShared;
use crate::error::Error;
use crate::ticket::SessionId;
use crate::wake::{Bell, lock};

pub(crate) struct LaneHandle {
    inbox: Arc<Mutex<Inbox>>,
    bell: Bell,
    /// `None` if somebody else drives the lane.
    thread: Option<JoinHandle<()>>,
}

impl LaneHandle {
    pub(crate) fn start(
        config: Arc<SenderConfig>,
        peer: Peer,
        session: SessionId,
    ) -> Result<Self, Error> {
        let inbox = Arc::new(Mutex::new(Inbox::default()));
        let bell = Bell::new().map_err(|error| Error::io("create an eventfd", error))?;
        #[cfg(feature = "test-support")]
        let network = config.network.clone();
        let driver = Driver::new(config, peer, session, Arc::clone(&inbox), bell.clone());
        #[cfg(feature = "test-support")]
        if let Some(network) = network {
            network.drive(driver, session);
            return Ok(Self {
                inbox,
                bell,
                thread: None,
            });
        }
        let thread = std::thread::Builder::new()
            .name("kv-lane-out".to_owned())
            .spawn(move || run(driver))
            .map_err(|error| Error::io("start a lane's thread", error))?;
        Ok(Self {
            inbox,
            bell,
            thread: Some(thread),
        })
    }

    pub(crate) fn bell(&self) -> &Bell {
        &self.bell
    }

    /// Hands a transfer to the lane; false if the lane has closed.
    pub(crate) fn submit(&self, transfer: &Arc<TransferShared>) -> bool {
        let mut inbox = lock(&self.inbox);
        if inbox.closed {
            return false;
        }
        inbox.transfers.push(Arc::clone(transfer));
        drop(inbox);
        self.bell.ring();
        true
    }

    pub(crate) fn stop(&self) {
        lock(&self.inbox).stopping = true;
        self.bell.ring();
    }

    pub(crate) fn join(self) {
        // The last handle may be dropped by a task that the lane's thread woke; it is
        // never dropped by the lane's thread itself, which holds none.
        if let Some(thread) = self.thread {
            let _ = thread.join();
        }
    }
}

fn run(mut driver: Driver) {
    loop {
        match driver.step() {
            Step::Again => {}
            Step::Wait(until) => driver.park(until),
            Step::Closed => return,
        }
    }
}
