//! How a worker is reached: by a channel of its own, or by what a simulator puts in
//! its place.

use baton_proto::Error;
use baton_proto::transport::{self, TlsSettings};
use tower::ServiceExt as _;
use tower::util::BoxCloneSyncService;

/// Carries the calls to one worker. Cheap to clone.
pub type Channel = BoxCloneSyncService<
    http::Request<tonic::body::Body>,
    http::Response<tonic::body::Body>,
    Broken,
>;

/// Why a call could not be carried. Says what its cause says.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Broken(#[source] pub tower::BoxError);

/// A way to workers.
pub trait Connect: Send + Sync {
    /// A channel to the worker at `address`. Nothing is awaited: a worker that cannot be reached shows
    /// at the first call.
    ///
    /// # Errors
    /// [`baton_proto::ErrorKind::Invalid`] for an address nobody could connect to.
    fn connect(&self, address: &str) -> Result<Channel, Error>;
}

/// Leads nowhere: for a worker whose address is none.
pub(super) fn nowhere(reason: String) -> Channel {
    BoxCloneSyncService::new(tower::service_fn(move |_| {
        let reason: tower::BoxError = reason.clone().into();
        std::future::ready(Err(Broken(reason)))
    }))
}

/// HTTP/2 connections with these TLS settings.
pub struct Over(pub TlsSettings);

impl Connect for Over {
    fn connect(&self, address: &str) -> Result<Channel, Error> {
        let channel = transport::channel(address, &self.0)?;
        Ok(BoxCloneSyncService::new(
            channel.map_err(|error| Broken(error.into())),
        ))
    }
}
