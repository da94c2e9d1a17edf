//! The thread that serves one lane: connects, keeps it alive, moves transfers over
//! it, and reconnects when it breaks.
//!
//! Transfers share a lane fairly: each turn takes one frame (at most 256 KiB of
//! consecutive parts) from every transfer that has something to send, until one
//! gathered write is full.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustls::pki_types::ServerName;

use super::SenderConfig;
use super::source::Source;
use super::transfer::{Inner, TransferShared};
use crate::codec::{Control, Header, Kind, Scope};
use crate::error::Error;
use crate::part::frame_crc;
use crate::ticket::{LaneKey, ProcessToken, SessionId};
use crate::transport::connect::Destination;
use crate::transport::loopback::LoopbackLane;
use crate::transport::tcp::TcpLane;
use crate::transport::{Lane, OutQueue};
use crate::wake::{Bell, lock};

/// Bytes gathered before a write: one `sendmsg` takes up to this much.
const GATHER_BYTES: usize = 1 << 20;
/// A wait that is due already still yields, so that no state can make the thread spin.
const PARK_MIN: Duration = Duration::from_millis(1);
const BACK_OFF_MIN: Duration = Duration::from_millis(10);
const BACK_OFF_MAX: Duration = Duration::from_secs(1);

/// Whom a lane leads to, and by which transport.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) enum Peer {
    Loopback(ProcessToken),
    Tcp {
        address: SocketAddr,
        server_name: Option<ServerName<'static>>,
        key: LaneKey,
    },
}

#[derive(Default)]
struct Inbox {
    transfers: Vec<Arc<TransferShared>>,
    stopping: bool,
    closed: bool,
}

/// The sender's grip on a lane's thread.
pub(crate) struct LaneHandle {
    inbox: Arc<Mutex<Inbox>>,
    bell: Bell,
    thread: JoinHandle<()>,
}

impl LaneHandle {
    pub(crate) fn start(
        config: Arc<SenderConfig>,
        peer: Peer,
        session: SessionId,
    ) -> Result<Self, Error> {
        let inbox = Arc::new(Mutex::new(Inbox::default()));
        let bell = Bell::new().map_err(|error| Error::io("create an eventfd", error))?;
        let driver = Driver {
            config,
            peer,
            session,
            inbox: Arc::clone(&inbox),
            bell: bell.clone(),
            transfers: Vec::new(),
            queue: OutQueue::default(),
        };
        let thread = std::thread::Builder::new()
            .name("kv-lane-out".to_owned())
            .spawn(move || driver.run())
            .map_err(|error| Error::io("start a lane's thread", error))?;
        Ok(Self {
            inbox,
            bell,
            thread,
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
        let _ = self.thread.join();
    }
}

struct Active {
    shared: Arc<TransferShared>,
    /// Whether it knows of the current connection.
    announced: bool,
}

struct Driver {
    config: Arc<SenderConfig>,
    peer: Peer,
    session: SessionId,
    inbox: Arc<Mutex<Inbox>>,
    bell: Bell,
    transfers: Vec<Active>,
    queue: OutQueue,
}

impl Driver {
    fn run(mut self) {
        let mut back_off = BACK_OFF_MIN;
        let mut idle_since = Instant::now();
        loop {
            if self.is_stopping() {
                return self.close();
            }
            self.take_inbox();
            self.prune(Instant::now());
            if self.transfers.is_empty() {
                if idle_since.elapsed() >= self.config.lane_idle_max && self.try_close() {
                    return;
                }
                let _ = self.bell.park(&[], self.config.lane_idle_max);
                continue;
            }
            idle_since = Instant::now();
            match self.connect() {
                Ok(mut lane) => {
                    let connected_at = Instant::now();
                    let result = self.serve(&mut *lane);
                    drop(lane);
                    self.lost();
                    if let Err(error) = result {
                        tracing::warn!(%error, "a data lane broke");
                    }
                    if connected_at.elapsed() > BACK_OFF_MAX {
                        back_off = BACK_OFF_MIN;
                    }
                    idle_since = Instant::now();
                }
                Err(error @ (Error::PeerLost(_) | Error::Protocol(_) | Error::Tls(_))) => {
                    let (reason, now) = (error.to_string(), Instant::now());
                    for active in &self.transfers {
                        active
                            .shared
                            .update(|inner| inner.state.peer_lost(&reason, now));
                    }
                    self.transfers.clear();
                    continue;
                }
                Err(error) => tracing::debug!(%error, "a data lane could not be opened"),
            }
            self.pause(back_off);
            back_off = (back_off * 2).min(BACK_OFF_MAX);
        }
    }

    fn connect(&self) -> Result<Box<dyn Lane>, Error> {
        match &self.peer {
            Peer::Loopback(token) => Ok(Box::new(LoopbackLane::open(
                *token,
                self.session,
                &self.bell,
            )?)),
            Peer::Tcp {
                address,
                server_name,
                key,
            } => {
                let to = Destination {
                    address: *address,
                    tls: self.config.tls.as_ref(),
                    server_name: server_name.as_ref(),
                    key,
                };
                let timeout = self.config.connect_timeout;
                Ok(Box::new(TcpLane::connect(&to, self.session, timeout)?))
            }
        }
    }

    /// Runs one connection until it breaks (an error), or has been idle for long, or
    /// the sender stops.
    fn serve(&mut self, lane: &mut dyn Lane) -> Result<(), Error> {
        let mut heard_at = Instant::now();
        let mut pinged_at = heard_at;
        let mut idle_since = heard_at;
        while !self.is_stopping() {
            let now = Instant::now();
            self.take_inbox();
            self.announce(now);
            let more = self.fill(now);
            let mut moved = lane.flush(&mut self.queue, more)?;
            while let Some((scope, control)) = lane.receive()? {
                moved = true;
                heard_at = now;
                self.handle(scope, control, now);
            }
            self.prune(now);
            if now.duration_since(heard_at) >= self.config.silence_max {
                return Err(Error::PeerLost("the receiver has gone silent".to_owned()));
            }
            if now.duration_since(pinged_at) >= self.config.ping_interval {
                pinged_at = now;
                self.queue.push_control(Scope::LANE, Control::Ping);
                continue;
            }
            if !self.transfers.is_empty() {
                idle_since = now;
            } else if now.duration_since(idle_since) >= self.config.lane_idle_max {
                return Ok(());
            }
            if !moved {
                let due = pinged_at + self.config.ping_interval;
                let wake_at = self.transfers.iter().filter_map(|active| {
                    active.shared.update_quietly(|inner| inner.state.wake_at())
                });
                let wake_at = wake_at.min().map_or(due, |at| at.min(due));
                let timeout = wake_at.saturating_duration_since(now).max(PARK_MIN);
                lane.park(&self.bell, !self.queue.is_empty(), timeout)?;
            }
        }
        // A last word, so that the receiver need not find out by silence.
        self.abort_all();
        self.announce(Instant::now());
        lane.flush(&mut self.queue, false)?;
        Ok(())
    }

    /// Opens new transfers on this connection and tells of aborted ones.
    fn announce(&mut self, now: Instant) {
        for active in &mut self.transfers {
            let scope = active.shared.scope();
            active.shared.tick(now);
            let fresh = !std::mem::replace(&mut active.announced, true);
            let (open, abort) = active.shared.update_quietly(|Inner { state, .. }| {
                if fresh {
                    state.connected();
                }
                (state.open_to_send(now), state.abort_to_send(now))
            });
            if open {
                let layout = active.shared.layout;
                self.queue.push_control(scope, Control::Open { layout });
            }
            if let Some(reason) = abort {
                self.queue.push_control(scope, Control::Abort { reason });
            }
        }
    }

    /// Queues frames until a write is full; true if there are more.
    fn fill(&mut self, now: Instant) -> bool {
        loop {
            let mut queued = false;
            for active in &self.transfers {
                if self.queue.bytes() >= GATHER_BYTES {
                    return true;
                }
                queued |= fill_frame(&mut self.queue, &active.shared, now);
            }
            if !queued {
                return false;
            }
        }
    }

    fn handle(&mut self, scope: Scope, control: Control, now: Instant) {
        if matches!(control, Control::Ping) {
            return self.queue.push_control(scope, Control::Pong);
        }
        let Some(active) = self
            .transfers
            .iter()
            .find(|active| active.shared.scope() == scope)
        else {
            return;
        };
        active.shared.update(|inner| {
            let state = &mut inner.state;
            match control {
                Control::Opened(missing) => state.opened(missing),
                Control::Ack { consumed } => state.acknowledged(consumed),
                Control::Nack(range) => state.damaged(range),
                Control::Missing(missing) => state.missing(&missing, now),
                Control::Committed => drop(state.committed()),
                Control::Refused(refusal) => drop(state.refused(refusal)),
                Control::Aborted => state.abort_heard(),
                // Only receivers get these; a confused peer changes nothing here.
                Control::Open { .. }
                | Control::Commit { .. }
                | Control::Abort { .. }
                | Control::Ping
                | Control::Pong => {}
            }
        });
    }

    /// Lets go of transfers that have nothing to say or hear any more.
    fn prune(&mut self, now: Instant) {
        self.transfers.retain(|active| {
            active.shared.tick(now);
            active
                .shared
                .update_quietly(|inner| inner.state.wants_lane(now))
        });
    }

    /// The connection is gone: nothing queued on it counts as sent.
    fn lost(&mut self) {
        self.queue = OutQueue::default();
        let now = Instant::now();
        for active in &mut self.transfers {
            active.announced = false;
            active.shared.update(|inner| inner.state.lane_lost(now));
        }
    }

    fn take_inbox(&mut self) {
        let fresh = std::mem::take(&mut lock(&self.inbox).transfers);
        let active = |shared| Active {
            shared,
            announced: false,
        };
        self.transfers.extend(fresh.into_iter().map(active));
    }

    fn is_stopping(&self) -> bool {
        lock(&self.inbox).stopping
    }

    /// Waits before the next attempt to connect, but not past what transfers wait for.
    fn pause(&mut self, back_off: Duration) {
        let until = Instant::now() + back_off;
        loop {
            let now = Instant::now();
            self.prune(now);
            if now >= until || self.is_stopping() || self.transfers.is_empty() {
                return;
            }
            let wake_at = self
                .transfers
                .iter()
                .filter_map(|active| active.shared.update_quietly(|inner| inner.state.wake_at()));
            let wake_at = wake_at.min().map_or(until, |at| at.min(until));
            let pause = wake_at.saturating_duration_since(now).max(PARK_MIN);
            let _ = self.bell.park(&[], pause);
        }
    }

    /// Closes an idle lane, unless a transfer came in meanwhile.
    fn try_close(&self) -> bool {
        let mut inbox = lock(&self.inbox);
        inbox.closed = inbox.transfers.is_empty();
        inbox.closed
    }

    /// Ends everything that is still open.
    fn close(mut self) {
        lock(&self.inbox).closed = true;
        self.abort_all();
    }

    fn abort_all(&mut self) {
        self.take_inbox();
        let now = Instant::now();
        for active in &self.transfers {
            active
                .shared
                .update(|inner| inner.state.abort("the sender is stopping", now));
        }
    }
}

/// Queues the next frame, or the commit, of one transfer; whether it did.
fn fill_frame(queue: &mut OutQueue, shared: &Arc<TransferShared>, now: Instant) -> bool {
    let scope = shared.scope();
    if let Some(plan) = shared.update(|inner| inner.state.next_frame()) {
        let source = Source::new(Arc::clone(shared), plan.extents);
        // Refused only if the transfer ended since the plan was made.
        let Some(crcs) = source.checksums() else {
            return false;
        };
        let header = Header {
            kind: Kind::Data,
            scope,
            range: plan.range,
            payload_len: plan.bytes as u32,
            payload_crc: frame_crc(crcs.iter().copied()),
        };
        shared.update_quietly(|inner| inner.state.checksums(plan.range, &crcs));
        queue.push_data(header, source);
        return true;
    }
    while let Some((range, extent)) = shared.update_quietly(|inner| inner.state.next_unchecked()) {
        let source = Source::new(Arc::clone(shared), vec![extent]);
        let Some(crcs) = source.checksums() else {
            return false;
        };
        shared.update_quietly(|inner| inner.state.checksums(range, &crcs));
    }
    if let Some(plan) = shared.update_quietly(|inner| inner.state.next_commit(now)) {
        let control = Control::Commit {
            root: plan.root,
            parts: plan.parts,
            payload: plan.payload,
        };
        queue.push_control(scope, control);
        return true;
    }
    false
}
