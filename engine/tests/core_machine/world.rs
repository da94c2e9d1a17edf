//! A decode engine, a prefill engine and their clients, driven step by step.
//!
//! The world plays both workers and the data lane: it starts a prefill when blocks
//! are reserved, copies the bytes of each reported layer from one engine's memory to
//! the other's, commits, and releases late. Every token is compared with the oracle.

use std::collections::BTreeMap;

use baton_engine::api::{Command, Event, OrdinalRange, RequestKey, Submission, Work};
use baton_engine::config::Role;
use baton_engine::core::Progress;

use crate::client::{Client, Reported};
use crate::fake::{layout, oracle};
use crate::machine::{Machine, Sizes};

/// Both engines and all clients.
pub struct World {
    pub decode: Machine,
    pub prefill: Machine,
    pub clients: BTreeMap<u64, Client>,
    next: u64,
    /// Whether what arrives is said to be of another hash domain.
    pub foreign: bool,
    pub handoffs: u32,
    pub late_writes: u32,
}

impl World {
    pub fn new(decode: &Sizes, prefill: &Sizes) -> Self {
        Self {
            decode: Machine::new(Role::Decode, decode),
            prefill: Machine::new(Role::Prefill, prefill),
            clients: BTreeMap::new(),
            next: 1,
            foreign: false,
            handoffs: 0,
            late_writes: 0,
        }
    }

    /// A request arrives. `forced` gives, per choice, how much of its output the
    /// client already has (clamped to what there is).
    pub fn arrive(
        &mut self,
        mut submission: Submission,
        forced: &[usize],
        lazy: bool,
        delay: u32,
    ) -> u64 {
        let key = self.next;
        self.next += 1;
        submission.key = RequestKey(key);
        submission.forced = Vec::new();
        let expected = oracle(&submission);
        let count = expected.len();
        let mut have = vec![0; count];
        if !forced.is_empty() {
            for (choice, have) in have.iter_mut().enumerate() {
                *have = forced[choice % forced.len()].min(expected[choice].tokens.len());
            }
            submission.forced = expected
                .iter()
                .zip(&have)
                .map(|(expected, have)| expected.tokens[..*have].iter().map(|t| t.id).collect())
                .collect();
        }
        let client = Client {
            submission: submission.clone(),
            expected,
            forced: have,
            got: vec![Vec::new(); count],
            finished: vec![None; count],
            choice_cancelled: vec![false; count],
            cancelled: false,
            rejected: None,
            accepted: [0; 2],
            released: [0; 2],
            reserved: Vec::new(),
            reported: Vec::new(),
            sent: Vec::new(),
            lazy,
            release_p_in: None,
            release_d_in: None,
            d_lent: false,
            cached: 0,
            preset_delay: delay,
        };
        self.clients.insert(key, client);
        self.decode.submit(submission);
        self.deliver();
        key
    }

    pub fn cancel(&mut self, key: u64) {
        self.send_cancel(key);
        self.deliver();
    }

    pub fn cancel_recent(&mut self, back: u64) {
        self.cancel(self.next.saturating_sub(1 + back));
    }

    fn send_cancel(&mut self, key: u64) {
        let Some(client) = self.clients.get_mut(&key) else {
            return;
        };
        if client.cancelled {
            return;
        }
        client.cancelled = true;
        client.release_d_in = Some(client.preset_delay);
        client.release_p_in = Some(client.preset_delay);
        // The news may reach the prefill worker late: until then it goes on writing.
        let late = !client.lazy;
        self.decode.send(Command::Cancel {
            key: RequestKey(key),
        });
        if !late {
            self.prefill.send(Command::Cancel {
                key: RequestKey(key),
            });
        }
    }

    pub fn cancel_choice(&mut self, key: u64, choice: u32) {
        let Some(client) = self.clients.get_mut(&key) else {
            return;
        };
        let choice = choice % client.got.len() as u32;
        if client.finished[choice as usize].is_none() {
            client.choice_cancelled[choice as usize] = true;
        }
        self.decode.send(Command::CancelChoice {
            key: RequestKey(key),
            choice,
        });
        self.deliver();
    }

    pub fn pause(&mut self, key: u64, choice: u32, paused: bool) {
        self.decode.send(Command::Pause {
            key: RequestKey(key),
            choice,
            paused,
        });
    }

    /// One step of each engine and all that follows from it. Whether anything happened.
    pub fn round(&mut self) -> bool {
        let prefill = self.prefill.step();
        self.deliver();
        let decode = self.decode.step();
        self.deliver();
        let mut timers = false;
        for key in self.clients.keys().copied().collect::<Vec<_>>() {
            let client = self.clients.get_mut(&key).unwrap();
            let mut due = [false; 2];
            for (timer, due) in [&mut client.release_d_in, &mut client.release_p_in]
                .into_iter()
                .zip(&mut due)
            {
                match timer {
                    Some(0) => (*timer, *due) = (None, true),
                    Some(left) => *left -= 1,
                    None => continue,
                }
                timers = true;
            }
            if due[0] {
                client.d_lent = false;
                self.decode.send(Command::Release {
                    key: RequestKey(key),
                });
            }
            if due[1] {
                self.check_sent(key);
                self.prefill.send(Command::Release {
                    key: RequestKey(key),
                });
            }
            self.deliver();
        }
        timers || prefill == Progress::Worked || decode == Progress::Worked
    }

    /// Lets everybody go on, runs to the end and checks every client and block.
    pub fn finish(&mut self) {
        for (key, client) in &self.clients {
            for choice in 0..client.got.len() as u32 {
                self.decode.send(Command::Pause {
                    key: RequestKey(*key),
                    choice,
                    paused: false,
                });
            }
        }
        let mut rounds = 0;
        while self.round() {
            rounds += 1;
            assert!(
                rounds < 20_000,
                "no end: {:?} {:?}",
                self.decode.load(),
                self.prefill.load()
            );
        }
        for (key, client) in &self.clients {
            client.check(*key);
        }
        self.decode.assert_nothing_held();
        self.prefill.assert_nothing_held();
    }

    fn deliver(&mut self) {
        loop {
            let decode = self.decode.take_events();
            let prefill = self.prefill.take_events();
            if decode.is_empty() && prefill.is_empty() {
                return;
            }
            for event in decode {
                self.on_decode(event);
            }
            for event in prefill {
                self.on_prefill(event);
            }
        }
    }

    fn client(&mut self, key: RequestKey) -> &mut Client {
        self.clients
            .get_mut(&key.0)
            .expect("an event names a known request")
    }

    fn on_decode(&mut self, event: Event) {
        match event {
            Event::Accepted { key } => self.client(key).accepted[0] += 1,
            Event::Rejected { key, rejection } => self.client(key).rejected = Some(rejection),
            Event::Started { key, cached_tokens } => self.client(key).start(cached_tokens),
            Event::Reserved {
                key,
                groups,
                cached_tokens,
            } => {
                let client = self.client(key);
                client.start(cached_tokens);
                client.reserved.clone_from(&groups);
                client.d_lent = true;
                let ship = groups
                    .iter()
                    .map(|group| {
                        let first = group.blocks.first().map_or(0, |block| block.ordinal);
                        for (at, block) in group.blocks.iter().enumerate() {
                            assert_eq!(block.ordinal, first + at as u32, "ordinals are a run");
                        }
                        OrdinalRange {
                            group: group.group,
                            first,
                            count: group.blocks.len() as u32,
                        }
                    })
                    .filter(|range| range.count > 0)
                    .collect();
                let mut submission = client.submission.clone();
                submission.work = Work::Prefill { ship };
                submission.itl_target = None;
                if !client.cancelled {
                    self.prefill.submit(submission);
                }
            }
            Event::Tokens(tokens) => {
                assert!(!tokens.is_empty());
                for token in tokens {
                    let client = self.client(token.key);
                    client.on_token(token.choice, token.index, token.token);
                }
            }
            Event::Finished {
                key,
                choice,
                reason,
                output_tokens,
            } => {
                let client = self.client(key);
                let before = client.finished[choice as usize].replace((reason, output_tokens));
                assert_eq!(before, None, "a choice ends once");
            }
            Event::Failed { key, error } => {
                // The only way to fail here: the prefill engine refused the request.
                panic!("{key:?} failed: {error}");
            }
            Event::Released { key } => {
                let client = self.client(key);
                client.released[0] += 1;
                client.release_d_in = None;
                client.d_lent = false;
            }
            Event::Step(_) => {}
            other => panic!("a decode engine does not say {other:?}"),
        }
    }

    fn on_prefill(&mut self, event: Event) {
        match event {
            Event::Accepted { key } => self.client(key).accepted[1] += 1,
            Event::Rejected { key, .. } => {
                // The router would try elsewhere; here the request ends.
                self.send_cancel(key.0);
            }
            Event::Started { .. } | Event::Step(_) => {}
            Event::LayersReady {
                key,
                group,
                layer,
                blocks,
            } => {
                for (ordinal, block) in blocks {
                    let reported = (usize::from(group), ordinal, layer, block);
                    let client = self.client(key);
                    assert!(
                        !client
                            .reported
                            .iter()
                            .any(|r| (r.0, r.1, r.2) == (reported.0, ordinal, layer)),
                        "reported twice"
                    );
                    client.reported.push(reported);
                    let lazy = client.lazy;
                    let bytes = self.bytes_of(reported);
                    self.client(key).sent.push(bytes);
                    if !lazy {
                        self.copy(key.0, reported);
                    }
                }
            }
            Event::First { key, tokens, .. } => {
                let client = self.client(key);
                if client.cancelled {
                    return;
                }
                let wanted: usize = client
                    .reserved
                    .iter()
                    .map(|group| {
                        let layers = [2, 1][usize::from(group.group)];
                        group.blocks.len() * layers
                    })
                    .sum();
                assert_eq!(
                    client.reported.len(),
                    wanted,
                    "every shipped layer was reported"
                );
                for (choice, (token, reason)) in tokens.iter().enumerate() {
                    let forced = client.forced[choice];
                    let expected = &client.expected[choice];
                    if forced == expected.tokens.len() {
                        assert_eq!(*reason, Some(expected.reason), "an ended choice says so");
                    } else {
                        assert_eq!(*token, expected.tokens[forced], "the first token");
                        let last = forced + 1 == expected.tokens.len();
                        assert_eq!(*reason, last.then_some(expected.reason));
                    }
                }
                let delay = client.preset_delay;
                client.release_p_in = Some(delay);
                if client.lazy {
                    for reported in client.reported.clone() {
                        self.copy(key.0, reported);
                    }
                }
                self.handoffs += 1;
                let first = tokens.into_iter().map(|(token, _)| token).collect();
                self.decode.send(Command::Commit {
                    key,
                    first,
                    foreign: self.foreign,
                });
            }
            Event::Released { key } => {
                let client = self.client(key);
                client.released[1] += 1;
                client.release_p_in = None;
            }
            Event::Failed { key, error } => panic!("{key:?} failed: {error}"),
            other => panic!("a prefill engine does not say {other:?}"),
        }
    }

    /// The lane: one layer of one block, from one memory to the other, as long as the
    /// receiver has not released the blocks.
    fn copy(&mut self, key: u64, (group, ordinal, layer, block): Reported) {
        let client = &self.clients[&key];
        if !client.d_lent {
            return;
        }
        self.late_writes += u32::from(client.cancelled);
        let to = client.reserved[group]
            .blocks
            .iter()
            .find(|reserved| reserved.ordinal == ordinal)
            .expect("only reserved ordinals are shipped")
            .block;
        let index = layout(16).groups[group]
            .layers
            .iter()
            .position(|l| *l == layer)
            .unwrap();
        let bytes = self.prefill.bytes(group, block, index);
        self.decode.write(group, to, index, &bytes);
    }

    fn bytes_of(&self, (group, _, layer, block): Reported) -> Vec<u8> {
        let layers = &layout(16).groups[group].layers;
        let index = layers.iter().position(|l| *l == layer).unwrap();
        self.prefill.bytes(group, block, index)
    }

    /// Nothing changed a block between its report and its release.
    fn check_sent(&self, key: u64) {
        let client = &self.clients[&key];
        if client.released[1] > 0 {
            return;
        }
        for (reported, sent) in client.reported.iter().zip(&client.sent) {
            assert!(
                self.bytes_of(*reported) == *sent,
                "{reported:?} of request {key} was written after its report"
            );
        }
    }
}
