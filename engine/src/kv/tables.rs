//! A sequence's block tables, one per KvGroup, and the pools they point into.
//!
//! ```text
//! ordinal        0     1     2     3     4          position p lies in ordinal p / block_size
//! full group   [ 7 ] [ 3 ] [ 9 ] [ 4 ] [12 ]
//! window group [ - ] [ - ] [ 5 ] [ 1 ] [ 8 ]        - has left the window: BLOCK_NONE
//! ```
//!
//! A table holds one reference on each block it names. Tables are given back by
//! [`Pools::release`], never dropped full: the core's integrity check counts claims.

use baton_proto::block_hash::BlockHash;
use baton_proto::kv_layout::{KvGroupKind, KvLayout};

use super::block_pool::BlockPool;
use crate::step::BLOCK_NONE;

/// The block tables of one sequence. Empty tables hold nothing.
#[derive(Debug, Default)]
pub struct Tables {
    groups: Vec<Vec<u32>>,
    /// Per group: ordinals below it are `BLOCK_NONE`.
    first: Vec<u32>,
}

impl Tables {
    /// The blocks of `group` by ordinal.
    pub fn blocks(&self, group: usize) -> &[u32] {
        self.groups.get(group).map_or(&[], Vec::as_slice)
    }

    /// Ordinals of `group` up to the last one held.
    pub fn len(&self, group: usize) -> u32 {
        self.blocks(group).len() as u32
    }

    /// Whether no group names a block.
    pub fn is_empty(&self) -> bool {
        self.groups.iter().all(Vec::is_empty)
    }

    /// The block of `ordinal`, if the table holds one.
    pub fn block(&self, group: usize, ordinal: u32) -> Option<u32> {
        self.blocks(group)
            .get(ordinal as usize)
            .copied()
            .filter(|block| *block != BLOCK_NONE)
    }

    /// Every block held in `group`, by ordinal.
    pub fn held(&self, group: usize) -> impl Iterator<Item = (u32, u32)> + '_ {
        self.blocks(group)
            .iter()
            .enumerate()
            .filter(|(_, block)| **block != BLOCK_NONE)
            .map(|(ordinal, block)| (ordinal as u32, *block))
    }
}

/// A prefix that is already in the pools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hit {
    /// Whole blocks of the prefix.
    pub blocks: u32,
    /// How many blocks of the fullest-hit full group nobody holds: taking them makes
    /// that many fewer available.
    pub unheld: u32,
}

/// All pools of an engine.
#[derive(Debug)]
pub struct Pools {
    layout: KvLayout,
    pools: Vec<BlockPool>,
}

impl Pools {
    /// Free pools of `blocks[group]` blocks.
    pub fn new(layout: &KvLayout, blocks: &[u32]) -> Self {
        Self {
            layout: layout.clone(),
            pools: blocks.iter().map(|total| BlockPool::new(*total)).collect(),
        }
    }

    /// How the blocks are laid out.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// The pool of `group`.
    pub fn pool(&self, group: usize) -> &BlockPool {
        &self.pools[group]
    }

    /// The pool of `group`, to change.
    pub fn pool_mut(&mut self, group: usize) -> &mut BlockPool {
        &mut self.pools[group]
    }

    /// The pool whose names stand for all: that of the first full group, without which a
    /// prefix is found nowhere, or of the first group.
    pub fn telling(&mut self) -> &mut BlockPool {
        let full = self.groups().find(|group| self.is_full(*group));
        &mut self.pools[full.unwrap_or(0)]
    }

    /// The groups' indices.
    pub fn groups(&self) -> std::ops::Range<usize> {
        0..self.pools.len()
    }

    /// Whether `group` attends to every earlier position.
    pub fn is_full(&self, group: usize) -> bool {
        self.layout.groups[group].kind == KvGroupKind::Full
    }

    /// Blocks available in the tightest full group; `None` if there is no full group.
    pub fn full_available(&self) -> Option<u32> {
        self.groups()
            .filter(|group| self.is_full(*group))
            .map(|group| self.pools[group].available())
            .min()
    }

    /// The longest prefix of the blocks named `names` that every group still has: all
    /// of them in a full group, those inside the window before its end in a window group.
    pub fn lookup(&self, names: &[BlockHash]) -> Hit {
        let mut hit = Hit {
            blocks: names.len() as u32,
            unheld: 0,
        };
        for group in self.groups().filter(|group| self.is_full(*group)) {
            let found = names[..hit.blocks as usize]
                .iter()
                .take_while(|name| self.pools[group].find(name).is_some())
                .count();
            hit.blocks = found as u32;
        }
        let windows: Vec<usize> = self
            .groups()
            .filter(|group| !self.is_full(*group))
            .collect();
        while hit.blocks > 0 {
            let missing = windows.iter().find_map(|group| {
                self.needed(*group, hit.blocks)
                    .rev()
                    .find(|at| self.pools[*group].find(&names[*at as usize]).is_none())
            });
            match missing {
                None => break,
                // A prefix that ends inside the gap's window needs the gap too; the
                // longest one that may not is the one that ends before it.
                Some(ordinal) => hit.blocks = ordinal,
            }
        }
        hit.unheld = self
            .groups()
            .filter(|group| self.is_full(*group))
            .map(|group| {
                let pool = &self.pools[group];
                names[..hit.blocks as usize]
                    .iter()
                    .filter_map(|name| pool.find(name))
                    .filter(|block| pool.state(*block) == super::BlockState::Cached)
                    .count() as u32
            })
            .max()
            .unwrap_or(0);
        hit
    }

    /// The ordinals of `group` that a token after `blocks` whole blocks attends to.
    fn needed(&self, group: usize, blocks: u32) -> std::ops::Range<u32> {
        let position = blocks * self.layout.block_size;
        self.layout
            .first_needed_ordinal(group, position)
            .min(blocks)..blocks
    }

    /// Takes the blocks of a prefix that [`Pools::lookup`] found.
    pub fn adopt(&mut self, names: &[BlockHash], blocks: u32) -> Tables {
        let mut tables = self.empty_tables();
        for group in self.groups() {
            let needed = self.needed(group, blocks);
            tables.first[group] = needed.start;
            tables.groups[group] = vec![BLOCK_NONE; needed.start as usize];
            for ordinal in needed {
                let block = self.pools[group]
                    .find(&names[ordinal as usize])
                    .expect("the look-up found every needed block and nothing was evicted since");
                self.pools[group].retain(block);
                tables.groups[group].push(block);
            }
        }
        tables
    }

    /// Tables that name nothing.
    pub fn empty_tables(&self) -> Tables {
        Tables {
            groups: vec![Vec::new(); self.pools.len()],
            first: vec![0; self.pools.len()],
        }
    }

    /// Gives the blocks back that no token at `position` or later attends to.
    pub fn trim(&mut self, tables: &mut Tables, position: u32) {
        for group in self.groups() {
            let end = self
                .layout
                .first_needed_ordinal(group, position)
                .min(tables.len(group));
            for ordinal in tables.first[group]..end {
                let block =
                    std::mem::replace(&mut tables.groups[group][ordinal as usize], BLOCK_NONE);
                if block != BLOCK_NONE {
                    self.pools[group].release(block);
                }
            }
            tables.first[group] = tables.first[group].max(end);
        }
    }

    /// Appends one fresh block to `group`'s table.
    ///
    /// # Panics
    /// If none is available: the scheduler counted before it planned.
    pub fn grow(&mut self, tables: &mut Tables, group: usize) -> u32 {
        let block = self.pools[group]
            .allocate()
            .expect("the scheduler counted this block");
        tables.groups[group].push(block);
        block
    }

    /// Appends ordinals that hold no block, up to `first`.
    pub fn skip_to(&mut self, tables: &mut Tables, group: usize, first: u32) {
        let have = tables.len(group);
        if have < first {
            tables.groups[group].resize(first as usize, BLOCK_NONE);
            tables.first[group] = tables.first[group].max(first);
        }
    }

    /// Appends the committed block of a reservation.
    pub fn append_committed(&mut self, tables: &mut Tables, group: usize, block: u32) {
        self.pools[group].commit(block);
        tables.groups[group].push(block);
    }

    /// If `ordinal` is shared, replaces it by a fresh block and returns (old, new): the
    /// caller copies the bytes before anything else is allocated or written.
    ///
    /// # Panics
    /// If none is available: the scheduler counted before it planned.
    pub fn unshare(
        &mut self,
        tables: &mut Tables,
        group: usize,
        ordinal: u32,
    ) -> Option<(u32, u32)> {
        let old = tables.block(group, ordinal)?;
        if !self.pools[group].is_shared(old) {
            return None;
        }
        let new = self.pools[group]
            .allocate()
            .expect("the scheduler counted this copy");
        self.pools[group].release(old);
        tables.groups[group][ordinal as usize] = new;
        Some((old, new))
    }

    /// Tables that name the same blocks, each held once more.
    pub fn share(&mut self, tables: &Tables) -> Tables {
        for group in self.groups() {
            for (_, block) in tables.held(group) {
                self.pools[group].retain(block);
            }
        }
        Tables {
            groups: tables.groups.clone(),
            first: tables.first.clone(),
        }
    }

    /// Turns a sequence's claims into a sender's: every block stays, pinned.
    pub fn pin(&mut self, tables: &Tables) {
        for group in self.groups() {
            for (_, block) in tables.held(group) {
                self.pools[group].pin(block);
                self.pools[group].release(block);
            }
        }
    }

    /// Ends a sender's claims.
    pub fn unpin(&mut self, tables: Tables) {
        for group in self.groups() {
            for block in tables
                .blocks(group)
                .iter()
                .rev()
                .filter(|block| **block != BLOCK_NONE)
            {
                self.pools[group].unpin(*block);
            }
        }
    }

    /// Gives all blocks back, the last ordinal first, so that the end of a prefix is
    /// evicted before its beginning.
    pub fn release(&mut self, tables: Tables) {
        for group in self.groups() {
            for block in tables
                .blocks(group)
                .iter()
                .rev()
                .filter(|block| **block != BLOCK_NONE)
            {
                self.pools[group].release(*block);
            }
        }
    }

    /// Names the whole blocks `from..to` of a sequence in the prefix index.
    pub fn publish(&mut self, tables: &Tables, names: &[BlockHash], from: u32, to: u32) {
        for group in self.groups() {
            for ordinal in from..to {
                if let Some(block) = tables.block(group, ordinal) {
                    self.pools[group].publish(block, names[ordinal as usize]);
                }
            }
        }
    }

    /// Full-group blocks that come back if `tables` are released.
    pub fn exclusive(&self, tables: &Tables) -> u32 {
        self.groups()
            .filter(|group| self.is_full(*group))
            .map(|group| {
                let pool = &self.pools[group];
                tables
                    .held(group)
                    .filter(|(_, block)| pool.has_one_holder(*block))
                    .count() as u32
            })
            .min()
            .unwrap_or(0)
    }

    /// Empties the prefix index: cached blocks become free, held ones lose their name.
    pub fn clear_cache(&mut self) {
        self.pools.iter_mut().for_each(BlockPool::clear_cache);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_proto::NumericsId;
    use baton_proto::kv_layout::{KvDtype, KvGroup};

    fn pools(window: u32, blocks: u32) -> Pools {
        let layout = KvLayout {
            block_size: 16,
            dtype: KvDtype::F16,
            scale_group: 0,
            kv_heads: 1,
            head_dim: 16,
            layers: 2,
            groups: vec![
                KvGroup {
                    kind: KvGroupKind::Full,
                    layers: vec![0],
                },
                KvGroup {
                    kind: KvGroupKind::SlidingWindow { window },
                    layers: vec![1],
                },
            ],
            numerics: NumericsId([0; 16]),
            origin: None,
            shard: None,
        };
        Pools::new(&layout, &[blocks, blocks])
    }

    fn names(count: u8) -> Vec<BlockHash> {
        (0..count).map(|n| BlockHash([n; 16])).collect()
    }

    /// A computed sequence of `blocks` blocks whose window group keeps all of them.
    fn compute(pools: &mut Pools, names: &[BlockHash]) -> Tables {
        let mut tables = pools.empty_tables();
        for _ in names {
            pools.grow(&mut tables, 0);
            pools.grow(&mut tables, 1);
        }
        pools.publish(&tables, names, 0, names.len() as u32);
        tables
    }

    #[test]
    fn a_hit_needs_the_window_before_its_end_and_nothing_older() {
        let names = names(6);
        let mut pools = pools(32, 8);
        let mut tables = compute(&mut pools, &names);
        // Position 96 attends to positions above 64: ordinals 4 and 5.
        pools.trim(&mut tables, 96);
        assert_eq!(tables.block(1, 3), None);
        assert!(tables.block(1, 4).is_some());
        pools.release(tables);
        assert_eq!(pools.lookup(&names).blocks, 6);
        // Take the older window blocks away: the full hit must not care.
        let mut taken = pools.empty_tables();
        for _ in 0..6 {
            pools.grow(&mut taken, 1);
        }
        assert_eq!(
            pools.lookup(&names),
            Hit {
                blocks: 6,
                unheld: 6
            }
        );
        // A shorter hit would need window blocks that are gone.
        assert_eq!(pools.lookup(&names[..3]).blocks, 0);
        let adopted = pools.adopt(&names, 6);
        assert_eq!(
            adopted
                .held(1)
                .map(|(ordinal, _)| ordinal)
                .collect::<Vec<_>>(),
            [4, 5]
        );
        assert_eq!(pools.lookup(&names).unheld, 0);
        pools.release(adopted);
        pools.release(taken);
        assert_eq!(pools.pool(0).available(), 8);
    }

    #[test]
    fn a_gap_in_the_full_group_ends_the_hit() {
        let names = names(4);
        let mut pools = pools(16, 4);
        let tables = compute(&mut pools, &names);
        pools.release(tables);
        let mut taken = pools.empty_tables();
        // The last ordinal was released first and is evicted first.
        pools.grow(&mut taken, 0);
        assert_eq!(pools.lookup(&names).blocks, 3);
        pools.release(taken);
    }

    #[test]
    fn writing_a_shared_block_gives_the_writer_its_own() {
        let mut pools = pools(32, 4);
        let mut parent = pools.empty_tables();
        pools.grow(&mut parent, 0);
        let mut child = pools.share(&parent);
        let shared = parent.block(0, 0).unwrap();
        let (old, new) = pools.unshare(&mut child, 0, 0).unwrap();
        assert_eq!(old, shared);
        assert_eq!(
            (child.block(0, 0), parent.block(0, 0)),
            (Some(new), Some(shared))
        );
        assert_eq!(
            pools.unshare(&mut parent, 0, 0),
            None,
            "the last holder writes in place"
        );
        assert_eq!(pools.exclusive(&parent), 1);
        pools.release(parent);
        pools.release(child);
        assert_eq!(pools.pool(0).counts().free, 4);
    }
}
