//! Finds tokens that are matched whole in the text, before any splitting.
//!
//! User-defined tokens are always matched; control tokens only where the caller
//! trusts the text (a rendered chat template). The leftmost match wins, and the
//! longest of those that start together, as the reference tokenizers do.

use aho_corasick::{AhoCorasick, MatchKind};
use baton_proto::ids::TokenId;

use crate::error::Error;
use crate::rendered::{Marked, without};

/// One part of a text: literal, or a token that was written out in it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Segment<'t> {
    Text(&'t str),
    Token(TokenId),
}

/// The two sets of whole tokens.
#[derive(Debug)]
pub(crate) struct AddedTokens {
    user: Matcher,
    user_and_control: Matcher,
}

#[derive(Debug, Default)]
struct Matcher {
    automaton: Option<AhoCorasick>,
    ids: Vec<TokenId>,
}

impl AddedTokens {
    /// Empty spellings are left out: they would match everywhere.
    pub(crate) fn new(
        user: Vec<(String, TokenId)>,
        control: Vec<(String, TokenId)>,
    ) -> Result<Self, Error> {
        let both = user.iter().cloned().chain(control).collect();
        Ok(Self {
            user: Matcher::new(user)?,
            user_and_control: Matcher::new(both)?,
        })
    }

    /// Cuts `text` into segments, in order, and hands each to `visit`.
    pub(crate) fn split<'t>(
        &self,
        text: &'t str,
        parse_special: bool,
        mut visit: impl FnMut(Segment<'t>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let matcher = if parse_special {
            &self.user_and_control
        } else {
            &self.user
        };
        let mut done = 0;
        if let Some(automaton) = &matcher.automaton {
            for found in automaton.find_iter(text) {
                if found.start() > done {
                    visit(Segment::Text(&text[done..found.start()]))?;
                }
                visit(Segment::Token(matcher.ids[found.pattern().as_usize()]))?;
                done = found.end();
            }
        }
        if done < text.len() {
            visit(Segment::Text(&text[done..]))?;
        }
        Ok(())
    }
}

impl AddedTokens {
    /// The same for a rendered chat: control tokens without a mark in them are tokens,
    /// and so are user-defined ones once the marks are taken out of the text.
    pub(crate) fn split_marked(
        &self,
        marked: &Marked,
        mut visit: impl FnMut(Segment<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let matcher = &self.user_and_control;
        let found = matcher.automaton.iter();
        let found = found.flat_map(|automaton| automaton.find_iter(&marked.text));
        let mut done = 0;
        for found in found.filter(|found| found.pattern().as_usize() >= self.user.ids.len()) {
            let text = without(&marked.text[done..found.start()], marked.mark);
            self.split(&text, false, &mut visit)?;
            visit(Segment::Token(matcher.ids[found.pattern().as_usize()]))?;
            done = found.end();
        }
        let text = without(&marked.text[done..], marked.mark);
        self.split(&text, false, &mut visit)
    }
}

impl Matcher {
    fn new(mut tokens: Vec<(String, TokenId)>) -> Result<Self, Error> {
        tokens.retain(|(text, _)| !text.is_empty());
        if tokens.is_empty() {
            return Ok(Self::default());
        }
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|(text, _)| text))
            .map_err(|error| Error::InvalidSpec {
                reason: format!("added tokens cannot be indexed: {error}"),
            })?;
        Ok(Self {
            automaton: Some(automaton),
            ids: tokens.into_iter().map(|(_, id)| id).collect(),
        })
    }
}
