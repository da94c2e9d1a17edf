//! What the whole-cluster tests share.
//!
//! ```text
//! models    the fixtures and the real models, loaded once per process
//! oracle    one engine, batch 1, no cache, no chunks, no split: what is right
//! cluster   a cluster inside this process and its counters
//! client    requests in, whole outputs out
//! front     a prefill worker behind a door that refuses some prompts
//! doors     a cluster whose front doors are open
//! etcd      a real etcd: stopped, emptied, frozen, asked, written to
//! http      an HTTP client and a strict reader of event streams
//! pace      time without the gaps of a busy machine
//! link      a TCP link that can be slow or hold everything
//! process   a real etcd, real `baton` processes
//! transcript  everything a client sees of a stream, broken off and resumed
//! ```

pub mod client;
pub mod cluster;
pub mod doors;
pub mod etcd;
pub mod front;
pub mod http;
pub mod link;
pub mod models;
pub mod oracle;
pub mod pace;
pub mod process;
pub mod transcript;
