//! The sending side: transfers that push final blocks to a receiver.
//!
//! The worker opens one [`Transfer`] per attempt, pushes parts as the engine
//! finishes layers, commits once, and waits for [`Transfer::quiesced`] before it
//! lets the engine reuse the source blocks. Lanes are OS threads of this module;
//! which transport carries them is decided once per peer. The pure states are in
//! [`state`]. On a lost lane this side reconnects inside the transfer's deadline
//! and sends again what the receiver says is missing; transports hold no policy.

pub(crate) mod driver;
mod gather;
mod lane;
mod parts;
mod plan;
pub(crate) mod source;
pub mod state;
pub(crate) mod transfer;
mod window;
pub mod wire;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_proto::kv_layout::ByteExtent;
use baton_proto::{Attempt, Epoch, RequestId};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;

pub use state::SenderState;
pub use transfer::Transfer;
pub use wire::WireForm;

use crate::codec::PAYLOAD_BYTES_MAX;
use crate::environment::Environment;
use crate::error::{Error, Refusal};
#[cfg(feature = "test-support")]
use crate::mem;
use crate::nixl::NixlLender;
use crate::region::RegionTable;
use crate::ticket::{LaneKey, Opening, ProcessToken, SessionId, Ticket};
use crate::transport::stream::lane_client;
use crate::transport::{loopback, shared_memory};
use crate::wake::{Bell, lock};
use driver::{Address, Driver, Peer};
use lane::LaneHandle;
use transfer::TransferShared;

/// Where a transfer goes and by what right. Everything but the deadline was given
/// out by the receiver's worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneTarget {
    /// The receiver's data port; `None` if it listens on none (loopback only).
    pub data_address: Option<SocketAddr>,
    /// Name expected in the data port's certificate; `data_address` if absent. Unused
    /// without TLS.
    pub server_name: Option<ServerName<'static>>,
    pub process_token: ProcessToken,
    pub lane_key: LaneKey,
    pub ticket: Ticket,
    /// The receiver's epoch.
    pub epoch: Epoch,
    pub attempt: Attempt,
    /// For log lines.
    pub request_id: RequestId,
    /// From now until the receiver's acceptance must be here.
    pub deadline: Duration,
}

/// How senders reach receivers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransportKind {
    /// A direct copy inside this process.
    Loopback,
    /// The receiver copies out of this process' memory: on the same host, as the same user,
    /// if every region is of [`crate::SharedMemory`]. A lane that cannot be opened like that
    /// goes on as the transport after it.
    SharedMemory,
    /// The receiver reads this process' memory over NIXL, if both ends were set up for it.
    /// A lane whose receiver cannot goes on as TCP, if that is listed as well.
    Nixl,
    /// A TCP connection to the data port.
    Tcp,
}

/// How a sender is set up.
#[derive(Clone, Debug)]
pub struct SenderConfig {
    /// One region per KV group.
    pub regions: RegionTable,
    /// In order of preference; the first that reaches the target is used. Default
    /// loopback, then shared memory, then tcp.
    pub transports: Vec<TransportKind>,
    /// Lanes (threads) per peer; transfers are spread over them. Default 1.
    pub lanes_per_peer: usize,
    /// Open transfers at once; more are refused with [`Error::Full`]. Default 1024.
    pub transfers_max: usize,
    /// Parts one transfer may have queued before `push` waits. Default 262 144.
    pub queue_parts_max: usize,
    /// Bytes one transfer may have queued before `push` waits. Default 1 GiB: source
    /// blocks are pinned anyway, so the queue costs only its entries.
    pub queue_bytes_max: u64,
    /// Bytes of one transfer sent and not yet acknowledged. Default 32 MiB; at least
    /// two of the largest frames.
    pub in_flight_bytes_max: u64,
    /// Parts of one transfer sent and not yet acknowledged. Default 16 384; at least 1.
    pub in_flight_parts_max: usize,
    /// A transfer without a lane whose receiver was not heard of for this long has lost
    /// its peer. Default 1.75 s: the receiver's lease is over by then.
    pub reconnect_max: Duration,
    /// Default 250 ms.
    pub ping_interval: Duration,
    /// A lane silent for this long is dead. Default 1 s.
    pub silence_max: Duration,
    /// Connect and hello. Default 1 s. A receiver that was never reached is lost when no
    /// lane to it has come up for as long, whichever transfers waited for one.
    pub connect_timeout: Duration,
    /// A lane without transfers closes after this. Default 10 s.
    pub lane_idle_max: Duration,
    /// Every TCP lane inside TLS; ports without it are refused. Default `None`: plain TCP,
    /// ports with TLS are refused.
    pub tls: Option<Arc<ClientConfig>>,
    /// What receivers may read over NIXL: `regions`, registered. Default `None`.
    pub nixl: Option<NixlLender>,
    /// Time and chance. Default: the system's.
    pub environment: Environment,
    /// Where lanes lead to instead of the transports. Default `None`.
    #[cfg(feature = "test-support")]
    pub network: Option<mem::Network>,
}

impl SenderConfig {
    /// The defaults.
    pub fn new(regions: RegionTable) -> Self {
        Self {
            regions,
            transports: vec![
                TransportKind::Loopback,
                TransportKind::SharedMemory,
                TransportKind::Tcp,
            ],
            lanes_per_peer: 1,
            transfers_max: 1024,
            queue_parts_max: 262_144,
            queue_bytes_max: 1 << 30,
            in_flight_bytes_max: 32 << 20,
            in_flight_parts_max: 16_384,
            reconnect_max: Duration::from_millis(1750),
            ping_interval: Duration::from_millis(250),
            silence_max: Duration::from_secs(1),
            connect_timeout: Duration::from_secs(1),
            lane_idle_max: Duration::from_secs(10),
            tls: None,
            nixl: None,
            environment: Environment::default(),
            #[cfg(feature = "test-support")]
            network: None,
        }
    }
}

/// One source block of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceBlock {
    pub ordinal: u32,
    pub extent: ByteExtent,
}

/// How a commit ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommitOutcome {
    /// The receiver has every byte and owns the request from here.
    Committed,
    /// The receiver will not take this attempt; place it again.
    Refused(Refusal),
    /// Nothing was heard from the receiver until the deadline. It may or may not have
    /// committed; the router finds out from the receiver's worker.
    PeerLost,
    /// `abort` was called (or the sender stopped) before the acceptance.
    Aborted(String),
}

/// What a transfer has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferStatistics {
    pub parts: u64,
    /// Payload bytes handed to the lane, repeats included.
    pub bytes_sent: u64,
    pub bytes_resent: u64,
    pub reconnects: u32,
    /// From `open` to the end, or to now.
    pub duration: Duration,
    /// What `bytes_sent` need on this link with nothing between; `None` until it was seen.
    pub at_link_speed: Option<Duration>,
    /// What the last lane was; none before the first.
    pub transport: Option<TransportKind>,
}

/// What the handles of one sender share.
struct Lanes {
    config: Arc<SenderConfig>,
    session: SessionId,
    /// Running lanes; one that has ended is replaced by the next transfer to its peer.
    lanes: Mutex<HashMap<(Peer, usize), LaneHandle>>,
    turn: AtomicUsize,
    transfers_open: Arc<AtomicUsize>,
}

impl Drop for Lanes {
    fn drop(&mut self) {
        let lanes = std::mem::take(&mut *lock(&self.lanes));
        lanes.values().for_each(LaneHandle::stop);
        lanes.into_values().for_each(LaneHandle::join);
    }
}

/// All lanes of one worker to its peers. Cheap to clone; the last clone aborts open
/// transfers and joins the lanes.
#[derive(Clone)]
pub struct Sender {
    lanes: Arc<Lanes>,
}

impl Sender {
    /// A sender without lanes; they start with the first transfer to a peer.
    pub fn start(mut config: SenderConfig) -> Self {
        let floor = 2 * PAYLOAD_BYTES_MAX as u64;
        config.in_flight_bytes_max = config.in_flight_bytes_max.max(floor);
        config.in_flight_parts_max = config.in_flight_parts_max.max(1);
        config.lanes_per_peer = config.lanes_per_peer.max(1);
        config.tls = config.tls.as_deref().map(lane_client);
        let lanes = Lanes {
            session: SessionId(config.environment.id()),
            config: Arc::new(config),
            lanes: Mutex::default(),
            turn: AtomicUsize::new(0),
            transfers_open: Arc::default(),
        };
        Self {
            lanes: Arc::new(lanes),
        }
    }

    /// Opens a transfer. Returns at once; connecting happens on the lane's thread, and
    /// its failure shows in `push` and `commit`.
    ///
    /// # Errors
    /// [`Error::Full`] beyond `transfers_max`; [`Error::Unreachable`] if no configured
    /// transport fits the target; [`Error::Io`] if no thread can be started.
    pub fn open(&self, target: LaneTarget, layout: impl Into<Opening>) -> Result<Transfer, Error> {
        let peer = self.peer(&target)?;
        self.open_to(peer, target, layout.into(), None)
    }

    /// As [`Sender::open`], with parts that have another form on the wire. Only TCP is a
    /// wire: it is what the transfer goes over.
    ///
    /// # Errors
    /// As [`Sender::open`].
    pub fn open_as(&self, target: LaneTarget, form: &WireForm) -> Result<Transfer, Error> {
        let peer = match self.peer(&target)? {
            peer if is_wire(&peer) => peer,
            _ => self.by_tcp(&target).map(Peer::Tcp).ok_or_else(|| {
                Error::Unreachable("it has no data address to go to over tcp".to_owned())
            })?,
        };
        self.open_to(peer, target, form.opening(), Some(form.clone()))
    }

    /// Whether a lane to `target` comes up: opens one as a transfer would, and closes it.
    /// Blocks for up to `connect_timeout`, twice that if a transport is given up for the next.
    ///
    /// # Errors
    /// [`Error::Unreachable`], with the reason; [`Error::Io`] if the system gives no eventfd.
    pub fn probe(&self, target: &LaneTarget) -> Result<(), Error> {
        let Lanes {
            config, session, ..
        } = &*self.lanes;
        let bell = Bell::new().map_err(|error| Error::io("create an eventfd", error))?;
        let inbox = Arc::default();
        let peer = self.peer(target)?;
        Driver::new(Arc::clone(config), peer, *session, inbox, bell).probe()
    }

    /// Whether a transfer to `target` goes over TCP.
    pub fn goes_over_tcp(&self, target: &LaneTarget) -> bool {
        self.peer(target).is_ok_and(|peer| is_wire(&peer))
    }

    fn open_to(
        &self,
        peer: Peer,
        target: LaneTarget,
        opening: Opening,
        form: Option<WireForm>,
    ) -> Result<Transfer, Error> {
        let Lanes {
            config,
            transfers_open,
            ..
        } = &*self.lanes;
        let limit = config.transfers_max;
        if transfers_open.load(Ordering::Relaxed) >= limit {
            return Err(Error::Full {
                what: "transfers",
                limit,
            });
        }
        let mut lanes = lock(&self.lanes.lanes);
        let index = self.lanes.turn.fetch_add(1, Ordering::Relaxed) % config.lanes_per_peer;
        let key = (peer, index);
        let transfer = |bell| {
            let open = Arc::clone(transfers_open);
            let (target, now) = (target.clone(), config.environment.now());
            let opening = opening.clone();
            let shared = TransferShared::new(config, target, opening, bell, open, now);
            Arc::new(shared.in_form(form.clone()))
        };
        if let Some(lane) = lanes.get(&key) {
            let shared = transfer(lane.bell().clone());
            if lane.submit(&shared) {
                return Ok(Transfer::new(shared));
            }
        }
        // No lane yet, or it has just closed for idleness.
        if matches!(key.0, Peer::Tcp(_)) && config.transports.contains(&TransportKind::SharedMemory)
        {
            let address = target.data_address;
            tracing::info!(
                ?address,
                "kv goes over tcp: no memory is shared with this worker"
            );
        }
        let lane = LaneHandle::start(Arc::clone(config), key.0.clone(), self.lanes.session)?;
        let shared = transfer(lane.bell().clone());
        lane.submit(&shared);
        if let Some(ended) = lanes.insert(key, lane) {
            ended.join();
        }
        Ok(Transfer::new(shared))
    }

    /// Whether transfers to the receiver of this token stay inside this process, where
    /// there is nothing to encrypt.
    pub fn stays_in_process(&self, token: ProcessToken) -> bool {
        let transports = &self.lanes.config.transports;
        transports.contains(&TransportKind::Loopback) && loopback::is_listed(token)
    }

    /// Whether a receiver of this host can be lent this worker's memory.
    fn is_here(&self, token: ProcessToken) -> bool {
        // Asked once per peer: a token names one life of it.
        let is_known = |(peer, _): &(Peer, usize)| matches!(peer, Peer::Shared { token: known, .. } if *known == token);
        shared_memory::can_lend(&self.lanes.config.regions)
            && (lock(&self.lanes.lanes).keys().any(is_known) || shared_memory::is_here(token))
    }

    /// Which lives of this sender's lanes are told apart by.
    #[cfg(feature = "test-support")]
    pub fn session(&self) -> SessionId {
        self.lanes.session
    }

    fn peer(&self, target: &LaneTarget) -> Result<Peer, Error> {
        #[cfg(feature = "test-support")]
        if let Some((_, address)) = self.lanes.config.network.as_ref().zip(target.data_address) {
            return Ok(Peer::Mem(address));
        }
        for kind in &self.lanes.config.transports {
            match (kind, target.data_address) {
                (TransportKind::Loopback, _) if loopback::is_listed(target.process_token) => {
                    return Ok(Peer::Loopback(target.process_token));
                }
                (TransportKind::SharedMemory, _) if self.is_here(target.process_token) => {
                    return Ok(Peer::Shared {
                        token: target.process_token,
                        key: target.lane_key.clone(),
                        otherwise: self.by_tcp(target),
                    });
                }
                (TransportKind::Nixl, Some(address)) if self.lanes.config.nixl.is_some() => {
                    return Ok(Peer::Nixl(address_of(target, address)));
                }
                (TransportKind::Tcp, Some(_)) => {
                    if let Some(by_tcp) = self.by_tcp(target) {
                        return Ok(Peer::Tcp(by_tcp));
                    }
                }
                _ => {}
            }
        }
        let elsewhere =
            "it does not share memory with this process (another host or user, or switched off)";
        Err(Error::Unreachable(match target.data_address {
            Some(address) => {
                format!("{elsewhere}, and `{address}` needs tcp, which is switched off")
            }
            None => format!("{elsewhere} and has no data address"),
        }))
    }

    /// The target's data port, if there is one and TCP is on.
    fn by_tcp(&self, target: &LaneTarget) -> Option<Address> {
        let is_on = self.lanes.config.transports.contains(&TransportKind::Tcp);
        let address = target.data_address.filter(|_| is_on)?;
        Some(address_of(target, address))
    }

    /// Transfers that have not ended, or whose lane has not let go of them.
    pub fn transfers_open(&self) -> usize {
        self.lanes.transfers_open.load(Ordering::Relaxed)
    }
}

fn is_wire(peer: &Peer) -> bool {
    match peer {
        Peer::Tcp(_) => true,
        #[cfg(feature = "test-support")]
        Peer::Mem(_) => true,
        Peer::Loopback(_) | Peer::Nixl(_) | Peer::Shared { .. } => false,
    }
}

fn address_of(target: &LaneTarget, address: SocketAddr) -> Address {
    Address {
        address,
        server_name: target.server_name.clone(),
        key: target.lane_key.clone(),
    }
}
