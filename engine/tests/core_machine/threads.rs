//! The engine on its thread: nothing waits for ever, whatever breaks.

use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use baton_engine::api::{Command, Event, RequestKey, Submission};
use baton_engine::config::Role;
use baton_engine::engine::{Engine, SendError};
use baton_engine::kv::KvMemory;

use crate::fake::{FakeExecutor, PANIC_TOKEN, Tally, facts, layout, oracle};
use crate::machine::{Sizes, config};
use crate::scenarios::local;

fn start() -> (Engine, Receiver<Event>) {
    let layout = layout(16);
    let memory = KvMemory::allocate(layout.clone(), &[40, 64]).unwrap();
    let executor = FakeExecutor::new(&memory, &std::sync::Arc::<Tally>::default());
    let (events, heard) = channel();
    let engine = Engine::start_with_executor(
        Box::new(executor),
        facts(&layout),
        memory,
        &config(Role::Decode, &Sizes::new(16, 40)),
        // A receiver that is gone is not an error.
        Box::new(move |event| drop(events.send(event))),
    )
    .unwrap();
    (engine, heard)
}

fn until(heard: &Receiver<Event>, wanted: impl Fn(&Event) -> bool) -> Vec<Event> {
    let mut events = Vec::new();
    loop {
        let event = heard
            .recv_timeout(Duration::from_secs(20))
            .expect("the engine goes on");
        let done = wanted(&event);
        events.push(event);
        if done {
            return events;
        }
    }
}

fn released(key: u64) -> impl Fn(&Event) -> bool {
    move |event| {
        *event
            == Event::Released {
                key: RequestKey(key),
            }
    }
}

/// Submits a request that draws one token and then stands still.
fn hold_after_first(engine: &Engine, submission: Submission) {
    let key = submission.key;
    engine.send(Command::Submit(Box::new(submission))).unwrap();
    engine
        .send(Command::Pause {
            key,
            choice: 0,
            paused: true,
        })
        .unwrap();
}

#[test]
fn an_engine_serves_and_stops() {
    let (engine, heard) = start();
    let submission = local(1, 30, 12);
    let expected = oracle(&submission);
    engine.send(Command::Submit(Box::new(submission))).unwrap();
    let events = until(&heard, released(1));
    let tokens: Vec<_> = events
        .iter()
        .flat_map(|event| match event {
            Event::Tokens(tokens) => tokens.iter().map(|token| token.token.clone()).collect(),
            _ => Vec::new(),
        })
        .collect();
    assert_eq!(tokens, expected[0].tokens);
    engine.stop();
    engine.stop();
    assert!(engine.is_stopped());
    assert_eq!(engine.send(Command::ClearCache), Err(SendError::Stopped));
    let last = heard.iter().last();
    assert_eq!(last, Some(Event::Stopped { error: None }));
}

#[test]
fn stopping_fails_and_releases_what_is_left() {
    let (engine, heard) = start();
    let mut submission = local(1, 30, 300);
    submission.sampling.ignore_eos = true;
    hold_after_first(&engine, submission);
    until(&heard, |event| matches!(event, Event::Tokens(_)));
    engine.stop();
    let events: Vec<_> = heard.iter().collect();
    let tail = &events[events.len() - 3..];
    assert!(matches!(&tail[0], Event::Failed { error, .. } if error.reason == "ENGINE_STOPPED"));
    assert_eq!(
        tail[1..],
        [
            Event::Released { key: RequestKey(1) },
            Event::Stopped { error: None }
        ]
    );
}

#[test]
fn a_panic_in_a_step_fails_everything_once_and_ends_the_engine() {
    let (engine, heard) = start();
    let mut innocent = local(1, 30, 300);
    innocent.sampling.ignore_eos = true;
    hold_after_first(&engine, innocent);
    until(&heard, |event| matches!(event, Event::Tokens(_)));
    let mut bad = local(2, 30, 4);
    bad.prompt[20] = PANIC_TOKEN;
    engine.send(Command::Submit(Box::new(bad))).unwrap();
    let events = until(&heard, |event| matches!(event, Event::Stopped { .. }));
    for key in [1, 2] {
        let failed = |event: &&Event| matches!(event, Event::Failed { key: k, .. } if k.0 == key);
        assert_eq!(events.iter().filter(failed).count(), 1);
        assert_eq!(
            events.iter().filter(|event| released(key)(event)).count(),
            1
        );
    }
    assert!(
        matches!(events.last(), Some(Event::Stopped { error: Some(message) }) if message.contains("asked to panic"))
    );
    assert!(
        heard.recv_timeout(Duration::from_secs(5)).is_err(),
        "the thread has ended"
    );
    assert_eq!(engine.send(Command::ClearCache), Err(SendError::Stopped));
}

#[test]
fn an_idle_engine_sleeps() {
    let (engine, heard) = start();
    engine
        .send(Command::Submit(Box::new(local(1, 30, 4))))
        .unwrap();
    until(&heard, released(1));
    let task = |name: &str| -> u64 {
        // Processor time of the engine's thread in clock ticks: fields 14 and 15 of stat(5).
        std::fs::read_dir("/proc/self/task")
            .unwrap()
            .filter_map(|entry| {
                let path = entry.ok()?.path();
                (std::fs::read_to_string(path.join("comm")).ok()?.trim() == name).then_some(())?;
                let stat = std::fs::read_to_string(path.join("stat")).ok()?;
                let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
                Some(fields[11].parse::<u64>().ok()? + fields[12].parse::<u64>().ok()?)
            })
            .sum()
    };
    let before = task("baton-engine");
    // Time has to pass for a spin to show; nothing is synchronised by it.
    std::thread::sleep(Duration::from_millis(300));
    // Other tests' engines share the thread name and may work meanwhile; a spin of
    // this one alone would cost 30 ticks.
    assert!(task("baton-engine") <= before + 25);
    engine.stop();
}
