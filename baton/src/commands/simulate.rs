//! `baton simulate`: clusters from seeds, checked while they run.

use std::time::Duration;

use anyhow::{bail, ensure};
use baton_simulator::{Report, Run, Seeds};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::print;
use crate::cli::SimulateArgs;

/// Seeds that are run when nobody says how many.
const SEEDS_DEFAULT: u64 = 100;
/// Broken seeds whose stories are told; all are listed.
const STORIES_MAX: usize = 3;

/// Runs the seeds that were asked for.
///
/// # Errors
/// A seed broke an invariant, or flags that mean nothing.
pub fn run(args: &SimulateArgs) -> anyhow::Result<()> {
    let seeds = seeds(args)?;
    let bar = bar(args, &seeds);
    let report = seeds.run(|run| {
        bar.inc(1);
        if args.trace {
            bar.suspend(|| drop(print(&lines(run))));
        }
    });
    bar.finish_and_clear();
    tell(args, &report)
}

fn seeds(args: &SimulateArgs) -> anyhow::Result<Seeds> {
    ensure!(
        args.seeds != Some(0),
        "--seeds 0 runs nothing, the least is 1"
    );
    ensure!(
        args.jobs != Some(0),
        "--jobs 0 runs nothing, the least is 1"
    );
    let count = match (args.seed, args.seeds, args.minutes) {
        (Some(_), ..) => Some(1),
        (None, None, None) => Some(SEEDS_DEFAULT),
        (None, seeds, _) => seeds,
    };
    let defaults = Seeds::new(args.seed.unwrap_or(args.from), 0);
    Ok(Seeds {
        count,
        time: args
            .minutes
            .map(|minutes| Duration::from_secs(60 * minutes)),
        threads: args.jobs.unwrap_or(defaults.threads),
        stop_at_first: args.stop_at_first,
        ..defaults
    })
}

fn lines(run: &Run) -> String {
    let mut text = format!("seed {} ({})\n", run.scenario.seed, run.scenario.summary());
    for line in &run.lines {
        text.push_str(&format!("{line}\n"));
    }
    text
}

/// The stories, the line of counts, and the verdict.
fn tell(args: &SimulateArgs, report: &Report) -> anyhow::Result<()> {
    if args.json {
        print(&format!("{}\n", serde_json::to_string_pretty(report)?))?;
    } else {
        for broken in report.broken.iter().take(STORIES_MAX) {
            print(&format!("{broken}\n\n"))?;
        }
        print(&format!("{report}\n"))?;
    }
    if report.broken.is_empty() {
        return Ok(());
    }
    let seeds: Vec<String> = report.broken.iter().map(|b| b.seed.to_string()).collect();
    bail!(
        "{} of {} seeds broke an invariant: {}",
        seeds.len(),
        report.seeds,
        seeds.join(", ")
    );
}

fn bar(args: &SimulateArgs, seeds: &Seeds) -> ProgressBar {
    let target = match args.json || seeds.count == Some(1) {
        true => ProgressDrawTarget::hidden(),
        false => ProgressDrawTarget::stderr(),
    };
    let (bar, template) = match seeds.count {
        Some(count) => (
            ProgressBar::with_draw_target(Some(count), target),
            "{bar:40} {pos}/{len} seeds, {per_sec}, {eta} left",
        ),
        None => (
            ProgressBar::with_draw_target(None, target),
            "{spinner} {pos} seeds, {per_sec}, {elapsed}",
        ),
    };
    bar.with_style(ProgressStyle::with_template(template).expect("the template is right"))
}
