//! `baton bench interference`: what long prompts do to streams that are running.
//!
//! Some streams decode all the time. Long prompts arrive one after another with
//! quiet time between. Each token gap is then put into the phase it falls into, and
//! the disturbed gaps are compared with the quiet ones of the same run.

use std::cell::RefCell;
use std::time::Duration;

use anyhow::{Context as _, bail};
use baton_observability::latency::Summary;
use futures::future::join_all;
use serde::Serialize;
use tokio::sync::watch;

use super::client::Client;
use super::cost::{Cost, Meter};
use super::flags::InterferenceArgs;
use super::lengths::Lengths;
use super::phases::{Injection, Phase, Span, Timeline};
use super::report::{self, Table, Target};
use super::sample::{Arrival, Clock, Gap, Sample, gaps};
use super::workload::{Job, Shape, jobs};

/// Tokens a stream must have received before it counts as running.
const RUNNING_AFTER_TOKENS: usize = 8;
/// A split cluster must keep its ITL p99 under injection within this multiple of the
/// quiet p99, and its largest gap within this multiple of the quiet median.
const P99_RATIO_MAX: f64 = 1.5;
const LARGEST_GAP_RATIO_MAX: f64 = 3.0;

/// What one long prompt did.
#[derive(Clone, Debug, Serialize)]
pub struct InjectionReport {
    pub ttft_ms: f64,
    /// From its send to its last token.
    pub total_ms: f64,
    pub path: Option<String>,
    /// Gaps of the running streams while it was prefilled.
    pub gaps: usize,
    /// The largest gap from its send to its end.
    pub largest_gap_ms: f64,
}

/// The result. Times are milliseconds.
#[derive(Clone, Debug, Serialize)]
pub struct InterferenceReport {
    pub bench: &'static str,
    pub target: Target,
    pub streams: u32,
    pub stream_prompt_tokens: u32,
    pub stream_tokens: u32,
    pub injection_prompt_tokens: u32,
    pub injection_tokens: u32,
    pub quiet_ms: u64,
    pub seed: u64,
    pub quiet_itl_ms: Summary,
    /// From an injection's send to its first token.
    pub during_itl_ms: Summary,
    /// From its first token to its end.
    pub settling_itl_ms: Option<Summary>,
    pub injections: Vec<InjectionReport>,
    pub injection_ttft_ms: Summary,
    /// ITL p99 during injection over the quiet p99.
    pub p99_ratio: f64,
    /// The largest gap of any injection over the quiet median.
    pub largest_gap_ratio: f64,
    /// Whether a split cluster's two limits are met.
    pub within_limits: bool,
    /// Tokens the running streams received in quiet, and during injection, per second.
    pub quiet_tokens_per_s: f64,
    pub during_tokens_per_s: f64,
    /// Streams that reached their end while measuring went on, and were replaced.
    pub stream_restarts: usize,
    /// Messages that carried more than one token.
    pub merged_messages: usize,
    pub cost: Cost,
}

/// Runs the streams and the injections.
///
/// # Errors
/// A stream or an injection that failed, since the figures would mean nothing then.
pub async fn run(args: &InterferenceArgs, client: &Client) -> anyhow::Result<InterferenceReport> {
    let shape = |prompt, output| Shape {
        prompt: Lengths::Fixed(prompt),
        output: Lengths::Fixed(output),
        shared_prefix: 0,
        vocab_size: client.vocab_size,
        temperature: None,
    };
    // Apart from the prompts of a load run of the same seed, which would otherwise
    // begin like these and be found in the server's prefix cache.
    let seed = args.target.seed ^ 0x696E_6A65_6374_6564;
    let injections = jobs(
        &shape(args.injection_prompt_tokens, args.injection_tokens),
        args.injections as usize,
        seed,
    );
    let stage = Stage {
        client,
        clock: Clock::start(),
        streams: (0..args.streams).map(|_| RefCell::default()).collect(),
        running: watch::Sender::new(0),
    };
    let bar = report::counting_bar(u64::from(args.injections), args.report.quiet);
    let stream_shape = shape(args.stream_prompt_tokens, args.stream_tokens);
    let streams = join_all((0..args.streams as usize).map(|at| {
        let seed = seed.wrapping_add(1 + at as u64).wrapping_mul(0x9E37_79B9);
        stage.keep_running(at, move |round| {
            jobs(&stream_shape, 1, seed.wrapping_add(round)).remove(0)
        })
    }));
    let act = async {
        let mut running = stage.running.subscribe();
        running
            .wait_for(|count| *count == args.streams)
            .await
            .context("wait for the streams")?;
        let meter = Meter::start(args.target.server_pid);
        let from = stage.clock.now();
        let lives = stage
            .inject(&injections, Duration::from_millis(args.quiet_ms), &bar)
            .await?;
        let to = stage.clock.now();
        anyhow::Ok((Span { from, to }, lives, meter.stop()))
    };
    // Streams run until the last injection is over; leaving this cancels them.
    let (observed, lives, cost) = tokio::select! {
        acted = act => acted?,
        ended = streams => match ended.into_iter().next() {
            Some(error) => return Err(error),
            None => bail!("no stream to watch"),
        },
    };
    bar.finish_and_clear();
    let streams: Vec<Record> = stage.streams.into_iter().map(RefCell::into_inner).collect();
    sum_up(args, client, &streams, observed, &lives, cost)
}

/// What is kept of one running stream, over all its requests.
#[derive(Debug, Default)]
struct Record {
    /// Each request's send and its tokens so far.
    requests: Vec<(Duration, Vec<Arrival>)>,
}

struct Stage<'a> {
    client: &'a Client,
    clock: Clock,
    streams: Vec<RefCell<Record>>,
    /// Streams that have started to run.
    running: watch::Sender<u32>,
}

impl Stage<'_> {
    /// Runs one request after another; comes back only with a failure.
    async fn keep_running(&self, at: usize, job: impl Fn(u64) -> Job) -> anyhow::Error {
        let record = &self.streams[at];
        let mut round = 0;
        loop {
            record
                .borrow_mut()
                .requests
                .push((self.clock.now(), Vec::new()));
            let mut received = 0;
            let mut on_arrival = |arrival: Arrival| {
                if let Some((_, arrivals)) = record.borrow_mut().requests.last_mut() {
                    arrivals.push(arrival);
                }
                received += 1;
                if round == 0 && received == RUNNING_AFTER_TOKENS {
                    self.running.send_modify(|count| *count += 1);
                }
            };
            let sample = self
                .client
                .run(&job(round), self.clock, &mut on_arrival)
                .await;
            if let Some(failure) = sample.failure {
                return anyhow::anyhow!(
                    "running stream {at} failed with {}: {}",
                    failure.reason,
                    failure.message
                );
            }
            if round == 0 && received < RUNNING_AFTER_TOKENS {
                return anyhow::anyhow!(
                    "running stream {at} ended after {received} messages; ask for more tokens"
                );
            }
            round += 1;
        }
    }

    /// Sends the long prompts, with quiet time before, between and after them.
    async fn inject(
        &self,
        jobs: &[Job],
        quiet: Duration,
        bar: &indicatif::ProgressBar,
    ) -> anyhow::Result<Vec<Sample>> {
        let mut lives = Vec::new();
        tokio::time::sleep(quiet).await;
        for (at, job) in jobs.iter().enumerate() {
            let sample = self.client.run(job, self.clock, &mut |_| {}).await;
            if let Some(failure) = &sample.failure {
                bail!(
                    "injection {at} failed with {}: {}",
                    failure.reason,
                    failure.message
                );
            }
            lives.push(sample);
            bar.inc(1);
            tokio::time::sleep(quiet).await;
        }
        Ok(lives)
    }
}

fn sum_up(
    args: &InterferenceArgs,
    client: &Client,
    streams: &[Record],
    observed: Span,
    lives: &[Sample],
    cost: Cost,
) -> anyhow::Result<InterferenceReport> {
    let timeline = timeline(streams, observed, lives);
    let found = Sorted::of(streams, &timeline);
    let quiet = summary("quiet time", found.quiet)?;
    let all_during: Vec<f64> = found.during.iter().flatten().copied().collect();
    let quiet_s = quiet.mean * quiet.count as f64 / 1e3;
    let during_s = all_during.iter().sum::<f64>() / 1e3;
    let during = summary("the injections", all_during)?;
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let injections: Vec<InjectionReport> = lives
        .iter()
        .zip(&timeline.injections)
        .enumerate()
        .map(|(at, (sample, life))| InjectionReport {
            ttft_ms: ms(life.first_token - life.sent),
            total_ms: ms(life.ended - life.sent),
            path: sample.path.clone(),
            gaps: found.during[at].len(),
            largest_gap_ms: found.during[at]
                .iter()
                .chain(&found.settling[at])
                .copied()
                .fold(0.0, f64::max),
        })
        .collect();
    let largest = injections
        .iter()
        .map(|injection| injection.largest_gap_ms)
        .fold(0.0, f64::max);
    let ttft = injections
        .iter()
        .map(|injection| injection.ttft_ms)
        .collect();
    let p99_ratio = during.p99 / quiet.p99;
    let largest_gap_ratio = largest / quiet.p50;
    // A stream's gaps add up to its time, so this is tokens over stream time, times streams.
    let rate =
        |count: usize, stream_s: f64| count as f64 / stream_s.max(1e-9) * f64::from(args.streams);
    Ok(InterferenceReport {
        bench: "interference",
        target: Target::of(&args.target, client),
        streams: args.streams,
        stream_prompt_tokens: args.stream_prompt_tokens,
        stream_tokens: args.stream_tokens,
        injection_prompt_tokens: args.injection_prompt_tokens,
        injection_tokens: args.injection_tokens,
        quiet_ms: args.quiet_ms,
        seed: args.target.seed,
        quiet_itl_ms: quiet,
        during_itl_ms: during,
        settling_itl_ms: Summary::of(&mut found.settling.concat()),
        injections,
        injection_ttft_ms: summary("the injections", ttft)?,
        p99_ratio,
        largest_gap_ratio,
        within_limits: p99_ratio <= P99_RATIO_MAX && largest_gap_ratio <= LARGEST_GAP_RATIO_MAX,
        quiet_tokens_per_s: rate(quiet.count, quiet_s),
        during_tokens_per_s: rate(during.count, during_s),
        stream_restarts: streams
            .iter()
            .map(|stream| stream.requests.len().saturating_sub(1))
            .sum(),
        merged_messages: streams
            .iter()
            .flat_map(|stream| &stream.requests)
            .flat_map(|(_, arrivals)| arrivals)
            .filter(|arrival| arrival.tokens > 1)
            .count(),
        cost,
    })
}

fn summary(when: &str, mut samples: Vec<f64>) -> anyhow::Result<Summary> {
    Summary::of(&mut samples)
        .with_context(|| format!("no token gap fell into {when}; give `--quiet-ms` more"))
}

fn timeline(streams: &[Record], observed: Span, lives: &[Sample]) -> Timeline {
    Timeline {
        observed: Some(observed),
        injections: lives
            .iter()
            .map(|sample| Injection {
                sent: sample.sent,
                first_token: sample.first_token().unwrap_or(sample.ended),
                ended: sample.ended,
            })
            .collect(),
        starts: streams
            .iter()
            .flat_map(|stream| &stream.requests)
            .map(|(sent, arrivals)| Span {
                from: *sent,
                to: arrivals.first().map_or(observed.to, |first| first.at),
            })
            .collect(),
    }
}

/// All gaps by phase, in milliseconds; per injection where there is one.
#[derive(Debug, PartialEq)]
struct Sorted {
    quiet: Vec<f64>,
    during: Vec<Vec<f64>>,
    settling: Vec<Vec<f64>>,
}

impl Sorted {
    fn of(streams: &[Record], timeline: &Timeline) -> Self {
        let none = || vec![Vec::new(); timeline.injections.len()];
        let mut sorted = Self {
            quiet: Vec::new(),
            during: none(),
            settling: none(),
        };
        let requests = streams.iter().flat_map(|stream| &stream.requests);
        for gap in requests.flat_map(|(_, arrivals)| gaps(arrivals)) {
            match timeline.phase(gap) {
                Phase::Quiet => sorted.quiet.push(Gap::ms(gap)),
                Phase::During(at) => sorted.during[at].push(Gap::ms(gap)),
                Phase::Settling(at) => sorted.settling[at].push(Gap::ms(gap)),
                Phase::Outside => {}
            }
        }
        sorted
    }
}

impl InterferenceReport {
    /// The result for people.
    pub fn table(&self) -> String {
        let mut table = Table::new(format!(
            "{}\n{} streams of {}+{} tokens; {} injections of {}+{} tokens, {} ms apart; seed {}",
            self.target.line(),
            self.streams,
            self.stream_prompt_tokens,
            self.stream_tokens,
            self.injections.len(),
            self.injection_prompt_tokens,
            self.injection_tokens,
            self.quiet_ms,
            self.seed,
        ));
        table.summaries(&[
            ("ITL quiet", Some(self.quiet_itl_ms)),
            ("ITL during injection", Some(self.during_itl_ms)),
            ("ITL just after", self.settling_itl_ms),
            ("TTFT of long prompt", Some(self.injection_ttft_ms)),
        ]);
        for (at, injection) in self.injections.iter().enumerate() {
            table.line(format!(
                "injection {}: first token after {:.0} ms, largest gap {:.1} ms, {} gaps{}",
                at + 1,
                injection.ttft_ms,
                injection.largest_gap_ms,
                injection.gaps,
                injection
                    .path
                    .as_ref()
                    .map_or_else(String::new, |path| format!(", {path} path")),
            ));
        }
        let verdict = |ratio: f64, max: f64| if ratio <= max { "within" } else { "above" };
        table.line(format!(
            "ITL p99 during / quiet p99: {:.2} ({} {P99_RATIO_MAX})",
            self.p99_ratio,
            verdict(self.p99_ratio, P99_RATIO_MAX),
        ));
        table.line(format!(
            "largest gap / quiet median: {:.2} ({} {LARGEST_GAP_RATIO_MAX})",
            self.largest_gap_ratio,
            verdict(self.largest_gap_ratio, LARGEST_GAP_RATIO_MAX),
        ));
        table.line(format!(
            "streams together: {:.1} tokens/s quiet, {:.1} during injection",
            self.quiet_tokens_per_s, self.during_tokens_per_s
        ));
        table.line(format!(
            "{} stream restarts, {} messages with several tokens",
            self.stream_restarts, self.merged_messages
        ));
        table.cost(&self.cost);
        table.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(value: u64) -> Duration {
        Duration::from_millis(value)
    }

    fn record(requests: &[(u64, &[(u64, u32)])]) -> Record {
        let arrivals = |list: &[(u64, u32)]| {
            list.iter()
                .map(|(at, tokens)| Arrival {
                    at: ms(*at),
                    tokens: *tokens,
                })
                .collect()
        };
        Record {
            requests: requests
                .iter()
                .map(|(sent, list)| (ms(*sent), arrivals(list)))
                .collect(),
        }
    }

    #[test]
    fn gaps_are_sorted_by_what_happened_meanwhile() {
        let streams = [
            record(&[(
                0,
                &[(50, 1), (110, 1), (130, 1), (260, 1), (315, 1), (400, 1)],
            )]),
            // Ends at 150 and is replaced; its replacement starts up to 180.
            record(&[
                (0, &[(60, 1), (120, 2), (150, 1)]),
                (150, &[(180, 1), (190, 1)]),
            ]),
        ];
        let life = Sample {
            sent: ms(200),
            arrivals: vec![Arrival {
                at: ms(300),
                tokens: 1,
            }],
            ended: ms(320),
            ..Sample::default()
        };
        let observed = Span {
            from: ms(100),
            to: ms(500),
        };
        let timeline = timeline(&streams, observed, &[life]);
        let sorted = Sorted::of(&streams, &timeline);
        assert_eq!(
            sorted,
            Sorted {
                // 110..130 of the first; the second token of the message at 120; not
                // 120..150 and 180..190, which touch the replacement's start.
                quiet: vec![20.0, 0.0],
                during: vec![vec![130.0, 55.0]],
                settling: vec![vec![85.0]],
            }
        );
    }
}
