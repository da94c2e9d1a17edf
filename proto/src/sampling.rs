//! Sampling parameters, their defaults and their allowed ranges.
//!
//! One table for every front door and worker. A value outside its range is
//! refused by name, never clamped. Floats have their ranges in [`float_range`].

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::ids::TokenId;
use crate::{float_range, limits};

/// How the tokens of one request are drawn.
///
/// Draws use a counter-based generator keyed by (seed, choice, position), so a
/// token depends on nothing else.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// 0 is greedy. Range 0..=100.
    pub temperature: f32,
    /// Keep the k most probable tokens; 0 keeps all. Values above the vocabulary keep all.
    pub top_k: u32,
    /// Keep the smallest set whose probability reaches `top_p`. Range (0, 1].
    pub top_p: f32,
    /// Drop tokens below `min_p` times the top probability. Range 0..=1.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or output. Range 0.01..=100, 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once for each token seen in the output. Range −2..=2.
    pub presence_penalty: f32,
    /// Subtracted per occurrence in the output. Range −2..=2.
    pub frequency_penalty: f32,
    /// Added to logits; −100 means never, 100 means always. Values −100..=100.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Set by the router when the client gave none.
    pub seed: u64,
    /// Choices. Range 1..=16.
    pub n: u32,
    /// New tokens per choice. At least 1; prompt + max_tokens must fit the context.
    pub max_tokens: u32,
    /// End tokens are masked until this many tokens were made. At most `max_tokens`.
    pub min_tokens: u32,
    /// Ids that end a choice, besides the model's own end tokens.
    pub stop_token_ids: Vec<TokenId>,
    /// Do not end at the model's end tokens.
    pub ignore_eos: bool,
    /// Alternatives to report beside each token's own log-probability; `None` reports nothing.
    pub logprobs: Option<u32>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            n: 1,
            max_tokens: 16,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            logprobs: None,
        }
    }
}

impl SamplingParams {
    /// Whether every draw is the arg max.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 || self.top_k == 1
    }

    /// Checks every field against its range; `vocab` is the number of ids the tokenizer knows.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Invalid`] naming the first wrong field and the range.
    pub fn validate(&self, vocab: u32) -> Result<(), Error> {
        float_range::TEMPERATURE.check(self.temperature)?;
        float_range::MIN_P.check(self.min_p)?;
        float_range::REPETITION_PENALTY.check(self.repetition_penalty)?;
        float_range::PRESENCE_PENALTY.check(self.presence_penalty)?;
        float_range::FREQUENCY_PENALTY.check(self.frequency_penalty)?;
        float_range::TOP_P.check(self.top_p)?;
        if self.n == 0 || self.n > limits::CHOICES_MAX {
            return Err(Error::invalid(
                "n",
                format!("{} is not in 1..={}", self.n, limits::CHOICES_MAX),
            ));
        }
        if self.max_tokens == 0 {
            return Err(Error::invalid(
                "max_tokens",
                "0 is not allowed, the least is 1",
            ));
        }
        if self.min_tokens > self.max_tokens {
            return Err(Error::invalid(
                "min_tokens",
                format!(
                    "{} is above max_tokens {}",
                    self.min_tokens, self.max_tokens
                ),
            ));
        }
        if self
            .logprobs
            .is_some_and(|top| top > limits::TOP_LOGPROBS_MAX)
        {
            return Err(Error::invalid(
                "logprobs",
                format!(
                    "{} is not in 0..={}",
                    self.logprobs.unwrap_or_default(),
                    limits::TOP_LOGPROBS_MAX
                ),
            ));
        }
        if self.stop_token_ids.len() > limits::STOP_TOKENS_MAX {
            return Err(Error::invalid(
                "stop_token_ids",
                format!(
                    "{} ids, at most {}",
                    self.stop_token_ids.len(),
                    limits::STOP_TOKENS_MAX
                ),
            ));
        }
        for id in &self.stop_token_ids {
            token("stop_token_ids", *id, vocab)?;
        }
        if self.logit_bias.len() > limits::LOGIT_BIAS_MAX.max(vocab as usize) {
            return Err(Error::invalid(
                "logit_bias",
                format!(
                    "{} entries, at most {}",
                    self.logit_bias.len(),
                    limits::LOGIT_BIAS_MAX.max(vocab as usize)
                ),
            ));
        }
        for (id, bias) in &self.logit_bias {
            token("logit_bias", *id, vocab)?;
            float_range::LOGIT_BIAS.check(*bias).map_err(|error| {
                let message = format!("of token {id}: {}", error.message);
                Error::invalid(error.field, message)
            })?;
        }
        Ok(())
    }
}

fn token(field: &str, id: TokenId, vocab: u32) -> Result<(), Error> {
    if id < vocab {
        Ok(())
    } else {
        Err(Error::invalid(
            field,
            format!("token id {id} is not below the vocabulary's {vocab}"),
        ))
    }
}

/// Why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FinishReason {
    /// An end token, a stop token id or a stop string.
    Stop,
    /// `max_tokens` or the context was reached.
    Length,
    /// Cancelled by the client.
    Cancelled,
}

/// A drawn token with what was asked about it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampledToken {
    pub id: TokenId,
    /// Natural-log probability under the model's distribution (before temperature,
    /// penalties and masks), if asked for.
    pub logprob: Option<TokenLogprob>,
}

/// The log-probability of a token and the most probable alternatives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    pub logprob: f32,
    /// Descending; finite values only.
    pub top: Vec<(TokenId, f32)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut SamplingParams)) -> String {
        let mut params = SamplingParams::default();
        change(&mut params);
        params.validate(300).unwrap_err().field
    }

    #[test]
    fn every_wrong_value_is_refused_by_name() {
        assert!(SamplingParams::default().validate(300).is_ok());
        assert_eq!(refused(|p| p.temperature = f32::NAN), "temperature");
        assert_eq!(refused(|p| p.temperature = -1.0), "temperature");
        assert_eq!(refused(|p| p.top_p = 0.0), "top_p");
        assert_eq!(refused(|p| p.top_p = f32::NAN), "top_p");
        assert_eq!(refused(|p| p.min_p = 1.1), "min_p");
        assert_eq!(
            refused(|p| p.repetition_penalty = 0.0),
            "repetition_penalty"
        );
        assert_eq!(refused(|p| p.presence_penalty = 2.1), "presence_penalty");
        assert_eq!(refused(|p| p.n = 0), "n");
        assert_eq!(refused(|p| p.n = 17), "n");
        assert_eq!(refused(|p| p.max_tokens = 0), "max_tokens");
        assert_eq!(refused(|p| p.min_tokens = 17), "min_tokens");
        assert_eq!(refused(|p| p.logprobs = Some(21)), "logprobs");
        assert_eq!(refused(|p| p.logit_bias = vec![(300, 1.0)]), "logit_bias");
        assert_eq!(refused(|p| p.logit_bias = vec![(3, 101.0)]), "logit_bias");
        assert_eq!(refused(|p| p.stop_token_ids = vec![320]), "stop_token_ids");
    }
}
