//! A prefill end and a decode end with random block maps between them.
#![allow(unsafe_code)]

#[path = "tunnel.rs"]
pub mod tunnel;

use std::cell::UnsafeCell;
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use baton_kv_transfer::fault_proxy::FaultProxy;
use baton_kv_transfer::receiver::{
    BlockGrant, Event, EventKind, GrantRequest, GroupGrant, Receiver, ReceiverConfig, Senders,
    event,
};
use baton_kv_transfer::sender::{
    CommitOutcome, LaneTarget, Sender, SenderConfig, SourceBlock, Transfer, TransportKind,
};
use baton_kv_transfer::{
    DataPort, DataPortConfig, LayoutDigest, MemoryRegion, RegionTable, SharedMemory, Ticket,
    region_of,
};
use baton_observability::test_certificates::{Authority, Identity};
use baton_proto::kv_layout::ByteExtent;
use baton_proto::{Attempt, Epoch, RequestId};
use bytes::Bytes;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, RngCore, SeedableRng};
use rustls::{ClientConfig, ServerConfig};
use tokio::sync::mpsc::UnboundedReceiver;

use tunnel::Tunnel;

pub const EPOCH: Epoch = Epoch(0xbeef);
const SILENCE: Duration = Duration::from_secs(5);
const LEASE: Duration = Duration::from_secs(8);
pub const LAYOUT: LayoutDigest = LayoutDigest([9; 32]);

/// Raw memory that lanes write while the test looks at it only when they do not.
pub enum Arena {
    Own(Box<[UnsafeCell<u8>]>),
    Shared(Arc<SharedMemory>),
}

// SAFETY: tests read and write the bytes only while no lane may touch them.
unsafe impl Sync for Arena {}

impl Arena {
    /// Random bytes, which other processes can be lent if `shared`.
    pub fn new(len: usize, shared: bool, rng: &mut StdRng) -> Arc<Self> {
        let mut bytes = vec![0u8; len];
        // SplitMix64: a cryptographic generator takes seconds for these without optimisation.
        let mut state = rng.next_u64();
        for chunk in bytes.chunks_mut(8) {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            chunk.copy_from_slice(&(mixed ^ (mixed >> 27)).to_le_bytes()[..chunk.len()]);
        }
        if shared {
            // A segment has at least one byte.
            let memory = SharedMemory::new(len.max(1)).unwrap();
            // SAFETY: the segment is this long, fresh, and known to nobody else.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.base().as_ptr(), len) };
            return Arc::new(Self::Shared(Arc::new(memory)));
        }
        let bytes = Box::into_raw(bytes.into_boxed_slice());
        // SAFETY: `UnsafeCell<u8>` has the layout of `u8`, and the box was just given up.
        Arc::new(Self::Own(unsafe {
            Box::from_raw(bytes as *mut [UnsafeCell<u8>])
        }))
    }

    pub fn region(self: &Arc<Self>) -> MemoryRegion {
        let keep: Arc<Self> = Arc::clone(self);
        // SAFETY: `keep` owns the allocation; the tests keep the promises of `new`.
        unsafe {
            match &**self {
                Self::Own(bytes) => MemoryRegion::new(self.base(), bytes.len(), keep),
                Self::Shared(memory) => region_of(memory),
            }
        }
    }

    fn base(&self) -> *mut u8 {
        match self {
            Self::Own(bytes) => bytes.as_ptr().cast_mut().cast(),
            Self::Shared(memory) => memory.base().as_ptr(),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Own(bytes) => bytes.len(),
            Self::Shared(memory) => memory.len(),
        }
    }

    /// The bytes now. No lane may be writing them.
    pub fn bytes(&self) -> Vec<u8> {
        // SAFETY: the allocation is this long; the caller says that no lane writes now.
        unsafe { std::slice::from_raw_parts(self.base(), self.len()) }.to_vec()
    }

    /// Writes `bytes` at `offset`. No lane may be touching it.
    pub fn put(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len());
        // SAFETY: inside the allocation; the caller says that no lane touches it now.
        unsafe {
            let to = self.base().add(offset);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }

    /// Overwrites everything. No lane may be touching it.
    pub fn fill(&self, byte: u8) {
        // SAFETY: the cells allow writing; the caller says that no lane touches it now.
        unsafe { std::ptr::write_bytes(self.base(), byte, self.len()) };
    }
}

/// What is moved: layers and ordinals of each group, and bytes per part.
#[derive(Clone, Debug)]
pub struct Shape {
    pub groups: Vec<(Vec<u32>, Vec<u32>)>,
    pub part_bytes: u32,
}

impl Shape {
    pub fn single(layers: u32, blocks: u32, part_bytes: u32) -> Self {
        Self {
            groups: vec![((0..layers).collect(), (0..blocks).collect())],
            part_bytes,
        }
    }

    pub fn random(rng: &mut StdRng) -> Self {
        let group = |rng: &mut StdRng, first_layer: u32| {
            let layers = (0..rng.random_range(1..6))
                .map(|i| first_layer + i)
                .collect();
            let start = rng.random_range(0..5);
            let mut ordinals: Vec<u32> = (start..start + rng.random_range(1..60)).collect();
            ordinals.retain(|_| rng.random_bool(0.8));
            if ordinals.is_empty() {
                ordinals.push(3);
            }
            (layers, ordinals)
        };
        let mut groups = vec![group(rng, 0)];
        if rng.random_bool(0.5) {
            groups.push(group(rng, 10));
        }
        Self {
            groups,
            part_bytes: *[1, 64, 1000, 12_288, 33_000].choose_one(rng),
        }
    }

    pub fn parts(&self) -> u64 {
        self.groups
            .iter()
            .map(|(layers, ordinals)| (layers.len() * ordinals.len()) as u64)
            .sum()
    }

    pub fn bytes(&self) -> u64 {
        self.parts() * u64::from(self.part_bytes)
    }

    fn pool_bytes(&self, group: usize) -> usize {
        let (layers, ordinals) = &self.groups[group];
        pool_blocks(ordinals.len()) * layers.len() * self.part_bytes as usize
    }
}

trait ChooseOne<T> {
    fn choose_one(&self, rng: &mut StdRng) -> &T;
}

impl<T> ChooseOne<T> for [T] {
    fn choose_one(&self, rng: &mut StdRng) -> &T {
        &self[rng.random_range(0..self.len())]
    }
}

/// More blocks than are moved, so that strays would hit something that is checked.
fn pool_blocks(moved: usize) -> usize {
    moved + 3
}

/// How the two ends are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Via {
    Loopback,
    /// Memory lent over a Unix socket.
    Shared,
    Tcp,
    Proxy,
    /// Tcp inside TLS, certificates asked for at both ends.
    Tls,
    /// The proxy's faults happen to frames inside TLS.
    TlsProxy,
}

impl Via {
    fn has_tls(self) -> bool {
        matches!(self, Self::Tls | Self::TlsProxy)
    }

    fn has_proxy(self) -> bool {
        matches!(self, Self::Proxy | Self::TlsProxy)
    }
}

/// What both ends of [`Via::Tls`] trust.
pub static AUTHORITY: LazyLock<Authority> = LazyLock::new(Authority::new);
static PORT_IDENTITY: LazyLock<Identity> = LazyLock::new(|| AUTHORITY.sign("127.0.0.1"));
static SENDER_IDENTITY: LazyLock<Identity> = LazyLock::new(|| AUTHORITY.sign("prefill-0"));

/// A data port's TLS; `mutual` asks for certificates of the same authority.
pub fn port_tls(mutual: bool) -> Arc<ServerConfig> {
    Authority::server(&PORT_IDENTITY, mutual.then_some(&*AUTHORITY))
}

/// A sender's TLS, with a certificate that the port accepts.
pub fn sender_tls() -> Arc<ClientConfig> {
    AUTHORITY.client(Some(&SENDER_IDENTITY))
}

/// Both ends.
pub struct Pair {
    pub shape: Shape,
    pub receiver: Receiver,
    pub events: UnboundedReceiver<Event>,
    pub port: Option<DataPort>,
    pub proxy: Option<FaultProxy>,
    pub sender: Sender,
    /// Where senders connect to.
    entrance: Option<SocketAddr>,
    _tunnels: Vec<Tunnel>,
    pub source: Vec<Arc<Arena>>,
    pub destination: Vec<Arc<Arena>>,
    source_blocks: Vec<Vec<u32>>,
    destination_blocks: Vec<Vec<u32>>,
}

impl Pair {
    pub fn new(via: Via, shape: Shape, seed: u64) -> Self {
        Self::with(via, shape, seed, |_| {}, |_| {})
    }

    pub fn with(
        via: Via,
        shape: Shape,
        seed: u64,
        receiving: impl FnOnce(&mut ReceiverConfig),
        sending: impl FnOnce(&mut SenderConfig),
    ) -> Self {
        let porting = |_: &mut DataPortConfig| {};
        Self::with_port(via, shape, seed, receiving, porting, sending)
    }

    pub fn with_port(
        via: Via,
        shape: Shape,
        seed: u64,
        receiving: impl FnOnce(&mut ReceiverConfig),
        porting: impl FnOnce(&mut DataPortConfig),
        sending: impl FnOnce(&mut SenderConfig),
    ) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let groups = 0..shape.groups.len();
        let mut arenas = |shared: bool| -> Vec<Arc<Arena>> {
            groups
                .clone()
                .map(|group| Arena::new(shape.pool_bytes(group), shared, &mut rng))
                .collect()
        };
        let (source, destination) = (arenas(via == Via::Shared), arenas(false));
        let regions =
            |arenas: &[Arc<Arena>]| -> RegionTable { arenas.iter().map(Arena::region).collect() };
        let mut blocks = || -> Vec<Vec<u32>> {
            let shuffled = |ordinals: &Vec<u32>, rng: &mut StdRng| {
                let mut blocks: Vec<u32> = (0..pool_blocks(ordinals.len()) as u32).collect();
                // Half of the maps keep runs of neighbours, as real pools do.
                if rng.random_bool(0.5) {
                    blocks.shuffle(rng);
                }
                blocks.truncate(ordinals.len());
                blocks
            };
            shape
                .groups
                .iter()
                .map(|(_, ordinals)| shuffled(ordinals, &mut rng))
                .collect()
        };
        let (source_blocks, destination_blocks) = (blocks(), blocks());

        let (sink, events) = event::channel();
        // A busy machine must not look like a dead peer: tests of silence and leases set
        // shorter ones, and what the defaults promise is tested in virtual time.
        let mut config = ReceiverConfig::new(EPOCH, LAYOUT, regions(&destination));
        config.resume_grace = LEASE;
        receiving(&mut config);
        let receiver = Receiver::start(config, sink).unwrap();
        let mut config = DataPortConfig {
            tls: via.has_tls().then(|| port_tls(true)),
            silence_max: SILENCE,
            ..DataPortConfig::default()
        };
        porting(&mut config);
        let port =
            (via != Via::Loopback).then(|| DataPort::bind(config, receiver.clone()).unwrap());
        let mut entrance = port.as_ref().map(DataPort::local_address);
        let mut tunnels = Vec::new();
        let mut proxy = None;
        if via.has_proxy() {
            if via.has_tls() {
                let tunnel = Tunnel::originate(&sender_tls(), entrance.unwrap());
                entrance = Some(tunnel.address);
                tunnels.push(tunnel);
            }
            let started = FaultProxy::start(entrance.unwrap()).unwrap();
            entrance = Some(started.address());
            if via.has_tls() {
                let tunnel = Tunnel::terminate(&port_tls(true), started.address());
                entrance = Some(tunnel.address);
                tunnels.push(tunnel);
            }
            proxy = Some(started);
        }
        let mut config = SenderConfig::new(regions(&source));
        config.transports = vec![match via {
            Via::Loopback => TransportKind::Loopback,
            Via::Shared => TransportKind::SharedMemory,
            _ => TransportKind::Tcp,
        }];
        if via.has_tls() {
            config.tls = Some(sender_tls());
        }
        config.silence_max = SILENCE;
        config.reconnect_max = LEASE;
        sending(&mut config);
        let sender = Sender::start(config);
        Self {
            shape,
            receiver,
            events,
            port,
            proxy,
            sender,
            entrance,
            _tunnels: tunnels,
            source,
            destination,
            source_blocks,
            destination_blocks,
        }
    }

    pub fn proxy(&self) -> &FaultProxy {
        self.proxy.as_ref().unwrap()
    }

    fn extent(&self, group: usize, layer: usize, block: u32) -> ByteExtent {
        let (layers, _) = &self.shape.groups[group];
        let index = block as usize * layers.len() + layer;
        ByteExtent {
            offset: index as u64 * u64::from(self.shape.part_bytes),
            len: self.shape.part_bytes,
            region: group as u16,
        }
    }

    pub fn request(&self, attempt: u32, deadline: Duration) -> GrantRequest {
        let groups = self
            .shape
            .groups
            .iter()
            .enumerate()
            .map(|(group, (layers, ordinals))| {
                let block = |(ordinal, block): (&u32, &u32)| BlockGrant {
                    ordinal: *ordinal,
                    layers: (0..layers.len())
                        .map(|l| self.extent(group, l, *block))
                        .collect(),
                };
                let blocks = ordinals
                    .iter()
                    .zip(&self.destination_blocks[group])
                    .map(block);
                GroupGrant {
                    group: group as u16,
                    layers: layers.clone(),
                    blocks: blocks.collect(),
                }
            });
        GrantRequest {
            request_id: RequestId::from("r"),
            attempt: Attempt(attempt),
            epoch: EPOCH,
            groups: groups.collect(),
            senders: Senders::SameLayout,
            deadline,
        }
    }

    pub fn grant(&self, attempt: u32) -> Ticket {
        self.receiver
            .grant(self.request(attempt, Duration::from_secs(20)))
            .unwrap()
            .ticket
    }

    pub fn target(&self, ticket: Ticket, attempt: u32) -> LaneTarget {
        LaneTarget {
            data_address: self.entrance,
            server_name: None,
            process_token: self.receiver.process_token(),
            lane_key: self.receiver.lane_key().clone(),
            ticket,
            epoch: EPOCH,
            attempt: Attempt(attempt),
            request_id: RequestId::from("r"),
            deadline: Duration::from_secs(20),
        }
    }

    pub fn open(&self, ticket: Ticket, attempt: u32) -> Transfer {
        self.sender
            .open(self.target(ticket, attempt), LAYOUT)
            .unwrap()
    }

    /// Layers in the order in which an engine finishes them: (group, index, model layer).
    pub fn layers(&self) -> Vec<(usize, usize, u32)> {
        let mut layers: Vec<_> = self
            .shape
            .groups
            .iter()
            .enumerate()
            .flat_map(|(group, (layers, _))| {
                layers
                    .iter()
                    .enumerate()
                    .map(move |(index, layer)| (group, index, *layer))
            })
            .collect();
        layers.sort_by_key(|(_, _, layer)| *layer);
        layers
    }

    pub fn source_blocks(&self, group: usize, layer: usize) -> Vec<SourceBlock> {
        let (_, ordinals) = &self.shape.groups[group];
        let block = |(ordinal, block): (&u32, &u32)| SourceBlock {
            ordinal: *ordinal,
            extent: self.extent(group, layer, *block),
        };
        ordinals
            .iter()
            .zip(&self.source_blocks[group])
            .map(block)
            .collect()
    }

    /// Pushes every part, in chunks as a chunked prefill would.
    pub async fn push_all(&self, transfer: &Transfer) -> Result<(), baton_kv_transfer::Error> {
        for (group, index, layer) in self.layers() {
            for chunk in self.source_blocks(group, index).chunks(32) {
                transfer.push(group as u16, layer, chunk).await?;
            }
        }
        Ok(())
    }

    /// Grants, pushes and commits one attempt.
    pub async fn hand_off(&self, payload: &'static [u8]) -> CommitOutcome {
        let transfer = self.open(self.grant(1), 1);
        let _ = self.push_all(&transfer).await;
        let outcome = transfer.commit(Bytes::from_static(payload)).await;
        transfer.quiesced().await;
        outcome
    }

    /// The next event that is not `Started` or `LaneLost`.
    pub async fn terminal(&mut self) -> EventKind {
        loop {
            let event = self.next_event().await;
            if !matches!(event, EventKind::Started | EventKind::LaneLost) {
                return event;
            }
        }
    }

    pub async fn next_event(&mut self) -> EventKind {
        let event = tokio::time::timeout(Duration::from_secs(15), self.events.recv()).await;
        event
            .expect("no event in time")
            .expect("the receiver is alive")
            .what
    }

    /// No terminal event has been sent (beyond those taken).
    pub fn assert_no_terminal_event(&mut self) {
        while let Ok(event) = self.events.try_recv() {
            assert!(
                matches!(event.what, EventKind::Started | EventKind::LaneLost),
                "{event:?}"
            );
        }
    }

    pub fn snapshot(&self) -> Vec<Vec<u8>> {
        self.destination.iter().map(|arena| arena.bytes()).collect()
    }

    /// Every granted part holds its source's bytes; every other byte is as in `before`.
    pub fn assert_equal(&self, before: &[Vec<u8>]) {
        let source: Vec<Vec<u8>> = self.source.iter().map(|arena| arena.bytes()).collect();
        let mut expected = before.to_vec();
        for (group, (layers, ordinals)) in self.shape.groups.iter().enumerate() {
            for layer in 0..layers.len() {
                for index in 0..ordinals.len() {
                    let from = self.extent(group, layer, self.source_blocks[group][index]);
                    let to = self.extent(group, layer, self.destination_blocks[group][index]);
                    let (from, to) = (from.offset as usize, to.offset as usize);
                    let len = self.shape.part_bytes as usize;
                    expected[group][to..to + len].copy_from_slice(&source[group][from..from + len]);
                }
            }
        }
        assert!(
            self.snapshot() == expected,
            "bytes differ for {:?}",
            self.shape
        );
    }
}

/// Polls until `condition` holds.
pub async fn until(what: &str, condition: impl Fn() -> bool) {
    let started = std::time::Instant::now();
    while !condition() {
        assert!(started.elapsed() < Duration::from_secs(15), "never: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
