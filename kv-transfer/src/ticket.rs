//! The secrets and names a data lane works with.
//!
//! A [`Ticket`] is the right of one attempt to write into one reservation; a
//! [`LaneKey`] is what a connection proves before it may name any ticket; a
//! [`ProcessToken`] tells a sender that the receiver lives in its own process.
//! None of them is ever logged in full.

use std::fmt;

use baton_proto::kv_layout::{KvGroupKind, KvLayout};
use bytes::Bytes;

use crate::codec::Control;

/// The right of one attempt to write into one reservation. Random per grant.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u128);

impl Ticket {
    /// A fresh ticket from the operating system's generator.
    pub fn random() -> Self {
        Self(rand::random())
    }

    /// As it travels in control messages.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_le_bytes()
    }

    /// The ticket that [`Ticket::to_bytes`] wrote; `None` unless `bytes` is 16 long.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        Some(Self(u128::from_le_bytes(bytes.try_into().ok()?)))
    }
}

/// Only the first four hex digits: enough to follow a transfer in a log, too few to use it.
impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ticket({:04x}..)", self.0 >> 112)
    }
}

/// What a data connection authenticates with. One per receiver life; handed to
/// senders over the control plane together with a ticket.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct LaneKey(pub [u8; 32]);

impl LaneKey {
    /// A fresh key from the operating system's generator.
    pub fn random() -> Self {
        Self(rand::random())
    }

    /// The key whose bytes travelled in a control message; `None` unless 32 long.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        Some(Self(bytes.try_into().ok()?))
    }

    /// Keyed BLAKE3 over `parts`, each preceded by its length.
    pub(crate) fn mac(&self, parts: &[&[u8]]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        hasher.finalize()
    }
}

impl fmt::Debug for LaneKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LaneKey(..)")
    }
}

/// Names one [`crate::receiver::Receiver`] of this or another process. A sender
/// that finds it in its own process copies directly instead of using a socket.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ProcessToken(pub u128);

impl ProcessToken {
    /// A fresh token.
    pub fn random() -> Self {
        Self(rand::random())
    }

    /// As it travels in control messages.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_le_bytes()
    }

    /// The token that [`ProcessToken::to_bytes`] wrote; `None` unless `bytes` is 16 long.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        Some(Self(u128::from_le_bytes(bytes.try_into().ok()?)))
    }
}

impl fmt::Debug for ProcessToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProcessToken({:04x}..)", self.0 >> 112)
    }
}

/// One life of a [`crate::sender::Sender`]: random, authenticated by the hello.
/// A ticket belongs to the first session that opens it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionId(pub u128);

impl SessionId {
    /// A fresh session.
    pub fn random() -> Self {
        Self(rand::random())
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SessionId({:04x}..)", self.0 >> 112)
    }
}

/// A digest of the sender's or receiver's KV layout. Unequal digests are refused
/// when a transfer opens, before any block moves; a sender that knows its layout to be
/// another one describes it instead ([`Opening`]).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct LayoutDigest(pub [u8; 32]);

impl LayoutDigest {
    /// The digest of every field that decides what a block's bytes mean.
    pub fn of(layout: &KvLayout) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("baton.v1 kv layout");
        let mut number = |value: u32| {
            hasher.update(&value.to_le_bytes());
        };
        number(layout.block_size);
        number(layout.scale_group);
        number(layout.kv_heads);
        number(layout.head_dim);
        number(layout.layers);
        number(layout.groups.len() as u32);
        for group in &layout.groups {
            number(match group.kind {
                KvGroupKind::Full => 0,
                KvGroupKind::SlidingWindow { window } => window,
            });
            number(group.layers.len() as u32);
            group.layers.iter().copied().for_each(&mut number);
        }
        hasher.update(layout.dtype.name().as_bytes());
        hasher.update(&layout.numerics.0);
        if let Some(shard) = layout.shard {
            hasher.update(&shard.first_head.to_le_bytes());
            hasher.update(&shard.model_heads.to_le_bytes());
        }
        Self(*hasher.finalize().as_bytes())
    }
}

/// What a sender says of its layout when it opens a ticket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opening {
    /// It is the receiver's: the digest shows it.
    Same(LayoutDigest),
    /// It is another one, described for the receiver to re-lay out what arrives.
    Other(Bytes),
}

impl Opening {
    /// The opening of a sender laid out as `own` towards a receiver laid out as `peer`,
    /// which must be able to re-lay out if the two differ.
    pub fn towards(own: &KvLayout, peer: &KvLayout) -> Self {
        let digest = LayoutDigest::of(own);
        if digest == LayoutDigest::of(peer) {
            Self::Same(digest)
        } else {
            Self::Other(own.to_json().into())
        }
    }

    pub(crate) fn frame(&self) -> Control {
        match self {
            Self::Same(layout) => Control::Open { layout: *layout },
            Self::Other(layout) => Control::OpenAs {
                layout: layout.clone(),
            },
        }
    }
}

impl From<LayoutDigest> for Opening {
    fn from(digest: LayoutDigest) -> Self {
        Self::Same(digest)
    }
}

impl fmt::Debug for LayoutDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LayoutDigest({:02x}{:02x}..)", self.0[0], self.0[1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_do_not_appear_in_debug_output() {
        assert_eq!(format!("{:?}", LaneKey([7; 32])), "LaneKey(..)");
        assert!(format!("{:?}", Ticket(u128::MAX)).len() < 16);
    }

    #[test]
    fn bytes_of_the_wrong_length_are_no_ticket() {
        let ticket = Ticket::random();
        assert_eq!(Ticket::from_bytes(&ticket.to_bytes()), Some(ticket));
        assert_eq!(Ticket::from_bytes(&[0; 15]), None);
        assert_eq!(LaneKey::from_bytes(&[0; 31]), None);
    }
}
