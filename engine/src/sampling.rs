//! Logits of one position -> the token of one choice.
//!
//! An ordered chain: logit bias, repetition / presence / frequency penalties, masks
//! (end tokens before `min_tokens`, ids no tokenizer knows), temperature, top-k,
//! top-p, min-p, draw. A draw is keyed by (seed, choice, position) and all
//! arithmetic runs in a fixed order on this row alone, so a token depends on nothing
//! else: not on batch neighbours, not on which worker draws it, not on what was
//! drawn before or elsewhere.
//!
//! What a choice remembers ([`History`]) is a function of its tokens, so replaying
//! them after a preemption or on another worker rebuilds it exactly.
//!
//! ```text
//! philox       the counter-based generator
//! processors   what changes logits: bias, penalties, masks
//! select       which tokens remain, and the draw among them
//! exponential  exp with the same bits on every machine
//! ```

mod exponential;
mod philox;
mod processors;
mod select;

use std::sync::Arc;

use baton_proto::TokenId;
use baton_proto::sampling::{FinishReason, SampledToken, SamplingParams, TokenLogprob};

pub use philox::philox4x32_10;
pub use processors::History;

use select::Candidate;

/// Why no token could be drawn. The request fails; no other one notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error(
        "the model's logits for output token `{}` of choice `{}` (position `{position}` of the sequence) are not finite: {count} of {vocab_size}, the first is that of token id `{id}`",
        draw.index, draw.choice
    )]
    NotFinite {
        draw: Draw,
        /// Tokens of prompt and output before the one that was to be drawn.
        position: u32,
        /// The first id whose logit is not finite. Where all are, it says nothing.
        id: TokenId,
        count: u32,
        vocab_size: u32,
    },
    #[error("every token is banned by `logit_bias` or `min_tokens`")]
    NothingAllowed,
}

impl Error {
    /// The error as a client sees it.
    pub fn to_proto(self) -> baton_proto::Error {
        match self {
            Self::NotFinite { .. } => {
                baton_proto::Error::new(baton_proto::ErrorKind::Internal, self.to_string())
                    .with_reason("LOGITS_NOT_FINITE")
            }
            Self::NothingAllowed => baton_proto::Error::invalid("logit_bias", self.to_string()),
        }
    }
}

/// How one request's tokens are drawn and when its choices end. Shared by its choices.
#[derive(Clone, Debug)]
pub struct Rules {
    params: Arc<SamplingParams>,
    /// Ids that end a choice, ascending.
    ends: Arc<[TokenId]>,
    /// Ids at or above it are never chosen.
    tokenizer_size: u32,
    prompt_len: u32,
}

/// Where in a request a draw happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    pub choice: u32,
    /// Output tokens the choice has already, forced ones included.
    pub index: u32,
}

/// Buffers that are reused from draw to draw.
#[derive(Debug, Default)]
pub struct Scratch {
    logits: Vec<f32>,
    weights: Vec<f64>,
    kept: Vec<Candidate>,
}

impl Rules {
    /// The rules of a request whose `params` were validated. `eos` are the model's end tokens.
    pub fn new(
        params: &SamplingParams,
        eos: &[TokenId],
        tokenizer_size: u32,
        prompt_len: u32,
    ) -> Self {
        let mut ends = params.stop_token_ids.clone();
        if !params.ignore_eos {
            ends.extend_from_slice(eos);
        }
        ends.sort_unstable();
        ends.dedup();
        Self {
            params: Arc::new(params.clone()),
            ends: ends.into(),
            tokenizer_size,
            prompt_len,
        }
    }

    /// The parameters the rules were made from.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Whether a choice ends with `token` as its output number `index` (from 0).
    ///
    /// End tokens count only once `min_tokens` tokens stand before them.
    pub fn end_after(&self, token: TokenId, index: u32) -> Option<FinishReason> {
        if index >= self.params.min_tokens && self.ends.binary_search(&token).is_ok() {
            Some(FinishReason::Stop)
        } else if index + 1 >= self.params.max_tokens {
            Some(FinishReason::Length)
        } else {
            None
        }
    }

    /// What a choice remembers after `prompt` and `output`.
    pub fn replay(&self, prompt: &[TokenId], output: &[TokenId]) -> History {
        History::replay(&self.params, prompt, output)
    }

    /// Whether a draw is but the lowest id of the highest logit: then it needs no more of
    /// them than [`LogitsWanted::Best`](crate::step::LogitsWanted::Best) of this many ids.
    pub fn takes_best_of(&self, draw: Draw, history: &History) -> Option<u32> {
        let is_plain = self.takes_highest(draw, history) && self.params.logprobs.is_none();
        is_plain.then_some(self.tokenizer_size)
    }

    fn takes_highest(&self, draw: Draw, history: &History) -> bool {
        self.params.is_greedy()
            && self.params.logit_bias.is_empty()
            && history.is_neutral()
            && !self.masks_ends(draw)
    }

    fn masks_ends(&self, draw: Draw) -> bool {
        draw.index < self.params.min_tokens && !self.ends.is_empty()
    }

    /// The token of a draw that [`takes_best_of`](Self::takes_best_of) the ids, from the
    /// best of them.
    ///
    /// # Errors
    /// No id is known.
    pub fn take_best(best: Option<TokenId>) -> Result<SampledToken, Error> {
        let id = best.ok_or(Error::NothingAllowed)?;
        Ok(SampledToken { id, logprob: None })
    }

    /// Draws the next token of a choice from its raw `logits: [vocab_size]`.
    ///
    /// # Errors
    /// Logits that are not finite, or parameters that ban every token.
    pub fn draw(
        &self,
        draw: Draw,
        history: &History,
        logits: &[f32],
        scratch: &mut Scratch,
    ) -> Result<SampledToken, Error> {
        if let Some(id) = first_not_finite(logits) {
            return Err(Error::NotFinite {
                draw,
                position: self.prompt_len + draw.index,
                id,
                count: logits.iter().filter(|x| !x.is_finite()).count() as u32,
                vocab_size: logits.len() as u32,
            });
        }
        let known = &logits[..logits.len().min(self.tokenizer_size as usize)];
        let masks_ends = self.masks_ends(draw);
        let id = if self.takes_highest(draw, history) {
            select::arg_max(known).ok_or(Error::NothingAllowed)?
        } else {
            let Scratch {
                logits: changed,
                weights,
                kept,
            } = scratch;
            changed.clear();
            changed.extend_from_slice(known);
            processors::bias(changed, &self.params.logit_bias);
            history.penalise(changed, &self.params);
            if masks_ends {
                processors::ban(changed, &self.ends);
            }
            processors::force(changed, &self.params.logit_bias);
            let uniform = self.uniform(draw);
            select::select(changed, &self.params, uniform, weights, kept)
                .ok_or(Error::NothingAllowed)?
        };
        let logprob = self
            .params
            .logprobs
            .map(|top| log_probability(logits, known.len(), id, top as usize, scratch));
        Ok(SampledToken { id, logprob })
    }

    /// The number in [0, 1) of one draw: 53 bits of the generator's block for
    /// (seed, choice, absolute position).
    fn uniform(&self, draw: Draw) -> f64 {
        let seed = self.params.seed;
        let position = self.prompt_len + draw.index;
        let block = philox4x32_10(
            [position, draw.choice, 0, 0],
            [seed as u32, (seed >> 32) as u32],
        );
        let bits = (u64::from(block[0]) << 21) | u64::from(block[1] >> 11);
        bits as f64 / (1_u64 << 53) as f64
    }
}

/// The first id whose logit is not finite.
fn first_not_finite(logits: &[f32]) -> Option<TokenId> {
    // A product with 0 is 0 for every finite number and NaN otherwise, and this sum
    // runs at memory speed.
    let mut lanes = [0.0_f32; 16];
    let chunks = logits.chunks_exact(16);
    let mut probe: f32 = chunks.remainder().iter().map(|x| x * 0.0).sum();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += x * 0.0;
        }
    }
    probe += lanes.iter().sum::<f32>();
    if probe == 0.0 {
        return None;
    }
    logits
        .iter()
        .position(|x| !x.is_finite())
        .map(|id| id as TokenId)
}

/// Natural-log probability of `id` and the `top` best among the first `known` ids,
/// under the softmax of the raw logits over the whole vocabulary.
fn log_probability(
    logits: &[f32],
    known: usize,
    id: TokenId,
    top: usize,
    scratch: &mut Scratch,
) -> TokenLogprob {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits
        .iter()
        .map(|x| exponential::exp(f64::from(*x) - f64::from(max)))
        .sum();
    let normaliser = f64::from(max) + sum.ln();
    let of = |logit: f32| (f64::from(logit) - normaliser) as f32;
    let best = &mut scratch.kept;
    select::best(&logits[..known], top, best);
    TokenLogprob {
        logprob: of(logits[id as usize]),
        top: best
            .iter()
            .map(|candidate| (candidate.id, of(candidate.logit)))
            .collect(),
    }
}

#[cfg(test)]
mod tests;
