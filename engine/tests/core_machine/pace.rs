//! Targets on the gap between tokens. The fake device's clock foretells a second per
//! token; its steps take microseconds, so the margin ends at its least, 0.8, after a few
//! steps of 1.05. The bounds below hold for both.

use std::time::Duration;

use baton_engine::api::{Command, Event, RequestKey, Submission, Work};
use baton_engine::config::{EngineConfig, Role};
use baton_engine::core::Progress;
use baton_proto::ErrorKind;

use crate::fake::oracle;
use crate::machine::{Machine, Sizes};
use crate::scenarios::{long, rejection, tokens_of};

fn machine(target_ms: Option<u64>, change: impl FnOnce(&mut EngineConfig)) -> Machine {
    let sizes = Sizes {
        itl_target: target_ms.map(Duration::from_millis),
        ..Sizes::new(16, 64)
    };
    Machine::with(Role::Decode, &sizes, |config, _| change(config))
}

/// Prompts of one token, so that all steps are rows of one token.
fn short(key: u64) -> Submission {
    long(key, 1, 30)
}

fn with_target(submission: Submission, ms: u64) -> Submission {
    Submission {
        itl_target: Some(Duration::from_millis(ms)),
        ..submission
    }
}

fn most_rows<'a>(events: impl IntoIterator<Item = &'a Event>) -> u32 {
    let rows = events.into_iter().map(|event| match event {
        Event::Step(step) => step.decode_tokens + step.prefill_tokens,
        _ => 0,
    });
    rows.max().unwrap_or(0)
}

#[test]
fn the_batch_is_what_the_target_holds_and_no_token_changes() {
    let cases = [
        (None, 8..=8, 0),
        (Some(4_300), 4..=5, 4),
        (Some(200), 1..=1, 7),
    ];
    for (target, rows, delayed) in cases {
        let mut machine = machine(target, |_| {});
        for key in 1..=8 {
            machine.submit(short(key));
        }
        let events = machine.run();
        let most = most_rows(&events);
        assert!(rows.contains(&most), "{target:?}: {most} rows");
        for key in 1..=8 {
            let expected = oracle(&short(key));
            assert_eq!(tokens_of(&events, key, 0), expected[0].tokens);
        }
        assert_eq!(machine.load().slo_delayed_total, delayed, "{target:?}");
        machine.assert_nothing_held();
    }
}

#[test]
fn a_request_of_its_own_target_is_kept_to_it_and_frees_the_batch_with_its_end() {
    let mut machine = machine(None, |_| {});
    machine.submit(with_target(short(1), 3_200));
    for key in 2..=8 {
        machine.submit(short(key));
    }
    machine.step();
    assert_eq!(
        machine.load().itl_target,
        Some(Duration::from_millis(3_200))
    );
    let events = machine.run();
    let is_end = |event: &Event| matches!(event, Event::Finished { key, .. } if key.0 == 1);
    let end = events.iter().position(is_end).unwrap();
    assert!((3..=4).contains(&most_rows(&events[..end])));
    assert!(most_rows(&events[end..]) > 4);
    assert_eq!(machine.load().itl_target, None);
}

#[test]
fn a_prompt_beside_a_stream_is_cut_and_ends() {
    let mut machine = machine(Some(20_000), |_| {});
    machine.submit(long(1, 1, 60));
    for _ in 0..3 {
        machine.step();
    }
    machine.submit(long(2, 90, 3));
    let events = machine.run();
    for (key, submission) in [(1, long(1, 1, 60)), (2, long(2, 90, 3))] {
        assert_eq!(tokens_of(&events, key, 0), oracle(&submission)[0].tokens);
    }
    // 18 tokens beside the stream's while the margin is 1.05, 24 once it is 0.8.
    assert!(
        (18..=25).contains(&most_rows(&events)),
        "{}",
        most_rows(&events)
    );
    assert!(machine.load().slo_cut_steps_total >= 4);
}

#[test]
fn reservations_count_as_the_rows_they_will_be() {
    let mut machine = machine(Some(2_300), |_| {});
    for key in 1..=3 {
        machine.submit(Submission {
            work: Work::Receive,
            ..long(key, 40, 5)
        });
    }
    let mut first = Vec::new();
    while machine.step() == Progress::Worked {}
    for event in machine.take_events() {
        if let Event::Reserved { key, .. } = event {
            first.push(key.0);
        }
    }
    assert_eq!(first, [1, 2]);
    assert_eq!(machine.load().requests_waiting, 1);
    let key = RequestKey(1);
    machine.send(Command::Cancel { key });
    machine.send(Command::Release { key });
    machine.step();
    assert!(machine.take_events().iter().any(|event| matches!(
        event,
        Event::Reserved { key, .. } if key.0 == 3
    )));
}

#[test]
fn a_full_queue_says_what_keeps_it_full() {
    let mut machine = machine(Some(1_100), |config| config.limits.queue_requests_max = 2);
    machine.submit(short(1));
    for _ in 0..3 {
        machine.step();
    }
    for key in 2..=4 {
        machine.submit(short(key));
        machine.step();
    }
    let error = rejection(&machine.take_events());
    assert_eq!(error.kind, ErrorKind::Overloaded);
    assert!(
        error.message.contains("1100 ms between tokens"),
        "{}",
        error.message
    );
    assert!(error.retry_after.is_some());
}

#[test]
fn a_device_that_foretells_nothing_takes_no_targets() {
    let mut machine = Machine::with(Role::Decode, &Sizes::new(16, 64), |_, executor| {
        executor.seconds_per_token = None;
    });
    machine.submit(with_target(short(1), 5_000));
    let error = rejection(&machine.take_events());
    assert_eq!(
        (error.kind, error.field.as_str()),
        (ErrorKind::Unsupported, "slo.itl_ms")
    );
    machine.submit(short(2));
    assert_eq!(tokens_of(&machine.run(), 2, 0), oracle(&short(2))[0].tokens);
}
