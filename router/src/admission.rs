//! Who is let in: bounds on requests and prompt tokens, refused at once when full.
//!
//! Nothing waits here; workers queue, and refuse, by what they really have. This
//! bounds what a router holds: requests in flight in all and per tenant, and
//! requests (by count and by prompt tokens) that have no first token yet. A
//! refusal says when to come back.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use baton_observability::RouterMetrics;
use baton_proto::{Error, ErrorKind};

use crate::auth::Tenant;
use crate::config::RouterConfig;

/// What is in flight.
#[derive(Debug, Default)]
struct Counts {
    requests: u32,
    pending_requests: u32,
    pending_tokens: u64,
    tenants: HashMap<String, u32>,
}

/// The bounds and what is in flight. Cheap to clone.
#[derive(Clone)]
pub struct Admission {
    shared: Arc<Shared>,
}

struct Shared {
    counts: Mutex<Counts>,
    requests_max: u32,
    pending_requests_max: u32,
    pending_tokens_max: u64,
    tenant_requests_max: u32,
    metrics: RouterMetrics,
}

/// When to come back: a request in front needs about this long to get its first token.
const RETRY_AFTER: Duration = Duration::from_secs(1);

fn full(reason: &str, message: String) -> Error {
    Error::new(ErrorKind::Overloaded, message)
        .with_reason(reason)
        .with_retry_after(RETRY_AFTER)
}

impl Admission {
    /// An empty house.
    pub fn new(config: &RouterConfig, metrics: RouterMetrics) -> Self {
        Self {
            shared: Arc::new(Shared {
                counts: Mutex::default(),
                requests_max: config.requests_max,
                pending_requests_max: config.pending_requests_max,
                pending_tokens_max: config.pending_tokens_max,
                tenant_requests_max: config.tenant_requests_max,
                metrics,
            }),
        }
    }

    /// Lets a request in, or not.
    ///
    /// # Errors
    /// [`ErrorKind::Overloaded`] with a retry hint; the reason names the bound.
    pub fn enter(&self, tenant: &Tenant) -> Result<Permit, Error> {
        let shared = &self.shared;
        let mut counts = shared.lock();
        if counts.requests >= shared.requests_max {
            let message = format!("{} requests are in flight, the most", counts.requests);
            return Err(full("REQUESTS_FULL", message));
        }
        if counts.pending_requests >= shared.pending_requests_max {
            let message = format!("{} requests wait, the most", counts.pending_requests);
            return Err(full("QUEUE_FULL", message));
        }
        let of_tenant = counts.tenants.get(&tenant.name).copied().unwrap_or(0);
        if of_tenant >= shared.tenant_requests_max {
            let message = format!(
                "tenant `{}` has {of_tenant} requests in flight, the most",
                tenant.name
            );
            return Err(full("TENANT_REQUESTS_FULL", message));
        }
        counts.requests += 1;
        counts.pending_requests += 1;
        *counts.tenants.entry(tenant.name.clone()).or_default() += 1;
        shared.publish(&counts);
        Ok(Permit {
            shared: Arc::clone(shared),
            tenant: tenant.name.clone(),
            tokens: 0,
            pending: true,
        })
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(&self, counts: &Counts) {
        let metrics = &self.metrics;
        metrics.requests_in_flight.set(i64::from(counts.requests));
        metrics
            .queue_requests
            .set(i64::from(counts.pending_requests));
        let tokens = i64::try_from(counts.pending_tokens).unwrap_or(i64::MAX);
        metrics.queue_tokens.set(tokens);
    }
}

/// A request's place; gives it back when dropped.
pub struct Permit {
    shared: Arc<Shared>,
    tenant: String,
    tokens: u64,
    pending: bool,
}

impl Permit {
    /// Counts the request's prompt tokens.
    ///
    /// # Errors
    /// [`ErrorKind::Overloaded`] when too many wait. A prompt is let in when
    /// nothing else waits, however long it is.
    pub fn charge(&mut self, tokens: u64) -> Result<(), Error> {
        let mut counts = self.shared.lock();
        let waiting = counts.pending_tokens;
        if waiting > 0 && waiting.saturating_add(tokens) > self.shared.pending_tokens_max {
            let message = format!(
                "{waiting} prompt tokens wait, {tokens} more would pass {}",
                self.shared.pending_tokens_max
            );
            return Err(full("QUEUE_TOKENS_FULL", message));
        }
        counts.pending_tokens += tokens;
        self.tokens += tokens;
        self.shared.publish(&counts);
        Ok(())
    }

    /// The first token is out: the request no longer waits.
    pub fn started(&mut self) {
        if std::mem::take(&mut self.pending) {
            let mut counts = self.shared.lock();
            counts.pending_requests -= 1;
            counts.pending_tokens -= std::mem::take(&mut self.tokens);
            self.shared.publish(&counts);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.started();
        let mut counts = self.shared.lock();
        counts.requests -= 1;
        if let Some(of_tenant) = counts.tenants.get_mut(&self.tenant) {
            *of_tenant -= 1;
            if *of_tenant == 0 {
                counts.tenants.remove(&self.tenant);
            }
        }
        self.shared.publish(&counts);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_observability::Registry;

    fn admission(change: impl FnOnce(&mut RouterConfig)) -> (Admission, RouterMetrics) {
        let mut config = RouterConfig::default();
        change(&mut config);
        let metrics = RouterMetrics::new(&mut Registry::default());
        (Admission::new(&config, metrics.clone()), metrics)
    }

    fn reason<T>(result: Result<T, Error>) -> String {
        let error = result.err().expect("refused");
        assert_eq!(error.kind, ErrorKind::Overloaded);
        assert!(error.retry_after.is_some());
        error.reason
    }

    #[test]
    fn each_bound_refuses_by_its_own_reason_and_a_place_comes_back() {
        let (a, b) = (Tenant::new("a"), Tenant::new("b"));
        let (admission, metrics) = admission(|c| {
            c.requests_max = 3;
            c.pending_requests_max = 2;
            c.tenant_requests_max = 2;
        });
        let mut first = admission.enter(&a).unwrap();
        let mut second = admission.enter(&a).unwrap();
        assert_eq!(reason(admission.enter(&b)), "QUEUE_FULL");
        first.started();
        second.started();
        assert_eq!(reason(admission.enter(&a)), "TENANT_REQUESTS_FULL");
        let third = admission.enter(&b).unwrap();
        assert_eq!(reason(admission.enter(&b)), "REQUESTS_FULL");
        assert_eq!(metrics.requests_in_flight.get(), 3);
        drop((first, second, third));
        assert_eq!(metrics.requests_in_flight.get(), 0);
        assert_eq!(metrics.queue_requests.get(), 0);
        admission.enter(&a).unwrap();
    }

    #[test]
    fn tokens_are_bounded_but_one_long_prompt_alone_gets_in() {
        let (admission, metrics) = admission(|c| c.pending_tokens_max = 100);
        let mut long = admission.enter(&Tenant::new("a")).unwrap();
        long.charge(1000).unwrap();
        let mut short = admission.enter(&Tenant::new("a")).unwrap();
        assert_eq!(reason(short.charge(1)), "QUEUE_TOKENS_FULL");
        long.started();
        assert_eq!(metrics.queue_tokens.get(), 0);
        short.charge(100).unwrap();
        drop(short);
        assert_eq!(metrics.queue_tokens.get(), 0);
    }
}
