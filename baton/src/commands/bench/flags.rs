//! The flags of `baton bench`.

use std::path::PathBuf;

use baton_engine::model::WeightFormat;
use baton_proto::float_range;
use baton_proto::kv_layout::KvDtype;
use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use super::engine::flags::EngineBenchArgs;
use super::lengths::Lengths;
pub use super::sweep::flags::SweepArgs;
use super::transfer::flags::TransferBenchArgs;
use crate::cli::help;

#[derive(Clone, Debug, Subcommand)]
pub enum BenchCommand {
    /// Send many requests, by the clock or by a number of clients, and sum up latency
    /// and throughput.
    Load(Box<LoadArgs>),
    /// Watch running streams while long prompts arrive, and compare their token gaps
    /// with the quiet ones.
    Interference(Box<InterferenceArgs>),
    /// Offer one load after another, measure each for a fixed time, and draw latency and
    /// throughput over the load, beside earlier results if there are any.
    Sweep(Box<SweepArgs>),
    /// Compare weight and KV formats of a model with the same model in f32: perplexity,
    /// top-1 agreement and divergence over a text.
    Quality(Box<QualityArgs>),
    /// Measure one engine alone, in this process, against the limits of the machine:
    /// prefill and decode by batch and context, and how well step times are predicted.
    #[command(after_help = help::BENCH_ENGINE)]
    Engine(Box<EngineBenchArgs>),
    /// Measure how fast KV goes from worker to worker, by transport and size of its parts,
    /// beside copies in memory and a plain TCP pair.
    #[command(after_help = help::BENCH_TRANSFER)]
    Transfer(Box<TransferBenchArgs>),
}

/// The protocol that is spoken to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Api {
    /// baton.v1 over gRPC, at --connect.
    Grpc,
    /// /v1/completions with server-sent events, at --url.
    Openai,
}

/// Which server is driven, and how.
#[derive(Clone, Debug, Args)]
pub struct TargetArgs {
    /// Protocol: grpc, or openai for any server with /v1/completions, llama.cpp's included.
    #[arg(long, env = "BATON_API", value_enum, default_value = "grpc")]
    pub api: Api,
    /// Router to drive with --api grpc.
    #[arg(
        long,
        env = "BATON_CONNECT",
        default_value = "127.0.0.1:50051",
        value_name = "HOST:PORT"
    )]
    pub connect: String,
    /// Server to drive with --api openai, without the /v1.
    #[arg(long, env = "BATON_URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// Model to ask for [default: the first that the server lists].
    #[arg(long, env = "BATON_MODEL_NAME")]
    pub model_name: Option<String>,
    /// Bearer key, if the server wants one.
    #[arg(long, env = "BATON_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// JSON object laid over every request's body with --api openai; null removes a key.
    #[arg(long, env = "BATON_BODY", value_name = "JSON")]
    pub body: Option<String>,
    /// Vocabulary that prompt ids are drawn from [default: the model's, or 32000 with --api openai].
    #[arg(long, env = "BATON_VOCAB_SIZE", value_parser = clap::value_parser!(u32).range(1..))]
    pub vocab_size: Option<u32>,
    /// Names the prompts, lengths and arrivals: the same seed sends the same load, so a
    /// second run against one server needs another seed, or its prefix cache answers.
    #[arg(long, env = "BATON_SEED", default_value_t = 1)]
    pub seed: u64,
    /// What one request gets before it counts as failed.
    #[arg(long, env = "BATON_REQUEST_TIMEOUT_MS", default_value_t = 600_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub request_timeout_ms: u64,
    /// Process of the server on this machine, to state its share of the cores.
    #[arg(long, env = "BATON_SERVER_PID", value_name = "PID")]
    pub server_pid: Option<u32>,
}

/// Where results go.
#[derive(Clone, Debug, Args)]
pub struct ReportArgs {
    /// Print JSON instead of the table.
    #[arg(long, env = "BATON_JSON")]
    pub json: bool,
    /// Also write the JSON to this file.
    #[arg(long, env = "BATON_OUTPUT", value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// No progress bar.
    #[arg(long, env = "BATON_QUIET")]
    pub quiet: bool,
}

#[derive(Clone, Debug, Args)]
pub struct LoadArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    /// Open loop: requests per second that arrive as a Poisson process, whatever the
    /// server does.
    #[arg(long, env = "BATON_RATE", value_name = "PER_SECOND", value_parser = positive, conflicts_with = "concurrency")]
    pub rate: Option<f64>,
    /// Closed loop: clients that each send their next request when the last one ended
    /// [default: 8 without --rate].
    #[arg(long, env = "BATON_CONCURRENCY", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub concurrency: Option<u32>,
    /// Requests that are measured.
    #[arg(long, env = "BATON_REQUESTS", default_value_t = 48, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub requests: u32,
    /// Requests sent one by one before measuring, so that the server is warm.
    #[arg(long, env = "BATON_WARMUP_REQUESTS", default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    pub warmup_requests: u32,
    /// Prompt tokens: fixed:N, uniform:A-B or lognormal:MEAN,SIGMA.
    #[arg(
        long,
        env = "BATON_PROMPT_TOKENS",
        default_value = "fixed:256",
        value_name = "LENGTHS"
    )]
    pub prompt_tokens: Lengths,
    /// New tokens: fixed:N, uniform:A-B or lognormal:MEAN,SIGMA.
    #[arg(
        long,
        env = "BATON_OUTPUT_TOKENS",
        default_value = "fixed:64",
        value_name = "LENGTHS"
    )]
    pub output_tokens: Lengths,
    /// Leading prompt tokens that all requests share; 0 lets no prefix cache help.
    #[arg(long, env = "BATON_SHARED_PREFIX", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1 << 20))]
    pub shared_prefix: u32,
    /// Every second request is drawn at this temperature, with a seed of its own; the others
    /// are greedy [default: all are].
    #[arg(long, env = "BATON_TEMPERATURE", value_parser = temperature)]
    pub temperature: Option<f64>,
    /// Keep what was answered, for --compare-answers.
    #[arg(long, env = "BATON_SAVE_ANSWERS", value_name = "FILE")]
    pub save_answers: Option<PathBuf>,
    /// Answers that a run of the same seed, lengths and API had: count those that differ, and
    /// fail if any does.
    #[arg(long, env = "BATON_COMPARE_ANSWERS", value_name = "FILE")]
    pub compare_answers: Option<PathBuf>,
    /// Time to first token within which a request counts as good.
    #[arg(long, env = "BATON_SLO_TTFT_MS", value_parser = positive)]
    pub slo_ttft_ms: Option<f64>,
    /// Mean token gap of a request (its TPOT) within which it counts as good.
    #[arg(long, env = "BATON_SLO_ITL_MS", value_parser = positive)]
    pub slo_itl_ms: Option<f64>,
    #[command(flatten)]
    pub report: ReportArgs,
}

#[derive(Clone, Debug, Args)]
pub struct InterferenceArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    /// Streams that decode all the time.
    #[arg(long, env = "BATON_STREAMS", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub streams: u32,
    /// Prompt tokens of a running stream.
    #[arg(long, env = "BATON_STREAM_PROMPT_TOKENS", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub stream_prompt_tokens: u32,
    /// New tokens of a running stream; one that ends is replaced.
    #[arg(long, env = "BATON_STREAM_TOKENS", default_value_t = 3_500, value_parser = clap::value_parser!(u32).range(2..=1 << 20))]
    pub stream_tokens: u32,
    /// Long prompts that arrive, one after another.
    #[arg(long, env = "BATON_INJECTIONS", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub injections: u32,
    /// Tokens of each of them.
    #[arg(long, env = "BATON_INJECTION_PROMPT_TOKENS", default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub injection_prompt_tokens: u32,
    /// New tokens that each of them asks for.
    #[arg(long, env = "BATON_INJECTION_TOKENS", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub injection_tokens: u32,
    /// Quiet time before, between and after the injections.
    #[arg(long, env = "BATON_QUIET_MS", default_value_t = 3_000, value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    pub quiet_ms: u64,
    #[command(flatten)]
    pub report: ReportArgs,
}

#[derive(Clone, Debug, Args)]
pub struct QualityArgs {
    /// GGUF file, Hugging Face folder, short name (see `baton model list`), or
    /// hf:owner/repo[:file].
    #[arg(long, env = "BATON_MODEL", default_value = "smollm2-135m-instruct")]
    pub model: String,
    /// Folder that fetched models are kept in [default: baton/models in the user's cache folder].
    #[arg(long, env = "BATON_CACHE_DIR", value_name = "FOLDER")]
    pub cache_dir: Option<PathBuf>,
    /// Plain text that is read (UTF-8).
    #[arg(long, env = "BATON_TEXT", value_name = "FILE")]
    pub text: PathBuf,
    /// Weight formats to compare, comma separated: keep, q8, q4, f32. All are in memory
    /// at once, and the f32 reference beside them.
    #[arg(
        long,
        env = "BATON_WEIGHTS",
        default_value = "keep,q8,q4",
        value_delimiter = ','
    )]
    pub weights: Vec<WeightFormat>,
    /// KV formats to compare, comma separated; every one with every weight format.
    #[arg(
        long,
        env = "BATON_KV_DTYPE",
        default_value = "f16",
        value_delimiter = ','
    )]
    pub kv_dtype: Vec<KvDtype>,
    /// Tokens that are scored.
    #[arg(long, env = "BATON_TOKENS", default_value_t = 2_048, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub tokens: u32,
    /// Tokens of a window; its second half is scored, the first is context.
    #[arg(long, env = "BATON_WINDOW", default_value_t = 512, value_parser = clap::value_parser!(u32).range(16..=1 << 20))]
    pub window: u32,
    /// Threads [default: one per core].
    #[arg(long, env = "BATON_THREADS", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    #[command(flatten)]
    pub report: ReportArgs,
}

/// What a server takes, but for 0.
fn temperature(text: &str) -> Result<f64, String> {
    let value = positive(text)?;
    let narrow = float_range::TEMPERATURE.narrow(value);
    narrow.map(|_| value).map_err(|error| error.message)
}

pub(super) fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value > 0.0 => Ok(value),
        _ => Err("give a number above 0".to_owned()),
    }
}
