//! `baton bench transfer`: how fast KV goes from one worker to another, by transport.
//!
//! ```text
//! flags      the command line
//! arena      pools of shuffled parts, and copies between them
//! apart      a core for each end
//! plain      what any transfer over TCP could be: a writev/readv pair on the same parts
//! handoff    the product: grants, lanes, digests, a commit
//! report     the result as a table and as JSON
//! ```
//!
//! Both ends run in this process, each lane on threads of its own, as they would in two:
//! lent memory is mapped a second time and TCP goes through the loopback interface. Each end
//! has a core of its own, as two workers would: left alone, a system with other work puts a
//! thread on the core of the one that woke it, and the ends take turns. Every
//! round runs every way once, so that what else the machine does falls on all alike; the
//! best round of each counts, and shares are of figures from the same run.

mod apart;
mod arena;
pub mod flags;
mod handoff;
mod plain;
mod report;

use std::time::Instant;

use anyhow::{Context as _, ensure};
use baton_engine::kv::PoolSharing;
use baton_kv_transfer::NixlLibrary;
use baton_kv_transfer::sender::TransportKind;
use baton_observability::latency::Summary;

use super::cost::{Meter, process_cpu_time};
use super::report::{points_bar, publish};
use arena::Arena;
use flags::TransferBenchArgs;
use handoff::Handoff;
use plain::Pair;
use report::{Latency, Setup, Throughput, TransferReport, Way};

/// Measures, prints and stores.
///
/// # Errors
/// Memory or sockets that the system refuses, bytes that did not arrive as they left, a
/// file that cannot be written.
pub fn run(args: &TransferBenchArgs) -> anyhow::Result<()> {
    let report = measure(args)?;
    publish(&report, &report.table(), &args.report)
}

fn measure(args: &TransferBenchArgs) -> anyhow::Result<TransferReport> {
    let meter = Meter::start(None);
    let nixl = args.nixl_library.as_deref().map(NixlLibrary::open);
    let nixl = nixl.transpose().context("--nixl-library")?;
    let ways = Way::all(nixl.is_some());
    let with_latency = || ways.iter().copied().filter(|way| way.has_latency());
    let sizes = args.part_bytes.len() as u64;
    let timed = (ways.len() as u64) * u64::from(args.rounds);
    let steps = sizes * (timed + with_latency().count() as u64);
    let bar = points_bar(steps, args.report.quiet);
    let mut throughput = Vec::new();
    let mut latency = Vec::new();
    for part_bytes in &args.part_bytes {
        let mut bench = Bench::new(part_bytes.0, args.total.0, nixl.as_ref())?;
        // Touches every page and opens every lane.
        for way in ways.iter().copied() {
            bar.set_message(format!("{part_bytes} parts, {way}, not counted"));
            bench.once(way)?;
            bench.check(way)?;
        }
        let apart = apart::keep();
        ensure!(apart.is_ok(), "keep the ends apart: {apart:?}");
        let mut samples = vec![Vec::new(); ways.len()];
        for _ in 0..args.rounds {
            for (at, way) in ways.iter().copied().enumerate() {
                bar.set_message(format!("{part_bytes} parts, {way}"));
                samples[at].push(bench.once(way)?);
                bar.inc(1);
            }
        }
        let measured = ways.iter().copied().zip(&samples);
        throughput.extend(Throughput::of_size(part_bytes.0, bench.bytes(), measured));
        for way in with_latency() {
            bar.set_message(format!("one part of {part_bytes}, {way}"));
            let mut micros = Vec::new();
            for _ in 0..args.latency_rounds {
                micros.push(bench.one_part(way)?);
            }
            bar.inc(1);
            if let Some(summary) = Summary::of(&mut micros) {
                latency.push(Latency::of(part_bytes.0, way, &summary));
            }
        }
    }
    bar.finish_and_clear();
    // What follows counts the cores of this process.
    apart::let_go().context("let go of one core")?;
    Ok(TransferReport {
        bench: "transfer",
        setup: Setup {
            total_bytes: args.total.0,
            layers: arena::LAYERS,
            rounds: args.rounds,
            latency_rounds: args.latency_rounds,
            cores: std::thread::available_parallelism().map_or(0, usize::from),
        },
        throughput,
        latency,
        cost: meter.stop(),
    })
}

/// What one movement of all bytes took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sample {
    pub seconds: f64,
    /// Of both ends.
    pub cpu_seconds: f64,
}

/// Every way at one size of parts.
struct Bench {
    /// The pool of a worker that keeps its memory to itself.
    source: Arena,
    /// The pool of one that lends it.
    lendable: Arena,
    target: Arena,
    pair: Pair,
    handoffs: [Handoff; 3],
    nixl: Option<Handoff>,
}

impl Bench {
    fn new(part_bytes: u32, total: u64, nixl: Option<&NixlLibrary>) -> anyhow::Result<Self> {
        let mut source = Arena::new(part_bytes, total, PoolSharing::Private, 1)?;
        let mut lendable = Arena::new(part_bytes, total, PoolSharing::Lendable, 1)?;
        let mut target = Arena::new(part_bytes, total, PoolSharing::Private, 2)?;
        source.fill(3);
        lendable.fill(3);
        target.fill(4);
        let handoffs = [
            Handoff::start(TransportKind::Loopback, &source, &target, None)?,
            Handoff::start(TransportKind::SharedMemory, &lendable, &target, None)?,
            Handoff::start(TransportKind::Tcp, &source, &target, None)?,
        ];
        let start = |nixl| Handoff::start(TransportKind::Nixl, &source, &target, Some(nixl));
        let nixl = nixl.map(start).transpose()?;
        Ok(Self {
            pair: Pair::connect()?,
            source,
            lendable,
            target,
            handoffs,
            nixl,
        })
    }

    fn bytes(&self) -> u64 {
        self.source.bytes()
    }

    fn handoff(&mut self, way: Way) -> Option<&mut Handoff> {
        match way {
            Way::Loopback => Some(&mut self.handoffs[0]),
            Way::SharedMemory => Some(&mut self.handoffs[1]),
            Way::Tcp => Some(&mut self.handoffs[2]),
            Way::Nixl => self.nixl.as_mut(),
            Way::Memcpy | Way::ScatteredMemcpy | Way::CheckedCopy | Way::PlainTcp => None,
        }
    }

    fn once(&mut self, way: Way) -> anyhow::Result<Sample> {
        if let Some(handoff) = self.handoff(way) {
            return handoff.all();
        }
        let (started, cpu) = (Instant::now(), process_cpu_time());
        match way {
            Way::Memcpy => self.target.copy_whole(&self.source),
            Way::CheckedCopy => self.target.copy_parts_checked(&self.source),
            Way::PlainTcp => self.pair.all(&self.source, &mut self.target)?,
            _ => self.target.copy_parts(&self.source),
        }
        Ok(Sample {
            seconds: started.elapsed().as_secs_f64(),
            cpu_seconds: (process_cpu_time() - cpu).as_secs_f64(),
        })
    }

    /// Whether what `way` moved last arrived as it left; the target forgets it.
    fn check(&mut self, way: Way) -> anyhow::Result<()> {
        let from = match way {
            Way::SharedMemory => &self.lendable,
            _ => &self.source,
        };
        // A whole copy keeps the order of the source's pool, the others its parts' names.
        let same = match way {
            Way::Memcpy => self.target.is_like(from),
            _ => self.target.holds_parts_of(from),
        };
        ensure!(same, "{way}: bytes did not arrive as they left");
        self.target.fill(4);
        Ok(())
    }

    /// Microseconds from the first word about one part to the receiver's acceptance.
    fn one_part(&mut self, way: Way) -> anyhow::Result<f64> {
        if let Some(handoff) = self.handoff(way) {
            return handoff.one_part();
        }
        let took = self.pair.one_part(&self.source, &mut self.target)?;
        Ok(took.as_secs_f64() * 1e6)
    }
}
