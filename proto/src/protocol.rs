//! The version every handshake carries, and the feature bits beside it.
//!
//! A peer of the same major and of minor N or N−1 is compatible. Fields a peer
//! does not know are tolerated; feature bits say what it may be asked for.

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind};

/// The wire version of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProtocolVersion {
    /// Changed when old peers cannot take part at all.
    pub major: u32,
    /// Changed when something was added; N and N−1 interoperate.
    pub minor: u32,
    /// One bit per optional ability, see the `FEATURE_*` constants.
    pub features: u64,
}

/// The data lane can carry frames of a TCP connection.
pub const FEATURE_TCP_LANE: u64 = 1 << 0;
/// The data lane can hand blocks over inside one process.
pub const FEATURE_LOOPBACK_LANE: u64 = 1 << 1;
/// Blocks of another layout can be sent, or re-laid out on arrival: see
/// [`crate::relayout`].
pub const FEATURE_RELAYOUT: u64 = 1 << 2;
/// The data port can read what is lent to it over NIXL; set only if it was told to.
pub const FEATURE_NIXL_LANE: u64 = 1 << 3;

/// What this build speaks.
pub const CURRENT: ProtocolVersion = ProtocolVersion {
    major: 1,
    minor: 0,
    features: FEATURE_TCP_LANE | FEATURE_LOOPBACK_LANE | FEATURE_RELAYOUT,
};

impl ProtocolVersion {
    /// Whether two processes may work together.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] naming the field and both values.
    pub fn check_peer(self, peer: Self) -> Result<(), Error> {
        if self.major != peer.major {
            return Err(mismatch("protocol.major", self.major, peer.major));
        }
        if self.minor.abs_diff(peer.minor) > 1 {
            return Err(mismatch("protocol.minor", self.minor, peer.minor));
        }
        Ok(())
    }

    /// Whether every ability of `features` is there.
    pub const fn has(self, features: u64) -> bool {
        self.features & features == features
    }
}

fn mismatch(field: &str, ours: u32, theirs: u32) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        format!("this process speaks {ours}, the peer speaks {theirs}"),
    )
    .with_field(field)
    .with_reason("PROTOCOL_MISMATCH")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_feature_has_a_bit_of_its_own() {
        let all = [
            FEATURE_TCP_LANE,
            FEATURE_LOOPBACK_LANE,
            FEATURE_RELAYOUT,
            FEATURE_NIXL_LANE,
        ];
        let both = all.iter().fold(0, |both, one| both | one);
        assert_eq!(both.count_ones() as usize, all.len());
    }

    #[test]
    fn accepts_the_neighbouring_minor_and_refuses_the_rest_by_name() {
        let ours = ProtocolVersion {
            major: 1,
            minor: 3,
            features: 0,
        };
        assert!(
            ours.check_peer(ProtocolVersion { minor: 2, ..ours })
                .is_ok()
        );
        assert!(
            ours.check_peer(ProtocolVersion { minor: 4, ..ours })
                .is_ok()
        );
        let error = ours
            .check_peer(ProtocolVersion { minor: 1, ..ours })
            .unwrap_err();
        assert_eq!(error.field, "protocol.minor");
        assert!(error.message.contains('3') && error.message.contains('1'));
        let error = ours
            .check_peer(ProtocolVersion { major: 2, ..ours })
            .unwrap_err();
        assert_eq!(error.field, "protocol.major");
    }
}
