//! A connection that has not proved anything yet.
//!
//! It may cost a few hundred bytes and one second. Nothing is answered before its
//! hello has the right MAC, and no length is ever read from it.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use baton_proto::protocol::CURRENT;

use crate::codec::hello::{
    CHALLENGE_BYTES, Challenge, HELLO_BYTES, Hello, PROOF_BYTES, Verdict, is_proof,
};
use crate::ticket::{LaneKey, SessionId};

/// What a read from a stranger led to.
pub(super) enum Step {
    /// More has to come.
    Wait,
    /// Not one of ours, or gone: close it.
    Close,
    /// It holds the lane key.
    Proved(SessionId),
}

pub(super) struct Stranger {
    pub(super) stream: TcpStream,
    pub(super) since: Instant,
    hello: [u8; HELLO_BYTES],
    session: SessionId,
    /// Set once the hello was right.
    challenge: Option<[u8; CHALLENGE_BYTES]>,
    proof: [u8; PROOF_BYTES],
    /// Bytes of the message awaited now.
    got: usize,
}

impl Stranger {
    pub(super) fn new(stream: TcpStream, now: Instant) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            since: now,
            hello: [0; HELLO_BYTES],
            session: SessionId(0),
            challenge: None,
            proof: [0; PROOF_BYTES],
            got: 0,
        })
    }

    /// Reads what is there. `is_busy` says whether a session may not have another lane.
    pub(super) fn step(&mut self, key: &LaneKey, is_busy: impl Fn(SessionId) -> bool) -> Step {
        loop {
            let awaited: &mut [u8] = if self.challenge.is_none() {
                &mut self.hello
            } else {
                &mut self.proof
            };
            match (&self.stream).read(&mut awaited[self.got..]) {
                Ok(0) => return Step::Close,
                Ok(more) => self.got += more,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Step::Wait,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return Step::Close,
            }
            if self.got < awaited.len() {
                continue;
            }
            self.got = 0;
            if let Some(challenge) = &self.challenge {
                let proved = is_proof(&self.proof, key, &self.hello, challenge);
                return if proved {
                    Step::Proved(self.session)
                } else {
                    Step::Close
                };
            }
            let Some(hello) = Hello::decode(&self.hello, key) else {
                return Step::Close;
            };
            let verdict = if CURRENT.check_peer(hello.version).is_err() {
                Verdict::Version
            } else if is_busy(hello.session) {
                Verdict::Busy
            } else {
                Verdict::Welcome
            };
            let challenge = Challenge {
                verdict,
                version: CURRENT,
                nonce: rand::random(),
            };
            let challenge = challenge.encode(key, &self.hello);
            // A fresh socket has room for this; one that has not is not worth waiting for.
            let sent = (&self.stream).write(&challenge);
            if verdict != Verdict::Welcome || !matches!(sent, Ok(CHALLENGE_BYTES)) {
                return Step::Close;
            }
            self.session = hello.session;
            self.challenge = Some(challenge);
        }
    }
}
