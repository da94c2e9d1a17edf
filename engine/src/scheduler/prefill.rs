//! The policy of a prefill pool: shortest remaining prompt first, with ageing.
//!
//! Sequences are ranked by the tokens they still need, less a bonus for every second
//! since they arrived, so a long prompt is overtaken only for a while. The step's
//! chunk goes to the best ranked; what it does not need goes to the next. A waiting
//! prompt starts when all its blocks can be promised; the first by rank that cannot
//! start lets no later one start before it. Nothing is ever preempted: its blocks may
//! be on their way to a peer.

use std::cmp::Reverse;
use std::time::Duration;

use super::turn::Levels;
use super::{Plan, Room, Row, SequenceView, Stage, State};

pub(super) fn plan(state: &State<'_>, now: Duration) -> Plan {
    let mut plan = Plan::default();
    let mut room = Room::new(state);
    let mut ranked: Vec<&SequenceView> = state.sequences.iter().collect();
    let levels = Levels::new(state.sequences, now);
    ranked.sort_by_key(|view| (Reverse(levels.of(view)), rank(state, view, now), view.id));
    let mut queue_blocked = false;
    for view in ranked {
        let mut uncomputed = view.uncomputed;
        match view.stage {
            Stage::Reserved => continue,
            Stage::Running => {}
            Stage::Waiting => {
                if queue_blocked || room.chunk_tokens == 0 || room.step_tokens == 0 {
                    continue;
                }
                let Some(admission) = room.admit(state, view, 0) else {
                    queue_blocked = true;
                    continue;
                };
                uncomputed -= admission.hit.blocks * state.block_size;
                plan.admit.push(admission);
            }
        }
        let tokens = room.take_chunk(uncomputed);
        if tokens > 0 {
            plan.rows.push(Row {
                id: view.id,
                tokens,
            });
        }
    }
    plan
}

/// Lower runs first.
fn rank(state: &State<'_>, view: &SequenceView, now: Duration) -> i64 {
    let waited = i64::try_from(now.saturating_sub(view.arrived).as_millis()).unwrap_or(i64::MAX);
    let bonus = waited.saturating_mul(i64::from(state.limits.ageing_tokens_per_second)) / 1000;
    let ahead = i64::try_from(view.ahead).unwrap_or(i64::MAX);
    i64::from(view.uncomputed).saturating_add(ahead) - bonus
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Fixed, id, limits, running, waiting};
    use super::super::*;

    fn plan_at(sequences: &[SequenceView], available: u32, now: Duration) -> Plan {
        let limits = limits();
        let accounts = Fixed {
            exclusive: 0,
            charge: vec![0],
        };
        let state = State {
            role: Role::Prefill,
            limits: &limits,
            block_size: 16,
            sequences,
            available: Some(available),
            window_free: &[0],
            accounts: &accounts,
            pace: None,
        };
        plan(&state, now)
    }

    fn rows(plan: &Plan) -> Vec<(u64, u32)> {
        plan.rows
            .iter()
            .map(|row| (row.id.arrival, row.tokens))
            .collect()
    }

    #[test]
    fn a_short_prompt_overtakes_a_long_one_in_progress() {
        let long = SequenceView {
            uncomputed: 500,
            credit: 40,
            ..running(1, 64)
        };
        let plan = plan_at(&[long, waiting(2, 20)], 60, Duration::ZERO);
        assert_eq!(rows(&plan), [(2, 20), (1, 12)]);
    }

    #[test]
    fn a_long_prompt_is_not_overtaken_for_ever() {
        let long = SequenceView {
            uncomputed: 500,
            credit: 40,
            ..running(1, 64)
        };
        let new = SequenceView {
            arrived: Duration::from_secs(5),
            ..waiting(2, 20)
        };
        let plan = plan_at(&[long, new], 60, Duration::from_secs(5));
        assert_eq!(rows(&plan), [(1, 32)]);
    }

    #[test]
    fn a_tenant_that_had_its_share_lets_another_pass() {
        let second = SequenceView {
            ahead: 400,
            ..waiting(1, 20)
        };
        let plan = plan_at(&[second.clone(), waiting(2, 300)], 60, Duration::ZERO);
        assert_eq!(rows(&plan), [(2, 32)]);
        let urgent = SequenceView {
            priority: 1,
            ..second
        };
        let plan = plan_at(&[urgent, waiting(2, 300)], 60, Duration::ZERO);
        assert_eq!(rows(&plan), [(1, 20), (2, 12)]);
    }

    #[test]
    fn a_prompt_starts_only_with_all_its_blocks_and_blocks_the_queue_till_then() {
        let plan = plan_at(&[waiting(1, 100), waiting(2, 160)], 6, Duration::ZERO);
        assert!(plan.is_empty());
        let plan = plan_at(&[waiting(1, 100), waiting(2, 160)], 7, Duration::ZERO);
        assert_eq!(plan.admit.iter().map(|a| a.id).collect::<Vec<_>>(), [id(1)]);
    }

    #[test]
    fn window_blocks_are_charged_whole() {
        let limits = limits();
        let accounts = Fixed {
            exclusive: 0,
            charge: vec![0, 5],
        };
        let sequences = [waiting(1, 8), waiting(2, 8), waiting(3, 8)];
        let state = State {
            role: Role::Prefill,
            limits: &limits,
            block_size: 16,
            sequences: &sequences,
            available: Some(100),
            window_free: &[0, 11],
            accounts: &accounts,
            pace: None,
        };
        assert_eq!(plan(&state, Duration::ZERO).admit.len(), 2);
    }
}
