//! Which bytes of a choice's text each of its tokens gave.
//!
//! Tokens and text do not go in step: a token may end inside a character, its text may be held
//! back because it could become a stop string, and a match cuts text off. So a token's part is
//! known some time after the token, at the latest with the end of the text. Joined, the parts
//! are the text, byte for byte.
//!
//! ```text
//! tokens   | mo | nda | y | f0 9f | 99 82 |
//! text     | mo | n                          stop string "day": the parts are
//!                                            "mo", "n", ""
//! ```

use std::collections::VecDeque;

/// One token's part of the text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenText {
    /// Any number of bytes, also parts of a character. None for a token that is no part of the
    /// text.
    pub bytes: Vec<u8>,
    /// Characters of the text that are whole before the first of them.
    pub offset: u32,
}

/// The parts of one choice, in the order of its tokens.
#[derive(Debug, Default)]
pub(super) struct Shares {
    /// Bytes of decoded text of the tokens whose part was not given out.
    decoded: VecDeque<usize>,
    /// What is certain of the text and no given token's.
    text: VecDeque<u8>,
    /// Whole characters before `text`.
    characters: u32,
    /// Bytes that the character which `text` begins in still lacks.
    lacks: usize,
}

impl Shares {
    /// How many bytes of decoded text the next tokens have.
    pub(super) fn decode(&mut self, bytes: impl Iterator<Item = usize>) {
        self.decoded.extend(bytes);
    }

    /// More of the text is certain.
    pub(super) fn extend(&mut self, text: &str) {
        self.text.extend(text.bytes());
    }

    /// The parts that are certain by now, each once.
    pub(super) fn give(&mut self) -> Vec<TokenText> {
        let mut given = Vec::new();
        while let Some(length) = self.decoded.front().copied()
            && length <= self.text.len()
        {
            self.decoded.pop_front();
            given.push(self.cut(length));
        }
        given
    }

    /// The text is over: the parts of all tokens that are left, of which the last has what the
    /// others leave (a stop string that was put in the place of tokens without text).
    pub(super) fn end(&mut self) -> Vec<TokenText> {
        let mut given = Vec::new();
        while let Some(length) = self.decoded.pop_front() {
            let left = self.text.len();
            let last = self.decoded.is_empty();
            given.push(self.cut(if last { left } else { length.min(left) }));
        }
        debug_assert!(self.text.is_empty(), "text is some token's");
        given
    }

    fn cut(&mut self, length: usize) -> TokenText {
        let bytes: Vec<u8> = self.text.drain(..length).collect();
        let offset = self.characters;
        for byte in &bytes {
            self.lacks = match self.lacks {
                0 => character_bytes(*byte) - 1,
                lacks => lacks - 1,
            };
            self.characters += u32::from(self.lacks == 0);
        }
        TokenText { bytes, offset }
    }
}

/// The length of the character that begins with this byte.
fn character_bytes(first: u8) -> usize {
    match first {
        0xf0.. => 4,
        0xe0.. => 3,
        0xc0.. => 2,
        _ => 1,
    }
}
