//! A whole cluster on one thread: seeded time, network, crashes, and a model that shows
//! wrong KV as wrong tokens.
//!
//! ```text
//! scenario   what a seed means: workers, clients, faults
//! world      one run of it, and the look at what is left
//! client     sends a request, and knows every token that must come
//! routers    the routers, and which of them is there for a client
//! process    worker processes: started, driven, stalled, killed
//! model      next token = hash of the KV really held, seed and position
//! wire       calls between routers and workers: late, dark, reset, refused
//! tap        reads along on the wire: the trace, and who owns what
//! lanes      turns for the data lanes (`baton_kv_transfer::mem`)
//! store      a membership store that comes and goes
//! trace      what happened, what broke, and its story
//! report     many seeds
//! ```
//!
//! # What is real, and what is not
//! A run is one tokio runtime of one thread whose clock stands still until every task
//! waits, and then moves to the next timer. On it runs the product's own code: the
//! router's front end, admission, driver, request machine, placement and worker following;
//! the workers' gRPC services and request tasks; the engine's inbox, core, scheduler,
//! block pool, prefix cache, sampling and event routes; the whole handoff (sender,
//! receiver, frames, grants, leases); tonic's clients, servers and framing;
//! membership's in-process list and the tracker that follows a store.
//!
//! Running the asynchronous shells, not only the pure machines below them, was chosen
//! because the shells are where cancels, deadlines and streams meet, because it needs
//! no second copy of what they do, and because one idle clock and one queue of tasks
//! make them as repeatable as the machines.
//!
//! In other hands are: HTTP/2 and sockets ([`wire`] carries tonic's bodies), the engine's
//! thread (its loop is cut open, so that time passes between layers), the arithmetic
//! ([`model`]), the lanes' sockets and hello (`mem`), the HTTP and gRPC front doors, the
//! etcd client's leases, TLS, and the processes' start and drain sequence.
//!
//! # Determinism
//! Chance is drawn from the seed ([`baton_proto::environment`], the lanes' environment),
//! work that would leave the runtime's thread stays on it, selects are biased, and nothing
//! iterates in an order of its own. The same seed gives the same trace, line by line; a
//! test says so.
//!
//! # What is checked
//! [`trace::Invariant`] lists it. Blocks are checked after every engine step and at the end,
//! lanes at each access, tokens as clients get them, owners on the wire. To show that it
//! would notice, tests plant each [`baton_proto::environment::Defect`] and ask to be told.

pub mod client;
pub mod lanes;
pub mod model;
pub mod process;
pub mod report;
pub mod routers;
pub mod scenario;
pub mod store;
pub mod tap;
pub mod trace;
pub mod wire;
pub mod world;

pub use baton_proto::environment::Defect;
pub use report::{Broken, Report, Seeds};
pub use world::{Counts, Run, run, run_scenario};
