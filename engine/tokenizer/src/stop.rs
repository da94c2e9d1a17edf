//! Finds stop strings in a stream of text, across any borders.
//!
//! Text that might still become a stop string is held back, and nothing else is. The
//! stop that completes first ends the text; of those that complete at the same
//! character, the one that began first. So the result does not depend on how the text
//! was cut into pieces, and generation can end at once.
//!
//! A stop string that spells special tokens out is met in two ways: as text, and with those
//! tokens themselves, which are no part of the text. Tokens between two characters do not
//! keep them apart for the other stop strings.

use baton_proto::ids::TokenId;

use crate::special::Symbol;
use crate::tokenizer::Tokenizer;

/// What one piece of text led to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopStep {
    /// Text that is now certain to be output.
    pub emit: String,
    /// Index of the stop string that ended the text. Nothing is emitted after it.
    pub matched: Option<usize>,
}

/// Watches the text of one choice. Rebuilt by replay.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<Stop>,
    texts: Vec<String>,
    include_stop: bool,
    /// The longest end of the text so far that begins some stop string.
    held: String,
    matched: Option<usize>,
}

/// One stop string as a Knuth-Morris-Pratt automaton.
#[derive(Clone, Debug)]
struct Stop {
    index: usize,
    pattern: Vec<Symbol>,
    /// `fallback[n]`: after `n` matched symbols, the longest shorter match that remains.
    fallback: Vec<usize>,
    /// `shown[n]`: how many of the first `n` symbols are text.
    shown: Vec<usize>,
    matched: usize,
}

impl StopMatcher {
    /// Looks for stop strings in text alone. `include_stop`: the stop string is part of the
    /// output. Empty strings never match.
    pub fn new(stops: Vec<String>, include_stop: bool) -> Self {
        let bytes = |text: &String| text.bytes().map(Symbol::from).collect();
        let patterns = stops.iter().map(bytes).enumerate();
        let automata = patterns.filter(|(_, pattern): &(_, Vec<_>)| !pattern.is_empty());
        Self {
            stops: automata.map(|(index, p)| Stop::new(index, p)).collect(),
            texts: stops,
            include_stop,
            held: String::new(),
            matched: None,
        }
    }

    /// The same, and for the special tokens that they spell out.
    pub fn with_special(tokenizer: &Tokenizer, stops: Vec<String>, include_stop: bool) -> Self {
        let mut matcher = Self::new(stops, include_stop);
        for (index, text) in matcher.texts.iter().enumerate() {
            if let Some(pattern) = tokenizer.cut_special(text) {
                matcher.stops.push(Stop::new(index, pattern));
            }
        }
        matcher
    }

    /// Takes a special token. It shows nothing, but may complete a match or break one off.
    pub fn push_special(&mut self, tokenizer: &Tokenizer, id: TokenId) -> StopStep {
        let symbol = tokenizer.special_symbol(id);
        if let Some(symbol) = symbol.filter(|_| self.matched.is_none()) {
            let with_tokens = self.stops.iter_mut().filter(|stop| stop.names_tokens());
            let matched = with_tokens.filter_map(|stop| stop.step(symbol).then_some(&*stop));
            if let Some(stop) = matched.max_by_key(|stop| stop.pattern.len()) {
                let (index, shown) = (stop.index, stop.pattern_shown());
                return self.complete(index, self.held.len() - shown);
            }
        }
        self.emit_certain()
    }

    /// Takes the next piece of text. After a match, everything is discarded.
    pub fn push(&mut self, text: &str) -> StopStep {
        if self.matched.is_some() {
            return self.emit_certain();
        }
        let held = self.held.len();
        self.held.push_str(text);
        for (end, byte) in (held + 1..).zip(text.bytes()) {
            let mut longest: Option<(usize, usize, usize)> = None;
            for stop in &mut self.stops {
                let length = stop.pattern.len();
                if stop.step(byte.into()) && longest.is_none_or(|(other, ..)| length > other) {
                    longest = Some((length, stop.index, stop.pattern_shown()));
                }
            }
            if let Some((_, index, shown)) = longest {
                self.held.truncate(end);
                return self.complete(index, end - shown);
            }
        }
        self.emit_certain()
    }

    /// A stop string ends the text, which goes on to `before` without it.
    fn complete(&mut self, index: usize, before: usize) -> StopStep {
        self.matched = Some(index);
        let mut emit = std::mem::take(&mut self.held);
        emit.truncate(before);
        if self.include_stop {
            emit.push_str(&self.texts[index]);
        }
        StopStep {
            emit,
            matched: self.matched,
        }
    }

    fn emit_certain(&mut self) -> StopStep {
        let hold = self.stops.iter().map(|stop| stop.shown[stop.matched]).max();
        let keep = self.held.len() - hold.unwrap_or(0).min(self.held.len());
        let rest = self.held.split_off(keep);
        StopStep {
            emit: std::mem::replace(&mut self.held, rest),
            matched: self.matched,
        }
    }

    /// The text ended for another reason: gives out what was held back.
    pub fn finish(&mut self) -> String {
        for stop in &mut self.stops {
            stop.matched = 0;
        }
        std::mem::take(&mut self.held)
    }
}

impl Stop {
    fn new(index: usize, pattern: Vec<Symbol>) -> Self {
        let mut fallback = vec![0; pattern.len() + 1];
        let mut length = 0;
        for at in 1..pattern.len() {
            while length > 0 && pattern[at] != pattern[length] {
                length = fallback[length];
            }
            length += usize::from(pattern[at] == pattern[length]);
            fallback[at + 1] = length;
        }
        let mut shown = vec![0];
        for symbol in &pattern {
            shown.push(shown[shown.len() - 1] + usize::from(*symbol < 256));
        }
        Self {
            index,
            pattern,
            fallback,
            shown,
            matched: 0,
        }
    }

    fn names_tokens(&self) -> bool {
        self.pattern_shown() < self.pattern.len()
    }

    /// Bytes of text in the whole pattern.
    fn pattern_shown(&self) -> usize {
        self.shown[self.pattern.len()]
    }

    /// Whether the pattern ends at this symbol. Not called again after it has.
    fn step(&mut self, symbol: Symbol) -> bool {
        while self.matched > 0 && self.pattern[self.matched] != symbol {
            self.matched = self.fallback[self.matched];
        }
        self.matched += usize::from(self.pattern[self.matched] == symbol);
        self.matched == self.pattern.len()
    }
}
