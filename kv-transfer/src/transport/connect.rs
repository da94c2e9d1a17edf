//! How a sender gets from an address to an authenticated connection.
//!
//! TCP, then TLS if there is any, then the hello of [`crate::codec::hello`]; all of it
//! blocks the lane's thread, and all of it together ends at one point in time. Which
//! failures are worth another try is the caller's to say.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_proto::protocol::CURRENT;
use rustls::pki_types::ServerName;
use rustls::{AlertDescription, ClientConfig, ClientConnection};

use super::stream::{LaneStream, is_tls_alert};
use crate::codec::hello::{CHALLENGE_BYTES, Challenge, HELLO_BYTES, Hello, Verdict, proof};
use crate::codec::{HEADER_BYTES, Header, Kind};
use crate::error::Error;
use crate::ticket::{LaneKey, SessionId};

/// Where a lane leads, and what has to be shown and seen there.
pub(crate) struct Destination<'a> {
    pub(crate) address: SocketAddr,
    /// Made by [`super::stream::lane_client`]; `None` speaks plain TCP.
    pub(crate) tls: Option<&'a Arc<ClientConfig>>,
    /// Name in the port's certificate; the address if absent.
    pub(crate) server_name: Option<&'a ServerName<'static>>,
    pub(crate) key: &'a LaneKey,
}

/// Connects and proves the lane key, all within `timeout`; also the port's feature bits.
///
/// # Errors
/// [`Error::Io`] if the port cannot be reached or closes during the hello (a wrong key
/// looks like that), [`Error::Full`] if it has enough lanes: try again later.
/// [`Error::Protocol`] if the two versions do not go together, [`Error::Tls`] if only
/// one end wants TLS or they do not trust each other: trying again does not help.
pub(crate) fn connect(
    to: &Destination<'_>,
    session: SessionId,
    timeout: Duration,
) -> Result<(LaneStream, u64), Error> {
    let until = Instant::now() + timeout;
    let socket = TcpStream::connect_timeout(&to.address, timeout)
        .map_err(|error| Error::io("connect to the data port", error))?;
    let set_up = |error| Error::io("set up the lane", error);
    socket.set_nodelay(true).map_err(set_up)?;
    let mut bounded = Until {
        socket: &socket,
        until,
    };
    let (tls, features) = match to.tls {
        None => (None, say_hello(&mut bounded, to.key, session)?),
        Some(config) => {
            let name = match to.server_name {
                Some(name) => name.clone(),
                None => ServerName::from(to.address.ip()),
            };
            let mut tls = ClientConnection::new(Arc::clone(config), name)
                .map_err(|error| Error::Tls(error.to_string()))?;
            while tls.is_handshaking() {
                let context = "start TLS with the data port";
                let shaken = tls.complete_io(&mut bounded);
                if shaken.map_err(|error| failed(context, error))? == (0, 0) {
                    // The port said goodbye instead: it had no time for us, most likely.
                    return Err(Error::io(context, io::ErrorKind::UnexpectedEof));
                }
            }
            if tls.alpn_protocol().is_none() {
                let text = "it speaks TLS, but is no data port";
                return Err(Error::Tls(text.to_owned()));
            }
            let mut stream = rustls::Stream::new(&mut tls, &mut bounded);
            let features = say_hello(&mut stream, to.key, session)?;
            (Some(tls), features)
        }
    };
    socket.set_nonblocking(true).map_err(set_up)?;
    let stream = match tls {
        None => LaneStream::Plain(socket),
        Some(tls) => LaneStream::tls(socket, tls.into()),
    };
    Ok((stream, features))
}

/// The hello over a Unix socket, by `until`.
pub(crate) fn say_hello_over(
    socket: &UnixStream,
    key: &LaneKey,
    session: SessionId,
    until: Instant,
) -> Result<(), Error> {
    say_hello(&mut Until { socket, until }, key, session).map(drop)
}

/// Waits over a Unix socket for the answer to a ping, until `until`. Nothing else is said
/// there yet, but for pings.
pub(crate) fn hear_pong_over(socket: &UnixStream, until: Instant) -> Result<(), Error> {
    let mut header = [0; HEADER_BYTES];
    loop {
        let read = Until { socket, until }.read_exact(&mut header);
        read.map_err(|error| Error::io("lend memory to the data port", error))?;
        match Header::decode(&header)?.kind {
            Kind::Pong => return Ok(()),
            Kind::Ping => {}
            other => {
                return Err(Error::Protocol(format!(
                    "a receiver began with `{other:?}`"
                )));
            }
        }
    }
}

/// The port's feature bits.
fn say_hello(
    stream: &mut (impl Read + Write),
    key: &LaneKey,
    session: SessionId,
) -> Result<u64, Error> {
    let context = "say hello to the data port";
    let io = |error| failed(context, error);
    let hello = Hello {
        version: CURRENT,
        session,
        nonce: rand::random(),
    };
    let hello: [u8; HELLO_BYTES] = hello.encode(key);
    stream.write_all(&hello).map_err(io)?;
    stream.flush().map_err(io)?;
    let mut challenge_bytes = [0; CHALLENGE_BYTES];
    let mut got = 0;
    while got < CHALLENGE_BYTES {
        match stream.read(&mut challenge_bytes[got..]).map_err(io)? {
            0 => return Err(Error::io(context, io::ErrorKind::UnexpectedEof)),
            more => got += more,
        }
        if is_tls_alert(&challenge_bytes[..got]) {
            let text = "it speaks TLS, and this worker has no TLS settings";
            return Err(Error::Tls(text.to_owned()));
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
        .map_err(io)?;
    stream.flush().map_err(io)?;
    Ok(challenge.version.features)
}

/// An error of ours, with TLS's own reason if there is one.
fn failed(context: &'static str, error: io::Error) -> Error {
    let reason = error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match reason {
        None => Error::io(context, error),
        Some(rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol)) => {
            Error::Tls("it takes no TLS: it has no TLS settings, or is no data port".to_owned())
        }
        Some(rustls::Error::InvalidMessage(_)) => Error::Tls("it does not speak TLS".to_owned()),
        Some(rustls::Error::InvalidCertificate(error)) => {
            Error::Tls(format!("its certificate is not accepted: {error:?}"))
        }
        Some(rustls::Error::AlertReceived(alert)) => {
            Error::Tls(format!("it refused this worker's side of TLS: {alert:?}"))
        }
        Some(error) => Error::Tls(error.to_string()),
    }
}

/// A blocking socket whose every call ends at one point in time.
struct Until<'a, S> {
    socket: &'a S,
    until: Instant,
}

/// What sockets have in common here.
trait Timed {
    fn set_timeouts(&self, left: Option<Duration>) -> io::Result<()>;
}

impl Timed for TcpStream {
    fn set_timeouts(&self, left: Option<Duration>) -> io::Result<()> {
        self.set_read_timeout(left)?;
        self.set_write_timeout(left)
    }
}

impl Timed for UnixStream {
    fn set_timeouts(&self, left: Option<Duration>) -> io::Result<()> {
        self.set_read_timeout(left)?;
        self.set_write_timeout(left)
    }
}

impl<S> Until<'_, S> {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(Some(left))
    }
}

/// A socket's timeout looks like a call that would block.
fn timed_out(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
        _ => error,
    }
}

impl<S: Timed> Read for Until<'_, S>
where
    for<'s> &'s S: Read,
{
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.socket.set_timeouts(self.left()?)?;
        (&mut &*self.socket).read(bytes).map_err(timed_out)
    }
}

impl<S: Timed> Write for Until<'_, S>
where
    for<'s> &'s S: Write,
{
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.socket.set_timeouts(self.left()?)?;
        (&mut &*self.socket).write(bytes).map_err(timed_out)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
