//! The data lane's frames: a fixed header, then a payload.
//!
//! Decoding reads untrusted bytes. It checks the header's own checksum before any
//! field, and bounds every length before the caller may act on it; what it
//! allocates is bounded by [`CONTROL_BYTES_MAX`]. There are no sockets here.
//!
//! ```text
//! offset 0        4       5    6     8      24    32      36    40    44    48      52      56       60    64
//!        | magic | vers. | kind|group|ticket|epoch|attempt|layer|first|count|pay.len|pay.crc|reserved|h.crc|
//! ```
//! All integers are little endian. `group`, `layer`, `first` (ordinal) and `count`
//! name the parts of a `Data`, `Nack` or `Offer` frame and are zero elsewhere.

pub mod control;
pub mod hello;

use baton_proto::{Attempt, Epoch};

pub use control::Control;

use crate::part::{PartRange, crc32c};
use crate::ticket::Ticket;

/// Largest payload of one data frame. A part (one layer of one block) has to fit.
pub const PAYLOAD_BYTES_MAX: usize = 4 << 20;

/// Consecutive parts are joined into one frame up to this size.
pub const COALESCE_BYTES: usize = 256 << 10;

/// Parts in one data frame at most: one iovec each, and one more for the next header,
/// stays within the 1024 that `readv` takes.
pub const FRAME_PARTS_MAX: u32 = 1000;

/// Largest payload of any frame that carries no block bytes.
pub const CONTROL_BYTES_MAX: usize = 64 << 10;

/// Largest opaque payload of a commit.
pub const COMMIT_PAYLOAD_BYTES_MAX: usize = 60 << 10;

/// Bytes of a frame header.
pub const HEADER_BYTES: usize = 64;

const MAGIC: u32 = u32::from_le_bytes(*b"BTNF");
const VERSION: u8 = 1;

/// Why bytes are not a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    #[error("the magic number is `{0:08x}`")]
    Magic(u32),
    #[error("frame version `{0}` is not spoken here")]
    Version(u8),
    #[error("the header's checksum does not match")]
    HeaderChecksum,
    #[error("frame kind `{0}` is not known")]
    Kind(u8),
    #[error("a payload of `{0}` bytes is over the limit of its kind")]
    PayloadLength(u32),
    #[error("a range of `{count}` parts from ordinal `{first}` is not allowed")]
    Range { first: u32, count: u32 },
    #[error("the payload's checksum does not match")]
    PayloadChecksum,
    #[error("the payload does not have the form of its kind")]
    Payload,
}

/// What a frame says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Sender: I hold this ticket; what do you lack? Also after a reconnect.
    Open = 1,
    /// Receiver: these parts are missing.
    Opened = 2,
    /// Sender: the bytes of consecutive parts.
    Data = 3,
    /// Receiver: payload bytes consumed since `Opened`.
    Ack = 4,
    /// Receiver: this frame arrived damaged; send its parts again.
    Nack = 5,
    /// Sender: that was everything; root digest and opaque payload.
    Commit = 6,
    /// Receiver: these parts are missing, so the commit does not count yet.
    Missing = 7,
    /// Receiver: accepted. Terminal.
    Committed = 8,
    /// Receiver: not accepted, now or later. Terminal.
    Refused = 9,
    /// Sender: given up. Terminal.
    Abort = 10,
    /// Receiver: heard the abort.
    Aborted = 11,
    Ping = 12,
    Pong = 13,
    /// Sender, in shared memory or over NIXL: where the bytes of consecutive parts lie.
    Offer = 14,
    /// Sender, before anything else: how its memory can be read over NIXL.
    Lend = 15,
    /// Receiver: how much it will have offered at once; 0 if it cannot read there.
    Lent = 16,
    /// Sender: as `Open`, with blocks of another layout than the receiver's. Only sent to
    /// receivers that are known to understand it.
    OpenAs = 17,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Open,
            2 => Self::Opened,
            3 => Self::Data,
            4 => Self::Ack,
            5 => Self::Nack,
            6 => Self::Commit,
            7 => Self::Missing,
            8 => Self::Committed,
            9 => Self::Refused,
            10 => Self::Abort,
            11 => Self::Aborted,
            12 => Self::Ping,
            13 => Self::Pong,
            14 => Self::Offer,
            15 => Self::Lend,
            16 => Self::Lent,
            17 => Self::OpenAs,
            _ => return None,
        })
    }
}

/// Whom a frame is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scope {
    pub ticket: Ticket,
    pub epoch: Epoch,
    pub attempt: Attempt,
}

impl Scope {
    /// The scope of frames about the lane itself.
    pub const LANE: Self = Self {
        ticket: Ticket(0),
        epoch: Epoch(0),
        attempt: Attempt(0),
    };
}

/// A decoded and bounded frame header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub kind: Kind,
    pub scope: Scope,
    /// The parts of a `Data`, `Nack` or `Offer` frame; all zero elsewhere.
    pub range: PartRange,
    pub payload_len: u32,
    /// `Data`: see [`crate::part`]; otherwise CRC-32C of the payload.
    pub payload_crc: u32,
}

impl Header {
    /// The bytes that travel.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC.to_le_bytes());
        put(4, &[VERSION, self.kind as u8]);
        put(6, &self.range.group.to_le_bytes());
        put(8, &self.scope.ticket.0.to_le_bytes());
        put(24, &self.scope.epoch.0.to_le_bytes());
        put(32, &self.scope.attempt.0.to_le_bytes());
        put(36, &self.range.layer.to_le_bytes());
        put(40, &self.range.first.to_le_bytes());
        put(44, &self.range.count.to_le_bytes());
        put(48, &self.payload_len.to_le_bytes());
        put(52, &self.payload_crc.to_le_bytes());
        let crc = crc32c(&bytes[..60]);
        bytes[60..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Reads a header and checks everything that can be checked without the payload.
    ///
    /// # Errors
    /// [`CodecError`]; the lane it came from is out of step and has to be closed.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, CodecError> {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u32_at = |at: usize| u32::from(u16_at(at)) | (u32::from(u16_at(at + 2)) << 16);
        let u64_at = |at: usize| u64::from(u32_at(at)) | (u64::from(u32_at(at + 4)) << 32);
        let u128_at = |at: usize| u128::from(u64_at(at)) | (u128::from(u64_at(at + 8)) << 64);
        if u32_at(0) != MAGIC {
            return Err(CodecError::Magic(u32_at(0)));
        }
        if bytes[4] != VERSION {
            return Err(CodecError::Version(bytes[4]));
        }
        if crc32c(&bytes[..60]) != u32_at(60) {
            return Err(CodecError::HeaderChecksum);
        }
        let header = Self {
            kind: Kind::from_byte(bytes[5]).ok_or(CodecError::Kind(bytes[5]))?,
            scope: Scope {
                ticket: Ticket(u128_at(8)),
                epoch: Epoch(u64_at(24)),
                attempt: Attempt(u32_at(32)),
            },
            range: PartRange {
                group: u16_at(6),
                layer: u32_at(36),
                first: u32_at(40),
                count: u32_at(44),
            },
            payload_len: u32_at(48),
            payload_crc: u32_at(52),
        };
        header.check()?;
        Ok(header)
    }

    fn check(&self) -> Result<(), CodecError> {
        let length = self.payload_len as usize;
        let allowed = match self.kind {
            Kind::Data => 1..=PAYLOAD_BYTES_MAX,
            _ => 0..=CONTROL_BYTES_MAX,
        };
        if !allowed.contains(&length) {
            return Err(CodecError::PayloadLength(self.payload_len));
        }
        let PartRange { first, count, .. } = self.range;
        if matches!(self.kind, Kind::Data | Kind::Nack | Kind::Offer)
            && (count > FRAME_PARTS_MAX || self.range.last().is_none())
        {
            return Err(CodecError::Range { first, count });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> Header {
        Header {
            kind: Kind::Data,
            scope: Scope {
                ticket: Ticket(0x0123_4567_89ab_cdef_0011_2233_4455_6677),
                epoch: Epoch(0x8899_aabb_ccdd_eeff),
                attempt: Attempt(3),
            },
            range: PartRange {
                group: 1,
                layer: 29,
                first: 7,
                count: 21,
            },
            payload_len: 258_048,
            payload_crc: 0xdead_beef,
        }
    }

    #[test]
    fn a_header_survives_the_wire() {
        assert_eq!(Header::decode(&header().encode()), Ok(header()));
    }

    #[test]
    fn every_single_flipped_bit_is_noticed() {
        for bit in 0..HEADER_BYTES * 8 {
            let mut bytes = header().encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&bytes).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn giant_and_negative_lengths_are_refused_although_the_checksum_is_right() {
        for payload_len in [0, (PAYLOAD_BYTES_MAX + 1) as u32, 1 << 31, u32::MAX] {
            let bytes = Header {
                payload_len,
                ..header()
            }
            .encode();
            assert_eq!(
                Header::decode(&bytes),
                Err(CodecError::PayloadLength(payload_len))
            );
        }
        for (first, count) in [
            (0, 0),
            (0, FRAME_PARTS_MAX + 1),
            (u32::MAX, 2),
            (0, u32::MAX),
        ] {
            let range = PartRange {
                first,
                count,
                ..header().range
            };
            let bytes = Header { range, ..header() }.encode();
            assert_eq!(
                Header::decode(&bytes),
                Err(CodecError::Range { first, count })
            );
        }
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::array::uniform32(any::<u8>()), tail in proptest::array::uniform32(any::<u8>())) {
            let mut raw = [0; HEADER_BYTES];
            raw[..32].copy_from_slice(&bytes);
            raw[32..].copy_from_slice(&tail);
            let _ = Header::decode(&raw);
            // The same with the checks that stop most random bytes already passed.
            raw[..4].copy_from_slice(&MAGIC.to_le_bytes());
            raw[4] = VERSION;
            let crc = crc32c(&raw[..60]);
            raw[60..].copy_from_slice(&crc.to_le_bytes());
            if let Ok(header) = Header::decode(&raw) {
                prop_assert!(header.payload_len as usize <= PAYLOAD_BYTES_MAX);
                prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
            }
        }
    }
}
