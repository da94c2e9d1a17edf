//! Bytes arrive equal, whatever the maps, the transport and the neighbours.

use std::time::Duration;

use baton_kv_transfer::receiver::EventKind;
use baton_kv_transfer::sender::{CommitOutcome, SourceBlock};
use baton_kv_transfer::{Error, Refusal};
use baton_proto::kv_layout::ByteExtent;
use bytes::Bytes;
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::pair::{EPOCH, LAYOUT, Pair, Shape, Via};

async fn moves_random_maps(via: Via) {
    for seed in 0..24 {
        let shape = Shape::random(&mut StdRng::seed_from_u64(seed));
        let mut pair = Pair::new(via, shape, seed);
        let before = pair.snapshot();
        assert_eq!(
            pair.hand_off(b"first token").await,
            CommitOutcome::Committed,
            "seed {seed}"
        );
        assert_eq!(pair.next_event().await, EventKind::Started);
        let EventKind::Completed {
            commit_payload,
            bytes,
            ..
        } = pair.next_event().await
        else {
            panic!("seed {seed}: not completed");
        };
        assert_eq!(commit_payload, Bytes::from_static(b"first token"));
        assert_eq!(bytes, pair.shape.bytes(), "seed {seed}");
        pair.assert_equal(&before);
        assert_eq!(pair.receiver.grants_live(), 0);
    }
}

#[tokio::test]
async fn moves_random_maps_over_loopback() {
    moves_random_maps(Via::Loopback).await;
}

#[tokio::test]
async fn moves_random_maps_over_shared_memory() {
    moves_random_maps(Via::Shared).await;
}

#[tokio::test]
async fn moves_random_maps_over_tcp() {
    moves_random_maps(Via::Tcp).await;
}

#[tokio::test]
async fn moves_random_maps_over_tls() {
    moves_random_maps(Via::Tls).await;
}

#[tokio::test]
async fn moves_parts_larger_than_a_frame_and_than_the_scratch_buffer() {
    for via in [Via::Loopback, Via::Shared, Via::Tcp, Via::Tls] {
        let mut pair = Pair::new(via, Shape::single(2, 3, 3_000_000), 1);
        let before = pair.snapshot();
        assert_eq!(pair.hand_off(b"").await, CommitOutcome::Committed);
        assert!(matches!(pair.terminal().await, EventKind::Completed { .. }));
        pair.assert_equal(&before);
    }
}

#[tokio::test]
async fn a_commit_without_any_part_is_accepted_at_once() {
    for via in [Via::Loopback, Via::Shared, Via::Tcp, Via::Tls] {
        let mut pair = Pair::new(
            via,
            Shape {
                groups: vec![(vec![0], vec![])],
                part_bytes: 64,
            },
            1,
        );
        assert_eq!(pair.hand_off(b"t").await, CommitOutcome::Committed);
        assert!(matches!(
            pair.terminal().await,
            EventKind::Completed { bytes: 0, .. }
        ));
    }
}

#[tokio::test]
async fn transfers_that_share_a_lane_do_not_mix() {
    for via in [Via::Loopback, Via::Shared, Via::Tcp, Via::Tls] {
        // Each ordinal of the pool is a request of its own; all of them run at once.
        let pair = Pair::new(via, Shape::single(6, 24, 20_000), 7);
        let before = pair.snapshot();
        let mut transfers = Vec::new();
        for ordinal in 0..24 {
            let mut request = pair.request(1, Duration::from_secs(20));
            request.groups[0]
                .blocks
                .retain(|block| block.ordinal == ordinal);
            let ticket = pair.receiver.grant(request).unwrap().ticket;
            transfers.push(pair.open(ticket, 1));
        }
        for (group, index, layer) in pair.layers() {
            for (transfer, block) in transfers.iter().zip(pair.source_blocks(group, index)) {
                transfer.push(group as u16, layer, &[block]).await.unwrap();
            }
        }
        for transfer in &transfers {
            assert_eq!(
                transfer.commit(Bytes::new()).await,
                CommitOutcome::Committed
            );
        }
        pair.assert_equal(&before);
    }
}

#[tokio::test]
async fn a_bounded_queue_makes_push_wait_and_lose_nothing() {
    for via in [Via::Loopback, Via::Shared, Via::Tcp, Via::Tls] {
        let shape = Shape::single(8, 64, 10_000);
        let mut pair = Pair::with(
            via,
            shape,
            3,
            |_| {},
            |config| {
                config.queue_parts_max = 8;
                config.in_flight_bytes_max = 0;
            },
        );
        let before = pair.snapshot();
        assert_eq!(pair.hand_off(b"").await, CommitOutcome::Committed);
        assert!(matches!(pair.terminal().await, EventKind::Completed { .. }));
        pair.assert_equal(&before);
    }
}

#[tokio::test]
async fn a_commit_with_a_part_that_was_never_pushed_is_refused() {
    for via in [Via::Loopback, Via::Shared, Via::Tcp, Via::Tls] {
        let mut pair = Pair::new(via, Shape::single(3, 5, 4096), 3);
        let transfer = pair.open(pair.grant(1), 1);
        for (group, index, layer) in pair.layers() {
            let blocks = pair.source_blocks(group, index);
            let pushed = if layer == 1 {
                &blocks[..4]
            } else {
                &blocks[..]
            };
            transfer.push(0, layer, pushed).await.unwrap();
        }
        let outcome = transfer.commit(Bytes::new()).await;
        assert_eq!(outcome, CommitOutcome::Refused(Refusal::Incomplete));
        assert!(matches!(pair.terminal().await, EventKind::Aborted { .. }));
        pair.assert_no_terminal_event();
    }
}

#[tokio::test]
async fn a_second_commit_gets_the_same_answer() {
    for via in [Via::Loopback, Via::Shared, Via::Tcp, Via::Tls] {
        let mut pair = Pair::new(via, Shape::single(2, 2, 512), 3);
        let transfer = pair.open(pair.grant(1), 1);
        pair.push_all(&transfer).await.unwrap();
        assert_eq!(
            transfer.commit(Bytes::from_static(b"a")).await,
            CommitOutcome::Committed
        );
        assert_eq!(
            transfer.commit(Bytes::from_static(b"b")).await,
            CommitOutcome::Committed
        );
        let EventKind::Completed { commit_payload, .. } = pair.terminal().await else {
            panic!("not completed");
        };
        assert_eq!(commit_payload, Bytes::from_static(b"a"));
        pair.assert_no_terminal_event();
    }
}

#[tokio::test]
async fn wrong_pushes_are_refused_and_change_nothing() {
    let mut pair = Pair::new(Via::Loopback, Shape::single(1, 2, 512), 3);
    let before = pair.snapshot();
    let transfer = pair.open(pair.grant(1), 1);
    let blocks = pair.source_blocks(0, 0);
    let outside = ByteExtent {
        offset: u64::MAX,
        len: 512,
        region: 0,
    };
    let stray = SourceBlock {
        ordinal: 0,
        extent: outside,
    };
    assert!(matches!(
        transfer.push(0, 0, &[stray]).await,
        Err(Error::Extent { .. })
    ));
    let twice = [blocks[0], blocks[0]];
    assert!(matches!(
        transfer.push(0, 0, &twice).await,
        Err(Error::Invalid(_))
    ));
    transfer.push(0, 0, &blocks[..1]).await.unwrap();
    assert!(matches!(
        transfer.push(0, 0, &blocks).await,
        Err(Error::Invalid(_))
    ));
    transfer.push(0, 0, &blocks[1..]).await.unwrap();
    assert_eq!(
        transfer.commit(Bytes::new()).await,
        CommitOutcome::Committed
    );
    assert!(transfer.push(0, 0, &blocks).await.is_err());
    assert!(matches!(pair.terminal().await, EventKind::Completed { .. }));
    pair.assert_equal(&before);
}

#[tokio::test]
async fn another_kv_layout_is_refused_before_a_byte_moves() {
    for via in [Via::Loopback, Via::Shared, Via::Tcp, Via::Tls] {
        let mut pair = Pair::new(via, Shape::single(2, 2, 512), 3);
        let before = pair.snapshot();
        let ticket = pair.grant(1);
        let other = baton_kv_transfer::LayoutDigest([1; 32]);
        assert_ne!(other, LAYOUT);
        let transfer = pair.sender.open(pair.target(ticket, 1), other).unwrap();
        let _ = pair.push_all(&transfer).await;
        let outcome = transfer.commit(Bytes::new()).await;
        assert_eq!(outcome, CommitOutcome::Refused(Refusal::LayoutMismatch));
        assert!(matches!(pair.terminal().await, EventKind::Aborted { .. }));
        assert!(pair.snapshot() == before);
    }
}

#[test]
fn a_grant_of_another_epoch_or_outside_memory_is_refused() {
    let pair = Pair::new(Via::Loopback, Shape::single(1, 2, 512), 3);
    let mut request = pair.request(1, Duration::from_secs(1));
    request.epoch = baton_proto::Epoch(EPOCH.0 + 1);
    assert!(matches!(
        pair.receiver.grant(request),
        Err(Error::Invalid(_))
    ));
    let mut request = pair.request(1, Duration::from_secs(1));
    request.groups[0].blocks[0].layers[0].offset = 1 << 40;
    assert!(matches!(
        pair.receiver.grant(request),
        Err(Error::Extent { .. })
    ));
}
