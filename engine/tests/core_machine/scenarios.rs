//! Scenarios of single requests: refusals, failures, cancels, pauses. And the words
//! that all scenarios are told in.

use std::sync::atomic::Ordering;

use baton_engine::api::{Command, Event, OrdinalRange, RequestKey, Submission, Work};
use baton_engine::config::Role;
use baton_proto::ErrorKind;
use baton_proto::sampling::{FinishReason, SampledToken, SamplingParams};

use crate::fake::{CONTEXT_MAX, ERROR_TOKEN, NAN_TOKEN, ORDINARY, oracle};
use crate::machine::{Machine, Sizes};

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
        priority: 0,
        use_cache: true,
        itl_target: None,
    }
}

/// The same, running to its full length.
pub fn long(key: u64, prompt: u32, max_tokens: u32) -> Submission {
    let mut submission = local(key, prompt, max_tokens);
    submission.sampling.ignore_eos = true;
    submission
}

pub fn tokens_of(events: &[Event], key: u64, choice: u32) -> Vec<SampledToken> {
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

pub fn rejection(events: &[Event]) -> baton_proto::Error {
    events
        .iter()
        .find_map(|event| match event {
            Event::Rejected { rejection, .. } => Some(rejection.error.clone()),
            _ => None,
        })
        .unwrap_or_else(|| panic!("not rejected: {events:?}"))
}

pub fn cached(events: &[Event]) -> u32 {
    events
        .iter()
        .find_map(|event| match event {
            Event::Started { cached_tokens, .. } => Some(*cached_tokens),
            _ => None,
        })
        .expect("it started")
}

/// Submits one request, runs it to the end, compares it with the oracle.
pub fn serve(machine: &mut Machine, submission: Submission) -> Vec<Event> {
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

#[test]
fn overload_is_refused_with_a_hint_and_ends() {
    let mut machine = Machine::with(Role::Decode, &Sizes::new(16, 40), |config, _| {
        config.limits.queue_requests_max = 2;
        config.limits.queue_tokens_max = 100;
    });
    machine.submit(local(1, 60, 2));
    machine.submit(local(2, 41, 2));
    let error = rejection(&machine.take_events());
    assert_eq!(error.kind, ErrorKind::Overloaded);
    assert!(error.retry_after.is_some());
    machine.submit(local(3, 40, 2));
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

#[test]
fn one_tenant_leaves_room_in_the_queue_and_another_goes_before_its_second() {
    let mut machine = Machine::with(Role::Decode, &Sizes::new(16, 40), |config, _| {
        config.limits.sequences_max = 1;
        config.limits.queue_requests_max = 10;
    });
    let of = |tenant: &[u8], key| Submission {
        cache_salt: tenant.to_vec(),
        ..local(key, 40, 2)
    };
    let accepted = (1..=10)
        .take_while(|key| {
            machine.submit(of(b"greedy", *key));
            matches!(machine.take_events()[..], [Event::Accepted { .. }])
        })
        .count();
    assert_eq!(accepted, 8);
    machine.submit(of(b"other", 11));
    assert!(matches!(
        machine.take_events()[..],
        [Event::Accepted { .. }]
    ));
    let urgent = Submission {
        priority: 1,
        ..of(b"other", 12)
    };
    machine.submit(urgent);
    let started: Vec<u64> = machine
        .run()
        .iter()
        .filter_map(|event| match event {
            Event::Started { key, .. } => Some(key.0),
            _ => None,
        })
        .collect();
    assert_eq!(started[..3], [12, 1, 11]);
    assert_eq!(started.len(), 10);
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
            Event::Failed { key, error } => Some((key.0, error)),
            _ => None,
        })
        .collect();
    let [(2, error)] = failed[..] else {
        panic!("{failed:?}")
    };
    assert_eq!(error.kind, ErrorKind::Internal);
    assert_eq!(error.reason, "LOGITS_NOT_FINITE");
    let place = "output token `0` of choice `0` (position `20` of the sequence)";
    assert!(error.message.contains(place), "{}", error.message);
    assert_eq!(machine.load().not_finite_total, 1);
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
