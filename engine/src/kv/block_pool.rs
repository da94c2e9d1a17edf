//! Who holds each block of one KvGroup's pool.
//!
//! ```text
//!             allocate                 release (last holder)
//!    Free ----------------> Referenced ---------------------> Free, or Cached if named
//!    Cached --(evict)-----------^  ^   |  ^
//!    Cached --(retain: a hit)------'   |  | retain, release
//!                                      v  |
//!                    pin / unpin     Pinned
//!    Free/Cached --reserve--> Reserved --commit--> Referenced
//!                                |---return_reserved--> Free
//!                                '---quarantine--> Quarantined --return_reserved--> Free
//! ```
//!
//! A block is in exactly one state, the strongest claim on it: quarantined or
//! reserved (a peer may write it), pinned (being sent), referenced (in the table of a
//! running sequence), cached (only named in the prefix index), free. The counts of
//! the states sum to the pool's size; [`BlockPool::check_integrity`] says whether.
//!
//! Every way to get a block evicts the least recently used cached one when nothing is
//! free. The generation grows each time a block changes hands, so that a late write
//! under an old grant can be told apart. This type moves no bytes.

use std::collections::{BTreeSet, HashMap};

use baton_proto::block_hash::BlockHash;
use baton_proto::cache_names::CacheChange;

use crate::api::BlockCounts;

/// The state of a block: the strongest claim on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    Free,
    Referenced,
    Cached,
    Reserved,
    Pinned,
    Quarantined,
}

/// A peer's claim on a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Grant {
    None,
    Reserved,
    Quarantined,
}

#[derive(Clone, Debug)]
struct Slot {
    generation: u32,
    /// Tables of running sequences that name the block.
    references: u32,
    /// Requests whose peers may still read it.
    pins: u32,
    grant: Grant,
    /// Its name in the index, while its contents are those of a known prefix.
    hash: Option<BlockHash>,
    /// When its last holder left; the key in `evictable`.
    left_at: u64,
}

impl Slot {
    fn state(&self) -> BlockState {
        match self.grant {
            Grant::Quarantined => BlockState::Quarantined,
            Grant::Reserved => BlockState::Reserved,
            Grant::None if self.pins > 0 => BlockState::Pinned,
            Grant::None if self.references > 0 => BlockState::Referenced,
            Grant::None if self.hash.is_some() => BlockState::Cached,
            Grant::None => BlockState::Free,
        }
    }
}

/// The blocks of one pool. See the module's picture.
#[derive(Clone, Debug)]
pub struct BlockPool {
    slots: Vec<Slot>,
    /// Stack of free blocks: the one used last is still warm in some cache.
    free: Vec<u32>,
    /// Cached blocks by the time their last holder left.
    evictable: BTreeSet<(u64, u32)>,
    index: HashMap<BlockHash, u32>,
    counts: BlockCounts,
    clock: u64,
    /// Names that came and went, for whoever keeps a copy of the index; `None` if nobody does.
    news: Option<Vec<CacheChange>>,
}

impl BlockPool {
    /// A pool of `total` free blocks.
    pub fn new(total: u32) -> Self {
        let slot = Slot {
            generation: 0,
            references: 0,
            pins: 0,
            grant: Grant::None,
            hash: None,
            left_at: 0,
        };
        Self {
            slots: vec![slot; total as usize],
            free: (0..total).rev().collect(),
            evictable: BTreeSet::new(),
            index: HashMap::new(),
            counts: BlockCounts {
                total,
                free: total,
                ..BlockCounts::default()
            },
            clock: 0,
            news: None,
        }
    }

    /// From now on, [`BlockPool::news`] says which names came and went.
    pub fn tell_news(&mut self) {
        self.news.get_or_insert_default();
    }

    /// Names that came and went since the list was last emptied, by its reader.
    pub fn news(&mut self) -> Option<&mut Vec<CacheChange>> {
        self.news.as_mut()
    }

    /// Blocks by state.
    pub fn counts(&self) -> BlockCounts {
        self.counts
    }

    /// Blocks that can be taken now: free ones and cached ones, which are evicted.
    pub fn available(&self) -> u32 {
        self.counts.free + self.counts.cached
    }

    /// The state of `block`.
    pub fn state(&self, block: u32) -> BlockState {
        self.slots[block as usize].state()
    }

    /// How often `block` has changed hands.
    pub fn generation(&self, block: u32) -> u32 {
        self.slots[block as usize].generation
    }

    /// Whether writing `block` would be seen by anybody but its one holder: another
    /// table, a peer that reads it, or the prefix index.
    pub fn is_shared(&self, block: u32) -> bool {
        let slot = &self.slots[block as usize];
        slot.references + slot.pins > 1 || slot.hash.is_some()
    }

    /// Whether releasing one reference makes `block` available.
    pub fn has_one_holder(&self, block: u32) -> bool {
        let slot = &self.slots[block as usize];
        slot.references == 1 && slot.pins == 0 && slot.grant == Grant::None
    }

    /// Takes a block for a sequence's table; none if all are held.
    pub fn allocate(&mut self) -> Option<u32> {
        let block = self.take()?;
        self.change(block, |slot| slot.references = 1);
        Some(block)
    }

    /// Takes a block for a peer to write; none if all are held.
    pub fn reserve(&mut self) -> Option<u32> {
        let block = self.take()?;
        self.change(block, |slot| slot.grant = Grant::Reserved);
        Some(block)
    }

    /// The peer's writes are complete: the reserved `block` is now a sequence's.
    pub fn commit(&mut self, block: u32) {
        self.expect(block, BlockState::Reserved);
        self.change(block, |slot| {
            slot.grant = Grant::None;
            slot.references = 1;
            slot.generation = slot.generation.wrapping_add(1);
        });
    }

    /// Nobody wants the reserved `block` any more, but the peer may still write it.
    pub fn quarantine(&mut self, block: u32) {
        self.expect(block, BlockState::Reserved);
        self.change(block, |slot| slot.grant = Grant::Quarantined);
    }

    /// The peer no longer touches a reserved or quarantined `block`.
    pub fn return_granted(&mut self, block: u32) {
        let state = self.state(block);
        assert!(
            matches!(state, BlockState::Reserved | BlockState::Quarantined),
            "block `{block}` is {state:?}, not granted"
        );
        self.change(block, |slot| {
            slot.grant = Grant::None;
            slot.generation = slot.generation.wrapping_add(1);
        });
    }

    /// One more table names `block`, which is held or cached.
    pub fn retain(&mut self, block: u32) {
        let state = self.state(block);
        assert!(
            matches!(
                state,
                BlockState::Referenced | BlockState::Cached | BlockState::Pinned
            ),
            "block `{block}` is {state:?} and cannot be shared"
        );
        self.change(block, |slot| slot.references += 1);
    }

    /// One table names `block` no longer.
    pub fn release(&mut self, block: u32) {
        assert!(
            self.slots[block as usize].references > 0,
            "block `{block}` has no reference"
        );
        self.change(block, |slot| slot.references -= 1);
    }

    /// A peer may read `block`, which is referenced or pinned already.
    pub fn pin(&mut self, block: u32) {
        let state = self.state(block);
        assert!(
            matches!(state, BlockState::Referenced | BlockState::Pinned),
            "block `{block}` is {state:?} and cannot be pinned"
        );
        self.change(block, |slot| slot.pins += 1);
    }

    /// One peer reads `block` no longer.
    pub fn unpin(&mut self, block: u32) {
        self.expect(block, BlockState::Pinned);
        self.change(block, |slot| slot.pins -= 1);
    }

    /// Names the whole, final `block` by its prefix, unless that prefix has one already.
    pub fn publish(&mut self, block: u32, hash: BlockHash) {
        let state = self.state(block);
        assert!(
            matches!(state, BlockState::Referenced | BlockState::Pinned),
            "block `{block}` is {state:?} and cannot be published"
        );
        if self.slots[block as usize].hash.is_some() || self.index.contains_key(&hash) {
            return;
        }
        self.index.insert(hash, block);
        self.slots[block as usize].hash = Some(hash);
        self.tell(hash, true);
    }

    /// The block that holds the last span of the prefix named `hash`.
    pub fn find(&self, hash: &BlockHash) -> Option<u32> {
        self.index.get(hash).copied()
    }

    /// Empties the prefix index: cached blocks become free, held ones lose their name.
    pub fn clear_cache(&mut self) {
        for block in 0..self.slots.len() as u32 {
            if self.slots[block as usize].hash.is_some() {
                self.forget(block);
            }
        }
    }

    /// A free or evicted block, its generation grown, still without a holder.
    fn take(&mut self) -> Option<u32> {
        let block = match self.free.last() {
            Some(block) => *block,
            None => {
                let (_, block) = *self.evictable.first()?;
                self.forget(block);
                block
            }
        };
        let slot = &mut self.slots[block as usize];
        slot.generation = slot.generation.wrapping_add(1);
        Some(block)
    }

    /// Takes `block` out of the index.
    fn forget(&mut self, block: u32) {
        let hash = self.slots[block as usize].hash;
        if let Some(hash) = hash {
            self.index.remove(&hash);
            self.tell(hash, false);
        }
        self.change(block, |slot| slot.hash = None);
    }

    fn tell(&mut self, name: BlockHash, stored: bool) {
        if let Some(news) = &mut self.news {
            news.push(CacheChange { name, stored });
        }
    }

    /// Changes a slot and keeps the lists and counts in step with its state.
    fn change(&mut self, block: u32, change: impl FnOnce(&mut Slot)) {
        let slot = &mut self.slots[block as usize];
        let before = slot.state();
        change(slot);
        let after = slot.state();
        if before == after {
            return;
        }
        match before {
            BlockState::Free => {
                // Nearly always the top; a scan is needed only if a caller picked another.
                if self.free.last() == Some(&block) {
                    self.free.pop();
                } else {
                    self.free.retain(|free| *free != block);
                }
            }
            BlockState::Cached => {
                self.evictable.remove(&(slot.left_at, block));
            }
            _ => {}
        }
        match after {
            BlockState::Free => self.free.push(block),
            BlockState::Cached => {
                self.clock += 1;
                slot.left_at = self.clock;
                self.evictable.insert((self.clock, block));
            }
            _ => {}
        }
        *count_of(&mut self.counts, before) -= 1;
        *count_of(&mut self.counts, after) += 1;
    }

    fn expect(&self, block: u32, expected: BlockState) {
        let state = self.state(block);
        assert!(
            state == expected,
            "block `{block}` is {state:?}, not {expected:?}"
        );
    }

    /// Whether every list and count agrees with the slots.
    ///
    /// # Panics
    /// With the first disagreement.
    pub fn check_integrity(&self) {
        let mut counts = BlockCounts {
            total: self.counts.total,
            ..BlockCounts::default()
        };
        for (block, slot) in self.slots.iter().enumerate() {
            *count_of(&mut counts, slot.state()) += 1;
            assert!(
                slot.grant == Grant::None
                    || (slot.references == 0 && slot.pins == 0 && slot.hash.is_none()),
                "block `{block}` is granted and held: {slot:?}"
            );
            if let Some(hash) = slot.hash {
                assert_eq!(
                    self.index.get(&hash),
                    Some(&(block as u32)),
                    "index of `{block}`"
                );
            }
            let evictable = self.evictable.contains(&(slot.left_at, block as u32));
            assert_eq!(
                evictable,
                slot.state() == BlockState::Cached,
                "list of block `{block}`"
            );
        }
        assert_eq!(counts, self.counts, "counts by state");
        let sum = counts.free
            + counts.referenced
            + counts.cached
            + counts.reserved
            + counts.pinned
            + counts.quarantined;
        assert_eq!(sum, counts.total, "sum of the counts");
        assert_eq!(
            self.free.len(),
            counts.free as usize,
            "length of the free list"
        );
        assert!(
            self.free
                .iter()
                .all(|block| self.state(*block) == BlockState::Free)
        );
        assert_eq!(
            self.evictable.len(),
            counts.cached as usize,
            "length of the eviction list"
        );
        let named = self.slots.iter().filter(|slot| slot.hash.is_some()).count();
        assert_eq!(self.index.len(), named, "size of the index");
    }

    /// References and pins of every block, to compare with the tables that claim them.
    pub fn claims(&self) -> Vec<(u32, u32)> {
        self.slots
            .iter()
            .map(|slot| (slot.references, slot.pins))
            .collect()
    }
}

fn count_of(counts: &mut BlockCounts, state: BlockState) -> &mut u32 {
    match state {
        BlockState::Free => &mut counts.free,
        BlockState::Referenced => &mut counts.referenced,
        BlockState::Cached => &mut counts.cached,
        BlockState::Reserved => &mut counts.reserved,
        BlockState::Pinned => &mut counts.pinned,
        BlockState::Quarantined => &mut counts.quarantined,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(n: u8) -> BlockHash {
        BlockHash([n; 16])
    }

    /// Allocates, names and releases a block.
    fn cache(pool: &mut BlockPool, n: u8) -> u32 {
        let block = pool.allocate().unwrap();
        pool.publish(block, name(n));
        pool.release(block);
        block
    }

    #[test]
    fn evicts_the_oldest_unreferenced_block_when_full() {
        let mut pool = BlockPool::new(3);
        let (a, b, c) = (
            cache(&mut pool, 1),
            cache(&mut pool, 2),
            cache(&mut pool, 3),
        );
        pool.retain(a);
        pool.release(a);
        // The order in which holders left is now b, c, a.
        assert_eq!([pool.allocate(), pool.reserve()], [Some(b), Some(c)]);
        assert_eq!((pool.find(&name(1)), pool.find(&name(2))), (Some(a), None));
        pool.retain(a);
        assert_eq!(pool.allocate(), None);
        pool.check_integrity();
    }

    #[test]
    fn a_block_a_peer_may_touch_is_never_handed_out() {
        let mut pool = BlockPool::new(2);
        let reserved = pool.reserve().unwrap();
        let pinned = pool.allocate().unwrap();
        pool.pin(pinned);
        pool.release(pinned);
        pool.quarantine(reserved);
        assert_eq!(pool.available(), 0);
        assert_eq!(pool.allocate(), None);
        pool.unpin(pinned);
        assert_eq!(pool.allocate(), Some(pinned));
        pool.return_granted(reserved);
        assert_eq!(pool.allocate(), Some(reserved));
        pool.check_integrity();
    }

    #[test]
    fn the_generation_grows_whenever_a_block_changes_hands() {
        let mut pool = BlockPool::new(1);
        let block = pool.reserve().unwrap();
        let granted = pool.generation(block);
        pool.commit(block);
        let owned = pool.generation(block);
        pool.release(block);
        pool.reserve().unwrap();
        let again = pool.generation(block);
        assert!(granted < owned && owned < again);
        pool.return_granted(block);
        assert!(pool.generation(block) > again);
    }

    #[test]
    fn one_prefix_has_one_block() {
        let mut pool = BlockPool::new(4);
        let first = pool.allocate().unwrap();
        let second = pool.allocate().unwrap();
        pool.publish(first, name(1));
        pool.publish(second, name(1));
        pool.release(second);
        assert_eq!(pool.state(second), BlockState::Free);
        pool.release(first);
        assert_eq!(pool.state(first), BlockState::Cached);
        pool.clear_cache();
        assert_eq!(pool.counts().free, 4);
        pool.check_integrity();
    }

    #[test]
    fn a_shared_block_is_freed_by_its_last_holder() {
        let mut pool = BlockPool::new(1);
        let block = pool.allocate().unwrap();
        pool.retain(block);
        assert!(pool.is_shared(block) && !pool.has_one_holder(block));
        pool.release(block);
        assert!(!pool.is_shared(block) && pool.has_one_holder(block));
        assert_eq!(pool.available(), 0);
        pool.release(block);
        assert_eq!(pool.available(), 1);
    }

    #[test]
    fn news_are_what_came_into_the_index_and_left_it() {
        let mut pool = BlockPool::new(1);
        cache(&mut pool, 1);
        assert!(pool.news().is_none());
        pool.tell_news();
        // Evicts the one before.
        cache(&mut pool, 2);
        pool.clear_cache();
        let news: Vec<(u8, bool)> = pool
            .news()
            .unwrap()
            .drain(..)
            .map(|change| (change.name.0[0], change.stored))
            .collect();
        assert_eq!(news, [(1, false), (2, true), (2, false)]);
    }

    #[test]
    #[should_panic(expected = "no reference")]
    fn releasing_twice_is_noticed() {
        let mut pool = BlockPool::new(1);
        let block = pool.allocate().unwrap();
        pool.release(block);
        pool.release(block);
    }
}
