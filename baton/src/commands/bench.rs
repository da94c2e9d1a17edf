//! `baton bench`: a load generator for a running server; without one, measurements of the
//! engine alone and of what formats cost a model.
//!
//! ```text
//! flags         the command line
//! lengths       distributions of token counts
//! workload      what is sent and when, drawn from a seed before the run
//! client        the server under test: baton.v1 over gRPC, or /v1/completions
//! sample        what the client saw of one request; the gaps between tokens
//! answers       what was answered, to compare runs by
//! load          many requests -> latency, throughput, goodput
//! sweep         one load after another -> curves, compared with those of other runs
//! phases        which gaps a long prompt disturbed
//! interference  running streams, long prompts arriving -> disturbed against quiet
//! quality       weight and KV formats beside the same model in f32; needs no server
//! transfer      KV between two workers, by transport, beside memcpy and plain TCP
//! engine        one engine in this process against the machine's limits
//! cost          CPU time of client, server and others during a run
//! report        tables, progress bar, JSON
//! ```
//!
//! The client usually shares the machine with the server, so it is one thread, draws
//! its workload beforehand and states the CPU time it took. It measures servers from
//! outside only: nothing here reads a server's own metrics.

mod answers;
mod client;
mod cost;
mod engine;
pub mod flags;
mod interference;
mod lengths;
mod load;
mod phases;
mod quality;
mod report;
mod sample;
mod sweep;
mod transfer;
mod workload;

use anyhow::Context as _;

use client::Client;
use flags::{BenchCommand, InterferenceArgs, LoadArgs, QualityArgs, SweepArgs};

/// Runs one benchmark and prints its result.
///
/// # Errors
/// A server that cannot be driven, or a result that cannot be written.
pub fn run(command: BenchCommand) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the runtime")?;
    match command {
        BenchCommand::Load(args) => runtime.block_on(run_load(&args)),
        BenchCommand::Interference(args) => runtime.block_on(run_interference(&args)),
        BenchCommand::Sweep(args) => runtime.block_on(run_sweep(&args)),
        BenchCommand::Quality(args) => run_quality(&args),
        BenchCommand::Engine(args) => engine::run(&args),
        BenchCommand::Transfer(args) => transfer::run(&args),
    }
}

fn run_quality(args: &QualityArgs) -> anyhow::Result<()> {
    let result = quality::run(args)?;
    report::publish(&result, &result.table(), &args.report)
}

async fn run_load(args: &LoadArgs) -> anyhow::Result<()> {
    let client = Client::connect(&args.target).await?;
    let result = load::run(args, &client).await?;
    report::publish(&result, &result.table(), &args.report)?;
    match result.wrong {
        Some(wrong @ 1..) => anyhow::bail!("{wrong} answers are not those of `--compare-answers`"),
        _ => Ok(()),
    }
}

async fn run_interference(args: &InterferenceArgs) -> anyhow::Result<()> {
    let client = Client::connect(&args.target).await?;
    let result = interference::run(args, &client).await?;
    report::publish(&result, &result.table(), &args.report)
}

async fn run_sweep(args: &SweepArgs) -> anyhow::Result<()> {
    let client = Client::connect(&args.target).await?;
    let result = sweep::run(args, &client).await?;
    report::publish(&result, &result.table(), &args.report)
}

#[cfg(test)]
mod tests;
