//! The port that senders of other processes connect to: over TCP, and those of this host
//! and user over a Unix socket.
//!
//! One thread accepts, shakes hands for TLS if there is any, and checks hellos; each authenticated connection becomes a
//! lane with its own thread, which reads straight into granted blocks.

pub(crate) mod lane;
mod stranger;

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use baton_proto::protocol::{CURRENT, FEATURE_NIXL_LANE, ProtocolVersion};
use rustix::event::PollFlags;
use rustls::ServerConfig;

use crate::error::Error;
use crate::nixl::NixlLibrary;
use crate::receiver::Receiver;
use crate::receiver::lane::ReceiverLane;
use crate::receiver::outbox::Outbox;
use crate::ticket::SessionId;
use crate::transport::shared_memory::{self, same_user};
use crate::transport::stream::{LaneStream, lane_server};
use crate::wake::Bell;
use lane::PortLane;
use stranger::{Step, Stranger};

/// Connections taken from the listener per wake-up, so that a flood of them cannot
/// keep the thread from those already there.
const ACCEPTS_MAX: usize = 64;

/// Limits and times of a data port.
#[derive(Clone, Debug)]
pub struct DataPortConfig {
    /// Whether senders of other hosts and users may connect. Default true.
    pub tcp: bool,
    /// Where they do. Default `127.0.0.1:0`. Anything beyond loopback has to be asked for.
    pub address: SocketAddr,
    /// Authenticated lanes at once, over all peers. Default 256.
    pub lanes_max: usize,
    /// Authenticated lanes of one session. Default 8.
    pub lanes_per_session_max: usize,
    /// Connections that have not said a valid hello. One more drops the oldest. Default 64.
    pub strangers_max: usize,
    /// Time for a complete hello. Default 1 s.
    pub hello_timeout: Duration,
    /// Default 250 ms.
    pub ping_interval: Duration,
    /// A lane silent for this long is dead. Default 1 s.
    pub silence_max: Duration,
    /// Every lane inside TLS, and whose client certificates are asked for; senders
    /// without it are refused. Default `None`: plain TCP, TLS clients are refused.
    pub tls: Option<Arc<ServerConfig>>,
    /// Whether senders of this host and user may lend their memory instead of sending
    /// bytes, over a Unix socket that the receiver's process token names. Default true.
    pub shared_memory: bool,
    /// Reads what senders lend over NIXL instead of sending bytes; bypasses TLS. Default
    /// `None`: they send bytes.
    pub nixl: Option<NixlLibrary>,
}

impl Default for DataPortConfig {
    fn default() -> Self {
        Self {
            tcp: true,
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            lanes_max: 256,
            lanes_per_session_max: 8,
            strangers_max: 64,
            hello_timeout: Duration::from_secs(1),
            ping_interval: Duration::from_millis(250),
            silence_max: Duration::from_secs(1),
            tls: None,
            shared_memory: true,
            nixl: None,
        }
    }
}

/// A listening data port. Dropping it closes the listener and every lane and joins
/// their threads; grants stay and expire by themselves.
pub struct DataPort {
    address: SocketAddr,
    stopping: Arc<AtomicBool>,
    bell: Bell,
    thread: Option<JoinHandle<()>>,
}

impl DataPort {
    /// Binds and starts the accepting thread. Lanes authenticate with the receiver's key.
    ///
    /// # Errors
    /// [`Error::Io`] if the address cannot be bound or no thread can be started.
    pub fn bind(mut config: DataPortConfig, receiver: Receiver) -> Result<Self, Error> {
        let listener = match config.tcp {
            true => Some(listen(config.address)?),
            false => None,
        };
        let address = match &listener {
            Some(listener) => listener
                .local_addr()
                .map_err(|error| Error::io("listen on the data port", error))?,
            None => config.address,
        };
        let bell = Bell::new().map_err(|error| Error::io("create an eventfd", error))?;
        let stopping = Arc::new(AtomicBool::new(false));
        config.tls = config.tls.as_deref().map(lane_server);
        let here = if config.shared_memory {
            listen_here(&receiver)?
        } else {
            None
        };
        let porter = Porter {
            here,
            config,
            listener,
            receiver,
            stopping: Arc::clone(&stopping),
            bell: bell.clone(),
            strangers: VecDeque::new(),
            lanes: Vec::new(),
        };
        let thread = std::thread::Builder::new()
            .name("kv-port".to_owned())
            .spawn(move || porter.run())
            .map_err(|error| Error::io("start the port's thread", error))?;
        Ok(Self {
            address,
            stopping,
            bell,
            thread: Some(thread),
        })
    }

    /// The bound address, with the real port; the configured one without TCP.
    pub fn local_address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for DataPort {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.bell.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn listen(address: SocketAddr) -> Result<TcpListener, Error> {
    TcpListener::bind(address)
        .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
        .map_err(|error| Error::io("listen on the data port", error))
}

/// A listener for senders of this host; none if another port of the receiver has it.
fn listen_here(receiver: &Receiver) -> Result<Option<UnixListener>, Error> {
    match shared_memory::listen_here(receiver.process_token()) {
        Ok(listener) => Ok(Some(listener)),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => Ok(None),
        Err(error) => Err(Error::io("listen for senders of this host", error)),
    }
}

/// One lane's thread.
struct LaneThread {
    session: SessionId,
    outbox: Arc<Outbox>,
    thread: JoinHandle<()>,
}

/// Owns the listener, the strangers and the list of lanes.
struct Porter {
    config: DataPortConfig,
    /// For senders of other hosts and users.
    listener: Option<TcpListener>,
    /// For senders of this host.
    here: Option<UnixListener>,
    receiver: Receiver,
    stopping: Arc<AtomicBool>,
    bell: Bell,
    /// Oldest first.
    strangers: VecDeque<Stranger>,
    lanes: Vec<LaneThread>,
}

impl Porter {
    fn run(mut self) {
        while !self.stopping.load(Ordering::Relaxed) {
            self.accept();
            self.accept_here();
            self.hear();
            self.lanes.retain(|lane| !lane.thread.is_finished());
            self.park();
        }
        for lane in &self.lanes {
            lane.outbox.bell().ring();
        }
        for lane in std::mem::take(&mut self.lanes) {
            let _ = lane.thread.join();
        }
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS_MAX {
            let Some(accepted) = self.listener.as_ref().map(TcpListener::accept) else {
                return;
            };
            let stream = match accepted {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    // Out of descriptors, most likely: closing strangers makes room.
                    tracing::warn!(%error, "the data port cannot accept");
                    self.strangers.pop_front();
                    std::thread::sleep(Duration::from_millis(1));
                    return;
                }
            };
            if let Ok(stream) = self.set_up(stream) {
                self.welcome(stream);
            }
        }
    }

    fn accept_here(&mut self) {
        for _ in 0..ACCEPTS_MAX {
            let Some(Ok((stream, _))) = self.here.as_ref().map(UnixListener::accept) else {
                return;
            };
            let stream = stream
                .set_nonblocking(true)
                .and_then(|()| same_user(stream));
            match stream {
                Ok(stream) => self.welcome(LaneStream::Unix(stream)),
                Err(error) => tracing::info!(%error, "a data lane of this host was refused"),
            }
        }
    }

    fn welcome(&mut self, stream: LaneStream) {
        if self.strangers.len() >= self.config.strangers_max {
            self.strangers.pop_front();
        }
        self.strangers
            .push_back(Stranger::new(stream, Instant::now()));
    }

    fn set_up(&self, stream: TcpStream) -> std::io::Result<LaneStream> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        match &self.config.tls {
            None => Ok(LaneStream::Plain(stream)),
            Some(config) => LaneStream::accept_tls(stream, config),
        }
    }

    /// Lets every stranger say what it has to say, and drops those who took too long.
    fn hear(&mut self) {
        let now = Instant::now();
        for mut stranger in std::mem::take(&mut self.strangers) {
            let key = self.receiver.lane_key();
            let step = stranger.step(key, self.version(), |session| self.is_busy(session));
            match step {
                Step::Wait if now.duration_since(stranger.since) < self.config.hello_timeout => {
                    self.strangers.push_back(stranger);
                }
                Step::Wait | Step::Close => {}
                Step::Proved(session) => self.start_lane(stranger, session),
            }
        }
    }

    /// What this port speaks.
    fn version(&self) -> ProtocolVersion {
        let mut version = CURRENT;
        if self.config.nixl.is_some() {
            version.features |= FEATURE_NIXL_LANE;
        }
        version
    }

    fn is_busy(&self, session: SessionId) -> bool {
        let running = || self.lanes.iter().filter(|lane| !lane.thread.is_finished());
        running().count() >= self.config.lanes_max
            || running().filter(|lane| lane.session == session).count()
                >= self.config.lanes_per_session_max
    }

    fn start_lane(&mut self, stranger: Stranger, session: SessionId) {
        if self.is_busy(session) {
            return;
        }
        let Ok(outbox) = Outbox::new().map(Arc::new) else {
            return;
        };
        let shared = Arc::clone(self.receiver.shared());
        let receiver = ReceiverLane::new(
            shared,
            session,
            Arc::clone(&outbox),
            stranger.stream.transport(),
        );
        let mut lane = PortLane::new(stranger.stream, receiver, &self.config);
        let stopping = Arc::clone(&self.stopping);
        let port_bell = self.bell.clone();
        let started = std::thread::Builder::new()
            .name("kv-lane-in".to_owned())
            .spawn(move || {
                if let Err(error) = lane.serve(&stopping) {
                    tracing::debug!(%error, "a data lane ended");
                }
                drop(lane);
                port_bell.ring();
            });
        match started {
            Ok(thread) => self.lanes.push(LaneThread {
                session,
                outbox,
                thread,
            }),
            Err(error) => tracing::warn!(%error, "cannot start a data lane's thread"),
        }
    }

    fn park(&self) {
        let listener = self.listener.iter();
        let mut sockets: Vec<_> = listener.map(|it| (it.as_fd(), PollFlags::IN)).collect();
        sockets.extend(self.here.iter().map(|here| (here.as_fd(), PollFlags::IN)));
        sockets.extend(
            self.strangers
                .iter()
                .filter_map(|s| Some((s.stream.socket()?, s.stream.interest(false)))),
        );
        let oldest = self.strangers.front().map(|stranger| stranger.since);
        let timeout = oldest.map_or(Duration::from_secs(3600), |since| {
            (since + self.config.hello_timeout).saturating_duration_since(Instant::now())
        });
        if self.bell.park(&sockets, timeout).is_err() {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
