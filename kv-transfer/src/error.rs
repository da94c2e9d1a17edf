//! What can go wrong at this crate's boundary, each case with its values.
//!
//! [`Error::kind`] folds into the shared kinds, so that retries never parse text.

use std::io;

use baton_proto::{Attempt, ErrorKind};

use crate::codec::CodecError;

/// Why the receiver will not take (more of) a transfer. Travels on the wire as a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No such ticket here, or it belongs to another session.
    #[error("the ticket is not known here")]
    UnknownTicket,
    /// The epoch, attempt or ticket was superseded, or the reservation was revoked.
    #[error("the attempt is fenced")]
    Fenced,
    /// The reservation's time was over.
    #[error("the reservation expired")]
    Expired,
    /// The two ends lay out KV differently.
    #[error("the kv layouts differ")]
    LayoutMismatch,
    /// Payloads kept failing their checksum, or the root digests differ.
    #[error("the bytes arrived damaged")]
    Corrupt,
    /// The commit was asked for although blocks are missing that were never pushed.
    #[error("blocks are missing")]
    Incomplete,
    /// The sender gave the transfer up before.
    #[error("the transfer was aborted")]
    Aborted,
    /// A code this build does not know.
    #[error("refused with code `{0}`")]
    Other(u16),
}

impl Refusal {
    /// What the caller should do.
    pub const fn kind(self) -> ErrorKind {
        match self {
            Self::UnknownTicket | Self::Fenced => ErrorKind::Fenced,
            Self::Expired => ErrorKind::Deadline,
            Self::LayoutMismatch | Self::Corrupt => ErrorKind::Unavailable,
            Self::Incomplete => ErrorKind::Internal,
            Self::Aborted => ErrorKind::Cancelled,
            Self::Other(_) => ErrorKind::Unavailable,
        }
    }

    pub(crate) const fn code(self) -> u16 {
        match self {
            Self::UnknownTicket => 1,
            Self::Fenced => 2,
            Self::Expired => 3,
            Self::LayoutMismatch => 4,
            Self::Corrupt => 5,
            Self::Incomplete => 6,
            Self::Aborted => 7,
            Self::Other(code) => code,
        }
    }

    pub(crate) const fn from_code(code: u16) -> Self {
        match code {
            1 => Self::UnknownTicket,
            2 => Self::Fenced,
            3 => Self::Expired,
            4 => Self::LayoutMismatch,
            5 => Self::Corrupt,
            6 => Self::Incomplete,
            7 => Self::Aborted,
            other => Self::Other(other),
        }
    }
}

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An extent is outside its region, empty, or larger than a frame may be.
    #[error("extent of `{len}` bytes at `{offset}` does not fit region `{region}`")]
    Extent { region: u16, offset: u64, len: u32 },
    /// A grant or push contradicts itself; the text names the field.
    #[error("{0}")]
    Invalid(String),
    /// The table of grants or transfers is full.
    #[error("`{limit}` {what} are open already")]
    Full { what: &'static str, limit: usize },
    /// No such ticket in the grant table.
    #[error("the ticket is not in the grant table")]
    UnknownTicket,
    /// A new attempt must be higher than the one it fences.
    #[error("attempt `{asked}` does not follow attempt `{current}`")]
    AttemptOrder { current: Attempt, asked: Attempt },
    /// The transfer has ended on the receiver's word.
    #[error("the receiver refused the transfer: {0}")]
    Refused(Refusal),
    /// The transfer was given up on this side.
    #[error("the transfer was aborted: {0}")]
    Aborted(String),
    /// The peer could not be reached inside the deadline.
    #[error("the peer is lost: {0}")]
    PeerLost(String),
    /// No transport of this build reaches the target.
    #[error("no transport reaches the target: {0}")]
    Unreachable(String),
    /// Only one end wants TLS, or the two do not trust each other; trying again with the
    /// same settings does not help.
    #[error("TLS with the data port failed: {0}")]
    Tls(String),
    /// A peer broke the protocol; its lane is closed.
    #[error("protocol violation: {0}")]
    Protocol(String),
    /// A frame could not be decoded; its lane is closed.
    #[error("bad frame: {0}")]
    Codec(#[from] CodecError),
    /// The operating system refused.
    #[error("{context}: {source}")]
    Io {
        context: &'static str,
        source: io::Error,
    },
    /// This side is shutting down.
    #[error("shutting down")]
    Closed,
}

impl Error {
    /// What the caller should do.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Extent { .. } | Self::Invalid(_) => ErrorKind::Internal,
            Self::Full { .. } => ErrorKind::Overloaded,
            Self::UnknownTicket | Self::AttemptOrder { .. } => ErrorKind::Fenced,
            Self::Refused(refusal) => refusal.kind(),
            Self::Aborted(_) => ErrorKind::Cancelled,
            Self::PeerLost(_)
            | Self::Unreachable(_)
            | Self::Tls(_)
            | Self::Protocol(_)
            | Self::Codec(_)
            | Self::Io { .. }
            | Self::Closed => ErrorKind::Unavailable,
        }
    }

    pub(crate) fn io(context: &'static str, source: impl Into<io::Error>) -> Self {
        Self::Io {
            context,
            source: source.into(),
        }
    }
}
