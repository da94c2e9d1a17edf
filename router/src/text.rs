//! From a choice's tokens to the text a client sees: whole characters, and stop
//! strings that end it.
//!
//! The rule for `min_tokens`: text that became certain with a token below it is
//! never looked at for stop strings, so a stop string that begins there does not
//! match. A token that completes a match is counted; nothing after it is.

use std::sync::Arc;

use baton_proto::TokenId;
use baton_proto::sampling::SampledToken;
use baton_tokenizer::{StopMatcher, TextStream, Tokenizer};

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
    /// A stop string matched with the last of `tokens`.
    pub stopped: bool,
}

/// The text of one choice.
#[derive(Debug)]
pub struct ChoiceText {
    stream: TextStream,
    matcher: Option<StopMatcher>,
    rules: StopRules,
    tokens: u32,
    stopped: Option<Stopped>,
}

impl ChoiceText {
    /// The text behind `prompt`.
    pub fn new(tokenizer: &Arc<Tokenizer>, prompt: &[TokenId], rules: &StopRules) -> Self {
        let matcher = (!rules.stop.is_empty())
            .then(|| StopMatcher::new(rules.stop.clone(), rules.include_stop));
        Self {
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
            self.tokens += 1;
            piece.tokens.push(token);
            self.scan(&text, &mut piece.text);
            piece.stopped = self.stopped.is_some();
        }
        piece
    }

    fn scan(&mut self, text: &str, certain: &mut String) {
        match &mut self.matcher {
            Some(matcher) if self.tokens > self.rules.min_tokens => {
                let step = matcher.push(text);
                certain.push_str(&step.emit);
                if let Some(index) = step.matched {
                    self.stopped = Some(Stopped {
                        stop_string: self.rules.stop.get(index).cloned().unwrap_or_default(),
                        output_tokens: self.tokens,
                    });
                }
            }
            _ => certain.push_str(text),
        }
    }

    /// The choice ended for another reason: what was held back is now certain. An
    /// unfinished character becomes U+FFFD, which may itself complete a stop string.
    pub fn finish(&mut self) -> String {
        let mut text = String::new();
        if self.stopped.is_none() {
            let rest = self.stream.finish();
            self.scan(&rest, &mut text);
        }
        if self.stopped.is_none()
            && let Some(matcher) = &mut self.matcher
        {
            text.push_str(&matcher.finish());
        }
        text
    }
}

#[cfg(test)]
pub(crate) mod tests;
