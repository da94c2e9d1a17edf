//! How positions become angles: the base, the rotated dimensions, and the scalings that
//! stretch a model's context.
//!
//! A model has one fixed table of angles, made when it is loaded. Two published scalings
//! (dynamic NTK, LongRoPE) choose their frequencies by the length of a sequence; here they
//! choose by the context that the model is loaded for, so that a key's bits depend on
//! nothing but its own tokens (docs/adr/0015).

use serde::{Deserialize, Serialize};

use super::CONTEXT_MAX;

/// How RoPE frequencies are changed for contexts longer than the training's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RopeScaling {
    None,
    /// All frequencies divided by `factor`.
    Linear {
        factor: f64,
    },
    /// A larger base for contexts above `original_context`, by NTK-aware interpolation;
    /// the plain frequencies up to it.
    ///
    /// *Source*: transformers, `modeling_rope_utils`, type `dynamic`.
    Dynamic {
        factor: f64,
        original_context: u32,
    },
    /// Frequencies that turn more than `beta_fast` times over the original context kept,
    /// those below `beta_slow` turns divided by `factor`, between them blended.
    ///
    /// *Source*: Peng et al., "YaRN", section 3.2; transformers, type `yarn`.
    Yarn {
        factor: f64,
        original_context: u32,
        beta_fast: f64,
        beta_slow: f64,
        /// The ends of the blend are rounded outwards to whole frequencies.
        truncate: bool,
    },
    /// One divisor per frequency from one of two lists: `long` for a context above
    /// `original_context`.
    ///
    /// *Source*: Ding et al., "LongRoPE"; transformers, type `longrope`.
    LongRope {
        short: Vec<f32>,
        long: Vec<f32>,
        original_context: u32,
    },
    /// Low frequencies divided by `factor`, high ones kept, between them blended.
    ///
    /// *Source*: Llama 3.1's reference code (`apply_scaling`).
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_context: u32,
    },
    /// One divisor per frequency, given by the file (`rope_freqs.weight`).
    Factors {
        divisors: Vec<f32>,
    },
}

/// One set of rotation angles.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeConfig {
    pub base: f64,
    /// Rotated dimensions of a head; the rest pass through.
    pub dims: usize,
    pub scaling: RopeScaling,
    /// Multiplies rotated queries and keys; 1 without a scaling that has one.
    pub attention_factor: f64,
}

impl RopeConfig {
    /// One divisor per frequency `base^(-2i/dims)` for a model loaded for sequences of up
    /// to `context` tokens; empty where all are 1.
    pub fn divisors(&self, context: u32) -> Vec<f32> {
        let half = self.dims / 2;
        let frequency = |i: usize| self.base.powf(-2.0 * i as f64 / self.dims as f64);
        match &self.scaling {
            RopeScaling::None => Vec::new(),
            RopeScaling::Linear { factor } => vec![*factor as f32; half],
            RopeScaling::Factors { divisors } => divisors.clone(),
            RopeScaling::LongRope { short, long, .. } => {
                let long_wanted = self.is_long(context);
                if long_wanted { long } else { short }.clone()
            }
            RopeScaling::Dynamic {
                factor,
                original_context,
            } => {
                if context <= *original_context {
                    return Vec::new();
                }
                // The base grows by `ratio^(dims / (dims - 2))`.
                let stretch = f64::from(context) / f64::from(*original_context);
                let ratio = factor * stretch - (factor - 1.0);
                (0..half)
                    .map(|i| ratio.powf(2.0 * i as f64 / (self.dims as f64 - 2.0)) as f32)
                    .collect()
            }
            RopeScaling::Yarn { factor, .. } => {
                let (low, high) = self.yarn_blend().unwrap_or_default();
                // As the reference does where the blend is one step.
                let width = if high == low { 0.001 } else { high - low };
                (0..half)
                    .map(|i| {
                        let divided = ((i as f64 - low) / width).clamp(0.0, 1.0);
                        (1.0 / (divided / factor + (1.0 - divided))) as f32
                    })
                    .collect()
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => (0..half)
                .map(|i| {
                    // Turns a pair makes over the original context.
                    let turns = f64::from(*original_context) * frequency(i) / std::f64::consts::TAU;
                    let keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor))
                        .clamp(0.0, 1.0);
                    (1.0 / (keep + (1.0 - keep) / factor)) as f32
                })
                .collect(),
        }
    }

    /// Whether a model loaded for `context` tokens takes LongRoPE's long divisors.
    fn is_long(&self, context: u32) -> bool {
        matches!(&self.scaling, RopeScaling::LongRope { original_context, .. } if context > *original_context)
    }

    /// The frequencies between which YaRN blends: up to the first all are kept, from the
    /// second on all are divided.
    fn yarn_blend(&self) -> Option<(f64, f64)> {
        let RopeScaling::Yarn {
            original_context,
            beta_fast,
            beta_slow,
            truncate,
            ..
        } = &self.scaling
        else {
            return None;
        };
        let dims = self.dims as f64;
        // The frequency that makes so many turns over the original context.
        let at = |turns: &f64| {
            let wave = f64::from(*original_context) / (turns * std::f64::consts::TAU);
            dims * wave.ln() / (2.0 * self.base.ln())
        };
        let (low, high) = (at(beta_fast), at(beta_slow));
        let (low, high) = if *truncate {
            (low.floor(), high.ceil())
        } else {
            (low, high)
        };
        Some((low.max(0.0), high.min(dims - 1.0)))
    }

    /// What is wrong with the numbers, and in which field.
    pub(super) fn problem(&self, head_dim: usize) -> Option<(&'static str, String)> {
        let Self { base, dims, .. } = self;
        if *dims == 0 || !dims.is_multiple_of(2) || *dims > head_dim {
            let message = format!("{dims} is not an even number up to {head_dim}");
            return Some(("rope dimensions", message));
        }
        if !(base.is_finite() && *base > 0.0) {
            return Some(("rope base", format!("{base} is not above 0")));
        }
        if !(self.attention_factor.is_finite() && self.attention_factor > 0.0) {
            let message = format!("{} is not above 0", self.attention_factor);
            return Some(("rope attention factor", message));
        }
        let half = dims / 2;
        let lists = match &self.scaling {
            RopeScaling::LongRope { short, long, .. } => vec![short, long],
            RopeScaling::Factors { divisors } => vec![divisors],
            _ => Vec::new(),
        };
        for list in lists {
            if list.len() != half {
                let message = format!("{} factors for {half} frequencies", list.len());
                return Some(("rope factors", message));
            }
            if let Some(factor) = list.iter().find(|f| !(f.is_finite() && **f > 0.0)) {
                return Some(("rope factors", format!("{factor} is not above 0")));
            }
        }
        match &self.scaling {
            RopeScaling::Dynamic { .. } if *dims <= 2 => Some((
                "rope dimensions",
                format!("{dims} is not above 2, as dynamic scaling needs"),
            )),
            RopeScaling::Yarn { .. } => {
                let (low, high) = self.yarn_blend()?;
                (!(low.is_finite() && high.is_finite() && low <= high)).then(|| {
                    let message = format!(
                        "yarn has no frequencies to blend, from {low} to {high} for base {base}"
                    );
                    ("rope scaling", message)
                })
            }
            _ => None,
        }
    }

    /// The context that the scaling was made for, where the file says both.
    pub(super) fn stretched_context(&self) -> Option<u32> {
        match &self.scaling {
            RopeScaling::Yarn {
                factor,
                original_context,
                ..
            } => Some(((f64::from(*original_context) * factor) as u32).min(CONTEXT_MAX)),
            _ => None,
        }
    }

    /// The longest context the scaling can be loaded for, where it is above the model's own.
    pub(super) fn context_limit(&self) -> Option<u32> {
        match &self.scaling {
            RopeScaling::Dynamic {
                factor,
                original_context,
            } => Some((f64::from(*original_context) * factor) as u32),
            _ => None,
        }
    }

    /// Base, rotated dimensions and scaling in a few words. Equal texts mean equal angles;
    /// long lists of factors stand in it as their digest.
    pub(super) fn text(&self, context: u32) -> String {
        let list = |name: &str, list: &[f32]| {
            let bytes: Vec<u8> = list.iter().flat_map(|d| d.to_le_bytes()).collect();
            format!(" {name} {}", &blake3::hash(&bytes).to_hex()[..16])
        };
        let scaling = match &self.scaling {
            RopeScaling::None => String::new(),
            RopeScaling::Linear { factor } => format!(" linear {factor}"),
            RopeScaling::Dynamic {
                original_context, ..
            } if context <= *original_context => String::new(),
            RopeScaling::Dynamic {
                factor,
                original_context,
            } => format!(" dynamic {factor} {original_context} for {context}"),
            RopeScaling::Yarn {
                factor,
                original_context,
                beta_fast,
                beta_slow,
                truncate,
            } => {
                let whole = if *truncate { "" } else { " untruncated" };
                format!(" yarn {factor} {original_context} {beta_fast} {beta_slow}{whole}")
            }
            RopeScaling::LongRope { long, .. } if self.is_long(context) => {
                list("longrope long", long)
            }
            RopeScaling::LongRope { short, .. } => list("longrope short", short),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => {
                format!(" llama3 {factor} {low_freq_factor} {high_freq_factor} {original_context}")
            }
            RopeScaling::Factors { divisors } => list("factors", divisors),
        };
        let attention = match self.attention_factor {
            1.0 => String::new(),
            factor => format!(" times {factor}"),
        };
        format!("{}/{}{scaling}{attention}", self.base, self.dims)
    }
}

/// YaRN's growth of queries and keys where the file gives none: `0.1 weight ln factor + 1`.
pub(super) fn yarn_magnitude(factor: f64, weight: f64) -> f64 {
    if factor <= 1.0 {
        1.0
    } else {
        0.1 * weight * factor.ln() + 1.0
    }
}

#[cfg(test)]
mod tests;
