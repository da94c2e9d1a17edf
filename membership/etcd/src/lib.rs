//! A client of etcd's v3 API: keys, transactions, leases, watches, tokens, several members.
//!
//! ```text
//! api      generated from proto/etcd.proto, etcd's own messages
//! connect  endpoints, timeouts, pings, TLS, the token that goes with each call
//! keys     reading, writing, transactions
//! leases   granting, revoking, keeping alive
//! watches  one stream of changes
//! ```
//!
//! Thin on purpose: it retries nothing but a call whose token has ended, keeps no state but
//! that token, and hands out etcd's messages as they are. A call goes to one of the members;
//! waiting and trying again belong to the caller.

mod connect;
mod keys;
mod leases;
mod watches;

pub use connect::{Client, Credentials, Error, Headers, Link, Options};
pub use keys::{ends_with, prefix_end, unchanged_since, under_lease};
pub use leases::KeepAlive;
pub use watches::{WatchFrom, Watching};

/// etcd's messages and services.
#[allow(clippy::all, missing_docs)]
pub mod api {
    tonic::include_proto!("etcdserverpb");
}
