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

use super::error::Error;

/// Adds an end-of-sequence id once, after checking that it is a token.
fn push_end(
    path: &Path,
    field: &str,
    id: u64,
    tokens: usize,
    ends: &mut Vec<TokenId>,
) -> Result<(), Error> {
    let id = token_id(path, field, id, tokens)?;
    if !ends.contains(&id) {
        ends.push(id);
    }
    Ok(())
}

fn token_id(path: &Path, field: &str, id: u64, tokens: usize) -> Result<TokenId, Error> {
    if id >= tokens as u64 {
        return Err(Error::config(
            path,
            field,
            format!("{id} is not one of {tokens} tokens"),
        ));
    }
    Ok(id as TokenId)
}
