//! Which tokens remain after temperature, top-k, top-p and min-p, and the draw among them.
//!
//! Ties go to the lower id everywhere. The draw walks the remaining tokens by
//! ascending id, so a limit that removes nothing changes nothing. Nothing here sorts
//! a whole vocabulary.

use baton_proto::TokenId;
use baton_proto::sampling::SamplingParams;

use super::exponential::exp;

/// A token that may be chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub logit: f32,
    pub id: TokenId,
}

impl Candidate {
    /// Best first: higher logit, then lower id. Logits are never NaN here.
    fn rank(a: &Self, b: &Self) -> std::cmp::Ordering {
        b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
    }
}

/// The lowest id with the highest logit; none if all are banned.
pub(super) fn arg_max(logits: &[f32]) -> Option<TokenId> {
    let mut lanes = [f32::NEG_INFINITY; 16];
    let chunks = logits.chunks_exact(16);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = if *x > *lane { *x } else { *lane };
        }
    }
    let max = lanes
        .iter()
        .chain(rest)
        .copied()
        .fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        return None;
    }
    logits
        .iter()
        .position(|x| *x == max)
        .map(|id| id as TokenId)
}

/// Fills `kept` with the `count` best tokens, best first; banned ones are left out.
pub(super) fn best(logits: &[f32], count: usize, kept: &mut Vec<Candidate>) {
    kept.clear();
    if count == 0 {
        return;
    }
    // Keep up to twice `count`, cut back to `count` when full: after a few hundred
    // tokens nearly every other one fails the first comparison.
    let room = count.saturating_mul(2).min(logits.len().max(1));
    let mut threshold = f32::NEG_INFINITY;
    for (id, logit) in logits.iter().enumerate() {
        // Ids ascend, so a tie with the threshold loses against those already kept.
        if *logit <= threshold {
            continue;
        }
        kept.push(Candidate {
            logit: *logit,
            id: id as TokenId,
        });
        if kept.len() > count && kept.len() >= room {
            kept.select_nth_unstable_by(count - 1, Candidate::rank);
            kept.truncate(count);
            threshold = kept[count - 1].logit;
        }
    }
    kept.sort_unstable_by(Candidate::rank);
    kept.truncate(count);
}

/// Chooses a token of the processed `logits` with `uniform` in [0, 1); none if all are banned.
pub(super) fn select(
    logits: &[f32],
    params: &SamplingParams,
    uniform: f64,
    weights: &mut Vec<f64>,
    kept: &mut Vec<Candidate>,
) -> Option<TokenId> {
    let top = arg_max(logits)?;
    // With min_p = 1 only the best token reaches its own probability.
    if params.is_greedy() || params.min_p >= 1.0 {
        return Some(top);
    }
    let max = f64::from(logits[top as usize]);
    let temperature = f64::from(params.temperature);
    let weight = |logit: f32| exp((f64::from(logit) - max) / temperature);
    let top_p = f64::from(params.top_p);
    let min_p = f64::from(params.min_p);

    let top_k = params.top_k as usize;
    if top_k > 0 && top_k < logits.len() {
        best(logits, top_k, kept);
        let total: f64 = kept.iter().map(|candidate| weight(candidate.logit)).sum();
        nucleus(kept, weight, top_p * total);
    } else {
        weights.clear();
        weights.extend(logits.iter().map(|logit| weight(*logit)));
        if top_p >= 1.0 {
            return draw_all(weights, min_p, uniform);
        }
        let target = top_p * weights.iter().sum::<f64>();
        // The nucleus is nearly always small; look for it among ever more of the best.
        let mut count = 64;
        loop {
            best(logits, count, kept);
            if nucleus(kept, weight, target) || count >= logits.len() {
                break;
            }
            count = (count * 8).min(logits.len());
        }
    }
    kept.retain(|candidate| weight(candidate.logit) >= min_p);
    kept.sort_unstable_by_key(|candidate| candidate.id);
    let total: f64 = kept.iter().map(|candidate| weight(candidate.logit)).sum();
    let mut left = uniform * total;
    for candidate in kept.iter() {
        left -= weight(candidate.logit);
        if left < 0.0 {
            return Some(candidate.id);
        }
    }
    // Rounding can leave a crumb; it belongs to the last token that can be drawn.
    kept.iter()
        .rev()
        .find(|candidate| weight(candidate.logit) > 0.0)
        .map(|candidate| candidate.id)
}

/// Cuts `kept` (best first) after the token with which the weights reach `target`.
/// Returns whether they do.
fn nucleus(kept: &mut Vec<Candidate>, weight: impl Fn(f32) -> f64, target: f64) -> bool {
    let mut sum = 0.0;
    for (at, candidate) in kept.iter().enumerate() {
        sum += weight(candidate.logit);
        if sum >= target {
            kept.truncate(at + 1);
            return true;
        }
    }
    false
}

/// Draws among all tokens whose weight (the best has 1) is at least `min_p`.
fn draw_all(weights: &mut [f64], min_p: f64, uniform: f64) -> Option<TokenId> {
    let mut total = 0.0;
    for weight in weights.iter_mut() {
        if *weight < min_p {
            *weight = 0.0;
        }
        total += *weight;
    }
    let mut left = uniform * total;
    for (id, weight) in weights.iter().enumerate() {
        left -= weight;
        if left < 0.0 {
            return Some(id as TokenId);
        }
    }
    weights
        .iter()
        .rposition(|weight| *weight > 0.0)
        .map(|id| id as TokenId)
}
