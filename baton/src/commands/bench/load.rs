//! `baton bench load`: many requests, their latency and the throughput they got.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::Duration;

use baton_observability::latency::{RequestLatency, Slo, Summary, goodput};
use futures::future::join_all;
use futures::stream::{FuturesUnordered, StreamExt as _};
use serde::{Deserialize, Serialize};

use super::answers::Answers;
use super::client::Client;
use super::cost::{Cost, Meter};
use super::flags::LoadArgs;
use super::report::{self, Table, Target};
use super::sample::{Clock, Failures, Gap, Sample, gaps};
use super::workload::{Job, Shape, jobs, poisson_arrivals};

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pace {
    /// Open loop, requests per second.
    Rate(f64),
    /// Closed loop, clients.
    Concurrency(u32),
}

impl Pace {
    /// What the flags ask for.
    pub fn of(args: &LoadArgs) -> Self {
        match args.rate {
            Some(rate) => Self::Rate(rate),
            None => Self::Concurrency(args.concurrency.unwrap_or(8)),
        }
    }
}

/// The result. Times are milliseconds, rates per second.
#[derive(Clone, Debug, Serialize)]
pub struct LoadReport {
    pub bench: &'static str,
    pub target: Target,
    pub pace: Pace,
    pub prompt_tokens: String,
    pub output_tokens: String,
    pub shared_prefix: u32,
    pub seed: u64,
    /// From the first send to the last end.
    pub wall_s: f64,
    pub requests: usize,
    pub succeeded: usize,
    pub errors: Failures,
    /// Answers that differ from those of the run that it was compared with.
    pub wrong: Option<u64>,
    pub ttft_ms: Option<Summary>,
    pub itl_ms: Option<Summary>,
    pub tpot_ms: Option<Summary>,
    pub total_ms: Option<Summary>,
    /// KV that a handoff moved, on average.
    pub handoff_mb: Option<f64>,
    /// What of the handoffs computing did not hide.
    pub handoff_exposed_ms: Option<Summary>,
    /// That over what the same bytes need on the link with nothing between, at the median.
    pub handoff_exposed_share: Option<f64>,
    /// Of requests that succeeded, as all counts below.
    pub output_token_count: u64,
    pub prompt_token_count: u64,
    pub cached_token_count: u64,
    pub output_tokens_per_s: f64,
    /// Prompt and output.
    pub total_tokens_per_s: f64,
    pub requests_per_s: f64,
    pub slo_ttft_ms: Option<f64>,
    pub slo_itl_ms: Option<f64>,
    /// Only where an objective was given.
    pub goodput_requests_per_s: Option<f64>,
    /// Requests by the path that the server says they took.
    pub paths: BTreeMap<String, u64>,
    /// How late the client itself sent, open loop only.
    pub send_lag_ms: Option<Summary>,
    pub cost: Cost,
}

/// Runs the load and sums it up.
///
/// # Errors
/// Only a server that fails every warm-up request; single failures are counted.
pub async fn run(args: &LoadArgs, client: &Client) -> anyhow::Result<LoadReport> {
    let shape = Shape {
        prompt: args.prompt_tokens,
        output: args.output_tokens,
        shared_prefix: args.shared_prefix,
        vocab_size: client.vocab_size,
        temperature: args.temperature.map(|temperature| temperature as f32),
    };
    // A file that cannot be used is found before anything is measured.
    let right = args.compare_answers.as_deref().map(Answers::load);
    let right = right.transpose()?;
    let seed = args.target.seed;
    let warmup = jobs(&shape, args.warmup_requests as usize, !seed);
    let jobs = jobs(&shape, args.requests as usize, seed);
    warm_up(client, &warmup).await?;

    let bar = report::counting_bar(jobs.len() as u64, args.report.quiet);
    let clock = Clock::start();
    let meter = Meter::start(args.target.server_pid);
    let pace = Pace::of(args);
    let driver = Driver {
        client,
        clock,
        bar: &bar,
    };
    let (samples, lag) = match pace {
        Pace::Rate(rate) => {
            let arrivals = poisson_arrivals(rate, jobs.len(), seed);
            driver.open_loop(&jobs, &arrivals).await
        }
        Pace::Concurrency(clients) => (driver.closed_loop(&jobs, clients).await, Vec::new()),
    };
    let cost = meter.stop();
    bar.finish_and_clear();
    let mut report = sum_up(args, client, pace, &samples, lag, cost);
    if let Some(path) = &args.save_answers {
        Answers::of(&samples)?.save(path)?;
    }
    if let Some(right) = right {
        report.wrong = Some(right.wrong(&samples)?);
    }
    Ok(report)
}

async fn warm_up(client: &Client, jobs: &[Job]) -> anyhow::Result<()> {
    let mut failure = None;
    let mut any = jobs.is_empty();
    for job in jobs {
        let sample = client.run(job, Clock::start(), &mut |_| {}).await;
        any |= sample.failure.is_none();
        failure = failure.or(sample.failure);
    }
    match failure {
        Some(failure) if !any => Err(anyhow::anyhow!(
            "every warm-up request failed, the first with {}: {}",
            failure.reason,
            failure.message
        )),
        _ => Ok(()),
    }
}

struct Driver<'a> {
    client: &'a Client,
    clock: Clock,
    bar: &'a indicatif::ProgressBar,
}

impl Driver<'_> {
    async fn one(&self, index: usize, job: &Job) -> Sample {
        let mut sample = self.client.run(job, self.clock, &mut |_| {}).await;
        sample.index = index;
        self.bar.inc(1);
        sample
    }

    /// Sends each job at its time, and says how late each was, in milliseconds.
    async fn open_loop(&self, jobs: &[Job], arrivals: &[Duration]) -> (Vec<Sample>, Vec<f64>) {
        let mut running: FuturesUnordered<_> = jobs
            .iter()
            .enumerate()
            .zip(arrivals)
            .map(|((index, job), at)| async move {
                tokio::time::sleep_until(self.clock.instant(*at)).await;
                let sample = self.one(index, job).await;
                let late = sample.sent.saturating_sub(*at).as_secs_f64() * 1e3;
                (sample, late)
            })
            .collect();
        let (mut samples, mut lag) = (Vec::new(), Vec::new());
        while let Some((sample, late)) = running.next().await {
            samples.push(sample);
            lag.push(late);
        }
        (samples, lag)
    }

    /// Keeps `clients` requests in flight until all jobs are done.
    async fn closed_loop(&self, jobs: &[Job], clients: u32) -> Vec<Sample> {
        let next = Cell::new(0);
        let samples = RefCell::new(Vec::with_capacity(jobs.len()));
        join_all((0..clients).map(|_| async {
            loop {
                let index = next.replace(next.get() + 1);
                let Some(job) = jobs.get(index) else { break };
                let sample = self.one(index, job).await;
                samples.borrow_mut().push(sample);
            }
        }))
        .await;
        samples.into_inner()
    }
}

fn sum_up(
    args: &LoadArgs,
    client: &Client,
    pace: Pace,
    samples: &[Sample],
    mut lag: Vec<f64>,
    cost: Cost,
) -> LoadReport {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let first = samples.iter().map(|sample| sample.sent).min();
    let last = samples.iter().map(|sample| sample.ended).max();
    let window = last
        .unwrap_or_default()
        .saturating_sub(first.unwrap_or_default());
    let mut errors = Failures::default();
    let mut paths = BTreeMap::new();
    let mut latencies: Vec<RequestLatency> = Vec::new();
    let (mut itl, mut total, mut handoffs) = (Vec::new(), Vec::new(), Vec::new());
    let (mut output, mut prompt, mut cached) = (0_u64, 0_u64, 0_u64);
    for sample in samples {
        if let Some(failure) = &sample.failure {
            errors.add(failure);
        }
        if let Some(path) = &sample.path {
            *paths.entry(path.clone()).or_insert(0) += 1;
        }
        let Some(latency) = sample.latency() else {
            continue;
        };
        latencies.push(latency);
        handoffs.extend(sample.handoff);
        itl.extend(gaps(&sample.arrivals).map(Gap::ms));
        total.push(ms(sample.ended.saturating_sub(sample.sent)));
        output += u64::from(sample.reported_tokens.unwrap_or_else(|| sample.tokens()));
        prompt += u64::from(sample.prompt_tokens);
        cached += u64::from(sample.cached_tokens);
    }
    let mut ttft: Vec<f64> = latencies.iter().map(|one| ms(one.ttft)).collect();
    let mut tpot: Vec<f64> = latencies
        .iter()
        .filter_map(RequestLatency::tpot)
        .map(ms)
        .collect();
    let mut exposed: Vec<f64> = handoffs.iter().map(|one| one.exposed_ms).collect();
    let mut shares: Vec<f64> = handoffs
        .iter()
        .filter_map(|one| one.exposed_share)
        .collect();
    let moved: f64 = handoffs.iter().map(|one| one.mb).sum();
    let limit = |limit: Option<f64>| limit.map(|limit| Duration::from_secs_f64(limit / 1e3));
    let slo = Slo {
        ttft: limit(args.slo_ttft_ms),
        tpot: limit(args.slo_itl_ms),
    };
    let wall_s = window.as_secs_f64();
    let per_second = |count: f64| if wall_s > 0.0 { count / wall_s } else { 0.0 };
    LoadReport {
        bench: "load",
        target: Target::of(&args.target, client),
        pace,
        prompt_tokens: args.prompt_tokens.to_string(),
        output_tokens: args.output_tokens.to_string(),
        shared_prefix: args.shared_prefix,
        seed: args.target.seed,
        wall_s,
        requests: samples.len(),
        succeeded: latencies.len(),
        errors,
        wrong: None,
        ttft_ms: Summary::of(&mut ttft),
        itl_ms: Summary::of(&mut itl),
        tpot_ms: Summary::of(&mut tpot),
        total_ms: Summary::of(&mut total),
        handoff_mb: (!handoffs.is_empty()).then(|| moved / handoffs.len() as f64),
        handoff_exposed_ms: Summary::of(&mut exposed),
        handoff_exposed_share: Summary::of(&mut shares).map(|shares| shares.p50),
        output_token_count: output,
        prompt_token_count: prompt,
        cached_token_count: cached,
        output_tokens_per_s: per_second(output as f64),
        total_tokens_per_s: per_second((output + prompt) as f64),
        requests_per_s: per_second(latencies.len() as f64),
        slo_ttft_ms: args.slo_ttft_ms,
        slo_itl_ms: args.slo_itl_ms,
        goodput_requests_per_s: (slo != Slo::default()).then(|| goodput(&latencies, &slo, window)),
        paths,
        send_lag_ms: Summary::of(&mut lag),
        cost,
    }
}

impl LoadReport {
    /// The result for people.
    pub fn table(&self) -> String {
        let pace = match self.pace {
            Pace::Rate(rate) => format!("open loop, Poisson, {rate} requests/s"),
            Pace::Concurrency(clients) => format!("closed loop, {clients} clients"),
        };
        let mut table = Table::new(format!(
            "{}\n{pace}; prompt {}, output {}, shared prefix {}, seed {}",
            self.target.line(),
            self.prompt_tokens,
            self.output_tokens,
            self.shared_prefix,
            self.seed,
        ));
        table.summaries(&[
            ("TTFT", self.ttft_ms),
            ("ITL", self.itl_ms),
            ("TPOT", self.tpot_ms),
            ("whole request", self.total_ms),
        ]);
        if let (Some(mb), Some(exposed)) = (self.handoff_mb, self.handoff_exposed_ms) {
            table.summaries(&[("handoff, exposed", Some(exposed))]);
            let share = self
                .handoff_exposed_share
                .map_or_else(String::new, |share| {
                    format!(
                        "; the exposed part is {:.1} % of their time on the link",
                        share * 100.0
                    )
                });
            table.line(format!("{mb:.1} MB of KV a handoff{share}"));
        }
        table.line(format!(
            "{} of {} requests in {:.2} s: {:.2} requests/s, {:.1} output tokens/s, {:.1} tokens/s with prompts",
            self.succeeded,
            self.requests,
            self.wall_s,
            self.requests_per_s,
            self.output_tokens_per_s,
            self.total_tokens_per_s,
        ));
        if let Some(goodput) = self.goodput_requests_per_s {
            let limit = |name: &str, limit: Option<f64>| {
                limit.map_or_else(String::new, |limit| format!(" {name} <= {limit} ms"))
            };
            table.line(format!(
                "goodput {goodput:.2} requests/s within{}{}",
                limit("TTFT", self.slo_ttft_ms),
                limit("TPOT", self.slo_itl_ms),
            ));
        }
        if !self.paths.is_empty() {
            let total = self.paths.values().sum::<u64>().max(1) as f64;
            let shares: Vec<String> = self
                .paths
                .iter()
                .map(|(path, count)| format!("{path} {:.0} %", *count as f64 / total * 100.0))
                .collect();
            table.line(format!("path: {}", shares.join(", ")));
        }
        if self.cached_token_count > 0 {
            table.line(format!(
                "{} of {} prompt tokens came from a cache",
                self.cached_token_count, self.prompt_token_count
            ));
        }
        if let Some(lag) = self.send_lag_ms {
            table.line(format!(
                "sent late by {:.2} ms at the median, {:.2} ms at most",
                lag.p50, lag.max
            ));
        }
        if let Some(wrong) = self.wrong {
            table.line(format!(
                "{wrong} answers differ from those compared with; the longest gap was {:.0} ms",
                self.itl_ms.map_or(0.0, |itl| itl.max)
            ));
        }
        table.failures(&self.errors);
        table.cost(&self.cost);
        table.finish()
    }
}
