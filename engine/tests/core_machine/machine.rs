//! One engine without a thread, driven command by command and step by step.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_engine::api::{Command, Event, EventSink, Load, Submission};
use baton_engine::config::{EngineConfig, Limits, PoolSize, Role};
use baton_engine::core::{Core, Progress};
use baton_engine::kv::KvMemory;

use crate::fake::{FakeExecutor, Tally, facts, layout};

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
    /// Foretold steps take a second per token; `None` keeps no target.
    pub itl_target: Option<Duration>,
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
            itl_target: None,
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
            itl_target: sizes.itl_target,
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
        executor.seconds_per_token = Some(1);
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
    pub fn bytes(&self, group: usize, block: u32, index: usize) -> Vec<u8> {
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

    pub fn write(&mut self, group: usize, block: u32, index: usize, bytes: &[u8]) {
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
