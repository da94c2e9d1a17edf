//! Memory that is lent: what a peer may say about it, and when it is lent at all.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::Duration;

use baton_kv_transfer::codec::hello::{CHALLENGE_BYTES, HELLO_BYTES, Hello, proof};
use baton_kv_transfer::codec::{Control, HEADER_BYTES, Header, Kind, Scope};
use baton_kv_transfer::part::PartRange;
use baton_kv_transfer::receiver::EventKind;
use baton_kv_transfer::sender::{CommitOutcome, TransportKind};
use baton_kv_transfer::{SessionId, Ticket};
use baton_proto::Attempt;
use baton_proto::kv_layout::ByteExtent;
use baton_proto::protocol::CURRENT;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::pair::{EPOCH, LAYOUT, Pair, Shape, Via};

const PART: u32 = 4096;

fn pair() -> Pair {
    Pair::new(Via::Shared, Shape::single(2, 4, PART), 41)
}

/// A segment of one part, with its size sealed or not.
fn segment(sealed: bool) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = memfd_create("test", flags).unwrap();
    ftruncate(&fd, u64::from(PART)).unwrap();
    if sealed {
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    }
    fd
}

fn scope(ticket: Ticket) -> Scope {
    Scope {
        ticket,
        epoch: EPOCH,
        attempt: Attempt(1),
    }
}

/// A lane with the right key, driven by hand.
fn connect(pair: &Pair) -> UnixStream {
    let name = format!("baton-kv-{:032x}", pair.receiver.process_token().0);
    let address = SocketAddr::from_abstract_name(name).unwrap();
    let mut stream = UnixStream::connect_addr(&address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    let key = pair.receiver.lane_key();
    let hello = Hello {
        version: CURRENT,
        session: SessionId(9),
        nonce: [1; 16],
    };
    let hello: [u8; HELLO_BYTES] = hello.encode(key);
    stream.write_all(&hello).unwrap();
    let mut challenge = [0; CHALLENGE_BYTES];
    stream.read_exact(&mut challenge).unwrap();
    stream.write_all(&proof(key, &hello, &challenge)).unwrap();
    stream
}

/// Sends `fds` along with `bytes`.
fn lend(stream: &UnixStream, fds: &[OwnedFd], bytes: &[u8]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    assert!(fds.is_empty() || ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
    let bytes = [IoSlice::new(bytes)];
    sendmsg(stream, &bytes, &mut ancillary, SendFlags::NOSIGNAL).unwrap();
}

/// A lane that has lent `fds` and opened `ticket`.
fn raw_lane(pair: &Pair, fds: &[OwnedFd], ticket: Ticket) -> UnixStream {
    let stream = connect(pair);
    let ping = Control::Ping.encode(Scope::LANE);
    let open = Control::Open { layout: LAYOUT }.encode(scope(ticket));
    lend(&stream, fds, &[ping, open].concat());
    assert!(matches!(next(&stream), Some(Control::Opened(_))));
    stream
}

/// The next frame that says something, or none if the port closes.
fn next(mut stream: &UnixStream) -> Option<Control> {
    loop {
        let mut header = [0; HEADER_BYTES];
        match stream.read_exact(&mut header) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                panic!("the port neither answered nor closed")
            }
            Err(_) => return None,
        }
        let header = Header::decode(&header).unwrap();
        let mut payload = vec![0; header.payload_len as usize];
        stream.read_exact(&mut payload).unwrap();
        let quiet = matches!(header.kind, Kind::Ping | Kind::Pong | Kind::Ack);
        if !quiet {
            return Some(Control::decode(&header, &payload).unwrap());
        }
    }
}

fn offer(count: u32, extents: &[(u16, u64, u32)]) -> Control {
    Control::Offer {
        range: PartRange {
            group: 0,
            layer: 0,
            first: 0,
            count,
        },
        crc: 0,
        extents: extents
            .iter()
            .map(|&(region, offset, len)| ByteExtent {
                offset,
                len,
                region,
            })
            .collect(),
    }
}

#[tokio::test]
async fn offers_of_what_was_not_lent_change_nothing_and_cost_the_lane() {
    let mut pair = pair();
    let before = pair.snapshot();
    let good = (0, 0, PART);
    for (what, lent, offer) in [
        ("nothing lent", vec![], offer(1, &[good])),
        (
            "no such region",
            vec![segment(true)],
            offer(1, &[(1, 0, PART)]),
        ),
        (
            "past its end",
            vec![segment(true)],
            offer(1, &[(0, 1, PART)]),
        ),
        (
            "overflow",
            vec![segment(true)],
            offer(1, &[(0, u64::MAX, PART)]),
        ),
        (
            "another length",
            vec![segment(true)],
            offer(1, &[(0, 0, PART - 1)]),
        ),
        ("no bytes", vec![segment(true)], offer(1, &[(0, 0, 0)])),
        ("fewer extents", vec![segment(true)], offer(2, &[good])),
    ] {
        let ticket = pair.grant(1);
        let lane = raw_lane(&pair, &lent, ticket);
        let _ = (&lane).write_all(&offer.encode(scope(ticket)));
        assert_eq!(next(&lane), None, "{what}");
        assert!(pair.snapshot() == before, "{what}");
        pair.receiver.revoke(ticket).await;
    }
    // A size that is not final: the port does not even answer the ping.
    let lane = connect(&pair);
    lend(&lane, &[segment(false)], &Control::Ping.encode(Scope::LANE));
    assert_eq!(next(&lane), None);
    // A checksum that is not that of the bytes: they do not count.
    let ticket = pair.grant(1);
    let lane = raw_lane(&pair, &[segment(true)], ticket);
    (&lane)
        .write_all(&offer(1, &[good]).encode(scope(ticket)))
        .unwrap();
    assert!(matches!(next(&lane), Some(Control::Nack(_))));
    assert_eq!(pair.receiver.progress(ticket).unwrap().parts_received, 0);
    pair.receiver.revoke(ticket).await;
    pair.assert_no_terminal_event();
    // The port serves on.
    let before = pair.snapshot();
    assert_eq!(pair.hand_off(b"canary").await, CommitOutcome::Committed);
    assert!(matches!(pair.terminal().await, EventKind::Completed { .. }));
    pair.assert_equal(&before);
}

#[tokio::test]
async fn memory_is_lent_only_where_both_ends_can() {
    let both = [TransportKind::SharedMemory, TransportKind::Tcp];
    for (via, port_wants, over_tcp) in [
        (Via::Shared, true, false),
        // The port does not listen for it; the memory is not of a segment.
        (Via::Shared, false, true),
        (Via::Tcp, true, true),
    ] {
        let mut pair = Pair::with_port(
            via,
            Shape::single(2, 4, PART),
            41,
            |_| {},
            |port| port.shared_memory = port_wants,
            |config| config.transports = both.to_vec(),
        );
        let before = pair.snapshot();
        // Through this target, TCP leads nowhere.
        let mut target = pair.target(pair.grant(1), 1);
        let nowhere = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        target.data_address = Some(nowhere.local_addr().unwrap());
        let transfer = pair.sender.open(target, LAYOUT).unwrap();
        pair.push_all(&transfer).await.unwrap();
        let wait = Duration::from_secs(if over_tcp { 1 } else { 15 });
        let committed = tokio::time::timeout(wait, transfer.commit(Default::default())).await;
        if over_tcp {
            assert!(committed.is_err(), "{via:?}: {committed:?}");
            assert!(nowhere.accept().is_ok());
        } else {
            assert_eq!(committed, Ok(CommitOutcome::Committed));
            pair.assert_equal(&before);
        }
        let _ = pair.events.try_recv();
    }
}
