//! The command line. Every flag is also an environment variable (`BATON_` and its
//! name) and a key of the config file.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;
use std::time::Duration;

use baton_engine::model::WeightFormat;
use baton_kv_transfer::{TransportChoice, WireChoice};
use baton_observability::logging::LogFormat;
use baton_proto::address::preferred;
use baton_proto::float_range::{self, FloatRange};
use baton_proto::kv_layout::KvDtype;
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use clap::{Args, Parser, Subcommand};

use crate::commands::bench::flags::BenchCommand;
use crate::version;

pub(crate) mod help;

/// A disaggregated LLM serving cluster: prefill and decode in separate pools.
#[derive(Debug, Parser)]
#[command(
    name = "baton",
    version,
    long_version = version::long(),
    after_help = help::BATON
)]
pub struct Cli {
    /// TOML file with defaults for all flags: a table per subcommand, keys as the flags.
    #[arg(long, env = "BATON_CONFIG", global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Log lines: json, compact, or auto (compact on a terminal).
    #[arg(long, env = "BATON_LOG_FORMAT", global = true, default_value = "auto")]
    pub log_format: LogFormat,
    /// Log filter, for example `info` or `warn,baton_router=debug`.
    #[arg(long, env = "BATON_LOG", global = true, value_name = "FILTER")]
    pub log: Option<String>,
    #[command(subcommand)]
    pub command: CliCommand,
}

#[derive(Debug, Subcommand)]
pub enum CliCommand {
    /// Run a whole cluster in this process: router, prefill and decode workers.
    #[command(after_help = help::UP)]
    Up(Box<UpArgs>),
    /// Run a router: the front doors, admission and placement.
    #[command(after_help = help::ROUTER)]
    Router(Box<RouterRoleArgs>),
    /// Run a prefill worker: computes prompts and ships their KV cache.
    #[command(after_help = help::PREFILL)]
    Prefill(Box<PrefillRoleArgs>),
    /// Run a decode worker: continues sequences with continuous batching.
    #[command(after_help = help::DECODE)]
    Decode(Box<DecodeRoleArgs>),
    /// Generate from one prompt and stream it to standard output.
    #[command(after_help = help::GENERATE)]
    Generate(Box<GenerateArgs>),
    /// Talk to a model in the terminal.
    #[command(after_help = help::CHAT)]
    Chat(Box<ChatArgs>),
    /// Watch a running cluster: its workers, their load, queues and KV blocks.
    #[command(after_help = help::TOP)]
    Top(TopArgs),
    /// Measure a running server (latency, throughput, what long prompts do to others), or
    /// what fewer bits cost a model.
    #[command(subcommand, after_help = help::BENCH)]
    Bench(BenchCommand),
    /// Simulate whole clusters from seeds, with everything that goes wrong, and check them.
    #[cfg(feature = "simulate")]
    #[command(after_help = help::SIMULATE)]
    Simulate(SimulateArgs),
    /// Fetch, list and inspect models.
    #[command(subcommand, after_help = help::MODEL)]
    Model(ModelCommand),
    /// Print a script that completes commands and flags in a shell.
    #[command(after_help = help::COMPLETIONS)]
    Completions(CompletionsArgs),
    /// Print a manual page, or write all of them into a folder.
    #[command(after_help = help::MAN)]
    Man(ManArgs),
}

impl CliCommand {
    /// Whether a person reads standard output and log lines would be in the way.
    pub fn is_interactive(&self) -> bool {
        !matches!(
            self,
            Self::Up(_) | Self::Router(_) | Self::Prefill(_) | Self::Decode(_)
        )
    }
}

/// Which router to watch, and how.
#[derive(Clone, Debug, Args)]
pub struct TopArgs {
    /// The router's HTTP front door.
    #[arg(long, env = "BATON_URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// Milliseconds between two looks.
    #[arg(long, env = "BATON_INTERVAL_MS", default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(100..=3_600_000))]
    pub interval_ms: u64,
    /// Look once and end.
    #[arg(long, env = "BATON_ONCE")]
    pub once: bool,
    /// Print the router's answer of each look as one line of JSON.
    #[arg(long, env = "BATON_JSON")]
    pub json: bool,
    /// Bearer key, if the router wants one.
    #[arg(long, env = "BATON_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Authorities trusted for the router (PEM) [default: the public ones].
    #[arg(long, env = "BATON_TLS_AUTHORITY", value_name = "FILE")]
    pub tls_authority: Option<PathBuf>,
    /// Certificate to show to the router (PEM), if it wants one.
    #[arg(
        long,
        env = "BATON_TLS_CERTIFICATE",
        value_name = "FILE",
        requires = "tls_key"
    )]
    pub tls_certificate: Option<PathBuf>,
    /// Private key of that certificate (PEM).
    #[arg(
        long,
        env = "BATON_TLS_KEY",
        value_name = "FILE",
        requires = "tls_certificate"
    )]
    pub tls_key: Option<PathBuf>,
}

/// What to simulate.
#[cfg(feature = "simulate")]
#[derive(Clone, Debug, Args)]
pub struct SimulateArgs {
    /// Run this seed alone.
    #[arg(long, env = "BATON_SEED", value_name = "SEED", conflicts_with_all = ["seeds", "minutes", "from"])]
    pub seed: Option<u64>,
    /// Run so many seeds [default: 100, or without end under --minutes].
    #[arg(long, env = "BATON_SEEDS", value_name = "COUNT")]
    pub seeds: Option<u64>,
    /// The first of several seeds.
    #[arg(long, env = "BATON_FROM", value_name = "SEED", default_value_t = 0)]
    pub from: u64,
    /// Begin runs for so long.
    #[arg(long, env = "BATON_MINUTES", value_name = "MINUTES")]
    pub minutes: Option<u64>,
    /// Runs at a time [default: one per core].
    #[arg(long, env = "BATON_JOBS", value_name = "COUNT")]
    pub jobs: Option<usize>,
    /// Stop at the first seed that breaks an invariant.
    #[arg(long, env = "BATON_STOP_AT_FIRST")]
    pub stop_at_first: bool,
    /// Print everything that happened, not only the stories of broken seeds.
    #[arg(long, env = "BATON_TRACE", conflicts_with = "json")]
    pub trace: bool,
    /// Print one JSON object instead of text.
    #[arg(long, env = "BATON_JSON")]
    pub json: bool,
}

/// An address to listen at. A host name is resolved here, and a name of this host's own
/// (`localhost`) stands for its IPv4 address where it has one.
fn address(text: &str) -> Result<SocketAddr, String> {
    let is_host_and_port = text
        .rsplit_once(':')
        .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    if !is_host_and_port {
        let form = "an address is HOST:PORT, for example 127.0.0.1:8000, localhost:8000, \
                    0.0.0.0:8000 or [::1]:8000";
        return Err(form.to_owned());
    }
    let resolved = text.to_socket_addrs();
    let resolved = resolved.map_err(|error| format!("the host has no address: {error}"))?;
    preferred(resolved).ok_or_else(|| "the host has no address".to_owned())
}

/// A name of a model or a worker.
fn name(text: &str) -> Result<String, String> {
    match baton_proto::name::check_name("", text) {
        Ok(()) => Ok(text.to_owned()),
        Err(error) => Err(error.message),
    }
}

/// A float of 32 bits, whose range is that of 64.
fn narrow(range: &FloatRange, text: &str) -> Result<f32, String> {
    let number = text
        .parse::<f64>()
        .map_err(|_| format!("not a number, {}", range.allowed()))?;
    range.narrow(number).map_err(|error| error.message)
}

/// Which model is served and under what name.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// GGUF file, Hugging Face folder, short name (see `baton model list`), or
    /// hf:owner/repo[:file].
    #[arg(long, env = "BATON_MODEL", default_value = "smollm2-135m-instruct")]
    pub model: String,
    /// Name clients ask for; by default the short name or the file's.
    #[arg(long, env = "BATON_MODEL_NAME", value_parser = name)]
    pub model_name: Option<String>,
    /// Folder that fetched models are kept in [default: baton/models in the user's cache folder].
    #[arg(long, env = "BATON_CACHE_DIR", value_name = "FOLDER")]
    pub cache_dir: Option<PathBuf>,
    #[command(flatten)]
    pub weights: WeightArgs,
}

/// What a model becomes while it is loaded.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model")]
pub struct WeightArgs {
    /// What the weight matrices become at load: keep (as in the file), q8 (float
    /// matrices to 8 bits, Q8_0), q4 (all wider ones to 4 bits, Q4_1, tied embedding and
    /// output included) or f32 (dequantised, for comparisons). Workers that differ in it
    /// are never paired.
    #[arg(long, env = "BATON_WEIGHTS", default_value = "keep")]
    pub weights: WeightFormat,
}

/// How an engine lays out and schedules its work.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// Token positions in a KV block.
    #[arg(long, env = "BATON_BLOCK_SIZE", default_value = "16", value_parser = PossibleValuesParser::new(["16", "32", "64", "128"]).map(|text| text.parse::<u32>().unwrap_or(16)))]
    pub block_size: u32,
    /// Element type of the KV cache: f32, f16, bf16, or codes of int8 or int4 with a scale
    /// and a minimum per position and at most 64 dimensions of a head.
    #[arg(long, env = "BATON_KV_DTYPE", default_value = "f16")]
    pub kv_dtype: KvDtype,
    /// Tokens that each worker's KV pool holds.
    #[arg(long, env = "BATON_KV_TOKENS", default_value_t = 32_768, value_parser = clap::value_parser!(u32).range(16..=1 << 28))]
    pub kv_tokens: u32,
    /// Longest prompt plus output; above the model's own only where its RoPE scaling
    /// stretches as far as it is asked to [default: the model's].
    #[arg(long, env = "BATON_CONTEXT_MAX", value_parser = clap::value_parser!(u32).range(1..))]
    pub context_max: Option<u32>,
    /// Prompt tokens computed in one step.
    #[arg(long, env = "BATON_CHUNK_TOKENS", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub chunk_tokens: u32,
    /// Sequences in a decode batch.
    #[arg(long, env = "BATON_SEQUENCES_MAX", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub sequences_max: u32,
    /// Requests that may wait in a worker; more are refused with a retry hint.
    #[arg(long, env = "BATON_QUEUE_REQUESTS_MAX", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub queue_requests_max: u32,
    /// Do not keep finished prompts for later ones with the same prefix.
    #[arg(long, env = "BATON_NO_PREFIX_CACHE")]
    pub no_prefix_cache: bool,
}

/// What decode workers promise their streams.
#[derive(Clone, Copy, Debug, Default, Args)]
#[command(next_help_heading = "Latency")]
pub struct SloArgs {
    /// Longest gap between two tokens of a stream, in milliseconds, that a decode worker
    /// plans its steps for: it batches as many sequences as stay within it and cuts
    /// prompts to what they leave. Requests may ask for less [default: none, batches are
    /// as large as --sequences-max].
    #[arg(long, env = "BATON_ITL_TARGET_MS", value_name = "MS", value_parser = itl_target)]
    pub itl_target_ms: Option<f64>,
}

impl SloArgs {
    /// The target, if there is one.
    pub fn itl_target(&self) -> Option<Duration> {
        self.itl_target_ms
            .map(|ms| Duration::from_secs_f64(ms / 1e3))
    }
}

fn itl_target(text: &str) -> Result<f64, String> {
    let allowed = baton_proto::limits::ITL_MS;
    match text.parse::<f64>() {
        Ok(ms) if allowed.contains(&ms) => Ok(ms),
        _ => Err(format!(
            "give milliseconds from {} to {}",
            allowed.start(),
            allowed.end()
        )),
    }
}

/// TLS of a process's ports: PEM files. Of `up` and `router` the two front doors, of a
/// worker every port it has.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "TLS")]
pub struct TlsArgs {
    /// Certificate chain of this process (PEM). With it and its key, the front doors of
    /// `up` and `router`, and the control, admin and KV data ports of `prefill` and
    /// `decode`, speak TLS and nothing else.
    #[arg(long, env = "BATON_TLS_CERTIFICATE", value_name = "FILE")]
    pub tls_certificate: Option<PathBuf>,
    /// Private key of this process (PEM).
    #[arg(long, env = "BATON_TLS_KEY", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Authorities trusted for peers (PEM); makes client certificates mandatory on all
    /// of these ports. A prefill worker with TLS needs it to check decode workers.
    #[arg(long, env = "BATON_TLS_AUTHORITY", value_name = "FILE")]
    pub tls_authority: Option<PathBuf>,
}

/// The front doors and the router's limits.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Front doors and limits")]
pub struct RouterArgs {
    /// Address of the HTTP front door (OpenAI shape).
    #[arg(long, env = "BATON_HTTP", default_value = "127.0.0.1:8000", value_parser = address)]
    pub http: SocketAddr,
    /// Address of the gRPC front door.
    #[arg(long, env = "BATON_GRPC", default_value = "127.0.0.1:50051", value_parser = address)]
    pub grpc: SocketAddr,
    /// File of `key = tenant` lines (TOML strings). With it, every call needs a key.
    #[arg(long, env = "BATON_API_KEYS", value_name = "FILE")]
    pub api_keys: Option<PathBuf>,
    /// Allow an address beyond loopback without API keys.
    #[arg(long, env = "BATON_ALLOW_ANONYMOUS")]
    pub allow_anonymous: bool,
    /// Requests in flight; more are refused with a retry hint.
    #[arg(long, env = "BATON_REQUESTS_MAX", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    pub requests_max: u32,
    /// Uncached prompt tokens up to which the decode worker computes a prompt itself.
    #[arg(long, env = "BATON_LOCAL_PREFILL_TOKENS_MAX", default_value_t = 64)]
    pub local_prefill_tokens_max: u32,
    /// Refuse longer prompts while no prefill worker is there, instead of having decode workers
    /// compute them between the steps of their streams. What was begun goes on all the same.
    #[arg(long, env = "BATON_REFUSE_WITHOUT_PREFILL")]
    pub refuse_without_prefill: bool,
    /// Longest life of a request.
    #[arg(long, env = "BATON_REQUEST_TIMEOUT_MS", default_value_t = 600_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub request_timeout_ms: u64,
    /// Longest time to the first token, in milliseconds, of requests without
    /// `slo.ttft_ms`: those that would wait longer are refused [default: none].
    #[arg(long, env = "BATON_TTFT_TARGET_MS", value_parser = clap::value_parser!(u64).range(1..=600_000))]
    pub ttft_target_ms: Option<u64>,
    /// Longest wait for a decode worker while none is there, before a request is refused;
    /// 0 refuses at once [default: the request's deadline, or its target on the first token].
    /// Streams that were begun wait no longer than `--stream-gap-ms` for one.
    #[arg(long, env = "BATON_POOL_TIMEOUT_MS")]
    pub pool_timeout_ms: Option<u64>,
    /// Longest gap in a stream whose worker died, beyond what computing its tokens again is
    /// foretold to take; then it ends with an error and a hint, and can be resumed.
    #[arg(long, env = "BATON_STREAM_GAP_MS", default_value_t = 1_500, value_parser = clap::value_parser!(u64).range(1..))]
    pub stream_gap_ms: u64,
    /// Longest handoff without progress.
    #[arg(long, env = "BATON_HANDOFF_TIMEOUT_MS", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub handoff_timeout_ms: u64,
    /// Prompt prefixes (spans of 16 tokens) whose worker is remembered.
    #[arg(long, env = "BATON_PREFIX_SPANS_MAX", default_value_t = 65_536, value_parser = clap::value_parser!(u32).range(1..))]
    pub prefix_spans_max: u32,
    /// File of secrets that resume tokens are signed with, one a line, at least 32
    /// bytes each: the first signs, each one checks, so that a key can be replaced.
    /// With the same file at every router, a client whose router died goes on at any
    /// other one. Without it a key is drawn at start: nothing has to be kept secret,
    /// and a token is good at the router that gave it alone, until that restarts.
    #[arg(long, env = "BATON_RESUME_KEY_FILE", value_name = "FILE")]
    pub resume_key_file: Option<PathBuf>,
    /// How long a client may resume a stream after it began, in seconds.
    #[arg(long, env = "BATON_RESUME_LIFE_S", default_value_t = 3_600, value_parser = clap::value_parser!(u64).range(1..))]
    pub resume_life_s: u64,
    /// What running streams get after a shutdown was asked for.
    #[arg(long, env = "BATON_DRAIN_MS", default_value_t = 10_000)]
    pub drain_ms: u64,
}

/// How processes of a cluster find each other.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Cluster")]
pub struct EtcdArgs {
    /// etcd URLs, comma separated; HOST:PORT is `http://`, or `https://` with the TLS flags below.
    #[arg(
        long,
        env = "BATON_ETCD",
        value_name = "URL",
        value_delimiter = ',',
        required = true
    )]
    pub etcd: Vec<String>,
    /// Name of the cluster; processes of another name do not see each other.
    #[arg(long, env = "BATON_CLUSTER", default_value = "default")]
    pub cluster: String,
    /// Rollout generation; workers of different ones do not see each other.
    #[arg(long, env = "BATON_GENERATION", default_value = "0")]
    pub generation: String,
    /// Seconds that a worker may be silent and stay listed; it is listed no more after these,
    /// a third of them and a second.
    #[arg(long, env = "BATON_ETCD_TTL_S", default_value_t = 5, value_parser = clap::value_parser!(u64).range(2..=3600))]
    pub etcd_ttl_s: u64,
    /// etcd user name.
    #[arg(long, env = "BATON_ETCD_USER")]
    pub etcd_user: Option<String>,
    /// etcd password; better given by the environment.
    #[arg(long, env = "BATON_ETCD_PASSWORD", hide_env_values = true)]
    pub etcd_password: Option<String>,
    /// Authorities trusted for etcd (PEM).
    #[arg(long, env = "BATON_ETCD_AUTHORITY", value_name = "FILE")]
    pub etcd_authority: Option<PathBuf>,
    /// Certificate to show to etcd (PEM), if it asks for one.
    #[arg(long, env = "BATON_ETCD_CERTIFICATE", value_name = "FILE")]
    pub etcd_certificate: Option<PathBuf>,
    /// Private key of that certificate (PEM).
    #[arg(long, env = "BATON_ETCD_KEY", value_name = "FILE")]
    pub etcd_key: Option<PathBuf>,
}

/// What every worker process has.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Worker")]
pub struct WorkerArgs {
    /// Name of this worker in the cluster; one live process per name [default: role and a random suffix].
    #[arg(long, env = "BATON_WORKER_ID", value_parser = name)]
    pub worker_id: Option<String>,
    /// Address of the worker's gRPC services; port 0 takes a free one.
    #[arg(long, env = "BATON_LISTEN", default_value = "127.0.0.1:0", value_parser = address)]
    pub listen: SocketAddr,
    /// host:port that routers use [default: the bound address].
    #[arg(long, env = "BATON_ADVERTISE")]
    pub advertise: Option<String>,
    /// Address of /livez, /readyz and /metrics; port 0 takes a free one.
    #[arg(long, env = "BATON_ADMIN", default_value = "127.0.0.1:0", value_parser = address)]
    pub admin: SocketAddr,
    /// Threads of the engine [default: one per listed core, else 1].
    #[arg(long, env = "BATON_THREADS", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Cores the engine's threads are pinned to, comma separated.
    #[arg(long, env = "BATON_CORES", value_delimiter = ',', value_name = "CORE")]
    pub cores: Vec<usize>,
    /// Seconds that running requests get after SIGTERM.
    #[arg(long, env = "BATON_DRAIN_GRACE_S", default_value_t = 30, value_parser = clap::value_parser!(u64).range(0..=31_536_000))]
    pub drain_grace_s: u64,
    /// Where the worker stands (rack, host), for placement.
    #[arg(long, env = "BATON_TOPOLOGY", default_value = "")]
    pub topology: String,
}

#[derive(Clone, Debug, Args)]
pub struct UpArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub slo: SloArgs,
    #[command(flatten)]
    pub router: RouterArgs,
    #[command(flatten)]
    pub tls: TlsArgs,
    #[command(flatten)]
    pub pools: PoolArgs,
}

/// How many workers a process runs, and on what.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Workers in this process")]
pub struct PoolArgs {
    /// Prefill workers; 0 lets decode workers compute every prompt themselves.
    #[arg(long, env = "BATON_PREFILL_WORKERS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=64))]
    pub prefill_workers: u32,
    /// Decode workers.
    #[arg(long, env = "BATON_DECODE_WORKERS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub decode_workers: u32,
    /// Threads of each prefill worker [default: its share of the cores].
    #[arg(long, env = "BATON_PREFILL_THREADS", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub prefill_threads: Option<u32>,
    /// Threads of each decode worker [default: its share of the cores].
    #[arg(long, env = "BATON_DECODE_THREADS", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub decode_threads: Option<u32>,
    /// Leave the placement of threads on cores to the system.
    #[arg(long, env = "BATON_NO_PIN")]
    pub no_pin: bool,
}

#[derive(Clone, Debug, Args)]
pub struct RouterRoleArgs {
    #[command(flatten)]
    pub etcd: EtcdArgs,
    #[command(flatten)]
    pub router: RouterArgs,
    #[command(flatten)]
    pub seeds: SeedArgs,
    #[command(flatten)]
    pub tls: TlsArgs,
    #[command(flatten)]
    pub worker_tls: WorkerTlsArgs,
}

/// What a router starts with while etcd cannot be reached.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Starting without etcd")]
pub struct SeedArgs {
    /// A worker to serve with until etcd has been read, `prefill=HOST:PORT` or
    /// `decode=HOST:PORT` (its gRPC address); may be given several times.
    #[arg(
        long,
        env = "BATON_WORKER",
        value_delimiter = ',',
        value_name = "ROLE=ADDRESS"
    )]
    pub worker: Vec<String>,
    /// Folder where the last list of workers is kept, for the next start. One per
    /// router and cluster; a damaged file is ignored with a warning.
    #[arg(long, env = "BATON_STATE_DIR", value_name = "FOLDER")]
    pub state_dir: Option<PathBuf>,
}

/// TLS of the router towards workers.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "TLS towards workers")]
pub struct WorkerTlsArgs {
    /// Certificate the router shows to workers (PEM).
    #[arg(long, env = "BATON_WORKER_TLS_CERTIFICATE", value_name = "FILE")]
    pub worker_tls_certificate: Option<PathBuf>,
    /// Its private key (PEM).
    #[arg(long, env = "BATON_WORKER_TLS_KEY", value_name = "FILE")]
    pub worker_tls_key: Option<PathBuf>,
    /// Authorities trusted for workers (PEM); turns TLS towards them on.
    #[arg(long, env = "BATON_WORKER_TLS_AUTHORITY", value_name = "FILE")]
    pub worker_tls_authority: Option<PathBuf>,
    /// Name expected in workers' certificates [default: the host of their address].
    #[arg(long, env = "BATON_WORKER_TLS_NAME", value_name = "NAME")]
    pub worker_tls_name: Option<String>,
}

/// How KV goes from prefill to decode workers.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "KV transport")]
pub struct TransportArgs {
    /// How KV goes to or comes from other processes: auto (decode workers of the same host
    /// and user read it from the prefill worker's memory, all others get it over TCP),
    /// shared-memory (never over TCP; workers elsewhere are refused), nixl (decode workers that
    /// say so as well read it over NIXL, which is RDMA where UCX finds it and never encrypted;
    /// all others get it over TCP), or tcp (no memory is shared). Which one carried the bytes
    /// is a label of baton_kv_transfer_bytes_total.
    #[arg(long, env = "BATON_KV_TRANSPORT", default_value = "auto")]
    pub kv_transport: TransportChoice,
    /// NIXL's library, for `--kv-transport nixl`: libnixl_capi.so, its folder, or the Python
    /// environment or site-packages folder that nixl-cu12 is installed in. Takes a program
    /// that was built with `--features nixl`.
    #[arg(long, env = "BATON_NIXL_LIBRARY", value_name = "PATH")]
    pub nixl_library: Option<PathBuf>,
}

/// What a prefill worker does to KV that leaves its host.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "KV transport")]
pub struct WireArgs {
    /// What K and V are over TCP: native (what the pool stores) or int8 (about half the bytes
    /// of f16, for links that are slower than prefill; tokens may then differ from those of
    /// one worker, and the decode worker does not cache what it gets). Requests with exact,
    /// KV that stays on the host, and pools that store int8 or int4 travel as they are.
    #[arg(long, env = "BATON_KV_WIRE", default_value = "native")]
    pub kv_wire: WireChoice,
}

#[derive(Clone, Debug, Args)]
pub struct PrefillRoleArgs {
    #[command(flatten)]
    pub etcd: EtcdArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub worker: WorkerArgs,
    #[command(flatten)]
    pub transport: TransportArgs,
    #[command(flatten)]
    pub wire: WireArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub tls: TlsArgs,
    /// Name expected in the certificates of decode workers' data ports [default: the
    /// host of their address].
    #[arg(
        long,
        env = "BATON_TLS_PEER_NAME",
        value_name = "NAME",
        help_heading = "TLS"
    )]
    pub tls_peer_name: Option<String>,
}

#[derive(Clone, Debug, Args)]
pub struct DecodeRoleArgs {
    #[command(flatten)]
    pub etcd: EtcdArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub worker: WorkerArgs,
    #[command(flatten)]
    pub transport: TransportArgs,
    /// Address that prefill workers send KV to; port 0 takes a free one.
    #[arg(long, env = "BATON_DATA_LISTEN", default_value = "127.0.0.1:0", value_parser = address)]
    pub data_listen: SocketAddr,
    /// host:port that prefill workers use [default: the bound data address].
    #[arg(long, env = "BATON_DATA_ADVERTISE")]
    pub data_advertise: Option<String>,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub slo: SloArgs,
    #[command(flatten)]
    pub tls: TlsArgs,
}

/// How tokens are drawn.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// New tokens at most [default: what the context leaves, at most 512].
    #[arg(long, env = "BATON_MAX_TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: Option<u32>,
    /// 0 is greedy; 0 to 100.
    #[arg(
        long,
        env = "BATON_TEMPERATURE",
        default_value_t = 0.7,
        value_parser = |text: &str| narrow(&float_range::TEMPERATURE, text),
        allow_negative_numbers = true
    )]
    pub temperature: f32,
    /// Keep the smallest set of tokens with this probability; above 0, at most 1.
    #[arg(
        long,
        env = "BATON_TOP_P",
        default_value_t = 0.95,
        value_parser = |text: &str| narrow(&float_range::TOP_P, text),
        allow_negative_numbers = true
    )]
    pub top_p: f32,
    /// Keep the k most probable tokens; 0 keeps all.
    #[arg(long, env = "BATON_TOP_K", default_value_t = 0)]
    pub top_k: u32,
    /// The same seed gives the same text [default: random].
    #[arg(long, env = "BATON_SEED")]
    pub seed: Option<u64>,
}

#[derive(Clone, Debug, Args)]
pub struct GenerateArgs {
    /// The prompt; `-` reads standard input.
    pub prompt: String,
    /// Ask a running router at host:port instead of starting a cluster.
    #[arg(long, env = "BATON_CONNECT", value_name = "HOST:PORT")]
    pub connect: Option<String>,
    /// Treat the prompt as plain text to continue, without the chat template.
    #[arg(long, env = "BATON_RAW")]
    pub raw: bool,
    /// Print one JSON object with text, usage and timings instead of the stream.
    #[arg(long, env = "BATON_JSON")]
    pub json: bool,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub pools: PoolArgs,
}

#[derive(Clone, Debug, Args)]
pub struct ChatArgs {
    /// Ask a running router at host:port instead of starting a cluster.
    #[arg(long, env = "BATON_CONNECT", value_name = "HOST:PORT")]
    pub connect: Option<String>,
    /// What the model is told before the conversation.
    #[arg(long, env = "BATON_SYSTEM")]
    pub system: Option<String>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
    #[command(flatten)]
    pub pools: PoolArgs,
}

#[derive(Clone, Debug, Subcommand)]
pub enum ModelCommand {
    /// Fetch a model into the cache folder and print its path.
    #[command(after_help = help::MODEL_FETCH)]
    Fetch(ModelFetchArgs),
    /// List the models with a short name and whether they are here.
    #[command(after_help = help::MODEL_LIST)]
    List(ModelListArgs),
    /// Show what is in a model: sizes, layers, tokenizer, weight formats.
    #[command(after_help = help::MODEL_INSPECT)]
    Inspect(ModelInspectArgs),
}

#[derive(Clone, Debug, Args)]
pub struct ModelFetchArgs {
    /// GGUF file, folder, short name or hf:owner/repo[:file].
    pub model: String,
    /// Folder that fetched models are kept in [default: baton/models in the user's cache folder].
    #[arg(long, env = "BATON_CACHE_DIR", value_name = "FOLDER")]
    pub cache_dir: Option<PathBuf>,
    /// JSON instead of text.
    #[arg(long, env = "BATON_JSON")]
    pub json: bool,
    /// No progress bar.
    #[arg(long, env = "BATON_QUIET")]
    pub quiet: bool,
}

#[derive(Clone, Debug, Args)]
pub struct ModelInspectArgs {
    #[command(flatten)]
    pub fetch: ModelFetchArgs,
    #[command(flatten)]
    pub weights: WeightArgs,
}

#[derive(Clone, Debug, Args)]
pub struct ModelListArgs {
    /// Folder that fetched models are kept in [default: baton/models in the user's cache folder].
    #[arg(long, env = "BATON_CACHE_DIR", value_name = "FOLDER")]
    pub cache_dir: Option<PathBuf>,
    /// JSON instead of a table.
    #[arg(long, env = "BATON_JSON")]
    pub json: bool,
}

#[derive(Clone, Debug, Args)]
pub struct CompletionsArgs {
    /// The shell.
    pub shell: clap_complete::Shell,
}

#[derive(Clone, Debug, Args)]
pub struct ManArgs {
    /// The command whose page is wanted, for example `bench load` [default: the whole program's].
    pub of: Vec<String>,
    /// Write the pages of all commands into this folder instead.
    #[arg(
        long,
        env = "BATON_FOLDER",
        value_name = "FOLDER",
        conflicts_with = "of"
    )]
    pub folder: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn numbers_and_names_out_of_range_are_refused_by_flag() {
        let parsed = |flag: &str, value: &str| {
            let flag = format!("--{flag}={value}");
            Cli::try_parse_from(["baton", "generate", "hi", &flag]).map_err(|e| e.to_string())
        };
        for (flag, value, allowed) in [
            ("temperature", "100.0000001", "0..=100"),
            ("temperature", "-0.001", "0..=100"),
            ("temperature", "nan", "0..=100"),
            ("temperature", "inf", "0..=100"),
            ("temperature", "1e-50", "too close to 0"),
            ("temperature", "warm", "0..=100"),
            ("top-p", "0", "above 0 and at most 1"),
            ("top-p", "1.00000001", "above 0 and at most 1"),
            ("model-name", "a\nb", "control character"),
            ("model-name", &"x".repeat(257), "1..=256"),
        ] {
            let error = parsed(flag, value).unwrap_err();
            assert!(error.contains(&format!("--{flag}")), "{error}");
            assert!(error.contains(allowed), "{flag} {value}: {error}");
        }
        for (flag, value) in [
            ("temperature", "100"),
            ("top-p", "1"),
            ("model-name", "a\"b\\"),
        ] {
            parsed(flag, value).unwrap();
        }
    }

    #[test]
    fn every_flag_has_an_environment_variable_and_help() {
        fn check(command: &clap::Command) {
            for arg in command.get_arguments() {
                if arg.get_long().is_some() && !matches!(arg.get_id().as_str(), "help" | "version")
                {
                    assert!(arg.get_env().is_some(), "--{} has no env", arg.get_id());
                }
                let about = arg.get_help().is_some() || arg.get_id() == "help";
                assert!(about, "{} has no help", arg.get_id());
            }
            command.get_subcommands().for_each(check);
        }
        let command = Cli::command();
        command.clone().debug_assert();
        check(&command);
    }
}
