//! The prefill worker: a prompt in, KV blocks and the first token out.
//!
//! ```text
//! service   gRPC in and out; one task per request
//! request   the life of one request here: queue, compute, ship, commit, un-pin
//! ship      ready layers -> what a lane may read
//! worker    puts engine, sender, server and membership together
//! ```
//!
//! The blocks of a prompt stay pinned until the receiver has them or the attempt is
//! over; then they stay in the prefix cache for the next prompt.

pub mod config;
mod metrics;
mod request;
mod service;
mod ship;
#[cfg(feature = "test-support")]
pub mod simulated;
pub mod worker;

pub use config::PrefillWorkerConfig;
pub use worker::{Error, PrefillWorker};
