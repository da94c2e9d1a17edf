//! From a choice's tokens to the text a client sees: whole characters, and stop
//! strings that end it.
//!
//! The rule for `min_tokens`: text that became certain with a token below it is
//! never looked at for stop strings, so a stop string that begins there does not
//! match. A token that completes a match is counted; nothing after it is. The same holds
//! for special tokens that a stop string spells out.

mod shares;

use std::sync::Arc;

use baton_proto::TokenId;
use baton_proto::sampling::SampledToken;
use baton_tokenizer::{StopMatcher, StopStep, TextStream, Tokenizer};

use shares::Shares;
pub use shares::TokenText;

/// What the text layer needs of a request.
#[derive(Clone, Debug, Default)]
pub struct StopRules {
    pub stop: Vec<String>,
    pub include_stop: bool,
    pub min_tokens: u32,
}

/// How a choice's text ended, if a stop string did it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stopped {
    pub stop_string: String,
    /// Tokens up to the one that completed the match.
    pub output_tokens: u32,
}

/// What a run of tokens became.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    /// The tokens that count: all of the run, or those up to a match.
    pub tokens: Vec<SampledToken>,
    pub text: String,
    /// What tokens gave to the text, as far as it became certain: in order, each once. They
    /// may be tokens of earlier runs, and those of `tokens` may come later.
    pub token_texts: Vec<TokenText>,
    /// A stop string matched with the last of `tokens`.
    pub stopped: bool,
}

/// The text of one choice.
#[derive(Debug)]
pub struct ChoiceText {
    tokenizer: Arc<Tokenizer>,
    stream: TextStream,
    shares: Shares,
    matcher: Option<StopMatcher>,
    rules: StopRules,
    tokens: u32,
    stopped: Option<Stopped>,
}

impl ChoiceText {
    /// The text behind `prompt`.
    pub fn new(tokenizer: &Arc<Tokenizer>, prompt: &[TokenId], rules: &StopRules) -> Self {
        let matcher = (!rules.stop.is_empty())
            .then(|| StopMatcher::with_special(tokenizer, rules.stop.clone(), rules.include_stop));
        Self {
            tokenizer: Arc::clone(tokenizer),
            shares: Shares::default(),
            stream: TextStream::new(tokenizer, prompt),
            matcher,
            rules: rules.clone(),
            tokens: 0,
            stopped: None,
        }
    }

    /// The stop string that ended the text.
    pub fn stopped(&self) -> Option<&Stopped> {
        self.stopped.as_ref()
    }

    /// Tokens that count.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Takes the next tokens. After a match everything is discarded.
    pub fn push(&mut self, run: Vec<SampledToken>) -> Piece {
        let mut piece = Piece::default();
        for token in run {
            if self.stopped.is_some() {
                break;
            }
            let text = self.stream.push(token.id);
            self.shares.decode(self.stream.shares());
            self.tokens += 1;
            let mut certain = self.scan(&text);
            if self.stopped.is_none() && self.tokenizer.is_special(token.id) {
                certain.push_str(&self.scan_special(token.id));
            }
            piece.tokens.push(token);
            self.shares.extend(&certain);
            piece.text.push_str(&certain);
            piece.stopped = self.stopped.is_some();
            piece.token_texts.extend(if piece.stopped {
                self.shares.decode(self.stream.all_shares());
                self.shares.end()
            } else {
                self.shares.give()
            });
        }
        piece
    }

    /// What of the text so far is certain, now that this is behind it.
    fn scan(&mut self, text: &str) -> String {
        match &mut self.matcher {
            Some(matcher) if self.tokens > self.rules.min_tokens => {
                let step = matcher.push(text);
                self.note(step)
            }
            _ => text.to_owned(),
        }
    }

    /// The same, now that a token without text is behind it.
    fn scan_special(&mut self, id: TokenId) -> String {
        match &mut self.matcher {
            Some(matcher) if self.tokens > self.rules.min_tokens => {
                let step = matcher.push_special(&self.tokenizer, id);
                self.note(step)
            }
            _ => String::new(),
        }
    }

    fn note(&mut self, step: StopStep) -> String {
        if let Some(index) = step.matched {
            self.stopped = Some(Stopped {
                stop_string: self.rules.stop.get(index).cloned().unwrap_or_default(),
                output_tokens: self.tokens,
            });
        }
        step.emit
    }

    /// The choice ended: for another reason than a stop string, what was held back is now
    /// certain. An unfinished character becomes U+FFFD, which may itself complete a stop
    /// string.
    pub fn finish(&mut self) -> Piece {
        let mut text = String::new();
        if self.stopped.is_none() {
            let rest = self.stream.finish();
            text.push_str(&self.scan(&rest));
        }
        if self.stopped.is_none()
            && let Some(matcher) = &mut self.matcher
        {
            text.push_str(&matcher.finish());
        }
        self.shares.decode(self.stream.all_shares());
        self.shares.extend(&text);
        Piece {
            text,
            token_texts: self.shares.end(),
            ..Piece::default()
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
