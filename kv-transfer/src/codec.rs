//! The data lane's frames: a fixed header, then a payload.
//!
//! Decoding reads untrusted bytes. It allocates nothing by itself, checks the
//! header's own checksum before any field, and bounds every length before the
//! caller may act on it. There are no sockets here.

/// Largest payload of one data frame. A part (one layer of one block) has to fit.
pub const PAYLOAD_BYTES_MAX: usize = 4 << 20;

/// Largest opaque payload of a commit.
pub const COMMIT_PAYLOAD_BYTES_MAX: usize = 60 << 10;

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
    #[error("a payload of `{0}` bytes is over the limit")]
    PayloadLength(u32),
    #[error("the payload's checksum does not match")]
    PayloadChecksum,
    #[error("the payload does not have the form of its kind")]
    Payload,
}
