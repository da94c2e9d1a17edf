//! The flags of `baton bench sweep`.

use std::path::PathBuf;
use std::time::Duration;

use baton_observability::latency::Slo;
use clap::Args;

use crate::commands::bench::flags::{ReportArgs, TargetArgs, positive};
use crate::commands::bench::lengths::Lengths;
use crate::commands::bench::load::Pace;

#[derive(Clone, Debug, Args)]
pub struct SweepArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    /// Open loops: requests per second of each load, as Poisson processes.
    #[arg(long, env = "BATON_RATES", value_name = "PER_SECOND,..", value_delimiter = ',', value_parser = positive, conflicts_with = "clients")]
    pub rates: Vec<f64>,
    /// Closed loops: clients of each load, that send one request after another.
    #[arg(
        long,
        env = "BATON_CLIENTS",
        value_name = "CLIENTS,..",
        value_delimiter = ',',
        default_value = "1,2,4,8,16,32,64",
        value_parser = clap::value_parser!(u32).range(1..=65_536)
    )]
    pub clients: Vec<u32>,
    /// Time at the beginning of a load that is not measured.
    #[arg(long, env = "BATON_SETTLE_MS", default_value_t = 3_000, value_parser = clap::value_parser!(u64).range(0..=3_600_000))]
    pub settle_ms: u64,
    /// Measured time of each load.
    #[arg(long, env = "BATON_STEP_MS", default_value_t = 8_000, value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    pub step_ms: u64,
    /// Prompt tokens: fixed:N, uniform:A-B or lognormal:MEAN,SIGMA.
    #[arg(
        long,
        env = "BATON_PROMPT_TOKENS",
        default_value = "fixed:128",
        value_name = "LENGTHS"
    )]
    pub prompt_tokens: Lengths,
    /// New tokens: fixed:N, uniform:A-B or lognormal:MEAN,SIGMA. With less than 100 at the
    /// mean a stream's first gap, which holds the rest of a step under way, is the p99.
    #[arg(
        long,
        env = "BATON_OUTPUT_TOKENS",
        default_value = "uniform:64-256",
        value_name = "LENGTHS"
    )]
    pub output_tokens: Lengths,
    /// Time to first token within which a request counts as good.
    #[arg(long, env = "BATON_SLO_TTFT_MS", value_parser = positive)]
    pub slo_ttft_ms: Option<f64>,
    /// Token gap that the p99 of every load is held against, and mean gap within which a
    /// request counts as good.
    #[arg(long, env = "BATON_SLO_ITL_MS", value_parser = positive)]
    pub slo_itl_ms: Option<f64>,
    /// Name of this run in tables and plots.
    #[arg(long, env = "BATON_LABEL", default_value = "this run")]
    pub label: String,
    /// Earlier results (files of --output) to show beside this one and to compare with.
    #[arg(
        long,
        env = "BATON_AGAINST",
        value_name = "FILE",
        value_delimiter = ','
    )]
    pub against: Vec<PathBuf>,
    /// Write the curves to this file, as SVG.
    #[arg(long, env = "BATON_PLOT", value_name = "FILE")]
    pub plot: Option<PathBuf>,
    #[command(flatten)]
    pub report: ReportArgs,
}

impl SweepArgs {
    /// The loads, in their order.
    pub fn paces(&self) -> Vec<Pace> {
        if self.rates.is_empty() {
            self.clients
                .iter()
                .copied()
                .map(Pace::Concurrency)
                .collect()
        } else {
            self.rates.iter().copied().map(Pace::Rate).collect()
        }
    }

    /// What a good request keeps.
    pub fn slo(&self) -> Slo {
        let limit = |limit: Option<f64>| limit.map(|limit| Duration::from_secs_f64(limit / 1e3));
        Slo {
            ttft: limit(self.slo_ttft_ms),
            tpot: limit(self.slo_itl_ms),
        }
    }
}
