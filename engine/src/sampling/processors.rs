//! What changes a row of logits before tokens are selected: bias, penalties, masks.
//!
//! A banned token's logit is minus infinity. The repetition penalty looks at prompt
//! and output, presence and frequency at the output alone (forced tokens and a first
//! token made elsewhere included).

use std::collections::HashMap;
use std::sync::Arc;

use baton_proto::TokenId;
use baton_proto::sampling::SamplingParams;

/// The bias that means "never", and its negation "nothing else".
const BIAS_LIMIT: f32 = 100.0;

/// What one choice remembers of its tokens, for the penalties. Empty when none is on.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// Distinct prompt tokens, ascending; kept only for the repetition penalty.
    prompt: Arc<[TokenId]>,
    /// Occurrences of each output token.
    output: HashMap<TokenId, u32>,
    records: bool,
}

impl History {
    pub(super) fn replay(params: &SamplingParams, prompt: &[TokenId], output: &[TokenId]) -> Self {
        let repetition = params.repetition_penalty != 1.0;
        let records =
            repetition || params.presence_penalty != 0.0 || params.frequency_penalty != 0.0;
        let mut distinct = if repetition {
            prompt.to_vec()
        } else {
            Vec::new()
        };
        distinct.sort_unstable();
        distinct.dedup();
        let mut history = Self {
            prompt: distinct.into(),
            output: HashMap::new(),
            records,
        };
        for token in output {
            history.push(*token);
        }
        history
    }

    /// Remembers one more output token.
    pub fn push(&mut self, token: TokenId) {
        if self.records {
            *self.output.entry(token).or_default() += 1;
        }
    }

    /// Whether no penalty is on.
    pub(super) fn is_neutral(&self) -> bool {
        !self.records
    }

    /// Repetition first (a factor), then presence and frequency (differences). Each
    /// token is touched on its own, so the order of the map does not matter.
    pub(super) fn penalise(&self, logits: &mut [f32], params: &SamplingParams) {
        if !self.records {
            return;
        }
        // A logit near the greatest number stays a number: only a ban is infinite.
        let repeat = |logit: &mut f32| {
            if *logit > 0.0 {
                *logit = (*logit / params.repetition_penalty).min(f32::MAX);
            } else if *logit > f32::NEG_INFINITY {
                *logit = (*logit * params.repetition_penalty).max(f32::MIN);
            }
        };
        if params.repetition_penalty != 1.0 {
            for token in self.prompt.iter() {
                if let Some(logit) = logits.get_mut(*token as usize) {
                    repeat(logit);
                }
            }
        }
        for (token, count) in &self.output {
            let Some(logit) = logits.get_mut(*token as usize) else {
                continue;
            };
            if params.repetition_penalty != 1.0 && self.prompt.binary_search(token).is_err() {
                repeat(logit);
            }
            *logit -= params.presence_penalty;
            *logit -= params.frequency_penalty * *count as f32;
        }
    }
}

/// Adds the biases; -100 bans.
pub(super) fn bias(logits: &mut [f32], biases: &[(TokenId, f32)]) {
    for (token, bias) in biases {
        if let Some(logit) = logits.get_mut(*token as usize) {
            *logit += if *bias <= -BIAS_LIMIT {
                f32::NEG_INFINITY
            } else {
                *bias
            };
        }
    }
}

/// Where some tokens have bias 100, bans all others. If every such token is banned by
/// another rule, the bias has nothing to force and does nothing.
pub(super) fn force(logits: &mut [f32], biases: &[(TokenId, f32)]) {
    let mut forced: Vec<(usize, f32)> = biases
        .iter()
        .filter(|(_, bias)| *bias >= BIAS_LIMIT)
        .filter_map(|(token, _)| {
            let logit = *logits.get(*token as usize)?;
            (logit > f32::NEG_INFINITY).then_some((*token as usize, logit))
        })
        .collect();
    if forced.is_empty() {
        return;
    }
    logits.fill(f32::NEG_INFINITY);
    for (token, logit) in forced.drain(..) {
        logits[token] = logit;
    }
}

/// Bans the given ids.
pub(super) fn ban(logits: &mut [f32], ids: &[TokenId]) {
    for id in ids {
        if let Some(logit) = logits.get_mut(*id as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
}
