//! Checks a plan and lays its rows out as flat arrays, one entry per token.
//!
//! A plan's rows are runs of tokens; kernels work on tokens. The arrays are kept
//! between steps, so that a step in the steady state allocates nothing.

use baton_proto::TokenId;
use baton_proto::kv_layout::{KvGroup, KvGroupKind};

use crate::backend::{KvSlot, Query};
use crate::model::ModelConfig;
use crate::step::{Error, LogitsWanted, PlanRow, RowInput, StepPlan};
use crate::step_work::Row;

/// The KV pools a decoder stores to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pools {
    /// Positions of a block.
    pub block_size: u32,
    /// Bytes of K and V of one position in one layer.
    pub position_bytes: usize,
    /// Blocks per group.
    pub blocks: Vec<u32>,
}

/// One step's tokens, flat.
#[derive(Debug)]
pub(super) struct StepRows {
    tokens_max: usize,
    tokens: Vec<TokenId>,
    positions: Vec<u32>,
    groups: Vec<GroupRows>,
    /// Tokens whose logits are wanted, ascending.
    wanted: Vec<u32>,
    /// Of those, how many want but the best of how many ids, where they agree on that.
    best: u32,
    best_known: u32,
    /// (First token, number of tokens) of each plan row.
    runs: Vec<(u32, u32)>,
}

#[derive(Debug, Default)]
struct GroupRows {
    /// The plan rows' tables, one behind the other.
    tables: Vec<u32>,
    /// Per token.
    slots: Vec<KvSlot>,
    /// Per token.
    queries: Vec<Query>,
    /// Per wanted token.
    wanted_queries: Vec<Query>,
}

impl StepRows {
    pub(super) fn new(tokens_max: usize, groups: usize) -> Self {
        Self {
            tokens_max,
            tokens: Vec::with_capacity(tokens_max),
            positions: Vec::with_capacity(tokens_max),
            groups: (0..groups)
                .map(|_| GroupRows {
                    tables: Vec::new(),
                    slots: Vec::with_capacity(tokens_max),
                    queries: Vec::with_capacity(tokens_max),
                    wanted_queries: Vec::with_capacity(tokens_max),
                })
                .collect(),
            wanted: Vec::with_capacity(tokens_max),
            best: 0,
            best_known: 0,
            runs: Vec::with_capacity(tokens_max),
        }
    }

    /// Tokens of the step.
    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    pub(super) fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    pub(super) fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// Of how many ids the best one is wanted, where nothing else is wanted of any row.
    pub(super) fn only_best(&self) -> Option<u32> {
        (self.best > 0 && self.best as usize == self.wanted.len()).then_some(self.best_known)
    }

    pub(super) fn wanted(&self) -> &[u32] {
        &self.wanted
    }

    /// The plan rows without their tokens.
    pub(super) fn runs(&self) -> impl Iterator<Item = Row> {
        let mut wanted = self.wanted.as_slice();
        self.runs.iter().map(move |(first, count)| {
            let logits = wanted.partition_point(|token| *token < first + count);
            wanted = &wanted[logits..];
            Row {
                position: self.positions[*first as usize],
                tokens: *count,
                logits: logits as u32,
            }
        })
    }

    pub(super) fn tables(&self, group: usize) -> &[u32] {
        &self.groups[group].tables
    }

    pub(super) fn slots(&self, group: usize) -> &[KvSlot] {
        &self.groups[group].slots
    }

    pub(super) fn queries(&self, group: usize, only_wanted: bool) -> &[Query] {
        let group = &self.groups[group];
        if only_wanted {
            &group.wanted_queries
        } else {
            &group.queries
        }
    }

    /// Replaces the content by `plan`.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] naming row and field; the content is then undefined.
    pub(super) fn lay_out(
        &mut self,
        plan: &StepPlan,
        config: &ModelConfig,
        kv_groups: &[KvGroup],
        pools: &Pools,
    ) -> Result<(), Error> {
        self.tokens.clear();
        self.positions.clear();
        self.wanted.clear();
        (self.best, self.best_known) = (0, 0);
        self.runs.clear();
        for group in &mut self.groups {
            group.tables.clear();
            group.slots.clear();
            group.queries.clear();
            group.wanted_queries.clear();
        }
        if plan.rows.is_empty() {
            return Err(invalid(0, "rows", "the plan is empty".to_owned()));
        }
        for (index, row) in plan.rows.iter().enumerate() {
            self.row(index, row, config, kv_groups, pools)?;
        }
        Ok(())
    }

    fn row(
        &mut self,
        index: usize,
        row: &PlanRow,
        config: &ModelConfig,
        kv_groups: &[KvGroup],
        pools: &Pools,
    ) -> Result<(), Error> {
        let tokens = match &row.input {
            RowInput::Tokens(tokens) => tokens.as_slice(),
            RowInput::OutputOf { .. } => {
                let message = "this executor does not pipeline steps".to_owned();
                return Err(invalid(index, "input", message));
            }
        };
        if let Some(adapter) = row.adapter {
            let message = format!("{adapter}: adapters are not offered");
            return Err(invalid(index, "adapter", message));
        }
        if tokens.is_empty() {
            return Err(invalid(index, "input", "has no tokens".to_owned()));
        }
        if self.tokens.len() + tokens.len() > self.tokens_max {
            let message = format!("the step has more than {} tokens", self.tokens_max);
            return Err(invalid(index, "input", message));
        }
        if let Some(token) = tokens.iter().find(|token| **token as usize >= config.vocab) {
            let message = format!("token {token} is not below {}", config.vocab);
            return Err(invalid(index, "input", message));
        }
        let end = u64::from(row.position) + tokens.len() as u64;
        if end > u64::from(config.context_max) {
            let message = format!("{end} positions, the context has {}", config.context_max);
            return Err(invalid(index, "position", message));
        }
        let last = end as u32 - 1;
        if row.tables.len() != self.groups.len() {
            let message = format!(
                "{} tables for {} KV groups",
                row.tables.len(),
                self.groups.len()
            );
            return Err(invalid(index, "tables", message));
        }

        let first_token = self.tokens.len() as u32;
        self.runs.push((first_token, tokens.len() as u32));
        self.tokens.extend_from_slice(tokens);
        self.positions.extend(row.position..=last);
        let wanted = match row.logits {
            LogitsWanted::None => 0,
            LogitsWanted::Last => 1,
            LogitsWanted::Best { known } => {
                if self.best == 0 {
                    self.best_known = known;
                }
                self.best += u32::from(known == self.best_known);
                1
            }
            LogitsWanted::All => tokens.len(),
        };
        let unwanted = tokens.len() - wanted;
        self.wanted
            .extend((first_token..).skip(unwanted).take(wanted));

        for (number, (group, table)) in self.groups.iter_mut().zip(&row.tables).enumerate() {
            let size = pools.block_size;
            let needed = (last / size + 1) as usize;
            if table.len() < needed {
                let message = format!(
                    "group {number} has {} blocks, position {last} needs {needed}",
                    table.len()
                );
                return Err(invalid(index, "tables", message));
            }
            let oldest = oldest_seen(&kv_groups[number], row.position) / size;
            let table = &table[..needed];
            let blocks = pools.blocks[number];
            if let Some(block) = table[oldest as usize..]
                .iter()
                .find(|block| **block >= blocks)
            {
                let message = format!("block {block} of group {number} is not below {blocks}");
                return Err(invalid(index, "tables", message));
            }
            let table_start = group.tables.len() as u32;
            group.tables.extend_from_slice(table);
            group
                .slots
                .extend((row.position..=last).map(|position| KvSlot {
                    block: table[(position / size) as usize],
                    slot: position % size,
                }));
            let from = group.queries.len();
            group
                .queries
                .extend((row.position..=last).map(|position| Query {
                    position,
                    table_start,
                    table_len: needed as u32,
                }));
            group
                .wanted_queries
                .extend_from_slice(&group.queries[from + unwanted..]);
        }
        Ok(())
    }
}

/// The first position that a query at `position` sees.
pub(super) fn oldest_seen(group: &KvGroup, position: u32) -> u32 {
    match group.kind {
        KvGroupKind::Full => 0,
        // `position + 1 - window` without overflow: windows are at least 1.
        KvGroupKind::SlidingWindow { window } => position.saturating_sub(window - 1),
    }
}

fn invalid(row: usize, field: &'static str, message: String) -> Error {
    Error::InvalidPlan {
        row,
        field,
        message,
    }
}
