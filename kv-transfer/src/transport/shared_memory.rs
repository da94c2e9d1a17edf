//! The sender's end of a lane to another process of this host: offers instead of bytes.
//!
//! The lane is a Unix socket with an abstract name (no file, so none is left behind by a
//! crash) that the receiver's process token names; both ends check that the other runs as
//! the same user, and prove the lane key as over TCP. The sender lends its regions once,
//! read-only; a data frame then says where the parts lie, and the receiver copies them
//! from there straight into its blocks: one copy in all, under the same guards, checks
//! and window as bytes that travelled.
//!
//! What was offered is read later, at a time of the receiver's choosing, so its read
//! guards are held until the receiver says that it is past it: by an `Ack`, or, when the
//! transfer ended otherwise, by the answer to a ping that follows everything offered. Only
//! a receiver whose lane is gone is not waited for: what it may still copy then is damaged
//! at worst, by its checksum, and leads nowhere without the lane.
//!
//! Nothing is fenced by trust: a peer that maps the pool cannot write to it, and a block of
//! the receiver is written by its owner alone. A commit waits here until the receiver is past
//! all that was offered of its transfer, whose source blocks are not reused before: it is the
//! sender's word that they still held what was pushed when they were copied.
//!
//! Who may read one lent block may read the whole pool: both ends run as one user. Nothing
//! leaves the host, so there is no TLS here.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, connect,
    listen, recvmsg, sendmsg, socket_with,
};

use super::connect::{hear_pong_over, say_hello_over};
use super::stream::LaneStream;
use super::tcp::TcpLane;
use super::{Lane, OutFrame, OutQueue};
use crate::codec::{Control, Scope};
use crate::error::Error;
use crate::region::MemoryRegion;
use crate::sender::transfer::ReadGuard;
use crate::ticket::{LaneKey, ProcessToken, SessionId, Ticket};
use crate::wake::Bell;

/// Regions one peer may lend.
const REGIONS_MAX: usize = 16;
/// Bytes offered and not yet copied; beyond it frames wait for their turn here, where
/// transfers share fairly. The last frame may go over it.
const LENT_BYTES_MAX: u64 = 4 << 20;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

fn address(token: ProcessToken) -> io::Result<SocketAddrUnix> {
    let name = format!("baton-kv-{:032x}", token.0);
    Ok(SocketAddrUnix::new_abstract_name(name.as_bytes())?)
}

fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        flags,
        None,
    )?)
}

/// Listens for senders of this host.
pub(crate) fn listen_here(token: ProcessToken) -> io::Result<UnixListener> {
    let socket = socket()?;
    bind(&socket, &address(token)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Connects at once or not at all: a process that does not accept is not waited for.
fn connect_here(token: ProcessToken) -> io::Result<UnixStream> {
    let socket = socket()?;
    connect(&socket, &address(token)?)?;
    Ok(socket.into())
}

/// Whether a receiver of this host and user listens under `token`.
pub(crate) fn is_here(token: ProcessToken) -> bool {
    connect_here(token).is_ok_and(|socket| same_user(socket).is_ok())
}

/// A connection to a process of the same user, else an error.
pub(crate) fn same_user(stream: UnixStream) -> io::Result<UnixLane> {
    if socket_peercred(&stream)?.uid != rustix::process::getuid() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(UnixLane {
        socket: stream,
        fds: Vec::new(),
    })
}

/// The bytes of a lane over a Unix socket, and the descriptors that came with them.
pub(crate) struct UnixLane {
    pub(crate) socket: UnixStream,
    fds: Vec<OwnedFd>,
}

impl UnixLane {
    pub(crate) fn read(&mut self, buffers: &mut [io::IoSliceMut<'_>]) -> io::Result<usize> {
        let mut space =
            [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(REGIONS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let got = recvmsg(&self.socket, buffers, &mut ancillary, flags)?.bytes;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                // Those beyond the limit are closed here.
                let room = REGIONS_MAX - self.fds.len();
                self.fds.extend(fds.take(room));
            }
        }
        Ok(got)
    }

    pub(crate) fn send(
        &mut self,
        slices: &[IoSlice<'_>],
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<usize> {
        let mut space =
            [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(REGIONS_MAX))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        Ok(sendmsg(&self.socket, slices, &mut ancillary, flags)?)
    }

    /// The descriptors that came so far.
    pub(crate) fn take_fds(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.fds)
    }
}

struct Lent {
    ticket: Ticket,
    /// What the receiver has consumed once it is past this.
    end: u64,
    bytes: u64,
    _guard: ReadGuard,
}

/// A lane whose data frames are offers.
pub(crate) struct SharedLane {
    lane: TcpLane,
    offers: OutQueue,
    lent: VecDeque<Lent>,
    lent_bytes: u64,
    lent_bytes_max: u64,
    /// Bytes offered since the receiver last said what it lacks.
    offered: BTreeMap<Ticket, u64>,
    /// Commits that wait for the end of the copies before them.
    commits: Vec<(Scope, Control)>,
}

impl SharedLane {
    /// Connects, proves the lane key and lends `regions`, all within `timeout`.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Full`]: try again later; [`Error::Protocol`]: do not.
    pub(crate) fn connect(
        token: ProcessToken,
        key: &LaneKey,
        session: SessionId,
        regions: &[MemoryRegion],
        timeout: Duration,
    ) -> Result<Self, Error> {
        let context = "connect to the data port of this host";
        let io = |error| Error::io(context, error);
        let until = Instant::now() + timeout;
        let socket = connect_here(token).map_err(io)?;
        socket.set_nonblocking(false).map_err(io)?;
        say_hello_over(&socket, key, session, until)?;
        let mut stream = same_user(socket).map_err(io)?;
        let fds: Option<Vec<BorrowedFd<'_>>> = regions.iter().map(MemoryRegion::fd).collect();
        let Some(fds) = fds.filter(|fds| fds.len() <= REGIONS_MAX) else {
            return Err(Error::Unreachable(
                "this worker's memory cannot be lent".to_owned(),
            ));
        };
        // Descriptors travel with bytes: those of a ping, which means nothing else. A fresh
        // socket has room for it.
        let ping = Control::Ping.encode(Scope::LANE);
        let sent = stream.send(&[IoSlice::new(&ping)], &fds).map_err(io)?;
        if sent != ping.len() {
            return Err(io(io::ErrorKind::WriteZero.into()));
        }
        // It answers once it has mapped what was lent, and closes if it cannot.
        hear_pong_over(&stream.socket, until)?;
        stream.socket.set_nonblocking(true).map_err(io)?;
        let lane = TcpLane::over(LaneStream::Unix(stream));
        Ok(Self::over(lane, LENT_BYTES_MAX))
    }

    /// A lane whose receiver can read what it is offered.
    pub(crate) fn over(lane: TcpLane, lent_bytes_max: u64) -> Self {
        Self {
            lane,
            offers: OutQueue::default(),
            lent: VecDeque::new(),
            lent_bytes: 0,
            lent_bytes_max,
            offered: BTreeMap::new(),
            commits: Vec::new(),
        }
    }

    fn offer(&mut self, frame: OutFrame) {
        match frame {
            OutFrame::Control { scope, control, .. } => match control {
                Control::Commit { .. } if self.is_lent(scope.ticket) => {
                    self.commits.push((scope, control));
                }
                Control::Abort { .. } => {
                    self.commits.retain(|(held, _)| *held != scope);
                    self.offers.push_control(scope, control);
                }
                other => self.offers.push_control(scope, other),
            },
            OutFrame::Data { header, source, .. } => {
                // Refused only if the transfer ended: nobody wants the frame any more.
                let Some(guard) = source.lend() else {
                    return;
                };
                let ticket = header.scope.ticket;
                let bytes = u64::from(header.payload_len);
                let offered = self.offered.entry(ticket).or_default();
                *offered += bytes;
                self.lent.push_back(Lent {
                    ticket,
                    end: *offered,
                    bytes,
                    _guard: guard,
                });
                self.lent_bytes += bytes;
                let offer = Control::Offer {
                    range: header.range,
                    crc: header.payload_crc,
                    extents: source.extents().to_vec(),
                };
                self.offers.push_control(header.scope, offer);
            }
        }
    }

    fn is_lent(&self, ticket: Ticket) -> bool {
        self.lent.iter().any(|lent| lent.ticket == ticket)
    }

    /// The receiver is past what was offered of a transfer, up to `end`.
    fn give_back(&mut self, ticket: Ticket, end: u64) {
        let lent_bytes = &mut self.lent_bytes;
        self.lent.retain(|lent| {
            let past = lent.ticket == ticket && lent.end <= end;
            if past {
                *lent_bytes -= lent.bytes;
            }
            !past
        });
        let waiting = std::mem::take(&mut self.commits);
        for (scope, commit) in waiting {
            if self.is_lent(scope.ticket) {
                self.commits.push((scope, commit));
            } else {
                self.offers.push_control(scope, commit);
            }
        }
    }

    fn hear(&mut self, scope: Scope, control: &Control) {
        match control {
            Control::Ack { consumed } => self.give_back(scope.ticket, *consumed),
            // The answer to an `Open` or a barrier comes after all that was offered before.
            Control::Opened(_) => {
                self.give_back(scope.ticket, u64::MAX);
                self.offered.remove(&scope.ticket);
            }
            Control::Pong if scope != Scope::LANE => {
                self.give_back(scope.ticket, u64::MAX);
                self.offered.remove(&scope.ticket);
            }
            // It may have been said while an offer was still being copied.
            Control::Committed | Control::Refused(_) | Control::Aborted => {
                self.offers.push_control(scope, Control::Ping);
            }
            _ => {}
        }
    }
}

impl Lane for SharedLane {
    fn flush(&mut self, queue: &mut OutQueue, more: bool) -> Result<bool, Error> {
        let mut moved = false;
        loop {
            queue.drop_ended();
            if self.lent_bytes >= self.lent_bytes_max {
                break;
            }
            let Some(frame) = queue.pop() else {
                break;
            };
            self.offer(frame);
            moved = true;
        }
        // An abort must not wait for those that copy slowly.
        while queue.begins_with_control()
            && let Some(frame) = queue.pop()
        {
            self.offer(frame);
            moved = true;
        }
        Ok(self.lane.flush(&mut self.offers, more)? || moved)
    }

    fn receive(&mut self) -> Result<Option<(Scope, Control)>, Error> {
        let heard = self.lane.receive()?;
        if let Some((scope, control)) = &heard {
            self.hear(*scope, control);
        }
        Ok(heard)
    }

    fn park(&mut self, bell: &Bell, want_flush: bool, timeout: Duration) -> Result<(), Error> {
        // Frames that wait for the receiver to copy wait for its word, not for the socket.
        let unsent = !self.offers.is_empty();
        let _ = want_flush;
        self.lane.park(bell, unsent, timeout)
    }
}

/// The descriptors of regions that can all be lent.
pub(crate) fn can_lend(regions: &[MemoryRegion]) -> bool {
    (1..=REGIONS_MAX).contains(&regions.len()) && regions.iter().all(|region| region.fd().is_some())
}

impl AsFd for UnixLane {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
