//! How a process joins a cluster, is seen, drains and leaves.
//!
//! A worker registers a [`WorkerRecord`]; routers follow the [`View`] of all of
//! them. Three kinds behind one trait: [`InProcess`] (one process holds all
//! roles, and tests), [`Static`] (a fixed list), [`Etcd`] (a lease and a watch).
//!
//! What is decided stands in pure code without clock or socket ([`record`],
//! [`view`], [`backoff`]); [`Etcd`] is the shell around it. Load is not in here:
//! routers hear it from workers directly, and a worker's death too, long before
//! a lease ends. A store that cannot be reached is *unknown*, never "all workers
//! are gone".

use std::sync::Arc;

use async_trait::async_trait;
use baton_proto::{Epoch, ErrorKind, WorkerId};
use tokio::sync::watch;

pub mod backoff;
#[cfg(feature = "etcd")]
pub mod etcd;
pub mod in_process;
pub mod record;
pub mod registration;
pub mod static_list;
pub mod view;

#[cfg(feature = "etcd")]
pub use etcd::{Credentials, Etcd, EtcdConfig, TlsConfig};
pub use in_process::InProcess;
pub use record::{Capacity, Keyspace, Role, WorkerRecord, WorkerState};
pub use registration::{Registration, RegistrationState};
pub use static_list::Static;
pub use view::{Change, Grace, View, diff};

/// Joining and following a cluster.
#[async_trait]
pub trait Membership: Send + Sync {
    /// Starts to publish `record`, and keeps it published until the handle leaves or is dropped.
    ///
    /// Returns as soon as the record is checked: with a store that is down the
    /// worker is published when it is back. [`Registration::registered`] waits for that.
    ///
    /// # Errors
    /// [`Error::Invalid`] names a wrong field, [`Error::Closed`] after [`Membership::close`].
    async fn register(&self, record: WorkerRecord) -> Result<Registration, Error>;

    /// The latest view, and a wake-up at each change. Before the first list it is
    /// empty and marked stale.
    fn watch(&self) -> watch::Receiver<Arc<View>>;

    /// How the connection to the store fares.
    fn health(&self) -> Health;

    /// Ends every background task (registrations are released) and waits for them.
    async fn close(&self);
}

/// How the connection to the store fares, for readiness and for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// The view is up to date as far as can be known.
    pub fresh: bool,
    /// Why not, or what went wrong last.
    pub last_error: Option<String>,
    /// Full lists read since the start. Bounded by the back-off, whatever fails.
    pub lists: u64,
    /// Watches opened since the start.
    pub watches: u64,
    /// Differences that a periodic list found and the watch had missed.
    pub repairs: u64,
}

/// What can go wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A record or option is wrong; trying again cannot help.
    #[error("`{field}`: {message}")]
    Invalid { field: String, message: String },
    /// Another process registered under the same id later. This one is no longer
    /// listed and should stop; restarting it takes the id back.
    #[error("worker `{id}` was taken over by epoch {by}")]
    Superseded { id: WorkerId, by: Epoch },
    /// The store did not answer in time; the background task keeps trying.
    #[error("{what}: {message}")]
    Unavailable { what: &'static str, message: String },
    /// [`Membership::close`] was called.
    #[error("membership is closed")]
    Closed,
}

impl Error {
    pub(crate) fn invalid(field: &str, message: impl Into<String>) -> Self {
        Self::Invalid {
            field: field.to_owned(),
            message: message.into(),
        }
    }

    /// What the caller should do.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Invalid { .. } => ErrorKind::Invalid,
            Self::Superseded { .. } => ErrorKind::Fenced,
            Self::Unavailable { .. } | Self::Closed => ErrorKind::Unavailable,
        }
    }
}

impl From<Error> for baton_proto::Error {
    fn from(error: Error) -> Self {
        let field = match &error {
            Error::Invalid { field, .. } => field.clone(),
            _ => String::new(),
        };
        let message = match &error {
            Error::Invalid { message, .. } => message.clone(),
            other => other.to_string(),
        };
        Self::new(error.kind(), message).with_field(field)
    }
}
