//! Byte-level BPE: the printable alphabet for bytes, and the encoder.
//!
//! Models of this kind spell bytes with printable characters (`Ġ` is a blank). The
//! encoder works on the bytes themselves and the alphabet is undone once, when the
//! vocabulary is read. Special and user-defined tokens are cut out by the caller.

use std::borrow::Cow;
use std::collections::HashMap;

use baton_proto::ids::TokenId;
use baton_proto::tokenizer_spec::{TokenEntry, TokenKind};

use crate::error::Error;
use crate::merge::{Join, Merger};
use crate::pre_tokenize::PreTokenizer;

/// The byte that a character of the alphabet stands for: printable Latin-1 stands for
/// itself, the other 68 bytes are U+0100 onwards in order.
pub(crate) fn byte_of(character: char) -> Option<u8> {
    let code = character as u32;
    match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => Some(code as u8),
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// The bytes that a piece spells; `None` if a character is outside the alphabet.
pub(crate) fn piece_bytes(piece: &str) -> Option<Vec<u8>> {
    piece.chars().map(byte_of).collect()
}

/// Merges by rank.
#[derive(Debug)]
pub(crate) struct ByteLevelEncoder {
    split: PreTokenizer,
    bytes: [Option<TokenId>; 256],
    merges: HashMap<(TokenId, TokenId), (u32, TokenId)>,
    /// Filled only for rules that take whole words unmerged.
    words: HashMap<Vec<u8>, TokenId>,
    unknown: Option<TokenId>,
}

impl ByteLevelEncoder {
    /// *Errors*: an unknown split rule, merges that name tokens outside the
    /// vocabulary, or no merges where tokens longer than a byte need them.
    pub(crate) fn new(
        tokens: &[TokenEntry],
        merges: &[String],
        pre: &str,
        unknown: Option<TokenId>,
    ) -> Result<Self, Error> {
        let split = PreTokenizer::named(pre)?;
        let mut ids: HashMap<&str, TokenId> = HashMap::with_capacity(tokens.len());
        let mut bytes = [None; 256];
        let mut words = HashMap::new();
        let mut needs_merges = false;
        for (id, token) in (0..).zip(tokens) {
            if token.kind == TokenKind::Unused || token.text.is_empty() {
                continue;
            }
            ids.entry(&token.text).or_insert(id);
            if token.kind != TokenKind::Normal {
                continue;
            }
            let Some(spelled) = piece_bytes(&token.text) else {
                continue;
            };
            if let [byte] = spelled[..] {
                bytes[byte as usize].get_or_insert(id);
            } else {
                needs_merges = true;
            }
            if split.whole_words {
                words.entry(spelled).or_insert(id);
            }
        }
        if merges.is_empty() && needs_merges {
            return Err(Error::NoMerges {
                tokens: tokens.len(),
            });
        }
        let mut ranks = HashMap::with_capacity(merges.len());
        for (rank, merge) in (0..).zip(merges) {
            let (pair, joined) = joined_ids(merge, &ids).map_err(|why| Error::InvalidSpec {
                reason: format!("merges[{rank}] `{}`: {why}", merge.escape_debug()),
            })?;
            ranks.entry(pair).or_insert((rank, joined));
        }
        Ok(Self {
            split,
            bytes,
            merges: ranks,
            words,
            unknown,
        })
    }

    /// Whether the text is brought into Unicode NFC first.
    pub(crate) fn normalises(&self) -> bool {
        self.split.nfc
    }

    /// Appends the ids of `text`, which holds no special tokens. Stops with
    /// [`Error::TooManyTokens`] soon after there are more than `max`.
    pub(crate) fn encode(
        &self,
        text: &str,
        max: usize,
        merger: &mut Merger,
        out: &mut Vec<TokenId>,
    ) -> Result<(), Error> {
        let text = self.normalise(text);
        self.split.split(&text, &mut |word| {
            self.encode_word(word.as_bytes(), merger, out)?;
            match out.len() > max {
                true => Err(Error::TooManyTokens { max }),
                false => Ok(()),
            }
        })
    }

    fn normalise<'t>(&self, text: &'t str) -> Cow<'t, str> {
        if !self.split.nfc || text.is_ascii() {
            return Cow::Borrowed(text);
        }
        let mut normalised = tokenizers::NormalizedString::from(text);
        normalised.nfc();
        Cow::Owned(normalised.get().to_owned())
    }

    fn encode_word(
        &self,
        word: &[u8],
        merger: &mut Merger,
        out: &mut Vec<TokenId>,
    ) -> Result<(), Error> {
        if let Some(&id) = self.words.get(word) {
            out.push(id);
            return Ok(());
        }
        merger.clear();
        for &byte in word {
            let id = self.bytes[byte as usize]
                .or(self.unknown)
                .ok_or(Error::Unencodable { byte })?;
            merger.push(1, id);
        }
        merger.run(|left, right| {
            let &(order, id) = self.merges.get(&(left.id, right.id))?;
            Some(Join { order, id })
        });
        out.extend(merger.symbols().map(|symbol| symbol.id));
        Ok(())
    }
}

/// The ids of a merge's two halves and of their join, or what is wrong with it.
fn joined_ids(
    merge: &str,
    ids: &HashMap<&str, TokenId>,
) -> Result<((TokenId, TokenId), TokenId), String> {
    // The first character is never the separator.
    let space = merge.char_indices().skip(1).find(|&(_, c)| c == ' ');
    let (at, _) = space.ok_or("there is no space between two tokens")?;
    let (left, right) = (&merge[..at], &merge[at + 1..]);
    let id = |text: &str| {
        let id = ids.get(text).copied();
        id.ok_or_else(|| format!("`{}` is no token", text.escape_debug()))
    };
    Ok(((id(left)?, id(right)?), id(&format!("{left}{right}"))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alphabet_covers_every_byte_once() {
        let mut seen = [0; 256];
        for code in 0..0x200 {
            if let Some(byte) = char::from_u32(code).and_then(byte_of) {
                seen[byte as usize] += 1;
            }
        }
        assert_eq!(seen, [1; 256]);
        assert_eq!(piece_bytes("ĠÃ©Ċ"), Some(b" \xc3\xa9\n".to_vec()));
        assert_eq!(piece_bytes("a b"), None);
    }
}
