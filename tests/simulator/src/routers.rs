//! The routers of a run, and which of them is there for a client.
//!
//! A killed router is cut off from workers and clients alike; what is left of its tasks
//! reaches nobody. Clients go on at another one, or at the next life of the same.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use baton_membership::InProcess;
use baton_observability::labels::{RetryWhen, Success};
use baton_router::{Frontend, Router, RouterConfig};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::store::{Following, Store};
use crate::trace::Trace;
use crate::wire::{self, Wire};

/// One life of one router.
struct Life {
    router: Router,
    dead: CancellationToken,
}

/// All routers, dead ones too.
pub struct Routers {
    wire: Arc<Wire>,
    store: Arc<Store>,
    cluster: InProcess,
    config: RouterConfig,
    trace: Trace,
    alive: Mutex<BTreeMap<u32, Life>>,
    dead: Mutex<Vec<Router>>,
    started: Notify,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Routers {
    /// None yet.
    pub fn new(
        wire: Arc<Wire>,
        store: Arc<Store>,
        cluster: InProcess,
        config: RouterConfig,
        trace: Trace,
    ) -> Self {
        Self {
            wire,
            store,
            cluster,
            config,
            trace,
            alive: Mutex::default(),
            dead: Mutex::default(),
            started: Notify::new(),
        }
    }

    /// Starts a router that knows nothing yet.
    pub fn start(&self, number: u32) {
        let following = Following::start(Arc::clone(&self.store), self.cluster.clone());
        let connect = wire::Router {
            wire: Arc::clone(&self.wire),
            number,
        };
        let router = Router::start_over(self.config.clone(), following, Arc::new(connect))
            .expect("a scenario's settings are right");
        self.trace.note(Some(&name(number)), "starts");
        let life = Life {
            router,
            dead: CancellationToken::new(),
        };
        lock(&self.alive).insert(number, life);
        self.started.notify_waiters();
    }

    /// Ends a router without a word; false if it is away already.
    pub fn kill(&self, number: u32) -> bool {
        let Some(life) = lock(&self.alive).remove(&number) else {
            return false;
        };
        self.trace.note(Some(&name(number)), "is killed");
        self.wire.kill_router(number);
        life.dead.cancel();
        // Dropped, it would end its requests in order.
        lock(&self.dead).push(life.router);
        true
    }

    /// The router `number`, or another one; waits while none is there. Cancelled is the
    /// token when it dies.
    pub async fn pick(&self, number: u32) -> (u32, Frontend, CancellationToken) {
        loop {
            let started = self.started.notified();
            tokio::pin!(started);
            started.as_mut().enable();
            {
                let alive = lock(&self.alive);
                let own = alive.get_key_value(&number);
                if let Some((number, life)) = own.or_else(|| alive.first_key_value()) {
                    return (*number, life.router.frontend(), life.dead.clone());
                }
            }
            started.await;
        }
    }

    /// The front ends of those that live.
    pub fn frontends(&self) -> Vec<Frontend> {
        let alive = lock(&self.alive);
        alive.values().map(|life| life.router.frontend()).collect()
    }

    /// Requests that living routers count as in flight.
    pub fn requests_in_flight(&self) -> i64 {
        let frontends = self.frontends();
        let counts = frontends
            .iter()
            .map(|f| f.metrics().requests_in_flight.get());
        counts.sum()
    }

    /// Placements after the first, of every router that ever was.
    pub fn retries(&self) -> u64 {
        self.sum(|frontend| {
            let mut retries = 0;
            for when in RetryWhen::ALL {
                for success in Success::ALL {
                    retries += frontend.metrics().retries.get((*when, *success)).get();
                }
            }
            retries
        })
    }

    /// Times that workers contradicted each other.
    pub fn conflicts(&self) -> u64 {
        self.sum(|frontend| frontend.metrics().token_conflicts.get())
    }

    fn sum(&self, of: impl Fn(&Frontend) -> u64) -> u64 {
        let dead: Vec<Frontend> = lock(&self.dead).iter().map(Router::frontend).collect();
        self.frontends().iter().chain(&dead).map(of).sum()
    }

    /// Stops those that live, in order.
    pub async fn stop(&self) {
        let alive = std::mem::take(&mut *lock(&self.alive));
        for life in alive.into_values() {
            life.router.stop().await;
        }
    }
}

fn name(number: u32) -> String {
    format!("router-{number}")
}
