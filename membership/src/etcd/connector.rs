//! One etcd client for all tasks, made when it is first needed.
//!
//! Without credentials connecting is lazy and cannot fail; with them it asks etcd
//! for a token at once. Every call is bounded by the request timeout; h2 pings
//! find a frozen etcd, which would otherwise keep streams open for ever.

use std::future::Future;
use std::time::Duration;

use baton_etcd::{Client, Options};
use tokio::sync::Mutex;
use tonic::Code;
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use super::EtcdConfig;

/// h2 pings on connections with open streams: a dead one is found after 4 s.
const PING_INTERVAL: Duration = Duration::from_secs(2);
const PING_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a call gave nothing.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    #[error("{what}: {source}")]
    Etcd {
        what: &'static str,
        source: baton_etcd::Error,
    },
    #[error("{what}: no answer in {after:?}")]
    Timeout { what: &'static str, after: Duration },
    #[error("{what}: others wrote the same key in between")]
    Contended { what: &'static str },
}

impl CallError {
    /// Whether etcd says that the lease does not exist.
    pub(super) fn is_lease_lost(&self) -> bool {
        match self {
            Self::Etcd { source, .. } => {
                // The only thing that these calls name is a lease.
                matches!(source, baton_etcd::Error::LeaseNotFound)
                    || source.code() == Some(Code::NotFound)
            }
            _ => false,
        }
    }

    /// Whether a new token may help.
    fn is_unauthenticated(&self) -> bool {
        matches!(self, Self::Etcd { source, .. } if source.code() == Some(Code::Unauthenticated))
    }
}

pub(super) struct Connector {
    endpoints: Vec<String>,
    options: Options,
    request_timeout: Duration,
    client: Mutex<Option<Client>>,
}

impl Connector {
    pub(super) fn new(config: &EtcdConfig) -> Self {
        let mut tls = ClientTlsConfig::new();
        let given = config.tls.clone().unwrap_or_default();
        if let Some(ca) = given.ca_pem {
            tls = tls.ca_certificate(Certificate::from_pem(ca));
        }
        if let Some((certificate, key)) = given.identity_pem {
            tls = tls.identity(Identity::from_pem(certificate, key));
        }
        if let Some(domain) = given.domain {
            tls = tls.domain_name(domain);
        }
        let options = Options {
            connect_timeout: Some(config.connect_timeout),
            request_timeout: Some(config.request_timeout),
            ping: Some((PING_INTERVAL, PING_TIMEOUT)),
            require_leader: true,
            credentials: config.credentials.clone(),
            tls: Some(tls),
        };
        Self {
            endpoints: config.endpoints.clone(),
            options,
            request_timeout: config.request_timeout,
            client: Mutex::new(None),
        }
    }

    /// The client, connected if it was not.
    pub(super) async fn client(&self) -> Result<Client, CallError> {
        let mut slot = self.client.lock().await;
        if let Some(client) = &*slot {
            return Ok(client.clone());
        }
        let connect = Client::connect(&self.endpoints, self.options.clone());
        let client = self.call("connect to etcd", connect).await?;
        *slot = Some(client.clone());
        Ok(client)
    }

    /// Bounds one call.
    pub(super) async fn call<T>(
        &self,
        what: &'static str,
        call: impl Future<Output = Result<T, baton_etcd::Error>>,
    ) -> Result<T, CallError> {
        bounded(what, self.request_timeout, call).await
    }

    /// How long a call that failed may be tried again: not at all where there is no other member.
    pub(super) fn patience(&self) -> Duration {
        if self.endpoints.len() > 1 {
            self.request_timeout
        } else {
            Duration::ZERO
        }
    }

    /// After a failure: makes the next [`Connector::client`] log in again if that may help.
    pub(super) async fn note(&self, error: &CallError) {
        if error.is_unauthenticated() {
            *self.client.lock().await = None;
        }
    }
}

/// Bounds a call by `after`.
pub(super) async fn bounded<T>(
    what: &'static str,
    after: Duration,
    call: impl Future<Output = Result<T, baton_etcd::Error>>,
) -> Result<T, CallError> {
    match tokio::time::timeout(after, call).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(source)) => Err(CallError::Etcd { what, source }),
        Err(_) => Err(CallError::Timeout { what, after }),
    }
}
