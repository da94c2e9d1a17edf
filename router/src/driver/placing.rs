//! The driver's part in placing: what placement is asked, what workers are sent,
//! and which prefixes they are remembered for.

use std::sync::Arc;
use std::time::Duration;

use baton_observability::labels::Decision;
use baton_observability::logging;
use baton_proto::block_hash::{BlockHash, BlockHasher};
use baton_proto::kv_layout::SPAN_TOKENS;
use baton_proto::{Error, ErrorKind, NumericsId, TokenId, environment, protocol, v1};
use tokio::time::Instant;

use super::sessions::{DecodeSession, PrefillSession};
use super::{Driver, lists};
use crate::placement::{Candidate, Placement, Question, WorkerKey, forecast};
use crate::request::{DecodeEvent, Event, PlaceQuery, PrefillEvent};
use crate::workers::Worker;

/// When a refused request may come back: when what is before it has gone.
const RETRY_AFTER: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(30));

impl Driver {
    pub(super) fn place(&mut self, query: &PlaceQuery) -> Result<Placement, Error> {
        let workers = self.shared.workers.ready_of(&self.job.model.card);
        let mut candidates = Vec::with_capacity(workers.len());
        for worker in &workers {
            let cached = self.cached_at(worker);
            candidates.push(worker.candidate(cached));
        }
        let cut = self.shared.workers.cut_lanes.all();
        let question = Question {
            query,
            cut: &cut,
            prompt_tokens: self.job.prompt.len() as u32,
            numerics: self.numerics.filter(|_| self.job.exact),
            exact: self.job.exact,
            tie: environment::random(),
        };
        let placement = self.shared.policy.place(&candidates, &question)?;
        let tokens = question.prompt_tokens.saturating_add(query.resumed_tokens);
        let wait = forecast::first_token(&candidates, &placement, tokens);
        let likely = wait.map(|wait| self.shared.margin().over(wait));
        self.machine.foretold(likely);
        self.foretell(wait)?;
        self.book(&workers, &candidates, &placement);
        if let Some(prefill) = &placement.prefill {
            self.remember(&workers, prefill);
        }
        tracing::debug!(
            decode = %placement.decode.id,
            prefill = placement.prefill.as_ref().map(|key| key.id.as_str()),
            "placed"
        );
        Ok(placement)
    }

    /// Refuses a request whose first token would come too late. Once: what goes wrong
    /// later is no reason to give it up.
    fn foretell(&mut self, wait: Option<Duration>) -> Result<(), Error> {
        let resumed = self.job.resumed.is_some();
        if std::mem::replace(&mut self.placed_before, true) || resumed {
            return Ok(());
        }
        let Some(wait) = wait else {
            return Ok(());
        };
        let so_far = self.timing.now();
        let likely = so_far + self.shared.margin().over(wait);
        match self.job.slo.ttft {
            Some(target) if likely > target => {
                let message = format!(
                    "the first token would come after about {} ms, the target is {} ms",
                    likely.as_millis(),
                    target.as_millis()
                );
                let excess = (likely - target).clamp(RETRY_AFTER.0, RETRY_AFTER.1);
                Err(Error::new(ErrorKind::Overloaded, message)
                    .with_reason("TTFT_TARGET")
                    .with_retry_after(excess))
            }
            _ => {
                self.timing.foretold(so_far, wait);
                Ok(())
            }
        }
    }

    /// The prefill worker's time is promised together with the decode worker's blocks,
    /// though it is asked only when those are there.
    fn book(&mut self, workers: &[Arc<Worker>], candidates: &[Candidate], placed: &Placement) {
        self.booked = placed.prefill.as_ref().and_then(|key| {
            let worker = workers.iter().find(|worker| worker.key == *key)?;
            let cached = candidates.iter().find(|worker| worker.key == *key)?;
            let tokens = self.job.prompt.len() as u32;
            Some(worker.place(tokens.saturating_sub(cached.cached_tokens)))
        });
    }

    /// The worker has, or will have, the prompt's blocks.
    pub(super) fn remember(&mut self, workers: &[Arc<Worker>], key: &WorkerKey) {
        let worker = workers.iter().find(|worker| worker.key == *key);
        if let Some(worker) = worker.filter(|_| self.job.use_cache) {
            let spans = self.spans_of(worker.card.layout.numerics).to_vec();
            self.shared.prefixes().insert(&spans, key, stride(worker));
        }
    }

    fn cached_at(&mut self, worker: &Worker) -> u32 {
        if !self.job.use_cache {
            return 0;
        }
        let spans = self.spans_of(worker.card.layout.numerics).to_vec();
        let matched = self
            .shared
            .prefixes()
            .matched(&spans, &worker.key, stride(worker));
        matched as u32 * SPAN_TOKENS
    }

    fn spans_of(&mut self, numerics: NumericsId) -> &[BlockHash] {
        let known = self.spans.iter().position(|(known, _)| *known == numerics);
        let at = known.unwrap_or_else(|| {
            let salt = self.job.tenant.cache_salt();
            let hasher = BlockHasher::new(&salt, numerics, "");
            // A hit never covers the last prompt token.
            let covered = self.job.prompt.len() - 1;
            self.spans
                .push((numerics, hasher.spans(&self.job.prompt[..covered])));
            self.spans.len() - 1
        });
        &self.spans[at].1
    }

    fn work(&self, worker: &Worker, attempt: u32, forced: Vec<Vec<TokenId>>) -> v1::WorkRequest {
        let job = &self.job;
        // A later attempt has its own name at workers, since one that is being torn
        // down may still hold the first.
        let generation = job.fenced.generation();
        let request_id = match (&job.resumed, attempt) {
            (Some(_), attempt) => format!("{}.{generation:x}.{attempt}", job.request_id),
            (None, 1) => job.request_id.0.clone(),
            (None, later) => format!("{}.{later}", job.request_id),
        };
        let left = job.deadline.saturating_duration_since(Instant::now());
        v1::WorkRequest {
            protocol: Some(protocol::CURRENT.into()),
            request_id,
            epoch: worker.key.epoch().0,
            model_revision: worker.card.revision.0.clone(),
            prompt: job.prompt.clone(),
            forced: lists(forced),
            sampling: Some((&job.sampling).into()),
            cache_salt: job.tenant.cache_salt(),
            use_cache: job.use_cache,
            exact: job.exact,
            deadline_ms: Some(left.as_millis() as u64),
            adapter: String::new(),
            slo: job.slo.to_wire(),
            priority: job.priority,
            fence: Some(self.fence()),
        }
    }

    pub(super) fn start_decode(
        &mut self,
        key: &WorkerKey,
        local: bool,
        attempt: u32,
        forced: Vec<Vec<TokenId>>,
    ) -> Option<Event> {
        let Some(worker) = self.shared.workers.get(key) else {
            return Some(Event::Decode {
                session: attempt,
                event: DecodeEvent::Failed { error: left() },
            });
        };
        logging::record_worker(&tracing::Span::current(), worker.key.id.as_str());
        let decision = if local {
            Decision::DecodeOnly
        } else {
            Decision::PrefillDecode
        };
        self.metrics().decisions.get(decision).inc();
        self.timing.routed(&worker.key, local);
        let path = if local {
            v1::decode_start::Path::Local
        } else {
            v1::decode_start::Path::Receive
        };
        let start = v1::DecodeStart {
            work: Some(self.work(&worker, attempt, forced)),
            path: path.into(),
            attempt,
        };
        let tokens = if local {
            self.job.prompt.len() as u32
        } else {
            0
        };
        self.closing = None;
        self.decode = Some(DecodeSession::open(worker, start, tokens));
        None
    }

    pub(super) fn start_prefill(
        &mut self,
        key: &WorkerKey,
        attempt: u32,
        lane: v1::Lane,
        forced: Vec<Vec<TokenId>>,
    ) -> Option<Event> {
        let Some(worker) = self.shared.workers.get(key) else {
            return Some(Event::Prefill {
                attempt,
                event: PrefillEvent::Failed { error: left() },
            });
        };
        self.timing.reserved(&worker.key);
        let request = v1::PrefillRequest {
            work: Some(self.work(&worker, attempt, forced)),
            lane: Some(lane),
        };
        let tokens = self.job.prompt.len() as u32;
        let placed = self.booked.take().unwrap_or_else(|| worker.place(tokens));
        self.prefill = Some(PrefillSession::open(worker, request, attempt, placed));
        None
    }
}

/// Spans of one block of the worker.
fn stride(worker: &Worker) -> usize {
    (worker.card.layout.block_size / SPAN_TOKENS).max(1) as usize
}

fn left() -> Error {
    Error::new(ErrorKind::Unavailable, "left the cluster")
}
