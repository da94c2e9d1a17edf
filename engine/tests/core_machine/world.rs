//! A decode engine, a prefill engine and their clients, driven step by step.
//!
//! The world plays both workers and the data lane: it starts a prefill when blocks
//! are reserved, copies the bytes of each reported layer from one engine's memory to
//! the other's, commits, and releases late. Every token is compared with the oracle.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_engine::api::{
    Command, Event, EventSink, GroupReservation, Load, OrdinalRange, Rejection, RequestKey,
    Submission, Work,
};
use baton_engine::config::{EngineConfig, Limits, PoolSize, Role};
use baton_engine::core::{Core, Progress};
use baton_engine::kv::KvMemory;
use baton_proto::sampling::{FinishReason, SampledToken};

use crate::fake::{Expected, FakeExecutor, Tally, facts, layout, oracle};

/// One engine without a thread.
pub struct Machine {
    pub core: Core,
    pub memory: Arc<KvMemory>,
    pub tally: Arc<Tally>,
    pub load: Arc<Mutex<Load>>,
    events: Arc<Mutex<Vec<Event>>>,
    now: Duration,
}

struct Sink(Arc<Mutex<Vec<Event>>>);

impl EventSink for Sink {
    fn emit(&mut self, event: Event) {
        self.0.lock().unwrap().push(event);
    }
}

/// The sizes of one engine.
#[derive(Clone, Debug)]
pub struct Sizes {
    pub block_size: u32,
    pub full_blocks: u32,
    pub window_blocks: u32,
    pub chunk_tokens: u32,
    pub sequences_max: u32,
    pub prefix_cache: bool,
}

impl Sizes {
    pub fn new(block_size: u32, full_blocks: u32) -> Self {
        Self {
            block_size,
            full_blocks,
            window_blocks: 64,
            chunk_tokens: 32,
            sequences_max: 8,
            prefix_cache: true,
        }
    }
}

pub fn config(role: Role, sizes: &Sizes) -> EngineConfig {
    EngineConfig {
        block_size: sizes.block_size,
        pool: PoolSize::Tokens(1),
        prefix_cache: sizes.prefix_cache,
        limits: Limits {
            chunk_tokens: sizes.chunk_tokens,
            step_tokens_max: sizes.chunk_tokens + sizes.sequences_max,
            sequences_max: sizes.sequences_max,
            growth_blocks: 2,
            ..Limits::default()
        },
        ..EngineConfig::new(role, "fake")
    }
}

impl Machine {
    pub fn new(role: Role, sizes: &Sizes) -> Self {
        Self::with(role, sizes, |_, _| {})
    }

    pub fn with(
        role: Role,
        sizes: &Sizes,
        change: impl FnOnce(&mut EngineConfig, &mut FakeExecutor),
    ) -> Self {
        let layout = layout(sizes.block_size);
        let memory =
            KvMemory::allocate(layout.clone(), &[sizes.full_blocks, sizes.window_blocks]).unwrap();
        let tally = Arc::<Tally>::default();
        let load = Arc::<Mutex<Load>>::default();
        let events = Arc::<Mutex<Vec<Event>>>::default();
        let mut executor = FakeExecutor::new(&memory, &tally);
        let mut config = config(role, sizes);
        change(&mut config, &mut executor);
        let core = Core::new(
            Box::new(executor),
            facts(&layout),
            &memory,
            &config,
            Box::new(Sink(Arc::clone(&events))),
            Arc::clone(&load),
        )
        .unwrap();
        Self {
            core,
            memory,
            tally,
            load,
            events,
            now: Duration::ZERO,
        }
    }

    pub fn send(&mut self, command: Command) {
        self.core.handle(command, self.now);
        self.core.check_integrity();
    }

    pub fn submit(&mut self, submission: Submission) {
        self.send(Command::Submit(Box::new(submission)));
    }

    pub fn step(&mut self) -> Progress {
        self.now += Duration::from_millis(10);
        let progress = self.core.step(self.now, &mut |_| {}).unwrap();
        self.core.check_integrity();
        progress
    }

    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut *self.events.lock().unwrap())
    }

    /// Runs until nothing is left to do and returns everything that was said.
    pub fn run(&mut self) -> Vec<Event> {
        for _ in 0..20_000 {
            if self.step() == Progress::Idle {
                return self.take_events();
            }
        }
        panic!("no end after 20000 steps: {:?}", self.load());
    }

    pub fn load(&self) -> Load {
        self.load.lock().unwrap().clone()
    }

    /// Nothing is held: every block is free or cached, and free once the cache is cleared.
    pub fn assert_nothing_held(&mut self) {
        for counts in self.load().blocks {
            assert_eq!(counts.free + counts.cached, counts.total, "{counts:?}");
        }
        self.send(Command::ClearCache);
        for counts in self.load().blocks {
            assert_eq!(counts.free, counts.total, "{counts:?}");
        }
        let load = self.load();
        assert_eq!((load.requests_running, load.requests_waiting), (0, 0));
    }

    /// The bytes of one layer of one block.
    fn bytes(&self, group: usize, block: u32, index: usize) -> Vec<u8> {
        let extent = self.memory.extent(group, block, index);
        let mut bytes = vec![0; extent.len as usize];
        // SAFETY: an extent is inside its region, and this thread alone uses the pools.
        unsafe {
            let from = self
                .memory
                .region(group)
                .ptr
                .as_ptr()
                .add(extent.offset as usize);
            std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len());
        }
        bytes
    }

    fn write(&mut self, group: usize, block: u32, index: usize, bytes: &[u8]) {
        let extent = self.memory.extent(group, block, index);
        assert_eq!(extent.len as usize, bytes.len());
        // SAFETY: as above.
        unsafe {
            let to = self
                .memory
                .region(group)
                .ptr
                .as_ptr()
                .add(extent.offset as usize);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }
}

/// A block of the prefill engine that was reported: (group, ordinal, layer, block).
type Reported = (usize, u32, u32, u32);

/// One request as its client and its two workers see it.
pub struct Client {
    pub submission: Submission,
    pub expected: Vec<Expected>,
    forced: Vec<usize>,
    got: Vec<Vec<SampledToken>>,
    finished: Vec<Option<(FinishReason, u32)>>,
    choice_cancelled: Vec<bool>,
    pub cancelled: bool,
    pub rejected: Option<Rejection>,
    accepted: [u32; 2],
    released: [u32; 2],
    reserved: Vec<GroupReservation>,
    reported: Vec<Reported>,
    /// The bytes of everything reported, as they were then.
    sent: Vec<Vec<u8>>,
    /// Copy layer by layer as reported, or all at once with the first token.
    lazy: bool,
    /// Rounds until the prefill engine may drop the blocks, once it may.
    release_p_in: Option<u32>,
    release_d_in: Option<u32>,
    d_lent: bool,
    pub cached: u32,
    pub preset_delay: u32,
}

/// Both engines and all clients.
pub struct World {
    pub decode: Machine,
    pub prefill: Machine,
    pub clients: BTreeMap<u64, Client>,
    next: u64,
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
                self.decode.send(Command::Commit { key, first });
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

impl Client {
    fn start(&mut self, cached: u32) {
        self.cached = cached;
        assert!((cached as usize) < self.submission.prompt.len());
        assert!(self.submission.use_cache || cached == 0);
    }

    fn on_token(&mut self, choice: u32, index: u32, token: SampledToken) {
        let at = choice as usize;
        assert_eq!(
            index as usize,
            self.forced[at] + self.got[at].len(),
            "tokens come in order"
        );
        assert!(self.finished[at].is_none(), "no token after the end");
        let expected = &self.expected[at].tokens[index as usize];
        assert_eq!(
            &token, expected,
            "request {:?} choice {choice} index {index}",
            self.submission.key
        );
        self.got[at].push(token);
    }

    fn check(&self, key: u64) {
        if self.rejected.is_some() {
            assert_eq!((self.accepted[0], self.released[0]), (0, 0));
            return;
        }
        assert_eq!(
            (self.accepted[0], self.released[0]),
            (1, 1),
            "request {key} on decode"
        );
        assert_eq!(
            self.accepted[1], self.released[1],
            "request {key} on prefill"
        );
        if self.cancelled {
            return;
        }
        for (choice, expected) in self.expected.iter().enumerate() {
            let (reason, count) = self.finished[choice].expect("every choice ends");
            let have = self.forced[choice] + self.got[choice].len();
            assert_eq!(count as usize, have);
            if reason == FinishReason::Cancelled {
                assert!(self.choice_cancelled[choice]);
            } else {
                assert_eq!(reason, expected.reason, "request {key} choice {choice}");
                assert_eq!(have, expected.tokens.len(), "request {key} choice {choice}");
            }
        }
    }
}
