//! Which worker probably holds the KV of which prefix.
//!
//! Filled by what workers tell of their caches, and by a guess when a request is placed:
//! the worker that computes a prompt will have its blocks. A wrong entry costs time, never
//! a wrong answer. Spans are named as workers name them ([`BlockHash`]), so tenants and
//! models never meet here. A worker with blocks of several spans names each block by its
//! last one: `stride` is how many.

use std::collections::HashMap;

use baton_proto::block_hash::BlockHash;

use super::WorkerKey;

/// Workers remembered for one span; the latest ones stay.
const WORKERS_PER_SPAN: usize = 4;

/// Span to workers, bounded: two generations of half the capacity each. When the
/// younger is full the older is dropped; a span that is used moves to the younger.
#[derive(Debug)]
pub struct PrefixIndex {
    young: HashMap<BlockHash, Vec<WorkerKey>>,
    old: HashMap<BlockHash, Vec<WorkerKey>>,
    spans_max: usize,
}

impl PrefixIndex {
    /// An index of at most `spans_max` spans. When full, the spans longest unused go.
    pub fn new(spans_max: usize) -> Self {
        Self {
            young: HashMap::new(),
            old: HashMap::new(),
            spans_max: spans_max.max(2),
        }
    }

    /// Spans known now.
    pub fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many leading spans of `spans` the worker has.
    pub fn matched(&self, spans: &[BlockHash], worker: &WorkerKey, stride: usize) -> usize {
        let blocks = named(spans, stride)
            .take_while(|span| {
                let known = self.young.get(span).or_else(|| self.old.get(span));
                known.is_some_and(|workers| workers.contains(worker))
            })
            .count();
        blocks * stride
    }

    /// The worker now has all of `spans`.
    pub fn insert(&mut self, spans: &[BlockHash], worker: &WorkerKey, stride: usize) {
        for span in named(spans, stride) {
            if !self.young.contains_key(span) {
                if self.young.len() >= self.spans_max / 2 {
                    self.old = std::mem::take(&mut self.young);
                }
                let workers = self.old.remove(span).unwrap_or_default();
                self.young.insert(*span, workers);
            }
            let workers = self.young.entry(*span).or_default();
            workers.retain(|known| known != worker);
            if workers.len() == WORKERS_PER_SPAN {
                workers.remove(0);
            }
            workers.push(worker.clone());
        }
    }

    /// The worker has these no longer.
    pub fn evicted(&mut self, spans: &[BlockHash], worker: &WorkerKey) {
        for span in spans {
            for map in [&mut self.young, &mut self.old] {
                let Some(workers) = map.get_mut(span) else {
                    continue;
                };
                workers.retain(|known| known != worker);
                if workers.is_empty() {
                    map.remove(span);
                }
            }
        }
    }

    /// The worker is gone, and its cache with it.
    pub fn remove(&mut self, worker: &WorkerKey) {
        for map in [&mut self.young, &mut self.old] {
            map.retain(|_, workers| {
                workers.retain(|known| known != worker);
                !workers.is_empty()
            });
        }
    }
}

/// The spans that name whole blocks of `stride` spans each.
fn named(spans: &[BlockHash], stride: usize) -> impl Iterator<Item = &BlockHash> {
    spans.iter().skip(stride - 1).step_by(stride)
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_proto::Epoch;

    fn spans(from: u8, count: u8) -> Vec<BlockHash> {
        (from..from + count)
            .map(|byte| BlockHash([byte; 16]))
            .collect()
    }

    fn worker(id: &str) -> WorkerKey {
        WorkerKey::new(id.into(), Epoch(1))
    }

    #[test]
    fn a_prefix_counts_up_to_its_first_gap_and_per_worker() {
        let mut index = PrefixIndex::new(100);
        index.insert(&spans(0, 3), &worker("a"), 1);
        index.insert(&spans(0, 5), &worker("b"), 1);
        assert_eq!(index.matched(&spans(0, 9), &worker("a"), 1), 3);
        assert_eq!(index.matched(&spans(0, 9), &worker("b"), 1), 5);
        assert_eq!(index.matched(&spans(1, 2), &worker("c"), 1), 0);
        index.remove(&worker("b"));
        assert_eq!(index.matched(&spans(0, 9), &worker("b"), 1), 0);
        assert_eq!(index.len(), 3);
    }

    #[test]
    fn stays_bounded_and_keeps_what_is_used() {
        let mut index = PrefixIndex::new(20);
        for round in 0..20 {
            index.insert(&spans(0, 2), &worker("a"), 1);
            index.insert(&spans(10 + round * 8, 8), &worker("a"), 1);
            assert!(index.len() <= 20, "{} spans", index.len());
            assert_eq!(index.matched(&spans(0, 2), &worker("a"), 1), 2);
        }
        assert_eq!(index.matched(&spans(10, 1), &worker("a"), 1), 0);
        for id in ["b", "c", "d", "e"] {
            index.insert(&spans(0, 1), &worker(id), 1);
        }
        assert_eq!(index.matched(&spans(0, 1), &worker("a"), 1), 0);
    }

    #[test]
    fn blocks_of_several_spans_go_by_their_last_one() {
        let mut index = PrefixIndex::new(100);
        let (coarse, fine) = (worker("a"), worker("b"));
        // What a worker with two spans a block tells, and what it is remembered for.
        index.insert(&[BlockHash([1; 16]), BlockHash([3; 16])], &coarse, 1);
        index.insert(&spans(4, 3), &coarse, 2);
        assert_eq!(index.len(), 3);
        assert_eq!(index.matched(&spans(0, 7), &coarse, 2), 6);
        index.insert(&spans(0, 5), &fine, 1);
        assert_eq!(index.matched(&spans(0, 9), &fine, 1), 5);
        assert_eq!(index.matched(&spans(0, 1), &coarse, 2), 0);
    }

    #[test]
    fn what_a_worker_evicts_it_alone_has_no_longer() {
        let mut index = PrefixIndex::new(100);
        let (a, b) = (worker("a"), worker("b"));
        index.insert(&spans(0, 4), &a, 1);
        index.insert(&spans(0, 2), &b, 1);
        index.evicted(&spans(1, 9), &a);
        assert_eq!(index.matched(&spans(0, 4), &a, 1), 1);
        assert_eq!(index.matched(&spans(0, 4), &b, 1), 2);
        assert_eq!(index.len(), 2);
    }
}
