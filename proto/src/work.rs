//! A request as workers take it: tokens and numbers, checked once, by one rule
//! for both roles.

use std::time::Duration;

use crate::environment::{self, Defect};
use crate::error::{Error, ErrorKind};
use crate::ids::{Epoch, RequestId, TokenId};
use crate::model_card::ModelCard;
use crate::protocol::{self, ProtocolVersion};
use crate::sampling::SamplingParams;
use crate::slo::Slo;
use crate::{convert, limits, v1};

/// A client's request, and which of the routers that served it speaks for it: of two
/// generations the higher one does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fence {
    pub request: String,
    pub generation: u64,
}

impl From<v1::Fence> for Fence {
    fn from(wire: v1::Fence) -> Self {
        Self {
            request: wire.request,
            generation: wire.generation,
        }
    }
}

/// A checked [`v1::WorkRequest`].
#[derive(Clone, Debug, PartialEq)]
pub struct WorkOrder {
    pub request_id: RequestId,
    /// At least one token, every id below the vocabulary.
    pub prompt: Vec<TokenId>,
    /// Empty, or one list per choice.
    pub forced: Vec<Vec<TokenId>>,
    pub sampling: SamplingParams,
    pub cache_salt: Vec<u8>,
    pub use_cache: bool,
    /// Whether anything that could change a token is refused.
    pub exact: bool,
    /// What is left of the request's time.
    pub deadline: Option<Duration>,
    /// What it expects of latency.
    pub slo: Slo,
    /// Higher goes first.
    pub priority: i32,
    /// Whose work it is.
    pub fence: Option<Fence>,
}

impl WorkOrder {
    /// Checks a request against the worker it reached.
    ///
    /// # Errors
    /// [`ErrorKind::Fenced`] for another epoch or model revision,
    /// [`ErrorKind::Unavailable`] for another protocol, [`ErrorKind::Unsupported`]
    /// for an adapter, [`ErrorKind::Invalid`] for the rest; each names the field.
    pub fn from_wire(wire: v1::WorkRequest, epoch: Epoch, card: &ModelCard) -> Result<Self, Error> {
        let peer = wire
            .protocol
            .ok_or_else(|| Error::invalid("work.protocol", "missing"))?;
        protocol::CURRENT.check_peer(ProtocolVersion::from(peer))?;
        if wire.epoch != epoch.0 && !environment::has(Defect::EpochUnchecked) {
            return Err(fenced(
                "work.epoch",
                &epoch.to_string(),
                &Epoch(wire.epoch).to_string(),
            ));
        }
        if wire.model_revision != card.revision.0 {
            return Err(fenced(
                "work.model_revision",
                &card.revision.0,
                &wire.model_revision,
            ));
        }
        if !wire.adapter.is_empty() {
            return Err(Error::unsupported(
                "work.adapter",
                "adapters are not supported",
            ));
        }
        if wire.request_id.is_empty() {
            return Err(Error::invalid("work.request_id", "missing"));
        }
        if wire.prompt.is_empty() {
            return Err(Error::invalid(
                "work.prompt",
                "is empty, at least one token is needed",
            ));
        }
        let wire_sampling = wire
            .sampling
            .as_ref()
            .ok_or_else(|| Error::invalid("work.sampling", "missing"))?;
        if wire_sampling.seed.is_none() || wire_sampling.max_tokens.is_none() {
            return Err(Error::invalid(
                "work.sampling",
                "seed and max_tokens must be set",
            ));
        }
        let sampling = convert::sampling_from_wire(wire_sampling, 1, 0);
        sampling.validate(card.tokenizer_size)?;
        let forced = convert::forced_from_wire(&wire.forced, sampling.n)?;
        for (field, tokens) in std::iter::once(("work.prompt", &wire.prompt))
            .chain(forced.iter().map(|tokens| ("work.forced", tokens)))
        {
            if let Some(id) = tokens.iter().find(|id| **id >= card.vocab_size) {
                return Err(Error::invalid(
                    field,
                    format!(
                        "token id {id} is not below the vocabulary's {}",
                        card.vocab_size
                    ),
                ));
            }
        }
        if let Some(list) = forced
            .iter()
            .find(|list| list.len() >= sampling.max_tokens as usize)
        {
            return Err(Error::invalid(
                "work.forced",
                format!(
                    "{} tokens leave nothing of max_tokens {}",
                    list.len(),
                    sampling.max_tokens
                ),
            ));
        }
        check_context(wire.prompt.len(), sampling.max_tokens, card.context_max)?;
        let slo = Slo::from_wire(wire.slo.as_ref(), "work.slo")?;
        check_priority(wire.priority, "work.priority")?;
        Ok(Self {
            request_id: RequestId(wire.request_id),
            prompt: wire.prompt,
            forced,
            sampling,
            cache_salt: wire.cache_salt,
            use_cache: wire.use_cache,
            exact: wire.exact,
            deadline: wire.deadline_ms.map(Duration::from_millis),
            slo,
            priority: wire.priority,
            fence: wire.fence.map(Fence::from),
        })
    }
}

/// Refuses a priority outside [`limits::PRIORITY`].
///
/// # Errors
/// [`ErrorKind::Invalid`] naming `field`.
pub fn check_priority(priority: i32, field: &str) -> Result<(), Error> {
    let allowed = limits::PRIORITY;
    if allowed.contains(&priority) {
        return Ok(());
    }
    Err(Error::invalid(
        field,
        format!("{priority} is not within {allowed:?}"),
    ))
}

/// Refuses a request whose prompt and output cannot both fit the context.
///
/// # Errors
/// [`ErrorKind::Invalid`], reason `CONTEXT_LENGTH_EXCEEDED`, naming the context,
/// the prompt's tokens and the tokens asked for.
pub fn check_context(prompt: usize, max_tokens: u32, context_max: u32) -> Result<(), Error> {
    if prompt as u64 + u64::from(max_tokens) <= u64::from(context_max) {
        return Ok(());
    }
    Err(Error::invalid(
        "max_tokens",
        format!(
            "the model's context is {context_max} tokens, the prompt has {prompt} and {max_tokens} were asked for"
        ),
    )
    .with_reason("CONTEXT_LENGTH_EXCEEDED"))
}

fn fenced(field: &str, ours: &str, theirs: &str) -> Error {
    Error::new(
        ErrorKind::Fenced,
        format!("this worker has `{ours}`, the request names `{theirs}`"),
    )
    .with_field(field)
}

/// Bytes of one piece of a streamed tokenizer specification.
const SPEC_CHUNK_BYTES: usize = 256 << 10;

/// A tokenizer specification's JSON as stream messages.
pub fn spec_chunks(json: &[u8]) -> Vec<v1::TokenizerSpecChunk> {
    json.chunks(SPEC_CHUNK_BYTES)
        .map(|chunk| v1::TokenizerSpecChunk {
            data: chunk.to_vec(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{ModelRevision, NumericsId};
    use crate::kv_layout::{KvDtype, KvGroup, KvGroupKind, KvLayout};

    fn card() -> ModelCard {
        ModelCard {
            name: "rand".into(),
            revision: ModelRevision("rand@1".into()),
            architecture: "llama".into(),
            vocab_size: 320,
            tokenizer_size: 300,
            context_max: 64,
            parameters: 1,
            created: 0,
            weight_bytes: 1,
            layout: KvLayout {
                block_size: 16,
                dtype: KvDtype::F32,
                scale_group: 0,
                kv_heads: 2,
                head_dim: 8,
                layers: 1,
                groups: vec![KvGroup {
                    kind: KvGroupKind::Full,
                    layers: vec![0],
                }],
                numerics: NumericsId([0; 16]),
                origin: None,
                shard: None,
            },
            tokenizer_hash: String::new(),
        }
    }

    fn request() -> v1::WorkRequest {
        v1::WorkRequest {
            protocol: Some(protocol::CURRENT.into()),
            request_id: "r".into(),
            epoch: 7,
            model_revision: "rand@1".into(),
            prompt: vec![1, 2, 3],
            sampling: Some((&SamplingParams::default()).into()),
            ..v1::WorkRequest::default()
        }
    }

    fn refused(change: impl FnOnce(&mut v1::WorkRequest)) -> Error {
        let mut wire = request();
        change(&mut wire);
        WorkOrder::from_wire(wire, Epoch(7), &card()).unwrap_err()
    }

    #[test]
    fn a_wrong_field_is_named() {
        assert!(WorkOrder::from_wire(request(), Epoch(7), &card()).is_ok());
        assert_eq!(refused(|r| r.epoch = 8).kind, ErrorKind::Fenced);
        assert_eq!(
            refused(|r| r.model_revision = "x".into()).field,
            "work.model_revision"
        );
        assert_eq!(refused(|r| r.prompt.clear()).field, "work.prompt");
        assert_eq!(refused(|r| r.priority = 101).field, "work.priority");
        assert_eq!(refused(|r| r.prompt = vec![320]).field, "work.prompt");
        assert_eq!(
            refused(|r| r.adapter = "a".into()).kind,
            ErrorKind::Unsupported
        );
        assert_eq!(refused(|r| r.protocol = None).field, "work.protocol");
        let slo = |itl_ms| v1::Slo {
            ttft_ms: None,
            itl_ms: Some(itl_ms),
        };
        assert_eq!(refused(|r| r.slo = Some(slo(0.0))).field, "work.slo.itl_ms");
        assert_eq!(
            refused(|r| r.prompt = vec![1; 60]).reason,
            "CONTEXT_LENGTH_EXCEEDED"
        );
    }
}
