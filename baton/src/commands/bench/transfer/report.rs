//! What was found, as a table and as JSON.

use std::fmt;

use baton_observability::latency::Summary;
use serde::Serialize;

use super::Sample;
use super::flags::PartBytes;
use crate::commands::bench::cost::Cost;
use crate::commands::bench::report::Table;

/// A way from one pool to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// One copy of the whole pool.
    Memcpy,
    /// One thread's copies of parts.
    ScatteredMemcpy,
    /// The same with a checksum of each: what a receiver of shared memory does.
    CheckedCopy,
    /// A plain `writev`/`readv` pair over the loopback interface.
    PlainTcp,
    Loopback,
    SharedMemory,
    Tcp,
    Nixl,
}

impl Way {
    const ALL: [Self; 8] = [
        Self::Memcpy,
        Self::ScatteredMemcpy,
        Self::CheckedCopy,
        Self::PlainTcp,
        Self::Loopback,
        Self::SharedMemory,
        Self::Tcp,
        Self::Nixl,
    ];

    /// Every way that can be gone with NIXL, or without.
    pub fn all(nixl: bool) -> Vec<Self> {
        let ways = Self::ALL.into_iter();
        ways.filter(|way| nixl || *way != Self::Nixl).collect()
    }

    /// Whether it can move one part as well, for its latency.
    pub const fn has_latency(self) -> bool {
        !matches!(
            self,
            Self::Memcpy | Self::ScatteredMemcpy | Self::CheckedCopy
        )
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Memcpy => "memcpy, whole",
            Self::ScatteredMemcpy => "memcpy, scattered",
            Self::CheckedCopy => "copy + crc32c",
            Self::PlainTcp => "plain writev/readv",
            Self::Loopback => "loopback",
            Self::SharedMemory => "shared_memory",
            Self::Tcp => "tcp",
            Self::Nixl => "nixl",
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What was asked for.
#[derive(Clone, Debug, Serialize)]
pub struct Setup {
    pub total_bytes: u64,
    pub layers: u32,
    pub rounds: u32,
    pub latency_rounds: u32,
    pub cores: usize,
}

/// One way at one size of parts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Throughput {
    pub part_bytes: u32,
    pub way: Way,
    /// Of the best round, in 10^9 bytes per second.
    pub gb_per_s: f64,
    pub median_gb_per_s: f64,
    /// Of both ends, in the round that took least of it.
    pub cpu_s_per_gb: f64,
    /// Best round over best round, at the same size.
    pub of_scattered_memcpy: f64,
    pub of_plain_tcp: f64,
}

impl Throughput {
    /// Every way at one size.
    pub fn of_size<'a>(
        part_bytes: u32,
        bytes: u64,
        samples: impl Iterator<Item = (Way, &'a Vec<Sample>)>,
    ) -> Vec<Self> {
        let giga = bytes as f64 / 1e9;
        let mut rows: Vec<Self> = samples
            .map(|(way, samples)| {
                let mut rates: Vec<f64> = samples.iter().map(|one| giga / one.seconds).collect();
                rates.sort_by(f64::total_cmp);
                let cpu = samples.iter().map(|one| one.cpu_seconds / giga);
                Self {
                    part_bytes,
                    way,
                    gb_per_s: rates.last().copied().unwrap_or(0.0),
                    median_gb_per_s: rates.get(rates.len() / 2).copied().unwrap_or(0.0),
                    cpu_s_per_gb: cpu.fold(f64::INFINITY, f64::min),
                    of_scattered_memcpy: 0.0,
                    of_plain_tcp: 0.0,
                }
            })
            .collect();
        let best = |rows: &[Self], way: Way| {
            let row = rows.iter().find(|row| row.way == way);
            row.map_or(f64::NAN, |row| row.gb_per_s)
        };
        let copied = best(&rows, Way::ScatteredMemcpy);
        let plain = best(&rows, Way::PlainTcp);
        for row in &mut rows {
            row.of_scattered_memcpy = row.gb_per_s / copied;
            row.of_plain_tcp = row.gb_per_s / plain;
        }
        rows
    }
}

/// Transfers of one part.
#[derive(Clone, Debug, Serialize)]
pub struct Latency {
    pub part_bytes: u32,
    pub way: Way,
    pub p50_us: f64,
    pub p99_us: f64,
}

impl Latency {
    pub fn of(part_bytes: u32, way: Way, summary: &Summary) -> Self {
        Self {
            part_bytes,
            way,
            p50_us: summary.p50,
            p99_us: summary.p99,
        }
    }
}

/// The whole result.
#[derive(Clone, Debug, Serialize)]
pub struct TransferReport {
    pub bench: &'static str,
    pub setup: Setup,
    pub throughput: Vec<Throughput>,
    pub latency: Vec<Latency>,
    pub cost: Cost,
}

impl TransferReport {
    /// The result for people.
    pub fn table(&self) -> String {
        let setup = &self.setup;
        let mut table = Table::new(format!(
            "{} MiB in shuffled parts of {} layers, both ends in this process, digests on; best of {} rounds",
            setup.total_bytes >> 20,
            setup.layers,
            setup.rounds,
        ));
        table.line(format!(
            "\n{:<9}{:<20}{:>8}{:>9}{:>12}{:>15}{:>14}",
            "part", "way", "GB/s", "median", "CPU s/GB", "of scattered", "of plain TCP"
        ));
        let percent = |share: f64| format!("{:.0} %", share * 100.0);
        for row in &self.throughput {
            table.line(format!(
                "{:<9}{:<20}{:>8.2}{:>9.2}{:>12.3}{:>15}{:>14}",
                PartBytes(row.part_bytes).to_string(),
                row.way,
                row.gb_per_s,
                row.median_gb_per_s,
                row.cpu_s_per_gb,
                percent(row.of_scattered_memcpy),
                percent(row.of_plain_tcp),
            ));
        }
        table.line(format!(
            "\none part, microseconds from the first word to the acceptance, {} times",
            setup.latency_rounds
        ));
        table.line(format!(
            "{:<9}{:<20}{:>8}{:>9}",
            "part", "way", "p50", "p99"
        ));
        for row in &self.latency {
            table.line(format!(
                "{:<9}{:<20}{:>8.0}{:>9.0}",
                PartBytes(row.part_bytes).to_string(),
                row.way,
                row.p50_us,
                row.p99_us,
            ));
        }
        table.line(String::new());
        table.cost(&self.cost);
        table.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_round_counts_and_shares_are_of_the_same_size() {
        let sample = |seconds, cpu_seconds| Sample {
            seconds,
            cpu_seconds,
        };
        let samples = [
            (
                Way::ScatteredMemcpy,
                vec![sample(0.5, 0.5), sample(0.25, 0.25)],
            ),
            (Way::PlainTcp, vec![sample(1.0, 2.0), sample(0.5, 1.5)]),
            (
                Way::Tcp,
                vec![sample(1.0, 1.0), sample(2.0, 3.0), sample(4.0, 3.0)],
            ),
        ];
        let samples = samples.iter().map(|(way, samples)| (*way, samples));
        let rows = Throughput::of_size(4096, 1_000_000_000, samples);
        let tcp = &rows[2];
        assert_eq!((tcp.gb_per_s, tcp.median_gb_per_s), (1.0, 0.5));
        assert_eq!(tcp.cpu_s_per_gb, 1.0);
        assert_eq!((tcp.of_scattered_memcpy, tcp.of_plain_tcp), (0.25, 0.5));
    }
}
