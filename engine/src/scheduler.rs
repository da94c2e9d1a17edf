//! What the next step computes. Pure: a view of the sequences and `now` in, a plan out.
//!
//! ```text
//! State (views, free blocks) --plan(now)--> Plan { preempt, admit, rows }
//! ```
//!
//! The core carries a plan out in that order and then runs one step with its rows.
//! The scheduler counts blocks, it does not choose them. Two policies share the types
//! here: [`prefill`](self::prefill) for a prefill pool, [`decode`](self::decode) for a
//! decode pool (which also computes prompts locally).
//!
//! # Blocks
//! A *credit* is a number of full-group blocks that are promised to a sequence and not
//! yet taken; `available` blocks beyond all credits are free to give away. At
//! admission a sequence gets credit for all its known tokens, so a prompt, once
//! begun, never waits for a block half-way. What a window group can hold at most is
//! charged as a whole at admission, so a window group never runs out later.
//!
//! # Progress
//! The age of a sequence is its arrival. A running sequence takes blocks only from those
//! of lower priority, and of its own from younger ones, so the oldest of the highest is
//! never preempted and always advances; once it ends, the next is the oldest. Whose turn
//! it is among those that wait: see [`turn`](self::turn).
//!
//! # Time
//! Under a target on the gap between tokens a decode pool also counts time: see
//! [`pace`](self::pace). Without one nothing is foretold and nothing held back.

mod decode;
pub mod pace;
mod prefill;
pub(crate) mod turn;

use std::time::Duration;

use crate::config::{Limits, Role};
use crate::kv::Hit;
pub use pace::{Pace, StepTimes};

/// Names a sequence; the order is its age, the oldest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId {
    /// Number of the request in order of arrival.
    pub arrival: u64,
    pub choice: u32,
}

/// Where a sequence is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Holds no block: new, or preempted.
    Waiting,
    /// Holds blocks and computes.
    Running,
    /// Holds blocks that a peer fills; computes nothing and is not preempted.
    Reserved,
}

/// What the scheduler sees of a sequence.
#[derive(Clone, Debug)]
pub struct SequenceView {
    pub id: SequenceId,
    pub stage: Stage,
    /// Its reader is slow: compute nothing for it.
    pub held_back: bool,
    /// When its request arrived, on the clock of `now`.
    pub arrived: Duration,
    /// Higher goes first.
    pub priority: i32,
    /// Tokens that other tenants are to get before its turn comes.
    pub ahead: u64,
    /// Positions whose K and V are in its blocks.
    pub computed: u32,
    /// Known tokens after them; at least 1, unless reserved.
    pub uncomputed: u32,
    /// Ordinals of its full-group table.
    pub blocks: u32,
    /// Whether the next token is written into a block that others hold too.
    pub copies: bool,
    /// Blocks promised and not yet taken.
    pub credit: u32,
    /// Blocks to promise at admission beyond those of its known tokens.
    pub extra_credit: u32,
    /// Choices it stands for: it counts this often against `sequences_max`.
    pub slots: u32,
    /// Whether admission reserves its blocks for a peer instead of computing.
    pub receives: bool,
    /// Whether its stream has begun: it waits because its blocks were taken.
    pub begun: bool,
    /// Its own target on the gap between its tokens.
    pub itl_target: Option<Duration>,
    /// Tokens that each of its choices is expected to make yet.
    pub foreseen: u32,
}

/// What the scheduler asks about blocks, for single sequences and only when needed.
pub trait Accounts {
    /// The cached prefix a waiting sequence would start from.
    fn hit(&self, id: SequenceId) -> Hit;
    /// Full-group blocks that come back when a running sequence is preempted.
    fn exclusive(&self, id: SequenceId) -> u32;
    /// Per group, the blocks charged to a sequence; 0 for full groups.
    fn window_charge(&self, id: SequenceId) -> &[u32];
}

/// Everything a plan depends on, besides the time.
pub struct State<'a> {
    pub role: Role,
    pub limits: &'a Limits,
    pub block_size: u32,
    /// Ascending by id.
    pub sequences: &'a [SequenceView],
    /// Free and evictable blocks of the tightest full group; `None` without one.
    pub available: Option<u32>,
    /// Per group, blocks of a window group not charged to anybody.
    pub window_free: &'a [u32],
    pub accounts: &'a dyn Accounts,
    /// Foretells steps, to keep targets; `None` keeps none.
    pub pace: Option<Pace<'a>>,
}

/// A sequence that may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    pub id: SequenceId,
    pub hit: Hit,
    /// Blocks promised to it.
    pub credit: u32,
}

/// Tokens of one sequence to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    pub id: SequenceId,
    pub tokens: u32,
}

/// What to do next, in the order of the fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Drop these sequences' blocks; they wait and are recomputed.
    pub preempt: Vec<SequenceId>,
    /// Start or reserve for these, each from its hit.
    pub admit: Vec<Admission>,
    /// Compute these; every block they need is available or in their credit.
    pub rows: Vec<Row>,
    /// The first in the queue, if a target alone keeps it from starting.
    pub delayed: Option<SequenceId>,
    /// Whether a target cut a prompt's tokens.
    pub cut: bool,
}

impl Plan {
    /// Whether there is nothing to carry out until the next command.
    pub fn is_empty(&self) -> bool {
        self.preempt.is_empty() && self.admit.is_empty() && self.rows.is_empty()
    }
}

/// Plans the next step under the policy of the engine's role.
pub fn plan(state: &State<'_>, now: Duration) -> Plan {
    match state.role {
        Role::Prefill => prefill::plan(state, now),
        Role::Decode => decode::plan(state, now),
    }
}

/// What is left to give away while a plan is made.
struct Room {
    /// Full-group blocks beyond all credits.
    blocks: i64,
    windows: Vec<u32>,
    slots: u32,
    chunk_tokens: u32,
    step_tokens: u32,
}

impl Room {
    fn new(state: &State<'_>) -> Self {
        let holding = || {
            state
                .sequences
                .iter()
                .filter(|view| view.stage != Stage::Waiting)
        };
        let credits: i64 = holding().map(|view| i64::from(view.credit)).sum();
        let taken: u32 = holding().map(|view| view.slots).sum();
        Self {
            // Without a full group nothing but windows and slots is scarce.
            blocks: state.available.map_or(i64::MAX / 2, i64::from) - credits,
            windows: state.window_free.to_vec(),
            slots: state.limits.sequences_max.saturating_sub(taken),
            chunk_tokens: state.limits.chunk_tokens,
            step_tokens: state.limits.step_tokens_max,
        }
    }

    /// Takes the room that starting `view` needs, leaving `reserve` blocks to others;
    /// nothing is taken if there is not enough.
    fn admit(&mut self, state: &State<'_>, view: &SequenceView, reserve: u32) -> Option<Admission> {
        let charge = state.accounts.window_charge(view.id);
        if view.slots > self.slots
            || charge
                .iter()
                .zip(&self.windows)
                .any(|(need, free)| need > free)
        {
            return None;
        }
        let hit = state.accounts.hit(view.id);
        let known = (view.computed + view.uncomputed).div_ceil(state.block_size);
        let credit = known - hit.blocks + view.extra_credit;
        let needed = i64::from(credit) + i64::from(hit.unheld);
        if state.available.is_some() && needed + i64::from(reserve) > self.blocks {
            return None;
        }
        self.blocks -= needed;
        self.slots -= view.slots;
        for (free, need) in self.windows.iter_mut().zip(charge) {
            *free -= need;
        }
        Some(Admission {
            id: view.id,
            hit,
            credit,
        })
    }

    /// Tokens of a prompt with `uncomputed` left that there is room for.
    fn chunk(&self, uncomputed: u32) -> u32 {
        uncomputed.min(self.chunk_tokens).min(self.step_tokens)
    }

    /// Takes the tokens of a prompt with `uncomputed` left that fit this step.
    fn take_chunk(&mut self, uncomputed: u32) -> u32 {
        let tokens = self.chunk(uncomputed);
        self.chunk_tokens -= tokens;
        self.step_tokens -= tokens;
        tokens
    }
}

impl SequenceView {
    /// Full-group blocks that computing `tokens` more takes, beyond the credit.
    fn blocks_beyond_credit(&self, tokens: u32, block_size: u32) -> u32 {
        let needed = (self.computed + tokens)
            .div_ceil(block_size)
            .saturating_sub(self.blocks)
            + u32::from(self.copies);
        needed.saturating_sub(self.credit)
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! A scheduler state spelled out by hand.

    use super::*;

    /// Answers from fixed numbers.
    pub(crate) struct Fixed {
        pub exclusive: u32,
        pub charge: Vec<u32>,
    }

    impl Accounts for Fixed {
        fn hit(&self, _id: SequenceId) -> Hit {
            Hit::default()
        }

        fn exclusive(&self, _id: SequenceId) -> u32 {
            self.exclusive
        }

        fn window_charge(&self, _id: SequenceId) -> &[u32] {
            &self.charge
        }
    }

    pub(crate) fn id(arrival: u64) -> SequenceId {
        SequenceId { arrival, choice: 0 }
    }

    pub(crate) fn waiting(arrival: u64, prompt: u32) -> SequenceView {
        SequenceView {
            id: id(arrival),
            stage: Stage::Waiting,
            held_back: false,
            arrived: Duration::ZERO,
            priority: 0,
            ahead: 0,
            computed: 0,
            uncomputed: prompt,
            blocks: 0,
            copies: false,
            credit: 0,
            extra_credit: 0,
            slots: 1,
            receives: false,
            begun: false,
            itl_target: None,
            foreseen: 1,
        }
    }

    /// A running sequence with 16-token blocks and one token to compute.
    pub(crate) fn running(arrival: u64, computed: u32) -> SequenceView {
        SequenceView {
            stage: Stage::Running,
            computed,
            blocks: computed.div_ceil(16),
            uncomputed: 1,
            ..waiting(arrival, 0)
        }
    }

    pub(crate) fn limits() -> Limits {
        Limits {
            chunk_tokens: 32,
            step_tokens_max: 64,
            sequences_max: 8,
            ageing_tokens_per_second: 100,
            ..Limits::default()
        }
    }
}
