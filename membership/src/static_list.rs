//! Membership without a store: a list somebody else keeps.
//!
//! For a router that is given its workers on the command line. Whoever owns the
//! list resolves addresses to records (by asking the workers) and replaces it;
//! a worker that registers here is seen inside its own process only.

use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::{Mutex, watch};

use crate::record::WorkerRecord;
use crate::registration::Registration;
use crate::view::View;
use crate::{Error, Health, InProcess, Membership};

/// A list of workers that changes only when it is replaced.
#[derive(Default)]
pub struct Static {
    inner: InProcess,
    seeds: Mutex<Vec<Registration>>,
}

impl Static {
    /// A list of `records`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a record is wrong or two have the same id.
    pub async fn new(records: Vec<WorkerRecord>) -> Result<Self, Error> {
        let list = Self::default();
        list.replace(records).await?;
        Ok(list)
    }

    /// Makes `records` the list. Workers that stay are not withdrawn in between.
    ///
    /// # Errors
    /// As [`Static::new`]; the list is then as it was.
    pub async fn replace(&self, records: Vec<WorkerRecord>) -> Result<(), Error> {
        for (position, record) in records.iter().enumerate() {
            record.validate()?;
            if records[..position]
                .iter()
                .any(|other| other.id == record.id)
            {
                let message = format!("`{}` is listed twice", record.id);
                return Err(Error::Invalid {
                    field: "id".to_owned(),
                    message,
                });
            }
        }
        let mut seeds = self.seeds.lock().await;
        let mut kept = Vec::with_capacity(records.len());
        for record in records {
            let same = |seed: &Registration| {
                let old = seed.record();
                old.id == record.id && old.epoch == record.epoch && old.role == record.role
            };
            match seeds.iter().position(same) {
                Some(position) => {
                    let seed = seeds.swap_remove(position);
                    if seed.record() != record {
                        seed.update(record).await?;
                    }
                    kept.push(seed);
                }
                None => {
                    // The old life of the same worker goes first, so that it is a
                    // replacement and not a duplicate.
                    seeds.retain(|seed| seed.record().id != record.id);
                    kept.push(self.inner.register(record).await?);
                }
            }
        }
        *seeds = kept;
        Ok(())
    }
}

#[async_trait]
impl Membership for Static {
    async fn register(&self, record: WorkerRecord) -> Result<Registration, Error> {
        self.inner.register(record).await
    }

    fn watch(&self) -> watch::Receiver<Arc<View>> {
        self.inner.watch()
    }

    fn health(&self) -> Health {
        self.inner.health()
    }

    async fn close(&self) {
        self.seeds.lock().await.clear();
        self.inner.close().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::tests::record;
    use baton_proto::Epoch;

    #[tokio::test]
    async fn replacing_adds_removes_and_restarts() {
        let list = Static::new(vec![record("a", 1), record("b", 1)])
            .await
            .unwrap();
        let view = list.watch();
        assert_eq!(view.borrow().workers.len(), 2);
        list.replace(vec![record("b", 2), record("c", 1)])
            .await
            .unwrap();
        let now = view.borrow().clone();
        assert_eq!(
            now.workers.keys().map(|id| id.as_str()).collect::<Vec<_>>(),
            ["b", "c"]
        );
        assert_eq!(now.workers[&"b".into()].epoch, Epoch(2));
    }

    #[tokio::test]
    async fn a_wrong_list_changes_nothing() {
        let list = Static::new(vec![record("a", 1)]).await.unwrap();
        assert!(
            list.replace(vec![record("b", 1), record("b", 2)])
                .await
                .is_err()
        );
        assert!(list.watch().borrow().workers.contains_key(&"a".into()));
    }
}
