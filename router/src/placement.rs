//! Which workers run a request: (candidates, prefix index, load, prompt) to
//! (path, P, D). Pure.
//!
//! The rules, in order: only workers that speak our protocol; a prefill worker is
//! paired only with a decode worker that can take its KV, which for an exact request
//! means: with the same bits; the local path when what is not cached is short or no
//! prefill worker is ready or reaches anybody; else the cheapest pair, of those whose
//! KV keeps its bits while there is one. Cost is counted in tokens, so that queue,
//! load and cached prefix add up.

pub mod forecast;
pub mod prefix_index;

use std::fmt;
use std::sync::Arc;

use baton_membership::Role;
use baton_proto::model_card::ModelCard;
use baton_proto::protocol::{self, ProtocolVersion};
use baton_proto::relayout::{Fit, Relayout};
use baton_proto::{Epoch, Error, ErrorKind, NumericsId, WorkerId};

use crate::request::PlaceQuery;

/// One life of one worker.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerKey {
    pub id: WorkerId,
    epoch: u64,
}

impl WorkerKey {
    /// The worker `id` in the life `epoch`.
    pub fn new(id: WorkerId, epoch: Epoch) -> Self {
        Self { id, epoch: epoch.0 }
    }

    /// This life.
    pub fn epoch(&self) -> Epoch {
        Epoch(self.epoch)
    }
}

impl fmt::Debug for WorkerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.id, self.epoch())
    }
}

/// A way that KV goes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pair {
    pub prefill: WorkerKey,
    pub decode: WorkerKey,
}

/// A worker that could take work, and how busy it is.
#[derive(Clone, Debug)]
pub struct Candidate {
    pub key: WorkerKey,
    pub role: Role,
    pub protocol: ProtocolVersion,
    pub card: Arc<ModelCard>,
    /// Requests that run or wait there, or that this router just sent there.
    pub requests: u32,
    /// Prompt tokens that wait there, or that this router just sent there.
    pub tokens_waiting: u32,
    /// Tokens of this prompt whose KV it probably holds.
    pub cached_tokens: u32,
    /// How it gets on, for [forecasts](forecast).
    pub standing: forecast::Standing,
}

/// Who runs a request; no prefill worker means the local path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    pub decode: WorkerKey,
    pub prefill: Option<WorkerKey>,
}

/// What is to be placed.
#[derive(Clone, Debug)]
pub struct Question<'a> {
    pub query: &'a PlaceQuery,
    pub prompt_tokens: u32,
    /// Tokens were sent already: only workers with this arithmetic continue them.
    pub numerics: Option<NumericsId>,
    /// Whether KV must keep its bits on the way.
    pub exact: bool,
    /// Ways that KV does not go at present, in order.
    pub cut: &'a [Pair],
    /// Chooses among equals; any number.
    pub tie: u64,
}

/// The pool is empty.
pub const NO_DECODE_WORKER: &str = "NO_DECODE_WORKER";
/// The same of the prefill pool.
pub const NO_PREFILL_WORKER: &str = "NO_PREFILL_WORKER";
/// The pool is not empty, but the request was at each of its workers.
pub const DECODE_WORKERS_TRIED: &str = "DECODE_WORKERS_TRIED";

/// A way to choose.
pub trait Policy: Send + Sync {
    /// Chooses among `candidates`.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`]: nobody is there ([`NO_DECODE_WORKER`],
    /// [`NO_PREFILL_WORKER`]), all were tried ([`DECODE_WORKERS_TRIED`]), or those that are
    /// there do not fit together, naming the field and both values.
    fn place(&self, candidates: &[Candidate], question: &Question<'_>) -> Result<Placement, Error>;
}

/// The least loaded pair by tokens, cached prefixes counted.
#[derive(Clone, Copy, Debug)]
pub struct LeastTokens {
    /// The local path is taken when at most this many tokens are to be computed.
    pub local_prefill_tokens_max: u32,
    /// What one running request costs a decode worker, in tokens of prefill. A
    /// request's decode steps outlast its prompt's, so that a cached prefix of a
    /// few hundred tokens does not draw everything to one worker.
    pub request_cost_tokens: u32,
    /// While no prefill worker is there, new prompts that the local path is not for are
    /// refused, rather than computed between the steps of streams.
    pub refuse_without_prefill: bool,
}

impl Default for LeastTokens {
    fn default() -> Self {
        Self {
            local_prefill_tokens_max: 64,
            request_cost_tokens: 256,
            refuse_without_prefill: false,
        }
    }
}

impl LeastTokens {
    fn decode_cost(&self, worker: &Candidate, tokens: u32) -> u64 {
        u64::from(worker.requests) * u64::from(self.request_cost_tokens)
            + u64::from(worker.tokens_waiting)
            + u64::from(tokens - worker.cached_tokens.min(tokens))
    }
}

impl Policy for LeastTokens {
    fn place(&self, candidates: &[Candidate], question: &Question<'_>) -> Result<Placement, Error> {
        let query = question.query;
        let tokens = question.prompt_tokens.saturating_add(query.resumed_tokens);
        let mut refusal = None;
        let usable: Vec<&Candidate> = candidates
            .iter()
            .filter(|worker| fits(worker, question, &mut refusal))
            .collect();
        let decoders: Vec<&Candidate> = usable
            .iter()
            .copied()
            .filter(|worker| match &query.keep_decode {
                Some(kept) => worker.key == *kept,
                None => worker.role.decodes() && !query.exclude_decode.contains(&worker.key),
            })
            .collect();
        let decode = cheapest(&decoders, question.tie, |worker| {
            self.decode_cost(worker, tokens)
        });
        let Some(decode) = decode else {
            return match &query.keep_decode {
                // It may have left the list (draining) and still hold the reservation.
                Some(kept) => Ok(Placement {
                    decode: kept.clone(),
                    prefill: None,
                }),
                // Why others may not take it says more than that the rest was tried.
                None => Err(refusal.unwrap_or_else(|| {
                    if usable.iter().any(|worker| worker.role.decodes()) {
                        nobody("other decode", DECODE_WORKERS_TRIED)
                    } else {
                        nobody("decode", NO_DECODE_WORKER)
                    }
                })),
            };
        };
        let local = |decode: &Candidate| {
            Ok(Placement {
                decode: decode.key.clone(),
                prefill: None,
            })
        };
        let uncached = tokens - decode.cached_tokens.min(tokens);
        if !query.split_allowed || uncached <= self.local_prefill_tokens_max {
            return local(decode);
        }
        let prefillers: Vec<&Candidate> = usable
            .iter()
            .copied()
            .filter(|worker| worker.role.prefills())
            .filter(|worker| !query.exclude_prefill.contains(&worker.key))
            .collect();
        let refused = self.refuse_without_prefill && query.is_first();
        if prefillers.is_empty() {
            if refused {
                return Err(nobody("prefill", NO_PREFILL_WORKER));
            }
            return local(decode);
        }
        let is_cut = |prefill: &Candidate, decode: &Candidate| {
            let wanted = (&prefill.key, &decode.key);
            let ends = |pair: &Pair| (&pair.prefill, &pair.decode).cmp(&wanted);
            question.cut.binary_search_by(ends).is_ok()
        };
        let mut cut_off = Vec::new();
        let mut mismatch = None;
        let mut best: Option<((bool, u64), Placement)> = None;
        for (index, decode) in decoders.iter().enumerate() {
            let (apart, reached): (Vec<&Candidate>, Vec<&Candidate>) = prefillers
                .iter()
                .copied()
                .partition(|prefill| is_cut(prefill, decode));
            if !apart.is_empty() {
                cut_off.push(*decode);
            }
            let paired: Vec<(&Candidate, bool)> = reached
                .into_iter()
                .filter_map(|prefill| {
                    let pair = pairs(prefill, decode, question.exact, &mut mismatch)?;
                    Some((prefill, pair.fit() == Fit::OtherBits))
                })
                .collect();
            let bent = paired.iter().all(|(_, other_bits)| *other_bits);
            let paired: Vec<&Candidate> = paired
                .into_iter()
                .filter(|(_, other_bits)| *other_bits == bent)
                .map(|(prefill, _)| prefill)
                .collect();
            let prefill = cheapest(&paired, question.tie, |worker| prefill_cost(worker, tokens));
            let Some(prefill) = prefill else { continue };
            let cost = prefill_cost(prefill, tokens) + self.decode_cost(decode, tokens);
            // KV with other bits costs quality, and no later prompt finds it: the last resort.
            let cost = (bent, cost);
            let preferred = best.as_ref().is_none_or(|(known, placement)| {
                cost < *known
                    || cost == *known
                        && rank(index, decoders.len(), question.tie)
                            < decoders
                                .iter()
                                .position(|other| other.key == placement.decode)
                                .map_or(usize::MAX, |at| rank(at, decoders.len(), question.tie))
            });
            if preferred {
                let placement = Placement {
                    decode: decode.key.clone(),
                    prefill: Some(prefill.key.clone()),
                };
                best = Some((cost, placement));
            }
        }
        let cut_off = cheapest(&cut_off, question.tie, |worker| {
            self.decode_cost(worker, tokens)
        });
        match (best, cut_off, mismatch) {
            (Some((_, placement)), ..) => Ok(placement),
            // A reservation in hand is better served by its owner than given up.
            (None, ..) if query.keep_decode.is_some() => local(decode),
            (None, Some(_), _) if refused => Err(nobody("reachable prefill", NO_PREFILL_WORKER)),
            (None, Some(cut_off), _) => local(cut_off),
            (None, None, Some(mismatch)) => Err(mismatch),
            (None, None, None) => local(decode),
        }
    }
}

fn prefill_cost(worker: &Candidate, tokens: u32) -> u64 {
    u64::from(worker.tokens_waiting) + u64::from(tokens - worker.cached_tokens.min(tokens))
}

/// The order among equals: a rotation that `tie` starts.
fn rank(index: usize, of: usize, tie: u64) -> usize {
    let start = (tie % of as u64) as usize;
    (index + of - start) % of
}

fn cheapest<'a>(
    workers: &[&'a Candidate],
    tie: u64,
    cost: impl Fn(&Candidate) -> u64,
) -> Option<&'a Candidate> {
    workers
        .iter()
        .enumerate()
        .min_by_key(|(index, worker)| (cost(worker), rank(*index, workers.len(), tie)))
        .map(|(_, worker)| *worker)
}

fn fits(worker: &Candidate, question: &Question<'_>, refusal: &mut Option<Error>) -> bool {
    if let Err(mut error) = protocol::CURRENT.check_peer(worker.protocol) {
        error.message = format!("worker `{}`: {}", worker.key.id, error.message);
        refusal.get_or_insert(error);
        return false;
    }
    let numerics = worker.card.layout.numerics;
    match question.numerics {
        Some(wanted) if wanted != numerics => {
            let error = Error::new(
                ErrorKind::Unavailable,
                format!(
                    "tokens were drawn with numerics id `{wanted}`, worker `{}` has `{numerics}`",
                    worker.key.id
                ),
            );
            refusal.get_or_insert(
                error
                    .with_field("numerics_id")
                    .with_reason("LAYOUT_MISMATCH"),
            );
            false
        }
        _ => true,
    }
}

/// How `decode` would take the KV of `prefill`; `None`, and why, if it cannot or must not.
fn pairs(
    prefill: &Candidate,
    decode: &Candidate,
    exact: bool,
    mismatch: &mut Option<Error>,
) -> Option<Relayout> {
    let checked = || {
        prefill.protocol.check_peer(decode.protocol)?;
        let (theirs, ours) = (&prefill.card.layout, &decode.card.layout);
        let relayout = Relayout::between(theirs, ours)?;
        let able = [prefill, decode].map(|end| end.protocol.has(protocol::FEATURE_RELAYOUT));
        if able != [true; 2] {
            theirs.check_peer(ours)?;
        }
        if exact {
            relayout.check_exact()?;
        }
        Ok(relayout)
    };
    match checked() {
        Ok(relayout) => Some(relayout),
        Err::<_, Error>(mut error) => {
            error.message = format!(
                "prefill worker `{}` cannot hand over to decode worker `{}`: {}",
                prefill.key.id, decode.key.id, error.message
            );
            mismatch.get_or_insert(error);
            None
        }
    }
}

fn nobody(role: &str, reason: &str) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        format!("no {role} worker of this model is ready"),
    )
    .with_reason(reason)
    .with_retry_after(std::time::Duration::from_secs(1))
}

#[cfg(test)]
mod tests;
