//! The conformance suite: what a handoff may never do, whatever happens to it.
//!
//! `cargo test -p baton-kv-transfer --test conformance` hurts handoffs in every way of
//! the table below and prints how they ended, with a closing line
//! `runs: N, wrong: 0, leaked: 0, hung: 0`. It fails unless the last three are 0 and
//! the sabotages (below) are noticed.
//!
//! - *wrong*: a request was completed with other bytes than the prefill worker's (each
//!   block is compared), or with another commit's payload; a lane touched a block that
//!   was free, or may have (a tracking allocator sees every access); the two ends differ
//!   about the end; a side ended twice; a kind that promises the right bytes, or an
//!   error, ended in the other;
//! - *leaked*: a block, grant, transfer or guard was left when everything was over;
//! - *hung*: a side had not ended by its deadline, or (in virtual time) its blocks were
//!   not back 2 s after the peer's death or 1 s after a cancel.
//!
//! | kind | `mem` × 50 | TCP × 10 | shared memory × 5, NIXL × 5 | ends in |
//! | --- | --- | --- | --- | --- |
//! | clean | yes | yes | | the right bytes |
//! | drop, duplicate, reorder | 1–3 frames of any kind, both ways | data, commit | | the right bytes |
//! | truncate | 1–3 frames of any kind; the connection ends, or goes on | data | | the right bytes |
//! | bit flip in payload, in header | any bit of 1–3 frames, both ways | data | | the right bytes |
//! | stale ticket | held in or behind a frame; revoked or superseded; the blocks reused; let go before, while or after the new owner's bytes come | held in a frame; let go with them | held in a copy; revoked; the blocks reused | the new owner's bytes |
//! | wrong epoch | in the target, or in 1–3 frames; attempts as well | in the target | | an error; the right bytes if only frames |
//! | sender killed at 25, 50, 75, 99 % | the process, or its host; half of the times another one takes over | its connections; as well | a real process, killed; as well | an error; the right bytes with another one |
//! | receiver killed | the process, or its host | its port and lanes | a real process, killed | an error |
//! | link cut and restored | up to three times, up to 3 s | once, up to 0.6 s | | the right bytes if shorter than the lease |
//! | blackhole | up to 3 s, or for ever | up to 0.6 s, or for ever | | the right bytes if short, else either |
//! | slow link | 1–3 s, up to 0.15 s away | up to 0.8 s | | the right bytes |
//! | cancel at every state | at any step, inside a read or write as well; by either side or both | at any time | at any time | either |
//! | lease end while reading | of either side; with the rest of a frame still to come | as well | of either side, in a copy | either |
//! | duplicate commit | twice, later again, or again because the answer was lost | as well | | the right bytes, once |
//! | layout mismatch | yes | yes | | an error, with no byte placed |
//!
//! Every kind also runs 10 times in memory between workers of other layouts (`relaid`), half
//! of them with parts that have another form on the wire.
//! There a damaged or fenced frame must not have touched a block at all.
//!
//! `mem` is one thread in virtual time ([`baton_kv_transfer::mem`]): a seed fixes every
//! delay, fault and turn, and the suite repeats some runs to see that it does. On TCP the
//! machine takes part; deadlines are generous, so that a busy one changes nothing.
//! Where memory is lent nothing travels that could be hurt but who holds what; over NIXL
//! (feature `nixl`, and its library) the same kinds run over the transports that UCX is told. Loopback shares
//! the state machines and the table of grants and has no wire to hurt.
//!
//! # What it would notice
//! The suite runs itself with the fence switched off (bytes of a lane that lost the right
//! to write go on into the blocks) and with the digest switched off (frame checksums and
//! the root digest do not count): the first over the stale tickets, the second over the
//! flipped payloads, each between equal and between unlike workers. Each must be found
//! *wrong* some of the times; the lines before the closing one say how often. The switches are [`Protections`], which have no fields
//! outside of tests. To see it fail like a build would, set one to `false` in
//! [`Protections::ALL`].
//!
//! # Longer
//! `conformance killed --runs 2000` kills for the better part of an hour. In memory 2,000 senders
//! each at 25, 50 and 75 %, 600 at 99 %, and 2,000 receivers died (half of the senders with
//! another one that took over): nothing wrong, leaked or hung. With `--runs 60`, 300 deaths
//! over TCP and 300 of real processes over lent memory lost nothing; nor did 300 runs in memory
//! each of the stale, cancel, cut, lease and duplicate kinds. `handoff`'s soak kept both cores
//! of a machine busy for ten minutes, at a load of 14, and took nobody for dead.
//!
//! # Arguments
//! `conformance [FILTER] [--seed N] [--runs N] [--list]`: only kinds whose
//! `transport::kind` contains FILTER; only the run with seed N; N runs of each kind.

mod books;
mod fabric;
mod job;
mod kinds;
mod mem;
#[cfg(feature = "nixl")]
#[path = "../nixl_library.rs"]
mod nixl_library;
mod pool;
mod relaid;
mod shm;
mod tcp;
mod verdict;
mod world;

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use baton_kv_transfer::receiver::Protections;
use fabric::Lending;
use kinds::Kind;
use verdict::{Row, Verdict};

const MEM_RUNS: u64 = 50;
const RELAID_RUNS: u64 = 10;
const TCP_RUNS: u64 = 10;
const SHM_RUNS: u64 = 5;
/// Runs over sockets at once: they wait most of the time.
const SOCKET_THREADS: usize = 8;
/// Runs that are repeated, to see that a seed fixes them.
const REPEATED: u64 = 3;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Over {
    Mem,
    /// The same with parts that are re-laid out on arrival.
    Relaid,
    Tcp,
    Shm,
    Nixl,
}

impl Over {
    const fn name(self) -> &'static str {
        match self {
            Self::Mem => "mem",
            Self::Relaid => "relaid",
            Self::Tcp => "tcp",
            Self::Shm => "shm",
            Self::Nixl => "nixl",
        }
    }

    /// One run; the first ones in memory twice.
    fn run(self, kind: Kind, seed: u64) -> Verdict {
        match self {
            Self::Mem => {}
            Self::Relaid => return mem::run(kind, relaid::SEEDS + seed, Protections::ALL),
            Self::Tcp => return tcp::run(kind, seed),
            Self::Shm => return shm::run(kind, seed, &Lending::SharedMemory),
            #[cfg(feature = "nixl")]
            Self::Nixl => {
                let library = nixl_library::library().unwrap();
                return shm::run(kind, seed, &Lending::Nixl(library));
            }
            #[cfg(not(feature = "nixl"))]
            Self::Nixl => panic!("built without it"),
        }
        let run = || mem::run(kind, seed, Protections::ALL);
        let mut verdict = run();
        if seed < REPEATED && run().trace != verdict.trace {
            let text = "the same seed did something else";
            verdict.wrong.push(text.to_owned());
        }
        verdict
    }

    /// Every run, several at a time; each kind's seconds are those of its runs together.
    fn run_all(self, kinds: &[Kind], seeds: &[u64]) -> Vec<(Kind, Row, f64)> {
        let threads = match self {
            // Agents take a processor while they start.
            Self::Mem | Self::Relaid | Self::Nixl => {
                std::thread::available_parallelism().map_or(1, usize::from)
            }
            Self::Tcp | Self::Shm => SOCKET_THREADS,
        };
        let runs: Vec<(usize, u64)> = (0..kinds.len())
            .flat_map(|kind| seeds.iter().map(move |seed| (kind, *seed)))
            .collect();
        let rows: Vec<Mutex<(Row, f64)>> = kinds.iter().map(|_| Mutex::default()).collect();
        let next = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while let Some(&(kind, seed)) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let started = Instant::now();
                        let verdict = self.run(kinds[kind], seed);
                        let mut row = rows[kind].lock().unwrap();
                        row.0.add(seed, verdict);
                        row.1 += started.elapsed().as_secs_f64();
                    }
                });
            }
        });
        let rows = rows.into_iter().map(|row| row.into_inner().unwrap());
        let rows = kinds.iter().copied().zip(rows);
        rows.map(|(kind, (row, seconds))| (kind, row, seconds))
            .collect()
    }
}

#[derive(Default)]
struct Arguments {
    filters: Vec<String>,
    seed: Option<u64>,
    runs: Option<u64>,
    list: bool,
    ignored: bool,
}

impl Arguments {
    /// Also takes what test runners pass to every test binary.
    fn parse() -> Self {
        let mut found = Self::default();
        let mut args = std::env::args().skip(1);
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "--list" => found.list = true,
                "--ignored" => found.ignored = true,
                "--seed" => found.seed = args.next().and_then(|seed| seed.parse().ok()),
                "--runs" => found.runs = args.next().and_then(|runs| runs.parse().ok()),
                "--format" | "--test-threads" | "--color" | "--skip" | "-Z" => drop(args.next()),
                flag if flag.starts_with('-') => {}
                filter => found.filters.push(filter.to_owned()),
            }
        }
        found
    }

    fn wants(&self, name: &str) -> bool {
        // `conformance` is what a runner knows the whole suite by.
        let whole = |filter: &String| filter.as_str() == "conformance" || name.contains(filter);
        self.filters.is_empty() || self.filters.iter().any(whole)
    }

    fn seeds(&self, runs: u64) -> Vec<u64> {
        match self.seed {
            Some(seed) => vec![seed],
            None => (0..self.runs.unwrap_or(runs)).collect(),
        }
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.split_first() {
        Some((role, rest)) if role == shm::PREFILL => shm::be_prefill(rest),
        Some((role, rest)) if role == shm::DECODE => shm::be_decode(rest),
        _ => {}
    }
    let arguments = Arguments::parse();
    if arguments.list {
        if !arguments.ignored {
            println!("conformance: test");
        }
        return ExitCode::SUCCESS;
    }
    let wanted = |over: Over| {
        let name = move |kind: &Kind| format!("{}::{}", over.name(), kind.name());
        let all: &[Kind] = match over {
            Over::Mem | Over::Relaid | Over::Tcp => &Kind::ALL,
            Over::Shm => &shm::KINDS,
            Over::Nixl if !has_nixl() => &[],
            Over::Nixl => &shm::KINDS,
        };
        let kinds = all.iter().copied();
        let kinds: Vec<Kind> = kinds.filter(|kind| arguments.wants(&name(kind))).collect();
        kinds
    };
    let transports = [
        (Over::Mem, MEM_RUNS),
        (Over::Relaid, RELAID_RUNS),
        (Over::Tcp, TCP_RUNS),
        (Over::Shm, SHM_RUNS),
        (Over::Nixl, SHM_RUNS),
    ];
    if arguments.ignored || transports.iter().all(|(over, _)| wanted(*over).is_empty()) {
        println!("test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out");
        return ExitCode::SUCCESS;
    }
    println!(
        "over   kind                     runs   hit right error wrong leaked hung  seconds  errors (receiver/sender)"
    );
    let mut rows = Vec::new();
    for (over, runs) in transports {
        let kinds = wanted(over);
        let seeds = arguments.seeds(runs);
        let started = Instant::now();
        for (kind, row, seconds) in over.run_all(&kinds, &seeds) {
            print(over, kind, &row, seconds);
            rows.push(row);
        }
        println!(
            "{} took {:.1} s",
            over.name(),
            started.elapsed().as_secs_f64()
        );
    }
    let (mut blind, mut checks) = (0, rows.len());
    if arguments.seed.is_none() && arguments.filters.is_empty() {
        for over in [Over::Mem, Over::Relaid] {
            checks += 2;
            blind += usize::from(!is_noticed(over, "fence", Kind::StaleTicket, |off| {
                off.fence = false
            }));
            blind += usize::from(!is_noticed(over, "digest", Kind::FlipPayload, |off| {
                off.digest = false
            }));
        }
    }
    let sum = |of: fn(&Row) -> usize| rows.iter().map(of).sum::<usize>();
    let (wrong, leaked, hung) = (sum(|r| r.wrong), sum(|r| r.leaked), sum(|r| r.hung));
    let failed = rows.iter().filter(|row| !row.bad.is_empty()).count() + blind;
    let ok = if failed == 0 { "ok" } else { "FAILED" };
    let passed = checks - failed;
    println!(
        "test result: {ok}. {passed} passed; {failed} failed; 0 ignored; 0 measured; 0 filtered out"
    );
    println!(
        "runs: {}, wrong: {wrong}, leaked: {leaked}, hung: {hung}",
        sum(|r| r.runs)
    );
    ExitCode::from(u8::from(failed > 0))
}

fn print(over: Over, kind: Kind, row: &Row, seconds: f64) {
    let errors: Vec<String> = row
        .errors
        .iter()
        .map(|(what, count)| format!("{what} {count}"))
        .collect();
    println!(
        "{:<6} {:<24} {:>4} {:>5} {:>5} {:>5} {:>5} {:>6} {:>4} {seconds:>8.2}  {}",
        over.name(),
        kind.name(),
        row.runs,
        row.hit,
        row.right,
        row.errors.values().sum::<usize>(),
        row.wrong,
        row.leaked,
        row.hung,
        errors.join(", ")
    );
    for (seed, verdict) in &row.bad {
        println!("      --seed {seed}: {:?}", verdict.ending);
        for (what, found) in [
            ("wrong", &verdict.wrong),
            ("leaked", &verdict.leaked),
            ("hung", &verdict.hung),
        ] {
            found
                .iter()
                .take(5)
                .for_each(|text| println!("        {what}: {text}"));
        }
    }
}

/// Whether NIXL is built in and installed.
fn has_nixl() -> bool {
    #[cfg(feature = "nixl")]
    return nixl_library::library().is_some();
    #[cfg(not(feature = "nixl"))]
    false
}

/// Whether runs without a protection are found wrong.
fn is_noticed(over: Over, name: &str, kind: Kind, switch_off: impl Fn(&mut Protections)) -> bool {
    let mut protections = Protections::ALL;
    switch_off(&mut protections);
    let first = if over == Over::Relaid {
        relaid::SEEDS
    } else {
        0
    };
    let runs = (first..first + MEM_RUNS).map(|seed| mem::run(kind, seed, protections));
    let wrong = runs.filter(|verdict| !verdict.wrong.is_empty()).count();
    println!(
        "without the {name}: {MEM_RUNS} runs of `{}::{}`, wrong: {wrong} (must not be 0)",
        over.name(),
        kind.name()
    );
    wrong > 0
}
