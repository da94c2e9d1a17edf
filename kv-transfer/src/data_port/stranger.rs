//! A connection that has not proved anything yet.
//!
//! It may cost a few hundred bytes and one second (with TLS: the 64 KiB and the
//! handshake of a connection). Nothing is answered before its hello has the right MAC,
//! except what TLS itself answers and the fixed alert that tells a TLS client that this
//! port has none; no length is ever read from it.

use std::io::{self, IoSlice, Read};
use std::net::Shutdown;
use std::time::Instant;

use baton_proto::protocol::ProtocolVersion;

use crate::codec::hello::{
    CHALLENGE_BYTES, Challenge, HELLO_BYTES, Hello, PROOF_BYTES, Verdict, is_proof,
};
use crate::ticket::{LaneKey, SessionId};
use crate::transport::stream::{LaneStream, NO_TLS_HERE, is_tls_handshake};

/// What a refused peer may still have on its way to us and will be read and forgotten,
/// so that closing does not reset the connection under the refusal.
const FORGOTTEN_BYTES_MAX: usize = 16 << 10;

/// What a read from a stranger led to.
pub(super) enum Step {
    /// More has to come.
    Wait,
    /// Not one of ours, or gone: close it.
    Close,
    /// It holds the lane key.
    Proved(SessionId),
}

enum Stage {
    Hello,
    /// The hello was right.
    Challenged([u8; CHALLENGE_BYTES]),
    /// Refused and told so: nothing it says counts any more.
    Leaving,
}

pub(super) struct Stranger {
    pub(super) stream: LaneStream,
    pub(super) since: Instant,
    stage: Stage,
    hello: [u8; HELLO_BYTES],
    session: SessionId,
    proof: [u8; PROOF_BYTES],
    /// Bytes of the message awaited now.
    got: usize,
}

impl Stranger {
    pub(super) fn new(stream: LaneStream, now: Instant) -> Self {
        Self {
            stream,
            since: now,
            stage: Stage::Hello,
            hello: [0; HELLO_BYTES],
            session: SessionId(0),
            proof: [0; PROOF_BYTES],
            got: 0,
        }
    }

    /// Reads what is there. `version` is the port's; `is_busy` says whether a session may not
    /// have another lane.
    pub(super) fn step(
        &mut self,
        key: &LaneKey,
        version: ProtocolVersion,
        is_busy: impl Fn(SessionId) -> bool,
    ) -> Step {
        loop {
            let awaited: &mut [u8] = match self.stage {
                Stage::Hello => &mut self.hello,
                Stage::Challenged(_) => &mut self.proof,
                Stage::Leaving => return self.forget(),
            };
            match self.stream.read(&mut awaited[self.got..]) {
                Ok(0) => return Step::Close,
                Ok(more) => self.got += more,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Step::Wait,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    // The TLS alert has left already.
                    self.leave(&format_args!(
                        "TLS failed, or the peer speaks none: {error}"
                    ));
                    continue;
                }
                Err(_) => return Step::Close,
            }
            if matches!(
                (&self.stage, &self.stream),
                (Stage::Hello, LaneStream::Plain(_))
            ) && is_tls_handshake(&self.hello[..self.got])
            {
                // A fresh socket has room for seven bytes.
                let _ = self.stream.send(&[IoSlice::new(&NO_TLS_HERE)], false);
                self.leave(&"the peer speaks TLS, and this port has no TLS settings");
                continue;
            }
            let expected = match self.stage {
                Stage::Hello => HELLO_BYTES,
                Stage::Challenged(_) | Stage::Leaving => PROOF_BYTES,
            };
            if self.got < expected {
                continue;
            }
            self.got = 0;
            if let Stage::Challenged(challenge) = &self.stage {
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
            let verdict = if version.check_peer(hello.version).is_err() {
                Verdict::Version
            } else if is_busy(hello.session) {
                Verdict::Busy
            } else {
                Verdict::Welcome
            };
            let challenge = Challenge {
                verdict,
                version,
                nonce: rand::random(),
            };
            let challenge = challenge.encode(key, &self.hello);
            // A fresh socket has room for this; one that has not is not worth waiting for.
            let sent = self.stream.send(&[IoSlice::new(&challenge)], false);
            if verdict != Verdict::Welcome || !matches!(sent, Ok(CHALLENGE_BYTES)) {
                return Step::Close;
            }
            self.session = hello.session;
            self.stage = Stage::Challenged(challenge);
        }
    }

    /// Ends our side; the peer has what is left of the hello's time to read why.
    fn leave(&mut self, why: &dyn std::fmt::Display) {
        if let LaneStream::Plain(socket) = &self.stream {
            let peer = socket.peer_addr().ok();
            tracing::info!(?peer, "a data lane was refused: {why}");
            let _ = socket.shutdown(Shutdown::Write);
        }
        self.stage = Stage::Leaving;
        self.got = 0;
    }

    fn forget(&mut self) -> Step {
        let mut forgotten = [0; 1024];
        while self.got < FORGOTTEN_BYTES_MAX {
            match self.stream.read(&mut forgotten) {
                Ok(0) => return Step::Close,
                Ok(more) => self.got += more,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Step::Wait,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Step::Close,
            }
        }
        Step::Close
    }
}
