//! Membership inside one process: a shared map.
//!
//! For `baton up`, where router and workers are one process, and for tests. It
//! has no leases: a handle that is dropped withdraws its record at once.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use baton_proto::{Epoch, WorkerId};
use tokio::sync::watch;

use crate::record::WorkerRecord;
use crate::registration::{Backend, Registration, RegistrationState, ended};
use crate::view::View;
use crate::{Error, Health, Membership};

/// A cluster inside one process. Clones share it.
#[derive(Clone)]
pub struct InProcess {
    shared: Arc<Shared>,
}

struct Shared {
    members: Mutex<Members>,
    view: watch::Sender<Arc<View>>,
}

#[derive(Default)]
struct Members {
    live: BTreeMap<WorkerId, Member>,
    closed: bool,
}

struct Member {
    record: WorkerRecord,
    state: watch::Sender<RegistrationState>,
}

impl Default for InProcess {
    fn default() -> Self {
        Self::new()
    }
}

impl InProcess {
    pub fn new() -> Self {
        let view = watch::Sender::new(Arc::new(View::default()));
        Self {
            shared: Arc::new(Shared {
                members: Mutex::default(),
                view,
            }),
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(&self, members: &Members) {
        let workers = members
            .live
            .iter()
            .map(|(id, member)| (id.clone(), member.record.clone()))
            .collect();
        self.view.send_modify(|view| {
            *view = Arc::new(View {
                workers,
                stale_since: None,
                version: view.version + 1,
            });
        });
    }

    /// Takes the record out if it is still this life's.
    fn withdraw(&self, id: &WorkerId, epoch: Epoch) {
        let mut members = self.lock();
        if members
            .live
            .get(id)
            .is_some_and(|member| member.record.epoch == epoch)
            && let Some(member) = members.live.remove(id)
        {
            member.state.send_replace(RegistrationState::Left);
            self.publish(&members);
        }
    }
}

#[async_trait]
impl Membership for InProcess {
    async fn register(&self, record: WorkerRecord) -> Result<Registration, Error> {
        record.validate()?;
        let mut members = self.shared.lock();
        if members.closed {
            return Err(Error::Closed);
        }
        let (state, receiver) = watch::channel(RegistrationState::Registered);
        let member = Member {
            record: record.clone(),
            state,
        };
        if let Some(old) = members.live.insert(record.id.clone(), member) {
            tracing::error!(worker = %record.id, epoch = %old.record.epoch, by = %record.epoch,
                "two live workers with one id, the newer one is listed");
            old.state
                .send_replace(RegistrationState::Superseded { by: record.epoch });
        }
        self.shared.publish(&members);
        let backend = Handle {
            shared: Arc::clone(&self.shared),
            id: record.id.clone(),
            epoch: record.epoch,
            state: receiver.clone(),
        };
        Ok(Registration::new(record, receiver, Box::new(backend)))
    }

    fn watch(&self) -> watch::Receiver<Arc<View>> {
        self.shared.view.subscribe()
    }

    fn health(&self) -> Health {
        Health {
            fresh: true,
            ..Health::default()
        }
    }

    async fn close(&self) {
        let mut members = self.shared.lock();
        members.closed = true;
        for (_, member) in std::mem::take(&mut members.live) {
            member.state.send_replace(RegistrationState::Left);
        }
        self.shared.publish(&members);
    }
}

struct Handle {
    shared: Arc<Shared>,
    id: WorkerId,
    epoch: Epoch,
    state: watch::Receiver<RegistrationState>,
}

#[async_trait]
impl Backend for Handle {
    async fn update(&self, record: WorkerRecord) -> Result<(), Error> {
        let mut members = self.shared.lock();
        match members.live.get_mut(&self.id) {
            Some(member) if member.record.epoch == self.epoch => {
                member.record = record;
                self.shared.publish(&members);
                Ok(())
            }
            _ => Err(ended(*self.state.borrow(), &self.id).unwrap_or(Error::Closed)),
        }
    }

    async fn leave(&mut self) -> Result<(), Error> {
        self.release();
        Ok(())
    }

    fn release(&mut self) {
        self.shared.withdraw(&self.id, self.epoch);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::WorkerState;
    use crate::record::tests::record;

    fn ids(view: &View) -> Vec<&str> {
        view.workers.keys().map(WorkerId::as_str).collect()
    }

    #[tokio::test]
    async fn a_worker_is_seen_while_its_handle_lives() {
        let cluster = InProcess::new();
        let mut view = cluster.watch();
        let first = cluster.register(record("a", 1)).await.unwrap();
        let second = cluster.register(record("b", 2)).await.unwrap();
        first.registered().await.unwrap();
        assert_eq!(ids(&view.borrow_and_update()), ["a", "b"]);
        first.set_state(WorkerState::Draining).await.unwrap();
        assert!(view.has_changed().unwrap());
        let state = view.borrow_and_update().workers[&"a".into()].state;
        assert_eq!(state, WorkerState::Draining);
        first.leave().await.unwrap();
        assert_eq!(ids(&view.borrow_and_update()), ["b"]);
        drop(second);
        assert!(view.borrow_and_update().workers.is_empty());
    }

    #[tokio::test]
    async fn the_newer_of_two_lives_is_listed_and_the_older_is_told() {
        let cluster = InProcess::new();
        let old = cluster.register(record("a", 1)).await.unwrap();
        let new = cluster.register(record("a", 2)).await.unwrap();
        let superseded = Error::Superseded {
            id: "a".into(),
            by: Epoch(2),
        };
        assert_eq!(old.registered().await, Err(superseded.clone()));
        assert_eq!(old.set_state(WorkerState::Ready).await, Err(superseded));
        drop(old);
        let view = cluster.watch();
        assert_eq!(view.borrow().workers[&"a".into()].epoch, Epoch(2));
        assert_eq!(new.state(), RegistrationState::Registered);
    }

    #[tokio::test]
    async fn a_handle_keeps_its_identity() {
        let cluster = InProcess::new();
        let handle = cluster.register(record("a", 1)).await.unwrap();
        let error = handle.update(record("a", 2)).await.unwrap_err();
        assert!(matches!(error, Error::Invalid { ref field, .. } if field == "epoch"));
        assert_eq!(handle.record().epoch, Epoch(1));
    }

    #[tokio::test]
    async fn a_closed_cluster_lists_nobody_and_takes_nobody() {
        let cluster = InProcess::new();
        let handle = cluster.register(record("a", 1)).await.unwrap();
        cluster.close().await;
        assert_eq!(handle.state(), RegistrationState::Left);
        assert!(cluster.watch().borrow().workers.is_empty());
        assert_eq!(
            cluster.register(record("b", 1)).await.unwrap_err(),
            Error::Closed
        );
    }
}
