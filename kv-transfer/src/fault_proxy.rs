//! A TCP proxy that hurts a data lane on purpose, for tests.
//!
//! It sits between a sender and a data port and understands just enough of the
//! lane (the fixed hello, then frames) to lose, repeat, swap, damage or cut at a
//! chosen frame. Behind the feature `test-support`; production code never uses it.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::codec::hello::{HELLO_BYTES, PROOF_BYTES};
use crate::codec::{HEADER_BYTES, Header, Kind};
use crate::wake::lock;

/// Something that happens once to bytes from the sender. Data frames are counted
/// from 0 over the proxy's life, repeats included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The data frame never arrives.
    DropData(u64),
    /// The data frame arrives twice.
    RepeatData(u64),
    /// The data frame arrives after the next frame, if that is a data frame as well.
    SwapData(u64),
    /// One bit of the frame's payload is wrong.
    DamagePayload(u64),
    /// One bit of the frame's header is wrong.
    DamageHeader(u64),
    /// The last byte of the frame never arrives, what follows does.
    TruncateData(u64),
    /// The connection ends one byte before the frame's end.
    CutInData(u64),
    /// The connection ends right after the frame.
    CutAfterData(u64),
    /// The last data frame before a commit never arrives.
    DropLastData,
    /// The connection ends one byte before the end of the last data frame before a commit.
    CutInLastData,
    /// Every byte after this frame is held back until [`FaultProxy::release`].
    HoldAfterData(u64),
    /// Bytes are held back in the middle of this frame until [`FaultProxy::release`].
    HoldInData(u64),
    /// The commit never arrives.
    DropCommit,
    /// The commit arrives twice.
    RepeatCommit,
    /// The connection ends instead of the commit.
    CutBeforeCommit,
    /// The connection ends right after the commit went through.
    CutAfterCommit,
}

struct State {
    upstream: SocketAddr,
    faults: Mutex<Vec<Fault>>,
    data_frames: AtomicU64,
    bytes: AtomicU64,
    connections: AtomicU64,
    held: AtomicBool,
    refusing: AtomicBool,
    stopping: AtomicBool,
    /// Zero: as fast as it goes.
    bytes_per_second: AtomicU64,
    open: Mutex<Vec<TcpStream>>,
}

/// A proxy in front of one data port. Dropping it ends every connection.
pub struct FaultProxy {
    address: SocketAddr,
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

impl FaultProxy {
    /// A proxy on a fresh loopback port.
    ///
    /// # Errors
    /// Whatever the operating system says.
    pub fn start(upstream: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let state = Arc::new(State {
            upstream,
            faults: Mutex::default(),
            data_frames: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            held: AtomicBool::new(false),
            refusing: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            bytes_per_second: AtomicU64::new(0),
            open: Mutex::default(),
        });
        let accepting = Arc::clone(&state);
        let thread = std::thread::spawn(move || accept(&listener, &accepting));
        Ok(Self {
            address,
            state,
            thread: Some(thread),
        })
    }

    /// Where senders connect to instead of the data port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Adds a fault; each happens once.
    pub fn inject(&self, fault: Fault) {
        lock(&self.state.faults).push(fault);
    }

    /// Takes back the faults that have not happened.
    pub fn forget(&self) {
        lock(&self.state.faults).clear();
    }

    /// Whether every injected fault has happened.
    pub fn is_spent(&self) -> bool {
        lock(&self.state.faults).is_empty()
    }

    /// Holds back every byte from now on, in both directions.
    pub fn hold(&self) {
        self.state.held.store(true, Ordering::Relaxed);
    }

    /// Lets held bytes go.
    pub fn release(&self) {
        self.state.held.store(false, Ordering::Relaxed);
    }

    /// Whether bytes are being held back.
    pub fn is_holding(&self) -> bool {
        self.state.held.load(Ordering::Relaxed)
    }

    /// Bounds the rate of bytes from the sender; 0 lifts the bound.
    pub fn throttle(&self, bytes_per_second: u64) {
        self.state
            .bytes_per_second
            .store(bytes_per_second, Ordering::Relaxed);
    }

    /// Ends every open connection; later ones work.
    pub fn cut(&self) {
        for stream in lock(&self.state.open).drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Closes new connections at once, or stops doing so.
    pub fn refuse(&self, refusing: bool) {
        self.state.refusing.store(refusing, Ordering::Relaxed);
    }

    /// Bytes that have gone from senders to the port.
    pub fn bytes(&self) -> u64 {
        self.state.bytes.load(Ordering::Relaxed)
    }

    /// Data frames that senders have sent.
    pub fn data_frames(&self) -> u64 {
        self.state.data_frames.load(Ordering::Relaxed)
    }

    /// Connections taken so far.
    pub fn connections(&self) -> u64 {
        self.state.connections.load(Ordering::Relaxed)
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.state.stopping.store(true, Ordering::Relaxed);
        self.cut();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn accept(listener: &TcpListener, state: &Arc<State>) {
    let mut threads: Vec<JoinHandle<()>> = Vec::new();
    while !state.stopping.load(Ordering::Relaxed) {
        match listener.accept() {
            Ok((sender, _)) if !state.refusing.load(Ordering::Relaxed) => {
                state.connections.fetch_add(1, Ordering::Relaxed);
                if let Ok(pair) = connect(sender, state) {
                    threads.extend(pair);
                }
            }
            Ok(_) => {}
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    let cut = std::mem::take(&mut *lock(&state.open));
    cut.iter()
        .for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
    threads.into_iter().for_each(|thread| drop(thread.join()));
}

fn connect(sender: TcpStream, state: &Arc<State>) -> io::Result<[JoinHandle<()>; 2]> {
    sender.set_nonblocking(false)?;
    sender.set_nodelay(true)?;
    let port = TcpStream::connect(state.upstream)?;
    port.set_nodelay(true)?;
    lock(&state.open).extend([sender.try_clone()?, port.try_clone()?]);
    let (forth, back) = (Arc::clone(state), Arc::clone(state));
    let (sender_two, port_two) = (sender.try_clone()?, port.try_clone()?);
    Ok([
        std::thread::spawn(move || {
            let _ = forward(&sender, &port, &forth);
            let _ = sender.shutdown(Shutdown::Both);
            let _ = port.shutdown(Shutdown::Both);
        }),
        std::thread::spawn(move || {
            let _ = replies(&port_two, &sender_two, &back);
            let _ = sender_two.shutdown(Shutdown::Both);
            let _ = port_two.shutdown(Shutdown::Both);
        }),
    ])
}

fn replies(mut port: &TcpStream, mut sender: &TcpStream, state: &State) -> io::Result<()> {
    let mut buffer = [0; 4096];
    loop {
        let got = port.read(&mut buffer)?;
        if got == 0 {
            return Ok(());
        }
        state.wait_released();
        sender.write_all(&buffer[..got])?;
    }
}

/// Copies frames from the sender to the port, with the faults applied.
fn forward(mut sender: &TcpStream, port: &TcpStream, state: &State) -> io::Result<()> {
    for len in [HELLO_BYTES, PROOF_BYTES] {
        let mut message = vec![0; len];
        sender.read_exact(&mut message)?;
        state.write(port, &message)?;
    }
    let mut late: Option<Vec<u8>> = None;
    // A frame of which the next one tells whether it was the last.
    let mut maybe_last: Option<(u64, Vec<u8>)> = None;
    loop {
        let mut frame = vec![0; HEADER_BYTES];
        sender.read_exact(&mut frame)?;
        let header = Header::decode(frame.first_chunk().expect("a header's bytes"))
            .map_err(|error| io::Error::other(error.to_string()))?;
        frame.resize(HEADER_BYTES + header.payload_len as usize, 0);
        sender.read_exact(&mut frame[HEADER_BYTES..])?;
        match header.kind {
            Kind::Data => {
                let number = state.data_frames.fetch_add(1, Ordering::Relaxed);
                if let Some((before, frame)) = maybe_last.take() {
                    data(port, state, before, frame)?;
                }
                if state.hurts_the_last() {
                    maybe_last = Some((number, frame));
                    continue;
                }
                if state.take(Fault::SwapData(number)) {
                    late = Some(frame);
                    continue;
                }
                data(port, state, number, frame)?;
            }
            Kind::Commit => {
                if let Some((_, frame)) = maybe_last.take() {
                    if state.take(Fault::CutInLastData) {
                        state.write(port, &frame[..frame.len() - 1])?;
                        return Ok(());
                    }
                    if !state.take(Fault::DropLastData) {
                        state.write(port, &frame)?;
                    }
                }
                if state.take(Fault::CutBeforeCommit) {
                    return Ok(());
                }
                if !state.take(Fault::DropCommit) {
                    if state.take(Fault::RepeatCommit) {
                        state.write(port, &frame)?;
                    }
                    state.write(port, &frame)?;
                }
                if state.take(Fault::CutAfterCommit) {
                    // The port gets time to act; its answer is lost with the connection.
                    state.hold_for(Duration::from_millis(50));
                    return Ok(());
                }
            }
            _ => state.write(port, &frame)?,
        }
        if let Some(late) = late.take() {
            state.write(port, &late)?;
        }
    }
}

fn data(port: &TcpStream, state: &State, number: u64, mut frame: Vec<u8>) -> io::Result<()> {
    if state.take(Fault::DropData(number)) {
        return Ok(());
    }
    if state.take(Fault::RepeatData(number)) {
        state.write(port, &frame)?;
    }
    if state.take(Fault::DamagePayload(number)) {
        let middle = HEADER_BYTES + (frame.len() - HEADER_BYTES) / 2;
        frame[middle] ^= 0x10;
    }
    if state.take(Fault::DamageHeader(number)) {
        frame[44] ^= 0x01;
    }
    if state.take(Fault::TruncateData(number)) {
        frame.pop();
    }
    if state.take(Fault::CutInData(number)) {
        state.write(port, &frame[..frame.len() - 1])?;
        return Err(io::ErrorKind::ConnectionAborted.into());
    }
    if state.take(Fault::HoldInData(number)) {
        let middle = frame.len() / 2;
        state.write(port, &frame[..middle])?;
        state.held.store(true, Ordering::Relaxed);
        return state.write(port, &frame[middle..]);
    }
    state.write(port, &frame)?;
    if state.take(Fault::CutAfterData(number)) {
        return Err(io::ErrorKind::ConnectionAborted.into());
    }
    if state.take(Fault::HoldAfterData(number)) {
        state.held.store(true, Ordering::Relaxed);
    }
    Ok(())
}

impl State {
    fn take(&self, fault: Fault) -> bool {
        let mut faults = lock(&self.faults);
        let found = faults.iter().position(|pending| *pending == fault);
        found.map(|index| faults.swap_remove(index)).is_some()
    }

    fn hurts_the_last(&self) -> bool {
        let faults = lock(&self.faults);
        faults.contains(&Fault::DropLastData) || faults.contains(&Fault::CutInLastData)
    }

    fn wait_released(&self) {
        while self.held.load(Ordering::Relaxed) && !self.stopping.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn hold_for(&self, time: Duration) {
        self.held.store(true, Ordering::Relaxed);
        std::thread::sleep(time);
        self.held.store(false, Ordering::Relaxed);
    }

    /// Writes in small pieces, so that holding and throttling act inside frames too.
    fn write(&self, mut port: &TcpStream, bytes: &[u8]) -> io::Result<()> {
        for piece in bytes.chunks(16 << 10) {
            let rate = self.bytes_per_second.load(Ordering::Relaxed);
            if rate > 0 {
                std::thread::sleep(Duration::from_secs_f64(piece.len() as f64 / rate as f64));
            }
            self.wait_released();
            port.write_all(piece)?;
            self.bytes.fetch_add(piece.len() as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}
