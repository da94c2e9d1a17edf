//! The policy of a decode pool: continuous batching with preemption by recompute.
//!
//! One pass over the running sequences, oldest first: a decode row each, and chunks
//! of local prompts within the step's budget, which leaves every decode row its
//! token. Who needs a block and finds none takes it from a sequence that is held
//! back, else from the youngest that is younger than itself, else stands still for
//! this step. Then the queue, strictly in order of age: the first that does not fit
//! ends the pass, so nobody is overtaken for ever. A target on the gap between tokens
//! cuts chunks and ends the pass earlier ([`pace`](super::pace)).

use std::cmp::Reverse;
use std::time::Duration;

use super::pace::Pacing;
use super::turn;
use super::{Plan, Room, Row, SequenceId, SequenceView, Stage, State};

pub(super) fn plan(state: &State<'_>, now: Duration) -> Plan {
    let mut plan = Plan::default();
    let mut room = Room::new(state);
    let mut pacing = Pacing::new(state);
    let running = || {
        state
            .sequences
            .iter()
            .filter(|view| view.stage == Stage::Running)
    };

    let decoding = running()
        .filter(|view| view.uncomputed == 1 && !view.held_back)
        .count() as u32;
    // A decode row takes its token from `decode_tokens`, a chunk from what they leave.
    let mut decode_tokens = decoding.min(room.step_tokens);
    room.step_tokens -= decode_tokens;

    let mut stands_still = false;
    for view in running().filter(|view| !view.held_back) {
        if plan.preempt.contains(&view.id) {
            continue;
        }
        let tokens = if view.uncomputed == 1 {
            if decode_tokens == 0 {
                continue;
            }
            decode_tokens -= 1;
            1
        } else {
            take_chunk(&mut room, &mut pacing, view.computed, view.uncomputed)
        };
        if tokens == 0 {
            continue;
        }
        let needed = i64::from(view.blocks_beyond_credit(tokens, state.block_size));
        while needed > room.blocks {
            let Some(victim) = victim(state, view, &plan.preempt) else {
                break;
            };
            room.blocks += i64::from(state.accounts.exclusive(victim.id) + victim.credit);
            plan.preempt.push(victim.id);
        }
        if needed > room.blocks {
            stands_still = true;
            continue;
        }
        room.blocks -= needed;
        plan.rows.push(Row {
            id: view.id,
            tokens,
        });
    }
    // Blocks that were just taken from somebody are not for newcomers.
    if !stands_still && plan.preempt.is_empty() {
        admit(state, now, &mut room, &mut pacing, &mut plan);
    }
    plan.cut = pacing.is_some_and(|pacing| pacing.cut);
    plan
}

/// Takes what fits this step of a prompt's `uncomputed` tokens from `position` on.
fn take_chunk(
    room: &mut Room,
    pacing: &mut Option<Pacing<'_>>,
    position: u32,
    uncomputed: u32,
) -> u32 {
    let most = room.chunk(uncomputed);
    let tokens = match pacing {
        Some(pacing) => pacing.take_chunk(position, most),
        None => most,
    };
    room.take_chunk(tokens)
}

/// Whose blocks `needy` may take: held back first, then the youngest of the lowest priority.
fn victim<'a>(
    state: &State<'a>,
    needy: &SequenceView,
    preempted: &[SequenceId],
) -> Option<&'a SequenceView> {
    let candidates = || {
        state.sequences.iter().rev().filter(|view| {
            view.stage == Stage::Running && view.id != needy.id && !preempted.contains(&view.id)
        })
    };
    let juniority = |view: &SequenceView| (Reverse(view.priority), view.id);
    candidates().find(|view| view.held_back).or_else(|| {
        let juniors = candidates().filter(|view| juniority(view) > juniority(needy));
        juniors.max_by_key(|view| juniority(view))
    })
}

fn admit(
    state: &State<'_>,
    now: Duration,
    room: &mut Room,
    pacing: &mut Option<Pacing<'_>>,
    plan: &mut Plan,
) {
    // Each sequence that holds blocks may soon want one more; starting another must
    // not make the next step preempt it again.
    let holders = state
        .sequences
        .iter()
        .filter(|view| view.stage != Stage::Waiting)
        .count();
    for view in turn::queue(state.sequences, now) {
        if !view.receives && (room.chunk_tokens == 0 || room.step_tokens == 0) {
            break;
        }
        let reserve = (holders + plan.admit.len()) as u32;
        let fits = pacing.as_ref().is_none_or(|pacing| pacing.admits(view));
        if !fits {
            plan.delayed = Some(view.id);
            break;
        }
        let Some(admission) = room.admit(state, view, reserve) else {
            break;
        };
        plan.admit.push(admission);
        if let Some(pacing) = pacing {
            pacing.join(view);
        }
        if !view.receives {
            let cached = admission.hit.blocks * state.block_size;
            let tokens = take_chunk(room, pacing, cached, view.uncomputed - cached);
            plan.rows.push(Row {
                id: view.id,
                tokens,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Fixed, id, limits, running, waiting};
    use super::super::*;

    fn plan_of(sequences: &[SequenceView], available: u32, exclusive: u32) -> Plan {
        let limits = limits();
        let accounts = Fixed {
            exclusive,
            charge: vec![0],
        };
        let state = State {
            role: Role::Decode,
            limits: &limits,
            block_size: 16,
            sequences,
            available: Some(available),
            window_free: &[0],
            accounts: &accounts,
            pace: None,
        };
        plan(&state, Duration::ZERO)
    }

    fn row(arrival: u64, tokens: u32) -> Row {
        Row {
            id: id(arrival),
            tokens,
        }
    }

    #[test]
    fn decode_rows_run_beside_a_chunk_of_the_next_prompt() {
        let plan = plan_of(&[running(1, 5), running(2, 9), waiting(3, 100)], 50, 0);
        assert_eq!(plan.rows, [row(1, 1), row(2, 1), row(3, 32)]);
        assert_eq!(plan.admit[0].credit, 7);
    }

    #[test]
    fn a_chunk_never_takes_a_decode_row_its_token() {
        let prompt = SequenceView {
            uncomputed: 90,
            credit: 9,
            ..running(1, 16)
        };
        let mut sequences = vec![prompt];
        sequences.extend((2..8).map(|arrival| running(arrival, 5)));
        let plan = plan_of(&sequences, 50, 0);
        assert_eq!(plan.rows.len(), 7);
        assert_eq!(plan.rows[0], row(1, 32));
    }

    #[test]
    fn the_oldest_takes_blocks_from_the_youngest() {
        let plan = plan_of(&[running(1, 16), running(2, 20), running(3, 20)], 0, 2);
        assert_eq!(plan.preempt, [id(3)]);
        assert_eq!(plan.rows, [row(1, 1), row(2, 1)]);
    }

    #[test]
    fn the_youngest_stands_still_rather_than_take_from_an_older_one() {
        let plan = plan_of(&[running(1, 20), running(2, 16), waiting(3, 1)], 0, 2);
        assert_eq!(plan.preempt, []);
        assert_eq!(plan.rows, [row(1, 1)]);
        assert_eq!(plan.admit, []);
    }

    #[test]
    fn blocks_come_from_the_lowest_priority_first_and_never_from_a_higher_one() {
        let with = |arrival, computed, priority| SequenceView {
            priority,
            ..running(arrival, computed)
        };
        let low_is_older = [with(1, 20, -1), with(2, 16, 0), with(3, 20, 0)];
        assert_eq!(plan_of(&low_is_older, 0, 2).preempt, [id(1)]);
        let low_is_needy = [with(1, 16, -1), with(2, 20, 0)];
        assert_eq!(plan_of(&low_is_needy, 0, 2).preempt, []);
    }

    #[test]
    fn the_queue_goes_by_priority_and_tokens() {
        let with = |arrival, priority, ahead| SequenceView {
            priority,
            ahead,
            ..waiting(arrival, 16)
        };
        let queue = [with(1, 0, 90), with(2, 0, 10), with(3, 5, 99)];
        let plan = plan_of(&queue, 50, 0);
        let admitted: Vec<_> = plan.admit.iter().map(|admission| admission.id).collect();
        assert_eq!(admitted, [id(3), id(2)]);
    }

    #[test]
    fn who_is_held_back_loses_its_blocks_first_even_if_older() {
        let held = SequenceView {
            held_back: true,
            ..running(1, 20)
        };
        let plan = plan_of(&[held, running(2, 16), running(3, 20)], 0, 2);
        assert_eq!(plan.preempt, [id(1)]);
        assert_eq!(plan.rows, [row(2, 1), row(3, 1)]);
    }

    #[test]
    fn a_reservation_is_not_preempted() {
        let reserved = SequenceView {
            stage: Stage::Reserved,
            ..running(2, 20)
        };
        let plan = plan_of(&[running(1, 16), reserved], 0, 2);
        assert!(plan.is_empty());
    }

    #[test]
    fn credits_are_not_given_away() {
        let promised = SequenceView {
            credit: 4,
            ..running(1, 20)
        };
        assert_eq!(plan_of(&[promised.clone(), waiting(2, 16)], 5, 0).admit, []);
        assert_eq!(plan_of(&[promised, waiting(2, 16)], 6, 0).admit.len(), 1);
    }

    #[test]
    fn the_queue_is_not_overtaken() {
        let plan = plan_of(&[waiting(1, 160), waiting(2, 1)], 9, 0);
        assert!(plan.is_empty());
        let plan = plan_of(&[waiting(1, 160), waiting(2, 1)], 10, 0);
        assert_eq!(plan.admit.len(), 1);
    }

    #[test]
    fn a_lone_sequence_may_use_the_whole_pool() {
        assert_eq!(plan_of(&[waiting(1, 160)], 10, 0).admit.len(), 1);
    }

    #[test]
    fn a_reservation_takes_blocks_but_no_step_time() {
        let receive = |arrival| SequenceView {
            receives: true,
            extra_credit: 2,
            ..waiting(arrival, 40)
        };
        let plan = plan_of(&[receive(1), receive(2)], 11, 0);
        assert_eq!(
            plan.admit
                .iter()
                .map(|admission| admission.credit)
                .collect::<Vec<_>>(),
            [5, 5]
        );
        assert_eq!(plan.rows, []);
    }
}
