//! How a connection proves that it holds the lane key.
//!
//! ```text
//! sender                                   receiver
//! Hello{version, session, nonce, MAC}  ->  wrong MAC: closed, nothing answered
//!                                      <-  Challenge{verdict, version, nonce, MAC over hello too}
//! Proof{MAC over hello and challenge}  ->  wrong: closed; right: the lane is open
//! ```
//! Both ends contribute a nonce, so a recorded conversation proves nothing later,
//! and the sender learns that the receiver holds the key before any KV leaves.
//! All messages have fixed sizes; no length is ever read from a stranger.

use baton_proto::protocol::ProtocolVersion;

use crate::ticket::{LaneKey, SessionId};

/// Bytes of a hello.
pub const HELLO_BYTES: usize = 84;
/// Bytes of a challenge.
pub const CHALLENGE_BYTES: usize = 68;
/// Bytes of a proof.
pub const PROOF_BYTES: usize = 32;

const MAC_BYTES: usize = 32;
const HELLO_MAGIC: [u8; 4] = *b"BTNH";
const CHALLENGE_MAGIC: [u8; 4] = *b"BTNC";

/// What the receiver thinks of a hello with a right MAC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Welcome,
    /// The versions do not go together; both are in the messages.
    Version,
    /// This session or the port has as many lanes as it may have.
    Busy,
}

/// The first message of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    pub version: ProtocolVersion,
    pub session: SessionId,
    pub nonce: [u8; 16],
}

impl Hello {
    /// The bytes that travel.
    pub fn encode(&self, key: &LaneKey) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..4].copy_from_slice(&HELLO_MAGIC);
        put_version(&mut bytes[4..20], self.version);
        bytes[20..36].copy_from_slice(&self.session.0.to_le_bytes());
        bytes[36..52].copy_from_slice(&self.nonce);
        let mac = key.mac(&[b"hello", &bytes[..HELLO_BYTES - MAC_BYTES]]);
        bytes[HELLO_BYTES - MAC_BYTES..].copy_from_slice(mac.as_bytes());
        bytes
    }

    /// `None` if the MAC is not right; nothing else of the bytes is looked at then.
    pub fn decode(bytes: &[u8; HELLO_BYTES], key: &LaneKey) -> Option<Self> {
        let (body, mac) = bytes.split_at(HELLO_BYTES - MAC_BYTES);
        if !same(&key.mac(&[b"hello", body]), mac) || body[..4] != HELLO_MAGIC {
            return None;
        }
        Some(Self {
            version: version(&body[4..20])?,
            session: SessionId(u128::from_le_bytes(body[20..36].try_into().ok()?)),
            nonce: body[36..52].try_into().ok()?,
        })
    }
}

/// The receiver's answer to a hello with a right MAC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Challenge {
    pub verdict: Verdict,
    pub version: ProtocolVersion,
    pub nonce: [u8; 16],
}

impl Challenge {
    /// The bytes that travel; `hello` is the message answered.
    pub fn encode(&self, key: &LaneKey, hello: &[u8; HELLO_BYTES]) -> [u8; CHALLENGE_BYTES] {
        let mut bytes = [0; CHALLENGE_BYTES];
        bytes[..3].copy_from_slice(&CHALLENGE_MAGIC[..3]);
        bytes[3] = match self.verdict {
            Verdict::Welcome => 0,
            Verdict::Version => 1,
            Verdict::Busy => 2,
        };
        put_version(&mut bytes[4..20], self.version);
        bytes[20..36].copy_from_slice(&self.nonce);
        let mac = key.mac(&[b"challenge", &bytes[..CHALLENGE_BYTES - MAC_BYTES], hello]);
        bytes[CHALLENGE_BYTES - MAC_BYTES..].copy_from_slice(mac.as_bytes());
        bytes
    }

    /// `None` if the MAC is not right for this `hello`.
    pub fn decode(
        bytes: &[u8; CHALLENGE_BYTES],
        key: &LaneKey,
        hello: &[u8; HELLO_BYTES],
    ) -> Option<Self> {
        let (body, mac) = bytes.split_at(CHALLENGE_BYTES - MAC_BYTES);
        if !same(&key.mac(&[b"challenge", body, hello]), mac) || body[..3] != CHALLENGE_MAGIC[..3] {
            return None;
        }
        Some(Self {
            verdict: match body[3] {
                0 => Verdict::Welcome,
                1 => Verdict::Version,
                2 => Verdict::Busy,
                _ => return None,
            },
            version: version(&body[4..20])?,
            nonce: body[20..36].try_into().ok()?,
        })
    }
}

/// The sender's last word of the handshake.
pub fn proof(
    key: &LaneKey,
    hello: &[u8; HELLO_BYTES],
    challenge: &[u8; CHALLENGE_BYTES],
) -> [u8; PROOF_BYTES] {
    *key.mac(&[b"proof", hello, challenge]).as_bytes()
}

/// Whether `bytes` is the proof for this hello and challenge.
pub fn is_proof(
    bytes: &[u8; PROOF_BYTES],
    key: &LaneKey,
    hello: &[u8; HELLO_BYTES],
    challenge: &[u8; CHALLENGE_BYTES],
) -> bool {
    same(&key.mac(&[b"proof", hello, challenge]), bytes)
}

/// Constant-time comparison (that of `blake3::Hash`).
fn same(expected: &blake3::Hash, bytes: &[u8]) -> bool {
    <[u8; MAC_BYTES]>::try_from(bytes).is_ok_and(|bytes| *expected == bytes)
}

fn put_version(bytes: &mut [u8], version: ProtocolVersion) {
    bytes[..4].copy_from_slice(&version.major.to_le_bytes());
    bytes[4..8].copy_from_slice(&version.minor.to_le_bytes());
    bytes[8..16].copy_from_slice(&version.features.to_le_bytes());
}

fn version(bytes: &[u8]) -> Option<ProtocolVersion> {
    Some(ProtocolVersion {
        major: u32::from_le_bytes(bytes[..4].try_into().ok()?),
        minor: u32::from_le_bytes(bytes[4..8].try_into().ok()?),
        features: u64::from_le_bytes(bytes[8..16].try_into().ok()?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_proto::protocol::CURRENT;
    use proptest::prelude::*;

    fn hello() -> Hello {
        Hello {
            version: CURRENT,
            session: SessionId(3),
            nonce: [4; 16],
        }
    }

    fn challenge() -> Challenge {
        Challenge {
            verdict: Verdict::Welcome,
            version: CURRENT,
            nonce: [6; 16],
        }
    }

    #[test]
    fn both_ends_agree_with_the_same_key() {
        let key = LaneKey::random();
        let first = hello().encode(&key);
        assert_eq!(Hello::decode(&first, &key), Some(hello()));
        let second = challenge().encode(&key, &first);
        assert_eq!(Challenge::decode(&second, &key, &first), Some(challenge()));
        assert!(is_proof(
            &proof(&key, &first, &second),
            &key,
            &first,
            &second
        ));
    }

    #[test]
    fn another_key_is_refused_at_every_message() {
        let (key, other) = (LaneKey::random(), LaneKey::random());
        let first = hello().encode(&key);
        let second = challenge().encode(&key, &first);
        assert_eq!(Hello::decode(&first, &other), None);
        assert_eq!(Challenge::decode(&second, &other, &first), None);
        assert!(!is_proof(
            &proof(&other, &first, &second),
            &key,
            &first,
            &second
        ));
    }

    #[test]
    fn a_recorded_proof_is_worthless_for_a_new_challenge() {
        let key = LaneKey::random();
        let first = hello().encode(&key);
        let recorded = proof(&key, &first, &challenge().encode(&key, &first));
        let fresh = Challenge {
            nonce: [7; 16],
            ..challenge()
        }
        .encode(&key, &first);
        assert!(!is_proof(&recorded, &key, &first, &fresh));
    }

    proptest! {
        #[test]
        fn random_hellos_never_pass(bytes in proptest::collection::vec(any::<u8>(), HELLO_BYTES)) {
            let bytes: [u8; HELLO_BYTES] = bytes.try_into().unwrap();
            prop_assert_eq!(Hello::decode(&bytes, &LaneKey([1; 32])), None);
        }
    }
}
