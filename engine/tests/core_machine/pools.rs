//! Scenarios of blocks: preemption, cache hits, eviction, copies.

use std::sync::atomic::Ordering;

use baton_engine::api::{Command, Event, RequestKey, Work};
use baton_engine::config::Role;
use baton_proto::sampling::FinishReason;

use crate::fake::oracle;
use crate::machine::{Machine, Sizes};
use crate::scenarios::{cached, local, long, rejection, serve, tokens_of};
use crate::world::World;

/// B020: preempted sequences lose nothing.
#[test]
fn a_preempted_sequence_ends_as_if_it_had_run_alone() {
    for prefix_cache in [true, false] {
        let mut machine = Machine::new(
            Role::Decode,
            &Sizes {
                prefix_cache,
                ..Sizes::new(16, 20)
            },
        );
        let submissions: Vec<_> = (1..=6)
            .map(|key| {
                let mut submission = long(key, 40, 100);
                submission.sampling.logprobs = Some(2);
                submission
            })
            .collect();
        for submission in &submissions {
            machine.submit(submission.clone());
        }
        let events = machine.run();
        assert!(machine.load().preemptions_total > 0);
        for submission in &submissions {
            let key = submission.key;
            assert_eq!(tokens_of(&events, key.0, 0), oracle(submission)[0].tokens);
            let started = |e: &&Event| matches!(e, Event::Started { key: k, .. } if *k == key);
            assert_eq!(events.iter().filter(started).count(), 1);
            assert!(events.contains(&Event::Finished {
                key,
                choice: 0,
                reason: FinishReason::Length,
                output_tokens: 100,
            }));
        }
        machine.assert_nothing_held();
    }
}

/// B021: a warm cache answers like a cold one, and reports whole blocks.
#[test]
fn a_cache_hit_changes_nothing_but_the_time() {
    for chunk_tokens in [16, 512] {
        let mut machine = Machine::new(
            Role::Decode,
            &Sizes {
                chunk_tokens,
                window_blocks: 128,
                ..Sizes::new(16, 64)
            },
        );
        let another = |token: u32| if token == 2 { 3 } else { 2 };
        let mut key = 0;
        let mut send = |machine: &mut Machine, prompt: &[u32]| {
            key += 1;
            let mut submission = local(key, 1, 8);
            submission.prompt = prompt.to_vec();
            cached(&serve(machine, submission))
        };
        for length in [15_u32, 16, 17, 32, 33, 64, 65] {
            machine.send(Command::ClearCache);
            let prompt = local(1000 + u64::from(length), length, 1).prompt;
            assert_eq!(send(&mut machine, &prompt), 0);
            for _ in 0..3 {
                assert_eq!(send(&mut machine, &prompt), (length - 1) / 16 * 16);
            }
            let longer: Vec<u32> = prompt.iter().copied().chain([5]).collect();
            assert_eq!(send(&mut machine, &longer), length / 16 * 16);
            let mut changed = prompt.clone();
            *changed.last_mut().unwrap() = another(prompt[prompt.len() - 1]);
            assert_eq!(send(&mut machine, &changed), (length - 1) / 16 * 16);
            let mut changed = prompt.clone();
            changed[0] = another(prompt[0]);
            assert_eq!(send(&mut machine, &changed), 0);
        }
        assert!(machine.load().prefix_hits_tokens_total > 0);
        machine.assert_nothing_held();
    }
}

/// B022 (a): a pool for 2.5 long sequences serves 30 of them without thrashing.
#[test]
fn thirty_growing_sequences_all_end_in_a_pool_for_two_and_a_half() {
    let mut machine = Machine::new(
        Role::Decode,
        &Sizes {
            sequences_max: 32,
            window_blocks: 400,
            ..Sizes::new(16, 50)
        },
    );
    let submissions: Vec<_> = (1..=30).map(|key| long(key, 30, 290)).collect();
    for submission in &submissions {
        machine.submit(submission.clone());
    }
    let events = machine.run();
    let preemptions = machine.load().preemptions_total;
    println!("{preemptions} preemptions");
    assert!(preemptions > 0 && preemptions < 300, "{preemptions}");
    for submission in &submissions {
        assert_eq!(
            tokens_of(&events, submission.key.0, 0),
            oracle(submission)[0].tokens
        );
    }
    machine.assert_nothing_held();
}

/// B022 (b): every way to get a block evicts cached ones.
#[test]
fn a_pool_full_of_cached_blocks_serves_every_path() {
    let fill = |machine: &mut Machine, key: u64| {
        for key in key..key + 12 {
            serve(machine, local(key, 70, 2));
        }
        assert!(
            machine.load().blocks[0].free < 5,
            "{:?}",
            machine.load().blocks
        );
    };
    let mut world = World::new(&Sizes::new(16, 40), &Sizes::new(16, 40));
    // A prompt, growth and a fork.
    fill(&mut world.decode, 100);
    serve(&mut world.decode, local(1, 370, 3));
    fill(&mut world.decode, 200);
    serve(&mut world.decode, long(2, 20, 370));
    fill(&mut world.decode, 300);
    let mut forked = long(3, 40, 150);
    forked.sampling.n = 3;
    forked.sampling.temperature = 0.8;
    serve(&mut world.decode, forked);
    // A handoff.
    fill(&mut world.decode, 400);
    let mut received = local(0, 370, 3);
    received.work = Work::Receive;
    world.decode.take_events();
    world.arrive(received, &[], false, 3);
    world.finish();
    assert_eq!(world.handoffs, 1);
}

#[test]
fn what_can_never_fit_is_refused_at_once() {
    let mut machine = Machine::new(Role::Decode, &Sizes::new(16, 10));
    machine.submit(local(1, 150, 11));
    assert_eq!(rejection(&machine.take_events()).reason, "POOL_TOO_SMALL");
    serve(&mut machine, local(2, 150, 10));
    let mut machine = Machine::new(
        Role::Decode,
        &Sizes {
            window_blocks: 9,
            ..Sizes::new(16, 40)
        },
    );
    let mut wide = local(3, 100, 10);
    wide.sampling.n = 4;
    machine.submit(wide);
    assert_eq!(rejection(&machine.take_events()).reason, "POOL_TOO_SMALL");
}

/// B087: tenants do not see each other's prefixes.
#[test]
fn another_tenant_gets_no_hit() {
    let mut machine = Machine::new(Role::Decode, &Sizes::new(16, 40));
    let mut submission = local(1, 64, 4);
    submission.cache_salt = b"a".to_vec();
    assert_eq!(cached(&serve(&mut machine, submission.clone())), 0);
    submission.key = RequestKey(2);
    assert_eq!(cached(&serve(&mut machine, submission.clone())), 48);
    submission.key = RequestKey(3);
    submission.cache_salt = b"b".to_vec();
    assert_eq!(cached(&serve(&mut machine, submission.clone())), 0);
    submission.key = RequestKey(4);
    submission.cache_salt = b"a".to_vec();
    submission.use_cache = false;
    assert_eq!(cached(&serve(&mut machine, submission)), 0);
}

#[test]
fn a_copy_that_is_not_made_is_noticed() {
    let run = |skips: bool| {
        let mut machine = Machine::with(Role::Decode, &Sizes::new(16, 60), |_, executor| {
            executor.skips_copies = skips;
        });
        let mut submission = long(1, 37, 24);
        submission.sampling.n = 3;
        submission.sampling.temperature = 0.9;
        let expected = oracle(&submission);
        machine.submit(submission);
        let events = machine.run();
        assert!(machine.tally.copies.load(Ordering::Relaxed) >= 2);
        (0..3).all(|choice| tokens_of(&events, 1, choice) == expected[choice as usize].tokens)
    };
    assert!(run(false));
    assert!(
        !run(true),
        "without copies some choice must differ from the oracle"
    );
}
