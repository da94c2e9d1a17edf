//! Both workers of a handoff over a [`Network`]: their pools, their grants and
//! transfers, and the books that say whether every block came back in time.

use std::collections::VecDeque;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use baton_kv_transfer::codec::Kind as FrameKind;
use baton_kv_transfer::fault_proxy::FaultProxy;
use baton_kv_transfer::mem::{Conditions, Direction, Link, Network};
use baton_kv_transfer::receiver::{
    BlockGrant, Event, GrantRequest, GroupGrant, Protections, Receiver, ReceiverConfig, Regrant,
    RegrantRequest, Senders,
};
use baton_kv_transfer::sender::{LaneTarget, Sender, SenderConfig, SourceBlock, TransportKind};
use baton_kv_transfer::{DataPort, DataPortConfig, Error, LayoutDigest, SessionId, Ticket};
use baton_proto::{Attempt, Epoch, RequestId};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::fabric::{Fabric, Leases, Lending};
use crate::job::{Content, Job, Plan, ReceiverEnd, Remote, SenderEnd, Wanted};
use crate::pool::Pool;
use crate::relaid::{self, Relaid};
use crate::verdict::Verdict;

pub const EPOCH: Epoch = Epoch(0xbeef);
pub const LAYOUT: LayoutDigest = LayoutDigest([9; 32]);
/// Blocks are back after a peer's death, and after a cancel, within this.
pub const BACK_AFTER_DEATH: Duration = Duration::from_secs(2);
pub const BACK_AFTER_CANCEL: Duration = Duration::from_secs(1);
/// Polls once; whoever drives the world polls again.
pub fn poll_once<F: Future>(future: F) -> Option<F::Output> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

pub struct Prefill {
    pub sender: Option<Sender>,
    pub session: SessionId,
}

pub struct World {
    pub rng: StdRng,
    pub fabric: Fabric,
    pub receiver: Option<Receiver>,
    pub source: Pool,
    pub destination: Pool,
    pub jobs: Vec<Job>,
    pub verdict: Verdict,
    pub steps: u64,
    pub prefills: Vec<Prefill>,
    pub events: Arc<Mutex<Vec<Event>>>,
    pub address: SocketAddr,
    pub in_flight_parts_max: usize,
    pub lanes_per_peer: usize,
    /// How parts become blocks, if they are not layers of them.
    pub relaid: Option<Relaid>,
}

impl World {
    pub fn new(seed: u64, protections: Protections) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut layers = rng.random_range(2..8);
        // Now and then parts that take several reads and turns.
        let part_bytes = match rng.random_range(0..10) {
            0 => 270_000,
            1..3 => 12_000,
            3..7 => 4096,
            _ => rng.random_range(1..2000),
        };
        let mut blocks = 64;
        if part_bytes > 100_000 {
            (layers, blocks) = (2, 16);
        }
        let conditions = Conditions {
            latency: Duration::from_micros(rng.random_range(20..3000)),
            jitter: Duration::from_micros(rng.random_range(0..1000)),
            bytes_per_second: rng.random_range(20 << 20..1 << 30),
            buffer: rng.random_range(16 << 10..512 << 10),
        };
        let in_flight_parts_max = rng.random_range(4..200);
        let relaid = (seed >= relaid::SEEDS).then(|| {
            let block_size = if rng.random_bool(0.2) { 128 } else { 16 };
            let relaid = Relaid::new(layers, block_size);
            match seed % 2 {
                0 => relaid,
                _ => relaid.on_wire(),
            }
        });
        let mut world = match relaid {
            // Their parts are small, whatever was drawn above.
            Some(relaid) => Self::relaid(seed, 64, relaid, protections),
            None => Self::shaped(seed, (blocks, layers, part_bytes), protections),
        };
        world.rng = rng;
        world.in_flight_parts_max = in_flight_parts_max;
        world.lanes_per_peer = world.rng.random_range(1..=2);
        world.link().set(conditions);
        world.add_sender();
        world
    }

    /// Pools of (blocks, layers, bytes per part), and no sender.
    pub fn shaped(seed: u64, shape: (usize, u32, u32), protections: Protections) -> Self {
        let (blocks, layers, part_bytes) = shape;
        let pool = || Pool::new(blocks, layers, part_bytes);
        Self::between(seed, [pool(), pool()], None, protections)
    }

    fn relaid(seed: u64, blocks: usize, relaid: Relaid, protections: Protections) -> Self {
        let pools = [&relaid.sender, &relaid.receiver].map(|layout| {
            let part_bytes = layout.layer_bytes() as u32;
            Pool::new(blocks, layout.layers, part_bytes)
        });
        Self::between(seed, pools, Some(relaid), protections)
    }

    fn between(
        seed: u64,
        [source, destination]: [Pool; 2],
        relaid: Option<Relaid>,
        protections: Protections,
    ) -> Self {
        let network = Network::new(seed);
        let address = SocketAddr::from(([127, 0, 0, 1], 7));
        let events: Arc<Mutex<Vec<Event>>> = Arc::default();
        let sink = Arc::clone(&events);
        let mut config = ReceiverConfig::new(EPOCH, LAYOUT, vec![destination.region()]);
        config.protections = protections;
        config.other_layouts = relaid.as_ref().map(Relaid::others);
        let port = DataPortConfig {
            address,
            ..DataPortConfig::default()
        };
        let sink = Box::new(move |event| sink.lock().unwrap().push(event));
        let (receiver, link) = network.receiver(config, port, sink).unwrap();
        Self {
            rng: StdRng::seed_from_u64(seed),
            fabric: Fabric::Mem { network, link },
            receiver: Some(receiver),
            source,
            destination,
            jobs: Vec::new(),
            verdict: Verdict::default(),
            steps: 0,
            prefills: Vec::new(),
            events,
            address,
            in_flight_parts_max: 16_384,
            lanes_per_peer: 1,
            relaid,
        }
    }

    /// The same workers with real sockets, threads and time between them.
    pub fn over_tcp(seed: u64, leases: Leases) -> Self {
        Self::over_sockets(seed, leases, None)
    }

    /// The same with memory that is lent.
    pub fn over_lent_memory(seed: u64, leases: Leases, lending: &Lending) -> Self {
        Self::over_sockets(seed, leases, Some(lending.clone()))
    }

    fn over_sockets(seed: u64, leases: Leases, lending: Option<Lending>) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let layers = rng.random_range(2..8);
        let part_bytes = rng.random_range(1..12_000);
        let source = match &lending {
            Some(lending) => lending.pool(80, layers, part_bytes),
            None => Pool::new(80, layers, part_bytes),
        };
        let destination = Pool::new(80, layers, part_bytes);
        let events: Arc<Mutex<Vec<Event>>> = Arc::default();
        let sink = Arc::clone(&events);
        let mut config = ReceiverConfig::new(EPOCH, LAYOUT, vec![destination.region()]);
        config.resume_grace = leases.lease;
        let sink = Box::new(move |event| sink.lock().unwrap().push(event));
        let receiver = Receiver::start(config, sink).unwrap();
        let mut port = DataPortConfig {
            ping_interval: leases.ping,
            silence_max: leases.silence,
            hello_timeout: Duration::from_secs(10),
            ..DataPortConfig::default()
        };
        if let Some(lending) = &lending {
            lending.port(&mut port);
        }
        let port = DataPort::bind(port, receiver.clone()).unwrap();
        let in_flight_parts_max = rng.random_range(4..200);
        let address = port.local_address();
        let fabric = match lending {
            Some(lending) => Fabric::Shared {
                _port: port,
                leases,
                lending,
            },
            None => Fabric::Tcp {
                proxy: FaultProxy::start(port.local_address()).unwrap(),
                port: Some(port),
                leases,
            },
        };
        let mut world = Self {
            rng,
            address: match &fabric {
                Fabric::Tcp { proxy, .. } => proxy.address(),
                Fabric::Mem { .. } | Fabric::Shared { .. } => address,
            },
            fabric,
            receiver: Some(receiver),
            source,
            destination,
            jobs: Vec::new(),
            verdict: Verdict::default(),
            steps: 0,
            prefills: Vec::new(),
            events,
            in_flight_parts_max,
            lanes_per_peer: 1,
            relaid: None,
        };
        world.add_sender();
        world
    }

    pub fn now(&self) -> Instant {
        self.fabric.now()
    }

    /// The link in memory.
    pub fn link(&self) -> &Link {
        match &self.fabric {
            Fabric::Mem { link, .. } => link,
            _ => panic!("not in memory"),
        }
    }

    /// The link over TCP.
    pub fn proxy(&self) -> &FaultProxy {
        match &self.fabric {
            Fabric::Tcp { proxy, .. } => proxy,
            _ => panic!("not over TCP"),
        }
    }

    /// Starts another prefill worker; its number.
    pub fn add_sender(&mut self) -> usize {
        let mut config = SenderConfig::new(vec![self.source.region()]);
        match &self.fabric {
            Fabric::Mem { network, .. } => {
                config.environment = network.environment().clone();
                config.network = Some(network.clone());
            }
            Fabric::Tcp { leases, .. } | Fabric::Shared { leases, .. } => {
                match &self.fabric {
                    Fabric::Shared { lending, .. } => lending.sender(&mut config),
                    _ => config.transports = vec![TransportKind::Tcp],
                }
                config.ping_interval = leases.ping;
                config.silence_max = leases.silence;
                config.reconnect_max = leases.lease;
                config.connect_timeout = leases.silence;
                if let Fabric::Shared { lending, .. } = &self.fabric
                    && !self.prefills.is_empty()
                {
                    // It takes over from one that died, and its own peer does not.
                    lending.be_patient(&mut config);
                }
            }
        }
        config.in_flight_parts_max = self.in_flight_parts_max;
        config.lanes_per_peer = self.lanes_per_peer;
        let sender = Sender::start(config);
        self.prefills.push(Prefill {
            session: sender.session(),
            sender: Some(sender),
        });
        self.prefills.len() - 1
    }

    pub fn blocks(&mut self) -> usize {
        let most = if self.destination.part_bytes > 100_000 {
            4
        } else {
            16
        };
        self.rng.random_range(1..most)
    }

    /// Grants fresh blocks and opens a transfer to them; the job's number.
    pub fn start(&mut self, sender: usize, plan: Plan) -> usize {
        let blocks = self.destination.take(plan.blocks, &mut self.rng);
        self.start_on(sender, plan, blocks)
    }

    /// The same, for blocks that were taken.
    pub fn start_on(&mut self, sender: usize, plan: Plan, blocks: Vec<u32>) -> usize {
        let ordinals = self.ordinals(blocks.len());
        let ticket = self.grant(&plan, &ordinals, &blocks);
        let wanted = Wanted {
            ordinals,
            blocks,
            ticket,
            content: None,
            remote: None,
        };
        self.open(sender, plan, wanted)
    }

    fn ordinals(&mut self, count: usize) -> Vec<u32> {
        let mut next = self.rng.random_range(0..5);
        let mut ordinals = Vec::new();
        while ordinals.len() < count {
            ordinals.push(next);
            // Gaps make frames.
            next += if self.rng.random_bool(0.3) { 2 } else { 1 };
        }
        ordinals
    }

    fn grant(&self, plan: &Plan, ordinals: &[u32], blocks: &[u32]) -> Ticket {
        let layers = self.destination.layers;
        let block = |(ordinal, block): (&u32, &u32)| BlockGrant {
            ordinal: *ordinal,
            layers: (0..layers)
                .map(|layer| self.destination.extent(*block, layer))
                .collect(),
        };
        let group = GroupGrant {
            group: 0,
            layers: (0..layers).collect(),
            blocks: ordinals.iter().zip(blocks).map(block).collect(),
        };
        let request = GrantRequest {
            request_id: RequestId::from("r"),
            attempt: Attempt(plan.attempt),
            epoch: EPOCH,
            groups: vec![group],
            senders: match (&self.relaid, ordinals.last()) {
                (Some(relaid), Some(last)) => relaid.senders(*last),
                _ => Senders::SameLayout,
            },
            deadline: plan.deadline,
        };
        self.receiver
            .as_ref()
            .unwrap()
            .grant(request)
            .unwrap()
            .ticket
    }

    /// Grants blocks to a prefill worker that is a process of its own: its job, the ticket
    /// and the ordinals. `content` is what it will send.
    pub fn start_remote(&mut self, plan: Plan, content: Content) -> (usize, Ticket, Vec<u32>) {
        let blocks = self.destination.take(plan.blocks, &mut self.rng);
        let ordinals = self.ordinals(blocks.len());
        let ticket = self.grant(&plan, &ordinals, &blocks);
        let mut job = self.job(plan, ticket, ordinals.clone(), content);
        job.destination_blocks = blocks;
        job.sender_end = Some(SenderEnd::Died);
        job.sender_back = Some(self.now());
        self.jobs.push(job);
        (self.jobs.len() - 1, ticket, ordinals)
    }

    /// Opens a transfer to a decode worker that is a process of its own.
    pub fn start_to_remote(&mut self, plan: Plan, ordinals: Vec<u32>, remote: Remote) -> usize {
        let wanted = Wanted {
            ordinals,
            blocks: Vec::new(),
            ticket: remote.ticket,
            content: None,
            remote: Some(remote),
        };
        let index = self.open(0, plan, wanted);
        let now = self.now();
        let job = &mut self.jobs[index];
        job.receiver_end = Some(ReceiverEnd::Died);
        job.receiver_back = Some(now);
        index
    }

    fn job(&self, plan: Plan, ticket: Ticket, ordinals: Vec<u32>, content: Content) -> Job {
        Job {
            ticket,
            transfer: None,
            sender: 0,
            plan,
            ordinals,
            source_blocks: Vec::new(),
            destination_blocks: Vec::new(),
            content,
            started: self.now(),
            pushes: VecDeque::new(),
            committed_at: None,
            opened: false,
            revoking: false,
            receiver_end: None,
            sender_end: None,
            receiver_back: None,
            sender_back: None,
            receiver_due: None,
            sender_due: None,
        }
    }

    /// Opens a transfer for a ticket.
    fn open(&mut self, sender: usize, plan: Plan, wanted: Wanted) -> usize {
        let Wanted {
            ordinals,
            blocks,
            ticket,
            content,
            remote,
        } = wanted;
        let count = ordinals.len();
        let source_blocks = self.source.take(count, &mut self.rng);
        let filled = self.source.fill(&source_blocks, &mut self.rng);
        let content = match content {
            None => filled,
            Some(content) => {
                self.source.write(&source_blocks, &content);
                content
            }
        };
        let receiver = self.receiver.as_ref().unwrap();
        let (process_token, lane_key) = match &remote {
            Some(remote) => (remote.process_token, remote.lane_key.clone()),
            None => (receiver.process_token(), receiver.lane_key().clone()),
        };
        let address = remote
            .as_ref()
            .map_or(self.address, |remote| remote.address);
        let target = LaneTarget {
            data_address: Some(address),
            server_name: None,
            process_token,
            lane_key,
            ticket,
            epoch: plan.sent_epoch,
            attempt: Attempt(plan.sent_attempt),
            request_id: RequestId::from("r"),
            deadline: plan.sent_deadline,
        };
        let handle = self.prefills[sender].sender.as_ref().unwrap();
        let transfer = match &self.relaid {
            Some(relaid) if plan.layout == LAYOUT => match &relaid.form {
                Some(form) => handle.open_as(target, form),
                None => handle.open(target, relaid.opening()),
            },
            _ => handle.open(target, plan.layout),
        };
        let transfer = transfer.unwrap();
        let started = self.now();
        let layers = self.source.layers;
        let mut pushes = VecDeque::new();
        let chunk = self.rng.random_range(1..=count.max(1));
        let count = layers as usize * count.div_ceil(chunk);
        for layer in 0..layers {
            let all: Vec<SourceBlock> = ordinals
                .iter()
                .zip(&source_blocks)
                .map(|(ordinal, block)| SourceBlock {
                    ordinal: *ordinal,
                    extent: self.source.extent(*block, layer),
                })
                .collect();
            for blocks in all.chunks(chunk) {
                let share = (pushes.len() + 1) as u32;
                let at = started + plan.pushes_over * share / count as u32;
                pushes.push_back((at, layer, blocks.to_vec()));
            }
        }
        let mut job = self.job(plan, ticket, ordinals, content);
        job.transfer = Some(Arc::new(transfer));
        job.sender = sender;
        job.source_blocks = source_blocks;
        job.destination_blocks = blocks;
        job.pushes = pushes;
        self.jobs.push(job);
        self.fabric.poke();
        self.jobs.len() - 1
    }

    /// The router gives the request to another prefill worker: a new attempt for the same
    /// blocks. `None` if the old one was faster, or has ended.
    pub fn regrant(&mut self, old: usize, sender: usize, keep: bool) -> Option<usize> {
        let receiver = self.receiver.clone().unwrap();
        let attempt = self.jobs[old].plan.attempt + 1;
        let request = RegrantRequest {
            attempt: Attempt(attempt),
            deadline: Duration::from_secs(20),
            keep_received: keep,
        };
        let ticket = self.jobs[old].ticket;
        let regrant = loop {
            // In memory no lane is in the middle of a read between two steps.
            if let Some(regrant) = poll_once(receiver.regrant(ticket, request.clone())) {
                break regrant;
            }
            assert!(
                !matches!(self.fabric, Fabric::Mem { .. }),
                "a guard outlived its turn"
            );
            std::thread::yield_now();
        };
        self.fabric.poke();
        match regrant {
            Ok(Regrant::Granted(grant)) => {
                let job = &mut self.jobs[old];
                job.receiver_end = Some(ReceiverEnd::Ended("handed on".to_owned()));
                job.receiver_back = Some(self.fabric.now());
                let mut plan = Plan::new(job.ordinals.len(), &mut self.rng);
                plan.attempt = attempt;
                plan.sent_attempt = attempt;
                let (ordinals, blocks) = (job.ordinals.clone(), job.destination_blocks.clone());
                // Kept parts are only kept if the new worker's bytes would be the same.
                let content = keep.then(|| job.content.clone());
                let wanted = Wanted {
                    ordinals,
                    blocks,
                    ticket: grant.ticket,
                    content,
                    remote: None,
                };
                Some(self.open(sender, plan, wanted))
            }
            Ok(Regrant::Committed) | Err(Error::UnknownTicket) => None,
            Err(error) => panic!("{error}"),
        }
    }

    /// Gives the reservation up, as a worker does whose router says so.
    pub fn revoke(&mut self, job: usize) {
        self.jobs[job].revoking = true;
        self.fabric.poke();
    }

    pub fn abort(&mut self, job: usize) {
        if let Some(transfer) = &self.jobs[job].transfer {
            transfer.abort("the client left");
        }
        self.fabric.poke();
    }

    /// From now on the blocks of these sides are due.
    pub fn expect_back(
        &mut self,
        job: usize,
        receiver: Option<Duration>,
        sender: Option<Duration>,
    ) {
        if !matches!(self.fabric, Fabric::Mem { .. }) {
            // Real time proves nothing on a busy machine: back is enough.
            return;
        }
        let now = self.now();
        let job = &mut self.jobs[job];
        // Until a lane opens the ticket there is no peer that could die.
        let receiver = receiver.filter(|_| job.opened);
        let earlier = |due: Option<Instant>, within: Option<Duration>| match (due, within) {
            (due, None) => due,
            (None, Some(within)) => Some(now + within),
            (Some(due), Some(within)) => Some(due.min(now + within)),
        };
        job.receiver_due = earlier(job.receiver_due, receiver);
        job.sender_due = earlier(job.sender_due, sender);
    }

    /// The sender's process dies.
    pub fn kill_sender(&mut self, sender: usize) {
        let session = self.prefills[sender].session;
        match &self.fabric {
            Fabric::Mem { network, .. } => network.kill_sender(session),
            Fabric::Tcp { proxy, .. } => {
                proxy.refuse(true);
                proxy.cut();
            }
            Fabric::Shared { .. } => panic!("kill a process of its own"),
        }
        let now = self.now();
        for job in self.jobs.iter_mut().filter(|job| job.sender == sender) {
            job.pushes.clear();
            job.transfer = None;
        }
        // Over TCP its threads live on until here, cut off from everybody.
        self.prefills[sender].sender = None;
        for job in self.jobs.iter_mut().filter(|job| job.sender == sender) {
            if job.sender_back.replace(now).is_none() {
                job.sender_end = Some(SenderEnd::Died);
                self.source.give(&job.source_blocks);
            }
        }
        if let Fabric::Tcp { proxy, .. } = &self.fabric {
            proxy.refuse(false);
        }
        self.fabric.poke();
    }

    /// The receiver's process dies.
    pub fn kill_receiver(&mut self) {
        self.receiver = None;
        match &mut self.fabric {
            Fabric::Mem { network, .. } => network.kill_receiver(self.address),
            Fabric::Tcp { port, .. } => drop(port.take()),
            Fabric::Shared { .. } => panic!("kill a process of its own"),
        }
        let now = self.now();
        for job in &mut self.jobs {
            job.revoking = false;
            if job.receiver_back.replace(now).is_none() {
                job.receiver_end = Some(ReceiverEnd::Died);
                self.destination.give(&job.destination_blocks);
            }
        }
        self.fabric.poke();
    }

    /// Data frames that have left senders.
    pub fn frames(&self) -> u64 {
        match &self.fabric {
            Fabric::Mem { link, .. } => link.frames(Direction::Forth, FrameKind::Data),
            Fabric::Tcp { proxy, .. } => proxy.data_frames(),
            Fabric::Shared { .. } => panic!("nobody counts"),
        }
    }
}
