//! How far a client is in one choice, and what of the choice it must still be sent.
//!
//! A resumed choice is made again from its first token, or from the ids that the
//! client gave back; either way its tokens and text pass through here, and what the
//! client has is left out. Tokens and text are counted apart: a client may have the
//! text of a token but not have counted it, or the other way round. Who counts tokens by their
//! logprobs gets a token's when its text is certain, and may have the first bytes of that text
//! before.
//!
//! Pure. What the client claims is checked as far as the stream itself can tell.

use baton_proto::sampling::SampledToken;
use baton_proto::{Error, v1};

use crate::text::{Piece, TokenText};

/// What is left of a piece.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rest {
    pub first_index: u32,
    pub tokens: Vec<SampledToken>,
    pub text: String,
    /// Of the tokens that the client does not have.
    pub token_texts: Vec<TokenText>,
}

impl Rest {
    /// Nothing of it is news to the client.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty() && self.text.is_empty() && self.token_texts.is_empty()
    }
}

/// One choice's place in the stream.
#[derive(Clone, Debug, Default)]
pub struct Cursor {
    choice: usize,
    /// What the client has: tokens if it counted them, bytes of text.
    tokens: Option<u32>,
    text: u64,
    /// What has passed.
    passed_tokens: u32,
    passed_text: u64,
    /// The tokens whose part of the text has passed, and the bytes of it.
    parted_tokens: u32,
    parted_text: u64,
}

impl Cursor {
    /// A client that has nothing yet.
    pub fn new(choice: usize) -> Self {
        Self {
            choice,
            tokens: Some(0),
            ..Self::default()
        }
    }

    /// A client that says what it has.
    pub fn resumed(choice: usize, received: &v1::ResumeChoice) -> Self {
        let ids = received.token_ids.len() as u32;
        let tokens = match (received.tokens_received, ids) {
            (counted, 0) => counted,
            (_, ids) => Some(ids),
        };
        Self {
            choice,
            // Who has no text and did not count has nothing.
            tokens: tokens.or((received.text_bytes_received == 0).then_some(0)),
            text: received.text_bytes_received,
            ..Self::default()
        }
    }

    /// The client has less than what has passed: nothing is left out from here on.
    pub fn is_caught_up(&self) -> bool {
        self.passed_text >= self.text && self.tokens.is_some_and(|had| self.passed_tokens >= had)
    }

    fn mismatch(&self, field: &str, message: String) -> Error {
        let field = format!("resume.choices[{}].{field}", self.choice);
        Error::invalid(field, message).with_reason("RESUME_MISMATCH")
    }

    /// Takes what became of one token, or, once caught up, of several.
    ///
    /// # Errors
    /// [`baton_proto::ErrorKind::Invalid`] (`RESUME_MISMATCH`) naming what the client
    /// cannot have received.
    pub fn pass(&mut self, piece: Piece) -> Result<Rest, Error> {
        let first_index = self.passed_tokens;
        let before = self.passed_text;
        let text = self.pass_text(piece.text)?;
        self.passed_tokens += piece.tokens.len() as u32;
        let skipped = match self.tokens {
            Some(had) => (had.saturating_sub(first_index) as usize).min(piece.tokens.len()),
            // It has the token if it has the last of the token's text.
            None if before < self.text && self.passed_text <= self.text => piece.tokens.len(),
            None => {
                self.tokens = Some(first_index);
                0
            }
        };
        let token_texts = self.pass_parts(piece.token_texts)?;
        Ok(Rest {
            token_texts,
            first_index: first_index + skipped as u32,
            tokens: piece.tokens.into_iter().skip(skipped).collect(),
            text,
        })
    }

    fn too_much_text(&self, made: u64) -> Error {
        let message = format!(
            "{} bytes, the text behind {} tokens has {made}",
            self.text,
            self.tokens.unwrap_or(self.passed_tokens)
        );
        self.mismatch("text_bytes_received", message)
    }

    fn pass_text(&mut self, text: String) -> Result<String, Error> {
        let skipped = self.text.saturating_sub(self.passed_text);
        self.passed_text += text.len() as u64;
        let skipped = usize::try_from(skipped).map_or(text.len(), |had| had.min(text.len()));
        if !text.is_char_boundary(skipped) {
            let message = format!("{} bytes end inside a character", self.text);
            return Err(self.mismatch("text_bytes_received", message));
        }
        Ok(text[skipped..].to_owned())
    }

    /// Leaves out the parts of the tokens that the client has. Of the first that it has not
    /// it may have the text, but of none behind it.
    fn pass_parts(&mut self, parts: Vec<TokenText>) -> Result<Vec<TokenText>, Error> {
        let mut rest = Vec::new();
        for part in parts {
            let index = self.parted_tokens;
            self.parted_tokens += 1;
            self.parted_text += part.bytes.len() as u64;
            let Some(had) = self.tokens else { continue };
            if index == had && self.text > self.parted_text {
                return Err(self.too_much_text(self.parted_text));
            }
            if index >= had {
                rest.push(part);
            }
        }
        Ok(rest)
    }

    /// The choice ended; the text of `last` was held back until then. Answers what of it is
    /// news.
    ///
    /// # Errors
    /// As [`Cursor::pass`]: the client has more than there is.
    pub fn end(&mut self, last: Piece) -> Result<Rest, Error> {
        let text = self.pass_text(last.text)?;
        if let Some(had) = self.tokens
            && had > self.passed_tokens
        {
            let message = format!("{had}, the choice has {} tokens", self.passed_tokens);
            return Err(self.mismatch("tokens_received", message));
        }
        let token_texts = self.pass_parts(last.token_texts)?;
        if self.text > self.passed_text {
            return Err(self.too_much_text(self.passed_text));
        }
        Ok(Rest {
            first_index: self.passed_tokens,
            tokens: Vec::new(),
            text,
            token_texts,
        })
    }
}

#[cfg(test)]
mod tests;
