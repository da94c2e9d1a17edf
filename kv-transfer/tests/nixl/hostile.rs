//! A lane with the right key whose peer lends nonsense: it costs the lane, or NIXL, and never
//! a byte of a block.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use baton_kv_transfer::codec::hello::{CHALLENGE_BYTES, Hello, proof};
use baton_kv_transfer::codec::{Control, HEADER_BYTES, Header, Kind, Scope};
use baton_kv_transfer::nixl::Lend;
use baton_kv_transfer::part::PartRange;
use baton_kv_transfer::receiver::EventKind;
use baton_kv_transfer::sender::CommitOutcome;
use baton_kv_transfer::{MemoryRegion, NixlLender, NixlLibrary, SessionId, Ticket};
use baton_proto::Attempt;
use baton_proto::kv_layout::ByteExtent;
use baton_proto::protocol::{CURRENT, FEATURE_NIXL_LANE};
use bytes::Bytes;

use crate::moving;
use crate::nixl_library::library;
use crate::pair::{EPOCH, LAYOUT, Pair, Shape, Via};

const PART: u32 = 4096;
const LENT: usize = 5 << 20;

fn pair(library: &NixlLibrary) -> Pair {
    moving::pair(library, Via::Tcp, Shape::single(2, 4, PART), 41)
}

/// A few megabytes of ones, lent; kept for as long as the lender lives.
#[allow(unsafe_code)]
fn lender(library: &NixlLibrary) -> NixlLender {
    let bytes: &'static mut [u8] = vec![1u8; LENT].leak();
    // SAFETY: leaked, and nobody touches it any more.
    let region = unsafe { MemoryRegion::new(bytes.as_mut_ptr(), LENT, std::sync::Arc::new(())) };
    NixlLender::new(library, &vec![region]).unwrap()
}

fn scope(ticket: Ticket) -> Scope {
    Scope {
        ticket,
        epoch: EPOCH,
        attempt: Attempt(1),
    }
}

/// A lane with the right key, driven by hand, and the port's feature bits.
struct RawLane(TcpStream);

impl RawLane {
    fn connect(pair: &Pair) -> (Self, u64) {
        let address = pair.port.as_ref().unwrap().local_address();
        let mut stream = TcpStream::connect(address).unwrap();
        let wait = Some(Duration::from_secs(15));
        stream.set_read_timeout(wait).unwrap();
        let key = pair.receiver.lane_key();
        let hello = Hello {
            version: CURRENT,
            session: SessionId::random(),
            nonce: rand::random(),
        };
        let hello = hello.encode(key);
        stream.write_all(&hello).unwrap();
        let mut challenge = [0; CHALLENGE_BYTES];
        stream.read_exact(&mut challenge).unwrap();
        stream.write_all(&proof(key, &hello, &challenge)).unwrap();
        let features = u64::from_le_bytes(challenge[12..20].try_into().unwrap());
        (Self(stream), features)
    }

    /// One that has said how its memory can be read.
    fn lending(pair: &Pair, lend: Lend) -> Self {
        let (mut lane, features) = Self::connect(pair);
        assert_ne!(features & FEATURE_NIXL_LANE, 0);
        lane.say(Scope::LANE, &[Control::Lend(lend)]);
        lane
    }

    fn say(&mut self, scope: Scope, controls: &[Control]) {
        let bytes: Vec<u8> = controls.iter().flat_map(|c| c.encode(scope)).collect();
        // It may have been closed by then.
        let _ = self.0.write_all(&bytes);
    }

    /// The next frame that is not about the lane's life; `None` once it is closed.
    fn next(&mut self) -> Option<Control> {
        loop {
            let mut header = [0; HEADER_BYTES];
            match self.0.read_exact(&mut header) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    panic!("the port neither answered nor closed")
                }
                Err(_) => return None,
            }
            let header = Header::decode(&header).unwrap();
            let mut payload = vec![0; header.payload_len as usize];
            self.0.read_exact(&mut payload).unwrap();
            if !matches!(header.kind, Kind::Ping | Kind::Pong | Kind::Ack) {
                return Some(Control::decode(&header, &payload).unwrap());
            }
        }
    }

    fn open(&mut self, ticket: Ticket) {
        self.say(scope(ticket), &[Control::Open { layout: LAYOUT }]);
        assert!(matches!(self.next(), Some(Control::Opened(_))));
    }
}

fn offer(count: u32, extents: &[(u16, u64, u32)]) -> Control {
    let extent = |&(region, offset, len): &(u16, u64, u32)| ByteExtent {
        offset,
        len,
        region,
    };
    Control::Offer {
        range: PartRange {
            group: 0,
            layer: 0,
            first: 0,
            count,
        },
        crc: 0,
        extents: extents.iter().map(extent).collect(),
    }
}

/// A hand-over on a fresh lane still works.
async fn serves_on(pair: &mut Pair) {
    pair.assert_no_terminal_event();
    let before = pair.snapshot();
    assert_eq!(pair.hand_off(b"canary").await, CommitOutcome::Committed);
    assert!(matches!(pair.terminal().await, EventKind::Completed { .. }));
    pair.assert_equal(&before);
}

#[tokio::test]
async fn offers_of_what_was_not_lent_change_nothing_and_cost_the_lane() {
    let Some(library) = library() else { return };
    let mut pair = pair(&library);
    let before = pair.snapshot();
    let lender = lender(&library);
    let good = (0, 0, PART);
    // The keys are of other memory than the address.
    let mut elsewhere = lender.lend();
    elsewhere.regions[0].0 += 1 << 40;
    let huge = offer(1, &[(0, 0, 4 << 20)]);
    for (what, lend, offers) in [
        ("no region", None, vec![offer(1, &[(1, 0, PART)])]),
        (
            "past its end",
            None,
            vec![offer(1, &[(0, LENT as u64 - 1, 2)])],
        ),
        ("overflow", None, vec![offer(1, &[(0, u64::MAX, PART)])]),
        ("another length", None, vec![offer(1, &[(0, 0, PART - 1)])]),
        ("no bytes", None, vec![offer(1, &[(0, 0, 0)])]),
        ("fewer extents", None, vec![offer(2, &[good])]),
        (
            "too much at once",
            None,
            vec![huge.clone(), huge.clone(), huge],
        ),
        ("lent twice", None, vec![Control::Lend(lender.lend())]),
        ("not its memory", Some(elsewhere), vec![offer(1, &[good])]),
    ] {
        let ticket = pair.grant(1);
        let mut lane = RawLane::lending(&pair, lend.unwrap_or_else(|| lender.lend()));
        assert!(
            matches!(lane.next(), Some(Control::Lent { bytes }) if bytes > 0),
            "{what}"
        );
        lane.open(ticket);
        lane.say(scope(ticket), &offers);
        assert_eq!(lane.next(), None, "{what}");
        assert!(pair.snapshot() == before, "{what}");
        pair.receiver.revoke(ticket).await;
    }
    // A checksum that is not that of the bytes: they do not count.
    let ticket = pair.grant(1);
    let mut lane = RawLane::lending(&pair, lender.lend());
    assert!(matches!(lane.next(), Some(Control::Lent { .. })));
    lane.open(ticket);
    lane.say(scope(ticket), &[offer(1, &[good])]);
    assert!(matches!(lane.next(), Some(Control::Nack(_))));
    assert_eq!(pair.receiver.progress(ticket).unwrap().parts_received, 0);
    pair.receiver.revoke(ticket).await;
    serves_on(&mut pair).await;
}

#[tokio::test]
async fn what_comes_behind_an_offer_is_heard_behind_its_bytes() {
    let Some(library) = library() else { return };
    let pair = pair(&library);
    let lender = lender(&library);
    let mut lane = RawLane::lending(&pair, lender.lend());
    assert!(matches!(lane.next(), Some(Control::Lent { .. })));
    let ticket = pair.grant(1);
    lane.open(ticket);
    // The offer's checksum is wrong, so that its end shows.
    let offer = offer(1, &[(0, 0, PART)]);
    let open = Control::Open { layout: LAYOUT };
    let commit = Control::Commit {
        root: 0,
        parts: 8,
        payload: Bytes::new(),
    };
    lane.say(scope(ticket), &[offer.clone(), open, offer.clone(), commit]);
    let heard: Vec<Kind> = (0..4).map(|_| lane.next().unwrap().kind()).collect();
    let expected = [Kind::Nack, Kind::Opened, Kind::Nack, Kind::Missing];
    assert_eq!(heard, expected);
    // An abort waits for nothing.
    let reason = "enough".to_owned();
    lane.say(scope(ticket), &[offer, Control::Abort { reason }]);
    assert_eq!(lane.next(), Some(Control::Aborted));
}

#[tokio::test]
async fn memory_that_cannot_be_read_is_declined_before_anything_is_offered() {
    let Some(library) = library() else { return };
    let mut pair = pair(&library);
    let lender = lender(&library);
    let changed = |change: fn(&mut Lend)| {
        let mut lend = lender.lend();
        change(&mut lend);
        lend
    };
    for (what, lend) in [
        ("other bytes", changed(|lend| lend.probe[0] ^= 1)),
        ("other place", changed(|lend| lend.probe_at += 1 << 40)),
        ("no agent", changed(|lend| lend.metadata = Bytes::new())),
        ("half an agent", changed(|lend| lend.metadata.truncate(40))),
    ] {
        let mut lane = RawLane::lending(&pair, lend);
        assert_eq!(lane.next(), Some(Control::Lent { bytes: 0 }), "{what}");
        // Offers have no meaning now.
        lane.say(scope(Ticket(1)), &[offer(1, &[(0, 0, PART)])]);
        assert_eq!(lane.next(), None, "{what}");
    }
    for (what, lend) in [
        ("no regions", changed(|lend| lend.regions.clear())),
        ("overflow", changed(|lend| lend.regions[0].0 = u64::MAX)),
        ("too many", changed(|lend| lend.regions = vec![(0, 1); 65])),
    ] {
        assert_eq!(RawLane::lending(&pair, lend).next(), None, "{what}");
    }
    serves_on(&mut pair).await;
}

#[tokio::test]
async fn a_port_without_nixl_takes_no_memory() {
    let Some(library) = library() else { return };
    let pair = Pair::new(Via::Tcp, Shape::single(2, 4, PART), 41);
    let (mut lane, features) = RawLane::connect(&pair);
    assert_eq!(features & FEATURE_NIXL_LANE, 0);
    lane.say(Scope::LANE, &[Control::Lend(lender(&library).lend())]);
    assert_eq!(lane.next(), None);
}
