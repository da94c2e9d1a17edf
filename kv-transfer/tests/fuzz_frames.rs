//! Fuzz targets of the data lane: the frame decoder alone, and a whole data port behind
//! an authenticated lane that says anything.
//!
//! `codec`: decoding never panics and takes memory in proportion to the payload; what
//! decodes is the same after a second trip. `lane`: whatever a peer with the right key
//! sends, only granted bytes change, the grant comes back when revoked, and the port
//! serves the next lane.
//!
//! `cargo test` draws a second's worth of cases per target. Longer, on stable:
//!
//! ```text
//! BOLERO_RANDOM_ITERATIONS=1000000000 BOLERO_RANDOM_TEST_TIME_MS=200000 \
//!     cargo test -p baton-kv-transfer --test fuzz_frames -- --nocapture
//! ```
//!
//! (200 s each on one shared core: 5,173,744 frames and 105,535 conversations; ten minutes each,
//! side by side on a busy machine, without a finding.) The
//! targets are bolero's, so that `cargo bolero test --sanitizer NONE` can steer them by
//! coverage. A failure prints the case and the `BOLERO_RANDOM_SEED` that repeats it.

#[path = "../../engine/tests/model_support/allocations.rs"]
mod allocations;
#[allow(dead_code)]
#[path = "handoff/pair.rs"]
mod pair;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Mutex;
use std::time::Duration;

use allocations::peak_of;
use baton_kv_transfer::codec::hello::{CHALLENGE_BYTES, HELLO_BYTES, Hello, proof};
use baton_kv_transfer::codec::{CONTROL_BYTES_MAX, Control, HEADER_BYTES, Header, Kind, Scope};
use baton_kv_transfer::part::PartRange;
use baton_kv_transfer::receiver::EventKind;
use baton_kv_transfer::sender::CommitOutcome;
use baton_kv_transfer::{SessionId, Ticket};
use baton_proto::protocol::CURRENT;
use baton_proto::{Attempt, Epoch};
use bolero::{TypeGenerator, produce};
use pair::{EPOCH, LAYOUT, Pair, Shape, Via};

const TEST_TIME: Duration = Duration::from_secs(1);

fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// Header bytes in which every checksum may be right although nothing else is.
#[derive(Clone, Debug, TypeGenerator)]
struct RawHeader {
    magic_is_right: Odds,
    checksum_is_right: Odds,
    payload_checksum_is_right: Odds,
    length_is_right: Odds,
    kind: u8,
    /// Everything between the kind and the checksum.
    fields: [u8; 54],
}

/// True 15 times in 16, so that most cases get past any one check.
#[derive(Clone, Copy, Debug, TypeGenerator)]
struct Odds(u8);

impl Odds {
    fn yes(self) -> bool {
        self.0 >= 16
    }
}

impl RawHeader {
    fn bytes(&self, payload: &[u8]) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        if self.magic_is_right.yes() {
            bytes[..5].copy_from_slice(b"BTNF\x01");
        }
        bytes[5] = self.kind % 19;
        bytes[6..60].copy_from_slice(&self.fields);
        if self.length_is_right.yes() {
            bytes[48..52].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        }
        if self.payload_checksum_is_right.yes() {
            bytes[52..56].copy_from_slice(&crc32c(payload).to_le_bytes());
        }
        if self.checksum_is_right.yes() {
            let crc = crc32c(&bytes[..60]);
            bytes[60..].copy_from_slice(&crc.to_le_bytes());
        }
        bytes
    }
}

#[test]
fn codec() {
    let payloads = produce::<Vec<u8>>().with().len(0..=300_usize);
    bolero::check!()
        .with_test_time(TEST_TIME)
        .with_generator((produce::<RawHeader>(), payloads))
        .for_each(|(raw, payload): &(RawHeader, Vec<u8>)| {
            let (decoded, bytes) = peak_of(|| {
                let header = Header::decode(&raw.bytes(payload)).ok()?;
                Some((header, Control::decode(&header, payload)))
            });
            // Text that is none grows to 3 bytes for 1, in a buffer that doubles and is
            // there twice while it moves.
            assert!(bytes <= 9 * payload.len() + 64, "{bytes} bytes");
            let Some((header, control)) = decoded else {
                return;
            };
            assert_eq!(Header::decode(&header.encode()), Ok(header));
            let Ok(control) = control else { return };
            assert!(header.kind != Kind::Data && payload.len() <= CONTROL_BYTES_MAX);
            let again = control.encode(header.scope);
            let (head, tail) = again.split_first_chunk().unwrap();
            let head = Header::decode(head).unwrap();
            assert_eq!((head.kind, head.scope), (header.kind, header.scope));
            match (Control::decode(&head, tail).unwrap(), control) {
                // Bytes that are no text are replaced, and what grew is cut again.
                (Control::Abort { reason: again }, Control::Abort { reason }) => {
                    assert!(reason.starts_with(&again));
                }
                (again, control) => assert_eq!(again, control),
            }
        });
}

/// Whom a frame claims to be about: mostly the live grant.
#[derive(Clone, Debug, TypeGenerator)]
struct Claim {
    ticket: Odds,
    epoch: Odds,
    attempt: Odds,
    other: u64,
}

impl Claim {
    fn scope(&self, ticket: Ticket) -> Scope {
        Scope {
            ticket: if self.ticket.yes() {
                ticket
            } else {
                Ticket(u128::from(self.other))
            },
            epoch: if self.epoch.yes() {
                EPOCH
            } else {
                Epoch(self.other)
            },
            attempt: Attempt(if self.attempt.yes() {
                1
            } else {
                self.other as u32
            }),
        }
    }
}

/// One thing that a peer says.
#[derive(Clone, Debug, TypeGenerator)]
enum Say {
    Open {
        claim: Claim,
        layout: Odds,
    },
    /// Whole parts of the size granted, unless `len` says otherwise.
    Data {
        claim: Claim,
        group: u8,
        layer: u8,
        first: u8,
        count: u8,
        len_is_right: Odds,
        len: u16,
        fill: u8,
        checksum: Odds,
        /// Bytes left out at the end, 0 most often; what follows is then out of step.
        cut_off: u8,
    },
    Commit {
        claim: Claim,
        root: u32,
        parts: u8,
    },
    Abort {
        claim: Claim,
    },
    Ping,
    /// A frame of any kind with any fields. Most end the lane, so that most are left out.
    Frame {
        left_out: Odds,
        header: RawHeader,
        payload: [u8; 40],
        len: u8,
    },
    Noise {
        left_out: Odds,
        bytes: [u8; 32],
    },
}

const LAYERS: u32 = 2;
const BLOCKS: u32 = 4;
const PART_BYTES: usize = 256;

impl Say {
    fn bytes(&self, ticket: Ticket) -> Vec<u8> {
        match self {
            Self::Open { claim, layout } => {
                let mut digest = LAYOUT;
                digest.0[0] ^= u8::from(!layout.yes());
                Control::Open { layout: digest }.encode(claim.scope(ticket))
            }
            Self::Data {
                claim,
                group,
                layer,
                first,
                count,
                len_is_right,
                len,
                fill,
                checksum,
                cut_off,
            } => {
                let count = u32::from(count % 16).min(BLOCKS);
                let len = if len_is_right.yes() {
                    count as usize * PART_BYTES
                } else {
                    usize::from(*len)
                };
                let payload = vec![*fill; len];
                let parts: Vec<u8> = payload
                    .chunks(PART_BYTES)
                    .flat_map(|part| crc32c(part).to_le_bytes())
                    .collect();
                let header = Header {
                    kind: Kind::Data,
                    scope: claim.scope(ticket),
                    range: PartRange {
                        group: u16::from(group / 250),
                        layer: u32::from(layer % 9 / 4),
                        first: u32::from(first % 5),
                        count,
                    },
                    payload_len: len as u32,
                    payload_crc: crc32c(&parts) ^ u32::from(!checksum.yes()),
                };
                let kept = len.saturating_sub(usize::from(cut_off.saturating_sub(240)));
                [&header.encode()[..], &payload[..kept]].concat()
            }
            Self::Commit { claim, root, parts } => Control::Commit {
                root: *root,
                parts: u64::from(*parts),
                payload: bytes::Bytes::from_static(b"fuzz"),
            }
            .encode(claim.scope(ticket)),
            Self::Abort { claim } => Control::Abort {
                reason: "fuzz".to_owned(),
            }
            .encode(claim.scope(ticket)),
            Self::Ping => Control::Ping.encode(Scope::LANE),
            Self::Frame { left_out, .. } | Self::Noise { left_out, .. } if left_out.yes() => {
                Vec::new()
            }
            Self::Frame {
                header,
                payload,
                len,
                ..
            } => {
                let payload = &payload[..usize::from(*len) % (payload.len() + 1)];
                [&header.bytes(payload)[..], payload].concat()
            }
            Self::Noise { bytes, .. } => bytes.to_vec(),
        }
    }
}

/// A lane with the right key.
fn open_lane(pair: &Pair, session: u128) -> std::io::Result<TcpStream> {
    let key = pair.receiver.lane_key();
    let mut stream = TcpStream::connect(pair.port.as_ref().unwrap().local_address())?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let hello: [u8; HELLO_BYTES] = Hello {
        version: CURRENT,
        session: SessionId(session),
        nonce: [1; 16],
    }
    .encode(key);
    stream.write_all(&hello)?;
    let mut challenge = [0; CHALLENGE_BYTES];
    stream.read_exact(&mut challenge)?;
    stream.write_all(&proof(key, &hello, &challenge))?;
    Ok(stream)
}

/// Which bytes of the one pool a grant covers.
fn granted(pair: &Pair) -> Vec<bool> {
    let request = pair.request(1, Duration::from_secs(1));
    let mut covered = vec![false; pair.snapshot()[0].len()];
    for extent in request.groups[0].blocks.iter().flat_map(|b| &b.layers) {
        covered[extent.offset as usize..][..extent.len as usize].fill(true);
    }
    covered
}

#[test]
fn lane() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _inside = runtime.enter();
    let pair = Pair::new(
        Via::Tcp,
        Shape::single(LAYERS, BLOCKS, PART_BYTES as u32),
        33,
    );
    let covered = granted(&pair);
    let said = (
        produce::<Odds>(),
        produce::<Vec<Say>>().with().len(1..=12_usize),
    );
    let state = Mutex::new((pair, 0_u128));
    bolero::check!()
        .with_test_time(TEST_TIME)
        .with_generator(said)
        .for_each(|(opened, said): &(Odds, Vec<Say>)| {
            let mut state = state.lock().unwrap_or_else(|poison| poison.into_inner());
            let (pair, session) = &mut *state;
            *session += 1;
            let before = pair.snapshot();
            let ticket = pair.grant(1);
            // The port closes on a peer that takes a second for its hello, and a busy
            // machine makes this one such a peer.
            let mut stream = (0..20)
                .find_map(|_| open_lane(pair, *session).ok())
                .expect("the port lets a peer with the key in");
            if opened.yes() {
                let scope = Scope {
                    ticket,
                    epoch: EPOCH,
                    attempt: Attempt(1),
                };
                let open = Control::Open { layout: LAYOUT };
                let _ = stream.write_all(&open.encode(scope));
            }
            for say in said {
                // The port may have closed on an earlier frame.
                if stream.write_all(&say.bytes(ticket)).is_err() {
                    break;
                }
            }
            let _ = stream.shutdown(Shutdown::Write);
            let mut answers = Vec::new();
            match stream.read_to_end(&mut answers) {
                Ok(_) => {}
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
            }
            runtime.block_on(async {
                let revoked = pair.receiver.revoke(ticket);
                let revoked = tokio::time::timeout(Duration::from_secs(5), revoked).await;
                revoked.expect("a revoked grant comes back");
            });
            while pair.events.try_recv().is_ok() {}
            let after = pair.snapshot();
            let strays = (covered.iter().zip(before[0].iter().zip(&after[0])))
                .filter(|(covered, (before, after))| !**covered && before != after)
                .count();
            assert_eq!(strays, 0, "bytes outside the grant changed");
        });
    let (mut pair, sessions) = state.into_inner().unwrap();
    println!(
        "lane: {sessions} conversations, {:?}",
        pair.receiver.statistics()
    );
    runtime.block_on(async {
        let before = pair.snapshot();
        assert_eq!(pair.hand_off(b"canary").await, CommitOutcome::Committed);
        assert!(matches!(pair.terminal().await, EventKind::Completed { .. }));
        pair.assert_equal(&before);
    });
}
