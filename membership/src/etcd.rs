//! Membership in etcd: a lease per worker, a watch per follower.
//!
//! What etcd does when it is killed, frozen, compacted or emptied was measured
//! (etcd 3.4): a watch or a keepalive stream that broke never comes back, a unary
//! call fails at once, the channel reconnects by itself, a restarted etcd starts
//! the clocks of its leases anew. So both loops make new streams after every
//! trouble, and waiting is ours ([`crate::backoff`]).
//!
//! Every background task belongs to [`Etcd`]: [`Membership::close`] cancels and
//! joins them. Dropping the last clone without closing cancels them.

mod connector;
mod follower;
mod keepalive;
mod lease;
mod ownership;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
pub use baton_etcd::Credentials;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::record::{Keyspace, WorkerRecord};
use crate::registration::Registration;
use crate::view::{Grace, Tracker, View};
use crate::{Error, Health, Membership};
use connector::Connector;

/// How to reach etcd and what to call the cluster.
#[derive(Clone, Debug)]
pub struct EtcdConfig {
    /// URLs, `http://` or `https://`; any member of the etcd cluster.
    pub endpoints: Vec<String>,
    pub cluster: String,
    /// Rollout generation; workers of different ones do not see each other.
    pub generation: String,
    /// How long a worker that cannot reach etcd stays listed at least; by how much longer it may
    /// be stands with the lease. Whole seconds; etcd's least is 2.
    pub ttl: Duration,
    pub credentials: Option<Credentials>,
    pub tls: Option<TlsConfig>,
    pub connect_timeout: Duration,
    /// For each call; also how long [`Registration::update`] and `leave` wait.
    pub request_timeout: Duration,
    /// How often the full list is read again, to repair what a watch lost.
    pub relist_interval: Duration,
    /// How long workers stay that etcd lost while it could not be reached, and
    /// while it lost its data: the time they have to register again.
    pub grace: Grace,
    #[doc(hidden)]
    pub faults: Faults,
}

impl EtcdConfig {
    /// The defaults: TTL 5 s, calls 3 s, a full list every 30 s.
    pub fn new(endpoints: Vec<String>, cluster: impl Into<String>) -> Self {
        Self {
            endpoints,
            cluster: cluster.into(),
            generation: "0".to_owned(),
            ttl: Duration::from_secs(5),
            credentials: None,
            tls: None,
            connect_timeout: Duration::from_secs(2),
            request_timeout: Duration::from_secs(3),
            relist_interval: Duration::from_secs(30),
            grace: Grace {
                outage: Duration::from_secs(1),
                reset: Duration::from_secs(15),
            },
            faults: Faults::default(),
        }
    }

    fn validate(&self) -> Result<Keyspace, Error> {
        if self.endpoints.is_empty() {
            return Err(Error::invalid("etcd.endpoints", "no endpoint is given"));
        }
        for endpoint in &self.endpoints {
            let rest = endpoint
                .strip_prefix("http://")
                .or_else(|| endpoint.strip_prefix("https://"));
            if rest.is_none_or(str::is_empty) {
                return Err(Error::invalid(
                    "etcd.endpoints",
                    format!("`{endpoint}` does not begin with http:// or https://"),
                ));
            }
        }
        if self.tls.is_some() && self.endpoints.iter().any(|one| one.starts_with("http://")) {
            return Err(Error::invalid(
                "etcd.tls",
                "is set, but an endpoint begins with http://",
            ));
        }
        if self.ttl < Duration::from_secs(1) || self.ttl > Duration::from_secs(3600) {
            return Err(Error::invalid(
                "etcd.ttl",
                format!("{:?} is not in 1 s..=1 h", self.ttl),
            ));
        }
        for (field, value) in [
            ("etcd.connect_timeout", self.connect_timeout),
            ("etcd.request_timeout", self.request_timeout),
            ("etcd.relist_interval", self.relist_interval),
        ] {
            if value < Duration::from_millis(10) {
                return Err(Error::invalid(field, format!("{value:?} is below 10 ms")));
            }
        }
        Keyspace::new(&self.cluster, &self.generation)
    }
}

/// Faults that a test cannot cause from outside.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// The watch does not report deletes.
    pub lose_deletes: bool,
    /// The first watch starts here and not after its list.
    pub first_watch_revision: Option<i64>,
}

/// TLS to etcd; PEM texts, not paths.
#[derive(Clone, Default)]
pub struct TlsConfig {
    /// Who signed etcd's certificate.
    pub ca_pem: Option<String>,
    /// Our certificate and key, if etcd asks for them.
    pub identity_pem: Option<(String, String)>,
    /// The name in etcd's certificate, if it is not the endpoint's host.
    pub domain: Option<String>,
}

impl std::fmt::Debug for TlsConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TlsConfig")
            .field("ca_pem", &self.ca_pem.is_some())
            .field("identity_pem", &self.identity_pem.is_some())
            .field("domain", &self.domain)
            .finish()
    }
}

/// Membership in etcd.
pub struct Etcd {
    config: EtcdConfig,
    keys: Keyspace,
    connector: Arc<Connector>,
    view: watch::Receiver<Arc<View>>,
    health: Arc<Mutex<Health>>,
    shutdown: CancellationToken,
    tasks: TaskTracker,
}

impl Etcd {
    /// Starts to follow the cluster. Does not wait for etcd: until it answers the
    /// view is empty and stale. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the wrong option.
    pub fn start(config: EtcdConfig) -> Result<Self, Error> {
        let keys = config.validate()?;
        let connector = Arc::new(Connector::new(&config));
        let tracker = Tracker::new(keys.clone(), config.grace, Instant::now());
        let (sender, view) = watch::channel(Arc::new(View {
            stale_since: Some(Instant::now()),
            ..View::default()
        }));
        let health = Arc::new(Mutex::new(Health::default()));
        let (shutdown, tasks) = (CancellationToken::new(), TaskTracker::new());
        tasks.spawn(
            follower::Follower {
                connector: Arc::clone(&connector),
                prefix: keys.prefix().to_owned(),
                relist_interval: config.relist_interval,
                request_timeout: config.request_timeout,
                faults: config.faults,
                tracker,
                view: sender,
                health: Arc::clone(&health),
                shutdown: shutdown.clone(),
            }
            .run(),
        );
        Ok(Self {
            config,
            keys,
            connector,
            view,
            health,
            shutdown,
            tasks,
        })
    }
}

#[async_trait]
impl Membership for Etcd {
    async fn register(&self, record: WorkerRecord) -> Result<Registration, Error> {
        record.validate()?;
        if self.shutdown.is_cancelled() {
            return Err(Error::Closed);
        }
        let key = self.keys.key(record.role, &record.id);
        let cancel = self.shutdown.child_token();
        let (task, handle) = lease::LeaseTask::new(
            Arc::clone(&self.connector),
            &self.config,
            key,
            record.clone(),
            cancel,
        );
        let state = task.watch_state();
        let handle = handle.spawned(self.tasks.spawn(task.run()));
        Ok(Registration::new(record, state, Box::new(handle)))
    }

    fn watch(&self) -> watch::Receiver<Arc<View>> {
        self.view.clone()
    }

    fn health(&self) -> Health {
        self.health
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    async fn close(&self) {
        self.shutdown.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn wrong_options_are_refused_by_name() {
        let refused = |change: fn(&mut EtcdConfig)| {
            let mut config = EtcdConfig::new(vec!["http://127.0.0.1:1".to_owned()], "c");
            change(&mut config);
            match Etcd::start(config).err() {
                Some(Error::Invalid { field, .. }) => field,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(refused(|c| c.endpoints.clear()), "etcd.endpoints");
        assert_eq!(
            refused(|c| c.endpoints[0] = "127.0.0.1:1".to_owned()),
            "etcd.endpoints"
        );
        assert_eq!(refused(|c| c.tls = Some(TlsConfig::default())), "etcd.tls");
        assert_eq!(refused(|c| c.ttl = Duration::ZERO), "etcd.ttl");
        assert_eq!(refused(|c| c.cluster = "a/b".to_owned()), "cluster");
        assert_eq!(refused(|c| c.generation.clear()), "generation");
        assert_eq!(
            refused(|c| c.relist_interval = Duration::ZERO),
            "etcd.relist_interval"
        );
    }

    #[test]
    fn secrets_are_not_printed() {
        let mut config = EtcdConfig::new(vec!["http://127.0.0.1:1".to_owned()], "c");
        config.credentials = Some(Credentials {
            user: "u".to_owned(),
            password: "hunter2".to_owned(),
        });
        assert!(!format!("{config:?}").contains("hunter2"));
    }
}
