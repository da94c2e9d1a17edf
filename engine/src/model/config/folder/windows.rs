//! Which layers have a sliding window.

use serde_json::Value;

use super::lookup::Keys;
use crate::model::error::Error;
use crate::model::family::{Family, Windows};

/// The window of each layer.
///
/// # Errors
/// [`Error::Config`] or [`Error::Unsupported`], naming the key; keys that contradict each
/// other are refused.
pub(super) fn read(
    family: &Family,
    keys: &Keys<'_>,
    layers: usize,
) -> Result<Vec<Option<u32>>, Error> {
    let window = window(family, keys)?;
    let Some(window) = window else {
        return match listed(keys, layers)? {
            Some(types) if types.contains(&true) => Err(keys.error(
                "layer_types",
                "has windowed layers, but there is no window".to_owned(),
            )),
            _ => Ok(vec![None; layers]),
        };
    };
    if family.windows != Windows::UpperLayers
        && let Some(first) = keys.get("max_window_layers")
    {
        let message =
            format!("`{first}` stands beside a window that this family has on other layers");
        return Err(keys.unsupported("max_window_layers", message));
    }
    let listed = listed(keys, layers)?;
    let is_windowed: Vec<bool> = match (family.windows, &listed) {
        (Windows::Periodic { period: own }, _) => {
            let period = ["sliding_window_pattern", "_sliding_window_pattern"]
                .into_iter()
                .find(|key| keys.get(key).is_some());
            let every = |period: usize| (1..=layers).map(|n| !n.is_multiple_of(period)).collect();
            match (period, &listed) {
                (None, Some(listed)) => listed.clone(),
                (None, None) => every(own),
                (Some(key), _) => {
                    let pattern: Vec<bool> = every(keys.size(key)?);
                    if listed.as_ref().is_some_and(|listed| *listed != pattern) {
                        let message = format!("{} contradicts `layer_types`", keys.size(key)?);
                        return Err(keys.error(key, message));
                    }
                    pattern
                }
            }
        }
        (_, Some(listed)) => listed.clone(),
        (Windows::All, None) => vec![true; layers],
        (Windows::UpperLayers, None) => {
            let first = keys
                .whole("max_window_layers")?
                .ok_or_else(|| keys.error("max_window_layers", "is missing".to_owned()))?;
            (0..layers as u64).map(|layer| layer >= first).collect()
        }
    };
    Ok(is_windowed
        .into_iter()
        .map(|windowed| windowed.then_some(window))
        .collect())
}

/// The window, where the model uses one.
fn window(family: &Family, keys: &Keys<'_>) -> Result<Option<u32>, Error> {
    let used = keys.boolean("use_sliding_window")?;
    if family.windows == Windows::UpperLayers && used != Some(true) {
        return Ok(None);
    }
    let Some(window) = keys.optional_size("sliding_window")? else {
        return Ok(None);
    };
    if used == Some(false) {
        let message = format!("`false` contradicts `sliding_window` {window}");
        return Err(keys.unsupported("use_sliding_window", message));
    }
    let window = u32::try_from(window)
        .map_err(|_| keys.error("sliding_window", format!("{window} is not below 2^32")))?;
    Ok(Some(window))
}

/// Which layers `layer_types` gives the window.
fn listed(keys: &Keys<'_>, layers: usize) -> Result<Option<Vec<bool>>, Error> {
    let Some(types) = keys.get("layer_types") else {
        return Ok(None);
    };
    let Value::Array(types) = types else {
        return Err(keys.error("layer_types", "is not a list".to_owned()));
    };
    if types.len() != layers {
        return Err(keys.error(
            "layer_types",
            format!("has {} entries for {layers} layers", types.len()),
        ));
    }
    let is_windowed = |ty: &Value| match ty.as_str() {
        Some("sliding_attention") => Ok(true),
        Some("full_attention") => Ok(false),
        _ => Err(keys.unsupported(
            "layer_types",
            format!("`{ty}` is not one of sliding_attention, full_attention"),
        )),
    };
    types
        .iter()
        .map(is_windowed)
        .collect::<Result<_, _>>()
        .map(Some)
}
