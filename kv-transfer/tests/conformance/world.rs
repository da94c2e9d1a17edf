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
    BlockGrant, Event, EventKind, GrantRequest, GroupGrant, Protections, Receiver, ReceiverConfig,
    Regrant, RegrantRequest, Terminal,
};
use baton_kv_transfer::sender::{
    CommitOutcome, LaneTarget, Sender, SenderConfig, SourceBlock, Transfer, TransportKind,
};
use baton_kv_transfer::{DataPort, DataPortConfig, Error, LayoutDigest, SessionId, Ticket};
use baton_proto::{Attempt, Epoch, RequestId};
use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::pool::Pool;
use crate::verdict::{Ending, Verdict};

pub const EPOCH: Epoch = Epoch(0xbeef);
pub const LAYOUT: LayoutDigest = LayoutDigest([9; 32]);
/// Blocks are back after a peer's death, and after a cancel, within this.
pub const BACK_AFTER_DEATH: Duration = Duration::from_secs(2);
pub const BACK_AFTER_CANCEL: Duration = Duration::from_secs(1);
/// A run whose request's deadline is this far back has not ended in time.
const SLACK: Duration = Duration::from_secs(2);

/// Polls once; whoever drives the world polls again.
pub fn poll_once<F: Future>(future: F) -> Option<F::Output> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

/// How one side of a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReceiverEnd {
    Completed,
    /// The blocks came back without success.
    Ended(String),
    /// The process is gone, and its memory with it.
    Died,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SenderEnd {
    Said(CommitOutcome),
    Died,
}

/// What a request is to be like.
#[derive(Clone)]
pub struct Plan {
    pub blocks: usize,
    pub deadline: Duration,
    /// From its start until the commit is asked for; `None` if it never is.
    pub commit_after: Option<Duration>,
    pub pushes_over: Duration,
    pub attempt: u32,
    pub layout: LayoutDigest,
    /// What the sender believes.
    pub sent_attempt: u32,
    pub sent_epoch: Epoch,
    /// The sender's own deadline.
    pub sent_deadline: Duration,
}

impl Plan {
    pub fn new(blocks: usize, rng: &mut StdRng) -> Self {
        let pushes_over = Duration::from_micros(rng.random_range(0..40_000));
        let deadline = Duration::from_secs(20);
        Self {
            blocks,
            deadline,
            commit_after: Some(pushes_over),
            pushes_over,
            attempt: 1,
            layout: LAYOUT,
            sent_attempt: 1,
            sent_epoch: EPOCH,
            sent_deadline: deadline,
        }
    }
}

/// One attempt of one request, on both sides.
pub struct Job {
    pub ticket: Ticket,
    pub transfer: Option<Arc<Transfer>>,
    sender: usize,
    plan: Plan,
    ordinals: Vec<u32>,
    pub source_blocks: Vec<u32>,
    pub destination_blocks: Vec<u32>,
    content: Vec<Vec<Vec<u8>>>,
    started: Instant,
    pushes: VecDeque<(Instant, u32, Vec<SourceBlock>)>,
    committed_at: Option<Instant>,
    /// A lane has opened the ticket.
    pub opened: bool,
    revoking: bool,
    pub receiver_end: Option<ReceiverEnd>,
    pub sender_end: Option<SenderEnd>,
    pub receiver_back: Option<Instant>,
    pub sender_back: Option<Instant>,
    /// When something happened after which the blocks of a side must be back by then.
    receiver_due: Option<Instant>,
    sender_due: Option<Instant>,
}

impl Job {
    pub fn is_over(&self) -> bool {
        self.receiver_back.is_some() && self.sender_back.is_some()
    }

    fn payload(&self) -> Bytes {
        Bytes::from(format!("first token of {:?}", self.source_blocks))
    }
}

/// What lies between the workers.
pub enum Fabric {
    Mem {
        network: Network,
        link: Link,
    },
    Tcp {
        port: Option<DataPort>,
        proxy: FaultProxy,
        leases: Leases,
    },
}

/// Times of the lanes over TCP.
#[derive(Clone, Copy)]
pub struct Leases {
    pub ping: Duration,
    pub silence: Duration,
    pub lease: Duration,
}

impl Leases {
    /// For runs that have to see a peer's death; a starved thread looks like one.
    pub const SHORT: Self = Self {
        ping: Duration::from_millis(50),
        silence: Duration::from_millis(250),
        lease: Duration::from_millis(400),
    };
    /// For runs in which nobody dies, however busy the machine is.
    pub const LONG: Self = Self {
        ping: Duration::from_millis(250),
        silence: Duration::from_secs(10),
        lease: Duration::from_secs(15),
    };
}

impl Fabric {
    fn now(&self) -> Instant {
        match self {
            Self::Mem { network, .. } => network.now(),
            Self::Tcp { .. } => Instant::now(),
        }
    }

    /// Tells that the workers did something.
    pub fn poke(&self) {
        if let Self::Mem { network, .. } = self {
            network.poke();
        }
    }

    /// Lets the lanes work, at most until then.
    fn step(&self, until: Instant) {
        match self {
            Self::Mem { network, .. } => drop(network.step(until)),
            Self::Tcp { .. } => {
                let left = until.saturating_duration_since(Instant::now());
                std::thread::sleep(left.min(Duration::from_millis(1)));
            }
        }
    }
}

struct Prefill {
    sender: Option<Sender>,
    session: SessionId,
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
    prefills: Vec<Prefill>,
    events: Arc<Mutex<Vec<Event>>>,
    pub address: SocketAddr,
    pub in_flight_parts_max: usize,
    lanes_per_peer: usize,
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
        let shape = (blocks, layers, part_bytes);
        let mut world = Self::shaped(seed, shape, protections);
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
        let network = Network::new(seed);
        let source = Pool::new(blocks, layers, part_bytes);
        let destination = Pool::new(blocks, layers, part_bytes);
        let address = SocketAddr::from(([127, 0, 0, 1], 7));
        let events: Arc<Mutex<Vec<Event>>> = Arc::default();
        let sink = Arc::clone(&events);
        let mut config = ReceiverConfig::new(EPOCH, LAYOUT, vec![destination.region()]);
        config.protections = protections;
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
        }
    }

    /// The same workers with real sockets, threads and time between them.
    pub fn over_tcp(seed: u64, leases: Leases) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let layers = rng.random_range(2..8);
        let part_bytes = rng.random_range(1..12_000);
        let (source, destination) = (
            Pool::new(80, layers, part_bytes),
            Pool::new(80, layers, part_bytes),
        );
        let events: Arc<Mutex<Vec<Event>>> = Arc::default();
        let sink = Arc::clone(&events);
        let mut config = ReceiverConfig::new(EPOCH, LAYOUT, vec![destination.region()]);
        config.resume_grace = leases.lease;
        let sink = Box::new(move |event| sink.lock().unwrap().push(event));
        let receiver = Receiver::start(config, sink).unwrap();
        let port = DataPortConfig {
            ping_interval: leases.ping,
            silence_max: leases.silence,
            hello_timeout: Duration::from_secs(10),
            ..DataPortConfig::default()
        };
        let port = DataPort::bind(port, receiver.clone()).unwrap();
        let proxy = FaultProxy::start(port.local_address()).unwrap();
        let in_flight_parts_max = rng.random_range(4..200);
        let mut world = Self {
            rng,
            address: proxy.address(),
            fabric: Fabric::Tcp {
                port: Some(port),
                proxy,
                leases,
            },
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
            Fabric::Tcp { .. } => panic!("not in memory"),
        }
    }

    /// The link over TCP.
    pub fn proxy(&self) -> &FaultProxy {
        match &self.fabric {
            Fabric::Tcp { proxy, .. } => proxy,
            Fabric::Mem { .. } => panic!("not over TCP"),
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
            Fabric::Tcp { leases, .. } => {
                config.transports = vec![TransportKind::Tcp];
                config.ping_interval = leases.ping;
                config.silence_max = leases.silence;
                config.reconnect_max = leases.lease;
                config.connect_timeout = leases.silence;
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
        self.open(sender, plan, ordinals, blocks, ticket, None)
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
            deadline: plan.deadline,
        };
        self.receiver
            .as_ref()
            .unwrap()
            .grant(request)
            .unwrap()
            .ticket
    }

    /// Opens a transfer for a ticket. `content` if the bytes are those of an older attempt.
    fn open(
        &mut self,
        sender: usize,
        plan: Plan,
        ordinals: Vec<u32>,
        blocks: Vec<u32>,
        ticket: Ticket,
        content: Option<Vec<Vec<Vec<u8>>>>,
    ) -> usize {
        let source_blocks = self.source.take(blocks.len(), &mut self.rng);
        let filled = self.source.fill(&source_blocks, &mut self.rng);
        let content = match content {
            None => filled,
            Some(content) => {
                self.source.write(&source_blocks, &content);
                content
            }
        };
        let receiver = self.receiver.as_ref().unwrap();
        let target = LaneTarget {
            data_address: Some(self.address),
            server_name: None,
            process_token: receiver.process_token(),
            lane_key: receiver.lane_key().clone(),
            ticket,
            epoch: plan.sent_epoch,
            attempt: Attempt(plan.sent_attempt),
            request_id: RequestId::from("r"),
            deadline: plan.sent_deadline,
        };
        let handle = self.prefills[sender].sender.as_ref().unwrap();
        let transfer = handle.open(target, plan.layout).unwrap();
        let started = self.now();
        let layers = self.source.layers;
        let mut pushes = VecDeque::new();
        let chunk = self.rng.random_range(1..=blocks.len().max(1));
        let count = layers as usize * blocks.len().div_ceil(chunk);
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
        self.jobs.push(Job {
            ticket,
            transfer: Some(Arc::new(transfer)),
            sender,
            plan,
            ordinals,
            source_blocks,
            destination_blocks: blocks,
            content,
            started,
            pushes,
            committed_at: None,
            opened: false,
            revoking: false,
            receiver_end: None,
            sender_end: None,
            receiver_back: None,
            sender_back: None,
            receiver_due: None,
            sender_due: None,
        });
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
                matches!(self.fabric, Fabric::Tcp { .. }),
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
                Some(self.open(sender, plan, ordinals, blocks, grant.ticket, content))
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
        if matches!(self.fabric, Fabric::Tcp { .. }) {
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
        }
        let now = self.now();
        for job in self.jobs.iter_mut().filter(|job| job.sender == sender) {
            job.pushes.clear();
            job.transfer = None;
            if job.sender_back.replace(now).is_none() {
                job.sender_end = Some(SenderEnd::Died);
                self.source.give(&job.source_blocks);
            }
        }
        self.prefills[sender].sender = None;
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
        }
    }

    /// Runs until `done`, or until every job is over or late.
    pub fn run(&mut self, mut done: impl FnMut(&mut Self) -> bool) {
        loop {
            self.turn();
            if self.jobs.iter().all(Job::is_over) || done(self) || !self.step(None) {
                return;
            }
        }
    }

    /// Runs until a point in time.
    pub fn run_to(&mut self, at: Instant) {
        loop {
            self.turn();
            if self.now() >= at || !self.step(Some(at)) {
                return;
            }
        }
    }

    /// Whatever the workers have to do now.
    fn turn(&mut self) {
        for index in 0..self.jobs.len() {
            self.prefill(index);
            self.decode(index);
        }
        self.hear();
    }

    /// One step of the network; false once the run is late.
    fn step(&mut self, until: Option<Instant>) -> bool {
        let over = |job: &Job| {
            let longest = job.plan.deadline.max(job.plan.sent_deadline);
            (!job.is_over()).then(|| job.started + longest + SLACK)
        };
        let late = self.jobs.iter().filter_map(over).min();
        let pushes = self.jobs.iter().filter_map(Self::next_word);
        let next = pushes.chain(late).chain(until).min();
        let next = next.unwrap_or_else(|| self.now() + Duration::from_secs(1));
        self.steps += 1;
        self.fabric.step(next);
        late.is_none_or(|late| self.now() < late)
    }

    /// When a worker of a prefill side has its next word.
    fn next_word(job: &Job) -> Option<Instant> {
        job.transfer.as_ref()?;
        match job.pushes.front() {
            Some((at, ..)) => Some(*at),
            None if job.committed_at.is_none() => Some(job.started + job.plan.commit_after?),
            None => None,
        }
    }

    fn prefill(&mut self, index: usize) {
        let now = self.fabric.now();
        let job = &mut self.jobs[index];
        let Some(transfer) = job.transfer.clone() else {
            return;
        };
        while job.pushes.front().is_some_and(|(at, ..)| *at <= now) {
            let Some((_, layer, blocks)) = job.pushes.front() else {
                break;
            };
            match poll_once(transfer.push(0, *layer, blocks)) {
                None => break,
                Some(Ok(())) => drop(job.pushes.pop_front()),
                Some(Err(_)) => job.pushes.clear(),
            }
            self.fabric.poke();
        }
        let due = job
            .plan
            .commit_after
            .is_some_and(|after| job.started + after <= now);
        if job.pushes.is_empty() && due && job.committed_at.is_none() {
            job.committed_at = Some(now);
            let payload = job.payload();
            let _ = poll_once(transfer.commit(payload));
            self.fabric.poke();
        }
        let Some(outcome) = transfer.try_outcome() else {
            return;
        };
        job.sender_end.get_or_insert(SenderEnd::Said(outcome));
        job.pushes.clear();
        if job.sender_back.is_none() && poll_once(transfer.quiesced()).is_some() {
            if transfer.may_be_read() {
                let text = format!("job {index}: quiet, but a lane may read");
                self.verdict.wrong.push(text);
            }
            job.sender_back = Some(now);
            job.transfer = None;
            self.source.give(&job.source_blocks);
            if job.sender_due.is_some_and(|due| now > due) {
                let late = now.duration_since(job.sender_due.unwrap_or(now));
                let text = format!("job {index}: source blocks back {late:?} late");
                self.verdict.hung.push(text);
            }
        }
    }

    fn decode(&mut self, index: usize) {
        let Some(receiver) = self.receiver.clone() else {
            return;
        };
        let job = &mut self.jobs[index];
        if job.receiver_back.is_some() {
            // A newer attempt has a ticket of its own.
            if receiver.may_be_written(job.ticket) {
                let text = format!("job {index}: its blocks are free, but a lane may write them");
                self.verdict.wrong.push(text);
            }
            return;
        }
        if !job.revoking {
            return;
        }
        match poll_once(receiver.revoke(job.ticket)) {
            None => {}
            Some(Some(Terminal::Fenced)) => {
                self.back(index, ReceiverEnd::Ended("revoked".to_owned()))
            }
            // The event of the other end comes, or came.
            Some(_) => job.revoking = false,
        }
        self.fabric.poke();
    }

    fn hear(&mut self) {
        let events = std::mem::take(&mut *self.events.lock().unwrap());
        for event in events {
            let of = |job: &Job| job.ticket == event.ticket;
            let Some(index) = self.jobs.iter().position(of) else {
                continue;
            };
            let end = match &event.what {
                EventKind::LaneLost => continue,
                EventKind::Started => {
                    self.jobs[index].opened = true;
                    continue;
                }
                EventKind::Completed { commit_payload, .. } => {
                    if *commit_payload != self.jobs[index].payload() {
                        let text = format!("job {index}: another commit's payload");
                        self.verdict.wrong.push(text);
                    }
                    self.compare(index);
                    ReceiverEnd::Completed
                }
                EventKind::Aborted { reason } => ReceiverEnd::Ended(format!("{reason:?}")),
                EventKind::Expired { reason } => ReceiverEnd::Ended(format!("{reason:?}")),
            };
            if self.receiver.is_some() {
                self.back(index, end);
            }
        }
    }

    /// Compares every part with what the prefill worker had.
    fn compare(&mut self, index: usize) {
        let job = &self.jobs[index];
        for (block, content) in job.destination_blocks.iter().zip(&job.content) {
            for (layer, bytes) in (0..).zip(content) {
                if self.destination.bytes(*block, layer) != *bytes {
                    let text = format!("job {index}: block {block}, layer {layer}: other bytes");
                    self.verdict.wrong.push(text);
                }
            }
        }
    }

    /// The receiver's side of a job has ended, and its blocks are the worker's.
    fn back(&mut self, index: usize, end: ReceiverEnd) {
        let now = self.now();
        let job = &mut self.jobs[index];
        if let Some(before) = &job.receiver_end {
            let text = format!("job {index} ended twice: {before:?}, then {end:?}");
            self.verdict.wrong.push(text);
            return;
        }
        if let Some(receiver) = &self.receiver
            && receiver.may_be_written(job.ticket)
        {
            let text = format!("job {index}: it ended, but a lane may write its blocks");
            self.verdict.wrong.push(text);
        }
        job.receiver_end = Some(end);
        job.receiver_back = Some(now);
        self.destination.give(&job.destination_blocks);
        if job.receiver_due.is_some_and(|due| now > due) {
            let late = now.duration_since(job.receiver_due.unwrap_or(now));
            let text = format!("job {index}: granted blocks back {late:?} late");
            self.verdict.hung.push(text);
        }
    }

    /// The end of a run whose outcome is that of job `main`.
    pub fn finish(mut self, main: usize) -> Verdict {
        self.run(|_| false);
        for (index, job) in self.jobs.iter().enumerate() {
            if !job.is_over() {
                self.verdict.hung.push(format!(
                    "job {index}: receiver {:?}, sender {:?}",
                    job.receiver_end, job.sender_end
                ));
            }
            let said_so = job.sender_end == Some(SenderEnd::Said(CommitOutcome::Committed));
            let is_so = job.receiver_end == Some(ReceiverEnd::Completed);
            let died = job.receiver_end == Some(ReceiverEnd::Died);
            let refused = matches!(
                job.sender_end,
                Some(SenderEnd::Said(CommitOutcome::Refused(_)))
            );
            if (said_so && !is_so && !died) || (is_so && refused) {
                self.verdict.wrong.push(format!(
                    "job {index}: the ends differ: receiver {:?}, sender {:?}",
                    job.receiver_end, job.sender_end
                ));
            }
        }
        self.settle();
        let job = &self.jobs[main];
        self.verdict.ending = match (&job.receiver_end, &job.sender_end) {
            (Some(ReceiverEnd::Completed), _) => Some(Ending::Right),
            (Some(receiver), Some(sender)) => {
                let receiver = match receiver {
                    ReceiverEnd::Ended(how) => how.as_str(),
                    _ => "died",
                };
                let sender = match sender {
                    SenderEnd::Said(CommitOutcome::Refused(refusal)) => format!("{refusal:?}"),
                    SenderEnd::Said(CommitOutcome::Aborted(_)) => "Aborted".to_owned(),
                    SenderEnd::Said(other) => format!("{other:?}"),
                    SenderEnd::Died => "died".to_owned(),
                };
                let receiver = receiver.split('(').next().unwrap_or_default();
                Some(Ending::Error(format!("{receiver}/{sender}")))
            }
            _ => None,
        };
        if let Fabric::Mem { network, .. } = &self.fabric {
            self.verdict.trace = network.trace();
        }
        self.verdict
    }

    /// Once every job is over: nothing is left in any table or pool.
    fn settle(&mut self) {
        let mut wait = self.now();
        let until = wait + Duration::from_secs(3);
        let open = |world: &Self| {
            let senders = world
                .prefills
                .iter()
                .filter_map(|prefill| prefill.sender.as_ref());
            let transfers: usize = senders.map(Sender::transfers_open).sum();
            let grants = world.receiver.as_ref().map_or(0, Receiver::grants_live);
            (transfers, grants)
        };
        // Dark links keep senders from saying their last words.
        while open(self) != (0, 0) && wait < until {
            wait += Duration::from_millis(50);
            self.run_to(wait);
        }
        let (transfers, grants) = open(self);
        if (transfers, grants) != (0, 0) {
            let text = format!("{transfers} transfers and {grants} grants are left");
            self.verdict.leaked.push(text);
        }
        let used = (self.source.used(), self.destination.used());
        if used != (0, 0) {
            let text = format!("{} source and {} granted blocks are left", used.0, used.1);
            self.verdict.leaked.push(text);
        }
        self.hear();
        for pool in [&self.source, &self.destination] {
            self.verdict.wrong.extend(pool.trespasses());
        }
    }
}
