//! One typed configuration from flags, environment and a TOML file.
//!
//! The flags *are* the configuration: each has an environment variable, and a file
//! given by `--config` (or `BATON_CONFIG`) supplies defaults. Order of precedence:
//! flag, environment, file, built-in default. A file has a table per subcommand
//! whose keys are the flags' names, nested as the commands are (`[bench.load]`);
//! top-level keys are the global flags:
//!
//! ```toml
//! log = "info"
//!
//! [up]
//! model = "smollm2-135m-instruct"
//! http = "127.0.0.1:8000"
//! kv-tokens = 65536
//! ```
//!
//! A key that is no flag is refused, and a value goes through the flag's own check.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, Command, CommandFactory as _, FromArgMatches as _};

use crate::cli::Cli;

/// Why the configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Clap's own message, with usage; also `--help` and `--version`.
    #[error(transparent)]
    Flags(#[from] clap::Error),
    #[error("`--config {path}`: cannot read the file")]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("config file `{path}`: {message}")]
    Syntax { path: PathBuf, message: String },
    #[error("config file `{path}`: unknown key `{key}`; known here: {known}")]
    UnknownKey {
        path: PathBuf,
        key: String,
        known: String,
    },
    #[error("config file `{path}`: `{key}` must be {expected}")]
    Type {
        path: PathBuf,
        key: String,
        expected: &'static str,
    },
}

/// Reads the command line, the environment and the file they name.
///
/// # Errors
/// Each names the flag or key, the value and what is allowed.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Cli, Error> {
    let args: Vec<OsString> = args.into_iter().collect();
    let mut command = with_environment(Cli::command());
    if let Some(path) = config_path(&args) {
        let text = std::fs::read_to_string(&path).map_err(|source| Error::Read {
            path: path.clone(),
            source,
        })?;
        command = with_file(command, &path, &text)?;
    }
    let matches = command.try_get_matches_from(args)?;
    Ok(Cli::from_arg_matches(&matches)?)
}

/// `--config` is needed before the rest can be parsed.
fn config_path(args: &[OsString]) -> Option<PathBuf> {
    let mut rest = args.iter().skip(1);
    while let Some(arg) = rest.next() {
        let Some(text) = arg.to_str() else { continue };
        if text == "--" {
            break;
        }
        if text == "--config" {
            return rest.next().map(PathBuf::from);
        }
        if let Some(path) = text.strip_prefix("--config=") {
            return Some(PathBuf::from(path));
        }
    }
    variable("BATON_CONFIG").map(PathBuf::from)
}

/// An environment variable. An empty one counts as absent, here and for every flag: that is what
/// `${X:-}` in a compose file or an unset secret gives.
pub fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// Makes the file's values the defaults of the flags they name.
fn with_file(command: Command, path: &Path, text: &str) -> Result<Command, Error> {
    let table: toml::Table = text
        .parse()
        .map_err(|error: toml::de::Error| Error::Syntax {
            path: path.to_owned(),
            message: error.to_string().trim_end().to_owned(),
        })?;
    with_table(command, path, table)
}

/// One table: flags of this command, and tables of its subcommands.
fn with_table(mut command: Command, path: &Path, table: toml::Table) -> Result<Command, Error> {
    for (key, value) in table {
        match value {
            toml::Value::Table(inner) if command.find_subcommand(&key).is_some() => {
                let mut failed = None;
                command = command.mut_subcommand(&key, |sub| {
                    with_table(sub, path, inner).unwrap_or_else(|error| {
                        failed = Some(error);
                        // Nobody sees it: the error ends the parsing.
                        Command::new("failed")
                    })
                });
                if let Some(error) = failed {
                    return Err(error);
                }
            }
            value => command = with_default(command, path, &key, &value)?,
        }
    }
    Ok(command)
}

fn with_default(
    command: Command,
    path: &Path,
    key: &str,
    value: &toml::Value,
) -> Result<Command, Error> {
    let id = key.replace('-', "_");
    if !command
        .get_arguments()
        .any(|arg| is_settable(arg) && arg.get_id() == id.as_str())
    {
        return Err(Error::UnknownKey {
            path: path.to_owned(),
            key: key.to_owned(),
            known: known_keys(&command),
        });
    }
    let Some(values) = as_texts(value) else {
        return Err(Error::Type {
            path: path.to_owned(),
            key: key.to_owned(),
            expected: "a text, a number, true or false, or a list of these",
        });
    };
    Ok(command.mut_arg(id, |arg| arg.required(false).default_values(values)))
}

/// How flags read the environment: an empty variable is absent, and flags without a value may
/// be `1`, `yes` or `on` as well as `true`.
fn with_environment(command: Command) -> Command {
    let names: Vec<String> = command
        .get_subcommands()
        .map(|sub| sub.get_name().to_owned())
        .collect();
    let command = command.mut_args(|arg| {
        // clap would take a variable that is set and empty for a value.
        let empty = |name: &OsStr| std::env::var_os(name).is_some_and(|value| value.is_empty());
        let arg = match arg.get_env().is_some_and(empty) {
            true => arg.env(None::<&str>),
            false => arg,
        };
        match arg.get_action() {
            ArgAction::SetTrue => arg.value_parser(switch),
            _ => arg,
        }
    });
    names.into_iter().fold(command, |command, name| {
        command.mut_subcommand(name, with_environment)
    })
}

fn switch(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "yes" | "on" | "1" => Ok(true),
        "false" | "no" | "off" | "0" | "" => Ok(false),
        _ => Err("not one of true, yes, on, 1, false, no, off, 0".to_owned()),
    }
}

fn is_settable(arg: &Arg) -> bool {
    arg.get_long().is_some() && !matches!(arg.get_id().as_str(), "help" | "version" | "config")
}

fn known_keys(command: &Command) -> String {
    let flags = command
        .get_arguments()
        .filter(|arg| is_settable(arg))
        .filter_map(|arg| arg.get_long().map(str::to_owned));
    let tables = command
        .get_subcommands()
        .map(|sub| format!("[{}]", sub.get_name()));
    flags.chain(tables).collect::<Vec<_>>().join(", ")
}

fn as_texts(value: &toml::Value) -> Option<Vec<String>> {
    let scalar = |value: &toml::Value| match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Float(number) => Some(number.to_string()),
        toml::Value::Boolean(flag) => Some(flag.to_string()),
        _ => None,
    };
    match value {
        toml::Value::Array(list) => list.iter().map(scalar).collect(),
        single => scalar(single).map(|text| vec![text]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::CliCommand;

    fn parse_with(file: &str, args: &[&str]) -> Result<Cli, Error> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("baton.toml");
        std::fs::write(&path, file).unwrap();
        let mut all: Vec<OsString> = vec!["baton".into(), "--config".into(), path.into()];
        all.extend(args.iter().map(OsString::from));
        parse(all)
    }

    fn up(cli: Cli) -> crate::cli::UpArgs {
        match cli.command {
            CliCommand::Up(up) => *up,
            _ => panic!("not `up`"),
        }
    }

    #[test]
    fn the_file_gives_defaults_and_a_flag_wins() {
        let file = "[up]\nkv-tokens = 4096\nblock_size = 32\nallow-anonymous = true\n";
        let from_file = up(parse_with(file, &["up"]).unwrap());
        assert_eq!(from_file.engine.kv_tokens, 4096);
        assert_eq!(from_file.engine.block_size, 32);
        assert!(from_file.router.allow_anonymous);
        let with_flag = up(parse_with(file, &["up", "--kv-tokens", "8192"]).unwrap());
        assert_eq!(with_flag.engine.kv_tokens, 8192);
    }

    #[test]
    fn nested_commands_and_required_flags_can_be_given_by_file() {
        let file = "[model.list]\njson = true\n[router]\netcd = [\"http://a:1\", \"http://b:2\"]\n";
        match parse_with(file, &["model", "list"]).unwrap().command {
            CliCommand::Model(crate::cli::ModelCommand::List(list)) => assert!(list.json),
            _ => panic!("not `model list`"),
        }
        match parse_with(file, &["router"]).unwrap().command {
            CliCommand::Router(router) => {
                assert_eq!(router.etcd.etcd, ["http://a:1", "http://b:2"])
            }
            _ => panic!("not `router`"),
        }
        let error = parse_with("[model.list]\njsno = true\n", &["up"]).unwrap_err();
        assert!(error.to_string().contains("jsno"), "{error}");
    }

    #[test]
    fn an_unknown_key_and_a_wrong_value_are_refused_by_name() {
        let error = parse_with("[up]\nkv-toekns = 1\n", &["up"])
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("kv-toekns") && error.contains("kv-tokens"),
            "{error}"
        );
        let error = parse_with("[up]\nblock-size = 24\n", &["up"])
            .unwrap_err()
            .to_string();
        assert!(error.contains("24") && error.contains("128"), "{error}");
        let error = parse_with("[up\n", &["up"]).unwrap_err().to_string();
        assert!(error.contains("baton.toml"), "{error}");
    }
}
