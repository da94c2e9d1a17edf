//! The bytes of a TCP lane, plain or inside TLS, for both of its ends.
//!
//! Plain, every call is one system call on the caller's own buffers: block bytes are
//! read and written where they lie. Inside TLS they are copied once more, between the
//! caller's buffers and those of rustls, and three bounded buffers stand in between:
//! 64 KiB of ciphertext that came, a decrypted record or two, 256 KiB of ciphertext
//! that waits for the socket. The socket does not block; nothing here waits, retries or
//! knows a frame.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::PollFlags;
use rustix::net::{SendAncillaryBuffer, SendFlags};
use rustls::{ClientConfig, Connection, ServerConfig, ServerConnection};

use super::shared_memory::UnixLane;
#[cfg(feature = "test-support")]
use crate::mem::MemStream;
use crate::sender::TransportKind;

/// What both ends of an encrypted lane agree on by ALPN, so that a lane cannot be led
/// to another TLS port of the cluster, nor another client to a data port.
const ALPN: &[u8] = b"baton-kv";
/// Ciphertext taken from the socket at once.
const WIRE_BYTES: usize = 64 << 10;
/// Ciphertext that may wait for the socket: one of the largest data frames.
const UNSENT_BYTES: usize = 256 << 10;

/// The same configuration for data lanes alone.
pub(crate) fn lane_server(config: &ServerConfig) -> Arc<ServerConfig> {
    let mut config = config.clone();
    config.alpn_protocols = vec![ALPN.to_vec()];
    Arc::new(config)
}

/// The same configuration for data lanes alone.
pub(crate) fn lane_client(config: &ClientConfig) -> Arc<ClientConfig> {
    let mut config = config.clone();
    config.alpn_protocols = vec![ALPN.to_vec()];
    Arc::new(config)
}

/// A TLS alert in plain text: "no application protocol". It is what a port without TLS
/// answers to a TLS client, in words that every TLS library understands.
pub(crate) const NO_TLS_HERE: [u8; 7] = [0x15, 0x03, 0x03, 0, 2, 2, 120];

/// Whether a peer begins with a TLS handshake. No hello begins like that.
pub(crate) fn is_tls_handshake(bytes: &[u8]) -> bool {
    bytes.starts_with(&[0x16, 0x03])
}

/// Whether a port begins with a TLS alert. No challenge begins like that.
pub(crate) fn is_tls_alert(bytes: &[u8]) -> bool {
    bytes.starts_with(&[0x15, 0x03])
}

/// What [`LaneStream::fill`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filled {
    /// A read may bring bytes.
    Ready,
    /// Bytes came, but nothing that can be decrypted yet.
    Partial,
    /// The socket has nothing.
    Nothing,
}

/// A non-blocking connection between two ends of a lane.
pub(crate) enum LaneStream {
    Plain(TcpStream),
    Tls(Box<TlsStream>),
    /// To a process of this host.
    Unix(UnixLane),
    /// Bytes that never leave this process, see [`crate::mem`].
    #[cfg(feature = "test-support")]
    Mem(MemStream),
}

impl LaneStream {
    /// The port's end of a TLS connection whose handshake is still to come. It goes on
    /// inside reads.
    pub(crate) fn accept_tls(socket: TcpStream, config: &Arc<ServerConfig>) -> io::Result<Self> {
        let tls = ServerConnection::new(Arc::clone(config)).map_err(io::Error::other)?;
        Ok(Self::Tls(Box::new(TlsStream::new(socket, tls.into()))))
    }

    /// An end whose handshake is done.
    pub(crate) fn tls(socket: TcpStream, tls: Connection) -> Self {
        Self::Tls(Box::new(TlsStream::new(socket, tls)))
    }

    /// What its frames count as.
    pub(crate) fn transport(&self) -> TransportKind {
        match self {
            Self::Plain(_) | Self::Tls(_) => TransportKind::Tcp,
            Self::Unix(_) => TransportKind::SharedMemory,
            #[cfg(feature = "test-support")]
            Self::Mem(_) => TransportKind::Tcp,
        }
    }

    /// What to poll; `None` if there is no socket.
    pub(crate) fn socket(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Plain(socket) => Some(socket.as_fd()),
            Self::Tls(stream) => Some(stream.socket.as_fd()),
            Self::Unix(stream) => Some(stream.as_fd()),
            #[cfg(feature = "test-support")]
            Self::Mem(_) => None,
        }
    }

    /// Brings what the next read will need, so that a read under a write guard only
    /// copies. Reads the socket at most once.
    ///
    /// # Errors
    /// What the socket says; [`io::ErrorKind::InvalidData`] around a [`rustls::Error`].
    pub(crate) fn fill(&mut self) -> io::Result<Filled> {
        match self {
            Self::Plain(_) | Self::Unix(_) => Ok(Filled::Ready),
            Self::Tls(stream) => stream.fill(),
            #[cfg(feature = "test-support")]
            Self::Mem(_) => Ok(Filled::Ready),
        }
    }

    /// Descriptors that came with the bytes.
    pub(crate) fn take_fds(&mut self) -> Vec<OwnedFd> {
        match self {
            Self::Unix(stream) => stream.take_fds(),
            _ => Vec::new(),
        }
    }

    /// Whether a read would bring bytes that polling the socket does not tell of.
    pub(crate) fn holds_input(&self) -> bool {
        match self {
            Self::Plain(_) | Self::Unix(_) => false,
            Self::Tls(stream) => stream.ready > 0 || stream.at < stream.end,
            #[cfg(feature = "test-support")]
            Self::Mem(_) => false,
        }
    }

    /// Sends from `slices` as much as goes at once. `more` says that the next call
    /// follows at once. With TLS, bytes that were taken may still wait for
    /// [`LaneStream::push`].
    pub(crate) fn send(&mut self, slices: &[IoSlice<'_>], more: bool) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => {
                let mut flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
                if more {
                    flags |= SendFlags::MORE;
                }
                let mut none = SendAncillaryBuffer::default();
                Ok(rustix::net::sendmsg(&*socket, slices, &mut none, flags)?)
            }
            Self::Tls(stream) => stream.send(slices),
            Self::Unix(stream) => stream.send(slices, &[]),
            #[cfg(feature = "test-support")]
            Self::Mem(stream) => stream.send(slices),
        }
    }

    /// Sends what waits for the socket; whether some still does.
    pub(crate) fn push(&mut self) -> io::Result<bool> {
        match self {
            Self::Plain(_) | Self::Unix(_) => Ok(false),
            Self::Tls(stream) => stream.push(),
            #[cfg(feature = "test-support")]
            Self::Mem(_) => Ok(false),
        }
    }

    /// What to poll the socket for, if `want_send` says that there is more to send.
    pub(crate) fn interest(&self, want_send: bool) -> PollFlags {
        let unsent = matches!(self, Self::Tls(stream) if stream.tls.wants_write());
        if want_send || unsent {
            PollFlags::IN | PollFlags::OUT
        } else {
            PollFlags::IN
        }
    }
}

impl Read for LaneStream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.read(bytes),
            Self::Tls(stream) => stream.read(&mut [IoSliceMut::new(bytes)]),
            Self::Unix(stream) => stream.read(&mut [IoSliceMut::new(bytes)]),
            #[cfg(feature = "test-support")]
            Self::Mem(stream) => stream.read(&mut [IoSliceMut::new(bytes)]),
        }
    }

    fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => Ok(rustix::io::readv(&*socket, buffers)?),
            Self::Tls(stream) => stream.read(buffers),
            Self::Unix(stream) => stream.read(buffers),
            #[cfg(feature = "test-support")]
            Self::Mem(stream) => stream.read(buffers),
        }
    }
}

/// A TLS connection over a non-blocking socket.
pub(crate) struct TlsStream {
    socket: TcpStream,
    tls: Connection,
    /// Ciphertext from the socket; `at..end` has not been decrypted.
    wire: Box<[u8]>,
    at: usize,
    end: usize,
    /// Decrypted bytes that wait inside `tls`.
    ready: usize,
}

impl TlsStream {
    fn new(socket: TcpStream, mut tls: Connection) -> Self {
        tls.set_buffer_limit(Some(UNSENT_BYTES));
        Self {
            socket,
            tls,
            wire: vec![0; WIRE_BYTES].into_boxed_slice(),
            at: 0,
            end: 0,
            ready: 0,
        }
    }

    fn fill(&mut self) -> io::Result<Filled> {
        if self.decrypt()? {
            return Ok(Filled::Ready);
        }
        match self.socket.read(&mut self.wire) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(got) => {
                (self.at, self.end) = (0, got);
                let ready = self.decrypt()?;
                Ok(if ready {
                    Filled::Ready
                } else {
                    Filled::Partial
                })
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) =>
            {
                Ok(Filled::Nothing)
            }
            Err(error) => Err(error),
        }
    }

    /// Decrypts until there is something to read; false once all that came is used up.
    fn decrypt(&mut self) -> io::Result<bool> {
        loop {
            // Asked first: bytes may be left from a handshake that somebody else did.
            let processed = self.tls.process_new_packets();
            // A handshake's answer, or the alert that says what is wrong.
            let pushed = self.push();
            let state =
                processed.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            pushed?;
            self.ready = state.plaintext_bytes_to_read();
            if self.ready > 0 {
                return Ok(true);
            }
            if state.peer_has_closed() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if self.at == self.end {
                return Ok(false);
            }
            let mut rest = &self.wire[self.at..self.end];
            self.at += self.tls.read_tls(&mut rest)?;
        }
    }

    fn read(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        while self.ready == 0 {
            if self.fill()? == Filled::Nothing {
                return Err(io::ErrorKind::WouldBlock.into());
            }
        }
        let mut reader = self.tls.reader();
        let mut copied = 0;
        for buffer in buffers {
            let len = buffer.len().min(self.ready);
            reader.read_exact(&mut buffer[..len])?;
            self.ready -= len;
            copied += len;
            if self.ready == 0 {
                break;
            }
        }
        Ok(copied)
    }

    fn send(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        if self.push()? {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let taken = self.tls.writer().write_vectored(slices)?;
        if taken == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.push()?;
        Ok(taken)
    }

    fn push(&mut self) -> io::Result<bool> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut self.socket) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }
}

impl Drop for TlsStream {
    fn drop(&mut self) {
        // The peer learns that this end is meant; if it does not, the lane ends as well.
        // Inside a handshake the end speaks for itself.
        if !self.tls.is_handshaking() {
            self.tls.send_close_notify();
            let _ = self.push();
        }
    }
}
