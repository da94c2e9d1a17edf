//! The core over a deterministic fake model: random traffic against an oracle, and
//! the scenarios that other engines got wrong.
//!
//! These tests were seen to fail on broken builds: without the byte copy of
//! copy-on-write (kept as `a_copy_that_is_not_made_is_noticed`), with `Pools::share`
//! taking no references, with `Pools::unshare` never copying or not minding pins, with
//! a window trimmed 16 positions early, with a cancelled reservation that is not
//! quarantined and with one whose blocks are free at once. The random traffic alone
//! noticed each of them.
#![allow(unsafe_code)]

mod client;
mod fake;
mod machine;
mod pace;
mod peers;
mod pools;
mod scenarios;
mod threads;
mod traffic;
mod world;
