//! From a plan of counts to a step with block ids: preempt, admit, reserve, take blocks.

use super::request::{Choice, Granted, Kind, Request, RequestStage, Sequence};
use super::{Core, InFlight};
use crate::api::{Event, GroupReservation, ReservedBlock};
use crate::kv::{Hit, Pools};
use crate::sampling::Draw;
use crate::scheduler::{
    self, Accounts, Admission, Plan, Row, SequenceId, SequenceView, Stage, State,
};
use crate::step::{self, LogitsWanted, PlanRow, RowInput, StepPlan};

use std::collections::BTreeMap;
use std::time::Duration;

/// Answers the scheduler's questions from the tables and pools.
struct Ledger<'a> {
    sequences: &'a BTreeMap<SequenceId, Sequence>,
    pools: &'a Pools,
}

impl Accounts for Ledger<'_> {
    fn hit(&self, id: SequenceId) -> Hit {
        let block_size = self.pools.layout().block_size;
        self.pools
            .lookup(self.sequences[&id].usable_names(block_size))
    }

    fn exclusive(&self, id: SequenceId) -> u32 {
        self.pools.exclusive(&self.sequences[&id].tables)
    }

    fn window_charge(&self, id: SequenceId) -> &[u32] {
        &self.sequences[&id].charge
    }
}

impl Core {
    /// What the scheduler would do next.
    pub(super) fn plan(&self, now: Duration) -> Plan {
        let views: Vec<_> = self
            .sequences
            .values()
            .map(|sequence| self.view(sequence))
            .collect();
        let ledger = Ledger {
            sequences: &self.sequences,
            pools: &self.pools,
        };
        let state = State {
            role: self.role,
            limits: &self.limits,
            block_size: self.pools.layout().block_size,
            sequences: &views,
            available: self.pools.full_available(),
            window_free: &self.window_free(),
            accounts: &ledger,
            pace: self.pacer.pace(),
        };
        scheduler::plan(&state, now)
    }

    fn view(&self, sequence: &Sequence) -> SequenceView {
        let request = &self.requests[&sequence.key];
        let block_size = self.pools.layout().block_size;
        let mut full = self
            .pools
            .groups()
            .filter(|group| self.pools.is_full(*group))
            .peekable();
        let blocks = full.peek().map_or(0, |group| sequence.tables.len(*group));
        let ordinal = sequence.computed / block_size;
        let copies = !sequence.computed.is_multiple_of(block_size)
            && full.any(|group| {
                let block = sequence.tables.block(group, ordinal);
                block.is_some_and(|block| self.pools.pool(group).is_shared(block))
            });
        let made = if sequence.trunk {
            request.made_least()
        } else {
            request.choices[sequence.id.choice as usize].output.len() as u32
        };
        SequenceView {
            id: sequence.id,
            stage: sequence.stage,
            held_back: !sequence.trunk && request.choices[sequence.id.choice as usize].paused,
            arrived: request.arrived,
            priority: request.priority,
            ahead: self.fair_clock.ahead_of(request.tag),
            computed: sequence.computed,
            uncomputed: sequence.known - sequence.computed,
            blocks,
            copies,
            credit: sequence.credit,
            extra_credit: sequence.extra_credit,
            slots: sequence.slots,
            receives: sequence.trunk && request.kind == Kind::Receive,
            begun: !sequence.trunk,
            itl_target: request.itl_target,
            foreseen: self.pacer.foreseen(request, made),
        }
    }

    /// Per group, the window blocks that nobody is charged for.
    pub(super) fn window_free(&self) -> Vec<u32> {
        self.pools
            .groups()
            .map(|group| {
                let sequences: u32 = self
                    .sequences
                    .values()
                    .filter(|sequence| sequence.stage != Stage::Waiting)
                    .map(|sequence| sequence.charge[group])
                    .sum();
                let held: u32 = self
                    .requests
                    .values()
                    .map(|request| request.held_charge[group])
                    .sum();
                self.pools
                    .pool(group)
                    .counts()
                    .total
                    .saturating_sub(sequences + held)
            })
            .collect()
    }

    /// Carries a plan out and returns the step to run, with one note per row.
    pub(super) fn carry_out(
        &mut self,
        plan: Plan,
    ) -> Result<(StepPlan, Vec<InFlight>), step::Error> {
        for id in plan.preempt {
            self.preempt(id);
        }
        // All hits are taken before any block is allocated, which could evict them.
        for admission in &plan.admit {
            self.adopt(admission);
        }
        for admission in &plan.admit {
            self.start(admission.id);
        }
        self.note_turns(&plan.admit);
        let mut copies = vec![Vec::new(); self.pools.groups().len()];
        let mut rows = Vec::with_capacity(plan.rows.len());
        for row in plan.rows {
            rows.push(self.take_blocks(row, &mut copies));
        }
        for (group, pairs) in copies.iter().enumerate() {
            if !pairs.is_empty() {
                self.executor.copy_blocks(group, pairs)?;
            }
        }
        let step = StepPlan {
            rows: rows.iter().map(|row| self.plan_row(row)).collect(),
        };
        Ok((step, rows))
    }

    /// Moves the fair clock on to those that just had their turn.
    fn note_turns(&mut self, admitted: &[Admission]) {
        let tag = |sequence: &Sequence| self.requests[&sequence.key].tag;
        let tags = admitted.iter().map(|one| tag(&self.sequences[&one.id]));
        let Some(latest) = tags.max() else {
            return;
        };
        let waiting = self
            .sequences
            .values()
            .filter(|s| s.stage == Stage::Waiting);
        let least = waiting.map(tag).min();
        self.fair_clock.served(latest, least);
    }

    /// Takes a sequence's blocks away; it waits and is recomputed.
    fn preempt(&mut self, id: SequenceId) {
        let empty = self.pools.empty_tables();
        let sequence = self
            .sequences
            .get_mut(&id)
            .expect("the plan names known sequences");
        debug_assert_eq!(sequence.stage, Stage::Running);
        self.pools
            .release(std::mem::replace(&mut sequence.tables, empty));
        sequence.stage = Stage::Waiting;
        sequence.computed = 0;
        sequence.published = 0;
        sequence.credit = 0;
        self.totals.preemptions += 1;
        tracing::debug!(?id, "preempted");
    }

    /// Takes the cached prefix of a sequence that starts.
    fn adopt(&mut self, admission: &Admission) {
        let block_size = self.pools.layout().block_size;
        let sequence = self
            .sequences
            .get_mut(&admission.id)
            .expect("the plan names known sequences");
        debug_assert_eq!(sequence.stage, Stage::Waiting);
        let hit = admission.hit.blocks;
        sequence.tables = self.pools.adopt(sequence.usable_names(block_size), hit);
        sequence.computed = hit * block_size;
        sequence.published = hit;
        sequence.credit = admission.credit;
        sequence.stage = Stage::Running;
        let request = self
            .requests
            .get_mut(&sequence.key)
            .expect("a sequence has its request");
        if !request.started {
            request.cached_tokens = sequence.computed;
            self.totals.prefix_queries_tokens += u64::from(request.prompt_len());
            self.totals.prefix_hits_tokens += u64::from(sequence.computed);
        }
    }

    /// Tells the worker that a request has started, and what is there already.
    fn start(&mut self, id: SequenceId) {
        let sequence = &self.sequences[&id];
        let (key, computed) = (sequence.key, sequence.computed);
        let request = self
            .requests
            .get_mut(&key)
            .expect("a sequence has its request");
        if std::mem::replace(&mut request.started, true) {
            return;
        }
        let cached_tokens = request.cached_tokens;
        request.stage = RequestStage::Active;
        match request.kind {
            Kind::Receive => self.reserve(id),
            Kind::Local => self.sink.emit(Event::Started { key, cached_tokens }),
            Kind::Prefill => {
                self.sink.emit(Event::Started { key, cached_tokens });
                for layer in 0..self.layer_groups.len() as u32 {
                    self.report_blocks(id, layer, 0, computed);
                }
            }
        }
    }

    /// Grants a peer the blocks of the prompt that are not here.
    fn reserve(&mut self, id: SequenceId) {
        let layout = self.pools.layout().clone();
        let sequence = self.sequences.get_mut(&id).expect("the caller has it");
        let request = self
            .requests
            .get_mut(&sequence.key)
            .expect("a sequence has its request");
        let prompt = request.prompt_len();
        let hit = sequence.computed / layout.block_size;
        self.pools.trim(&mut sequence.tables, prompt);
        sequence.stage = Stage::Reserved;
        request.stage = RequestStage::Reserved;
        let mut groups = Vec::new();
        let mut taken = 0;
        for group in self.pools.groups() {
            let first = layout.first_needed_ordinal(group, prompt).max(hit);
            let pool = self.pools.pool_mut(group);
            let mut blocks = Vec::new();
            for ordinal in first..layout.blocks_for(prompt) {
                let block = pool.reserve().expect("the scheduler counted this block");
                request.granted[group].push(Granted { ordinal, block });
                blocks.push(ReservedBlock {
                    ordinal,
                    block,
                    generation: pool.generation(block),
                });
            }
            if self.pools.is_full(group) {
                taken = blocks.len() as u32;
            }
            groups.push(GroupReservation {
                group: group as u16,
                blocks,
            });
        }
        sequence.credit = sequence.credit.saturating_sub(taken);
        self.sink.emit(Event::Reserved {
            key: request.key,
            groups,
            cached_tokens: request.cached_tokens,
        });
    }

    /// Gives a row's sequence the blocks it writes in this step: blocks behind the
    /// window go back first, a shared block is replaced by a copy, new ones follow.
    fn take_blocks(&mut self, row: Row, copies: &mut [Vec<(u32, u32)>]) -> InFlight {
        let block_size = self.pools.layout().block_size;
        let sequence = self
            .sequences
            .get_mut(&row.id)
            .expect("the plan names known sequences");
        let request = &self.requests[&sequence.key];
        let end = sequence.computed + row.tokens;
        self.pools.trim(&mut sequence.tables, sequence.computed);
        let mut taken = 0;
        for group in self.pools.groups() {
            let ordinal = sequence.computed / block_size;
            let copy = self.pools.unshare(&mut sequence.tables, group, ordinal);
            copies[group].extend(copy);
            let mut blocks = u32::from(copy.is_some());
            while sequence.tables.len(group) < end.div_ceil(block_size) {
                self.pools.grow(&mut sequence.tables, group);
                blocks += 1;
            }
            if self.pools.is_full(group) {
                taken = blocks;
            }
        }
        sequence.credit = sequence.credit.saturating_sub(taken);
        let wants_logits = end == sequence.known
            && (!sequence.trunk
                || request
                    .choices
                    .iter()
                    .any(|choice| !choice.ended && choice.output.is_empty()));
        InFlight {
            id: row.id,
            key: sequence.key,
            tokens: row.tokens,
            wants_logits,
            ships: sequence.trunk && request.ship.iter().any(|ship| !ship.is_empty()),
        }
    }

    fn plan_row(&self, row: &InFlight) -> PlanRow {
        let layout = self.pools.layout();
        let sequence = &self.sequences[&row.id];
        let request = &self.requests[&row.key];
        let end = sequence.computed + row.tokens;
        let tokens = (sequence.computed..end)
            .map(|position| request.token(row.id.choice, position))
            .collect();
        let ordinals = layout.blocks_for(end) as usize;
        PlanRow {
            input: RowInput::Tokens(tokens),
            position: sequence.computed,
            tables: self
                .pools
                .groups()
                .map(|group| sequence.tables.blocks(group)[..ordinals].to_vec())
                .collect(),
            logits: if row.wants_logits {
                self.wanted(row)
            } else {
                LogitsWanted::None
            },
            adapter: None,
        }
    }

    /// What the draws behind a row need. Choices of one prompt have the same rules, and
    /// none of those that draw from it has a token yet.
    fn wanted(&self, row: &InFlight) -> LogitsWanted {
        let request = &self.requests[&row.key];
        let drawing = |(choice, state): (usize, &Choice)| {
            let draw = Draw {
                choice: choice as u32,
                index: state.output.len() as u32,
            };
            request.rules.takes_best_of(draw, &state.history)
        };
        let mut choices = request.choices.iter().enumerate();
        let best = if self.sequences[&row.id].trunk {
            choices
                .filter(|(_, state)| !state.ended && state.output.is_empty())
                .map(drawing)
                .reduce(|a, b| a.filter(|_| a == b))
        } else {
            choices.nth(row.id.choice as usize).map(drawing)
        };
        match best.flatten() {
            Some(known) => LogitsWanted::Best { known },
            None => LogitsWanted::Last,
        }
    }

    /// A layer of a shipping row is done: reports the blocks this row completed.
    pub(super) fn report_layer(&mut self, row: &InFlight, layer: u32) {
        let computed = self.sequences[&row.id].computed;
        self.report_blocks(row.id, layer, computed, computed + row.tokens);
    }

    /// Reports the shipped blocks of a layer that became final as a prompt's computed
    /// positions went from `from` to `to`. The partial last block is final with the prompt.
    fn report_blocks(&mut self, id: SequenceId, layer: u32, from: u32, to: u32) {
        let layout = self.pools.layout();
        let group = self.layer_groups[layer as usize];
        let sequence = &self.sequences[&id];
        let request: &Request = &self.requests[&sequence.key];
        let prompt = request.prompt_len();
        let complete = |computed: u32| {
            if computed == prompt {
                layout.blocks_for(prompt)
            } else {
                computed / layout.block_size
            }
        };
        let ship = &request.ship[group];
        let first = complete(from).max(ship.start);
        let end = complete(to).min(ship.end);
        let blocks: Vec<(u32, u32)> = (first..end)
            .map(|ordinal| {
                let block = sequence.tables.block(group, ordinal);
                (
                    ordinal,
                    block.expect("a shipped block is held until the prompt is computed"),
                )
            })
            .collect();
        if !blocks.is_empty() {
            let key = request.key;
            self.sink.emit(Event::LayersReady {
                key,
                group: group as u16,
                layer,
                blocks,
            });
        }
    }
}
