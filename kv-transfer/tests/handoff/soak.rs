//! Nobody is taken for dead because the machine is busy.
//!
//! Not part of a normal run: `BATON_SOAK_SECONDS=600 cargo test -p baton-kv-transfer \
//! --test handoff -- --ignored no_peer_is` keeps every core busy for that long.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use baton_kv_transfer::DataPortConfig;
use baton_kv_transfer::receiver::{EventKind, ReceiverConfig};
use baton_kv_transfer::sender::{CommitOutcome, SenderConfig};
use bytes::Bytes;

use crate::pair::{EPOCH, LAYOUT, Pair, Shape, Via};

/// Threads that do what an engine's do, as many as two engines have here.
fn keep_busy() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    for _ in 0..2 * cores {
        let stop = Arc::clone(&stop);
        std::thread::spawn(move || {
            let mut sum = 0u64;
            while !stop.load(Ordering::Relaxed) {
                sum = std::hint::black_box(sum.wrapping_mul(31).wrapping_add(7));
            }
        });
    }
    stop
}

#[tokio::test]
#[ignore = "takes as long as it is told to"]
async fn no_peer_is_dead_because_the_machine_is_busy() {
    let seconds = std::env::var("BATON_SOAK_SECONDS");
    let seconds = seconds.map_or(20, |seconds| seconds.parse().unwrap());
    let stop = keep_busy();
    let until = Instant::now() + Duration::from_secs(seconds);
    let defaults = (
        ReceiverConfig::new(EPOCH, LAYOUT, vec![]),
        DataPortConfig::default(),
        SenderConfig::new(vec![]),
    );
    let mut handed_off = 0;
    for via in [Via::Tcp, Via::Shared].into_iter().cycle() {
        if Instant::now() >= until {
            break;
        }
        let mut pair = Pair::with_port(
            via,
            Shape::single(4, 24, 12_288),
            handed_off,
            |config| config.resume_grace = defaults.0.resume_grace,
            |config| config.silence_max = defaults.1.silence_max,
            |config| {
                config.silence_max = defaults.2.silence_max;
                config.reconnect_max = defaults.2.reconnect_max;
            },
        );
        // One lane for many requests, each slower than silence may be.
        for _ in 0..4 {
            let before = pair.snapshot();
            let transfer = pair.open(pair.grant(1), 1);
            for (group, index, layer) in pair.layers() {
                tokio::time::sleep(Duration::from_millis(400)).await;
                let blocks = pair.source_blocks(group, index);
                transfer.push(group as u16, layer, &blocks).await.unwrap();
            }
            let outcome = transfer.commit(Bytes::new()).await;
            assert_eq!(
                outcome,
                CommitOutcome::Committed,
                "{:?}",
                transfer.failure()
            );
            assert!(matches!(pair.terminal().await, EventKind::Completed { .. }));
            pair.assert_equal(&before);
            assert_eq!(transfer.statistics().reconnects, 0, "{via:?}");
            assert_eq!(pair.receiver.statistics().lanes_lost, 0, "{via:?}");
            handed_off += 1;
        }
    }
    stop.store(true, Ordering::Relaxed);
    assert!(handed_off > 0);
    println!("{handed_off} requests in {seconds} s, no lane lost");
}
