//! The core over a deterministic fake model: random traffic against an oracle, and
//! the scenarios that other engines got wrong.
//!
//! These tests were seen to fail on broken builds: without the byte copy of
//! copy-on-write (kept as `a_copy_that_is_not_made_is_noticed`), with `Pools::share`
//! not taking references, with `Pools::unshare` never copying, with a window trimmed
//! one block too early, and with quarantine giving blocks back at once.
#![allow(unsafe_code)]

mod fake;
mod scenarios;
mod threads;
mod traffic;
mod world;
