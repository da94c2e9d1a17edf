//! The entry point: parse, set up logs, run one command.

use std::process::ExitCode;

use baton::{cli, commands, config};

fn main() -> ExitCode {
    let cli = match config::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(config::Error::Flags(error)) => error.exit(),
        Err(error) => return fail(&error.into()),
    };
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        // As a process ends that writes into a closed pipe.
        Err(error) if error.is::<commands::OutputClosed>() => ExitCode::from(141),
        Err(error) => fail(&error),
    }
}

fn run(cli: cli::Cli) -> anyhow::Result<()> {
    let default_filter = match &cli.command {
        // Clusters break all the time there; the trace says what a log would.
        #[cfg(feature = "simulate")]
        cli::CliCommand::Simulate(_) => "off",
        command if command.is_interactive() => "warn",
        _ => "info",
    };
    let filter = cli.log.as_deref().unwrap_or(default_filter);
    baton_observability::logging::init(cli.log_format, filter)?;
    commands::run(cli.command)
}

/// One line a cause, on standard error. A cause whose words an earlier line has
/// already said is left out: many errors repeat what they wrap.
fn fail(error: &anyhow::Error) -> ExitCode {
    let mut said = format!("error: {error}");
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !said.contains(&cause) {
            said.push_str("\n  because: ");
            said.push_str(&cause);
        }
    }
    eprintln!("{said}");
    ExitCode::FAILURE
}
