//! SentencePiece BPE: join the neighbours whose joined piece has the highest score.
//!
//! Blanks are written U+2581; what no piece covers is spelled in byte tokens. The
//! encoder follows llama.cpp's rule for the leading blank: it is put before every
//! stretch of text that starts the input or follows a token matched whole.

use std::collections::HashMap;

use baton_proto::ids::TokenId;
use baton_proto::tokenizer_spec::{TokenEntry, TokenKind};

use crate::error::Error;
use crate::merge::{Join, Merger};
use crate::vocabulary::byte_token;

/// How SentencePiece writes a blank.
pub(crate) const BLANK: char = '\u{2581}';

/// Merges by score.
#[derive(Debug)]
pub(crate) struct SentencePieceEncoder {
    /// Piece -> (order, id); lower orders are merged first.
    pieces: HashMap<Box<[u8]>, (u32, TokenId)>,
    longest_piece_bytes: u32,
    bytes: [Option<TokenId>; 256],
    unknown: Option<TokenId>,
    add_space_prefix: bool,
}

impl SentencePieceEncoder {
    /// *Errors*: a byte token that does not spell a byte.
    pub(crate) fn new(
        tokens: &[TokenEntry],
        add_space_prefix: bool,
        unknown: Option<TokenId>,
    ) -> Result<Self, Error> {
        let mut pieces = HashMap::with_capacity(tokens.len());
        let mut bytes = [None; 256];
        let mut longest_piece_bytes = 0;
        for (id, token) in (0..).zip(tokens) {
            match token.kind {
                TokenKind::Byte => {
                    let byte = byte_token(&token.text).ok_or_else(|| Error::InvalidSpec {
                        reason: format!("byte token {id} is spelled `{}`", token.text),
                    })?;
                    bytes[byte as usize].get_or_insert(id);
                }
                TokenKind::Normal if !token.text.is_empty() => {
                    longest_piece_bytes = longest_piece_bytes.max(token.text.len() as u32);
                    pieces
                        .entry(token.text.as_bytes().into())
                        .or_insert((order(token.score), id));
                }
                _ => {}
            }
        }
        Ok(Self {
            pieces,
            longest_piece_bytes,
            bytes,
            unknown,
            add_space_prefix,
        })
    }

    /// Appends the ids of `text`, which holds no tokens to be matched whole.
    /// `at_border`: the text starts the input or follows such a token.
    pub(crate) fn encode(
        &self,
        text: &str,
        at_border: bool,
        merger: &mut Merger,
        out: &mut Vec<TokenId>,
    ) -> Result<(), Error> {
        let mut escaped = String::with_capacity(text.len() + BLANK.len_utf8());
        if at_border && self.add_space_prefix {
            escaped.push(BLANK);
        }
        escaped.extend(text.chars().map(|c| if c == ' ' { BLANK } else { c }));
        let characters = escaped.chars();
        let escaped = escaped.as_bytes();

        merger.clear();
        for character in characters {
            merger.push(character.len_utf8() as u32, 0);
        }
        merger.run(|left, right| {
            if right.end - left.start > self.longest_piece_bytes {
                return None;
            }
            let piece = &escaped[left.start as usize..right.end as usize];
            let &(order, id) = self.pieces.get(piece)?;
            Some(Join { order, id })
        });
        for symbol in merger.symbols() {
            let piece = &escaped[symbol.start as usize..symbol.end as usize];
            match self.pieces.get(piece) {
                Some(&(_, id)) => out.push(id),
                None => self.spell(piece, out)?,
            }
        }
        Ok(())
    }

    /// One character that is no piece: its bytes, or the unknown token once.
    fn spell(&self, piece: &[u8], out: &mut Vec<TokenId>) -> Result<(), Error> {
        let before = out.len();
        for &byte in piece {
            let Some(id) = self.bytes[byte as usize] else {
                out.truncate(before);
                out.push(self.unknown.ok_or(Error::Unencodable { byte })?);
                break;
            };
            out.push(id);
        }
        Ok(())
    }
}

/// Maps scores to integers so that a higher score comes first.
fn order(score: f32) -> u32 {
    let bits = score.to_bits();
    let ascending = if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    };
    !ascending
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_reverses_scores() {
        let scores = [f32::NEG_INFINITY, -7.5, -0.0, 0.0, 1e-3, 2.0, f32::INFINITY];
        for pair in scores.windows(2) {
            assert!(order(pair[0]) > order(pair[1]), "{pair:?}");
        }
    }
}
