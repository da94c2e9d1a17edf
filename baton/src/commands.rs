//! What each subcommand does.

pub mod bench;
pub mod chat;
pub mod generate;
pub mod manual;
pub mod model;
pub mod roles;
#[cfg(feature = "simulate")]
pub mod simulate;
pub mod source;
pub mod top;
pub mod up;

use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio_util::sync::CancellationToken;

use crate::cli::{CliCommand, EngineArgs, ModelArgs};
use crate::settings::{self, ServedModel};

/// Runs one subcommand to its end.
///
/// # Errors
/// What a person should read.
pub fn run(command: CliCommand) -> anyhow::Result<()> {
    match command {
        CliCommand::Bench(command) => bench::run(command),
        #[cfg(feature = "simulate")]
        CliCommand::Simulate(args) => simulate::run(&args),
        CliCommand::Model(command) => model::run(command),
        CliCommand::Up(args) => up::run(*args),
        CliCommand::Router(args) => roles::router(*args),
        CliCommand::Prefill(args) => roles::prefill(*args),
        CliCommand::Decode(args) => roles::decode(*args),
        CliCommand::Generate(args) => generate::run(*args),
        CliCommand::Chat(args) => chat::run(*args),
        CliCommand::Top(args) => top::run(&args),
        CliCommand::Completions(args) => manual::completions(&args),
        CliCommand::Man(args) => manual::page(&args),
    }
}

/// Whoever read standard output has gone. Nothing is left to say to anybody.
#[derive(Debug, thiserror::Error)]
#[error("standard output was closed")]
pub struct OutputClosed;

/// Writes to standard output at once.
///
/// # Errors
/// [`OutputClosed`] for a reader that has gone, or what the system reports.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    use std::io::Write as _;
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Err(OutputClosed.into()),
        written => written.context("write to standard output"),
    }
}

/// A runtime for the roles' I/O. Engines have their own threads.
pub(crate) fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("baton-io")
        .build()
        .context("start the runtime")
}

/// Runs a role to its end. Work off the runtime that is still going then, such as a model
/// that nobody needs any more, is not waited for.
pub(crate) fn run_role(role: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let runtime = runtime()?;
    let ended = runtime.block_on(role);
    runtime.shutdown_background();
    ended
}

/// Loads the model that the flags name, as the engine's flags want it; `None` if the process
/// is to end before it is there.
pub(crate) async fn load_unless(
    shutdown: &CancellationToken,
    args: &ModelArgs,
    engine: &EngineArgs,
) -> anyhow::Result<Option<ServedModel>> {
    let (args, context_max) = (args.clone(), engine.context_max);
    let load = move || settings::load_model(&args, context_max, false);
    let loading = tokio::task::spawn_blocking(load);
    match unless_ended(shutdown, "the model was loaded", loading).await {
        Some(loaded) => loaded.context("load model")?.map(Some),
        None => Ok(None),
    }
}

/// A phase of starting, or `None` if the process is to end before it is over; `what`
/// completes "left before". The phase is dropped then, and must have published nothing
/// that its owner does not withdraw.
pub(crate) async fn unless_ended<T>(
    shutdown: &CancellationToken,
    what: &str,
    phase: impl Future<Output = T>,
) -> Option<T> {
    tokio::select! {
        done = phase => Some(done),
        () = shutdown.cancelled() => {
            tracing::info!("left before {what}");
            None
        }
    }
}

/// One wish to stop may arrive as several signals: a terminal or `timeout` sends it to
/// the process and to its group.
const SIGNAL_ECHO: Duration = Duration::from_millis(500);

/// Cancelled by SIGTERM, by Ctrl-C or by SIGHUP (the terminal was closed); a later second one
/// ends the process at once. SIGHUP stays ignored where the process was started so (`nohup`).
pub(crate) fn shutdown_signal() -> anyhow::Result<CancellationToken> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate()).context("watch SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("watch SIGINT")?;
    let mut hangup = match ignores_hangup() {
        true => None,
        false => Some(signal(SignalKind::hangup()).context("watch SIGHUP")?),
    };
    let token = CancellationToken::new();
    let cancelled = token.clone();
    // Lives as long as the process: the only thing that may end it early.
    tokio::spawn(async move {
        let mut first: Option<Instant> = None;
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
                () = received(&mut hangup) => {}
            }
            match first {
                None => {
                    first = Some(Instant::now());
                    tracing::info!("signal received: draining");
                    cancelled.cancel();
                }
                Some(first) if first.elapsed() < SIGNAL_ECHO => {}
                Some(_) => {
                    tracing::warn!("second signal: leaving at once");
                    std::process::exit(130);
                }
            }
        }
    });
    Ok(token)
}

/// Waits for a signal; for ever where it is not watched.
async fn received(signal: &mut Option<tokio::signal::unix::Signal>) {
    match signal {
        Some(signal) => drop(signal.recv().await),
        None => std::future::pending().await,
    }
}

/// Whether whoever started the process had it ignore SIGHUP. Asked before the signal is watched,
/// which would undo that.
fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    // A bit for each signal, the lowest for 1, which SIGHUP is.
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & 1 == 1)
}
