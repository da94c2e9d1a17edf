//! What is odd about a model's files and changes nothing that is computed.
//!
//! Collected while a model is opened; logged once, and shown by `baton model inspect`.

use std::path::Path;

/// Warnings about the files of one model.
#[derive(Debug, Default)]
pub(crate) struct Warnings(Vec<String>);

impl Warnings {
    /// More than a person reads; a hostile file could give thousands.
    const MAX: usize = 32;
    const FIELD_CHARS_MAX: usize = 120;

    /// Adds one about a field of a file.
    pub(crate) fn add(&mut self, path: &Path, field: &str, message: &str) {
        if self.0.len() < Self::MAX {
            // Names of keys are the file's.
            let field: String = field.escape_debug().take(Self::FIELD_CHARS_MAX).collect();
            self.0
                .push(format!("`{}`: `{field}`: {message}", path.display()));
        }
    }

    pub(crate) fn into_vec(self) -> Vec<String> {
        self.0
    }
}
