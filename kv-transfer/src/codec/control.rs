//! Frames that carry no block bytes, as values.

use baton_proto::kv_layout::ByteExtent;
use bytes::Bytes;

use super::{CONTROL_BYTES_MAX, CodecError, HEADER_BYTES, Header, Kind, Scope};
use crate::error::Refusal;
use crate::nixl::Lend;
use crate::part::{Missing, PartRange, crc32c};
use crate::ticket::LayoutDigest;

/// Bytes of one range in a list of missing parts.
const RANGE_BYTES: usize = 14;
/// Bytes of one extent in an offer.
const EXTENT_BYTES: usize = 14;
/// Ranges one list may hold; a longer list is cut and says so.
pub const MISSING_RANGES_MAX: usize = (CONTROL_BYTES_MAX - 1) / RANGE_BYTES;
/// Bytes of an abort's reason; a longer one is cut.
pub const REASON_BYTES_MAX: usize = 512;

const NO_PARTS: PartRange = PartRange {
    group: 0,
    layer: 0,
    first: 0,
    count: 0,
};

/// A frame other than `Data`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Control {
    Open {
        layout: LayoutDigest,
    },
    /// The sender's layout, as it describes it.
    OpenAs {
        layout: Bytes,
    },
    Opened(Missing),
    Ack {
        consumed: u64,
    },
    Nack(PartRange),
    Commit {
        root: u32,
        parts: u64,
        payload: Bytes,
    },
    Missing(Missing),
    Committed,
    Refused(Refusal),
    Abort {
        reason: String,
    },
    Aborted,
    Ping,
    Pong,
    /// As `Data`, but the payload is where `extents` of the sender's memory say.
    Offer {
        range: PartRange,
        crc: u32,
        extents: Vec<ByteExtent>,
    },
    Lend(Lend),
    Lent {
        bytes: u64,
    },
}

impl Control {
    /// The kind byte of this frame.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Open { .. } => Kind::Open,
            Self::OpenAs { .. } => Kind::OpenAs,
            Self::Opened(_) => Kind::Opened,
            Self::Ack { .. } => Kind::Ack,
            Self::Nack(_) => Kind::Nack,
            Self::Commit { .. } => Kind::Commit,
            Self::Missing(_) => Kind::Missing,
            Self::Committed => Kind::Committed,
            Self::Refused(_) => Kind::Refused,
            Self::Abort { .. } => Kind::Abort,
            Self::Aborted => Kind::Aborted,
            Self::Ping => Kind::Ping,
            Self::Pong => Kind::Pong,
            Self::Offer { .. } => Kind::Offer,
            Self::Lend(_) => Kind::Lend,
            Self::Lent { .. } => Kind::Lent,
        }
    }

    /// Header and payload as they travel.
    pub fn encode(&self, scope: Scope) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        let mut range = NO_PARTS;
        match self {
            Self::Open { layout } => bytes.extend_from_slice(&layout.0),
            Self::OpenAs { layout } => bytes.extend_from_slice(layout),
            Self::Opened(missing) | Self::Missing(missing) => encode_missing(missing, &mut bytes),
            Self::Ack { consumed } => bytes.extend_from_slice(&consumed.to_le_bytes()),
            Self::Nack(damaged) => range = *damaged,
            Self::Commit {
                root,
                parts,
                payload,
            } => {
                bytes.extend_from_slice(&root.to_le_bytes());
                bytes.extend_from_slice(&parts.to_le_bytes());
                bytes.extend_from_slice(payload);
            }
            Self::Refused(refusal) => bytes.extend_from_slice(&refusal.code().to_le_bytes()),
            Self::Abort { reason } => bytes.extend_from_slice(cut(reason).as_bytes()),
            Self::Offer {
                range: parts,
                crc,
                extents,
            } => {
                range = *parts;
                bytes.extend_from_slice(&crc.to_le_bytes());
                for extent in extents {
                    bytes.extend_from_slice(&extent.region.to_le_bytes());
                    bytes.extend_from_slice(&extent.offset.to_le_bytes());
                    bytes.extend_from_slice(&extent.len.to_le_bytes());
                }
            }
            Self::Lend(lend) => encode_lend(lend, &mut bytes),
            Self::Lent { bytes: room } => bytes.extend_from_slice(&room.to_le_bytes()),
            Self::Committed | Self::Aborted | Self::Ping | Self::Pong => {}
        }
        let payload = &bytes[HEADER_BYTES..];
        let header = Header {
            kind: self.kind(),
            scope,
            range,
            payload_len: payload.len() as u32,
            payload_crc: crc32c(payload),
        };
        bytes[..HEADER_BYTES].copy_from_slice(&header.encode());
        bytes
    }

    /// The frame of a decoded `header` and its whole payload.
    ///
    /// # Errors
    /// [`CodecError`]; the lane has to be closed.
    pub fn decode(header: &Header, payload: &[u8]) -> Result<Self, CodecError> {
        if payload.len() != header.payload_len as usize {
            return Err(CodecError::Payload);
        }
        if crc32c(payload) != header.payload_crc {
            return Err(CodecError::PayloadChecksum);
        }
        let empty = |control: Self| {
            if payload.is_empty() {
                Ok(control)
            } else {
                Err(CodecError::Payload)
            }
        };
        match header.kind {
            Kind::Open => {
                let digest = payload.try_into().map_err(|_| CodecError::Payload)?;
                Ok(Self::Open {
                    layout: LayoutDigest(digest),
                })
            }
            Kind::OpenAs => Ok(Self::OpenAs {
                layout: Bytes::copy_from_slice(payload),
            }),
            Kind::Opened => decode_missing(payload).map(Self::Opened),
            Kind::Missing => decode_missing(payload).map(Self::Missing),
            Kind::Ack => {
                let consumed = payload.try_into().map_err(|_| CodecError::Payload)?;
                Ok(Self::Ack {
                    consumed: u64::from_le_bytes(consumed),
                })
            }
            Kind::Nack => empty(Self::Nack(header.range)),
            Kind::Commit => {
                let (root, rest) = payload.split_first_chunk().ok_or(CodecError::Payload)?;
                let (parts, rest) = rest.split_first_chunk().ok_or(CodecError::Payload)?;
                Ok(Self::Commit {
                    root: u32::from_le_bytes(*root),
                    parts: u64::from_le_bytes(*parts),
                    payload: Bytes::copy_from_slice(rest),
                })
            }
            Kind::Refused => {
                let code = payload.try_into().map_err(|_| CodecError::Payload)?;
                Ok(Self::Refused(Refusal::from_code(u16::from_le_bytes(code))))
            }
            Kind::Abort => {
                let reason = &payload[..payload.len().min(REASON_BYTES_MAX)];
                Ok(Self::Abort {
                    reason: String::from_utf8_lossy(reason).into_owned(),
                })
            }
            Kind::Committed => empty(Self::Committed),
            Kind::Aborted => empty(Self::Aborted),
            Kind::Ping => empty(Self::Ping),
            Kind::Pong => empty(Self::Pong),
            Kind::Offer => {
                let (crc, rest) = payload.split_first_chunk().ok_or(CodecError::Payload)?;
                let (entries, tail) = rest.as_chunks::<EXTENT_BYTES>();
                if !tail.is_empty() || entries.len() != header.range.count as usize {
                    return Err(CodecError::Payload);
                }
                Ok(Self::Offer {
                    range: header.range,
                    crc: u32::from_le_bytes(*crc),
                    extents: entries.iter().map(decode_extent).collect(),
                })
            }
            Kind::Lend => decode_lend(payload)
                .map(Self::Lend)
                .ok_or(CodecError::Payload),
            Kind::Lent => {
                let bytes = payload.try_into().map_err(|_| CodecError::Payload)?;
                Ok(Self::Lent {
                    bytes: u64::from_le_bytes(bytes),
                })
            }
            Kind::Data => Err(CodecError::Payload),
        }
    }
}

fn encode_lend(lend: &Lend, bytes: &mut Vec<u8>) {
    bytes.extend_from_slice(&lend.probe);
    bytes.extend_from_slice(&lend.probe_at.to_le_bytes());
    bytes.extend_from_slice(&(lend.regions.len() as u16).to_le_bytes());
    for (base, len) in &lend.regions {
        bytes.extend_from_slice(&base.to_le_bytes());
        bytes.extend_from_slice(&len.to_le_bytes());
    }
    bytes.extend_from_slice(&lend.metadata);
}

fn decode_lend(payload: &[u8]) -> Option<Lend> {
    let (probe, rest) = payload.split_first_chunk()?;
    let (probe_at, rest) = rest.split_first_chunk()?;
    let (count, rest) = rest.split_first_chunk()?;
    let count = usize::from(u16::from_le_bytes(*count));
    let (regions, metadata) = rest.split_at_checked(count * 16)?;
    let (regions, _) = regions.as_chunks::<16>();
    let region = |bytes: &[u8; 16]| {
        let both = u128::from_le_bytes(*bytes);
        (both as u64, (both >> 64) as u64)
    };
    Some(Lend {
        probe: *probe,
        probe_at: u64::from_le_bytes(*probe_at),
        regions: regions.iter().map(region).collect(),
        metadata: Bytes::copy_from_slice(metadata),
    })
}

fn decode_extent(entry: &[u8; EXTENT_BYTES]) -> ByteExtent {
    let [r0, r1, offset @ .., l0, l1, l2, l3] = *entry;
    ByteExtent {
        offset: u64::from_le_bytes(offset),
        len: u32::from_le_bytes([l0, l1, l2, l3]),
        region: u16::from_le_bytes([r0, r1]),
    }
}

/// The longest prefix of `reason` that fits, ending at a character.
fn cut(reason: &str) -> &str {
    let mut end = reason.len().min(REASON_BYTES_MAX);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    &reason[..end]
}

fn encode_missing(missing: &Missing, bytes: &mut Vec<u8>) {
    let fits = missing.ranges.len() <= MISSING_RANGES_MAX;
    bytes.push(u8::from(missing.complete && fits));
    for range in missing.ranges.iter().take(MISSING_RANGES_MAX) {
        bytes.extend_from_slice(&range.group.to_le_bytes());
        bytes.extend_from_slice(&range.layer.to_le_bytes());
        bytes.extend_from_slice(&range.first.to_le_bytes());
        bytes.extend_from_slice(&range.count.to_le_bytes());
    }
}

fn decode_missing(payload: &[u8]) -> Result<Missing, CodecError> {
    let (&complete, rest) = payload.split_first().ok_or(CodecError::Payload)?;
    let (entries, tail) = rest.as_chunks::<RANGE_BYTES>();
    if complete > 1 || !tail.is_empty() {
        return Err(CodecError::Payload);
    }
    let u32_at = |entry: &[u8; RANGE_BYTES], at: usize| {
        u32::from_le_bytes([entry[at], entry[at + 1], entry[at + 2], entry[at + 3]])
    };
    let ranges: Vec<PartRange> = entries
        .iter()
        .map(|entry| PartRange {
            group: u16::from_le_bytes([entry[0], entry[1]]),
            layer: u32_at(entry, 2),
            first: u32_at(entry, 6),
            count: u32_at(entry, 10),
        })
        .collect();
    let key = |range: &PartRange| (range.group, range.layer, range.first);
    let ordered = ranges.is_sorted_by(|one, next| key(one) < key(next));
    if !ordered || ranges.iter().any(|range| range.last().is_none()) {
        return Err(CodecError::Payload);
    }
    Ok(Missing {
        ranges,
        complete: complete == 1,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ticket::Ticket;
    use baton_proto::{Attempt, Epoch};
    use proptest::prelude::*;

    const SCOPE: Scope = Scope {
        ticket: Ticket(7),
        epoch: Epoch(8),
        attempt: Attempt(9),
    };

    fn over_the_wire(control: &Control) -> Result<Control, CodecError> {
        let bytes = control.encode(SCOPE);
        let header = Header::decode(bytes[..HEADER_BYTES].try_into().unwrap())?;
        assert_eq!(header.scope, SCOPE);
        Control::decode(&header, &bytes[HEADER_BYTES..])
    }

    #[test]
    fn every_control_frame_survives_the_wire() {
        let missing = Missing {
            ranges: vec![
                PartRange {
                    group: 0,
                    layer: 1,
                    first: 2,
                    count: 3,
                },
                PartRange {
                    group: 1,
                    layer: 0,
                    first: 0,
                    count: 1,
                },
            ],
            complete: true,
        };
        for control in [
            Control::Open {
                layout: LayoutDigest([5; 32]),
            },
            Control::OpenAs {
                layout: Bytes::from_static(b"{}"),
            },
            Control::Opened(missing.clone()),
            Control::Missing(missing),
            Control::Ack { consumed: u64::MAX },
            Control::Nack(PartRange {
                group: 2,
                layer: 3,
                first: 4,
                count: 5,
            }),
            Control::Commit {
                root: 1,
                parts: 2,
                payload: Bytes::from_static(b"tokens"),
            },
            Control::Committed,
            Control::Refused(Refusal::Fenced),
            Control::Refused(Refusal::Other(99)),
            Control::Abort {
                reason: "the client left".to_owned(),
            },
            Control::Aborted,
            Control::Ping,
            Control::Pong,
            Control::Lend(Lend {
                probe: [3; 32],
                probe_at: 4,
                regions: vec![(5, 6), (u64::MAX, 7)],
                metadata: Bytes::from_static(b"keys"),
            }),
            Control::Lent { bytes: 8 << 20 },
            Control::Offer {
                range: PartRange {
                    group: 1,
                    layer: 2,
                    first: 3,
                    count: 2,
                },
                crc: 7,
                extents: vec![
                    ByteExtent {
                        offset: 1 << 40,
                        len: 9,
                        region: 3,
                    },
                    ByteExtent {
                        offset: 0,
                        len: u32::MAX,
                        region: 0,
                    },
                ],
            },
        ] {
            assert_eq!(over_the_wire(&control), Ok(control));
        }
    }

    #[test]
    fn a_list_that_is_too_long_is_cut_and_says_so() {
        let range = |first| PartRange {
            group: 0,
            layer: 0,
            first,
            count: 1,
        };
        let ranges: Vec<_> = (0..2 * MISSING_RANGES_MAX as u32)
            .map(|i| range(2 * i))
            .collect();
        let Ok(Control::Opened(cut)) = over_the_wire(&Control::Opened(Missing {
            ranges,
            complete: true,
        })) else {
            panic!("not decoded");
        };
        assert!(!cut.complete && cut.ranges.len() == MISSING_RANGES_MAX);
    }

    #[test]
    fn an_abort_reason_is_cut_at_a_character() {
        let Ok(Control::Abort { reason }) = over_the_wire(&Control::Abort {
            reason: "ä".repeat(1000),
        }) else {
            panic!("not decoded");
        };
        assert_eq!(reason, "ä".repeat(REASON_BYTES_MAX / 2));
    }

    #[test]
    fn a_damaged_payload_is_noticed() {
        let bytes = Control::Open {
            layout: LayoutDigest([5; 32]),
        }
        .encode(SCOPE);
        let header = Header::decode(bytes[..HEADER_BYTES].try_into().unwrap()).unwrap();
        let mut payload = bytes[HEADER_BYTES..].to_vec();
        payload[3] ^= 1;
        assert_eq!(
            Control::decode(&header, &payload),
            Err(CodecError::PayloadChecksum)
        );
    }

    proptest! {
        #[test]
        fn random_payloads_never_panic(kind in 1u8..=17, payload in proptest::collection::vec(any::<u8>(), 0..400)) {
            let kind = Kind::from_byte(kind).unwrap();
            let header = Header {
                kind,
                scope: SCOPE,
                range: NO_PARTS,
                payload_len: payload.len() as u32,
                payload_crc: crc32c(&payload),
            };
            if let Ok(control) = Control::decode(&header, &payload) {
                prop_assert_eq!(control.kind(), kind);
            }
        }
    }
}
