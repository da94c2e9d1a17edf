//! Who is let in: bounds on requests and prompt tokens, refused at once when full.
//!
//! Nothing waits here; workers queue, and refuse, by what they really have. This
//! bounds what a router holds: requests in flight in all and per tenant, and
//! requests (by count and by prompt tokens) that have no first token yet, of which one
//! tenant gets its [share]. A refusal says when to come back: after as long as the
//! prompts that wait need at the pace of the last seconds.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use baton_observability::RouterMetrics;
use baton_proto::{Error, ErrorKind, share};
use tokio::time::Instant;

use crate::auth::Tenant;
use crate::config::RouterConfig;

/// What is in flight.
#[derive(Debug, Default)]
struct Counts {
    requests: u32,
    pending_requests: u32,
    pending_tokens: u64,
    tenants: HashMap<String, OfTenant>,
    pace: Pace,
}

/// What one tenant has in flight.
#[derive(Debug, Default)]
struct OfTenant {
    requests: u32,
    pending_requests: u32,
    pending_tokens: u64,
}

/// Prompt tokens that got their first answer, over the last one or two spans.
#[derive(Debug, Default)]
struct Pace {
    span: Option<Instant>,
    tokens: u64,
    before: Option<u64>,
}

const SPAN: Duration = Duration::from_secs(2);

impl Pace {
    fn started(&mut self, tokens: u64, now: Instant) {
        self.turn(now);
        self.tokens += tokens;
    }

    fn turn(&mut self, now: Instant) {
        let since = *self.span.get_or_insert(now);
        let passed = now.saturating_duration_since(since);
        if passed >= SPAN {
            let tokens = std::mem::take(&mut self.tokens);
            self.before = (passed < 2 * SPAN).then_some(tokens);
            self.span = Some(now);
        }
    }

    /// When `waiting` tokens will have had their turn.
    fn wait(&mut self, waiting: u64, now: Instant) -> Duration {
        self.turn(now);
        let since = self.span.map_or(Duration::ZERO, |since| now - since);
        let (tokens, time) = match self.before {
            Some(before) => (self.tokens + before, since + SPAN),
            None => (self.tokens, since),
        };
        if tokens == 0 || time < RETRY_AFTER {
            return RETRY_AFTER;
        }
        let seconds = waiting as f64 * time.as_secs_f64() / tokens as f64;
        Duration::from_secs_f64(seconds.min(60.0)).clamp(RETRY_AFTER_RANGE.0, RETRY_AFTER_RANGE.1)
    }
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

/// When to come back where nothing is known of the pace.
const RETRY_AFTER: Duration = Duration::from_secs(1);
const RETRY_AFTER_RANGE: (Duration, Duration) =
    (Duration::from_millis(100), Duration::from_secs(30));

impl Counts {
    fn full(&mut self, reason: &str, message: String) -> Error {
        let wait = self.pace.wait(self.pending_tokens, Instant::now());
        Error::new(ErrorKind::Overloaded, message)
            .with_reason(reason)
            .with_retry_after(wait)
    }
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
            return Err(counts.full("REQUESTS_FULL", message));
        }
        if counts.pending_requests >= shared.pending_requests_max {
            let message = format!("{} requests wait, the most", counts.pending_requests);
            return Err(counts.full("QUEUE_FULL", message));
        }
        let own = counts.tenants.get(&tenant.name);
        let (requests, pending) = own.map_or((0, 0), |own| (own.requests, own.pending_requests));
        let name = &tenant.name;
        if requests >= shared.tenant_requests_max {
            let message = format!("tenant `{name}` has {requests} requests in flight, the most");
            return Err(counts.full("TENANT_REQUESTS_FULL", message));
        }
        let (held, max) = (counts.pending_requests, shared.pending_requests_max);
        if !share::may_hold(pending.into(), 1, held.into(), max.into()) {
            let message = format!(
                "{pending} requests of tenant `{name}` wait, its share of the {max} places"
            );
            return Err(counts.full("TENANT_SHARE_FULL", message));
        }
        counts.requests += 1;
        counts.pending_requests += 1;
        let own = counts.tenants.entry(tenant.name.clone()).or_default();
        own.requests += 1;
        own.pending_requests += 1;
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
        let max = self.shared.pending_tokens_max;
        if waiting > 0 && waiting.saturating_add(tokens) > max {
            let message = format!("{waiting} prompt tokens wait, {tokens} more would pass {max}");
            return Err(counts.full("QUEUE_TOKENS_FULL", message));
        }
        let own = counts
            .tenants
            .get(&self.tenant)
            .map_or(0, |own| own.pending_tokens);
        if !share::may_hold(own, tokens, waiting, max) {
            let message = format!(
                "{own} prompt tokens of tenant `{}` wait, {tokens} more would pass its share of {max}",
                self.tenant
            );
            return Err(counts.full("TENANT_SHARE_FULL", message));
        }
        counts.pending_tokens += tokens;
        if let Some(own) = counts.tenants.get_mut(&self.tenant) {
            own.pending_tokens += tokens;
        }
        self.tokens += tokens;
        self.shared.publish(&counts);
        Ok(())
    }

    /// The first token is out: the request no longer waits.
    pub fn started(&mut self) {
        self.waits_no_more(true);
    }

    /// Said with every token: only the first time costs anything.
    fn waits_no_more(&mut self, started: bool) {
        if std::mem::take(&mut self.pending) {
            let tokens = std::mem::take(&mut self.tokens);
            let mut counts = self.shared.lock();
            if started {
                counts.pace.started(tokens, Instant::now());
            }
            counts.pending_requests -= 1;
            counts.pending_tokens -= tokens;
            if let Some(own) = counts.tenants.get_mut(&self.tenant) {
                own.pending_requests -= 1;
                own.pending_tokens -= tokens;
            }
            self.shared.publish(&counts);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.waits_no_more(false);
        let mut counts = self.shared.lock();
        counts.requests -= 1;
        if let Some(own) = counts.tenants.get_mut(&self.tenant) {
            own.requests -= 1;
            if own.requests == 0 {
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
    fn one_tenant_never_fills_the_queue_for_the_others() {
        let (greedy, other) = (Tenant::new("greedy"), Tenant::new("other"));
        let (admission, _) = admission(|c| {
            c.pending_requests_max = 100;
            c.pending_tokens_max = 1000;
        });
        let mut held = Vec::new();
        let refused = loop {
            match admission.enter(&greedy) {
                Ok(mut permit) => match permit.charge(20) {
                    Ok(()) => held.push(permit),
                    Err(error) => break error,
                },
                Err(error) => break error,
            }
        };
        assert_eq!(refused.reason, "TENANT_SHARE_FULL");
        assert_eq!(held.len(), 40, "four fifths of the tokens");
        admission.enter(&other).unwrap().charge(20).unwrap();
    }

    #[test]
    fn a_refusal_says_when_the_prompts_that_wait_will_have_started() {
        let mut pace = Pace::default();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(pace.wait(750, at(0)), RETRY_AFTER, "nothing is known yet");
        for step in 0..30 {
            pace.started(50, at(step * 100));
        }
        // 500 tokens a second.
        let seconds = pace.wait(750, at(3000)).as_secs_f64();
        assert!((1.3..1.7).contains(&seconds), "{seconds}");
        assert_eq!(pace.wait(1, at(3000)), RETRY_AFTER_RANGE.0);
        assert_eq!(pace.wait(u64::MAX, at(3000)), RETRY_AFTER_RANGE.1);
        // Long ago says nothing.
        assert_eq!(pace.wait(750, at(60_000)), RETRY_AFTER);
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
