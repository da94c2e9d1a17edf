//! No two tokens of a model may be spelled alike.
//!
//! Readers differ on which of the two a text becomes, so that such a file means another
//! model to each of them.

use std::collections::HashMap;
use std::path::Path;

use crate::model::error::Error;

/// Holes have no spelling and may be many.
///
/// # Errors
/// [`Error::Config`] at `field`, naming both ids.
pub(super) fn check<'a>(
    path: &Path,
    field: &str,
    tokens: impl Iterator<Item = (u64, &'a str)>,
) -> Result<(), Error> {
    let mut ids: HashMap<&str, u64> = HashMap::new();
    for (id, text) in tokens.filter(|(_, text)| !text.is_empty()) {
        if let Some(first) = ids.insert(text, id) {
            return Err(Error::config(
                path,
                field,
                format!(
                    "tokens {first} and {id} are both spelled `{}`",
                    text.escape_debug()
                ),
            ));
        }
    }
    Ok(())
}
