//! The handle of a published worker.
//!
//! It is the only way to change or withdraw the record. Dropped, it withdraws it
//! in the background; [`Registration::leave`] does so and waits.

use std::sync::{Mutex, PoisonError};

use async_trait::async_trait;
use baton_proto::{Epoch, WorkerId};
use tokio::sync::watch;

use crate::Error;
use crate::record::{WorkerRecord, WorkerState};

/// Whether others see the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegistrationState {
    /// Not published, or its lease surely ended: the task is trying.
    Pending,
    Registered,
    /// Another process has the id now; see [`Error::Superseded`].
    Superseded {
        by: Epoch,
    },
    /// Withdrawn.
    Left,
}

/// What a kind of membership does for a handle.
#[async_trait]
pub(crate) trait Backend: Send + Sync {
    /// Publishes another record of the same worker.
    async fn update(&self, record: WorkerRecord) -> Result<(), Error>;
    /// Withdraws the record and waits.
    async fn leave(&mut self) -> Result<(), Error>;
    /// Withdraws the record without waiting. Called once at most, also after `leave`.
    fn release(&mut self);
}

/// The handle of a published worker.
pub struct Registration {
    record: Mutex<WorkerRecord>,
    state: watch::Receiver<RegistrationState>,
    backend: Box<dyn Backend>,
}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let record = self.record();
        write!(
            f,
            "Registration({} {} {:?})",
            record.id,
            record.epoch,
            self.state()
        )
    }
}

impl Registration {
    pub(crate) fn new(
        record: WorkerRecord,
        state: watch::Receiver<RegistrationState>,
        backend: Box<dyn Backend>,
    ) -> Self {
        Self {
            record: Mutex::new(record),
            state,
            backend,
        }
    }

    /// The record as last set.
    pub fn record(&self) -> WorkerRecord {
        self.record
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Whether others see the worker now.
    pub fn state(&self) -> RegistrationState {
        *self.state.borrow()
    }

    /// The state, with a wake-up at each change.
    pub fn watch_state(&self) -> watch::Receiver<RegistrationState> {
        self.state.clone()
    }

    /// Waits until the record is published.
    ///
    /// # Errors
    /// [`Error::Superseded`] or [`Error::Closed`] if that cannot happen any more.
    ///
    /// *Cancel safety*: safe.
    pub async fn registered(&self) -> Result<(), Error> {
        let id = self.record().id;
        let mut state = self.state.clone();
        let end = state
            .wait_for(|state| *state != RegistrationState::Pending)
            .await
            .map_or(RegistrationState::Left, |state| *state);
        ended(end, &id).map_or(Ok(()), Err)
    }

    /// Resolves when another process has taken the worker's id: this one is no longer
    /// listed and should stop.
    ///
    /// *Cancel safety*: safe.
    pub async fn superseded(&self) -> Epoch {
        let mut state = self.state.clone();
        loop {
            if let RegistrationState::Superseded { by } = *state.borrow_and_update() {
                return by;
            }
            if state.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Publishes another record of the same worker and waits until it is stored.
    ///
    /// # Errors
    /// [`Error::Invalid`] if id, epoch or role differ or a field is wrong;
    /// [`Error::Unavailable`] if the store did not take it in time (it will be
    /// written as soon as it can); [`Error::Superseded`], [`Error::Closed`].
    ///
    /// *Cancel safety*: the record is set at once and stays set.
    pub async fn update(&self, record: WorkerRecord) -> Result<(), Error> {
        record.validate()?;
        {
            let mut current = self.record.lock().unwrap_or_else(PoisonError::into_inner);
            for (field, same) in [
                ("id", current.id == record.id),
                ("epoch", current.epoch == record.epoch),
                ("role", current.role == record.role),
            ] {
                if !same {
                    return Err(Error::invalid(field, "a registration cannot change it"));
                }
            }
            current.clone_from(&record);
        }
        self.backend.update(record).await
    }

    /// [`Registration::update`] of the state alone.
    ///
    /// # Errors
    /// As [`Registration::update`].
    pub async fn set_state(&self, state: WorkerState) -> Result<(), Error> {
        let mut record = self.record();
        record.state = state;
        self.update(record).await
    }

    /// Publishes that the worker drains. A store that does not hear of it is no reason not to:
    /// routers learn it from the worker itself. While the record is not published, nobody is
    /// to be told and nothing is waited for.
    pub async fn say_draining(&self) {
        let mut state = self.state.clone();
        let unpublished = state.wait_for(|state| *state == RegistrationState::Pending);
        tokio::select! {
            // First, so that a record which is published after all says it.
            biased;
            said = self.set_state(WorkerState::Draining) => if let Err(error) = said {
                tracing::warn!(%error, "draining could not be published");
            },
            Ok(_) = unpublished => {}
        }
    }

    /// Withdraws the record and waits until it is gone.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the store did not answer; the record then ends with its lease.
    pub async fn leave(mut self) -> Result<(), Error> {
        self.backend.leave().await
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.backend.release();
    }
}

/// The error of a state that can no longer become registered.
pub(crate) fn ended(state: RegistrationState, id: &WorkerId) -> Option<Error> {
    match state {
        RegistrationState::Pending | RegistrationState::Registered => None,
        RegistrationState::Superseded { by } => Some(Error::Superseded { id: id.clone(), by }),
        RegistrationState::Left => Some(Error::Closed),
    }
}
