//! The workers that a router starts with while the store of memberships cannot be
//! read: those of the last view on disk, and those named by hand.
//!
//! ```text
//! store never read      remembered + seeds, asked who they are once a second; stale
//! read for the first    the store's list, plus for a while those it does not have yet,
//!   time                since their leases may have ended while it was down
//! from then on          the store's list, which is also written to disk
//! ```
//!
//! Nothing here says whether a worker lives: each worker's own stream does, and a
//! remembered one that is gone or in another life is never given work. What is decided
//! is in [`Merge`], without clock or socket. The file is a convenience: one that cannot
//! be read is said and left aside, one that cannot be written costs a warning.

mod file;
mod resolve;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_membership::{Role, View, WorkerRecord};
use baton_proto::{Error, WorkerId, environment};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::workers::Connect;

/// How long workers stay that the store, read for the first time, does not have: they
/// register again within a lease and a back-off.
const HOLD: Duration = Duration::from_secs(15);
/// Between two rounds of asking.
const ASK_INTERVAL: Duration = Duration::from_secs(1);

/// A worker named by hand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seed {
    pub role: Role,
    /// `host:port` of its gRPC services.
    pub address: String,
}

impl Seed {
    /// Reads `ROLE=HOST:PORT`.
    ///
    /// # Errors
    /// [`baton_proto::ErrorKind::Invalid`] naming `worker` and what is allowed.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let wrong = || {
            let message = format!("`{text}` is not prefill=HOST:PORT, decode= or mixed=");
            Error::invalid("worker", message)
        };
        let (role, address) = text.split_once('=').ok_or_else(wrong)?;
        let role = [Role::Prefill, Role::Decode, Role::Mixed]
            .into_iter()
            .find(|known| known.name() == role)
            .ok_or_else(wrong)?;
        let (host, port) = address.rsplit_once(':').ok_or_else(wrong)?;
        if host.is_empty() || !port.parse::<u16>().is_ok_and(|port| port > 0) {
            return Err(wrong());
        }
        Ok(Self {
            role,
            address: address.to_owned(),
        })
    }
}

/// What a router knows of workers when the store does not say.
#[derive(Debug)]
struct Merge {
    known: BTreeMap<WorkerId, WorkerRecord>,
    begun: Instant,
    /// The store was read.
    read: bool,
    hold_until: Option<Instant>,
}

impl Merge {
    fn new(remembered: Vec<WorkerRecord>, begun: Instant) -> Self {
        Self {
            known: remembered
                .into_iter()
                .map(|record| (record.id.clone(), record))
                .collect(),
            begun,
            read: false,
            hold_until: None,
        }
    }

    /// A worker said who it is.
    fn learn(&mut self, record: WorkerRecord) -> bool {
        if self.read {
            return false;
        }
        let known = self.known.insert(record.id.clone(), record.clone());
        known.is_none_or(|known| known != record)
    }

    /// Whether workers still have to be asked who they are.
    fn asks(&self) -> bool {
        !self.read
    }

    /// The view to serve on.
    fn view(&mut self, store: &View, now: Instant) -> View {
        if !self.read && store.stale_since.is_none() {
            self.read = true;
            self.hold_until = Some(now + HOLD);
        }
        if self.hold_until.is_some_and(|until| until <= now) {
            self.hold_until = None;
        }
        let mut view = store.clone();
        if self.read && self.hold_until.is_none() {
            self.known.clear();
            return view;
        }
        let before = view.workers.len();
        for (id, record) in &self.known {
            view.workers
                .entry(id.clone())
                .or_insert_with(|| record.clone());
        }
        if !self.read {
            view.stale_since.get_or_insert(self.begun);
        } else if view.workers.len() > before {
            view.stale_since.get_or_insert(now);
        }
        view
    }
}

/// The settings of a [`LastView`].
pub struct Settings {
    pub seeds: Vec<Seed>,
    /// Where the view is kept.
    pub state_dir: Option<PathBuf>,
    /// The way to workers.
    pub connect: Arc<dyn Connect>,
}

/// Follows a store's view and fills it in.
pub struct LastView {
    settings: Settings,
    merge: Merge,
    store: watch::Receiver<Arc<View>>,
    view: watch::Sender<Arc<View>>,
}

impl LastView {
    /// Reads what is on disk; its view is good at once.
    pub fn open(settings: Settings, store: watch::Receiver<Arc<View>>) -> Self {
        let remembered = match &settings.state_dir {
            Some(folder) => file::read(folder),
            None => Vec::new(),
        };
        let now = tokio::time::Instant::now().into_std();
        let mut merge = Merge::new(remembered, now);
        let first = merge.view(&store.borrow(), now);
        Self {
            settings,
            merge,
            store,
            view: watch::Sender::new(Arc::new(first)),
        }
    }

    /// The view, as [`baton_membership::Membership::watch`] would give it.
    pub fn watch(&self) -> watch::Receiver<Arc<View>> {
        self.view.subscribe()
    }

    /// Follows until `stop`.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut asking: JoinSet<Vec<WorkerRecord>> = JoinSet::new();
        let mut timer = tokio::time::interval(ASK_INTERVAL);
        let mut store_ended = false;
        loop {
            self.publish().await;
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                changed = self.store.changed(), if !store_ended => store_ended = changed.is_err(),
                Some(said) = asking.join_next() => {
                    for record in said.unwrap_or_default() {
                        let (id, epoch) = (record.id.clone(), record.epoch);
                        if self.merge.learn(record) {
                            tracing::info!(worker = %id, %epoch, "worker found without the store");
                        }
                    }
                }
                _ = timer.tick() => {
                    if self.merge.asks() && asking.is_empty() {
                        asking.spawn(resolve::ask(self.addresses(), Arc::clone(&self.settings.connect)));
                    }
                }
            }
        }
    }

    fn addresses(&self) -> Vec<Seed> {
        let mut all = self.settings.seeds.clone();
        for record in self.merge.known.values() {
            if !all.iter().any(|seed| seed.address == record.control) {
                all.push(Seed {
                    role: record.role,
                    address: record.control.clone(),
                });
            }
        }
        all
    }

    /// Hands the view on if it changed, and keeps what the store said.
    async fn publish(&mut self) {
        let store = Arc::clone(&self.store.borrow_and_update());
        let next = self
            .merge
            .view(&store, tokio::time::Instant::now().into_std());
        let stale = next.stale_since.is_some();
        let last = Arc::clone(&self.view.borrow());
        let same = last.workers == next.workers && last.stale_since.is_some() == stale;
        if same {
            return;
        }
        if let Some(folder) = self.settings.state_dir.clone().filter(|_| !stale) {
            let records: Vec<WorkerRecord> = next.workers.values().cloned().collect();
            let written = environment::off_runtime(move || file::write(&folder, &records)).await;
            if let Ok(Err(error)) = written {
                tracing::warn!(%error, "the view of the cluster was not kept on disk");
            }
        }
        self.view.send_replace(Arc::new(next));
    }
}

#[cfg(test)]
mod tests;
