//! One model on one device: model files, KV blocks, schedulers, the decoder, sampling.
//!
//! The engine is synchronous and runs on its own OS threads. A worker talks to it
//! through [`api`]: commands in, events out. It knows nothing of tokio, sockets,
//! text or other workers, and exports no metrics: each step returns its statistics.
//!
//! ```text
//! api        commands and events (what a worker says and hears)
//! engine     the handle: one OS thread around a core; start puts one together
//! routes     events of the engine -> the mailbox of each request
//! core       the loop that owns all sequences: plan -> submit -> poll -> sample
//! scheduler  pure: what the next step computes
//! kv         block pool, block tables, prefix cache, pool memory
//! step       the plan and the result of one step, as plain data
//! step_work  what a step asks of the device: operations and bytes
//! step_time  how long that takes, predicted and calibrated
//! step_clock what the core foretells steps with
//! device     what the engine's threads could do at best, measured
//! decoder    one transformer decoder driven by data, over a backend's operations
//! model      GGUF and safetensors files -> configuration, weights, tokenizer spec
//! sampling   logits -> tokens
//! ```

pub mod api;
pub mod backend;
pub mod config;
pub mod core;
pub mod decoder;
pub mod device;
pub mod engine;
pub mod kv;
pub mod model;
pub mod routes;
pub mod sampling;
pub mod scheduler;
mod start;
pub mod step;
pub mod step_clock;
pub mod step_time;
pub mod step_work;
