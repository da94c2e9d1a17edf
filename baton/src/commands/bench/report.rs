//! How results are shown: a plain table, a progress bar, a JSON file.

use std::fmt::Write as _;

use anyhow::Context as _;
use baton_observability::latency::Summary;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use super::client::Client;
use super::cost::Cost;
use super::flags::{Api, ReportArgs, TargetArgs};
use super::sample::Failures;

/// Drawing costs CPU time that the server may need.
const DRAWS_PER_SECOND: u8 = 2;

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Target {
    pub api: Api,
    pub address: String,
    pub model: String,
    pub vocab_size: u32,
    /// What ITL counts: tokens or events.
    pub counts: &'static str,
}

impl Target {
    /// As the flags and the server say.
    pub fn of(args: &TargetArgs, client: &Client) -> Self {
        let address = match args.api {
            Api::Grpc => &args.connect,
            Api::Openai => &args.url,
        };
        Self {
            api: args.api,
            address: address.clone(),
            model: client.model.clone(),
            vocab_size: client.vocab_size,
            counts: client.counts(),
        }
    }

    /// One line for people.
    pub fn line(&self) -> String {
        let api = match self.api {
            Api::Grpc => "grpc",
            Api::Openai => "openai",
        };
        format!(
            "{} at {} over {api}; counted: {}",
            self.model, self.address, self.counts
        )
    }
}

/// A bar that counts requests or tokens on standard error.
pub fn counting_bar(total: u64, quiet: bool) -> ProgressBar {
    let target = if quiet {
        ProgressDrawTarget::hidden()
    } else {
        ProgressDrawTarget::stderr_with_hz(DRAWS_PER_SECOND)
    };
    let bar = ProgressBar::with_draw_target(Some(total), target);
    bar.set_style(
        ProgressStyle::with_template("[{bar:30}] {pos}/{len} {elapsed} {eta}")
            .unwrap_or_else(|_| ProgressStyle::default_bar())
            .progress_chars("=> "),
    );
    bar
}

/// A bar that counts the points of a sweep and names the one at hand.
pub fn points_bar(total: u64, quiet: bool) -> ProgressBar {
    let bar = counting_bar(total, quiet);
    bar.set_style(
        ProgressStyle::with_template("[{bar:30}] {pos}/{len} {elapsed} {msg}")
            .unwrap_or_else(|_| ProgressStyle::default_bar())
            .progress_chars("=> "),
    );
    bar
}

/// Prints and stores a result as the flags ask.
///
/// # Errors
/// A file that cannot be written.
pub fn publish(report: &impl Serialize, table: &str, args: &ReportArgs) -> anyhow::Result<()> {
    let json = serde_json::to_string_pretty(report).context("write JSON")?;
    println!("{}", if args.json { &json } else { table });
    if let Some(path) = &args.output {
        std::fs::write(path, json + "\n")
            .with_context(|| format!("`--output {}`: write", path.display()))?;
    }
    Ok(())
}

/// Lines for people, growing.
pub struct Table(String);

impl Table {
    /// Starts with a heading.
    pub fn new(heading: String) -> Self {
        Self(heading + "\n")
    }

    /// Adds one line.
    pub fn line(&mut self, text: String) {
        self.0.push_str(&text);
        self.0.push('\n');
    }

    /// Adds rows of percentiles in milliseconds; a row without samples says so.
    pub fn summaries(&mut self, rows: &[(&str, Option<Summary>)]) {
        self.line(format!(
            "\n{:<22}{:>9}{:>11}{:>11}{:>11}{:>11}{:>11}",
            "milliseconds", "count", "mean", "p50", "p95", "p99", "max"
        ));
        for (name, summary) in rows {
            match summary {
                Some(of) => {
                    let _ = write!(self.0, "{name:<22}{:>9}", of.count);
                    for value in [of.mean, of.p50, of.p95, of.p99, of.max] {
                        let _ = write!(self.0, "{value:>11.2}");
                    }
                    self.0.push('\n');
                }
                None => self.line(format!("{name:<22}{:>9}", "none")),
            }
        }
        self.0.push('\n');
    }

    /// Adds a line per reason.
    pub fn failures(&mut self, failures: &Failures) {
        for (reason, found) in &failures.0 {
            self.line(format!(
                "failed: {} x {reason}: {}",
                found.count, found.first_message
            ));
        }
    }

    /// Adds what the measurement cost.
    pub fn cost(&mut self, cost: &Cost) {
        let mut text = format!(
            "of {} cores over {:.1} s: client {:.3}",
            cost.cores, cost.wall_s, cost.client_cores
        );
        if let Some(server) = cost.server_cores {
            let _ = write!(text, ", server {server:.2}");
        }
        if let Some(other) = cost.other_cores {
            let who = if cost.server_cores.is_some() {
                "others"
            } else {
                "server and others"
            };
            let _ = write!(text, ", {who} {other:.2}");
        }
        if let Some([one, five, fifteen]) = cost.load_average {
            let _ = write!(text, "; load average before {one} {five} {fifteen}");
        }
        self.line(text);
    }

    /// The whole text, without a line end.
    pub fn finish(self) -> String {
        self.0.trim_end().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::bench::sample::Failure;

    #[test]
    fn a_table_has_a_row_per_summary_and_a_line_per_reason() {
        let mut table = Table::new("heading".to_owned());
        table.summaries(&[("TTFT", Summary::of(&mut [1.0, 2.0, 3.25])), ("ITL", None)]);
        let mut failures = Failures::default();
        failures.add(&Failure::new("OVERLOADED", "no room"));
        table.failures(&failures);
        table.cost(&Cost {
            wall_s: 2.0,
            client_cores: 0.125,
            server_cores: Some(1.5),
            other_cores: Some(0.25),
            cores: 2,
            load_average: Some([0.5, 1.0, 2.0]),
            ..Cost::default()
        });
        let text = table.finish();
        let lines: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(
            lines[3],
            ["TTFT", "3", "2.08", "2.00", "3.25", "3.25", "3.25"]
        );
        assert_eq!(lines[4], ["ITL", "none"]);
        assert!(text.contains("failed: 1 x OVERLOADED: no room"), "{text}");
        assert!(
            text.ends_with(
                "of 2 cores over 2.0 s: client 0.125, server 1.50, others 0.25; load average before 0.5 1 2"
            ),
            "{text}"
        );
    }
}
