//! Conversions between the plain types and the generated messages, in one place.

use crate::error::Error;
use crate::ids::TokenId;
use crate::protocol::ProtocolVersion;
use crate::sampling::{FinishReason, SampledToken, SamplingParams, TokenLogprob};
use crate::v1;

impl From<ProtocolVersion> for v1::ProtocolVersion {
    fn from(version: ProtocolVersion) -> Self {
        Self {
            major: version.major,
            minor: version.minor,
            features: version.features,
        }
    }
}

impl From<v1::ProtocolVersion> for ProtocolVersion {
    fn from(version: v1::ProtocolVersion) -> Self {
        Self {
            major: version.major,
            minor: version.minor,
            features: version.features,
        }
    }
}

/// Sampling parameters from the wire, absent fields at their defaults. An absent
/// `max_tokens` becomes `max_tokens_default`, an absent seed `seed_default`.
/// Ranges are not checked here: see [`SamplingParams::validate`].
pub fn sampling_from_wire(
    wire: &v1::SamplingParams,
    max_tokens_default: u32,
    seed_default: u64,
) -> SamplingParams {
    let defaults = SamplingParams::default();
    // Minus zero is zero, also to what compares parameters by their bits.
    let float = |given: Option<f32>, default: f32| given.unwrap_or(default) + 0.0;
    let mut logit_bias: Vec<(TokenId, f32)> = wire
        .logit_bias
        .iter()
        .map(|(id, bias)| (*id, *bias + 0.0))
        .collect();
    // A map has no order; sampling must not depend on one.
    logit_bias.sort_by_key(|(id, _)| *id);
    SamplingParams {
        temperature: float(wire.temperature, defaults.temperature),
        top_k: wire.top_k.unwrap_or(defaults.top_k),
        top_p: float(wire.top_p, defaults.top_p),
        min_p: float(wire.min_p, defaults.min_p),
        repetition_penalty: float(wire.repetition_penalty, defaults.repetition_penalty),
        presence_penalty: float(wire.presence_penalty, defaults.presence_penalty),
        frequency_penalty: float(wire.frequency_penalty, defaults.frequency_penalty),
        logit_bias,
        seed: wire.seed.unwrap_or(seed_default),
        n: wire.n.unwrap_or(defaults.n),
        max_tokens: wire.max_tokens.unwrap_or(max_tokens_default),
        min_tokens: wire.min_tokens.unwrap_or(defaults.min_tokens),
        stop_token_ids: wire.stop_token_ids.clone(),
        ignore_eos: wire.ignore_eos.unwrap_or(defaults.ignore_eos),
        logprobs: wire.logprobs,
    }
}

impl From<&SamplingParams> for v1::SamplingParams {
    fn from(params: &SamplingParams) -> Self {
        Self {
            temperature: Some(params.temperature),
            top_k: Some(params.top_k),
            top_p: Some(params.top_p),
            min_p: Some(params.min_p),
            repetition_penalty: Some(params.repetition_penalty),
            presence_penalty: Some(params.presence_penalty),
            frequency_penalty: Some(params.frequency_penalty),
            logit_bias: params.logit_bias.iter().copied().collect(),
            seed: Some(params.seed),
            n: Some(params.n),
            max_tokens: Some(params.max_tokens),
            min_tokens: Some(params.min_tokens),
            stop_token_ids: params.stop_token_ids.clone(),
            ignore_eos: Some(params.ignore_eos),
            logprobs: params.logprobs,
        }
    }
}

impl From<FinishReason> for v1::FinishReason {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop => Self::Stop,
            FinishReason::Length => Self::Length,
            FinishReason::Cancelled => Self::Cancelled,
        }
    }
}

/// The plain form of a finish reason; `None` for unspecified.
pub fn finish_from_wire(reason: v1::FinishReason) -> Option<FinishReason> {
    match reason {
        v1::FinishReason::Unspecified => None,
        v1::FinishReason::Stop => Some(FinishReason::Stop),
        v1::FinishReason::Length => Some(FinishReason::Length),
        v1::FinishReason::Cancelled => Some(FinishReason::Cancelled),
    }
}

impl From<&TokenLogprob> for v1::Logprobs {
    fn from(logprob: &TokenLogprob) -> Self {
        Self {
            logprob: logprob.logprob,
            top: logprob
                .top
                .iter()
                .map(|(id, logprob)| v1::TokenLogprob {
                    id: *id,
                    logprob: *logprob,
                })
                .collect(),
        }
    }
}

impl From<&v1::Logprobs> for TokenLogprob {
    fn from(wire: &v1::Logprobs) -> Self {
        Self {
            logprob: wire.logprob,
            top: wire
                .top
                .iter()
                .map(|entry| (entry.id, entry.logprob))
                .collect(),
        }
    }
}

/// A drawn token on the wire, with the reason if its choice ends with it.
pub fn sampled_to_wire(token: &SampledToken, finish: Option<FinishReason>) -> v1::SampledToken {
    let finish = finish.map_or(v1::FinishReason::Unspecified, v1::FinishReason::from);
    v1::SampledToken {
        id: token.id,
        logprobs: token.logprob.as_ref().map(v1::Logprobs::from),
        finish: finish.into(),
    }
}

/// A drawn token from the wire, with the reason if its choice ends with it.
pub fn sampled_from_wire(wire: &v1::SampledToken) -> (SampledToken, Option<FinishReason>) {
    let token = SampledToken {
        id: wire.id,
        logprob: wire.logprobs.as_ref().map(TokenLogprob::from),
    };
    (token, finish_from_wire(wire.finish()))
}

/// Forced tokens from the wire: empty, or one list per choice.
///
/// # Errors
/// [`crate::ErrorKind::Invalid`] when the count is neither 0 nor `n`.
pub fn forced_from_wire(wire: &[v1::TokenIds], n: u32) -> Result<Vec<Vec<TokenId>>, Error> {
    if !wire.is_empty() && wire.len() != n as usize {
        return Err(Error::invalid(
            "forced",
            format!("{} lists for {n} choices", wire.len()),
        ));
    }
    Ok(wire.iter().map(|list| list.ids.clone()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minus_zero_is_zero() {
        let wire = v1::SamplingParams {
            temperature: Some(-0.0),
            presence_penalty: Some(-0.0),
            logit_bias: [(3, -0.0)].into(),
            ..v1::SamplingParams::default()
        };
        let params = sampling_from_wire(&wire, 1, 2);
        let floats = [
            params.temperature,
            params.presence_penalty,
            params.logit_bias[0].1,
        ];
        assert_eq!(floats.map(f32::to_bits), [0; 3]);
    }

    #[test]
    fn sampling_parameters_survive_the_wire() {
        let params = SamplingParams {
            temperature: 0.3,
            logit_bias: vec![(1, -100.0), (9, 5.0)],
            seed: u64::MAX,
            n: 3,
            logprobs: Some(0),
            ..SamplingParams::default()
        };
        let wire = v1::SamplingParams::from(&params);
        assert_eq!(sampling_from_wire(&wire, 1, 2), params);
    }
}
