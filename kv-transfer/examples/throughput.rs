//! How fast blocks move: GB/s of each transport beside one thread's `memcpy`.
//!
//! `cargo run --release -p baton-kv-transfer --example throughput`. Both ends run in
//! this process, each lane on a thread of its own; block maps are shuffled, so
//! nothing coalesces that would not in a real pool. Prints the median of five.
#![allow(unsafe_code)]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_kv_transfer::receiver::{BlockGrant, GrantRequest, GroupGrant, Receiver, ReceiverConfig};
use baton_kv_transfer::sender::{
    CommitOutcome, LaneTarget, Sender, SenderConfig, SourceBlock, TransportKind,
};
use baton_kv_transfer::{
    DataPort, DataPortConfig, LayoutDigest, MemoryRegion, RegionTable, SharedMemory,
};
use baton_proto::kv_layout::ByteExtent;
use baton_proto::{Attempt, Epoch, RequestId};
use rand::SeedableRng;
use rand::seq::SliceRandom;

const LAYERS: u32 = 32;
const TOTAL_BYTES: u64 = 256 << 20;
const EPOCH: Epoch = Epoch(1);
const LAYOUT: LayoutDigest = LayoutDigest([0; 32]);
const REPEATS: usize = 5;

fn lendable() -> RegionTable {
    let memory = Arc::new(SharedMemory::new(TOTAL_BYTES as usize).expect("a segment"));
    // SAFETY: only lanes touch it while a transfer runs.
    vec![unsafe { baton_kv_transfer::region_of(&memory) }]
}

fn pool() -> RegionTable {
    let memory: &'static mut [u8] = vec![1u8; TOTAL_BYTES as usize].leak();
    // SAFETY: leaked, so alive for ever; only lanes touch it while a transfer runs.
    vec![unsafe { MemoryRegion::new(memory.as_mut_ptr(), memory.len(), Arc::new(())) }]
}

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let runtime = runtime.expect("a runtime");
    println!("256 MiB, {LAYERS} layers, shuffled blocks, median of {REPEATS} (min..max), GB/s");
    println!("memcpy                        {}", memcpy());
    for part_bytes in [4 << 10, 12 << 10, 64 << 10, 256 << 10, 1 << 20] {
        println!(
            "scattered memcpy, parts of {:>4} KiB {}",
            part_bytes >> 10,
            scattered(part_bytes as usize)
        );
        for transport in [
            TransportKind::Loopback,
            TransportKind::SharedMemory,
            TransportKind::Tcp,
        ] {
            let rates = runtime.block_on(transfer(transport, part_bytes));
            println!(
                "{transport:>16?}, parts of {:>4} KiB {rates}",
                part_bytes >> 10
            );
        }
    }
}

/// One thread's copy of parts from shuffled places to shuffled places.
fn scattered(part: usize) -> String {
    let from = vec![1u8; TOTAL_BYTES as usize];
    let mut to = vec![2u8; TOTAL_BYTES as usize];
    let mut rng = rand::rngs::StdRng::seed_from_u64(2);
    let mut map = || {
        let mut map: Vec<usize> = (0..from.len() / part).map(|index| index * part).collect();
        map.shuffle(&mut rng);
        map
    };
    let (sources, targets) = (map(), map());
    summary((0..REPEATS).map(|_| {
        let started = Instant::now();
        for (source, target) in sources.iter().zip(&targets) {
            to[*target..][..part].copy_from_slice(&from[*source..][..part]);
        }
        black_box(&mut to[..]);
        started.elapsed()
    }))
}

fn memcpy() -> String {
    let from = vec![1u8; TOTAL_BYTES as usize];
    let mut to = vec![2u8; TOTAL_BYTES as usize];
    summary((0..REPEATS).map(|_| {
        let started = Instant::now();
        black_box(&mut to[..]).copy_from_slice(black_box(&from[..]));
        started.elapsed()
    }))
}

async fn transfer(transport: TransportKind, part_bytes: u32) -> String {
    let config = ReceiverConfig::new(EPOCH, LAYOUT, pool());
    let receiver = Receiver::start(config, Box::new(|_| {})).expect("a receiver");
    let port = DataPort::bind(DataPortConfig::default(), receiver.clone()).expect("a port");
    let mut config = SenderConfig::new(match transport {
        TransportKind::SharedMemory => lendable(),
        _ => pool(),
    });
    config.transports = vec![transport];
    let sender = Sender::start(config);

    let blocks = (TOTAL_BYTES / u64::from(part_bytes) / u64::from(LAYERS)) as u32;
    let mut rng = rand::rngs::StdRng::seed_from_u64(1);
    let mut map = || {
        let mut map: Vec<u32> = (0..blocks).collect();
        map.shuffle(&mut rng);
        map
    };
    let (from, to) = (map(), map());
    let extent = |block: u32, layer: u32| ByteExtent {
        offset: u64::from(block * LAYERS + layer) * u64::from(part_bytes),
        len: part_bytes,
        region: 0,
    };
    let mut times = Vec::new();
    // The first one warms pages and the lane and does not count.
    for _ in 0..=REPEATS {
        let block = |ordinal: u32| BlockGrant {
            ordinal,
            layers: (0..LAYERS)
                .map(|layer| extent(to[ordinal as usize], layer))
                .collect(),
        };
        let grant = receiver.grant(GrantRequest {
            request_id: RequestId::from("throughput"),
            attempt: Attempt(1),
            epoch: EPOCH,
            groups: vec![GroupGrant {
                group: 0,
                layers: (0..LAYERS).collect(),
                blocks: (0..blocks).map(block).collect(),
            }],
            deadline: Duration::from_secs(60),
        });
        let target = LaneTarget {
            data_address: Some(port.local_address()),
            server_name: None,
            process_token: receiver.process_token(),
            lane_key: receiver.lane_key().clone(),
            ticket: grant.expect("a grant").ticket,
            epoch: EPOCH,
            attempt: Attempt(1),
            request_id: RequestId::from("throughput"),
            deadline: Duration::from_secs(60),
        };
        let started = Instant::now();
        let transfer = sender.open(target, LAYOUT).expect("a transfer");
        for layer in 0..LAYERS {
            let blocks: Vec<SourceBlock> = (0..blocks)
                .map(|ordinal| SourceBlock {
                    ordinal,
                    extent: extent(from[ordinal as usize], layer),
                })
                .collect();
            transfer.push(0, layer, &blocks).await.expect("a push");
        }
        let outcome = transfer.commit(bytes::Bytes::new()).await;
        times.push(started.elapsed());
        assert_eq!(outcome, CommitOutcome::Committed);
    }
    summary(times.into_iter().skip(1))
}

fn summary(times: impl Iterator<Item = Duration>) -> String {
    let mut rates: Vec<f64> = times
        .map(|time| TOTAL_BYTES as f64 / time.as_secs_f64() / 1e9)
        .collect();
    rates.sort_by(f64::total_cmp);
    let (min, max) = (rates[0], rates[rates.len() - 1]);
    format!("{:.2} ({min:.2}..{max:.2})", rates[rates.len() / 2])
}
