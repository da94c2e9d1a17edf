//! The one binary: every role, the model cache, the command line.
//!
//! ```text
//! cli       the flags, which are the typed configuration
//! config    a TOML file's values as the flags' defaults
//! model     short names, files, folders, the hub -> a path
//! cluster   roles put together inside one process
//! commands  what each subcommand does
//! version   what this binary is
//! ```
//!
//! This crate holds wiring only: roles are libraries below it.

pub mod cli;
pub mod cluster;
pub mod commands;
pub mod config;
pub mod model;
pub mod settings;
pub mod version;
