//! What each subcommand does.

pub mod bench;
pub mod chat;
pub mod generate;
pub mod model;
pub mod roles;
pub mod source;
pub mod up;

use anyhow::Context as _;
use tokio_util::sync::CancellationToken;

use crate::cli::CliCommand;

/// Runs one subcommand to its end.
///
/// # Errors
/// What a person should read.
pub fn run(command: CliCommand) -> anyhow::Result<()> {
    match command {
        CliCommand::Bench(command) => bench::run(command),
        CliCommand::Model(command) => model::run(command),
        CliCommand::Up(args) => up::run(*args),
        CliCommand::Router(args) => roles::router(*args),
        CliCommand::Prefill(args) => roles::prefill(*args),
        CliCommand::Decode(args) => roles::decode(*args),
        CliCommand::Generate(args) => generate::run(*args),
        CliCommand::Chat(args) => chat::run(*args),
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

/// Cancelled by SIGTERM or Ctrl-C; a second one ends the process at once.
pub(crate) fn shutdown_signal() -> anyhow::Result<CancellationToken> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate()).context("watch SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("watch SIGINT")?;
    let token = CancellationToken::new();
    let cancelled = token.clone();
    // Lives as long as the process: the only thing that may end it early.
    tokio::spawn(async move {
        for last in [false, true] {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if last {
                tracing::warn!("second signal: leaving at once");
                std::process::exit(130);
            }
            tracing::info!("signal received: draining");
            cancelled.cancel();
        }
    });
    Ok(token)
}
