//! A link of the world in memory: how fast it is, what it does to frames, and whether
//! it is there at all.

use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::stream::{MemStream, Pipe};
use crate::codec::{HEADER_BYTES, Header, Kind};
use crate::environment::Environment;
use crate::wake::lock;

/// Which way a frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the sender to the receiver.
    Forth,
    Back,
}

/// Which frame a fault waits for. Frames are counted from 0 over the link's life,
/// repeats included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A data frame.
    Data(u64),
    /// The next frame of a kind, or, counting on, the one after so many of them.
    Control(Kind, u64),
}

/// What happens to it, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hurt {
    Drop,
    /// It arrives twice in a row.
    Duplicate,
    /// It arrives once more after so many frames that follow it.
    Echo(u32),
    /// It arrives after the frame that follows it.
    Swap,
    /// Its last bytes are missing, and the next frame follows.
    Truncate,
    /// The connection ends inside it.
    CutInside,
    /// The connection ends behind it.
    CutAfter,
    /// A bit of its payload (counted modulo its length) is wrong.
    FlipPayload(u32),
    /// A bit of its header is wrong.
    FlipHeader(u32),
    /// It names another epoch, under a right checksum.
    OtherEpoch,
    /// It names another attempt, under a right checksum.
    OtherAttempt,
    /// Half of it arrives; the rest, and what follows on this connection, when the
    /// link is released.
    HoldInside,
    /// What follows on this connection arrives when the link is released.
    HoldAfter,
}

/// A fault that waits for its frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    pub direction: Direction,
    pub frame: Frame,
    pub hurt: Hurt,
}

/// How fast a link is.
#[derive(Clone, Copy, Debug)]
pub struct Conditions {
    pub latency: Duration,
    /// At most this much is added to the latency of each piece; order is kept.
    pub jitter: Duration,
    pub bytes_per_second: u64,
    /// Bytes each direction of a connection takes without their being read.
    pub buffer: usize,
}

impl Default for Conditions {
    fn default() -> Self {
        Self {
            latency: Duration::from_micros(50),
            jitter: Duration::from_micros(20),
            bytes_per_second: 1 << 30,
            buffer: 256 << 10,
        }
    }
}

/// What an end of a connection is about to do when a probe is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The receiver's end reads; a payload, under the write guard.
    Reading,
    /// The sender's end writes, under the read guards of what it writes.
    Sending,
}

type Probe = Arc<dyn Fn(Moment) + Send + Sync>;

struct State {
    conditions: Conditions,
    rng: StdRng,
    faults: Vec<Fault>,
    /// Frames seen, by direction and kind.
    seen: Vec<(Direction, Kind, u64)>,
    data_bytes: u64,
    connections: u64,
    dark: bool,
    refusing: bool,
    pipes: Vec<Weak<Mutex<Pipe>>>,
    probe: Option<Probe>,
}

/// One link. Cheap to clone.
#[derive(Clone)]
pub struct Link {
    pub(super) environment: Environment,
    state: Arc<Mutex<State>>,
}

impl Link {
    pub(super) fn new(seed: u64, environment: Environment) -> Self {
        Self {
            environment,
            state: Arc::new(Mutex::new(State {
                conditions: Conditions::default(),
                rng: StdRng::seed_from_u64(seed),
                faults: Vec::new(),
                seen: Vec::new(),
                data_bytes: 0,
                connections: 0,
                dark: false,
                refusing: false,
                pipes: Vec::new(),
                probe: None,
            })),
        }
    }

    /// Changes the speed for everything that leaves from now on.
    pub fn set(&self, conditions: Conditions) {
        lock(&self.state).conditions = conditions;
    }

    /// Adds a fault.
    pub fn inject(&self, fault: Fault) {
        lock(&self.state).faults.push(fault);
    }

    /// Whether every fault has happened.
    pub fn is_spent(&self) -> bool {
        lock(&self.state).faults.is_empty()
    }

    /// Frames of a kind that went that way, as they came from their sender.
    pub fn frames(&self, direction: Direction, kind: Kind) -> u64 {
        let state = lock(&self.state);
        let of = |seen: &&(Direction, Kind, u64)| (seen.0, seen.1) == (direction, kind);
        state.seen.iter().find(of).map_or(0, |seen| seen.2)
    }

    /// Payload bytes of data frames that came from senders.
    pub fn data_bytes(&self) -> u64 {
        lock(&self.state).data_bytes
    }

    /// Connections made so far.
    pub fn connections(&self) -> u64 {
        lock(&self.state).connections
    }

    /// Nothing arrives, either way, and connecting times out; or all of that ends, and
    /// what was under way arrives.
    pub fn darken(&self, dark: bool) {
        lock(&self.state).dark = dark;
    }

    pub(super) fn is_dark(&self) -> bool {
        lock(&self.state).dark
    }

    /// Refuses connections, or stops doing so.
    pub fn refuse(&self, refusing: bool) {
        lock(&self.state).refusing = refusing;
    }

    pub(super) fn is_refusing(&self) -> bool {
        lock(&self.state).refusing
    }

    /// Ends every connection; what is under way is lost.
    pub fn cut(&self) {
        self.pipes().iter().for_each(|pipe| lock(pipe).reset());
    }

    /// The hosts at its ends no longer know the present connections: what is under way is
    /// lost, nothing comes over them any more, and nobody is told.
    pub fn lose(&self) {
        self.pipes().iter().for_each(|pipe| lock(pipe).lose());
    }

    /// Lets everything go that a fault held back.
    pub fn release(&self) {
        for pipe in self.pipes() {
            let pieces = lock(&pipe).release();
            pieces
                .into_iter()
                .for_each(|piece| self.deliver(&pipe, piece));
        }
    }

    /// Whether a fault holds bytes back.
    pub fn is_holding(&self) -> bool {
        self.pipes().iter().any(|pipe| lock(pipe).is_held())
    }

    /// Calls `probe` whenever an end reads or writes; it must not call the link.
    pub fn watch(&self, probe: impl Fn(Moment) + Send + Sync + 'static) {
        lock(&self.state).probe = Some(Arc::new(probe));
    }

    pub(super) fn probe(&self, moment: Moment) {
        let probe = lock(&self.state).probe.clone();
        if let Some(probe) = probe {
            probe(moment);
        }
    }

    pub(super) fn connect(&self) -> (MemStream, MemStream) {
        let (forth, back) = (Arc::default(), Arc::default());
        let mut state = lock(&self.state);
        state.connections += 1;
        state.pipes.retain(|pipe| pipe.strong_count() > 0);
        state.pipes.push(Arc::downgrade(&forth));
        state.pipes.push(Arc::downgrade(&back));
        MemStream::pair(self.clone(), forth, back)
    }

    fn pipes(&self) -> Vec<Arc<Mutex<Pipe>>> {
        let state = lock(&self.state);
        state.pipes.iter().filter_map(Weak::upgrade).collect()
    }

    /// When the next bytes under way arrive, if that is later than `now`.
    pub(super) fn next_arrival(&self, now: Instant) -> Option<Instant> {
        if self.is_dark() {
            return None;
        }
        let pipes = self.pipes();
        let arrivals = pipes.iter().filter_map(|pipe| lock(pipe).arrival());
        arrivals.filter(|at| *at > now).min()
    }

    /// A number in `0..=max`.
    pub(super) fn draw(&self, max: usize) -> usize {
        lock(&self.state).rng.random_range(0..=max)
    }

    pub(super) fn buffer(&self) -> usize {
        lock(&self.state).conditions.buffer
    }

    /// A whole frame has left an end.
    pub(super) fn frame(&self, direction: Direction, pipe: &Mutex<Pipe>, mut bytes: Vec<u8>) {
        let hurts = self.hurts(direction, &bytes);
        let late = lock(pipe).take_due();
        let mut then: Option<Hurt> = None;
        let mut copies = 1;
        for hurt in hurts {
            match hurt {
                Hurt::Drop => copies = 0,
                Hurt::Duplicate => copies = 2,
                Hurt::Echo(after) => lock(pipe).keep_for(after, bytes.clone()),
                Hurt::Swap => {
                    lock(pipe).keep_for(1, bytes.clone());
                    copies = 0;
                }
                Hurt::Truncate => {
                    let cut = 1 + self.draw((bytes.len() - 1).min(200) - 1);
                    bytes.truncate(bytes.len() - cut);
                }
                Hurt::FlipPayload(bit) => {
                    let len = bytes.len() - HEADER_BYTES;
                    if len > 0 {
                        let bit = bit as usize % (len * 8);
                        bytes[HEADER_BYTES + bit / 8] ^= 1 << (bit % 8);
                    }
                }
                Hurt::FlipHeader(bit) => {
                    let bit = bit as usize % (HEADER_BYTES * 8);
                    bytes[bit / 8] ^= 1 << (bit % 8);
                }
                Hurt::OtherEpoch => rename(&mut bytes, |header| header.scope.epoch.0 ^= 1),
                Hurt::OtherAttempt => rename(&mut bytes, |header| header.scope.attempt.0 += 1),
                Hurt::CutInside => {
                    bytes.truncate(bytes.len() / 2);
                    then = Some(hurt);
                }
                Hurt::CutAfter | Hurt::HoldAfter | Hurt::HoldInside => then = Some(hurt),
            }
        }
        if then == Some(Hurt::HoldInside) {
            let rest = bytes.split_off(bytes.len() / 2);
            self.deliver(pipe, bytes);
            lock(pipe).hold();
            self.deliver(pipe, rest);
        } else {
            for _ in 0..copies {
                self.deliver(pipe, bytes.clone());
            }
            match then {
                Some(Hurt::HoldAfter) => lock(pipe).hold(),
                Some(_) => lock(pipe).end(),
                None => {}
            }
        }
        late.into_iter().for_each(|bytes| self.deliver(pipe, bytes));
    }

    /// Counts a frame and takes what is to happen to it.
    fn hurts(&self, direction: Direction, bytes: &[u8]) -> Vec<Hurt> {
        let Some(Ok(header)) = bytes.first_chunk().map(Header::decode) else {
            return Vec::new();
        };
        let mut state = lock(&self.state);
        let kind = header.kind;
        if kind == Kind::Data {
            state.data_bytes += u64::from(header.payload_len);
        }
        let of = |seen: &&mut (Direction, Kind, u64)| (seen.0, seen.1) == (direction, kind);
        let number = match state.seen.iter_mut().find(of) {
            Some(seen) => {
                seen.2 += 1;
                seen.2 - 1
            }
            None => {
                state.seen.push((direction, kind, 1));
                0
            }
        };
        let frame = match kind {
            Kind::Data => Frame::Data(number),
            kind => Frame::Control(kind, number),
        };
        let due = |fault: &Fault| (fault.direction, fault.frame) == (direction, frame);
        let hurts = state.faults.iter().filter(|f| due(f)).map(|f| f.hurt);
        let hurts = hurts.collect();
        state.faults.retain(|fault| !due(fault));
        hurts
    }

    /// Sends bytes on their way, in pieces that arrive one after the other.
    fn deliver(&self, pipe: &Mutex<Pipe>, mut bytes: Vec<u8>) {
        let mut state = lock(&self.state);
        let conditions = state.conditions;
        let mut pipe = lock(pipe);
        while !bytes.is_empty() {
            let most = bytes.len().min(64 << 10);
            let len = if state.rng.random_bool(0.3) {
                state.rng.random_range(1..=most)
            } else {
                most
            };
            let rest = bytes.split_off(len);
            let jitter = conditions.jitter.mul_f64(state.rng.random_range(0.0..1.0));
            let nanos = len as u64 * 1_000_000_000 / conditions.bytes_per_second.max(1);
            let now = self.environment.now();
            let flight = conditions.latency + jitter;
            pipe.queue(
                std::mem::replace(&mut bytes, rest),
                now,
                Duration::from_nanos(nanos),
                flight,
            );
        }
    }
}

/// Changes a header and makes its checksum right again.
fn rename(bytes: &mut [u8], change: impl FnOnce(&mut Header)) {
    if let Some(Ok(mut header)) = bytes.first_chunk().map(Header::decode) {
        change(&mut header);
        bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
    }
}
