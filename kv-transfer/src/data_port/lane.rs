//! The receiver's end of a TCP lane: one thread that reads straight into blocks.
//!
//! A frame's payload and the next frame's header come in by one `readv` (inside TLS, by
//! one copy out of what was decrypted). Replies
//! and pings leave between reads, so that neither needs a thread of its own.

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use baton_proto::kv_layout::ByteExtent;

use super::DataPortConfig;
use crate::codec::{Control, HEADER_BYTES, Header, Kind, PAYLOAD_BYTES_MAX, Scope};
use crate::error::Error;
use crate::nixl::pull::{self, Pulled, Puller, STAGING_BYTES, Times};
use crate::nixl::{Lend, NixlLibrary};
use crate::part::PartRange;
use crate::receiver::incoming::{Incoming, SCRATCH_BYTES};
use crate::receiver::lane::ReceiverLane;
use crate::sender::TransportKind;
use crate::shared_memory::PeerMemory;
use crate::transport::heard_despite_sleep;
use crate::transport::stream::{Filled, LaneStream};

/// Reads in a row before replies and timers get their turn.
const READS_MAX: usize = 16;
/// Encoded replies that wait for the socket; more stay in the (bounded) outbox.
const REPLY_BYTES: usize = 64 << 10;

enum Reading {
    Header,
    Control {
        header: Header,
        payload: Vec<u8>,
        got: usize,
    },
    Data(Box<Incoming>),
}

/// What is to be done after [`PortLane::turn`].
pub(crate) enum Turn {
    /// Another turn: there may be more to read or to say.
    Again,
    /// Nothing until bytes come, something is to be said, or the time is there.
    Wait { until: Instant },
}

pub(crate) struct PortLane {
    stream: LaneStream,
    receiver: ReceiverLane,
    ping_interval: Duration,
    silence_max: Duration,
    heard_at: Instant,
    pinged_at: Instant,
    turned_at: Instant,
    /// What the sender has lent: what came with its first ping.
    lent: Option<PeerMemory>,
    /// Reads what the sender lends over NIXL; `None` until it does.
    puller: Option<Puller>,
    nixl: Option<NixlLibrary>,
    reading: Reading,
    header: [u8; HEADER_BYTES],
    header_got: usize,
    scratch: Vec<u8>,
    replies: Vec<u8>,
    replies_sent: usize,
}

impl PortLane {
    pub(crate) fn new(stream: LaneStream, receiver: ReceiverLane, config: &DataPortConfig) -> Self {
        let now = receiver.now();
        Self {
            heard_at: now,
            pinged_at: now,
            turned_at: now,
            stream,
            receiver,
            ping_interval: config.ping_interval,
            silence_max: config.silence_max,
            lent: None,
            puller: None,
            nixl: config.nixl.clone(),
            reading: Reading::Header,
            header: [0; HEADER_BYTES],
            header_got: 0,
            scratch: vec![0; SCRATCH_BYTES],
            replies: Vec::new(),
            replies_sent: 0,
        }
    }

    /// Serves the lane until it breaks, goes silent or `stopping` is set.
    pub(super) fn serve(&mut self, stopping: &AtomicBool) -> Result<(), Error> {
        while !stopping.load(Ordering::Relaxed) {
            let Turn::Wait { until } = self.turn(READS_MAX)? else {
                continue;
            };
            let flags = self.stream.interest(self.replies_sent < self.replies.len());
            let socket = self.stream.socket().map(|s| (s, flags));
            let timeout = until.saturating_duration_since(self.receiver.now());
            let bell = self.receiver.outbox().bell();
            bell.park(socket.as_slice(), timeout)
                .map_err(|error| Error::io("wait for the lane", error))?;
        }
        Ok(())
    }

    /// Reads up to `reads_max` times, says what there is to say, and looks at the time.
    /// Never blocks.
    ///
    /// # Errors
    /// Any: the lane is gone.
    pub(crate) fn turn(&mut self, reads_max: usize) -> Result<Turn, Error> {
        // Before the reads: a thread that slept since then has not heard what came
        // meanwhile, and must not take that for silence.
        let now = self.receiver.now();
        self.heard_at = heard_despite_sleep(self.heard_at, self.turned_at, now, self.ping_interval);
        self.turned_at = now;
        let mut reads = 0;
        while reads < reads_max && self.read()? {
            reads += 1;
        }
        if reads > 0 {
            self.heard_at = now;
        }
        self.receiver.heard(self.heard_at);
        let pulled = match &mut self.puller {
            Some(puller) => puller.turn(&mut self.receiver, &mut self.scratch, now)?,
            None => Pulled::Idle,
        };
        if reads < reads_max {
            self.receiver.idle();
        }
        self.reply()?;
        if reads == 0 && now.duration_since(self.heard_at) >= self.silence_max {
            return Err(Error::PeerLost("the sender has gone silent".to_owned()));
        }
        let ping_at = self.pinged_at + self.ping_interval;
        if ping_at <= now {
            self.pinged_at = now;
            self.receiver.outbox().push(Scope::LANE, Control::Ping);
            return Ok(Turn::Again);
        }
        if reads == reads_max || pulled == Pulled::Moved {
            return Ok(Turn::Again);
        }
        let mut until = ping_at.min(self.heard_at + self.silence_max);
        if let Pulled::Look(after) = pulled {
            until = until.min(now + after);
        }
        Ok(Turn::Wait { until })
    }

    /// One non-blocking read; false if nothing is there.
    fn read(&mut self) -> Result<bool, Error> {
        // Outside the write guard: under it, bytes inside TLS are only copied.
        match self.stream.fill() {
            Ok(Filled::Ready) => {}
            Ok(Filled::Partial) => return Ok(true),
            Ok(Filled::Nothing) => return Ok(false),
            Err(error) => return Err(Error::io("read from the lane", error)),
        }
        let got = match &mut self.reading {
            Reading::Header => {
                let got = self.stream.read(&mut self.header[self.header_got..]);
                got.inspect(|got| self.header_got += got)
            }
            Reading::Control { payload, got, .. } => {
                let rest = &mut payload[*got..];
                let left = rest.len();
                let mut buffers = [IoSliceMut::new(rest), IoSliceMut::new(&mut self.header)];
                let brought = self.stream.read_vectored(&mut buffers);
                brought.inspect(|brought| {
                    *got += left.min(*brought);
                    self.header_got = brought.saturating_sub(left);
                })
            }
            Reading::Data(incoming) => {
                let stream = &mut self.stream;
                let brought = incoming.read(&mut self.scratch, &mut self.header, |buffers| {
                    stream.read_vectored(buffers)
                });
                brought.map(|brought| {
                    self.header_got = brought.extra;
                    brought.payload + brought.extra
                })
            }
        };
        match got {
            Ok(0) => Err(Error::io(
                "read from the lane",
                io::ErrorKind::UnexpectedEof,
            )),
            Ok(_) => self.advance().map(|()| true),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) =>
            {
                Ok(false)
            }
            Err(error) => Err(Error::io("read from the lane", error)),
        }
    }

    /// Handles whatever is whole now.
    fn advance(&mut self) -> Result<(), Error> {
        loop {
            match std::mem::replace(&mut self.reading, Reading::Header) {
                Reading::Header => {
                    if self.header_got < HEADER_BYTES {
                        return Ok(());
                    }
                    self.header_got = 0;
                    let header = Header::decode(&self.header)?;
                    self.reading = if header.kind == Kind::Data {
                        Reading::Data(Box::new(self.receiver.data(header)?))
                    } else {
                        let payload = vec![0; header.payload_len as usize];
                        Reading::Control {
                            header,
                            payload,
                            got: 0,
                        }
                    };
                    // A control frame without payload is whole already.
                    if header.payload_len > 0 {
                        return Ok(());
                    }
                }
                Reading::Control {
                    header,
                    payload,
                    got,
                } => {
                    if got < payload.len() {
                        self.reading = Reading::Control {
                            header,
                            payload,
                            got,
                        };
                        return Ok(());
                    }
                    let control = Control::decode(&header, &payload)?;
                    match control {
                        Control::Offer {
                            range,
                            crc,
                            extents,
                        } => self.offer(header.scope, range, crc, &extents)?,
                        Control::Lend(lend) => self.lend(lend)?,
                        control => self.hear(header.scope, control)?,
                    }
                }
                Reading::Data(incoming) => {
                    if !incoming.is_whole() {
                        self.reading = Reading::Data(incoming);
                        return Ok(());
                    }
                    self.receiver.finish(*incoming);
                }
            }
        }
    }

    fn hear(&mut self, scope: Scope, control: Control) -> Result<(), Error> {
        if control == Control::Ping {
            self.map_lent()?;
        }
        let control = match &mut self.puller {
            Some(puller) => puller.hear(scope, control, self.receiver.now())?,
            None => Some(control),
        };
        match control {
            Some(control) => self.receiver.control(scope, control),
            None => Ok(()),
        }
    }

    /// Finds out whether what the sender lends can be read, and says so.
    fn lend(&mut self, lend: Lend) -> Result<(), Error> {
        let Some(library) = self.nixl.take() else {
            return Err(Error::Protocol(
                "a sender lends over NIXL, twice or unasked".to_owned(),
            ));
        };
        pull::check(&lend)?;
        let times = Times {
            ping_interval: self.ping_interval,
            silence_max: self.silence_max,
        };
        let bytes = match Puller::open(&library, lend, times, self.receiver.now()) {
            Ok(puller) => {
                self.puller = Some(puller);
                self.receiver.set_transport(TransportKind::Nixl);
                STAGING_BYTES as u64
            }
            Err(error) => {
                tracing::warn!(%error, "a sender's memory cannot be read over nixl");
                0
            }
        };
        self.receiver
            .outbox()
            .push(Scope::LANE, Control::Lent { bytes });
        Ok(())
    }

    /// Maps what came with a ping; the answer to it says that this went well.
    fn map_lent(&mut self) -> Result<(), Error> {
        if self.lent.is_none() {
            let fds = self.stream.take_fds();
            if !fds.is_empty() {
                let lent = PeerMemory::map(&fds);
                let failed = |error| Error::io("map the sender's memory", error);
                self.lent = Some(lent.map_err(failed)?);
            }
        }
        Ok(())
    }

    /// A data frame whose payload lies in the sender's memory.
    fn offer(
        &mut self,
        scope: Scope,
        range: PartRange,
        crc: u32,
        extents: &[ByteExtent],
    ) -> Result<(), Error> {
        if let Some(puller) = &mut self.puller {
            return puller.offer(scope, range, crc, extents, self.receiver.now());
        }
        let lent = self
            .lent
            .as_ref()
            .filter(|lent| extents.iter().all(|e| lent.holds(*e)));
        let bytes: u64 = extents.iter().map(|extent| u64::from(extent.len)).sum();
        let payload_len = u32::try_from(bytes).ok();
        let payload_len =
            payload_len.filter(|len| (1..=PAYLOAD_BYTES_MAX).contains(&(*len as usize)));
        let Some((lent, payload_len)) = lent.zip(payload_len) else {
            return Err(Error::Protocol(format!(
                "an offer of `{bytes}` bytes does not lie in what was lent"
            )));
        };
        let header = Header {
            kind: Kind::Data,
            scope,
            range,
            payload_len,
            payload_crc: crc,
        };
        let mut incoming = self.receiver.data(header)?;
        let mut bytes = lent.read(extents);
        incoming.take(|buffer| bytes.fill(buffer));
        self.receiver.finish(incoming);
        Ok(())
    }

    /// Sends replies as far as the socket takes them.
    fn reply(&mut self) -> Result<(), Error> {
        loop {
            while self.replies.len() < REPLY_BYTES
                && let Some((scope, control)) = self.receiver.outbox().pop()
            {
                self.replies.extend_from_slice(&control.encode(scope));
            }
            if self.receiver.outbox().overflowed() {
                return Err(Error::Protocol(
                    "the sender does not read replies".to_owned(),
                ));
            }
            let broken = |error| Error::io("write to the lane", error);
            if self.replies_sent == self.replies.len() {
                return self.stream.push().map(drop).map_err(broken);
            }
            let rest = IoSlice::new(&self.replies[self.replies_sent..]);
            match self.stream.send(&[rest], false) {
                Ok(sent) => self.replies_sent += sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(broken(error)),
            }
            if self.replies_sent == self.replies.len() {
                self.replies.clear();
                self.replies_sent = 0;
            }
        }
    }
}
