//! What a request to resume a stream is checked for, beside its token.

use std::time::{SystemTime, UNIX_EPOCH};

use baton_proto::sampling::SamplingParams;
use baton_proto::{Error, ErrorKind, TokenId, v1};

use crate::resume::{Claims, prompt_hash};
use crate::workers::{ServedModel, Workers};

/// The number of an attempt: rises along a chain of tokens whatever clocks say, and of
/// two attempts that resume one token the later one has the higher.
pub(super) fn generation(claims: Option<&Claims>) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |since| {
        u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
    });
    claims.map_or(now, |claims| now.max(claims.generation.saturating_add(1)))
}

/// The model that the stream began with, if it is the one that is asked for.
pub(super) fn model(workers: &Workers, asked: &str, claims: &Claims) -> Result<ServedModel, Error> {
    let changed =
        |message: String| Error::invalid("model", message).with_reason("RESUME_MODEL_CHANGED");
    let begun = &claims.model_revision;
    let model = match workers.model(begun) {
        Ok(model) => model,
        Err(error) if error.kind == ErrorKind::NotFound => {
            return Err(changed(format!(
                "the stream began with `{begun}`, which is not served any more"
            )));
        }
        Err(error) => return Err(error),
    };
    if asked.is_empty() || asked == model.card.name || asked == begun {
        return Ok(model);
    }
    Err(changed(format!(
        "`{asked}`, the stream began with `{begun}`"
    )))
}

/// Fills in what the stream began with where the request leaves it open.
pub(super) fn fill_in(sampling: &mut v1::SamplingParams, claims: &Claims) -> Result<(), Error> {
    let seed = *sampling.seed.get_or_insert(claims.seed);
    if seed != claims.seed {
        let message = format!("{seed}, the stream began with {}", claims.seed);
        return Err(Error::invalid("seed", message).with_reason("RESUME_PARAMETER_CHANGED"));
    }
    sampling.max_tokens.get_or_insert(claims.max_tokens);
    Ok(())
}

/// Refuses another prompt.
pub(super) fn check_prompt(claims: &Claims, field: &str, prompt: &[TokenId]) -> Result<(), Error> {
    if claims.prompt_hash == prompt_hash(prompt).as_bytes() {
        return Ok(());
    }
    let message = "is not the prompt that the stream to be resumed began with";
    Err(Error::invalid(field, message).with_reason("RESUME_PROMPT_CHANGED"))
}

/// Refuses what cannot have been received, as far as that can be told beforehand.
pub(super) fn check_received(
    choices: &[v1::ResumeChoice],
    sampling: &SamplingParams,
    vocabulary: u32,
) -> Result<(), Error> {
    let mismatch = |field: String, message: String| {
        Err(Error::invalid(field, message).with_reason("RESUME_MISMATCH"))
    };
    if choices.len() != sampling.n as usize {
        let message = format!("{} entries for {} choices", choices.len(), sampling.n);
        return mismatch("resume.choices".to_owned(), message);
    }
    for (index, choice) in choices.iter().enumerate() {
        let field = |name: &str| format!("resume.choices[{index}].{name}");
        let ids = &choice.token_ids;
        let count = choice.tokens_received.unwrap_or(ids.len() as u32);
        if !ids.is_empty() && count as usize != ids.len() {
            let message = format!("{count} beside {} token_ids", ids.len());
            return mismatch(field("tokens_received"), message);
        }
        if count > sampling.max_tokens {
            let name = if ids.is_empty() {
                "tokens_received"
            } else {
                "token_ids"
            };
            let message = format!("{count} tokens, max_tokens is {}", sampling.max_tokens);
            return mismatch(field(name), message);
        }
        if let Some(id) = ids.iter().find(|id| **id >= vocabulary) {
            let message = format!("token id {id} is not below the vocabulary's {vocabulary}");
            return mismatch(field("token_ids"), message);
        }
        let before_last = &ids[..ids.len().saturating_sub(1)];
        if let Some(id) = before_last
            .iter()
            .find(|id| sampling.stop_token_ids.contains(id))
        {
            let message = format!("token id {id} ends the choice, nothing can follow it");
            return mismatch(field("token_ids"), message);
        }
    }
    Ok(())
}
