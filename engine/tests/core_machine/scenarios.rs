//! Named scenarios: what other engines got wrong, one test each.

use std::sync::atomic::Ordering;

use baton_engine::api::{Command, Event, OrdinalRange, RequestKey, Submission, Work};
use baton_engine::config::Role;
use baton_engine::core::Progress;
use baton_proto::ErrorKind;
use baton_proto::sampling::{FinishReason, SampledToken, SamplingParams};

use crate::fake::{CONTEXT_MAX, ERROR_TOKEN, NAN_TOKEN, ORDINARY, oracle};
use crate::world::{Machine, Sizes, World};

/// A greedy local request with a prompt of its own.
pub fn local(key: u64, prompt: u32, max_tokens: u32) -> Submission {
    let token = |at: u32| (key as u32 * 31 + at * 7 + at * at) % (ORDINARY - 2) + 2;
    Submission {
        key: RequestKey(key),
        request_id: "r".into(),
        work: Work::Local,
        prompt: (0..prompt).map(token).collect(),
        forced: Vec::new(),
        sampling: SamplingParams {
            temperature: 0.0,
            max_tokens,
            ..SamplingParams::default()
        },
        cache_salt: Vec::new(),
        use_cache: true,
    }
}

/// The same, running to its full length.
fn long(key: u64, prompt: u32, max_tokens: u32) -> Submission {
    let mut submission = local(key, prompt, max_tokens);
    submission.sampling.ignore_eos = true;
    submission
}

fn tokens_of(events: &[Event], key: u64, choice: u32) -> Vec<SampledToken> {
    events
        .iter()
        .filter_map(|event| match event {
            Event::Tokens(tokens) => Some(tokens),
            _ => None,
        })
        .flatten()
        .filter(|token| token.key.0 == key && token.choice == choice)
        .map(|token| token.token.clone())
        .collect()
}

fn rejection(events: &[Event]) -> baton_proto::Error {
    events
        .iter()
        .find_map(|event| match event {
            Event::Rejected { rejection, .. } => Some(rejection.error.clone()),
            _ => None,
        })
        .unwrap_or_else(|| panic!("not rejected: {events:?}"))
}

fn cached(events: &[Event]) -> u32 {
    events
        .iter()
        .find_map(|event| match event {
            Event::Started { cached_tokens, .. } => Some(*cached_tokens),
            _ => None,
        })
        .expect("it started")
}

/// Submits one request, runs it to the end, compares it with the oracle.
fn serve(machine: &mut Machine, submission: Submission) -> Vec<Event> {
    let key = submission.key.0;
    let expected = oracle(&submission);
    machine.submit(submission);
    let events = machine.run();
    for (choice, expected) in expected.iter().enumerate() {
        assert_eq!(
            tokens_of(&events, key, choice as u32),
            expected.tokens,
            "{events:?}"
        );
    }
    assert_eq!(
        events
            .iter()
            .filter(|e| **e
                == Event::Released {
                    key: RequestKey(key)
                })
            .count(),
        1
    );
    events
}

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

/// B035: the context's edge is exact, and the message names the real limit.
#[test]
fn the_context_ends_where_it_says() {
    let mut machine = Machine::new(Role::Decode, &Sizes::new(16, 64));
    for (prompt, max_tokens) in [
        (CONTEXT_MAX - 1, 1),
        (CONTEXT_MAX - 16, 16),
        (1, CONTEXT_MAX - 1),
    ] {
        serve(&mut machine, long(u64::from(prompt), prompt, max_tokens));
    }
    for (prompt, max_tokens) in [(CONTEXT_MAX, 1), (CONTEXT_MAX - 1, 2), (5, u32::MAX)] {
        machine.submit(long(7777, prompt, max_tokens));
        let error = rejection(&machine.take_events());
        assert_eq!(
            (error.kind, error.reason.as_str()),
            (ErrorKind::Invalid, "CONTEXT_LENGTH_EXCEEDED")
        );
        for number in [CONTEXT_MAX, prompt, max_tokens] {
            assert!(
                error.message.contains(&number.to_string()),
                "{}",
                error.message
            );
        }
    }
}

#[test]
fn wrong_submissions_are_refused_by_field() {
    let mut machine = Machine::new(Role::Decode, &Sizes::new(16, 64));
    let mut field = |change: fn(&mut Submission)| {
        let mut submission = local(1, 20, 4);
        change(&mut submission);
        machine.submit(submission);
        rejection(&machine.take_events()).field
    };
    assert_eq!(field(|s| s.prompt.clear()), "prompt");
    assert_eq!(field(|s| s.prompt[3] = 50), "prompt");
    assert_eq!(field(|s| s.sampling.temperature = f32::NAN), "temperature");
    assert_eq!(field(|s| s.forced = vec![vec![1], vec![2]]), "forced");
    assert_eq!(field(|s| s.forced = vec![vec![2; 5]]), "forced");
    assert_eq!(field(|s| s.sampling.n = 9), "n");
    assert_eq!(
        field(|s| s.work = Work::Prefill { ship: Vec::new() }),
        "work"
    );
    let mut machine = Machine::new(Role::Prefill, &Sizes::new(16, 64));
    for (group, first, count) in [(2, 0, 1), (0, 0, 3), (0, u32::MAX, u32::MAX), (1, 0, 1)] {
        let mut submission = local(1, 32, 4);
        if (group, first) == (1, 0) {
            submission = local(1, 64, 4);
        }
        submission.work = Work::Prefill {
            ship: vec![OrdinalRange {
                group,
                first,
                count,
            }],
        };
        machine.submit(submission);
        assert_eq!(
            rejection(&machine.take_events()).field,
            "ship",
            "{group} {first} {count}"
        );
    }
}

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

#[test]
fn overload_is_refused_with_a_hint_and_ends() {
    let mut machine = Machine::with(Role::Decode, &Sizes::new(16, 40), |config, _| {
        config.limits.queue_requests_max = 2;
        config.limits.queue_tokens_max = 100;
    });
    machine.submit(local(1, 90, 2));
    machine.submit(local(2, 11, 2));
    let error = rejection(&machine.take_events());
    assert_eq!(error.kind, ErrorKind::Overloaded);
    assert!(error.retry_after.is_some());
    machine.submit(local(3, 10, 2));
    assert!(matches!(
        machine.take_events()[..],
        [Event::Accepted { .. }]
    ));
    machine.submit(local(4, 1, 2));
    assert_eq!(
        rejection(&machine.take_events()).kind,
        ErrorKind::Overloaded
    );
    machine.run();
    // A single long prompt may always wait.
    serve(&mut machine, local(5, 300, 2));
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

/// Work stops between two layers once nobody wants any row of the step.
#[test]
fn a_cancel_is_seen_between_layers() {
    let mut machine = Machine::new(Role::Decode, &Sizes::new(16, 40));
    machine.submit(local(1, 20, 4));
    machine.submit(local(2, 12, 4));
    let now = std::time::Duration::from_secs(1);
    let mut asked = 0;
    let one = |keys: &mut Vec<RequestKey>| {
        asked += 1;
        *keys = vec![RequestKey(1)];
    };
    machine.core.step(now, &mut { one }).unwrap();
    assert_eq!(
        machine.tally.aborts.load(Ordering::Relaxed),
        0,
        "the other row is wanted"
    );
    let mut asked = 0;
    machine
        .core
        .step(now, &mut |keys: &mut Vec<RequestKey>| {
            asked += 1;
            *keys = vec![RequestKey(1), RequestKey(2)];
        })
        .unwrap();
    assert_eq!(machine.tally.aborts.load(Ordering::Relaxed), 1);
    assert_eq!(asked, 1, "aborted after the first layer");
    machine.core.check_integrity();
    // The aborted step left nothing behind: both still give the oracle's tokens.
    let events = machine.run();
    for key in [1, 2] {
        let expected = oracle(&local(key, if key == 1 { 20 } else { 12 }, 4));
        assert_eq!(tokens_of(&events, key, 0), expected[0].tokens);
    }
    machine.assert_nothing_held();
}

#[test]
fn logits_that_are_not_finite_fail_their_request_alone() {
    let mut machine = Machine::new(Role::Decode, &Sizes::new(16, 40));
    machine.submit(local(1, 20, 9));
    let mut bad = local(2, 20, 9);
    *bad.prompt.last_mut().unwrap() = NAN_TOKEN;
    machine.submit(bad);
    let events = machine.run();
    assert_eq!(tokens_of(&events, 1, 0), oracle(&local(1, 20, 9))[0].tokens);
    let failed: Vec<_> = events
        .iter()
        .filter_map(|event| match event {
            Event::Failed { key, error } => Some((key.0, error.kind)),
            _ => None,
        })
        .collect();
    assert_eq!(failed, [(2, ErrorKind::Internal)]);
    assert!(events.contains(&Event::Released { key: RequestKey(2) }));
    machine.assert_nothing_held();
}

#[test]
fn a_lost_step_fails_its_requests_and_the_engine_goes_on() {
    let mut machine = Machine::new(Role::Decode, &Sizes::new(16, 40));
    let mut bad = local(1, 20, 9);
    bad.prompt[3] = ERROR_TOKEN;
    machine.submit(bad.clone());
    let events = machine.run();
    assert!(events.contains(&Event::Released { key: RequestKey(1) }));
    serve(&mut machine, local(2, 20, 9));
    // A device that only fails is given up.
    let now = std::time::Duration::from_secs(1);
    let mut failures = 0;
    for key in 3..10 {
        bad.key = RequestKey(key);
        machine.submit(bad.clone());
        if machine.core.step(now, &mut |_| {}).is_err() {
            break;
        }
        failures += 1;
    }
    assert_eq!(failures, 2);
}

#[test]
fn a_cancelled_choice_ends_and_the_others_do_not_notice() {
    let mut machine = Machine::new(Role::Decode, &Sizes::new(16, 40));
    let mut submission = long(1, 40, 30);
    submission.sampling.n = 3;
    submission.sampling.temperature = 1.0;
    let expected = oracle(&submission);
    machine.submit(submission);
    for _ in 0..10 {
        machine.step();
    }
    machine.send(Command::CancelChoice {
        key: RequestKey(1),
        choice: 1,
    });
    machine.send(Command::CancelChoice {
        key: RequestKey(1),
        choice: 1,
    });
    let events = machine.run();
    for choice in [0, 2] {
        assert_eq!(
            tokens_of(&events, 1, choice),
            expected[choice as usize].tokens
        );
    }
    let ended = tokens_of(&events, 1, 1);
    assert!(!ended.is_empty() && ended.len() < 30);
    assert!(events.contains(&Event::Finished {
        key: RequestKey(1),
        choice: 1,
        reason: FinishReason::Cancelled,
        output_tokens: ended.len() as u32,
    }));
    machine.assert_nothing_held();
}

#[test]
fn a_paused_choice_stands_still_and_goes_on_where_it_was() {
    let mut machine = Machine::new(Role::Decode, &Sizes::new(16, 40));
    let submission = long(1, 20, 30);
    machine.submit(submission.clone());
    for _ in 0..5 {
        machine.step();
    }
    machine.send(Command::Pause {
        key: RequestKey(1),
        choice: 0,
        paused: true,
    });
    let mut events = machine.run();
    assert!(tokens_of(&events, 1, 0).len() < 30);
    machine.send(Command::Pause {
        key: RequestKey(1),
        choice: 0,
        paused: false,
    });
    events.extend(machine.run());
    assert_eq!(tokens_of(&events, 1, 0), oracle(&submission)[0].tokens);
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
