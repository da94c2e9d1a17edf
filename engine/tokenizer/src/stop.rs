//! Finds stop strings in a stream of text, across any borders.
//!
//! Text that might still become a stop string is held back, and nothing else is. The
//! stop that completes first ends the text; of those that complete at the same
//! character, the one that began first. So the result does not depend on how the text
//! was cut into pieces, and generation can end at once.

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
    include_stop: bool,
    /// The longest end of the text so far that begins some stop string.
    held: String,
    matched: Option<usize>,
}

/// One stop string as a Knuth-Morris-Pratt automaton.
#[derive(Clone, Debug)]
struct Stop {
    index: usize,
    pattern: Vec<u8>,
    /// `fallback[n]`: after `n` matched bytes, the longest shorter match that remains.
    fallback: Vec<usize>,
    matched: usize,
}

impl StopMatcher {
    /// `include_stop`: the stop string is part of the output. Empty strings never match.
    pub fn new(stops: Vec<String>, include_stop: bool) -> Self {
        let stops = stops
            .into_iter()
            .enumerate()
            .filter(|(_, text)| !text.is_empty())
            .map(|(index, text)| Stop::new(index, text.into_bytes()))
            .collect();
        Self {
            stops,
            include_stop,
            held: String::new(),
            matched: None,
        }
    }

    /// Takes the next piece of text. After a match, everything is discarded.
    pub fn push(&mut self, text: &str) -> StopStep {
        if self.matched.is_some() {
            return StopStep {
                emit: String::new(),
                matched: self.matched,
            };
        }
        let held = self.held.len();
        self.held.push_str(text);
        for (end, byte) in (held + 1..).zip(text.bytes()) {
            let mut longest: Option<(usize, usize)> = None;
            for stop in &mut self.stops {
                if stop.step(byte) && longest.is_none_or(|(length, _)| stop.pattern.len() > length)
                {
                    longest = Some((stop.pattern.len(), stop.index));
                }
            }
            if let Some((length, index)) = longest {
                self.matched = Some(index);
                let keep = if self.include_stop { end } else { end - length };
                let mut emit = std::mem::take(&mut self.held);
                emit.truncate(keep);
                return StopStep {
                    emit,
                    matched: self.matched,
                };
            }
        }
        let hold = self.stops.iter().map(|stop| stop.matched).max();
        let keep = self.held.len() - hold.unwrap_or(0);
        let rest = self.held.split_off(keep);
        StopStep {
            emit: std::mem::replace(&mut self.held, rest),
            matched: None,
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
    fn new(index: usize, pattern: Vec<u8>) -> Self {
        let mut fallback = vec![0; pattern.len() + 1];
        let mut length = 0;
        for at in 1..pattern.len() {
            while length > 0 && pattern[at] != pattern[length] {
                length = fallback[length];
            }
            length += usize::from(pattern[at] == pattern[length]);
            fallback[at + 1] = length;
        }
        Self {
            index,
            pattern,
            fallback,
            matched: 0,
        }
    }

    /// Whether the pattern ends at this byte.
    fn step(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.pattern[self.matched] != byte {
            self.matched = self.fallback[self.matched];
        }
        self.matched += usize::from(self.pattern[self.matched] == byte);
        self.matched == self.pattern.len()
    }
}
