//! Parts that have another form on the wire: what arrives is that form, read by the
//! receiver; what travels, is counted and checked is the form's bytes, also on the second
//! attempt; and nobody who asks for exact tokens gets it.

use std::sync::Arc;
use std::time::Duration;

use baton_kv_transfer::Refusal;
use baton_kv_transfer::fault_proxy::Fault;
use baton_kv_transfer::receiver::{AbortReason, Convert, EventKind, Regrant, RegrantRequest};
use baton_kv_transfer::sender::{CommitOutcome, SourceBlock, TransportKind, WireForm};
use baton_proto::Attempt;
use baton_proto::kv_layout::KvDtype;
use baton_proto::relayout::{KvRun, Relayout};
use bytes::Bytes;

use crate::pair::{Via, until};
use crate::relayout::{Pair, Setup, extent, layout, setup, shard};

/// A stand-in for the worker's arithmetic: every second byte. The receiver doubles them, and
/// the pools of the test hold every byte twice.
struct Halving;

impl Convert for Halving {
    fn convert(&self, source: &[u8], target: &mut [u8], _: KvRun) {
        // Whole parts of one block size: head by head, span by span at both ends.
        assert_eq!(source.len(), 2 * target.len());
        for (byte, pair) in target.iter_mut().zip(source.chunks_exact(2)) {
            *byte = pair[0];
        }
    }
}

fn form(block_size: u32) -> WireForm {
    let [own, form] = [KvDtype::F32, KvDtype::F16].map(|dtype| layout(block_size, dtype));
    let relayout = Relayout::between(&own, &form).unwrap();
    WireForm::new(&relayout, Arc::new(Halving)).unwrap()
}

fn wired(via: Via, from: u32, to: u32) -> Setup {
    let [own, theirs] = [from, to].map(|size| layout(size, KvDtype::F32));
    Setup {
        form: Some(form(from)),
        ..setup(via, own, theirs)
    }
}

#[tokio::test]
async fn what_arrives_is_the_forms_and_half_the_bytes_travel() {
    for (from, to) in [(16, 16), (32, 16), (16, 64)] {
        let mut setup = wired(Via::Tcp, from, to);
        setup.receiver = shard(setup.receiver);
        let mut pair = Pair::new(setup, 5);
        let before = pair.snapshot();
        let transfer = pair.open(pair.grant(), 1, &pair.setup.sender);
        pair.push(&transfer, &pair.setup.sender, &[]).await;
        let outcome = transfer.commit(Bytes::new()).await;
        assert_eq!(outcome, CommitOutcome::Committed, "{from} {to}");
        let statistics = transfer.statistics();
        let part = layout(from, KvDtype::F16).layer_bytes() as u64;
        assert_eq!(statistics.bytes_sent, statistics.parts * part);
        let EventKind::Completed { bytes, foreign, .. } = pair.terminal().await else {
            panic!("{from} {to}");
        };
        assert_eq!((bytes, foreign), (statistics.bytes_sent, true));
        pair.assert_arrived(&before);
    }
}

#[tokio::test]
async fn parts_that_are_sent_again_are_made_again() {
    for fault in [
        Fault::DamagePayload(1),
        Fault::DropData(0),
        Fault::CutInData(2),
        Fault::CutAfterData(0),
    ] {
        let mut pair = Pair::new(wired(Via::Proxy, 16, 32), 6);
        pair.proxy.as_ref().unwrap().inject(fault);
        let before = pair.snapshot();
        let outcome = pair.hand_off().await;
        assert_eq!(outcome, CommitOutcome::Committed, "{fault:?}");
        let completed = pair.terminal().await;
        assert!(matches!(
            completed,
            EventKind::Completed { foreign: true, .. }
        ));
        pair.assert_arrived(&before);
    }
}

#[tokio::test]
async fn what_the_receiver_had_all_along_is_digested_as_it_would_travel() {
    let mut pair = Pair::new(wired(Via::Tcp, 16, 16), 7);
    let before = pair.snapshot();
    let own = pair.setup.sender.clone();
    let ticket = pair.grant();
    let old = pair.open(ticket, 1, &own);
    pair.push(&old, &own, &[1]).await;
    let arrived = |pair: &Pair| pair.receiver.progress(ticket).unwrap().parts_received;
    until("something arrived", || arrived(&pair) > 0).await;
    let newer = RegrantRequest {
        attempt: Attempt(2),
        deadline: Duration::from_secs(20),
        keep_received: true,
    };
    let Ok(Regrant::Granted(grant)) = pair.receiver.regrant(ticket, newer).await else {
        panic!("not granted");
    };
    old.abort("superseded");
    old.quiesced().await;
    let new = pair.open(grant.ticket, 2, &own);
    pair.push(&new, &own, &[]).await;
    assert_eq!(new.commit(Bytes::new()).await, CommitOutcome::Committed);
    let statistics = new.statistics();
    let all = statistics.parts * u64::from(form(16).part_bytes());
    assert!(statistics.bytes_sent < all, "everything was sent again");
    assert!(matches!(pair.terminal().await, EventKind::Completed { .. }));
    pair.assert_arrived(&before);
}

#[tokio::test]
async fn a_grant_for_exact_tokens_refuses_it_by_name() {
    let mut setup = wired(Via::Tcp, 16, 16);
    setup.exact = true;
    let mut pair = Pair::new(setup, 8);
    let before = pair.snapshot();
    let outcome = pair.hand_off().await;
    assert_eq!(outcome, CommitOutcome::Refused(Refusal::LayoutMismatch));
    let EventKind::Aborted { reason } = pair.terminal().await else {
        panic!("it completed");
    };
    let AbortReason::Unfit(error) = reason else {
        panic!("{reason:?}");
    };
    assert_eq!(error.field, "kv_dtype");
    assert!(error.message.contains("exact"), "{}", error.message);
    assert_eq!(pair.snapshot(), before);
}

#[tokio::test]
async fn only_tcp_is_a_wire() {
    for via in [Via::Loopback, Via::Shared, Via::Tcp] {
        let mut pair = Pair::new(wired(via, 16, 16), 9);
        let target = pair.target(pair.grant(), 1);
        assert_eq!(pair.sender.goes_over_tcp(&target), via == Via::Tcp);
        if via == Via::Loopback {
            // It has no data port to go to.
            assert!(pair.sender.open_as(target, &form(16)).is_err());
            continue;
        }
        let transfer = pair.sender.open_as(target, &form(16)).unwrap();
        pair.push(&transfer, &pair.setup.sender, &[]).await;
        let outcome = transfer.commit(Bytes::new()).await;
        assert_eq!(outcome, CommitOutcome::Committed);
        assert_eq!(transfer.statistics().transport, Some(TransportKind::Tcp));
        assert!(matches!(pair.terminal().await, EventKind::Completed { .. }));
    }
}

#[tokio::test]
async fn a_part_of_another_size_has_no_form() {
    let pair = Pair::new(wired(Via::Tcp, 16, 16), 10);
    let transfer = pair.open(pair.grant(), 1, &pair.setup.sender);
    let mut extent = extent(&pair.setup.sender, 0, 0, 0);
    extent.len -= 1;
    let block = SourceBlock { ordinal: 0, extent };
    let pushed = tokio::time::timeout(Duration::from_secs(5), transfer.push(0, 0, &[block])).await;
    let error = pushed.unwrap().unwrap_err().to_string();
    assert!(error.contains("no form on the wire"), "{error}");
}
