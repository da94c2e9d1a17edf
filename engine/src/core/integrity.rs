//! Every block's claims against every table that makes them.
//!
//! Run after each step in debug builds, and by tests after each command.

use super::Core;
use super::request::RequestStage;
use crate::kv::BlockState;
use crate::scheduler::Stage;

impl Core {
    /// Checks that pools, tables, grants, credits and charges agree.
    ///
    /// # Panics
    /// With the first disagreement.
    pub fn check_integrity(&self) {
        for group in self.pools.groups() {
            let pool = self.pools.pool(group);
            pool.check_integrity();
            let total = pool.counts().total as usize;
            let mut claims = vec![(0_u32, 0_u32); total];
            for sequence in self.sequences.values() {
                for (_, block) in sequence.tables.held(group) {
                    claims[block as usize].0 += 1;
                }
            }
            let mut granted = 0;
            for request in self.requests.values() {
                for (_, block) in request.pinned.iter().flat_map(|pinned| pinned.held(group)) {
                    claims[block as usize].1 += 1;
                }
                for block in &request.granted[group] {
                    let expected = match request.stage {
                        RequestStage::Reserved => BlockState::Reserved,
                        _ => BlockState::Quarantined,
                    };
                    assert_eq!(pool.state(block.block), expected, "a granted block");
                    granted += 1;
                }
            }
            assert_eq!(
                pool.claims(),
                claims,
                "references and pins of group {group}"
            );
            let counts = pool.counts();
            assert_eq!(
                granted,
                counts.reserved + counts.quarantined,
                "grants of group {group}"
            );
            if !self.pools.is_full(group) {
                self.check_charges(group);
            }
        }
        if let Some(available) = self.pools.full_available() {
            let credits: u32 = self
                .sequences
                .values()
                .map(|sequence| sequence.credit)
                .sum();
            assert!(
                credits <= available,
                "{credits} blocks promised, {available} available"
            );
        }
        for sequence in self.sequences.values() {
            assert!(
                self.requests.contains_key(&sequence.key),
                "a sequence has its request"
            );
            if sequence.stage == Stage::Waiting {
                assert!(
                    sequence.tables.is_empty() && sequence.credit == 0,
                    "a waiting sequence"
                );
            } else {
                assert!(
                    sequence.trunk || sequence.computed < sequence.known,
                    "something to do"
                );
            }
        }
    }

    /// A window group's sequences hold no more than they are charged, and the charges fit.
    fn check_charges(&self, group: usize) {
        let mut charged = 0;
        for sequence in self.sequences.values() {
            let held = sequence.tables.held(group).count() as u32;
            assert!(
                held <= sequence.charge[group],
                "a sequence holds {held} window blocks"
            );
            if sequence.stage != Stage::Waiting {
                charged += sequence.charge[group];
            }
        }
        charged += self
            .requests
            .values()
            .map(|request| request.held_charge[group])
            .sum::<u32>();
        assert!(
            charged <= self.pools.pool(group).counts().total,
            "window charges fit the pool"
        );
    }
}
