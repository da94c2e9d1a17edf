//! Lanes that are opened to see whether they come up.
//!
//! Seen to fail: with a probe that says yes to everything.

use baton_kv_transfer::sender::CommitOutcome;
use baton_kv_transfer::{Error, LaneKey};

use crate::pair::{Pair, Shape, Via};

#[tokio::test]
async fn a_lane_that_is_probed_carries_a_transfer_as_before() {
    for via in [Via::Loopback, Via::Shared, Via::Tcp, Via::Tls] {
        let mut pair = Pair::new(via, Shape::single(2, 4, 4096), 51);
        let before = pair.snapshot();
        let ticket = pair.grant(1);
        for _ in 0..3 {
            pair.sender.probe(&pair.target(ticket, 1)).unwrap();
        }
        pair.assert_no_terminal_event();
        let transfer = pair.open(ticket, 1);
        pair.push_all(&transfer).await.unwrap();
        let outcome = transfer.commit("x".into()).await;
        assert_eq!(outcome, CommitOutcome::Committed, "{via:?}");
        pair.terminal().await;
        pair.assert_equal(&before);
    }
}

#[tokio::test]
async fn a_lane_that_does_not_come_up_is_named() {
    let pair = Pair::new(Via::Tcp, Shape::single(2, 4, 4096), 52);
    let target = pair.target(pair.grant(1), 1);
    let address = target.data_address.unwrap();
    let mut stranger = target.clone();
    stranger.lane_key = LaneKey::from_bytes(&[7; 32]).unwrap();
    let mut elsewhere = target.clone();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    elsewhere.data_address = Some(closed.local_addr().unwrap());
    drop(closed);
    for (target, address) in [
        (&stranger, address),
        (&elsewhere, elsewhere.data_address.unwrap()),
    ] {
        let error = pair.sender.probe(target).unwrap_err();
        assert!(matches!(error, Error::Unreachable(_)), "{error:?}");
        assert!(error.to_string().contains(&address.to_string()), "{error}");
    }
    pair.sender.probe(&target).unwrap();
}
