//! Many seeds, on as many threads as there are cores, and what came of them.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use baton_proto::environment::Defect;
use serde::Serialize;

use crate::trace::{Line, Violation, story};
use crate::world::{Counts, Run, run};

/// Which seeds to run.
#[derive(Clone, Debug)]
pub struct Seeds {
    pub first: u64,
    /// Runs at most so many; `None` goes on until the time is over.
    pub count: Option<u64>,
    /// Begins no run after this.
    pub time: Option<Duration>,
    pub threads: usize,
    pub defect: Option<Defect>,
    /// Begins no run after one that broke an invariant.
    pub stop_at_first: bool,
}

impl Seeds {
    /// `count` seeds from `first` on, on every core.
    pub fn new(first: u64, count: u64) -> Self {
        Self {
            first,
            count: Some(count),
            time: None,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            defect: None,
            stop_at_first: false,
        }
    }

    /// Runs them; `on_run` hears of each, in no order.
    pub fn run(&self, on_run: impl Fn(&Run) + Sync) -> Report {
        let started = Instant::now();
        let next = AtomicU64::new(0);
        let found = AtomicBool::new(false);
        let report = Mutex::new(Report::default());
        let work = || {
            loop {
                let over = self.time.is_some_and(|time| started.elapsed() >= time);
                if over || self.stop_at_first && found.load(Ordering::Relaxed) {
                    return;
                }
                let number = next.fetch_add(1, Ordering::Relaxed);
                if self.count.is_some_and(|count| number >= count) {
                    return;
                }
                let run = run(self.first + number, self.defect);
                found.fetch_or(!run.violations.is_empty(), Ordering::Relaxed);
                on_run(&run);
                let mut report = report
                    .lock()
                    .unwrap_or_else(std::sync::PoisonError::into_inner);
                report.add(run);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..self.threads.max(1) {
                scope.spawn(work);
            }
            work();
        });
        let mut report = report
            .into_inner()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        report.broken.sort_by_key(|broken| broken.seed);
        report.seconds = started.elapsed().as_secs_f64();
        report
    }
}

/// What came of many seeds.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    pub seeds: u64,
    #[serde(flatten)]
    pub counts: Counts,
    /// The runs' own time, all together.
    pub simulated_seconds: f64,
    pub seconds: f64,
    pub broken: Vec<Broken>,
}

/// A seed that broke an invariant.
#[derive(Clone, Debug, Serialize)]
pub struct Broken {
    pub seed: u64,
    pub scenario: String,
    pub violations: Vec<Violation>,
    /// The lines that tell how the first came about.
    #[serde(serialize_with = "as_lines")]
    pub story: Vec<Line>,
}

fn as_lines<S: serde::Serializer>(lines: &[Line], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(lines.iter().map(ToString::to_string))
}

impl Report {
    fn add(&mut self, run: Run) {
        self.seeds += 1;
        self.counts.add(&run.counts);
        self.simulated_seconds += run.took.as_secs_f64();
        if let Some(first) = run.violations.first() {
            let story = story(&run.lines, first).into_iter().cloned().collect();
            self.broken.push(Broken {
                seed: run.scenario.seed,
                scenario: run.scenario.summary(),
                violations: run.violations,
                story,
            });
        }
    }
}

impl fmt::Display for Report {
    /// One line of counts.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = &self.counts;
        write!(
            f,
            "seeds: {}, broken: {}, requests: {} ({} completed, {} refused, {} failed, {} cancelled), \
             faults: {}, handoffs: {}, retries: {}, simulated: {:.0} s, took: {:.1} s",
            self.seeds,
            self.broken.len(),
            counts.requests(),
            counts.completed,
            counts.refused,
            counts.failed,
            counts.cancelled,
            counts.faults,
            counts.handoffs,
            counts.retries,
            self.simulated_seconds,
            self.seconds
        )
    }
}

impl fmt::Display for Broken {
    /// What broke, and its story.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {} ({})", self.seed, self.scenario)?;
        for line in &self.story {
            writeln!(f, "  {line}")?;
        }
        for violation in &self.violations {
            writeln!(f, "  broken: {violation}")?;
        }
        write!(f, "  again: baton simulate --seed {} --trace", self.seed)
    }
}
