//! The decode worker: KV blocks in, token streams out.
//!
//! ```text
//! service   gRPC in and out; one task per request
//! request   the life of one request here: reserve, receive, commit, stream, end
//! grant     reserved blocks -> what a lane may write
//! worker    puts engine, receiver, data port, server and membership together
//! ```
//!
//! The worker decides nothing about placement: it reserves or refuses, takes KV or
//! computes it as told, and streams. Text never comes here.

pub mod config;
mod grant;
mod metrics;
mod request;
mod service;
#[cfg(feature = "test-support")]
pub mod simulated;
pub mod worker;

pub use config::DecodeWorkerConfig;
pub use worker::{DecodeWorker, Error};
