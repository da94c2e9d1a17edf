//! Who may write when: revoke, newer attempts, wrong epochs, aborts.

use std::time::Duration;

use baton_kv_transfer::fault_proxy::Fault;
use baton_kv_transfer::receiver::{AbortReason, EventKind, Regrant, RegrantRequest, Terminal};
use baton_kv_transfer::sender::{CommitOutcome, Sender, SenderConfig, TransportKind};
use baton_kv_transfer::{Error, Refusal, Ticket};
use baton_proto::{Attempt, Epoch};
use bytes::Bytes;

use crate::pair::{LAYOUT, Pair, Shape, Via, until};

fn shape() -> Shape {
    Shape::single(3, 40, 12_288)
}

/// Opens and pushes everything, with the lane held in the middle of frame 2.
async fn held_half_way(pair: &Pair) -> (Ticket, baton_kv_transfer::sender::Transfer) {
    pair.proxy().inject(Fault::HoldInData(2));
    let ticket = pair.grant(1);
    let transfer = pair.open(ticket, 1);
    pair.push_all(&transfer).await.unwrap();
    until("the frame is held half way", || pair.proxy().is_holding()).await;
    // What got through before the hold has been read once nothing changes any more.
    let mut seen = pair.snapshot();
    loop {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let now = pair.snapshot();
        if now == seen {
            return (ticket, transfer);
        }
        seen = now;
    }
}

#[tokio::test]
async fn nothing_is_written_after_a_revoke_although_the_frame_goes_on() {
    for via in [Via::Proxy, Via::TlsProxy] {
        let mut pair = Pair::new(via, shape(), 5);
        let (ticket, transfer) = held_half_way(&pair).await;
        assert_eq!(pair.receiver.revoke(ticket).await, Some(Terminal::Fenced));
        // The blocks are ours again: their new owner writes them.
        pair.destination.iter().for_each(|arena| arena.fill(0xA5));
        let owned = pair.snapshot();
        let scratched = pair.receiver.statistics().bytes_scratched;
        let sent = pair.proxy().bytes();
        pair.proxy().release();
        until("the rest of the frame came in", || {
            pair.proxy().bytes() > sent && pair.receiver.statistics().bytes_scratched > scratched
        })
        .await;
        assert_eq!(
            transfer.commit(Bytes::new()).await,
            CommitOutcome::Refused(Refusal::Fenced)
        );
        assert!(
            pair.snapshot() == owned,
            "a late byte reached the new owner's block"
        );
        pair.assert_no_terminal_event();
    }
}

#[tokio::test]
async fn revokes_race_with_frames_and_never_lose() {
    for via in [Via::Loopback, Via::Shared, Via::Tcp, Via::Tls] {
        for round in 0..20u64 {
            let mut pair = Pair::new(via, Shape::single(4, 48, 12_288), round);
            let ticket = pair.grant(1);
            let transfer = pair.open(ticket, 1);
            pair.push_all(&transfer).await.unwrap();
            // Swept over the few milliseconds that the transfer takes.
            tokio::time::sleep(Duration::from_micros(round * 150)).await;
            let terminal = pair.receiver.revoke(ticket).await;
            assert_eq!(terminal, Some(Terminal::Fenced));
            pair.destination.iter().for_each(|arena| arena.fill(0xA5));
            let owned = pair.snapshot();
            let outcome = transfer.commit(Bytes::new()).await;
            assert_eq!(
                outcome,
                CommitOutcome::Refused(Refusal::Fenced),
                "{via:?}, round {round}: {:?}",
                transfer.failure()
            );
            assert!(pair.snapshot() == owned, "{via:?}, round {round}");
            pair.assert_no_terminal_event();
        }
    }
}

#[tokio::test]
async fn a_revoke_after_the_commit_says_so() {
    let mut pair = Pair::new(Via::Tcp, shape(), 5);
    let ticket = pair.grant(1);
    let transfer = pair.open(ticket, 1);
    pair.push_all(&transfer).await.unwrap();
    assert_eq!(
        transfer.commit(Bytes::new()).await,
        CommitOutcome::Committed
    );
    assert_eq!(
        pair.receiver.revoke(ticket).await,
        Some(Terminal::Committed)
    );
    assert_eq!(
        pair.receiver.revoke_blocking(ticket),
        Some(Terminal::Committed)
    );
    let late = RegrantRequest {
        attempt: Attempt(2),
        deadline: Duration::from_secs(1),
        keep_received: true,
    };
    assert_eq!(
        pair.receiver.regrant(ticket, late).await.unwrap(),
        Regrant::Committed
    );
    assert!(matches!(pair.terminal().await, EventKind::Completed { .. }));
    assert_eq!(pair.receiver.revoke(Ticket(1)).await, None);
}

#[tokio::test]
async fn a_newer_attempt_fences_the_old_one_and_keeps_what_arrived() {
    let mut pair = Pair::new(Via::Proxy, shape(), 5);
    let before = pair.snapshot();
    let (old, transfer) = held_half_way(&pair).await;
    let request = RegrantRequest {
        attempt: Attempt(2),
        deadline: Duration::from_secs(20),
        keep_received: true,
    };
    let Regrant::Granted(grant) = pair.receiver.regrant(old, request.clone()).await.unwrap() else {
        panic!("not granted");
    };
    assert!(matches!(
        pair.receiver.regrant(old, request).await,
        Err(Error::UnknownTicket)
    ));

    // Another prefill worker with the same bytes, straight to the port.
    let mut second = Pair::new(Via::Tcp, shape(), 5);
    let mut target = pair.target(grant.ticket, 2);
    target.data_address = pair.port.as_ref().map(|port| port.local_address());
    let newer = second.sender.open(target, LAYOUT).unwrap();
    second.push_all(&newer).await.unwrap();
    assert_eq!(
        newer.commit(Bytes::from_static(b"2")).await,
        CommitOutcome::Committed
    );
    assert!(
        newer.statistics().bytes_sent < pair.shape.bytes(),
        "nothing was kept"
    );
    second.assert_no_terminal_event();

    pair.proxy().release();
    assert_eq!(
        transfer.commit(Bytes::new()).await,
        CommitOutcome::Refused(Refusal::Fenced)
    );
    let EventKind::Completed {
        commit_payload,
        bytes,
        ..
    } = pair.terminal().await
    else {
        panic!("not completed");
    };
    assert_eq!(
        (commit_payload, bytes),
        (Bytes::from_static(b"2"), pair.shape.bytes())
    );
    pair.assert_equal(&before);
    pair.assert_no_terminal_event();
}

#[tokio::test]
async fn a_newer_attempt_with_other_numerics_starts_from_nothing() {
    let pair = Pair::new(Via::Proxy, shape(), 5);
    let (old, _transfer) = held_half_way(&pair).await;
    assert!(pair.receiver.progress(old).unwrap().parts_received > 0);
    let request = |attempt| RegrantRequest {
        attempt: Attempt(attempt),
        deadline: Duration::from_secs(20),
        keep_received: false,
    };
    let same = pair.receiver.regrant(old, request(1)).await;
    assert!(matches!(same, Err(Error::AttemptOrder { .. })));
    let Ok(Regrant::Granted(grant)) = pair.receiver.regrant(old, request(2)).await else {
        panic!("not granted");
    };
    let progress = pair.receiver.progress(grant.ticket).unwrap();
    assert_eq!(
        (progress.parts_received, progress.parts_total),
        (0, pair.shape.parts())
    );
}

#[tokio::test]
async fn wrong_ticket_epoch_attempt_and_session_are_refused() {
    for via in [Via::Loopback, Via::Shared, Via::Tcp, Via::Tls] {
        let mut pair = Pair::new(via, shape(), 5);
        let before = pair.snapshot();
        let ticket = pair.grant(3);
        let good = pair.target(ticket, 3);
        let mut epoch = good.clone();
        epoch.epoch = Epoch(1);
        let older = pair.target(ticket, 2);
        let newer = pair.target(ticket, 4);
        let unknown = pair.target(Ticket::random(), 3);
        for (target, refusal) in [
            (epoch, Refusal::Fenced),
            (older, Refusal::Fenced),
            (newer, Refusal::Fenced),
            (unknown, Refusal::UnknownTicket),
        ] {
            let transfer = pair.sender.open(target, LAYOUT).unwrap();
            let _ = pair.push_all(&transfer).await;
            assert_eq!(
                transfer.commit(Bytes::new()).await,
                CommitOutcome::Refused(refusal)
            );
        }
        // The ticket now belongs to this sender; another one with the same secrets is late.
        let transfer = pair.sender.open(good.clone(), LAYOUT).unwrap();
        until("the ticket is opened", || {
            pair.receiver.progress(ticket).is_some()
        })
        .await;
        assert_eq!(pair.next_event().await, EventKind::Started);
        let mut config = SenderConfig::new(vec![]);
        config.transports = vec![TransportKind::Loopback, TransportKind::Tcp];
        let other = Sender::start(config);
        let thief = other.open(good, LAYOUT).unwrap();
        assert_eq!(
            thief.outcome().await,
            CommitOutcome::Refused(Refusal::UnknownTicket)
        );
        assert!(pair.snapshot() == before);
        pair.push_all(&transfer).await.unwrap();
        assert_eq!(
            transfer.commit(Bytes::new()).await,
            CommitOutcome::Committed
        );
        pair.assert_equal(&before);
    }
}

#[tokio::test]
async fn an_abort_ends_both_sides_once_and_leaves_the_lane_to_others() {
    for via in [Via::Loopback, Via::Shared, Via::Tcp, Via::Tls] {
        let mut pair = Pair::new(via, shape(), 5);
        let doomed = pair.open(pair.grant(1), 1);
        pair.push_all(&doomed).await.unwrap();
        doomed.abort("the client left");
        doomed.abort("again");
        doomed.quiesced().await;
        // The source blocks are the engine's again.
        pair.source.iter().for_each(|arena| arena.fill(0x5A));
        let left = CommitOutcome::Aborted("the client left".to_owned());
        assert_eq!(doomed.outcome().await, left);
        let reason = AbortReason::BySender("the client left".to_owned());
        assert_eq!(pair.terminal().await, EventKind::Aborted { reason });
        let before = pair.snapshot();
        assert_eq!(pair.hand_off(b"").await, CommitOutcome::Committed);
        assert!(matches!(pair.terminal().await, EventKind::Completed { .. }));
        pair.assert_equal(&before);
        until("the lane let go", || pair.sender.transfers_open() <= 1).await;
    }
}

#[tokio::test]
async fn an_abort_half_way_through_a_frame_keeps_the_lane_in_step() {
    let mut pair = Pair::new(Via::Proxy, Shape::single(2, 8, 2_000_000), 5);
    pair.proxy().throttle(64 << 20);
    let doomed = pair.open(pair.grant(1), 1);
    pair.push_all(&doomed).await.unwrap();
    until("a frame is under way", || pair.proxy().bytes() > 500_000).await;
    doomed.abort("half way");
    doomed.quiesced().await;
    pair.source.iter().for_each(|arena| arena.fill(0x5A));
    pair.proxy().throttle(0);
    assert!(matches!(pair.terminal().await, EventKind::Aborted { .. }));
    let before = pair.snapshot();
    assert_eq!(pair.hand_off(b"").await, CommitOutcome::Committed);
    assert!(matches!(pair.terminal().await, EventKind::Completed { .. }));
    pair.assert_equal(&before);
    assert_eq!(pair.proxy().connections(), 1, "the lane was lost");
}
