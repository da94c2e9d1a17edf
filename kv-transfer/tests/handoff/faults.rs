//! What happens on the way: lost, repeated, swapped, damaged and cut frames, lanes
//! that break, peers that go away. Never `Completed` with wrong bytes.

use std::time::{Duration, Instant};

use baton_kv_transfer::Refusal;
use baton_kv_transfer::fault_proxy::Fault;
use baton_kv_transfer::receiver::{AbortReason, EventKind, ExpiryReason};
use baton_kv_transfer::sender::CommitOutcome;
use bytes::Bytes;

use crate::pair::{LAYOUT, Pair, Shape, Via, until};

/// 3 layers of 40 blocks, with frames of at most 21 blocks: at least 6 frames.
fn shape() -> Shape {
    Shape::single(3, 40, 12_288)
}

const FRAMES: u64 = 6;

async fn survives(faults: &[Fault]) {
    for via in [Via::Proxy, Via::TlsProxy] {
        survives_over(via, faults).await;
    }
}

async fn survives_over(via: Via, faults: &[Fault]) {
    let mut pair = Pair::new(via, shape(), 11);
    let before = pair.snapshot();
    for fault in faults {
        pair.proxy().inject(*fault);
    }
    let started = Instant::now();
    assert_eq!(
        pair.hand_off(b"x").await,
        CommitOutcome::Committed,
        "{via:?} {faults:?}"
    );
    assert!(
        started.elapsed() < Duration::from_secs(15),
        "{via:?} {faults:?} took {:?}",
        started.elapsed()
    );
    assert!(
        matches!(pair.terminal().await, EventKind::Completed { .. }),
        "{via:?} {faults:?}"
    );
    pair.assert_equal(&before);
    pair.assert_no_terminal_event();
    assert!(
        pair.proxy().is_spent(),
        "{via:?} {faults:?} did not all happen"
    );
}

#[tokio::test]
async fn a_lost_frame_is_sent_again() {
    for frame in [0, FRAMES / 2, FRAMES - 1] {
        survives(&[Fault::DropData(frame)]).await;
    }
    survives(&[Fault::DropLastData]).await;
}

#[tokio::test]
async fn a_repeated_frame_changes_nothing() {
    survives(&[Fault::RepeatData(0), Fault::RepeatData(FRAMES - 1)]).await;
}

#[tokio::test]
async fn swapped_frames_change_nothing() {
    survives(&[Fault::SwapData(1)]).await;
    survives(&[Fault::SwapData(FRAMES - 2)]).await;
}

#[tokio::test]
async fn a_damaged_payload_is_asked_for_again() {
    for frame in [0, FRAMES - 1] {
        survives(&[Fault::DamagePayload(frame)]).await;
    }
}

#[tokio::test]
async fn a_damaged_copy_of_a_part_does_not_spoil_the_part() {
    // The repeated frame goes out undamaged first, then damaged.
    survives(&[Fault::RepeatData(2), Fault::DamagePayload(2)]).await;
}

#[tokio::test]
async fn a_damaged_header_costs_the_lane_but_not_the_transfer() {
    survives(&[Fault::DamageHeader(1)]).await;
}

#[tokio::test]
async fn a_cut_lane_resumes_with_what_is_missing() {
    for fault in [
        Fault::CutInData(0),
        Fault::CutInData(FRAMES - 1),
        Fault::CutInLastData,
        Fault::CutAfterData(2),
        Fault::CutAfterData(FRAMES - 1),
    ] {
        survives(&[fault]).await;
    }
}

#[tokio::test]
async fn a_lost_repeated_or_cut_commit_is_settled() {
    for fault in [
        Fault::DropCommit,
        Fault::RepeatCommit,
        Fault::CutBeforeCommit,
        Fault::CutAfterCommit,
    ] {
        survives(&[fault]).await;
    }
}

#[tokio::test]
async fn several_faults_in_one_transfer_are_survived() {
    survives(&[
        Fault::DropData(0),
        Fault::DamagePayload(1),
        Fault::RepeatData(2),
        Fault::CutInData(4),
        Fault::RepeatCommit,
    ])
    .await;
}

#[tokio::test]
async fn a_resumed_lane_carries_only_what_was_missing() {
    let mut pair = Pair::new(Via::Proxy, shape(), 11);
    let before = pair.snapshot();
    pair.proxy().inject(Fault::HoldAfterData(FRAMES - 2));
    let ticket = pair.grant(1);
    let transfer = pair.open(ticket, 1);
    pair.push_all(&transfer).await.unwrap();
    // The cut comes only once the receiver has read what went through: bytes that wait in
    // a socket when its peer goes away may be lost with it.
    until("what went through was read", || {
        pair.receiver.statistics().frames == FRAMES - 1
    })
    .await;
    let held = pair.receiver.progress(ticket).unwrap().bytes_received;
    assert!(held > 0);
    pair.proxy().cut();
    pair.proxy().release();
    assert_eq!(
        transfer.commit(Bytes::new()).await,
        CommitOutcome::Committed
    );
    let statistics = transfer.statistics();
    assert_eq!(statistics.reconnects, 1);
    assert!(
        statistics.bytes_resent <= pair.shape.bytes() - held,
        "{statistics:?}, but `{held}` bytes were here"
    );
    let seen = pair.receiver.statistics();
    assert_eq!((seen.frames_duplicate, seen.bytes_scratched), (0, 0));
    assert!(matches!(pair.terminal().await, EventKind::Completed { .. }));
    pair.assert_equal(&before);
}

#[tokio::test]
async fn bytes_that_stay_damaged_abort_both_ends() {
    for via in [Via::Proxy, Via::TlsProxy] {
        let mut pair = Pair::with(via, shape(), 11, |c| c.corrupt_frames_max = 2, |_| {});
        for frame in 0..3 {
            pair.proxy().inject(Fault::DamagePayload(frame));
        }
        assert_eq!(
            pair.hand_off(b"").await,
            CommitOutcome::Refused(Refusal::Corrupt)
        );
        assert_eq!(
            pair.terminal().await,
            EventKind::Aborted {
                reason: AbortReason::Corrupt
            }
        );
        pair.assert_no_terminal_event();
    }
}

#[tokio::test]
async fn a_sender_that_dies_is_noticed_and_the_grant_expires() {
    let mut pair = Pair::with(
        Via::Proxy,
        shape(),
        11,
        |config| config.resume_grace = Duration::from_millis(200),
        |config| config.reconnect_max = Duration::from_millis(500),
    );
    pair.proxy().inject(Fault::HoldInData(3));
    let transfer = pair.open(pair.grant(1), 1);
    pair.push_all(&transfer).await.unwrap();
    until("the frame is held half way", || pair.proxy().is_holding()).await;
    pair.proxy().refuse(true);
    pair.proxy().cut();
    assert_eq!(pair.next_event().await, EventKind::Started);
    assert_eq!(pair.next_event().await, EventKind::LaneLost);
    let expired = EventKind::Expired {
        reason: ExpiryReason::LaneLost,
    };
    assert_eq!(pair.next_event().await, expired);
    assert_eq!(pair.receiver.grants_live(), 0);
    // The sender finds nobody to talk to and gives up by itself.
    assert_eq!(transfer.outcome().await, CommitOutcome::PeerLost);
}

#[tokio::test]
async fn a_sender_that_is_dropped_says_so() {
    for via in [Via::Loopback, Via::Shared, Via::Tcp, Via::Tls] {
        for round in 0..20 {
            let mut pair = Pair::new(via, shape(), 11);
            let transfer = pair.open(pair.grant(1), 1);
            pair.push_all(&transfer).await.unwrap();
            assert_eq!(pair.next_event().await, EventKind::Started);
            tokio::time::sleep(Duration::from_micros(round * 50)).await;
            drop(transfer);
            // Frames that were queued are not taken for damaged ones.
            let event = pair.terminal().await;
            let reason = AbortReason::BySender("the sender dropped the transfer".to_owned());
            assert_eq!(
                event,
                EventKind::Aborted { reason },
                "{via:?}, round {round}"
            );
        }
    }
}

#[tokio::test]
async fn a_receiver_that_is_gone_is_peer_lost() {
    for via in [Via::Loopback, Via::Shared, Via::Tcp, Via::Tls] {
        let pair = Pair::with(
            via,
            shape(),
            11,
            |_| {},
            |config| {
                config.reconnect_max = Duration::from_millis(300);
            },
        );
        let transfer = pair.open(pair.grant(1), 1);
        let (group, index, layer) = pair.layers()[0];
        transfer
            .push(0, layer, &pair.source_blocks(group, index))
            .await
            .unwrap();
        let Pair {
            receiver,
            port,
            sender,
            ..
        } = pair;
        drop(port);
        drop(receiver);
        assert_eq!(transfer.outcome().await, CommitOutcome::PeerLost, "{via:?}");
        transfer.quiesced().await;
        drop(sender);
    }
}

/// Nobody who was never reached is waited for as long as one that was, and whoever comes later
/// hears at once what the first one found out.
#[tokio::test]
async fn a_port_that_takes_no_lane_is_given_up_by_name() {
    // A port that systems give to nobody by chance, and that is refused.
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], 1));
    let pair = Pair::with(
        Via::Tcp,
        shape(),
        11,
        |_| {},
        |config| {
            config.connect_timeout = Duration::from_secs(2);
            config.reconnect_max = Duration::from_secs(60);
        },
    );
    let mut took = Vec::new();
    for attempt in [1, 2] {
        let mut target = pair.target(pair.grant(attempt), attempt);
        target.data_address = Some(address);
        let started = Instant::now();
        let transfer = pair.sender.open(target, LAYOUT).unwrap();
        let outcome = tokio::time::timeout(Duration::from_secs(15), transfer.outcome()).await;
        assert_eq!(outcome.unwrap(), CommitOutcome::PeerLost);
        took.push(started.elapsed());
        let why = transfer.failure().unwrap();
        let named = format!("data address `{address}`: ");
        assert!(why.starts_with("no lane") && why.contains(&named), "{why}");
        transfer.quiesced().await;
    }
    assert!(took[1] < took[0], "{took:?}");
}

#[tokio::test]
async fn silence_is_death_on_both_sides() {
    let mut pair = Pair::with_port(
        Via::Proxy,
        shape(),
        11,
        |config| config.resume_grace = Duration::from_millis(1500),
        |config| config.silence_max = Duration::from_secs(1),
        |config| {
            config.silence_max = Duration::from_secs(1);
            config.reconnect_max = Duration::from_millis(1750);
            config.connect_timeout = Duration::from_millis(200);
        },
    );
    pair.proxy().inject(Fault::HoldAfterData(1));
    let transfer = pair.open(pair.grant(1), 1);
    pair.push_all(&transfer).await.unwrap();
    until("bytes are held", || pair.proxy().is_holding()).await;
    let outcome = transfer.commit(Bytes::new()).await;
    assert_eq!(outcome, CommitOutcome::PeerLost);
    let expired = EventKind::Expired {
        reason: ExpiryReason::LaneLost,
    };
    assert_eq!(pair.terminal().await, expired);
}

#[tokio::test]
async fn a_slow_link_is_not_a_dead_one() {
    for via in [Via::Proxy, Via::TlsProxy] {
        // It takes twice as long as silence may.
        let mut pair = Pair::with_port(
            via,
            Shape::single(2, 12, 50_000),
            11,
            |_| {},
            |config| config.silence_max = Duration::from_secs(1),
            |config| config.silence_max = Duration::from_secs(1),
        );
        let before = pair.snapshot();
        pair.proxy().throttle(600_000);
        assert_eq!(pair.hand_off(b"").await, CommitOutcome::Committed);
        assert!(matches!(pair.terminal().await, EventKind::Completed { .. }));
        pair.assert_equal(&before);
    }
}

#[tokio::test]
async fn a_grant_that_nobody_uses_expires() {
    let mut pair = Pair::new(Via::Loopback, shape(), 11);
    let request = pair.request(1, Duration::from_millis(50));
    let ticket = pair.receiver.grant(request).unwrap().ticket;
    let expired = EventKind::Expired {
        reason: ExpiryReason::Deadline,
    };
    assert_eq!(pair.next_event().await, expired);
    let transfer = pair.open(ticket, 1);
    assert_eq!(
        transfer.outcome().await,
        CommitOutcome::Refused(Refusal::Expired)
    );
}
