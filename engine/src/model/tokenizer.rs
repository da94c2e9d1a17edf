//! A model's tokenizer, read from its files into plain data.
//!
//! The engine does not tokenize. It only carries what the files say to the text
//! layer, whole: token texts, merges or scores, what each token is for, which ids
//! end a sequence, and the chat templates. Whether a split rule is known is for
//! the text layer to say.

pub(crate) mod folder;
pub(crate) mod gguf;
mod spellings;

use std::path::Path;

use baton_proto::TokenId;
use serde_json::Value;

use super::error::Error;
use super::warnings::Warnings;

/// Reads the special ids of one model's files, by one rule: an id that is not a token is a
/// warning and counts as absent; where a sequence could then not be started or ended as
/// the files ask, the model is refused.
pub(crate) struct SpecialIds<'w> {
    /// Ids below this are tokens.
    pub tokens: usize,
    pub warnings: &'w mut Warnings,
    /// The end ids that are tokens, in the files' order.
    ends: Vec<TokenId>,
    /// An end id that is none.
    bad_end: Option<String>,
    /// A start id that is none.
    bad_start: Option<String>,
}

impl<'w> SpecialIds<'w> {
    pub(crate) fn new(tokens: usize, warnings: &'w mut Warnings) -> Self {
        Self {
            tokens,
            warnings,
            ends: Vec::new(),
            bad_end: None,
            bad_start: None,
        }
    }

    /// An id, where it is a token. `value` is a number of any size or sign.
    ///
    /// # Errors
    /// [`Error::Config`] where it is no whole number.
    pub(crate) fn id(
        &mut self,
        path: &Path,
        field: &str,
        value: &Value,
    ) -> Result<Option<TokenId>, Error> {
        if let Some(id) = value.as_u64().filter(|id| *id < self.tokens as u64) {
            return Ok(TokenId::try_from(id).ok());
        }
        if !(value.is_u64() || value.is_i64()) {
            return Err(Error::config(
                path,
                field,
                format!("must be an id or a list of ids, is `{value}`"),
            ));
        }
        let message = format!(
            "{value} is not one of {} tokens and is ignored",
            self.tokens
        );
        self.warnings.add(path, field, &message);
        Ok(None)
    }

    /// The start id.
    ///
    /// # Errors
    /// As [`Self::id`].
    pub(crate) fn start(
        &mut self,
        path: &Path,
        field: &str,
        value: &Value,
    ) -> Result<Option<TokenId>, Error> {
        let id = self.id(path, field, value)?;
        if id.is_none() {
            self.bad_start = Some(value.to_string());
        }
        Ok(id)
    }

    /// Adds an id that ends a sequence.
    ///
    /// # Errors
    /// As [`Self::id`].
    pub(crate) fn end(&mut self, path: &Path, field: &str, value: &Value) -> Result<(), Error> {
        match self.id(path, field, value)? {
            Some(id) => self.add_end(id),
            None => self.bad_end = Some(value.to_string()),
        }
        Ok(())
    }

    /// Adds an id that is a token, once.
    pub(crate) fn add_end(&mut self, id: TokenId) {
        if !self.ends.contains(&id) {
            self.ends.push(id);
        }
    }

    /// The end ids. `start` is the key of the start id and whether prompts get one though
    /// the file's is no token; `end` is the key of the end ids.
    ///
    /// # Errors
    /// [`Error::Config`] where an id that is no token is needed.
    pub(crate) fn finish(
        self,
        path: &Path,
        start: (&str, bool),
        end: &str,
    ) -> Result<Vec<TokenId>, Error> {
        if let (Some(id), (field, true)) = (self.bad_start, start) {
            let message = format!(
                "{id} is not one of {} tokens, and prompts start with it",
                self.tokens
            );
            return Err(Error::config(path, field, message));
        }
        match self.bad_end {
            Some(id) if self.ends.is_empty() => Err(Error::config(
                path,
                end,
                format!(
                    "{id} is not one of {} tokens, and no other id ends a sequence",
                    self.tokens
                ),
            )),
            _ => Ok(self.ends),
        }
    }
}
