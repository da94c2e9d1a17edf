//! Bytes arrive equal, and by NIXL where both ends have it.

use std::path::Path;
use std::time::Duration;

use baton_kv_transfer::receiver::EventKind;
use baton_kv_transfer::sender::{CommitOutcome, SenderConfig, TransportKind};
use baton_kv_transfer::{DataPortConfig, NixlError, NixlLender, NixlLibrary};
use bytes::Bytes;
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::nixl_library::library;
use crate::pair::{Pair, Shape, Via};

/// Time for agents to start on a busy machine.
const CONNECT: Duration = Duration::from_secs(7);

/// Both ends with NIXL, and nothing else to fall back on.
pub fn pair(library: &NixlLibrary, via: Via, shape: Shape, seed: u64) -> Pair {
    let transports = [TransportKind::Nixl];
    pair_of(via, shape, seed, Some(library), Some(library), &transports)
}

fn pair_of(
    via: Via,
    shape: Shape,
    seed: u64,
    receiver: Option<&NixlLibrary>,
    sender: Option<&NixlLibrary>,
    transports: &[TransportKind],
) -> Pair {
    let port = |config: &mut DataPortConfig| config.nixl = receiver.cloned();
    let sending = |config: &mut SenderConfig| {
        config.connect_timeout = CONNECT;
        config.transports = transports.to_vec();
        config.nixl = sender.map(|library| NixlLender::new(library, &config.regions).unwrap());
    };
    Pair::with_port(via, shape, seed, |_| {}, port, sending)
}

async fn completed_by(pair: &mut Pair) -> TransportKind {
    match pair.terminal().await {
        EventKind::Completed { transport, .. } => transport,
        other => panic!("not completed: {other:?}"),
    }
}

#[tokio::test]
async fn moves_random_maps() {
    let Some(library) = library() else { return };
    for seed in 0..8 {
        let shape = Shape::random(&mut StdRng::seed_from_u64(seed));
        let mut pair = pair(&library, Via::Tcp, shape, seed);
        // The second one finds the lane open.
        for _ in 0..2 {
            let before = pair.snapshot();
            let outcome = pair.hand_off(b"first token").await;
            assert_eq!(outcome, CommitOutcome::Committed, "seed {seed}");
            assert_eq!(completed_by(&mut pair).await, TransportKind::Nixl);
            pair.assert_equal(&before);
            assert_eq!(pair.receiver.grants_live(), 0);
            pair.destination.iter().for_each(|arena| arena.fill(7));
        }
    }
}

#[tokio::test]
async fn moves_parts_of_megabytes_around_the_staging_areas_end() {
    let Some(library) = library() else { return };
    let mut pair = pair(&library, Via::Tcp, Shape::single(3, 4, 3_000_001), 1);
    let before = pair.snapshot();
    assert_eq!(pair.hand_off(b"").await, CommitOutcome::Committed);
    assert_eq!(completed_by(&mut pair).await, TransportKind::Nixl);
    pair.assert_equal(&before);
}

#[tokio::test]
async fn transfers_that_share_a_lane_do_not_mix() {
    let Some(library) = library() else { return };
    let pair = pair(&library, Via::Tcp, Shape::single(6, 24, 20_000), 7);
    let before = pair.snapshot();
    let mut transfers = Vec::new();
    for ordinal in 0..24 {
        let mut request = pair.request(1, Duration::from_secs(20));
        let blocks = &mut request.groups[0].blocks;
        blocks.retain(|block| block.ordinal == ordinal);
        transfers.push(pair.open(pair.receiver.grant(request).unwrap().ticket, 1));
    }
    for (group, index, layer) in pair.layers() {
        for (transfer, block) in transfers.iter().zip(pair.source_blocks(group, index)) {
            transfer.push(group as u16, layer, &[block]).await.unwrap();
        }
    }
    for transfer in &transfers {
        let outcome = transfer.commit(Bytes::new()).await;
        assert_eq!(outcome, CommitOutcome::Committed);
        let transport = transfer.statistics().transport;
        assert_eq!(transport, Some(TransportKind::Nixl));
    }
    pair.assert_equal(&before);
}

#[tokio::test]
async fn frames_inside_tls_may_lend_as_well() {
    let Some(library) = library() else { return };
    let mut pair = pair(&library, Via::Tls, Shape::single(4, 20, 9000), 3);
    let before = pair.snapshot();
    assert_eq!(pair.hand_off(b"").await, CommitOutcome::Committed);
    assert_eq!(completed_by(&mut pair).await, TransportKind::Nixl);
    pair.assert_equal(&before);
}

#[tokio::test]
async fn one_end_alone_goes_over_tcp_or_is_refused() {
    let Some(library) = library() else { return };
    let both = [TransportKind::Nixl, TransportKind::Tcp];
    for (receiver, sender) in [(None, Some(&library)), (Some(&library), None)] {
        let shape = Shape::single(4, 20, 5000);
        let mut pair = pair_of(Via::Tcp, shape, 5, receiver, sender, &both);
        let before = pair.snapshot();
        assert_eq!(pair.hand_off(b"").await, CommitOutcome::Committed);
        assert_eq!(completed_by(&mut pair).await, TransportKind::Tcp);
        pair.assert_equal(&before);
    }
    let alone = [TransportKind::Nixl];
    let shape = Shape::single(1, 1, 50);
    let pair = pair_of(Via::Tcp, shape, 5, None, Some(&library), &alone);
    let transfer = pair.open(pair.grant(1), 1);
    let outcome = transfer.commit(Bytes::new()).await;
    assert_eq!(outcome, CommitOutcome::PeerLost);
    let failure = transfer.failure().unwrap();
    assert!(failure.contains("cannot read over nixl"), "{failure}");
}

/// UCX takes its transports from the environment, so this needs a process of its own: the same
/// test again.
#[tokio::test]
async fn where_ucx_can_only_emulate_reads_the_lane_carries_the_bytes() {
    const TRANSPORTS: &str = "UCX_TLS";
    let Some(library) = library() else { return };
    if std::env::var(TRANSPORTS).as_deref() != Ok("tcp") {
        let name = "moving::where_ucx_can_only_emulate_reads_the_lane_carries_the_bytes";
        let again = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(TRANSPORTS, "tcp")
            .output();
        let again = again.unwrap();
        let said = String::from_utf8_lossy(&again.stdout);
        assert!(
            again.status.success() && said.contains("1 passed"),
            "{again:?}"
        );
        return;
    }
    let both = [TransportKind::Nixl, TransportKind::Tcp];
    let shape = Shape::single(4, 20, 5000);
    let mut pair = pair_of(Via::Tcp, shape, 5, Some(&library), Some(&library), &both);
    let before = pair.snapshot();
    assert_eq!(pair.hand_off(b"").await, CommitOutcome::Committed);
    assert_eq!(completed_by(&mut pair).await, TransportKind::Tcp);
    pair.assert_equal(&before);
}

#[test]
fn what_is_no_library_is_refused_by_name() {
    let nowhere = Path::new("/nowhere");
    let found = NixlLibrary::open(nowhere).unwrap_err();
    assert!(matches!(&found, NixlError::NotFound(path) if path == nowhere));
    let this = std::env::current_exe().unwrap();
    let text = NixlLibrary::open(&this).unwrap_err().to_string();
    assert!(text.contains(this.to_str().unwrap()), "{text}");
}
