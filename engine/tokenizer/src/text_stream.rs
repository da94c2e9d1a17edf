//! Turns the ids of one choice into text as they come.
//!
//! What is given out is final: never half a character, and U+FFFD only for bytes that
//! no later byte can complete. Joined, the pieces equal the decoding of prompt and
//! output together without that of the prompt.
//!
//! ```text
//! prompt bytes ... [tail] | output bytes ...
//!                   ^ an unfinished character; if the output completes it, the
//!                     whole character is output
//! ```
//!
//! Each byte of text belongs to one id, whose share is known once all of its bytes are given
//! out ([`TextStream::shares`]): the shares follow each other as the text does.

use std::collections::VecDeque;
use std::sync::Arc;

use baton_proto::ids::TokenId;

use crate::tokenizer::Tokenizer;

/// The longest unfinished character.
const TAIL_BYTES_MAX: usize = 3;

/// The incremental detokenizer of one choice. Rebuilt by replay: the same prompt and
/// the same ids give the same state.
#[derive(Clone, Debug)]
pub struct TextStream {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    /// Leading blanks still to be taken; a prompt with text has used them up.
    strip: usize,
    /// Bytes not given out yet: at most one unfinished character between calls.
    pending: Vec<u8>,
    /// How many of `pending` came from the prompt. If they turn out invalid, their
    /// U+FFFD belongs to the prompt and is not given out.
    pending_prompt: usize,
    /// The ids whose share was not asked for yet, in order.
    shares: VecDeque<Share>,
}

/// What of the text is one id's.
#[derive(Clone, Copy, Debug)]
struct Share {
    /// Bytes of the id in `pending`.
    pending: usize,
    /// Bytes of text.
    given: usize,
}

impl TextStream {
    /// Starts behind `prompt`; special tokens are not shown.
    pub fn new(tokenizer: &Arc<Tokenizer>, prompt: &[TokenId]) -> Self {
        Self::with_special(tokenizer, prompt, true)
    }

    /// Starts behind `prompt`. `skip_special`: hide control tokens.
    pub fn with_special(
        tokenizer: &Arc<Tokenizer>,
        prompt: &[TokenId],
        skip_special: bool,
    ) -> Self {
        let mut strip = tokenizer.strip_blanks();
        for &id in prompt {
            if strip == 0 {
                break;
            }
            tokenizer.strip_front(tokenizer.shown(id, skip_special), &mut strip);
        }
        let mut end = Vec::new();
        for &id in prompt.iter().rev() {
            if end.len() >= TAIL_BYTES_MAX {
                break;
            }
            end.splice(0..0, tokenizer.shown(id, skip_special).iter().copied());
        }
        let pending = unfinished(&end).to_vec();
        Self {
            tokenizer: Arc::clone(tokenizer),
            skip_special,
            strip,
            pending_prompt: pending.len(),
            pending,
            shares: VecDeque::new(),
        }
    }

    /// Takes the next id; returns the text that is now certain, possibly none.
    pub fn push(&mut self, id: TokenId) -> String {
        let bytes = self.tokenizer.shown(id, self.skip_special);
        let bytes = self.tokenizer.strip_front(bytes, &mut self.strip);
        self.pending.extend_from_slice(bytes);
        self.shares.push_back(Share {
            pending: bytes.len(),
            given: 0,
        });
        self.drain()
    }

    /// Takes the bytes of text of each id that has nothing pending, nor has one before it:
    /// one number per id, each once, in order. A character of the prompt's that the output
    /// completed is the share of the first id that did, a U+FFFD of the first whose byte it
    /// stands for.
    pub fn shares(&mut self) -> impl Iterator<Item = usize> + '_ {
        std::iter::from_fn(|| {
            let done = self.shares.front().is_some_and(|share| share.pending == 0);
            let share = if done { self.shares.pop_front() } else { None };
            share.map(|share| share.given)
        })
    }

    /// Takes the bytes given out so far of the other ids, too.
    pub fn all_shares(&mut self) -> impl Iterator<Item = usize> + '_ {
        self.shares.drain(..).map(|share| share.given)
    }

    /// Ends the stream: an unfinished character becomes one U+FFFD.
    pub fn finish(&mut self) -> String {
        let mut text = self.drain();
        if !self.pending.is_empty() {
            self.replace(self.pending.len(), &mut text);
        }
        text
    }

    fn drain(&mut self) -> String {
        let mut text = String::new();
        while !self.pending.is_empty() {
            let (valid, bad) = match std::str::from_utf8(&self.pending) {
                Ok(all) => (all, Some(0)),
                Err(error) => {
                    let valid = &self.pending[..error.valid_up_to()];
                    (
                        std::str::from_utf8(valid).unwrap_or_default(),
                        error.error_len(),
                    )
                }
            };
            text.push_str(valid);
            let taken = valid.len();
            self.consume(taken, None);
            match bad {
                Some(0) | None => break,
                Some(length) => self.replace(length, &mut text),
            }
        }
        text
    }

    /// Replaces the first `length` pending bytes by one U+FFFD, unless the prompt's own
    /// decoding already shows it.
    fn replace(&mut self, length: usize, text: &mut String) {
        let shown = self.pending_prompt == 0;
        if shown {
            text.push(char::REPLACEMENT_CHARACTER);
        }
        let given = if shown {
            char::REPLACEMENT_CHARACTER.len_utf8()
        } else {
            0
        };
        self.consume(length, Some(given));
    }

    /// The first `length` pending bytes became text as they are, or so many bytes in their
    /// place.
    fn consume(&mut self, length: usize, in_place: Option<usize>) {
        self.pending.drain(..length);
        let of_prompt = self.pending_prompt.min(length);
        self.pending_prompt -= of_prompt;
        let mut left = length - of_prompt;
        let mut extra = in_place.unwrap_or(of_prompt);
        for share in self.shares.iter_mut().filter(|share| share.pending > 0) {
            if left == 0 {
                break;
            }
            let own = share.pending.min(left);
            share.pending -= own;
            left -= own;
            share.given += std::mem::take(&mut extra);
            if in_place.is_none() {
                share.given += own;
            }
        }
    }
}

/// The unfinished character at the end of `bytes`, if there is one.
fn unfinished(bytes: &[u8]) -> &[u8] {
    (1..=TAIL_BYTES_MAX.min(bytes.len()))
        .map(|length| &bytes[bytes.len() - length..])
        .find(|tail| {
            std::str::from_utf8(tail)
                .is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
        })
        .unwrap_or_default()
}
