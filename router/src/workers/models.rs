//! Which models are served: name or revision to a tokenizer and a context size.

use std::collections::BTreeMap;
use std::sync::Arc;

use baton_proto::model_card::ModelCard;
use baton_proto::{Error, ErrorKind, ModelRevision, v1};
use baton_tokenizer::Tokenizer;

use super::{Worker, Workers};

/// One revision of one model that some worker serves.
#[derive(Clone)]
pub struct ServedModel {
    pub card: Arc<ModelCard>,
    pub tokenizer: Arc<Tokenizer>,
    /// The least of its workers' contexts, so that any of them can take any request.
    pub context_max: u32,
}

struct Revision {
    card: Arc<ModelCard>,
    context_max: u32,
    created: i64,
    prefill_ready: u32,
    decode_ready: u32,
}

impl Workers {
    fn revisions(&self) -> BTreeMap<ModelRevision, Revision> {
        let mut revisions: BTreeMap<ModelRevision, Revision> = BTreeMap::new();
        let current = self.current();
        // Refused ones last: they say what is served where no other one does.
        let (refused, usable): (Vec<_>, Vec<_>) = current
            .values()
            .partition(|worker| worker.refused().is_some());
        for worker in usable.into_iter().chain(refused) {
            let card = &worker.card;
            let entry = revisions
                .entry(card.revision.clone())
                .or_insert_with(|| Revision {
                    card: Arc::clone(card),
                    context_max: card.context_max,
                    created: card.created,
                    prefill_ready: 0,
                    decode_ready: 0,
                });
            if worker.refused().is_some() {
                continue;
            }
            entry.context_max = entry.context_max.min(card.context_max);
            // Copies of a file are younger than it; every router finds the same time.
            let times = [entry.created, card.created].into_iter();
            entry.created = times.filter(|at| *at > 0).min().unwrap_or(0);
            count(entry, worker);
        }
        revisions
    }

    /// The model a request names: by revision, by name, or, for an empty name, the
    /// only one there is. Of several revisions of a name, the one with most ready
    /// decode workers.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] (`MODEL_NOT_FOUND`), [`ErrorKind::Invalid`] when an
    /// empty name is ambiguous, [`ErrorKind::Unavailable`] while nothing or nothing
    /// of this model is known enough.
    pub fn model(&self, name: &str) -> Result<ServedModel, Error> {
        let revisions = self.revisions();
        if revisions.is_empty() {
            return Err(unavailable("no worker is there", "NO_WORKERS"));
        }
        let mut names: Vec<&str> = revisions.values().map(|r| r.card.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        if name.is_empty() && names.len() > 1 {
            let message = format!("missing, several are served: {}", names.join(", "));
            return Err(Error::invalid("model", message));
        }
        let chosen = revisions
            .values()
            .filter(|r| name.is_empty() || r.card.name == name || r.card.revision.0 == name)
            .max_by_key(|r| (r.decode_ready, &r.card.revision));
        let Some(chosen) = chosen else {
            let shown: String = name.chars().take(128).collect();
            let message = format!("`{shown}` is not served (served: {})", names.join(", "));
            return Err(Error::new(ErrorKind::NotFound, message)
                .with_field("model")
                .with_reason("MODEL_NOT_FOUND"));
        };
        let Some(tokenizer) = self.tokenizer_by_hash(&chosen.card.tokenizer_hash) else {
            let name = &chosen.card.name;
            if let Some(reason) = self.refusal(&chosen.card.revision) {
                let message = format!("model `{name}` cannot be served: {reason}");
                return Err(
                    Error::new(ErrorKind::Unavailable, message).with_reason("MODEL_REFUSED")
                );
            }
            let message = format!("model `{name}` is starting");
            return Err(unavailable(&message, "MODEL_STARTING"));
        };
        Ok(ServedModel {
            card: Arc::clone(&chosen.card),
            tokenizer,
            context_max: chosen.context_max,
        })
    }

    /// Why every worker of a revision is refused, if all are.
    fn refusal(&self, revision: &ModelRevision) -> Option<String> {
        let workers = self.of_revision(revision);
        let reasons: Option<Vec<&str>> = workers.iter().map(|worker| worker.refused()).collect();
        reasons?.first().map(|&reason| reason.to_owned())
    }

    /// The models that can be served now.
    pub fn models(&self) -> Vec<v1::Model> {
        self.revisions()
            .into_values()
            .filter(|revision| revision.decode_ready > 0)
            .filter_map(|revision| {
                let tokenizer = self.tokenizer_by_hash(&revision.card.tokenizer_hash)?;
                Some(v1::Model {
                    name: revision.card.name.clone(),
                    revision: revision.card.revision.0.clone(),
                    architecture: revision.card.architecture.clone(),
                    context_max: revision.context_max,
                    vocab_size: revision.card.vocab_size,
                    prefill_workers: revision.prefill_ready,
                    decode_workers: revision.decode_ready,
                    has_chat_template: tokenizer.has_chat_template(),
                    created: revision.created,
                })
            })
            .collect()
    }
}

fn count(revision: &mut Revision, worker: &Worker) {
    if worker.is_ready() {
        revision.prefill_ready += u32::from(worker.role.prefills());
        revision.decode_ready += u32::from(worker.role.decodes());
    }
}

fn unavailable(message: &str, reason: &str) -> Error {
    Error::new(ErrorKind::Unavailable, message)
        .with_reason(reason)
        .with_retry_after(std::time::Duration::from_secs(1))
}
