//! The sender's end of a TCP lane.
//!
//! Everything queued is gathered into one `sendmsg` straight from the source blocks
//! (up to 1 MiB and 1024 pieces): one write per frame would cost twice the CPU on
//! small blocks, and a 64 KiB payload plus its header, written alone, is just over
//! loopback's segment size, the slowest write there is. `TCP_NODELAY` is on, and
//! `MSG_MORE` says when the next write follows at once. Inside TLS the same pieces are
//! encrypted instead, and borrowed until that is done.

use std::io::{self, IoSlice, Read};
use std::time::Duration;

use super::connect::{Destination, connect};
use super::stream::LaneStream;
use super::{Lane, OutFrame, OutQueue};
use crate::codec::{CONTROL_BYTES_MAX, Control, HEADER_BYTES, Header, Kind, Scope};
use crate::error::Error;
use crate::ticket::SessionId;
use crate::wake::Bell;

/// Pieces one `sendmsg` takes (`UIO_MAXIOV`).
const PIECES_MAX: usize = 1024;
/// Bytes one `sendmsg` takes; more gains nothing and keeps blocks borrowed for longer.
const GATHER_BYTES: usize = 1 << 20;
/// Room for replies: the largest frame and a bit of the next.
const REPLY_BYTES: usize = CONTROL_BYTES_MAX + 4096;

/// An authenticated connection to a data port.
pub(crate) struct TcpLane {
    stream: LaneStream,
    replies: Box<[u8]>,
    /// Bytes of `replies` that are filled, and of those, taken.
    filled: usize,
    taken: usize,
}

impl TcpLane {
    /// Connects and proves the lane key, all within `timeout`.
    ///
    /// # Errors
    /// As [`connect`].
    pub(crate) fn connect(
        to: &Destination<'_>,
        session: SessionId,
        timeout: Duration,
    ) -> Result<Self, Error> {
        let (stream, _) = connect(to, session, timeout)?;
        Ok(Self::over(stream))
    }

    /// A lane over a connection that is authenticated.
    pub(crate) fn over(stream: LaneStream) -> Self {
        Self {
            stream,
            replies: vec![0; REPLY_BYTES].into_boxed_slice(),
            filled: 0,
            taken: 0,
        }
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

impl Lane for TcpLane {
    fn flush(&mut self, queue: &mut OutQueue, more: bool) -> Result<bool, Error> {
        let mut moved = false;
        let broken = |error| Error::io("write to the lane", error);
        self.stream.push().map_err(broken)?;
        loop {
            queue.drop_ended();
            if queue.is_empty() {
                break;
            }
            let sent = match gather(&mut self.stream, queue, more) {
                Ok(sent) => sent,
                Err(error) if comes_again(&error) => break,
                Err(error) => return Err(broken(error)),
            };
            queue.advance(sent);
            moved = true;
        }
        Ok(moved)
    }

    fn receive(&mut self) -> Result<Option<(Scope, Control)>, Error> {
        loop {
            if let Some(frame) = self.parse()? {
                return Ok(Some(frame));
            }
            self.replies.copy_within(self.taken..self.filled, 0);
            self.filled -= self.taken;
            self.taken = 0;
            match self.stream.read(&mut self.replies[self.filled..]) {
                Ok(0) => {
                    return Err(Error::io(
                        "read from the lane",
                        io::ErrorKind::UnexpectedEof,
                    ));
                }
                Ok(more) => self.filled += more,
                Err(error) if comes_again(&error) => return Ok(None),
                Err(error) => return Err(Error::io("read from the lane", error)),
            }
            // What the socket still holds rings again; what the stream holds does not.
            if !self.stream.holds_input() {
                return self.parse();
            }
        }
    }

    fn park(&mut self, bell: &Bell, want_flush: bool, timeout: Duration) -> Result<(), Error> {
        let flags = self.stream.interest(want_flush);
        let socket = self.stream.socket().map(|s| (s, flags));
        bell.park(socket.as_slice(), timeout)
            .map_err(|error| Error::io("wait for the lane", error))?;
        Ok(())
    }
}

/// Whether the same call may go well later.
fn comes_again(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

/// Sends as much of the queue as one call takes. Source blocks are borrowed from before
/// the call until after it.
fn gather(stream: &mut LaneStream, queue: &OutQueue, more: bool) -> io::Result<usize> {
    let (frames, sent) = queue.frames();
    let mut skip = sent;
    let mut taken = 0;
    let mut pieces = 0;
    let mut ended = false;
    // First take the borrows, then point at what they lend.
    let mut parts = Vec::new();
    for frame in frames {
        if taken >= GATHER_BYTES || pieces >= PIECES_MAX {
            break;
        }
        let (head, borrowed): (&[u8], _) = match frame {
            OutFrame::Control { bytes, .. } => (bytes, None),
            OutFrame::Data { bytes, source, .. } => {
                let borrowed = source.borrow(skip.saturating_sub(HEADER_BYTES));
                // It ended since the queue was looked through: a frame that has not begun
                // is dropped next time, instead of arriving as a damaged one.
                if skip == 0 && !borrowed.is_granted() {
                    ended = true;
                    break;
                }
                pieces += source.pieces();
                (bytes, Some(borrowed))
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
    if slices.is_empty() {
        return Ok(0);
    }
    let whole = taken == queue.bytes();
    let slices: Vec<IoSlice<'_>> = slices.into_iter().map(IoSlice::new).collect();
    stream.send(&slices, (more || !whole) && !ended)
}
