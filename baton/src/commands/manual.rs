//! `baton completions` and `baton man`: what shells and `man` know of the command line.

use anyhow::{Context as _, bail};
use clap::{Command, CommandFactory as _};

use super::print;
use crate::cli::{Cli, CompletionsArgs, ManArgs};

/// Prints a shell's script.
///
/// # Errors
/// Standard output that cannot be written to.
pub fn completions(args: &CompletionsArgs) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "baton", &mut script);
    print(&String::from_utf8(script).context("the script is text")?)
}

/// Prints one page, or writes all of them.
///
/// # Errors
/// A command that does not exist, or a folder that cannot be written to.
pub fn page(args: &ManArgs) -> anyhow::Result<()> {
    let mut command = Cli::command();
    if let Some(folder) = &args.folder {
        let shown = folder.display();
        std::fs::create_dir_all(folder)
            .and_then(|()| clap_mangen::generate_to(command, folder))
            .with_context(|| format!("`--folder {shown}`"))?;
        return Ok(());
    }
    // So that a subcommand knows its whole name.
    command.build();
    let mut of = &command;
    for name in &args.of {
        let Some(found) = of.find_subcommand(name) else {
            bail!("`{name}`: no command of that name; {}", known(of));
        };
        of = found;
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(of.clone()).render(&mut page)?;
    print(&String::from_utf8(page).context("the page is text")?)
}

fn known(command: &Command) -> String {
    let names: Vec<&str> = command
        .get_subcommands()
        .map(Command::get_name)
        .filter(|name| *name != "help")
        .collect();
    match names.is_empty() {
        true => "there are none below it".to_owned(),
        false => format!("there are: {}", names.join(", ")),
    }
}
