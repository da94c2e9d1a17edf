//! What a measurement itself cost: the CPU time of the client, of the server and of
//! everybody else on the machine meanwhile.
//!
//! A client that shares the cores with the server distorts what it measures, and so
//! does anything else that runs; both are therefore part of every result.

use std::time::{Duration, Instant};

use serde::Serialize;

/// Linux counts `/proc` times in this many ticks per second on every architecture.
const TICKS_PER_SECOND: f64 = 100.0;

/// Who used the machine during a run, in cores: CPU seconds per second of the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Cost {
    pub wall_s: f64,
    pub client_cpu_s: f64,
    pub client_cores: f64,
    /// Only where the server's process is known.
    pub server_cores: Option<f64>,
    /// Busy and not the client's, nor the server's where that is known.
    pub other_cores: Option<f64>,
    /// Cores the machine has.
    pub cores: usize,
    /// The load averages over 1, 5 and 15 minutes at the start.
    pub load_average: Option<[f64; 3]>,
}

/// The counters at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Meter {
    at: Instant,
    client: Duration,
    busy: Option<f64>,
    server: Option<f64>,
    server_pid: Option<u32>,
    load_average: Option<[f64; 3]>,
}

impl Meter {
    /// Reads all counters.
    pub fn start(server_pid: Option<u32>) -> Self {
        Self {
            at: Instant::now(),
            client: process_cpu_time(),
            busy: read("/proc/stat").as_deref().and_then(busy_seconds),
            server: server_pid.and_then(server_seconds),
            server_pid,
            load_average: read("/proc/loadavg").as_deref().and_then(load_average),
        }
    }

    /// What was used since the start.
    pub fn stop(&self) -> Cost {
        let end = Self::start(self.server_pid);
        let wall_s = (end.at - self.at).as_secs_f64().max(1e-9);
        let client_cpu_s = (end.client - self.client).as_secs_f64();
        let cores_of =
            |before: Option<f64>, after: Option<f64>| Some(((after? - before?) / wall_s).max(0.0));
        let server_cores = cores_of(self.server, end.server);
        let client_cores = client_cpu_s / wall_s;
        Cost {
            wall_s,
            client_cpu_s,
            client_cores,
            server_cores,
            other_cores: cores_of(self.busy, end.busy)
                .map(|busy| (busy - client_cores - server_cores.unwrap_or(0.0)).max(0.0)),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            load_average: self.load_average,
        }
    }
}

pub(super) fn process_cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

fn server_seconds(pid: u32) -> Option<f64> {
    process_seconds(&read(&format!("/proc/{pid}/stat"))?)
}

/// User and system time of a process from its `stat` line, all threads together.
fn process_seconds(stat: &str) -> Option<f64> {
    // The name may hold spaces and brackets; the fields start after its last bracket.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace().skip(11);
    let user: f64 = fields.next()?.parse().ok()?;
    let system: f64 = fields.next()?.parse().ok()?;
    Some((user + system) / TICKS_PER_SECOND)
}

/// Busy time of all cores together: everything but idle, waiting for a disk, and
/// guest time, which user time already holds.
fn busy_seconds(stat: &str) -> Option<f64> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let ticks = line
        .split_ascii_whitespace()
        .take(8)
        .map(str::parse)
        .collect::<Result<Vec<f64>, _>>()
        .ok()?;
    let busy = ticks
        .iter()
        .enumerate()
        .filter(|(field, _)| !matches!(field, 3 | 4))
        .map(|(_, ticks)| ticks)
        .sum::<f64>();
    (ticks.len() >= 5).then_some(busy / TICKS_PER_SECOND)
}

fn load_average(text: &str) -> Option<[f64; 3]> {
    let mut fields = text.split_ascii_whitespace().map(str::parse);
    let mut next = || fields.next()?.ok();
    Some([next()?, next()?, next()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_line_is_read_behind_its_name() {
        let stat = "77 (a (odd) name) S 1 77 77 0 -1 4194304 5 0 0 0 250 50 3 4 20 0 9 0 8 1 2";
        assert_eq!(process_seconds(stat), Some(3.0));
        assert_eq!(process_seconds("77 (cut"), None);
        assert_eq!(process_seconds("77 (cut) S 1 2"), None);
    }

    #[test]
    fn busy_leaves_out_idle_disk_and_guest_time() {
        let stat = "cpu  100 20 30 4000 500 6 7 8 90 10\ncpu0 1 1 1 1 1 1 1 1 1 1\n";
        assert_eq!(busy_seconds(stat), Some(1.71));
        assert_eq!(busy_seconds("intr 5"), None);
        assert_eq!(busy_seconds("cpu  1 2"), None);
    }

    #[test]
    fn load_averages_are_three() {
        assert_eq!(
            load_average("0.50 1.25 2.00 1/80 99"),
            Some([0.5, 1.25, 2.0])
        );
        assert_eq!(load_average("0.50 x"), None);
    }

    #[test]
    fn a_meter_counts_this_process() {
        let meter = Meter::start(Some(std::process::id()));
        let mut sum = 0_u64;
        while process_cpu_time() - meter.client < Duration::from_millis(25) {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        let cost = meter.stop();
        assert!(cost.client_cpu_s >= 0.025, "{cost:?}");
        assert!(cost.client_cores > 0.0 && cost.server_cores.is_some());
    }
}
