//! Which layers have a sliding window.

use super::lookup::Keys;
use crate::model::error::Error;
use crate::model::family::{Family, Windows};
use crate::model::gguf::Value;

/// The window of each layer.
///
/// # Errors
/// [`Error::Config`] or [`Error::Unsupported`], naming the metadata key.
pub(super) fn read(
    family: &Family,
    keys: &Keys<'_, '_>,
    layers: usize,
) -> Result<Vec<Option<u32>>, Error> {
    const WINDOW: &str = "attention.sliding_window";
    const PATTERN: &str = "attention.sliding_window_pattern";
    let Some(window) = keys.unsigned(WINDOW)?.filter(|window| *window > 0) else {
        return Ok(vec![None; layers]);
    };
    let window = u32::try_from(window)
        .map_err(|_| keys.error(WINDOW, format!("{window} is not below 2^32")))?;
    let every = |period: usize| {
        (1..=layers)
            .map(|n| {
                if n.is_multiple_of(period) {
                    None
                } else {
                    Some(window)
                }
            })
            .collect()
    };
    match keys.gguf.get(&keys.key(PATTERN)) {
        Some(Value::Array(list)) => {
            if list.len() != layers {
                return Err(keys.error(
                    PATTERN,
                    format!("has {} entries for {layers} layers", list.len()),
                ));
            }
            let flags = keys.gguf.numbers(&keys.key(PATTERN))?.unwrap_or_default();
            Ok(flags
                .iter()
                .map(|flag| (*flag != 0.0).then_some(window))
                .collect())
        }
        Some(_) => match keys.unsigned(PATTERN)? {
            Some(period) if period > 0 && period <= layers as u64 * 1024 => {
                Ok(every(period as usize))
            }
            other => Err(keys.error(PATTERN, format!("{other:?} is not a period above 0"))),
        },
        None => match family.windows {
            Windows::All => Ok(vec![Some(window); layers]),
            Windows::Periodic { period } => Ok(every(period)),
            Windows::UpperLayers => Err(keys.unsupported(
                WINDOW,
                "the file does not say which layers have it".to_owned(),
            )),
        },
    }
}
