//! `baton bench sweep`: one load after another, and what each did to latency and
//! throughput.
//!
//! Each load runs for a fixed time, of which the first part is left out, and is then
//! cut off: what is offered is the same for every server, however slow. Results of
//! other runs can be laid beside this one, to compare settings of one server, and the
//! comparison says whether this run kept its target at the best throughput of those
//! that did.

pub mod flags;
mod plot;
mod verdict;

use std::cell::RefCell;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use baton_observability::latency::{RequestLatency, Slo, Summary, goodput};
use futures::future::join_all;
use serde::{Deserialize, Serialize};

use super::client::Client;
use super::cost::{Cost, Meter};
use super::flags::SweepArgs;
use super::load::Pace;
use super::report::{self, Table, Target};
use super::sample::{Arrival, Clock, Gap, gaps};
use super::workload::{Shape, jobs, poisson_arrivals};
use verdict::Verdict;

/// What a server gets to drop the requests of the load before.
const PAUSE: Duration = Duration::from_millis(500);

/// What one load did. Times are milliseconds, rates per second, percentiles 0 where
/// there was nothing to take them of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    pub offered: Pace,
    /// Token gaps that ended in the measured time.
    pub gaps: usize,
    pub itl_p50_ms: f64,
    pub itl_p99_ms: f64,
    pub ttft_p50_ms: f64,
    pub ttft_p99_ms: f64,
    pub output_tokens_per_s: f64,
    /// Requests that ended well in the measured time.
    pub requests_per_s: f64,
    /// Of those, the ones within the objectives.
    pub goodput_requests_per_s: f64,
    pub failed: usize,
}

/// The loads of one run, in order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    pub label: String,
    pub points: Vec<Point>,
}

/// The result.
#[derive(Clone, Debug, Serialize)]
pub struct SweepReport {
    pub bench: &'static str,
    pub target: Target,
    pub prompt_tokens: String,
    pub output_tokens: String,
    pub seed: u64,
    pub settle_ms: u64,
    pub step_ms: u64,
    pub slo_ttft_ms: Option<f64>,
    pub slo_itl_ms: Option<f64>,
    pub curve: Curve,
    pub against: Vec<Curve>,
    /// Where there is a target and a run to compare with.
    pub verdict: Option<Verdict>,
    pub cost: Cost,
}

/// Runs all loads.
///
/// # Errors
/// A file of `--against` that is no result of a sweep. Failed requests are counted.
pub async fn run(args: &SweepArgs, client: &Client) -> anyhow::Result<SweepReport> {
    let against = args
        .against
        .iter()
        .map(|path| read_curve(path))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let paces = args.paces();
    let bar = report::counting_bar(paces.len() as u64, args.report.quiet);
    let meter = Meter::start(args.target.server_pid);
    let mut points = Vec::new();
    for (at, pace) in paces.into_iter().enumerate() {
        let stage = Stage {
            client,
            clock: Clock::start(),
            shape: Shape {
                prompt: args.prompt_tokens,
                output: args.output_tokens,
                shared_prefix: 0,
                vocab_size: client.vocab_size,
                temperature: None,
            },
            // Prompts of their own for every load, or a prefix cache would answer.
            seed: args
                .target
                .seed
                .wrapping_add(at as u64)
                .wrapping_mul(0x9E37_79B9),
            records: RefCell::default(),
        };
        let (settle, measure) = (
            Duration::from_millis(args.settle_ms),
            Duration::from_millis(args.step_ms),
        );
        let end = settle + measure;
        let all = stage.offer(pace, end);
        // What is under way at the end is dropped, which cancels it.
        drop(tokio::time::timeout_at(stage.clock.instant(end), all).await);
        points.push(sum_up(
            &stage.records.borrow(),
            pace,
            settle..end,
            &args.slo(),
        ));
        bar.inc(1);
        tokio::time::sleep(PAUSE).await;
    }
    bar.finish_and_clear();
    let curve = Curve {
        label: args.label.clone(),
        points,
    };
    let verdict = args
        .slo_itl_ms
        .and_then(|target| Verdict::of(&curve, &against, target));
    let report = SweepReport {
        bench: "sweep",
        target: Target::of(&args.target, client),
        prompt_tokens: args.prompt_tokens.to_string(),
        output_tokens: args.output_tokens.to_string(),
        seed: args.target.seed,
        settle_ms: args.settle_ms,
        step_ms: args.step_ms,
        slo_ttft_ms: args.slo_ttft_ms,
        slo_itl_ms: args.slo_itl_ms,
        curve,
        against,
        verdict,
        cost: meter.stop(),
    };
    if let Some(path) = &args.plot {
        std::fs::write(path, plot::svg(&report))
            .with_context(|| format!("`--plot {}`: write", path.display()))?;
    }
    Ok(report)
}

/// The curve of an earlier result.
fn read_curve(path: &Path) -> anyhow::Result<Curve> {
    #[derive(Deserialize)]
    struct Earlier {
        curve: Curve,
    }
    let about = || format!("`--against {}`", path.display());
    let text = std::fs::read_to_string(path).with_context(about)?;
    let earlier: Earlier = serde_json::from_str(&text).with_context(about)?;
    Ok(earlier.curve)
}

/// What is kept of one request.
#[derive(Debug, Default)]
struct Record {
    sent: Duration,
    arrivals: Vec<Arrival>,
    ended: Option<Duration>,
    failed: bool,
}

/// One load while it runs.
struct Stage<'a> {
    client: &'a Client,
    clock: Clock,
    shape: Shape,
    seed: u64,
    records: RefCell<Vec<Record>>,
}

impl Stage<'_> {
    /// Offers `pace` until dropped; an open loop's requests are all sent before `end`.
    async fn offer(&self, pace: Pace, end: Duration) {
        match pace {
            Pace::Concurrency(clients) => {
                join_all((0..u64::from(clients)).map(|at| async move {
                    for round in 0.. {
                        self.one(at | round << 32).await;
                    }
                }))
                .await;
            }
            Pace::Rate(rate) => {
                // Twice the expected number reaches beyond the end but by a miracle.
                let count = 8 + (2.0 * rate * end.as_secs_f64()).ceil() as usize;
                let arrivals = poisson_arrivals(rate, count, self.seed);
                let sent = arrivals.iter().take_while(|at| **at < end);
                join_all((0..).zip(sent).map(|(number, at)| async move {
                    tokio::time::sleep_until(self.clock.instant(*at)).await;
                    self.one(number).await;
                }))
                .await;
            }
        }
    }

    async fn one(&self, number: u64) {
        let seed = self
            .seed
            .wrapping_add(number.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let job = jobs(&self.shape, 1, seed).remove(0);
        let at = self.records.borrow().len();
        self.records.borrow_mut().push(Record {
            sent: self.clock.now(),
            ..Record::default()
        });
        let mut on_arrival =
            |arrival: Arrival| self.records.borrow_mut()[at].arrivals.push(arrival);
        let sample = self.client.run(&job, self.clock, &mut on_arrival).await;
        if let Some(record) = self.records.borrow_mut().get_mut(at) {
            record.ended = Some(sample.ended);
            record.failed = sample.failure.is_some();
        }
        if sample.failure.is_some() {
            // A server that refuses at once is asked again, but not in a tight loop.
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// What happened within `window`.
fn sum_up(
    records: &[Record],
    offered: Pace,
    window: std::ops::Range<Duration>,
    slo: &Slo,
) -> Point {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let span = window.end - window.start;
    let (mut itl, mut ttft, mut tokens) = (Vec::new(), Vec::new(), 0_u64);
    let (mut ended, mut failed) = (Vec::new(), 0);
    for record in records {
        let inside = |arrival: &&Arrival| window.contains(&arrival.at);
        let received = record.arrivals.iter().filter(inside);
        tokens += received
            .map(|arrival| u64::from(arrival.tokens))
            .sum::<u64>();
        let gaps = gaps(&record.arrivals).filter(|gap| window.contains(&gap.to));
        itl.extend(gaps.map(Gap::ms));
        let first = record.arrivals.first().map(|arrival| arrival.at);
        if let Some(first) = first.filter(|at| window.contains(at)) {
            ttft.push(ms(first.saturating_sub(record.sent)));
        }
        if !record.ended.is_some_and(|at| window.contains(&at)) {
            continue;
        }
        match (record.failed, &record.arrivals[..]) {
            (false, [first, .., last]) | (false, [first @ last]) => ended.push(RequestLatency {
                ttft: first.at.saturating_sub(record.sent),
                decode: last.at.saturating_sub(first.at),
                tokens: record.arrivals.iter().map(|arrival| arrival.tokens).sum(),
            }),
            _ => failed += 1,
        }
    }
    let (itl, ttft) = (Summary::of(&mut itl), Summary::of(&mut ttft));
    let per_second = |count: f64| count / span.as_secs_f64().max(1e-9);
    Point {
        offered,
        gaps: itl.map_or(0, |of| of.count),
        itl_p50_ms: itl.map_or(0.0, |of| of.p50),
        itl_p99_ms: itl.map_or(0.0, |of| of.p99),
        ttft_p50_ms: ttft.map_or(0.0, |of| of.p50),
        ttft_p99_ms: ttft.map_or(0.0, |of| of.p99),
        output_tokens_per_s: per_second(tokens as f64),
        requests_per_s: per_second(ended.len() as f64),
        goodput_requests_per_s: goodput(&ended, slo, span),
        failed,
    }
}

/// A load in a word.
fn offered(pace: Pace) -> String {
    match pace {
        Pace::Rate(rate) => format!("{rate}/s"),
        Pace::Concurrency(clients) => format!("{clients} clients"),
    }
}

impl SweepReport {
    /// The result for people.
    pub fn table(&self) -> String {
        let mut table = Table::new(format!(
            "{}\nprompt {}, output {}, seed {}; {} ms a load after {} ms to settle",
            self.target.line(),
            self.prompt_tokens,
            self.output_tokens,
            self.seed,
            self.step_ms,
            self.settle_ms,
        ));
        table.line(format!(
            "\n{:<20}{:>12}{:>10}{:>10}{:>11}{:>11}{:>11}{:>10}{:>8}",
            "run",
            "offered",
            "ITL p50",
            "ITL p99",
            "TTFT p50",
            "tokens/s",
            "requests/s",
            "goodput",
            "failed"
        ));
        for curve in self.against.iter().chain([&self.curve]) {
            for point in &curve.points {
                table.line(format!(
                    "{:<20}{:>12}{:>10.2}{:>10.2}{:>11.1}{:>11.1}{:>11.2}{:>10.2}{:>8}",
                    curve.label,
                    offered(point.offered),
                    point.itl_p50_ms,
                    point.itl_p99_ms,
                    point.ttft_p50_ms,
                    point.output_tokens_per_s,
                    point.requests_per_s,
                    point.goodput_requests_per_s,
                    point.failed,
                ));
            }
        }
        table.line(String::new());
        if let Some(verdict) = &self.verdict {
            verdict
                .lines()
                .into_iter()
                .for_each(|line| table.line(line));
        }
        table.cost(&self.cost);
        table.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn record(sent: u64, arrivals: &[(u64, u32)], ended: Option<u64>, failed: bool) -> Record {
        Record {
            sent: at(sent),
            arrivals: arrivals
                .iter()
                .map(|(ms, tokens)| Arrival {
                    at: at(*ms),
                    tokens: *tokens,
                })
                .collect(),
            ended: ended.map(at),
            failed,
        }
    }

    #[test]
    fn only_what_falls_into_the_measured_time_counts() {
        let records = [
            // Starts while settling: its gaps up to 1000 do not count, nor its first token.
            record(
                0,
                &[(400, 1), (900, 1), (1010, 1), (1050, 2)],
                Some(1050),
                false,
            ),
            // Cut off: counts what came until then.
            record(1000, &[(1100, 1), (1180, 1), (2100, 1)], None, false),
            record(1500, &[], Some(1510), true),
            // Too slow for the objective.
            record(1000, &[(1600, 1), (1900, 1)], Some(1900), false),
        ];
        let slo = Slo {
            ttft: None,
            tpot: Some(at(250)),
        };
        let point = sum_up(&records, Pace::Rate(2.0), at(1000)..at(2000), &slo);
        // 110, 40, 0; 80; 300.
        assert_eq!(
            (point.gaps, point.itl_p50_ms, point.itl_p99_ms),
            (5, 80.0, 300.0)
        );
        assert_eq!((point.ttft_p50_ms, point.ttft_p99_ms), (100.0, 600.0));
        assert_eq!(point.output_tokens_per_s, 7.0);
        assert_eq!(point.requests_per_s, 2.0);
        assert_eq!(point.goodput_requests_per_s, 1.0);
        assert_eq!(point.failed, 1);
    }

    #[test]
    fn a_result_can_be_read_back_to_compare_with() {
        let points = vec![sum_up(
            &[],
            Pace::Concurrency(4),
            at(0)..at(1),
            &Slo::default(),
        )];
        let curve = Curve {
            label: "N=4".to_owned(),
            points,
        };
        let path = std::env::temp_dir().join(format!("baton-sweep-{}.json", std::process::id()));
        let text = serde_json::json!({ "bench": "sweep", "curve": curve }).to_string();
        std::fs::write(&path, text).unwrap();
        assert_eq!(read_curve(&path).unwrap(), curve);
        std::fs::write(&path, "{}").unwrap();
        let error = read_curve(&path).unwrap_err();
        assert!(error.to_string().contains("--against"), "{error}");
        std::fs::remove_file(&path).unwrap();
    }
}
