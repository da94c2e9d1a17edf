//! Peers that are not ours, or ours gone wrong, at the data port.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use baton_kv_transfer::codec::hello::{
    CHALLENGE_BYTES, Challenge, HELLO_BYTES, Hello, Verdict, proof,
};
use baton_kv_transfer::codec::{Control, HEADER_BYTES, Header, Kind, Scope};
use baton_kv_transfer::part::PartRange;
use baton_kv_transfer::receiver::EventKind;
use baton_kv_transfer::sender::CommitOutcome;
use baton_kv_transfer::{LaneKey, SessionId, Ticket};
use baton_proto::Attempt;
use baton_proto::protocol::{CURRENT, ProtocolVersion};

use crate::pair::{EPOCH, LAYOUT, Pair, Shape, Via};

fn pair() -> Pair {
    Pair::new(Via::Tcp, Shape::single(2, 4, 4096), 21)
}

fn connect(pair: &Pair) -> TcpStream {
    let stream = TcpStream::connect(pair.port.as_ref().unwrap().local_address()).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(15)))
        .unwrap();
    stream
}

/// Reads until the port closes; the bytes that came.
fn read_to_close(mut stream: &TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => bytes,
        Err(error) => panic!("the port did not close: {error}"),
    }
}

/// A lane with the right key, driven by hand; and what was said to open it.
fn raw_lane(pair: &Pair, session: u128) -> (TcpStream, Vec<u8>) {
    let key = pair.receiver.lane_key();
    let mut stream = connect(pair);
    let hello = Hello {
        version: CURRENT,
        session: SessionId(session),
        nonce: [1; 16],
    };
    let hello: [u8; HELLO_BYTES] = hello.encode(key);
    stream.write_all(&hello).unwrap();
    let mut challenge = [0; CHALLENGE_BYTES];
    stream.read_exact(&mut challenge).unwrap();
    let proof = proof(key, &hello, &challenge);
    stream.write_all(&proof).unwrap();
    let said = [&hello[..], &proof[..]].concat();
    (stream, said)
}

fn scope(ticket: Ticket) -> Scope {
    Scope {
        ticket,
        epoch: EPOCH,
        attempt: Attempt(1),
    }
}

fn next(mut stream: &TcpStream) -> (Scope, Control) {
    loop {
        let mut header = [0; HEADER_BYTES];
        stream.read_exact(&mut header).unwrap();
        let header = Header::decode(&header).unwrap();
        let mut payload = vec![0; header.payload_len as usize];
        stream.read_exact(&mut payload).unwrap();
        match Control::decode(&header, &payload).unwrap() {
            Control::Ping | Control::Pong | Control::Ack { .. } => {}
            control => return (header.scope, control),
        }
    }
}

fn data(ticket: Ticket, range: PartRange, payload: &[u8]) -> Vec<u8> {
    let header = Header {
        kind: Kind::Data,
        scope: scope(ticket),
        range,
        payload_len: payload.len() as u32,
        payload_crc: 0,
    };
    [&header.encode()[..], payload].concat()
}

/// The port still serves, and only what was granted has changed.
async fn assert_serves(pair: &mut Pair) {
    let before = pair.snapshot();
    assert_eq!(pair.hand_off(b"canary").await, CommitOutcome::Committed);
    assert!(matches!(pair.terminal().await, EventKind::Completed { .. }));
    pair.assert_equal(&before);
}

#[tokio::test]
async fn strangers_are_dropped_within_the_hello_time_and_told_nothing() {
    let mut pair = pair();
    let wrong_key = Hello {
        version: CURRENT,
        session: SessionId(1),
        nonce: [0; 16],
    }
    .encode(&LaneKey([3; 32]));
    let mut damaged = Hello {
        version: CURRENT,
        session: SessionId(1),
        nonce: [0; 16],
    }
    .encode(pair.receiver.lane_key());
    damaged[HELLO_BYTES - 1] ^= 1;
    let http = b"GET / HTTP/1.1\r\nhost: kv\r\n\r\n";
    let giant = [0x7f; 200];
    for said in [&b""[..], &[0xff; 10], http, &wrong_key, &damaged, &giant] {
        let mut stream = connect(&pair);
        stream.write_all(said).unwrap();
        let started = Instant::now();
        assert_eq!(read_to_close(&stream), b"", "{said:?}");
        assert!(started.elapsed() < Duration::from_secs(15), "{said:?}");
    }
    assert_serves(&mut pair).await;
}

#[tokio::test]
async fn thousands_of_idle_connections_do_not_keep_a_sender_out() {
    let mut pair = pair();
    let mut idle = Vec::new();
    for _ in 0..400 {
        idle.push(connect(&pair));
    }
    assert_serves(&mut pair).await;
    // Only so many strangers are kept at once: the oldest are closed already.
    assert_eq!(read_to_close(&idle[0]), b"");
}

#[tokio::test]
async fn a_recorded_conversation_cannot_be_replayed() {
    let mut pair = pair();
    let (lane, said) = raw_lane(&pair, 7);
    let ticket = pair.grant(1);
    (&lane)
        .write_all(&Control::Open { layout: LAYOUT }.encode(scope(ticket)))
        .unwrap();
    assert!(matches!(next(&lane).1, Control::Opened(_)));
    drop(lane);
    let before = pair.snapshot();
    let mut replay = connect(&pair);
    replay.write_all(&said).unwrap();
    let answer = read_to_close(&replay);
    // A fresh challenge, which the recorded proof does not answer.
    assert_eq!(answer.len(), CHALLENGE_BYTES);
    assert!(pair.snapshot() == before);
    pair.receiver.revoke(ticket).await;
    assert_serves(&mut pair).await;
}

#[tokio::test]
async fn an_incompatible_version_is_told_so() {
    let pair = pair();
    let key = pair.receiver.lane_key();
    let version = ProtocolVersion {
        major: CURRENT.major + 1,
        ..CURRENT
    };
    let hello = Hello {
        version,
        session: SessionId(1),
        nonce: [0; 16],
    }
    .encode(key);
    let mut stream = connect(&pair);
    stream.write_all(&hello).unwrap();
    let answer: [u8; CHALLENGE_BYTES] = read_to_close(&stream).try_into().unwrap();
    let challenge = Challenge::decode(&answer, key, &hello).unwrap();
    assert_eq!(
        (challenge.verdict, challenge.version),
        (Verdict::Version, CURRENT)
    );
}

#[tokio::test]
async fn a_session_may_have_only_so_many_lanes() {
    let pair = pair();
    let lanes: Vec<_> = (0..8).map(|_| raw_lane(&pair, 9)).collect();
    // The last of them is certainly counted once it has answered.
    let (last, _) = &lanes[7];
    (&mut &*last)
        .write_all(
            &Control::Commit {
                root: 0,
                parts: 0,
                payload: Default::default(),
            }
            .encode(scope(Ticket(5))),
        )
        .unwrap();
    assert!(matches!(next(last).1, Control::Refused(_)));
    let key = pair.receiver.lane_key();
    let hello = Hello {
        version: CURRENT,
        session: SessionId(9),
        nonce: [0; 16],
    }
    .encode(key);
    let mut stream = connect(&pair);
    stream.write_all(&hello).unwrap();
    let answer: [u8; CHALLENGE_BYTES] = read_to_close(&stream).try_into().unwrap();
    assert_eq!(
        Challenge::decode(&answer, key, &hello).unwrap().verdict,
        Verdict::Busy
    );
}

#[tokio::test]
async fn frames_beyond_the_grant_change_nothing_and_cost_the_lane() {
    let mut pair = pair();
    let before = pair.snapshot();
    let range = PartRange {
        group: 0,
        layer: 0,
        first: 0,
        count: 1,
    };
    let ticket = pair.grant(1);
    let page = [0x77; 4096];
    for (what, frame) in [
        (
            "ordinal",
            data(ticket, PartRange { first: 4, ..range }, &page),
        ),
        (
            "last ordinal",
            data(
                ticket,
                PartRange {
                    first: 3,
                    count: 2,
                    ..range
                },
                &[7; 8192],
            ),
        ),
        (
            "layer",
            data(ticket, PartRange { layer: 2, ..range }, &page),
        ),
        (
            "group",
            data(ticket, PartRange { group: 1, ..range }, &page),
        ),
        ("too short", data(ticket, range, &page[..4095])),
        ("too long", data(ticket, range, &[7; 4097])),
    ] {
        let (lane, _) = raw_lane(&pair, 7);
        (&lane)
            .write_all(&Control::Open { layout: LAYOUT }.encode(scope(ticket)))
            .unwrap();
        assert!(matches!(next(&lane).1, Control::Opened(_)));
        let _ = (&lane).write_all(&frame);
        read_to_close(&lane);
        assert!(pair.snapshot() == before, "{what}");
    }
    pair.receiver.revoke(ticket).await;
    pair.assert_no_terminal_event();
    assert_serves(&mut pair).await;
}

#[tokio::test]
async fn giant_lengths_and_noise_on_an_open_lane_cost_the_lane() {
    let mut pair = pair();
    let before = pair.snapshot();
    let range = PartRange {
        group: 0,
        layer: 0,
        first: 0,
        count: 1,
    };
    let header = |payload_len| Header {
        kind: Kind::Data,
        scope: scope(Ticket(1)),
        range,
        payload_len,
        payload_crc: 0,
    };
    let backwards = Control::Committed.encode(scope(Ticket(1)));
    for frame in [
        header(1 << 31).encode().to_vec(),
        header(u32::MAX).encode().to_vec(),
        vec![0xEE; 64],
        backwards,
    ] {
        let (lane, _) = raw_lane(&pair, 7);
        (&lane).write_all(&frame).unwrap();
        read_to_close(&lane);
    }
    assert!(pair.snapshot() == before);
    assert_serves(&mut pair).await;
}

#[tokio::test]
async fn data_for_an_unknown_ticket_is_read_and_forgotten() {
    let mut pair = pair();
    let before = pair.snapshot();
    let range = PartRange {
        group: 0,
        layer: 0,
        first: 0,
        count: 1,
    };
    let (lane, _) = raw_lane(&pair, 7);
    (&lane)
        .write_all(&data(Ticket(99), range, &vec![1; 600_000]))
        .unwrap();
    let (about, control) = next(&lane);
    assert_eq!(about, scope(Ticket(99)));
    assert!(matches!(control, Control::Refused(_)));
    // A known ticket that this lane has not opened is no better.
    let ticket = pair.grant(1);
    (&lane).write_all(&data(ticket, range, &[1; 4096])).unwrap();
    assert!(matches!(next(&lane).1, Control::Refused(_)));
    assert!(pair.snapshot() == before);
    assert!(pair.receiver.statistics().bytes_scratched >= 600_000);
    pair.receiver.revoke(ticket).await;
    assert_serves(&mut pair).await;
}

#[tokio::test]
async fn a_commit_with_another_root_is_never_completed() {
    let mut pair = pair();
    let ticket = pair.grant(1);
    let (lane, _) = raw_lane(&pair, 7);
    (&lane)
        .write_all(&Control::Open { layout: LAYOUT }.encode(scope(ticket)))
        .unwrap();
    assert!(matches!(next(&lane).1, Control::Opened(_)));
    let commit = |parts| Control::Commit {
        root: 1,
        parts,
        payload: Default::default(),
    };
    (&lane).write_all(&commit(8).encode(scope(ticket))).unwrap();
    assert!(matches!(next(&lane).1, Control::Missing(_)));
    // Every part, each with a right checksum, under a root that is not theirs.
    let part_crc = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &[5; 4096]) as u32;
    let frame_crc =
        crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &part_crc.to_le_bytes()) as u32;
    for layer in 0..2 {
        for first in 0..4 {
            let range = PartRange {
                group: 0,
                layer,
                first,
                count: 1,
            };
            let header = Header {
                kind: Kind::Data,
                scope: scope(ticket),
                range,
                payload_len: 4096,
                payload_crc: frame_crc,
            };
            (&lane)
                .write_all(&[&header.encode()[..], &[5; 4096]].concat())
                .unwrap();
        }
    }
    (&lane).write_all(&commit(8).encode(scope(ticket))).unwrap();
    assert!(matches!(next(&lane).1, Control::Refused(_)));
    assert!(matches!(pair.terminal().await, EventKind::Aborted { .. }));
    pair.assert_no_terminal_event();
    assert_serves(&mut pair).await;
}
