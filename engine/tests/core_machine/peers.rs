//! Scenarios of handoffs: what a peer may touch, split requests, resumed ones.

use std::sync::atomic::Ordering;

use baton_engine::api::{Command, Event, OrdinalRange, RequestKey, Work};
use baton_engine::config::Role;
use baton_engine::core::Progress;
use baton_proto::sampling::SampledToken;

use crate::fake::oracle;
use crate::machine::{Machine, Sizes};
use crate::scenarios::{local, long, serve, tokens_of};
use crate::world::World;

/// B034, in one engine and split: `max_tokens` counts the first token.
#[test]
fn max_tokens_counts_the_first_token_in_both_modes() {
    for max_tokens in [1, 2] {
        for n in [1, 3] {
            for temperature in [0.0, 0.9] {
                let mut world = World::new(&Sizes::new(16, 40), &Sizes::new(16, 40));
                for work in [Work::Local, Work::Receive] {
                    let mut submission = long(1, 33, max_tokens);
                    submission.sampling.n = n;
                    submission.sampling.temperature = temperature;
                    submission.sampling.seed = 42;
                    submission.work = work;
                    world.arrive(submission, &[], false, 1);
                }
                world.finish();
                assert_eq!(world.handoffs, 1);
                let rows = world.decode.tally.rows.load(Ordering::Relaxed);
                if max_tokens == 1 {
                    // 33 prompt tokens in chunks of 32; nothing decodes.
                    assert_eq!(rows, 2);
                }
            }
        }
    }
}

/// B002, B015: blocks a peer may still write are nobody's until it is done.
#[test]
fn a_cancelled_reservation_stays_quarantined_until_released() {
    let mut machine = Machine::new(Role::Decode, &Sizes::new(16, 40));
    let mut receive = local(1, 330, 4);
    receive.work = Work::Receive;
    machine.submit(receive);
    machine.step();
    let events = machine.take_events();
    assert!(
        events
            .iter()
            .any(|event| matches!(event, Event::Reserved { .. }))
    );
    let reserved = machine.load().blocks[0].reserved;
    assert_eq!(reserved, 21);
    machine.send(Command::Cancel { key: RequestKey(1) });
    machine.send(Command::Cancel { key: RequestKey(1) });
    assert_eq!(machine.load().blocks[0].quarantined, 21);
    assert_eq!(machine.take_events(), [], "not released yet");
    // Somebody who needs them waits.
    machine.submit(local(2, 330, 4));
    assert_eq!(machine.step(), Progress::Idle);
    serve(
        &mut Machine::new(Role::Decode, &Sizes::new(16, 40)),
        local(2, 330, 4),
    );
    // A late commit of the cancelled request is ignored.
    let late = SampledToken {
        id: 5,
        logprob: None,
    };
    machine.send(Command::Commit {
        key: RequestKey(1),
        first: vec![late],
        foreign: false,
    });
    machine.send(Command::Release { key: RequestKey(1) });
    machine.send(Command::Release { key: RequestKey(1) });
    let events = machine.run();
    assert_eq!(
        events[1],
        Event::Released { key: RequestKey(1) },
        "{events:?}"
    );
    assert_eq!(
        tokens_of(&events, 2, 0),
        oracle(&local(2, 330, 4))[0].tokens
    );
    machine.assert_nothing_held();
}

/// Neither converted KV nor what was computed from it is ever found by a prefix.
#[test]
fn foreign_kv_never_enters_the_prefix_cache() {
    for foreign in [false, true] {
        let mut world = World::new(&Sizes::new(16, 60), &Sizes::new(16, 60));
        world.foreign = foreign;
        let mut submission = long(1, 70, 60);
        submission.sampling.n = 2;
        submission.work = Work::Receive;
        world.arrive(submission, &[], false, 1);
        while world.round() {}
        assert_eq!(world.handoffs, 1);
        let cached = |world: &World| -> u32 {
            let load = world.decode.load();
            load.blocks.iter().map(|blocks| blocks.cached).sum()
        };
        assert_eq!(cached(&world) == 0, foreign);
        // The same prompt again finds nothing of it, and what is computed here counts.
        let hits = world.decode.load().prefix_hits_tokens_total;
        world.foreign = false;
        let mut again = long(2, 70, 60);
        again.prompt = long(1, 70, 60).prompt;
        world.arrive(again, &[], false, 1);
        while world.round() {}
        let hits = world.decode.load().prefix_hits_tokens_total - hits;
        assert_eq!(hits == 0, foreign);
        assert!(cached(&world) > 0);
        world.finish();
    }
}

/// B001, B015 (b): what is being sent is neither evicted nor leaked.
#[test]
fn a_prefill_keeps_its_blocks_until_released() {
    let mut machine = Machine::new(Role::Prefill, &Sizes::new(16, 48));
    let ship = |prompt: u32| {
        vec![OrdinalRange {
            group: 0,
            first: 0,
            count: prompt.div_ceil(16),
        }]
    };
    let prefill = |key, prompt| {
        let mut submission = local(key, prompt, 4);
        submission.work = Work::Prefill { ship: ship(prompt) };
        submission
    };
    machine.submit(prefill(1, 320));
    let events = machine.run();
    let first = events.iter().find_map(|event| match event {
        Event::First { tokens, .. } => Some(tokens.clone()),
        _ => None,
    });
    assert_eq!(first.unwrap()[0].0, oracle(&local(1, 320, 4))[0].tokens[0]);
    assert_eq!(machine.load().blocks[0].pinned, 20);
    for key in 2..5 {
        machine.submit(prefill(key, 190));
        machine.run();
        machine.send(Command::Cancel {
            key: RequestKey(key),
        });
        machine.send(Command::Release {
            key: RequestKey(key),
        });
        assert_eq!(
            machine.take_events(),
            [Event::Released {
                key: RequestKey(key)
            }]
        );
    }
    assert_eq!(machine.load().blocks[0].pinned, 20);
    machine.send(Command::Cancel { key: RequestKey(1) });
    assert_eq!(
        machine.load().blocks[0].pinned,
        20,
        "only the worker knows when reads ended"
    );
    machine.send(Command::Release { key: RequestKey(1) });
    assert_eq!(
        machine.take_events(),
        [Event::Released { key: RequestKey(1) }]
    );
    machine.assert_nothing_held();
}

#[test]
fn a_cancel_of_a_prefill_in_progress_waits_for_release_and_one_in_the_queue_does_not() {
    let mut machine = Machine::new(Role::Prefill, &Sizes::new(16, 24));
    for key in [1, 2] {
        let mut submission = local(key, 320, 4);
        submission.work = Work::Prefill { ship: Vec::new() };
        machine.submit(submission);
    }
    machine.step();
    machine.take_events();
    machine.send(Command::Cancel { key: RequestKey(1) });
    assert_eq!(machine.take_events(), []);
    machine.send(Command::Cancel { key: RequestKey(2) });
    assert_eq!(
        machine.take_events(),
        [Event::Released { key: RequestKey(2) }]
    );
    assert_eq!(machine.run(), []);
    machine.send(Command::Release { key: RequestKey(1) });
    assert_eq!(
        machine.take_events(),
        [Event::Released { key: RequestKey(1) }]
    );
    machine.assert_nothing_held();
}

/// The state of a resumed choice is rebuilt by replay, wherever it goes on.
#[test]
fn a_resumed_request_continues_as_if_never_interrupted() {
    for forced in [vec![3], vec![0, 7, 40], vec![1, 0, 16]] {
        let mut world = World::new(&Sizes::new(16, 60), &Sizes::new(16, 60));
        for work in [Work::Local, Work::Receive] {
            let mut submission = long(1, 37, 24);
            submission.sampling.n = 3;
            submission.sampling.temperature = 0.9;
            submission.sampling.frequency_penalty = 0.7;
            submission.work = work;
            world.arrive(submission, &forced, true, 4);
        }
        world.finish();
        assert_eq!(world.handoffs, 1);
    }
}
