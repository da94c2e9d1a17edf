//! Which blocks a prefix cache holds, by name, for readers that keep a copy.
//!
//! The cache's owner tells of each block that comes and goes; a reader asks for what
//! changed since the position it has. The changes kept are bounded: a reader that fell
//! behind further, or that is new, gets all names instead. Nothing here waits.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::block_hash::BlockHash;

/// Changes kept, 24 bytes each. A reader asks four times a second; a worker that changes
/// more blocks than this in between sends its names anew.
const CHANGES_MAX: usize = 16_384;

/// One block's coming or going.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheChange {
    pub name: BlockHash,
    /// Whether it is there now.
    pub stored: bool,
}

/// What a reader is behind by.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheDelta {
    /// `stored` is all there is, not a change.
    pub snapshot: bool,
    pub stored: Vec<BlockHash>,
    /// No name is on both lists.
    pub removed: Vec<BlockHash>,
    /// Where to go on.
    pub position: u64,
}

/// The names. Shared by the cache's owner and its readers.
#[derive(Debug, Default)]
pub struct CacheNames(Mutex<Names>);

#[derive(Debug, Default)]
struct Names {
    held: BTreeSet<BlockHash>,
    changes: VecDeque<CacheChange>,
    /// The position after the last change.
    end: u64,
}

impl CacheNames {
    fn lock(&self) -> MutexGuard<'_, Names> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes changes in, in order, and leaves the list empty.
    pub fn apply(&self, changes: &mut Vec<CacheChange>) {
        if changes.is_empty() {
            return;
        }
        let mut names = self.lock();
        for change in changes.drain(..) {
            if change.stored {
                names.held.insert(change.name);
            } else {
                names.held.remove(&change.name);
            }
            if names.changes.len() == CHANGES_MAX {
                names.changes.pop_front();
            }
            names.changes.push_back(change);
            names.end += 1;
        }
    }

    /// What changed since `position`; everything, for a reader without one or one that
    /// fell behind.
    pub fn since(&self, position: Option<u64>) -> CacheDelta {
        let names = self.lock();
        let behind = position.and_then(|position| names.end.checked_sub(position));
        let kept = behind.filter(|behind| *behind <= names.changes.len() as u64);
        let Some(behind) = kept else {
            return CacheDelta {
                snapshot: true,
                stored: names.held.iter().copied().collect(),
                removed: Vec::new(),
                position: names.end,
            };
        };
        let news = names.changes.range(names.changes.len() - behind as usize..);
        // What a name came to in the end is all that matters.
        let touched: BTreeSet<BlockHash> = news.map(|change| change.name).collect();
        let (stored, removed) = touched
            .into_iter()
            .partition(|name| names.held.contains(name));
        CacheDelta {
            snapshot: false,
            stored,
            removed,
            position: names.end,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(n: u32) -> BlockHash {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&n.to_be_bytes());
        BlockHash(bytes)
    }

    fn apply(names: &CacheNames, changes: &[i64]) {
        let change = |n: &i64| CacheChange {
            name: name(n.unsigned_abs() as u32),
            stored: *n > 0,
        };
        names.apply(&mut changes.iter().map(change).collect());
    }

    #[test]
    fn a_reader_hears_everything_once_and_then_what_changed() {
        let names = CacheNames::default();
        apply(&names, &[1, 2, 3, -2]);
        let all = names.since(None);
        assert!(all.snapshot);
        assert_eq!(all.stored, [name(1), name(3)]);
        apply(&names, &[4, -1, 5, -5, -3, 3]);
        let news = names.since(Some(all.position));
        assert!(!news.snapshot);
        assert_eq!(news.stored, [name(3), name(4)]);
        assert_eq!(news.removed, [name(1), name(5)]);
        let none = names.since(Some(news.position));
        assert_eq!(
            none,
            CacheDelta {
                position: news.position,
                ..CacheDelta::default()
            }
        );
    }

    #[test]
    fn a_reader_that_fell_behind_the_changes_kept_begins_anew() {
        let names = CacheNames::default();
        let start = names.since(None).position;
        for n in 1..=CHANGES_MAX as i64 {
            apply(&names, &[n]);
        }
        let news = names.since(Some(start));
        assert!(!news.snapshot);
        assert_eq!(news.stored.len(), CHANGES_MAX);
        apply(&names, &[-7]);
        let anew = names.since(Some(start));
        assert!(anew.snapshot);
        assert_eq!(anew.stored.len(), CHANGES_MAX - 1);
        // A position of another life, ahead of all.
        assert!(names.since(Some(u64::MAX)).snapshot);
    }
}
