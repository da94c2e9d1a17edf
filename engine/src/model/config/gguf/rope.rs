//! The rotations of a GGUF file.
//!
//! *Source*: llama.cpp, `llama_model::load_hparams` and `ggml_rope_ext`.

use super::lookup::Keys;
use crate::model::config::rope::yarn_magnitude;
use crate::model::config::{RopeConfig, RopeScaling};
use crate::model::error::Error;
use crate::model::family::Family;
use crate::model::tensors::Tensors;

/// Divisors of the RoPE frequencies, which converters of llama3-scaled models write.
const FACTORS: &str = "rope_freqs.weight";
/// Divisors for contexts up to the original one, and for longer ones.
const FACTORS_SHORT: &str = "rope_factors_short.weight";
const FACTORS_LONG: &str = "rope_factors_long.weight";

const TYPE: &str = "rope.scaling.type";
const FACTOR: &str = "rope.scaling.factor";
const FACTOR_OLD: &str = "rope.scale_linear";
const ORIGINAL: &str = "rope.scaling.original_context_length";
const ATTENTION: &str = "rope.scaling.attn_factor";
const BETA_FAST: &str = "rope.scaling.yarn_beta_fast";
const BETA_SLOW: &str = "rope.scaling.yarn_beta_slow";
const BASE: &str = "rope.freq_base";
const BASE_LOCAL: &str = "rope.freq_base_swa";
const DIMS: &str = "rope.dimension_count";
const DIMS_LOCAL: &str = "rope.dimension_count_swa";

/// What rotations have to fit.
pub(super) struct Shape {
    pub head_dim: usize,
    /// The model's own context.
    pub context: u32,
    /// Some layers have a window.
    pub windowed: bool,
}

/// The model's rotations: one, or that of full layers and that of windowed ones. Takes the
/// RoPE factors out of `tensors`, where there are any.
///
/// # Errors
/// [`Error::Config`], [`Error::Unsupported`] or [`Error::Tensor`], naming key or tensor.
pub(super) fn read(
    family: &Family,
    keys: &Keys<'_, '_>,
    tensors: &mut Tensors<'_>,
    shape: Shape,
) -> Result<Vec<RopeConfig>, Error> {
    let dims = keys.size_or(DIMS, shape.head_dim)?;
    let dims_local = keys.size_or(DIMS_LOCAL, dims)?;
    if dims_local != dims {
        let message = format!("{dims_local} differs from {DIMS} {dims}");
        return Err(keys.unsupported(DIMS_LOCAL, message));
    }
    let base = keys.float(BASE)?.unwrap_or(family.rope_base_default);
    let own_factor = match keys.float(ATTENTION)? {
        None => 1.0,
        Some(factor) if factor > 0.0 => factor,
        Some(factor) => return Err(keys.error(ATTENTION, format!("{factor} is not above 0"))),
    };
    let (scaling, magnitude) = scaling(keys, tensors, &shape, dims / 2)?;
    let mut ropes = vec![RopeConfig {
        base,
        dims,
        scaling,
        attention_factor: magnitude * own_factor,
    }];
    let base_local = keys.float(BASE_LOCAL)?;
    match (family.rope_base_local, base_local) {
        (None, Some(local)) if local != base => {
            let message = format!("`{local}` is refused: all layers of this family have one base");
            return Err(keys.unsupported(BASE_LOCAL, message));
        }
        (Some(default), local) if shape.windowed => ropes.push(RopeConfig {
            base: local.unwrap_or(default),
            dims,
            scaling: RopeScaling::None,
            attention_factor: own_factor,
        }),
        _ => {}
    }
    Ok(ropes)
}

/// The scaling of full layers and what it multiplies queries and keys by.
fn scaling(
    keys: &Keys<'_, '_>,
    tensors: &mut Tensors<'_>,
    shape: &Shape,
    frequencies: usize,
) -> Result<(RopeScaling, f64), Error> {
    let kind = keys.gguf.string(&keys.key(TYPE))?;
    let factor = factor(keys)?;
    let (scaling, magnitude) = match kind {
        // Without a type a factor means linear scaling.
        None => (factor.map_or(RopeScaling::None, linear), 1.0),
        Some("none") => {
            if let Some(factor) = factor.filter(|factor| *factor != 1.0) {
                let message = format!("`{factor}` is refused: the type is `none`");
                return Err(keys.unsupported(FACTOR, message));
            }
            (RopeScaling::None, 1.0)
        }
        Some("linear") => (linear(needed(keys, factor)?), 1.0),
        Some("yarn") => yarn(keys, needed(keys, factor)?, shape.context)?,
        Some("longrope") => {
            if let Some(factor) = factor.filter(|factor| *factor != 1.0) {
                let message = format!("`{factor}` is refused: longrope has divisors instead");
                return Err(keys.unsupported(FACTOR, message));
            }
            let scaling = RopeScaling::LongRope {
                short: tensors.take_vector(FACTORS_SHORT, frequencies)?,
                long: tensors.take_vector(FACTORS_LONG, frequencies)?,
                original_context: original(keys, shape.context)?,
            };
            (scaling, 1.0)
        }
        Some(other) => {
            return Err(keys.unsupported(
                TYPE,
                format!("`{other}` is not one of none, linear, yarn, longrope"),
            ));
        }
    };
    let reads_original = matches!(
        scaling,
        RopeScaling::Yarn { .. } | RopeScaling::LongRope { .. }
    );
    if !reads_original {
        let given = original(keys, shape.context)?;
        if given != shape.context {
            let message = format!("`{given}` is refused: no scaling reads it");
            return Err(keys.unsupported(ORIGINAL, message));
        }
    }
    if !matches!(scaling, RopeScaling::Yarn { .. }) {
        for beta in [BETA_FAST, BETA_SLOW] {
            if let Some(value) = keys.float(beta)? {
                let message = format!("`{value}` is refused: the scaling is not yarn");
                return Err(keys.unsupported(beta, message));
            }
        }
    }
    if tensors.dims(FACTORS).is_none() {
        return Ok((scaling, magnitude));
    }
    let divisors = tensors.take_vector(FACTORS, frequencies)?;
    if divisors.iter().any(|divisor| *divisor <= 0.0) {
        let message = "has a factor not above 0";
        return Err(Error::tensor(keys.gguf.path(), FACTORS, message));
    }
    if scaling != RopeScaling::None {
        let message = format!("a scaling together with `{FACTORS}`");
        return Err(keys.unsupported(TYPE, message));
    }
    Ok((RopeScaling::Factors { divisors }, magnitude))
}

fn linear(factor: f64) -> RopeScaling {
    if factor == 1.0 {
        RopeScaling::None
    } else {
        RopeScaling::Linear { factor }
    }
}

fn yarn(keys: &Keys<'_, '_>, factor: f64, context: u32) -> Result<(RopeScaling, f64), Error> {
    if factor < 1.0 {
        return Err(keys.error(FACTOR, format!("{factor} is below 1")));
    }
    let turns = |name: &str, default| match keys.float(name)? {
        None => Ok(default),
        Some(turns) if turns > 0.0 => Ok(turns),
        Some(turns) => Err(keys.error(name, format!("{turns} is not above 0"))),
    };
    let (beta_fast, beta_slow) = (turns(BETA_FAST, 32.0)?, turns(BETA_SLOW, 1.0)?);
    if beta_fast < beta_slow {
        let message = format!("{beta_fast} is below {BETA_SLOW} {beta_slow}");
        return Err(keys.error(BETA_FAST, message));
    }
    let scaling = RopeScaling::Yarn {
        factor,
        original_context: original(keys, context)?,
        beta_fast,
        beta_slow,
        truncate: true,
    };
    Ok((scaling, yarn_magnitude(factor, 1.0)))
}

/// The factor by either name.
fn factor(keys: &Keys<'_, '_>) -> Result<Option<f64>, Error> {
    let positive = |name: &str| match keys.float(name)? {
        Some(factor) if factor <= 0.0 => Err(keys.error(name, format!("{factor} is not above 0"))),
        factor => Ok(factor),
    };
    match (positive(FACTOR)?, positive(FACTOR_OLD)?) {
        (Some(new), Some(old)) if new != old => {
            Err(keys.error(FACTOR_OLD, format!("{old} contradicts {FACTOR} {new}")))
        }
        (new, old) => Ok(new.or(old)),
    }
}

fn needed(keys: &Keys<'_, '_>, factor: Option<f64>) -> Result<f64, Error> {
    factor.ok_or_else(|| keys.error(FACTOR, "is missing".to_owned()))
}

/// The context before the scaling; the model's own where the file has none.
fn original(keys: &Keys<'_, '_>, context: u32) -> Result<u32, Error> {
    Ok(keys
        .optional_size(ORIGINAL)?
        .map_or(context, |size| size.min(u32::MAX as usize) as u32))
}
