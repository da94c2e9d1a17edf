//! Special tokens by how they are spelled, for stop strings that name one.
//!
//! A special token is no part of the text, so that a stop string that spells one out would
//! never be met in it. Cut by these spellings, a stop string is a row of [`Symbol`]s: bytes of
//! text, and tokens as a whole.

use std::collections::HashMap;

use aho_corasick::{AhoCorasick, MatchKind};
use baton_proto::ids::TokenId;

use crate::error::Error;
use crate::vocabulary::Vocabulary;

/// A byte of text (below 256), or 256 and the number of a special token's spelling.
pub(crate) type Symbol = u32;

/// The spellings of a vocabulary's special tokens.
#[derive(Debug, Default)]
pub(crate) struct Specials {
    automaton: Option<AhoCorasick>,
    /// Ids may share a spelling.
    symbols: HashMap<TokenId, Symbol>,
}

impl Specials {
    /// The special tokens of `vocabulary` that have a spelling.
    pub(crate) fn new(vocabulary: &Vocabulary) -> Result<Self, Error> {
        let mut spellings: HashMap<&[u8], Symbol> = HashMap::new();
        let mut patterns = Vec::new();
        let mut symbols = HashMap::new();
        for id in 0..vocabulary.len() as TokenId {
            let spelling = vocabulary.bytes(id);
            if !vocabulary.is_special(id) || spelling.is_empty() {
                continue;
            }
            let symbol = *spellings.entry(spelling).or_insert_with(|| {
                patterns.push(spelling);
                255 + patterns.len() as Symbol
            });
            symbols.insert(id, symbol);
        }
        if patterns.is_empty() {
            return Ok(Self::default());
        }
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(&patterns)
            .map_err(|error| Error::InvalidSpec {
                reason: format!("special tokens cannot be indexed: {error}"),
            })?;
        Ok(Self {
            automaton: Some(automaton),
            symbols,
        })
    }

    /// The symbol of a token; none for one that is text.
    pub(crate) fn symbol(&self, id: TokenId) -> Option<Symbol> {
        self.symbols.get(&id).copied()
    }

    /// `text` with the special tokens that it spells out as tokens; none if there is none.
    pub(crate) fn cut(&self, text: &str) -> Option<Vec<Symbol>> {
        let mut cut = Vec::new();
        let mut done = 0;
        for found in self.automaton.as_ref()?.find_iter(text) {
            let before = &text.as_bytes()[done..found.start()];
            cut.extend(before.iter().copied().map(Symbol::from));
            cut.push(256 + found.pattern().as_u32());
            done = found.end();
        }
        let rest = &text.as_bytes()[done..];
        cut.extend(rest.iter().copied().map(Symbol::from));
        (done > 0).then_some(cut)
    }
}
