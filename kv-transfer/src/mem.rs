//! Two ends of a handoff in one thread, with seeded faults in virtual time.
//!
//! A [`Network`] stands where sockets, threads and clocks stand in production: lanes
//! of a [`crate::sender::Sender`] whose configuration names it lead, through bytes in
//! memory, to receivers that it started. Everything above the bytes is the code that
//! runs over TCP: the frames, the partial reads and writes, the grant table, pings,
//! leases, reconnects. Only connecting differs: there is no hello.
//!
//! Nothing runs by itself. [`Network::step`] gives one seeded choice of actor (a
//! sender's lane, a receiver's lane, an expiring table) its turn, or, when none has
//! anything to do, moves the clock to the next thing that time will bring. Two
//! networks with the same seed that are used the same way do the same, step by step;
//! [`Network::trace`] tells.
//!
//! Behind the feature `test-support`; made for the conformance suite and simulators.

mod link;
mod stream;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};

pub use link::{Conditions, Direction, Fault, Frame, Hurt, Link, Moment};
pub(crate) use stream::MemStream;

use crate::data_port::DataPortConfig;
use crate::data_port::lane::{PortLane, Turn};
use crate::environment::Environment;
use crate::error::Error;
use crate::receiver::lane::ReceiverLane;
use crate::receiver::outbox::Outbox;
use crate::receiver::{EventSink, Receiver, ReceiverConfig, Shared};
use crate::sender::TransportKind;
use crate::sender::driver::{Driver, Step};
use crate::ticket::SessionId;
use crate::transport::stream::LaneStream;
use crate::wake::{lock, rung};

/// Reads one lane does in one turn: few, so that turns of others come in between.
const READS_MAX: usize = 2;

/// A world of senders, receivers and links between them. Cheap to clone. Its senders hold
/// it as well, so it goes only after [`Network::end`].
#[derive(Clone)]
pub struct Network {
    environment: Environment,
    net: Arc<Mutex<Net>>,
}

struct Net {
    rng: StdRng,
    actors: BTreeMap<u64, Actor>,
    next_actor: u64,
    ports: BTreeMap<SocketAddr, Port>,
    /// Killed senders: what is left of their processes opens no lanes.
    dead: Vec<SessionId>,
    trace: u64,
}

struct Port {
    receiver: Arc<Shared>,
    config: DataPortConfig,
    link: Link,
}

/// Something that gets turns.
struct Actor {
    /// `None` while it has its turn.
    who: Option<Who>,
    /// It said that it has nothing to do until then, or until something happens.
    idle_until: Option<Instant>,
    /// It is inside a call that blocks until then.
    blocked_until: Option<Instant>,
}

enum Who {
    Sending(SessionId, Box<Driver>),
    Receiving(SocketAddr, Box<PortLane>),
    Expiring(SocketAddr, Arc<Shared>),
}

impl Network {
    /// An empty world at some point in time.
    pub fn new(seed: u64) -> Self {
        Self {
            environment: Environment::seeded(seed),
            net: Arc::new(Mutex::new(Net {
                rng: StdRng::seed_from_u64(seed),
                actors: BTreeMap::new(),
                next_actor: 0,
                ports: BTreeMap::new(),
                dead: Vec::new(),
                trace: 0,
            })),
        }
    }

    /// The time and chance of this world: for the configuration of its senders.
    pub fn environment(&self) -> &Environment {
        &self.environment
    }

    /// What time it is here.
    pub fn now(&self) -> Instant {
        self.environment.now()
    }

    /// Starts a receiver of this world that can be reached at `port.address`, over a
    /// link that all its lanes share.
    ///
    /// # Errors
    /// [`Error::Io`] if the operating system gives no eventfd.
    pub fn receiver(
        &self,
        mut config: ReceiverConfig,
        port: DataPortConfig,
        events: Box<dyn EventSink>,
    ) -> Result<(Receiver, Link), Error> {
        config.environment = self.environment.clone();
        let receiver = Receiver::driven(config, events)?;
        let shared = Arc::clone(receiver.shared());
        let mut net = lock(&self.net);
        let link = Link::new(net.rng.next_u64(), self.environment.clone());
        let address = port.address;
        net.add(Who::Expiring(address, Arc::clone(&shared)));
        let port = Port {
            receiver: shared,
            config: port,
            link: link.clone(),
        };
        net.ports.insert(address, port);
        Ok((receiver, link))
    }

    /// Ends every lane of the sender as if its process had died: without a word. What
    /// had left it still arrives, and then the end of the connection.
    pub fn kill_sender(&self, session: SessionId) {
        lock(&self.net).dead.push(session);
        let killed = |who: &Who| matches!(who, Who::Sending(of, _) if *of == session);
        self.remove(killed);
    }

    /// Ends a receiver and its lanes as if its process had died; connecting is refused
    /// from then on.
    pub fn kill_receiver(&self, at: SocketAddr) {
        lock(&self.net).ports.remove(&at);
        let killed =
            |who: &Who| matches!(who, Who::Receiving(of, _) | Who::Expiring(of, _) if *of == at);
        self.remove(killed);
    }

    fn remove(&self, killed: impl Fn(&Who) -> bool) {
        let mut net = lock(&self.net);
        let dead: Vec<u64> = net
            .actors
            .iter()
            .filter(|(_, actor)| actor.who.as_ref().is_some_and(&killed))
            .map(|(id, _)| *id)
            .collect();
        let dead: Vec<Actor> = dead.iter().filter_map(|id| net.actors.remove(id)).collect();
        net.wake_all();
        drop(net);
        // Closing their connections takes locks of its own.
        drop(dead);
    }

    /// Ends everybody in it.
    pub fn end(&self) {
        let mut net = lock(&self.net);
        let gone = (
            std::mem::take(&mut net.actors),
            std::mem::take(&mut net.ports),
        );
        drop(net);
        // Closing their connections takes locks of its own.
        drop(gone);
    }

    /// Something changed from outside: everybody looks again.
    pub fn poke(&self) {
        lock(&self.net).wake_all();
    }

    /// One turn of one actor, or one move of the clock, which does not go past `until`;
    /// false if it is there and nobody has anything to do.
    pub fn step(&self, until: Instant) -> bool {
        let mut net = lock(&self.net);
        let now = self.environment.now();
        let ready: Vec<u64> = net
            .actors
            .iter()
            .filter(|(_, actor)| actor.is_ready(now))
            .map(|(id, _)| *id)
            .collect();
        if ready.is_empty() {
            return self.wait(&mut net, now, until);
        }
        let id = ready[net.rng.random_range(0..ready.len())];
        let Some(mut who) = net.actors.get_mut(&id).and_then(|actor| actor.who.take()) else {
            return true;
        };
        drop(net);
        let turn = who.turn(now);
        let mut net = lock(&self.net);
        let code = match turn {
            Step::Again => 1,
            Step::Wait(_) => 2,
            Step::Closed => 3,
        };
        net.trace = mix(net.trace, id << 2 | code);
        match turn {
            Step::Again => net.wake_all(),
            Step::Wait(until) => {
                if let Some(actor) = net.actors.get_mut(&id) {
                    actor.idle_until = Some(until);
                }
            }
            Step::Closed => {
                net.actors.remove(&id);
                net.wake_all();
                drop(net);
                drop(who);
                return true;
            }
        }
        if let Some(actor) = net.actors.get_mut(&id) {
            actor.who = Some(who);
        }
        true
    }

    /// Moves the clock to the next thing that time brings.
    fn wait(&self, net: &mut Net, now: Instant, until: Instant) -> bool {
        let next = net.next_event(now).map_or(until, |next| next.min(until));
        if now >= until {
            return false;
        }
        self.environment.advance_to(next.max(now));
        net.trace = mix(
            net.trace,
            next.saturating_duration_since(now).as_nanos() as u64,
        );
        net.wake_all();
        true
    }

    /// Waits until a worker on this thread has done something that lanes must hear of:
    /// then [`Network::poke`]. One task of a thread can wait. Cancel safe.
    pub async fn rung() {
        std::future::poll_fn(rung::poll).await;
    }

    /// When a step is due: now, if anybody has something to do; `None` if nothing ever is.
    pub fn next_due(&self) -> Option<Instant> {
        let net = lock(&self.net);
        let now = self.environment.now();
        if net.actors.values().any(|actor| actor.is_ready(now)) {
            return Some(now);
        }
        net.next_event(now)
    }

    /// A digest of every choice made so far.
    pub fn trace(&self) -> u64 {
        lock(&self.net).trace
    }

    pub(crate) fn drive(&self, driver: Driver, session: SessionId) {
        let mut net = lock(&self.net);
        if !net.dead.contains(&session) {
            net.add(Who::Sending(session, Box::new(driver)));
        }
    }

    /// Called by a lane during its turn.
    pub(crate) fn connect(
        &self,
        to: SocketAddr,
        session: SessionId,
        timeout: Duration,
    ) -> Result<LaneStream, Error> {
        let context = "connect to the data port";
        let mut net = lock(&self.net);
        let Some(port) = net.ports.get(&to) else {
            return Err(Error::io(context, std::io::ErrorKind::ConnectionRefused));
        };
        let link = port.link.clone();
        if link.is_refusing() {
            return Err(Error::io(context, std::io::ErrorKind::ConnectionRefused));
        }
        if link.is_dark() {
            let until = self.environment.now() + timeout;
            // Whoever has its turn is the one that calls.
            for actor in net.actors.values_mut().filter(|actor| actor.who.is_none()) {
                actor.blocked_until = Some(until);
            }
            return Err(Error::io(context, std::io::ErrorKind::TimedOut));
        }
        let outbox = Outbox::new().map_err(|error| Error::io(context, error))?;
        let receiver = ReceiverLane::new(
            Arc::clone(&port.receiver),
            session,
            Arc::new(outbox),
            TransportKind::Tcp,
        );
        let (near, far) = link.connect();
        let lane = PortLane::new(LaneStream::Mem(far), receiver, &port.config);
        net.add(Who::Receiving(to, Box::new(lane)));
        Ok(LaneStream::Mem(near))
    }
}

impl Net {
    fn add(&mut self, who: Who) {
        let actor = Actor {
            who: Some(who),
            idle_until: None,
            blocked_until: None,
        };
        self.actors.insert(self.next_actor, actor);
        self.next_actor += 1;
    }

    /// When time brings something next.
    fn next_event(&self, now: Instant) -> Option<Instant> {
        let turns = self.actors.values().filter_map(Actor::next_turn);
        let arrivals = self
            .ports
            .values()
            .filter_map(|port| port.link.next_arrival(now));
        turns.chain(arrivals).min()
    }

    fn wake_all(&mut self) {
        for actor in self.actors.values_mut() {
            actor.idle_until = None;
        }
    }
}

impl Actor {
    fn is_ready(&self, now: Instant) -> bool {
        self.idle_until.is_none() && self.blocked_until.is_none_or(|until| until <= now)
    }

    fn next_turn(&self) -> Option<Instant> {
        self.idle_until.max(self.blocked_until)
    }
}

impl Who {
    fn turn(&mut self, now: Instant) -> Step {
        match self {
            Self::Sending(_, driver) => driver.step(),
            Self::Receiving(_, lane) => match lane.turn(READS_MAX) {
                Ok(Turn::Again) => Step::Again,
                Ok(Turn::Wait { until }) => Step::Wait(until),
                Err(_) => Step::Closed,
            },
            Self::Expiring(_, receiver) => {
                let pause = receiver.reap(now).max(Duration::from_millis(1));
                Step::Wait(now + pause)
            }
        }
    }
}

fn mix(hash: u64, value: u64) -> u64 {
    (hash ^ value)
        .wrapping_mul(0x9E37_79B9_7F4A_7C15)
        .rotate_left(29)
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Network")
    }
}
