//! A worker's loop: hold a lease, keep the record under it, notice when either is gone.
//!
//! ```text
//!  ┌─► attach: keep the old lease alive, or grant a new one
//!  │     │
//!  │   claim: write the record if the key is free, ours, or (the first time) a former life's
//!  │     │                                    └─ another life's ──► superseded, stop
//!  │   hold: every ttl/3 a look at the key, and beside it all the lease kept alive
//!  │     │
//!  └── any trouble: wait (back-off with jitter)
//! ```
//!
//! A lease is granted for longer than the TTL: by the third since it was renewed last, and by
//! what renewing takes once etcd is reached again. So whoever cannot reach etcd for less than a
//! TTL stays listed, whenever that begins.
//!
//! A lost lease does not change the epoch: the process and its KV live on, so the
//! same record goes under a new lease. A keepalive on a lost lease is no error at
//! etcd, it answers a TTL of 0 or nothing at all; both count as lost.
//!
//! Two processes with one id: the later start wins, since it is almost always a
//! restart that was faster than the old lease. The earlier one, if it still
//! lives, sees another epoch under its key, stops writing and says so.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use baton_etcd::{Client, ends_with, unchanged_since, under_lease};
use baton_proto::{Epoch, WorkerId};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::EtcdConfig;
use super::connector::{CallError, Connector};
use super::keepalive::{Confirmed, Keepalive, third};
use super::ownership::{Ownership, Verdict};
use crate::Error;
use crate::backoff::Backoff;
use crate::record::WorkerRecord;
use crate::registration::{Backend, RegistrationState, ended};

const BACKOFF_FIRST: Duration = Duration::from_millis(100);
/// Shorter than the followers' grace after an outage, so that a worker whose lease
/// ended meanwhile is back before it is dropped.
const BACKOFF_MAX: Duration = Duration::from_millis(500);
/// What a worker that reaches etcd again may take until it has renewed its lease: the longest
/// back-off, and a machine that is slow.
const BACK_IN: Duration = Duration::from_secs(1);
/// Writers that change the key between our read and our write, before we wait.
const CLAIM_TRIES: u32 = 5;
/// Before leaving is tried again.
const ANOTHER_MEMBER: Duration = Duration::from_millis(50);

/// The record to publish; the number tells which `update` it came from.
#[derive(Clone)]
struct Desired {
    sequence: u64,
    record: WorkerRecord,
}

/// The lease as far as we know.
#[derive(Default)]
struct Lease {
    id: Option<i64>,
    confirmed: Confirmed,
}

impl Lease {
    fn forget(&mut self) {
        self.id = None;
        self.confirmed.send_replace(None);
    }

    /// Its life, as etcd granted it.
    fn ttl(&self) -> Option<Duration> {
        self.confirmed.borrow().map(|(_, ttl)| ttl)
    }

    /// Whether others may still see us although we cannot reach etcd.
    fn may_live(&self) -> bool {
        let confirmed = *self.confirmed.borrow();
        confirmed.is_some_and(|(at, ttl)| at.elapsed() < ttl)
    }
}

/// Why a session ended.
enum Ended {
    Trouble(CallError),
    /// etcd says the lease is gone.
    LeaseLost,
    Superseded {
        by: Epoch,
    },
}

impl From<CallError> for Ended {
    fn from(error: CallError) -> Self {
        Self::Trouble(error)
    }
}

pub(super) struct LeaseTask {
    connector: Arc<Connector>,
    key: String,
    ttl: Duration,
    desired: watch::Receiver<Desired>,
    state: watch::Sender<RegistrationState>,
    stored: watch::Sender<u64>,
    cancel: CancellationToken,
    lease: Lease,
    ownership: Ownership,
}

impl LeaseTask {
    /// A task to spawn and the handle that talks to it.
    pub(super) fn new(
        connector: Arc<Connector>,
        config: &EtcdConfig,
        key: String,
        record: WorkerRecord,
        cancel: CancellationToken,
    ) -> (Self, LeaseHandle) {
        let (id, ownership) = (record.id.clone(), Ownership::new(record.epoch));
        let (sender, desired) = watch::channel(Desired {
            sequence: 1,
            record,
        });
        let state = watch::Sender::new(RegistrationState::Pending);
        let stored = watch::Sender::new(0);
        let handle = LeaseHandle {
            id,
            desired: sender,
            state: state.subscribe(),
            stored: stored.subscribe(),
            patience: config.request_timeout,
            cancel: cancel.clone(),
            task: None,
        };
        let ttl = config.ttl;
        let lease = Lease::default();
        (
            Self {
                connector,
                key,
                ttl,
                desired,
                state,
                stored,
                cancel,
                lease,
                ownership,
            },
            handle,
        )
    }

    pub(super) fn watch_state(&self) -> watch::Receiver<RegistrationState> {
        self.state.subscribe()
    }

    /// Runs until cancelled; then withdraws the record and says whether that worked.
    pub(super) async fn run(mut self) -> Result<(), Error> {
        let cancel = self.cancel.clone();
        let mut backoff = Backoff::new(BACKOFF_FIRST, BACKOFF_MAX);
        loop {
            let ended = tokio::select! {
                biased;
                () = cancel.cancelled() => break,
                // Dropped in the middle it may leave a write under way; the lease
                // it would be under is known, and revoked below.
                ended = self.session(&mut backoff) => ended,
            };
            if let Ended::Superseded { by } = ended {
                self.superseded(by).await;
                cancel.cancelled().await;
                self.state.send_replace(RegistrationState::Left);
                return Ok(());
            }
            self.trouble(&ended, backoff.failures()).await;
            let wait = tokio::time::sleep(backoff.next(rand::random()));
            tokio::select! {
                biased;
                () = cancel.cancelled() => break,
                () = wait => {}
            }
        }
        let released = self.release().await;
        self.state.send_replace(RegistrationState::Left);
        released.map_err(|error| Error::Unavailable {
            what: "leave the cluster",
            message: error.to_string(),
        })
    }

    /// Attach, claim, hold; returns why it could not go on.
    async fn session(&mut self, backoff: &mut Backoff) -> Ended {
        let held = async {
            let client = self.connector.client().await?;
            let keepalive = self.attach(&client).await?;
            tokio::select! {
                ended = keepalive.run() => Err(ended.map_or(Ended::LeaseLost, Ended::Trouble)),
                ended = self.publish(&client, backoff) => ended,
            }
        };
        let result: Result<Infallible, Ended> = held.await;
        match result {
            Err(Ended::Trouble(error)) if error.is_lease_lost() => Ended::LeaseLost,
            Err(ended) => ended,
            Ok(never) => match never {},
        }
    }

    /// Claims the key, follows what is desired and looks whether the key is still ours.
    async fn publish(
        &mut self,
        client: &Client,
        backoff: &mut Backoff,
    ) -> Result<Infallible, Ended> {
        self.claim(client).await?;
        backoff.reset();
        let mut beat = tokio::time::interval(third(self.ttl));
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                changed = self.desired.changed() => {
                    // The handle is gone: cancellation is on its way.
                    if changed.is_err() {
                        std::future::pending::<()>().await;
                    }
                    self.claim(client).await?;
                }
                _ = beat.tick() => self.look(client).await?,
            }
        }
    }

    /// The lease's life, as it was granted or is asked for.
    fn life(&self) -> Duration {
        let asked = self.ttl + third(self.ttl) + BACK_IN;
        self.lease.ttl().unwrap_or(asked)
    }

    /// A lease that is kept alive: the old one if etcd still has it.
    async fn attach(&mut self, client: &Client) -> Result<Keepalive, Ended> {
        if let Some(id) = self.lease.id {
            match self.open(client, id).await {
                Ok(keepalive) => return Ok(keepalive),
                Err(error) if error.is_lease_lost() => self.lease.forget(),
                Err(error) => return Err(error.into()),
            }
        }
        // The id is ours to choose, so that it is known even if the answer is lost.
        let id = rand::random_range(1..i64::MAX);
        self.lease.id = Some(id);
        let seconds = i64::try_from(self.life().as_secs_f64().ceil() as u64).unwrap_or(i64::MAX);
        let grant = client.lease_grant(id, seconds);
        let asked = Instant::now();
        let ttl = self.connector.call("grant a lease", grant).await?;
        self.lease.confirmed.send_replace(Some((asked, ttl)));
        Ok(self.open(client, id).await?)
    }

    async fn open(&self, client: &Client, id: i64) -> Result<Keepalive, CallError> {
        let (every, confirmed) = (third(self.ttl), self.lease.confirmed.clone());
        Keepalive::open(client.clone(), id, self.life(), every, confirmed).await
    }

    /// Whether the key is still ours; puts it back if somebody deleted it.
    async fn look(&mut self, client: &Client) -> Result<(), Ended> {
        let (record, _) = self.read(client).await?;
        let desired = self.desired.borrow().record.epoch;
        match record {
            Some((epoch, lease)) if epoch == desired && Some(lease) == self.lease.id => Ok(()),
            Some((by, _)) if by != desired => Err(Ended::Superseded { by }),
            _ => self.claim(client).await,
        }
    }

    /// Writes the desired record, unless a later life has the key.
    async fn claim(&mut self, client: &Client) -> Result<(), Ended> {
        let desired = self.desired.borrow_and_update().clone();
        let lease = self.lease.id.unwrap_or_default();
        for _ in 0..CLAIM_TRIES {
            let (record, revision) = self.read(client).await?;
            match self.ownership.judge(record.map(|(epoch, _)| epoch)) {
                Verdict::Write => {}
                Verdict::TakeOver { from } => {
                    tracing::warn!(worker = %desired.record.id, former = %from,
                        "take over the record of a former life");
                }
                Verdict::Superseded { by } => return Err(Ended::Superseded { by }),
            }
            let put = under_lease(self.key.as_str(), desired.record.to_json(), lease);
            let unchanged = unchanged_since(self.key.as_str(), revision);
            let write = client.put_if(vec![unchanged], put);
            if self.connector.call("write the record", write).await? {
                self.stored.send_replace(desired.sequence);
                self.set_state(RegistrationState::Registered);
                return Ok(());
            }
        }
        Err(CallError::Contended {
            what: "write the record",
        }
        .into())
    }

    /// Epoch and lease of the stored record (`None` if there is none or it cannot
    /// be read) and the key's revision (0 if there is none).
    async fn read(&self, client: &Client) -> Result<(Option<(Epoch, i64)>, i64), CallError> {
        let get = client.get(self.key.as_str());
        let Some(kv) = self.connector.call("read the record", get).await? else {
            return Ok((None, 0));
        };
        let record = WorkerRecord::from_json(&kv.value).ok();
        Ok((
            record.map(|record| (record.epoch, kv.lease)),
            kv.mod_revision,
        ))
    }

    async fn trouble(&mut self, ended: &Ended, failures: u32) {
        match ended {
            Ended::LeaseLost => {
                tracing::warn!(key = self.key, "the lease is lost, register again");
                self.lease.forget();
            }
            Ended::Trouble(error) => {
                self.connector.note(error).await;
                if failures == 0 {
                    tracing::warn!(key = self.key, %error, "etcd is in trouble, keep trying");
                }
            }
            Ended::Superseded { .. } => {}
        }
        if !self.lease.may_live() {
            self.set_state(RegistrationState::Pending);
        }
    }

    async fn superseded(&mut self, by: Epoch) {
        tracing::error!(key = self.key, %by,
            "two live workers with one id: another process has it now, this one is not listed");
        self.set_state(RegistrationState::Superseded { by });
        // The key is under the other's lease, so this removes nothing but ours.
        if let Err(error) = self.release().await {
            tracing::debug!(%error, "the old lease ends by itself");
        }
    }

    /// Removes the key if it is under our lease, and the lease. Where etcd has several members
    /// a call may go to one that has just died; it is tried again while the request's time lasts,
    /// and may then go to another.
    async fn release(&mut self) -> Result<(), CallError> {
        let Some(lease) = self.lease.id.take() else {
            return Ok(());
        };
        // Nothing was written under a lease whose grant was never heard of. If there is one,
        // it ends by itself.
        if self.lease.confirmed.borrow().is_none() {
            return Ok(());
        }
        let until = Instant::now() + self.connector.patience();
        loop {
            match self.release_once(lease).await {
                Err(error) if Instant::now() + ANOTHER_MEMBER < until => {
                    tracing::debug!(%error, "leaving is tried again");
                    tokio::time::sleep(ANOTHER_MEMBER).await;
                }
                released => return released,
            }
        }
    }

    async fn release_once(&self, lease: i64) -> Result<(), CallError> {
        let client = self.connector.client().await?;
        let ours = ends_with(self.key.as_str(), lease);
        let delete = client.delete_if(vec![ours], self.key.as_str());
        self.connector.call("delete the record", delete).await?;
        match self
            .connector
            .call("revoke the lease", client.lease_revoke(lease))
            .await
        {
            Err(error) if !error.is_lease_lost() => Err(error),
            _ => Ok(()),
        }
    }

    fn set_state(&self, state: RegistrationState) {
        self.state.send_if_modified(|current| {
            let changed = *current != state;
            *current = state;
            changed
        });
    }
}

/// The registration's end of a [`LeaseTask`].
pub(super) struct LeaseHandle {
    id: WorkerId,
    desired: watch::Sender<Desired>,
    state: watch::Receiver<RegistrationState>,
    stored: watch::Receiver<u64>,
    patience: Duration,
    cancel: CancellationToken,
    task: Option<JoinHandle<Result<(), Error>>>,
}

impl LeaseHandle {
    pub(super) fn spawned(mut self, task: JoinHandle<Result<(), Error>>) -> Self {
        self.task = Some(task);
        self
    }
}

#[async_trait]
impl Backend for LeaseHandle {
    async fn update(&self, record: WorkerRecord) -> Result<(), Error> {
        let mut sequence = 0;
        self.desired.send_modify(|desired| {
            desired.sequence += 1;
            desired.record = record;
            sequence = desired.sequence;
        });
        let mut stored = self.stored.clone();
        let mut state = self.state.clone();
        let wait = async {
            tokio::select! {
                done = stored.wait_for(|stored| *stored >= sequence) => {
                    done.map(drop).map_err(|_| Error::Closed)
                }
                end = state.wait_for(|state| ended(*state, &self.id).is_some()) => {
                    Err(end.ok().and_then(|end| ended(*end, &self.id)).unwrap_or(Error::Closed))
                }
            }
        };
        tokio::time::timeout(self.patience, wait)
            .await
            .unwrap_or_else(|_| {
                Err(Error::Unavailable {
                    what: "update the record",
                    message: format!("not stored within {:?}", self.patience),
                })
            })
    }

    async fn leave(&mut self) -> Result<(), Error> {
        self.cancel.cancel();
        match self.task.take() {
            Some(task) => task.await.unwrap_or_else(|error| {
                Err(Error::Unavailable {
                    what: "leave the cluster",
                    message: error.to_string(),
                })
            }),
            None => Ok(()),
        }
    }

    fn release(&mut self) {
        self.cancel.cancel();
    }
}
