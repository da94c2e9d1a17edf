//! The rotations of a `config.json`.
//!
//! Two spellings exist: `rope_theta` with `rope_scaling`, and `rope_parameters` (flat, or
//! one object per layer type). What they say twice they must say alike; a key that the
//! scaling's type does not have is refused.

use serde_json::{Map, Value};

use super::lookup::Keys;
use crate::model::config::keys::is_rope_key;
use crate::model::config::rope::yarn_magnitude;
use crate::model::config::{RopeConfig, RopeScaling};
use crate::model::error::Error;
use crate::model::family::Family;

/// Keys that every type has.
const COMMON: [&str; 5] = [
    "type",
    "rope_type",
    "rope_theta",
    "partial_rotary_factor",
    "finetuned",
];

/// The types of scaling and the keys that each reads.
const TYPES: [(&str, &[&str]); 6] = [
    ("default", &[]),
    ("linear", &["factor"]),
    ("dynamic", &["factor", "original_max_position_embeddings"]),
    (
        "llama3",
        &[
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ],
    ),
    (
        "yarn",
        &[
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "truncate",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
        ],
    ),
    (
        "longrope",
        &[
            "factor",
            "original_max_position_embeddings",
            "short_factor",
            "long_factor",
            "attention_factor",
        ],
    ),
];

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

/// The model's rotations: one, or that of full layers and that of windowed ones.
///
/// # Errors
/// [`Error::Config`] or [`Error::Unsupported`], naming the key.
pub(super) fn read(
    family: &Family,
    top: &Keys<'_>,
    head_dim: usize,
    context: u32,
    windowed: bool,
) -> Result<Vec<RopeConfig>, Error> {
    let reader = Reader {
        top,
        head_dim,
        context,
    };
    let Some(local_default) = family.rope_base_local else {
        if let Some(base) = top.get("rope_local_base_freq") {
            let message = format!("`{base}` is refused: all layers of this family have one base");
            return Err(top.unsupported("rope_local_base_freq", message));
        }
        let (name, json) = parameters(top)?;
        if let Some(json) = json
            && (json.contains_key(FULL) || json.contains_key(SLIDING))
        {
            let message = "objects per layer type are not offered for this family";
            return Err(top.unsupported(name, message));
        }
        let scaling = json.map(|json| top.below(json, PREFIX));
        return Ok(vec![reader.rope(
            scaling.as_ref(),
            "rope_theta",
            family.rope_base_default,
        )?]);
    };
    let (name, json) = parameters(top)?;
    let (full, sliding) = match json {
        Some(json) if name == "rope_parameters" => per_type(top, json)?,
        // The older spelling speaks of full layers alone.
        json => (json, None),
    };
    let full = full.map(|json| top.below(json, PREFIX));
    let sliding = sliding.map(|json| top.below(json, "rope_parameters.sliding_attention."));
    let mut ropes = vec![reader.rope(full.as_ref(), "rope_theta", family.rope_base_default)?];
    let local = reader.rope(sliding.as_ref(), "rope_local_base_freq", local_default)?;
    if windowed {
        ropes.push(local);
    }
    Ok(ropes)
}

/// What stands before a key of the scaling in errors, whichever spelling the file has.
const PREFIX: &str = "rope_scaling.";

/// A key of `config.json`, and the object there.
type Named<'a> = (&'static str, Option<&'a Map<String, Value>>);

/// The object with the scaling and its key, where there is one that is not empty.
fn parameters<'a>(top: &Keys<'a>) -> Result<Named<'a>, Error> {
    let object = |name| Ok::<_, Error>(top.object(name)?.filter(|json| !json.is_empty()));
    match (object("rope_scaling")?, object("rope_parameters")?) {
        (Some(old), Some(new)) if old != new => Err(top.error(
            "rope_parameters",
            "stands beside another `rope_scaling`".to_owned(),
        )),
        (Some(old), _) => Ok(("rope_scaling", Some(old))),
        (None, new) => Ok(("rope_parameters", new)),
    }
}

type PerType<'a> = (
    Option<&'a Map<String, Value>>,
    Option<&'a Map<String, Value>>,
);

/// The objects of full and of windowed layers.
fn per_type<'a>(top: &Keys<'a>, json: &'a Map<String, Value>) -> Result<PerType<'a>, Error> {
    if let Some(other) = json.keys().find(|key| *key != FULL && *key != SLIDING) {
        let message = format!("`{other}` is not one of {FULL}, {SLIDING}");
        return Err(top.unsupported("rope_parameters", message));
    }
    let keys = top.below(json, "rope_parameters.");
    Ok((keys.object(FULL)?, keys.object(SLIDING)?))
}

/// Reads one rotation after the other.
struct Reader<'k, 'a> {
    top: &'k Keys<'a>,
    head_dim: usize,
    /// The model's own context.
    context: u32,
}

impl Reader<'_, '_> {
    /// One rotation. `base_key` is the base's key at the top.
    fn rope(
        &self,
        scaling: Option<&Keys<'_>>,
        base_key: &'static str,
        base_default: f64,
    ) -> Result<RopeConfig, Error> {
        let base = self
            .either(scaling, "rope_theta", base_key)?
            .unwrap_or(base_default);
        if base <= 0.0 {
            return Err(self.top.error(base_key, format!("{base} is not above 0")));
        }
        const SHARE: &str = "partial_rotary_factor";
        let share = self.either(scaling, SHARE, SHARE)?.unwrap_or(1.0);
        // Rounded down, as the reference does.
        let dims = (self.head_dim as f64 * share) as usize;
        if !(share > 0.0 && share <= 1.0) || dims == 0 || !dims.is_multiple_of(2) {
            let message = format!(
                "{share} of {} dimensions is not an even number of them above 0",
                self.head_dim
            );
            return Err(self.top.error(SHARE, message));
        }
        let (scaling, attention_factor) = match scaling {
            Some(keys) => self.scaling(keys)?,
            None => (RopeScaling::None, 1.0),
        };
        let reads_original = !matches!(scaling, RopeScaling::None | RopeScaling::Linear { .. });
        if !reads_original
            && base_key == "rope_theta"
            && let Some(original) = self.top.whole(ORIGINAL)?
            && original != u64::from(self.context)
        {
            let message = format!("`{original}` is refused: no scaling reads it");
            return Err(self.top.unsupported(ORIGINAL, message));
        }
        Ok(RopeConfig {
            base,
            dims,
            scaling,
            attention_factor,
        })
    }

    /// A number that may stand inside the scaling, at the top, or alike in both.
    fn either(
        &self,
        scaling: Option<&Keys<'_>>,
        inside: &str,
        at_top: &str,
    ) -> Result<Option<f64>, Error> {
        let top = self.top.float(at_top)?;
        let Some(keys) = scaling else {
            return Ok(top);
        };
        match (keys.float(inside)?, top) {
            (Some(own), Some(top)) if own != top => {
                Err(keys.error(inside, format!("{own} contradicts `{at_top}` {top}")))
            }
            (own, top) => Ok(own.or(top)),
        }
    }

    /// A scaling and its factor on queries and keys.
    fn scaling(&self, keys: &Keys<'_>) -> Result<(RopeScaling, f64), Error> {
        let kind = kind(keys)?;
        let Some((_, own)) = TYPES.iter().find(|(name, _)| *name == kind) else {
            let known: Vec<&str> = TYPES.iter().map(|(name, _)| *name).collect();
            let message = format!("`{kind}` is not one of {}", known.join(", "));
            return Err(keys.unsupported("rope_type", message));
        };
        for (key, value) in keys.json.iter().filter(|(_, value)| !value.is_null()) {
            if COMMON.contains(&key.as_str()) || own.contains(&key.as_str()) {
                continue;
            }
            let why = if !is_rope_key(key) {
                "it is not a known key".to_owned()
            } else if keys.get("rope_type").or(keys.get("type")).is_none() {
                "the scaling has no `rope_type`".to_owned()
            } else {
                format!("the type `{kind}` does not read it")
            };
            return Err(keys.unsupported(key, format!("`{value}` is refused: {why}")));
        }
        match kind {
            "linear" => {
                let factor = keys.positive("factor")?;
                Ok((RopeScaling::Linear { factor }, 1.0))
            }
            "dynamic" => Ok((self.dynamic(keys)?, 1.0)),
            "llama3" => Ok((llama3(keys, self.original(keys)?)?, 1.0)),
            "yarn" => self.yarn(keys),
            "longrope" => self.longrope(keys),
            _ => Ok((RopeScaling::None, 1.0)),
        }
    }

    fn dynamic(&self, keys: &Keys<'_>) -> Result<RopeScaling, Error> {
        // The reference stretches from the model's own context.
        let original_context = self.original(keys)?.unwrap_or(self.context);
        if original_context != self.context {
            let message = format!(
                "{original_context} differs from max_position_embeddings {}, from which dynamic scaling starts",
                self.context
            );
            return Err(keys.error(ORIGINAL, message));
        }
        Ok(RopeScaling::Dynamic {
            factor: keys.at_least_one("factor")?,
            original_context,
        })
    }

    fn yarn(&self, keys: &Keys<'_>) -> Result<(RopeScaling, f64), Error> {
        let factor = keys.at_least_one("factor")?;
        let optional = |key: &str, default| match keys.get(key) {
            None => Ok(default),
            Some(_) => keys.positive(key),
        };
        let (beta_fast, beta_slow) = (optional("beta_fast", 32.0)?, optional("beta_slow", 1.0)?);
        if beta_fast < beta_slow {
            let message = format!("{beta_fast} is below beta_slow {beta_slow}");
            return Err(keys.error("beta_fast", message));
        }
        // The reference takes both or neither, and 0 for missing.
        let weight = |key: &str| Ok::<_, Error>(keys.float(key)?.filter(|weight| *weight != 0.0));
        let inferred = match (weight("mscale")?, weight("mscale_all_dim")?) {
            (Some(one), Some(all)) => yarn_magnitude(factor, one) / yarn_magnitude(factor, all),
            (None, None) => yarn_magnitude(factor, 1.0),
            (Some(_), None) => {
                let message = "stands without `mscale_all_dim`".to_owned();
                return Err(keys.error("mscale", message));
            }
            (None, Some(_)) => {
                let message = "stands without `mscale`".to_owned();
                return Err(keys.error("mscale_all_dim", message));
            }
        };
        let scaling = RopeScaling::Yarn {
            factor,
            original_context: self.original(keys)?.unwrap_or(self.context),
            beta_fast,
            beta_slow,
            truncate: keys.boolean("truncate")?.unwrap_or(true),
        };
        Ok((scaling, optional("attention_factor", inferred)?))
    }

    fn longrope(&self, keys: &Keys<'_>) -> Result<(RopeScaling, f64), Error> {
        let original_context = self.original(keys)?.unwrap_or(self.context);
        let original = f64::from(original_context);
        let factor = match keys.get("factor") {
            Some(_) => keys.positive("factor")?,
            None => f64::from(self.context) / original,
        };
        let attention_factor = match keys.get("attention_factor") {
            Some(_) => keys.positive("attention_factor")?,
            None if factor <= 1.0 => 1.0,
            None => (1.0 + factor.ln() / original.ln()).sqrt(),
        };
        let scaling = RopeScaling::LongRope {
            short: keys.floats("short_factor")?,
            long: keys.floats("long_factor")?,
            original_context,
        };
        Ok((scaling, attention_factor))
    }

    /// The context before the scaling, inside it or at the top.
    fn original(&self, keys: &Keys<'_>) -> Result<Option<u32>, Error> {
        let top = self.top.optional_size(ORIGINAL)?;
        let own = keys.optional_size(ORIGINAL)?;
        match (own, top) {
            (Some(own), Some(top)) if own != top => Err(keys.error(
                ORIGINAL,
                format!("{own} contradicts `{ORIGINAL}` {top} at the top"),
            )),
            (own, top) => Ok(own.or(top).map(|size| size.min(u32::MAX as usize) as u32)),
        }
    }
}

const ORIGINAL: &str = "original_max_position_embeddings";

/// The type, by either name.
fn kind<'a>(keys: &Keys<'a>) -> Result<&'a str, Error> {
    let text = |key| match keys.get(key) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.as_str())),
        Some(other) => Err(keys.unsupported(key, format!("`{other}` is not a text"))),
    };
    match (text("rope_type")?, text("type")?) {
        (Some(new), Some(old)) if new != old => {
            Err(keys.error("rope_type", format!("`{new}` contradicts `type` `{old}`")))
        }
        (new, old) => Ok(new.or(old).unwrap_or("default")),
    }
}

fn llama3(keys: &Keys<'_>, original: Option<u32>) -> Result<RopeScaling, Error> {
    let low_freq_factor = keys.positive("low_freq_factor")?;
    let high_freq_factor = keys.positive("high_freq_factor")?;
    if low_freq_factor >= high_freq_factor {
        return Err(keys.error(
            "high_freq_factor",
            format!("{high_freq_factor} is not above low_freq_factor {low_freq_factor}"),
        ));
    }
    Ok(RopeScaling::Llama3 {
        factor: keys.positive("factor")?,
        low_freq_factor,
        high_freq_factor,
        original_context: original.ok_or_else(|| keys.error(ORIGINAL, "is missing".to_owned()))?,
    })
}
