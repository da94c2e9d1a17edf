//! Pair merging, the one algorithm under byte-level BPE and SentencePiece BPE.
//!
//! Neighbouring symbols are joined, best pair first and leftmost among equals, until
//! no pair can be joined. A heap keeps it at `O(n log n)`: a megabyte of one letter
//! costs a fraction of a second. What a pair is worth is the caller's business.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use baton_proto::ids::TokenId;

const NONE: u32 = u32::MAX;

/// A run of the text, `start..end` in bytes. `end == start` once a left neighbour has
/// swallowed it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Symbol {
    pub(crate) start: u32,
    pub(crate) end: u32,
    pub(crate) id: TokenId,
    previous: u32,
    next: u32,
}

/// What joining two neighbours gives, and how urgent it is (lower is first).
pub(crate) struct Join {
    pub(crate) order: u32,
    pub(crate) id: TokenId,
}

/// Fields in the order in which candidates compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    order: u32,
    left: u32,
    /// Where the right symbol ended when this was queued. Symbols only grow, so an
    /// equal end proves that neither has changed since.
    right_end: u32,
    id: TokenId,
}

/// The symbols of one word, and the memory to merge them; reused from word to word.
#[derive(Debug, Default)]
pub(crate) struct Merger {
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Reverse<Candidate>>,
}

impl Merger {
    pub(crate) fn clear(&mut self) {
        self.symbols.clear();
        self.queue.clear();
    }

    /// Appends a symbol of `length` bytes.
    pub(crate) fn push(&mut self, length: u32, id: TokenId) {
        let index = self.symbols.len() as u32;
        let start = self.symbols.last().map_or(0, |last| last.end);
        if let Some(last) = self.symbols.last_mut() {
            last.next = index;
        }
        self.symbols.push(Symbol {
            start,
            end: start + length,
            id,
            previous: index.checked_sub(1).unwrap_or(NONE),
            next: NONE,
        });
    }

    /// Merges all that can be merged.
    pub(crate) fn run(&mut self, join: impl Fn(&Symbol, &Symbol) -> Option<Join>) {
        for left in 1..self.symbols.len() as u32 {
            self.consider(left - 1, &join);
        }
        while let Some(Reverse(candidate)) = self.queue.pop() {
            let left = self.symbols[candidate.left as usize];
            if left.end == left.start || left.next == NONE {
                continue;
            }
            let right = self.symbols[left.next as usize];
            if right.end != candidate.right_end {
                continue;
            }
            self.symbols[left.next as usize].end = right.start;
            let merged = &mut self.symbols[candidate.left as usize];
            merged.end = right.end;
            merged.id = candidate.id;
            merged.next = right.next;
            if right.next != NONE {
                self.symbols[right.next as usize].previous = candidate.left;
            }
            if left.previous != NONE {
                self.consider(left.previous, &join);
            }
            self.consider(candidate.left, &join);
        }
    }

    /// What is left, in order.
    pub(crate) fn symbols(&self) -> impl Iterator<Item = &Symbol> {
        self.symbols
            .iter()
            .filter(|symbol| symbol.end > symbol.start)
    }

    fn consider(&mut self, left: u32, join: &impl Fn(&Symbol, &Symbol) -> Option<Join>) {
        let left_symbol = &self.symbols[left as usize];
        if left_symbol.next == NONE {
            return;
        }
        let right = &self.symbols[left_symbol.next as usize];
        if let Some(Join { order, id }) = join(left_symbol, right) {
            self.queue.push(Reverse(Candidate {
                order,
                left,
                right_end: right.end,
                id,
            }));
        }
    }
}
