//! What a lane does, as a machine that never parks: connects, keeps the lane alive,
//! moves transfers over it, and connects again when it breaks.
//!
//! ```text
//!            connected                    broken, or silent
//!  Down ------------------> Up(lane) -------------------------> Down, with back-off
//!    ^                       |
//!    |  refused: try later   +-- idle for long, or the sender stops --> closed
//!    +--+
//! ```
//! [`Driver::step`] does what can be done now and says when to come back; the thread
//! (or a test's scheduler) that drives it owns the waiting. Transfers share a lane by
//! deficit round robin: whose turn it is may send [`QUANTUM_BYTES`] more, saves up for a
//! larger part, and the next write goes on where the last one stopped. So a
//! short prompt passes a long one, however many long ones there are.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustls::pki_types::ServerName;

use super::gather::LinkSpeed;
use super::source::Source;
use super::state::NextFrame;
use super::transfer::{Inner, TransferShared};
use super::{SenderConfig, TransportKind};
use crate::codec::{COALESCE_BYTES, Control, Header, Kind, Scope};
use crate::error::Error;
use crate::part::frame_crc;
use crate::ticket::{LaneKey, ProcessToken, SessionId};
use crate::transport::connect::Destination;
use crate::transport::loopback::LoopbackLane;
use crate::transport::nixl;
use crate::transport::shared_memory::SharedLane;
use crate::transport::tcp::TcpLane;
use crate::transport::{Lane, OutQueue, heard_despite_sleep};
use crate::wake::{Bell, lock};

/// Bytes gathered before a write: one `sendmsg` takes up to this much.
const GATHER_BYTES: usize = 1 << 20;
/// What a transfer may send more of with each turn.
const QUANTUM_BYTES: u64 = COALESCE_BYTES as u64;
/// A wait that is due already still yields, so that no state can make the thread spin.
const PARK_MIN: Duration = Duration::from_millis(1);
const BACK_OFF_MIN: Duration = Duration::from_millis(10);
/// Short against the lease, within which a lane has to come back.
const BACK_OFF_MAX: Duration = Duration::from_millis(250);
/// A connection that held for this long was a good one.
const HELD_WELL: Duration = Duration::from_secs(1);

/// Whom a lane leads to, and by which transport.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) enum Peer {
    Loopback(ProcessToken),
    Tcp(Address),
    /// A data port that may be able to read this process' memory over NIXL.
    Nixl(Address),
    /// A process of this host, and where it can be reached if it takes no memory after all.
    Shared {
        token: ProcessToken,
        key: LaneKey,
        otherwise: Option<Address>,
    },
    #[cfg(feature = "test-support")]
    Mem(SocketAddr),
}

/// A data port.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Address {
    pub(crate) address: SocketAddr,
    pub(crate) server_name: Option<ServerName<'static>>,
    pub(crate) key: LaneKey,
}

impl Peer {
    fn transport(&self) -> TransportKind {
        match self {
            Self::Loopback(_) => TransportKind::Loopback,
            Self::Tcp(_) => TransportKind::Tcp,
            Self::Nixl(_) => TransportKind::Nixl,
            Self::Shared { .. } => TransportKind::SharedMemory,
            // The same frames over the same lane, without a socket.
            #[cfg(feature = "test-support")]
            Self::Mem(_) => TransportKind::Tcp,
        }
    }
}

impl Peer {
    /// The data port it may be reached at.
    fn address(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(port) | Self::Nixl(port) => Some(port.address),
            Self::Shared { otherwise, .. } => otherwise.as_ref().map(|port| port.address),
            Self::Loopback(_) => None,
            #[cfg(feature = "test-support")]
            Self::Mem(address) => Some(*address),
        }
    }

    /// What went wrong, with the address where there is one.
    fn blamed(&self, error: &Error) -> String {
        match self.address() {
            Some(address) => format!("data address `{address}`: {error}"),
            None => error.to_string(),
        }
    }
}

/// What the sender's handles leave for the driver.
#[derive(Default)]
pub(crate) struct Inbox {
    pub(crate) transfers: Vec<Arc<TransferShared>>,
    pub(crate) stopping: bool,
    pub(crate) closed: bool,
}

/// What is to be done after [`Driver::step`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Again,
    /// Nothing until the bell rings, the lane has something, or the time is there.
    Wait(Instant),
    /// Never step again.
    Closed,
}

struct Active {
    shared: Arc<TransferShared>,
    /// Whether it knows of the current connection.
    announced: bool,
    /// Bytes it may still send in this turn.
    deficit: u64,
}

struct Connection {
    lane: Box<dyn Lane>,
    transport: TransportKind,
    connected_at: Instant,
    heard_at: Instant,
    pinged_at: Instant,
    turned_at: Instant,
}

pub(crate) struct Driver {
    config: Arc<SenderConfig>,
    peer: Peer,
    session: SessionId,
    inbox: Arc<Mutex<Inbox>>,
    bell: Bell,
    transfers: Vec<Active>,
    /// Whose turn it is, and whether that turn has begun.
    turn: usize,
    turn_begun: bool,
    queue: OutQueue,
    connection: Option<Connection>,
    retry_at: Instant,
    back_off: Duration,
    /// Since when no lane comes up.
    failing_since: Option<Instant>,
    /// What was seen of the link, over all its connections.
    link: LinkSpeed,
    /// Since when there are no transfers.
    idle_since: Instant,
}

impl Driver {
    pub(crate) fn new(
        config: Arc<SenderConfig>,
        peer: Peer,
        session: SessionId,
        inbox: Arc<Mutex<Inbox>>,
        bell: Bell,
    ) -> Self {
        let now = config.environment.now();
        Self {
            config,
            peer,
            session,
            inbox,
            bell,
            transfers: Vec::new(),
            turn: 0,
            turn_begun: false,
            queue: OutQueue::default(),
            connection: None,
            retry_at: now,
            back_off: BACK_OFF_MIN,
            failing_since: None,
            link: LinkSpeed::default(),
            idle_since: now,
        }
    }

    fn now(&self) -> Instant {
        self.config.environment.now()
    }

    /// Opens a lane as for a transfer and closes it again. Blocks for up to the time that
    /// connecting may take, with each transport that comes into question.
    ///
    /// # Errors
    /// [`Error::Unreachable`], with the address, if none comes up.
    pub(crate) fn probe(mut self) -> Result<(), Error> {
        loop {
            match self.connect(self.now()) {
                // A port that has lanes enough is there.
                Ok(_) | Err(Error::Full { .. }) => return Ok(()),
                Err(error) if self.fall_back(&error) => {}
                Err(error) => return Err(Error::Unreachable(self.peer.blamed(&error))),
            }
        }
    }

    /// Does what can be done without waiting (but for connecting, which is bounded).
    pub(crate) fn step(&mut self) -> Step {
        let now = self.now();
        if lock(&self.inbox).stopping {
            self.stop(now);
            return Step::Closed;
        }
        self.take_inbox();
        if !self.transfers.is_empty() {
            self.idle_since = now;
        } else if now.duration_since(self.idle_since) >= self.config.lane_idle_max
            && self.try_close()
        {
            return Step::Closed;
        }
        let Some(mut connection) = self.connection.take() else {
            return self.reconnect(now);
        };
        match self.serve(&mut connection, now) {
            Ok(step) => {
                self.connection = Some(connection);
                step
            }
            Err(error) => {
                self.lost(&connection, &error);
                Step::Again
            }
        }
    }

    /// Parks until there may be something to do, at the latest at `until`.
    pub(crate) fn park(&mut self, until: Instant) {
        let timeout = until.saturating_duration_since(self.now());
        let Some(mut connection) = self.connection.take() else {
            let _ = self.bell.park(&[], timeout);
            return;
        };
        let want_flush = !self.queue.is_empty();
        match connection.lane.park(&self.bell, want_flush, timeout) {
            Ok(()) => self.connection = Some(connection),
            Err(error) => self.lost(&connection, &error),
        }
    }

    fn reconnect(&mut self, now: Instant) -> Step {
        self.prune(now);
        if self.transfers.is_empty() {
            let until = self.idle_since + self.config.lane_idle_max;
            return Step::Wait(until.max(now + PARK_MIN));
        }
        if now < self.retry_at {
            return self.wait(self.retry_at, now);
        }
        let connected = self.connect(now);
        if let Err(error) = &connected
            && self.fall_back(error)
        {
            return Step::Again;
        }
        match connected {
            Ok((lane, transport)) => {
                let now = self.now();
                self.failing_since = None;
                self.connection = Some(Connection {
                    lane,
                    transport,
                    connected_at: now,
                    heard_at: now,
                    pinged_at: now,
                    turned_at: now,
                });
            }
            Err(error @ (Error::PeerLost(_) | Error::Protocol(_) | Error::Tls(_))) => {
                let reason = self.peer.blamed(&error);
                for active in &self.transfers {
                    active.shared.update(|inner| inner.state.peer_lost(&reason));
                }
                self.transfers.clear();
            }
            Err(error) => self.failed(&error, now),
        }
        Step::Again
    }

    /// No lane came up, in a try that began at `now`.
    fn failed(&mut self, error: &Error, now: Instant) {
        let reason = self.peer.blamed(error);
        if self.failing_since.is_none() {
            // Once, not with every try.
            tracing::warn!(error = reason, "a data lane cannot be opened");
        }
        let since = *self.failing_since.get_or_insert(now);
        // A port that has lanes enough will have room again.
        let hopeless = !matches!(error, Error::Full { .. })
            && self.now().duration_since(since) >= self.config.connect_timeout;
        for active in &self.transfers {
            let failed = |inner: &mut Inner| inner.state.lane_failed(&reason, hopeless);
            active.shared.update(failed);
        }
        self.retry_later();
    }

    /// Goes over to TCP if that is allowed and a peer of this host cannot be lent memory; a
    /// peer that has lanes enough has them of either kind.
    fn fall_back(&mut self, error: &Error) -> bool {
        if let Peer::Nixl(address) = &self.peer
            && matches!(error, Error::Unreachable(_))
            && self.config.transports.contains(&TransportKind::Tcp)
        {
            tracing::info!(%error, address = %address.address, "kv goes over tcp: no way over nixl to this worker");
            self.peer = Peer::Tcp(address.clone());
            return true;
        }
        let Peer::Shared { otherwise, .. } = &mut self.peer else {
            return false;
        };
        if matches!(error, Error::Full { .. }) {
            return false;
        }
        let Some(by_tcp) = otherwise.take() else {
            return false;
        };
        tracing::info!(%error, address = %by_tcp.address, "kv goes over tcp: no memory can be shared with this worker");
        self.peer = Peer::Tcp(by_tcp);
        true
    }

    fn connect(&self, now: Instant) -> Result<(Box<dyn Lane>, TransportKind), Error> {
        // Not past the time at which a transfer has to give up.
        let due = self
            .transfers_due()
            .map(|at| at.saturating_duration_since(now));
        let timeout = due.map_or(self.config.connect_timeout, |due| {
            due.max(BACK_OFF_MIN).min(self.config.connect_timeout)
        });
        let lane: Box<dyn Lane> = match &self.peer {
            Peer::Loopback(token) => {
                Box::new(LoopbackLane::open(*token, self.session, &self.bell)?)
            }
            Peer::Tcp(address) => {
                let to = self.destination(address);
                Box::new(TcpLane::connect(&to, self.session, timeout)?)
            }
            Peer::Nixl(address) => return self.connect_nixl(address, timeout),
            Peer::Shared { token, key, .. } => {
                let regions = &self.config.regions;
                let lane = SharedLane::connect(*token, key, self.session, regions, timeout)?;
                Box::new(lane)
            }
            #[cfg(feature = "test-support")]
            Peer::Mem(address) => {
                let Some(network) = &self.config.network else {
                    return Err(Error::Closed);
                };
                let stream = network.connect(*address, self.session, timeout)?;
                Box::new(TcpLane::over(stream))
            }
        };
        Ok((lane, self.peer.transport()))
    }

    fn destination<'a>(&'a self, address: &'a Address) -> Destination<'a> {
        Destination {
            address: address.address,
            tls: self.config.tls.as_ref(),
            server_name: address.server_name.as_ref(),
            key: &address.key,
        }
    }

    /// A lane to a port that may or may not be able to read over NIXL.
    fn connect_nixl(
        &self,
        address: &Address,
        timeout: Duration,
    ) -> Result<(Box<dyn Lane>, TransportKind), Error> {
        let Some(lender) = &self.config.nixl else {
            return Err(Error::Closed);
        };
        let to = self.destination(address);
        let (lane, transport) = nixl::open(&to, self.session, lender, &self.bell, timeout)?;
        if transport == TransportKind::Tcp {
            let address = address.address;
            if !self.config.transports.contains(&TransportKind::Tcp) {
                return Err(Error::PeerLost(format!(
                    "`{address}` cannot read over nixl, and tcp is switched off"
                )));
            }
            tracing::info!(%address, "kv goes over tcp: this worker cannot read over nixl");
        }
        Ok((lane, transport))
    }

    /// One round over a connection.
    fn serve(&mut self, connection: &mut Connection, now: Instant) -> Result<Step, Error> {
        let slept_at = std::mem::replace(&mut connection.turned_at, now);
        let ping_interval = self.config.ping_interval;
        connection.heard_at =
            heard_despite_sleep(connection.heard_at, slept_at, now, ping_interval);
        self.announce(connection.transport, now);
        let more = self.fill(now);
        let lane = &mut *connection.lane;
        let mut moved = lane.flush(&mut self.queue, more)?;
        while let Some((scope, control)) = lane.receive()? {
            moved = true;
            connection.heard_at = now;
            self.handle(scope, control, now);
        }
        self.prune(now);
        if now.duration_since(connection.heard_at) >= self.config.silence_max {
            return Err(Error::PeerLost("the receiver has gone silent".to_owned()));
        }
        let ping_at = connection.pinged_at + ping_interval;
        if ping_at <= now {
            connection.pinged_at = now;
            self.queue.push_urgent(Scope::LANE, Control::Ping);
            return Ok(Step::Again);
        }
        if moved {
            return Ok(Step::Again);
        }
        let silent_at = connection.heard_at + self.config.silence_max;
        Ok(self.wait(ping_at.min(silent_at), now))
    }

    /// A wait until `at`, or until a transfer has something to do.
    fn wait(&self, at: Instant, now: Instant) -> Step {
        let due = self.transfers_due().map_or(at, |due| due.min(at));
        Step::Wait(due.max(now + PARK_MIN))
    }

    fn transfers_due(&self) -> Option<Instant> {
        let due = |active: &Active| active.shared.update_quietly(|inner| inner.state.wake_at());
        self.transfers.iter().filter_map(due).min()
    }

    /// Opens new transfers on this connection and tells of aborted ones.
    fn announce(&mut self, transport: TransportKind, now: Instant) {
        for active in &mut self.transfers {
            let scope = active.shared.scope();
            active.shared.tick(now);
            let fresh = !std::mem::replace(&mut active.announced, true);
            let (open, abort) = active.shared.update_quietly(|inner| {
                let Inner { state, .. } = inner;
                if fresh {
                    inner.transport = Some(transport);
                    state.connected();
                }
                (state.open_to_send(now), state.abort_to_send(now))
            });
            if open {
                let opening = active.shared.opening.frame();
                // One that asks again has to come behind what it asks about.
                if fresh {
                    self.queue.push_urgent(scope, opening);
                } else {
                    self.queue.push_control(scope, opening);
                }
            }
            if let Some(reason) = abort {
                self.queue.push_urgent(scope, Control::Abort { reason });
            }
        }
    }

    /// Queues frames until a write is full; true if there are more.
    fn fill(&mut self, now: Instant) -> bool {
        let count = self.transfers.len();
        let mut idle = 0;
        while idle < count {
            if self.queue.bytes() >= GATHER_BYTES {
                return true;
            }
            self.turn %= count;
            let active = &mut self.transfers[self.turn];
            if !std::mem::replace(&mut self.turn_begun, true) {
                active.deficit += QUANTUM_BYTES;
            }
            match fill_frame(
                &mut self.queue,
                &active.shared,
                active.deficit,
                self.link,
                now,
            ) {
                Filled::Frame(bytes) => {
                    active.deficit -= bytes;
                    idle = 0;
                    continue;
                }
                Filled::Later => idle = 0,
                Filled::Nothing => {
                    active.deficit = 0;
                    idle += 1;
                }
            }
            self.turn += 1;
            self.turn_begun = false;
        }
        false
    }

    fn handle(&mut self, scope: Scope, control: Control, now: Instant) {
        if matches!(control, Control::Ping) {
            return self.queue.push_urgent(scope, Control::Pong);
        }
        let Some(active) = self
            .transfers
            .iter()
            .find(|active| active.shared.scope() == scope)
        else {
            return;
        };
        let link = &mut self.link;
        active.shared.update(|inner| {
            let state = &mut inner.state;
            match control {
                Control::Opened(missing) => state.opened(missing, now),
                Control::Ack { consumed } => {
                    if let Some((bytes, time)) = state.acknowledged(consumed, now) {
                        link.seen(bytes, time);
                    }
                }
                Control::Nack(range) => state.damaged(range),
                Control::Missing(missing) => state.missing(&missing),
                Control::Committed => drop(state.committed()),
                Control::Refused(refusal) => drop(state.refused(refusal)),
                Control::Aborted => state.abort_heard(),
                // Only receivers get these; a confused peer changes nothing here.
                Control::Open { .. }
                | Control::OpenAs { .. }
                | Control::Commit { .. }
                | Control::Abort { .. }
                | Control::Offer { .. }
                | Control::Lend(_)
                | Control::Lent { .. }
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
    fn lost(&mut self, connection: &Connection, error: &Error) {
        tracing::warn!(%error, "a data lane broke");
        self.queue = OutQueue::default();
        for active in &mut self.transfers {
            active.announced = false;
            active
                .shared
                .update(|inner| inner.state.lane_lost(connection.heard_at));
        }
        if self.now().duration_since(connection.connected_at) > HELD_WELL {
            self.back_off = BACK_OFF_MIN;
        }
        self.retry_later();
    }

    fn retry_later(&mut self) {
        self.retry_at = self.now() + self.back_off;
        self.back_off = (self.back_off * 2).min(BACK_OFF_MAX);
    }

    fn take_inbox(&mut self) {
        let fresh = std::mem::take(&mut lock(&self.inbox).transfers);
        let active = |shared| Active {
            shared,
            announced: false,
            deficit: 0,
        };
        self.transfers.extend(fresh.into_iter().map(active));
    }

    /// Closes an idle lane, unless a transfer came in meanwhile.
    fn try_close(&mut self) -> bool {
        let mut inbox = lock(&self.inbox);
        inbox.closed = inbox.transfers.is_empty();
        inbox.closed
    }

    /// Ends everything that is still open, with a last word, so that the receiver need
    /// not find out by silence.
    fn stop(&mut self, now: Instant) {
        lock(&self.inbox).closed = true;
        self.take_inbox();
        for active in &self.transfers {
            active
                .shared
                .update(|inner| inner.state.abort("the sender is stopping"));
        }
        if let Some(mut connection) = self.connection.take() {
            self.announce(connection.transport, now);
            let _ = connection.lane.flush(&mut self.queue, false);
        }
    }
}

enum Filled {
    /// Block bytes queued; none for a commit.
    Frame(u64),
    /// Its next frame is larger than what it may send now.
    Later,
    Nothing,
}

/// Queues the next frame, or the commit, of one transfer.
fn fill_frame(
    queue: &mut OutQueue,
    shared: &Arc<TransferShared>,
    budget: u64,
    link: LinkSpeed,
    now: Instant,
) -> Filled {
    let scope = shared.scope();
    let next = shared.update(|Inner { state, .. }| {
        state.set_link(link);
        state.next_frame(budget, now)
    });
    match next {
        NextFrame::Later => return Filled::Later,
        NextFrame::Nothing => {}
        NextFrame::Frame(plan) => {
            let mut source = Source::new(Arc::clone(shared), plan.extents);
            // Refused only if the transfer ended since the plan was made.
            let Some(crcs) = source.checksums() else {
                return Filled::Nothing;
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
            return Filled::Frame(plan.bytes);
        }
    }
    while let Some((range, extents)) = shared.update_quietly(|inner| inner.state.next_unchecked()) {
        let mut source = Source::new(Arc::clone(shared), extents);
        let Some(crcs) = source.checksums() else {
            return Filled::Nothing;
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
        return Filled::Frame(0);
    }
    Filled::Nothing
}
