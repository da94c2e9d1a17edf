//! The sender's end of a TCP lane.
//!
//! Everything queued is gathered into one `sendmsg` straight from the source blocks
//! (up to 1 MiB and 1024 pieces): one write per frame would cost twice the CPU on
//! small blocks, and a 64 KiB payload plus its header, written alone, is just over
//! loopback's segment size, the slowest write there is. `TCP_NODELAY` is on, and
//! `MSG_MORE` says when the next write follows at once.

use std::io::{self, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use baton_proto::protocol::CURRENT;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags};

use super::{Lane, OutFrame, OutQueue};
use crate::codec::hello::{CHALLENGE_BYTES, Challenge, HELLO_BYTES, Hello, Verdict, proof};
use crate::codec::{CONTROL_BYTES_MAX, Control, HEADER_BYTES, Header, Kind, Scope};
use crate::error::Error;
use crate::ticket::{LaneKey, SessionId};
use crate::wake::Bell;

/// Pieces one `sendmsg` takes (`UIO_MAXIOV`).
const PIECES_MAX: usize = 1024;
/// Bytes one `sendmsg` takes; more gains nothing and keeps blocks borrowed for longer.
const GATHER_BYTES: usize = 1 << 20;
/// Room for replies: the largest frame and a bit of the next.
const REPLY_BYTES: usize = CONTROL_BYTES_MAX + 4096;

/// An authenticated connection to a data port.
pub(crate) struct TcpLane {
    stream: TcpStream,
    replies: Box<[u8]>,
    /// Bytes of `replies` that are filled, and of those, taken.
    filled: usize,
    taken: usize,
}

impl TcpLane {
    /// Connects and proves the lane key, all within `timeout`.
    ///
    /// # Errors
    /// [`Error::Io`] if the port cannot be reached or closes during the hello (a wrong
    /// key looks like that), [`Error::Full`] if it has enough lanes: try again later.
    /// [`Error::Protocol`] if the two versions do not go together.
    pub(crate) fn connect(
        address: SocketAddr,
        key: &LaneKey,
        session: SessionId,
        timeout: Duration,
    ) -> Result<Self, Error> {
        let until = Instant::now() + timeout;
        let stream = TcpStream::connect_timeout(&address, timeout)
            .map_err(|error| Error::io("connect to the data port", error))?;
        shake_hands(&stream, key, session, until)?;
        stream
            .set_nonblocking(true)
            .map_err(|error| Error::io("set up the lane", error))?;
        Ok(Self {
            stream,
            replies: vec![0; REPLY_BYTES].into_boxed_slice(),
            filled: 0,
            taken: 0,
        })
    }

    /// The reply at the front of the buffer, if it is whole.
    fn parse(&mut self) -> Result<Option<(Scope, Control)>, Error> {
        let ready = &self.replies[self.taken..self.filled];
        let Some(header) = ready.first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let header = Header::decode(header)?;
        if header.kind == Kind::Data {
            return Err(Error::Protocol("a receiver sent `Data`".to_owned()));
        }
        let len = HEADER_BYTES + header.payload_len as usize;
        let Some(frame) = ready.get(..len) else {
            return Ok(None);
        };
        let control = Control::decode(&header, &frame[HEADER_BYTES..])?;
        self.taken += len;
        Ok(Some((header.scope, control)))
    }
}

fn shake_hands(
    stream: &TcpStream,
    key: &LaneKey,
    session: SessionId,
    until: Instant,
) -> Result<(), Error> {
    let context = "say hello to the data port";
    let io = |error| Error::io(context, error);
    let left = || {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            Err(Error::io(context, io::ErrorKind::TimedOut))
        } else {
            Ok(left)
        }
    };
    stream.set_nodelay(true).map_err(io)?;
    stream.set_write_timeout(Some(left()?)).map_err(io)?;
    let hello = Hello {
        version: CURRENT,
        session,
        nonce: rand::random(),
    };
    let hello: [u8; HELLO_BYTES] = hello.encode(key);
    let mut stream = stream;
    stream.write_all(&hello).map_err(io)?;
    let mut challenge_bytes = [0; CHALLENGE_BYTES];
    let mut got = 0;
    while got < CHALLENGE_BYTES {
        stream.set_read_timeout(Some(left()?)).map_err(io)?;
        match stream.read(&mut challenge_bytes[got..]).map_err(io)? {
            0 => return Err(Error::io(context, io::ErrorKind::UnexpectedEof)),
            more => got += more,
        }
    }
    let challenge = Challenge::decode(&challenge_bytes, key, &hello)
        .ok_or_else(|| Error::io(context, io::ErrorKind::PermissionDenied))?;
    match challenge.verdict {
        Verdict::Welcome => {}
        Verdict::Busy => {
            return Err(Error::Full {
                what: "lanes",
                limit: 0,
            });
        }
        Verdict::Version => {
            let mismatch = CURRENT.check_peer(challenge.version);
            let text = mismatch
                .err()
                .map_or_else(String::new, |error| error.to_string());
            return Err(Error::Protocol(format!(
                "the receiver refused our version {text}"
            )));
        }
    }
    stream
        .write_all(&proof(key, &hello, &challenge_bytes))
        .map_err(io)
}

impl Lane for TcpLane {
    fn flush(&mut self, queue: &mut OutQueue, more: bool) -> Result<bool, Error> {
        let mut moved = false;
        loop {
            queue.drop_ended();
            if queue.is_empty() {
                break;
            }
            let sent = match gather(&self.stream, queue, more) {
                Ok(sent) => sent,
                Err(Errno::AGAIN | Errno::INTR) => break,
                Err(errno) => return Err(Error::io("write to the lane", errno)),
            };
            queue.advance(sent);
            moved = true;
        }
        Ok(moved)
    }

    fn receive(&mut self) -> Result<Option<(Scope, Control)>, Error> {
        if let Some(frame) = self.parse()? {
            return Ok(Some(frame));
        }
        self.replies.copy_within(self.taken..self.filled, 0);
        self.filled -= self.taken;
        self.taken = 0;
        match (&self.stream).read(&mut self.replies[self.filled..]) {
            Ok(0) => Err(Error::io(
                "read from the lane",
                io::ErrorKind::UnexpectedEof,
            )),
            Ok(more) => {
                self.filled += more;
                self.parse()
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) =>
            {
                Ok(None)
            }
            Err(error) => Err(Error::io("read from the lane", error)),
        }
    }

    fn park(&mut self, bell: &Bell, want_flush: bool, timeout: Duration) -> Result<(), Error> {
        let flags = if want_flush {
            PollFlags::IN | PollFlags::OUT
        } else {
            PollFlags::IN
        };
        bell.park(&[(self.stream.as_fd(), flags)], timeout)
            .map_err(|error| Error::io("wait for the lane", error))?;
        Ok(())
    }
}

/// Writes as much of the queue as one `sendmsg` takes. Source blocks are borrowed
/// from before the call until after it.
fn gather(stream: &TcpStream, queue: &OutQueue, more: bool) -> Result<usize, Errno> {
    let (frames, sent) = queue.frames();
    let mut skip = sent;
    let mut taken = 0;
    let mut pieces = 0;
    // First take the borrows, then point at what they lend.
    let mut parts = Vec::new();
    for frame in frames {
        if taken >= GATHER_BYTES || pieces >= PIECES_MAX {
            break;
        }
        let (head, borrowed): (&[u8], _) = match frame {
            OutFrame::Control { bytes, .. } => (bytes, None),
            OutFrame::Data { bytes, source, .. } => {
                pieces += source.pieces();
                (
                    bytes,
                    Some(source.borrow(skip.saturating_sub(HEADER_BYTES))),
                )
            }
        };
        taken += frame.len() - skip;
        pieces += 1;
        parts.push((&head[skip.min(head.len())..], borrowed));
        skip = 0;
    }
    let mut slices: Vec<&[u8]> = Vec::with_capacity(pieces.min(PIECES_MAX));
    for (head, borrowed) in &parts {
        if slices.len() >= PIECES_MAX {
            break;
        }
        if !head.is_empty() {
            slices.push(head);
        }
        if let Some(borrowed) = borrowed {
            borrowed.slices(PIECES_MAX, &mut slices);
        }
    }
    let whole = taken == queue.bytes();
    let slices: Vec<IoSlice<'_>> = slices.into_iter().map(IoSlice::new).collect();
    let mut flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    if more || !whole {
        flags |= SendFlags::MORE;
    }
    rustix::net::sendmsg(stream, &slices, &mut SendAncillaryBuffer::default(), flags)
}
