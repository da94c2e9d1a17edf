//! The kinds that make sense where memory is lent, mapped or over NIXL, and nothing travels
//! that could be hurt: processes that die (real ones, killed), cancels, leases and stale
//! tickets.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use baton_kv_transfer::receiver::{
    BlockGrant, GrantRequest, GroupGrant, Receiver, ReceiverConfig, Senders,
};
use baton_kv_transfer::sender::{LaneTarget, Sender, SenderConfig, SourceBlock};
use baton_kv_transfer::{DataPort, DataPortConfig, LaneKey, ProcessToken, Ticket};
use baton_proto::{Attempt, RequestId};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::fabric::{Leases, Lending};
use crate::job::{Content, Plan, Remote};
use crate::kinds::Kind;
use crate::pool::Pool;
use crate::verdict::{Ending, Verdict};
use crate::world::{EPOCH, LAYOUT, World, poll_once};

/// What the suite starts itself with to be the other process.
pub const PREFILL: &str = "--be-prefill";
pub const DECODE: &str = "--be-decode";

pub const KINDS: [Kind; 8] = [
    Kind::StaleTicket,
    Kind::SenderKilled(25),
    Kind::SenderKilled(50),
    Kind::SenderKilled(75),
    Kind::SenderKilled(99),
    Kind::ReceiverKilled,
    Kind::Cancel,
    Kind::LeaseEnd,
];

/// One run of one kind.
pub fn run(kind: Kind, seed: u64, by: &Lending) -> Verdict {
    let mut rng = StdRng::seed_from_u64(seed ^ 0x00c0_ffee);
    let rng = &mut rng;
    match kind {
        Kind::StaleTicket => stale_ticket(seed, rng, by),
        Kind::SenderKilled(percent) => sender_killed(seed, rng, by, percent),
        Kind::ReceiverKilled => receiver_killed(seed, rng, by),
        Kind::Cancel => cancel(seed, rng, by),
        Kind::LeaseEnd => lease_end(seed, rng, by),
        other => panic!("`{}` is not for lent memory", other.name()),
    }
}

fn begin(seed: u64, by: &Lending, shape: impl FnOnce(&mut World, &mut Plan)) -> (World, usize) {
    let mut world = World::over_lent_memory(seed, Leases::LONG, by);
    if by.is_slow_to_start() {
        // The deadlines of a run are for its copies, not for its lane's first seconds.
        let plan = Plan::new(1, &mut world.rng);
        let first = world.start(0, plan);
        world.run(|world| world.jobs[first].is_over());
    }
    let blocks = world.blocks();
    let mut plan = Plan::new(blocks, &mut world.rng);
    shape(&mut world, &mut plan);
    let main = world.start(0, plan);
    (world, main)
}

/// A copy is held under its guard; its reservation is given up, and comes back only when
/// the copy is done. The rest of the attempt's offers find another owner's blocks.
fn stale_ticket(seed: u64, rng: &mut StdRng, by: &Lending) -> Verdict {
    let (mut world, stale) = begin(seed, by, |world, plan| {
        let parts = world.source.layers as usize * plan.blocks;
        world
            .destination
            .hold_write(rng.random_range(0..parts as u64));
    });
    world.run(|world| world.destination.is_holding());
    let hit = !world.jobs[stale].is_over();
    world.revoke(stale);
    let soon = world.now() + Duration::from_millis(10);
    world.run_to(soon);
    let early = world.destination.is_holding() && world.jobs[stale].receiver_back.is_some();
    world.destination.release();
    world.run(|world| world.jobs[stale].receiver_back.is_some());
    let blocks = world.jobs[stale].destination_blocks.clone();
    world.destination.take_these(&blocks);
    let plan = Plan::new(blocks.len(), &mut world.rng);
    let other = world.add_sender();
    let new = world.start_on(other, plan, blocks);
    let mut verdict = world.finish(new);
    verdict.hit = hit;
    verdict.expect(true);
    if early {
        let text = "blocks came back under a guard";
        verdict.wrong.push(text.to_owned());
    }
    verdict
}

/// What a prefill worker of this seed has; it and the suite compute it alike.
fn content(
    seed: u64,
    by: &Lending,
    blocks: usize,
    layers: u32,
    part_bytes: u32,
) -> (Pool, Vec<u32>, Content) {
    let pool = by.pool(blocks, layers, part_bytes);
    let mut rng = StdRng::seed_from_u64(seed);
    let taken = pool.take(blocks, &mut rng);
    let content = pool.fill(&taken, &mut rng);
    (pool, taken, content)
}

fn start(role: &str, arguments: &[String]) -> Child {
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new(program);
    command.arg(role).args(arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command.spawn().unwrap()
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

fn sender_killed(seed: u64, rng: &mut StdRng, by: &Lending, percent: u64) -> Verdict {
    let mut world = World::over_lent_memory(seed, Leases::SHORT, by);
    let blocks = world.blocks();
    let (layers, part_bytes) = (world.source.layers, world.source.part_bytes);
    let (_, _, content) = content(seed, by, blocks, layers, part_bytes);
    let plan = Plan::new(blocks, &mut world.rng);
    let (main, ticket, ordinals) = world.start_remote(plan, content);
    let receiver = world.receiver.clone().unwrap();
    let ordinals: Vec<String> = ordinals.iter().map(u32::to_string).collect();
    let child = start(
        PREFILL,
        &[
            format!("{:x}", receiver.process_token().0),
            hex(&receiver.lane_key().0),
            format!("{:x}", ticket.0),
            seed.to_string(),
            layers.to_string(),
            part_bytes.to_string(),
            ordinals.join(","),
            by.name(),
            world.address.to_string(),
        ],
    );
    let parts = u64::from(layers) * blocks as u64;
    let at = (parts * percent).div_ceil(100);
    world.run(|_| {
        let progress = receiver.progress(ticket);
        progress.is_none_or(|progress| progress.parts_received >= at)
    });
    drop(receiver);
    let hit = world.jobs[main].opened && !world.jobs[main].is_over();
    kill(child);
    let again = if rng.random() {
        world.add_sender();
        world.regrant(main, 1, rng.random())
    } else {
        None
    };
    let mut verdict = world.finish(again.unwrap_or(main));
    verdict.hit = hit;
    if again.is_none() {
        verdict.expect(false);
    }
    verdict
}

fn receiver_killed(seed: u64, rng: &mut StdRng, by: &Lending) -> Verdict {
    let mut world = World::over_lent_memory(seed, Leases::SHORT, by);
    let blocks = world.blocks();
    let (layers, part_bytes) = (world.source.layers, world.source.part_bytes);
    let arguments = [
        blocks.to_string(),
        layers.to_string(),
        part_bytes.to_string(),
        by.name(),
    ];
    let mut child = start(DECODE, &arguments);
    let mut line = String::new();
    let mut said = BufReader::new(child.stdout.take().unwrap());
    said.read_line(&mut line).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    let remote = Remote {
        process_token: ProcessToken(u128::from_str_radix(words[0], 16).unwrap()),
        lane_key: LaneKey(unhex(words[1])),
        ticket: Ticket(u128::from_str_radix(words[2], 16).unwrap()),
        address: words[3].parse().unwrap(),
    };
    let mut plan = Plan::new(blocks, &mut world.rng);
    plan.pushes_over = Duration::from_millis(100);
    plan.commit_after = None;
    let main = world.start_to_remote(plan, (0..blocks as u32).collect(), remote);
    let later = world.now() + Duration::from_millis(rng.random_range(0..120));
    world.run_to(later);
    kill(child);
    let mut verdict = world.finish(main);
    verdict.hit = true;
    verdict.expect(false);
    verdict
}

fn cancel(seed: u64, rng: &mut StdRng, by: &Lending) -> Verdict {
    let (mut world, main) = begin(seed, by, |_, plan| {
        plan.pushes_over = Duration::from_millis(60);
        plan.commit_after = Some(plan.pushes_over);
    });
    let later = world.now() + Duration::from_micros(rng.random_range(0..60_000));
    world.run_to(later);
    let hit = world.jobs[main].receiver_end.is_none();
    match rng.random_range(0..3) {
        0 => world.abort(main),
        1 => world.revoke(main),
        _ => {
            world.abort(main);
            world.revoke(main);
        }
    }
    let mut verdict = world.finish(main);
    verdict.hit = hit;
    verdict
}

/// A deadline passes while a copy is held under its guard.
fn lease_end(seed: u64, rng: &mut StdRng, by: &Lending) -> Verdict {
    let part_way = Duration::from_millis(rng.random_range(50..200));
    let receivers = rng.random();
    let (mut world, main) = begin(seed, by, |world, plan| {
        if receivers {
            plan.deadline = part_way;
        } else {
            plan.sent_deadline = part_way;
            plan.commit_after = None;
        }
        world.destination.hold_write(0);
    });
    world.run(|world| world.destination.is_holding());
    let past = world.now() + part_way + Duration::from_millis(50);
    world.run_to(past);
    let held = world.destination.is_holding();
    let job = &world.jobs[main];
    // Nothing of either side comes back under the copy.
    let early = held && (job.receiver_back.is_some() || job.sender_back.is_some());
    world.destination.release();
    let mut verdict = world.finish(main);
    verdict.hit = held && verdict.ending != Some(Ending::Right);
    if early {
        let text = "blocks came back under a guard";
        verdict.wrong.push(text.to_owned());
    }
    verdict
}

/// What another process does, too.
fn lending(name: &str) -> Lending {
    match name {
        "SharedMemory" => Lending::SharedMemory,
        #[cfg(feature = "nixl")]
        "Nixl" => Lending::Nixl(crate::nixl_library::library().unwrap()),
        other => panic!("`{other}` is no way to lend memory"),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> [u8; 32] {
    let byte = |at: usize| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap();
    std::array::from_fn(byte)
}

/// The other process of [`sender_killed`]: pushes slowly, never commits, waits to be killed.
pub fn be_prefill(arguments: &[String]) -> ! {
    let number = |at: usize| arguments[at].parse::<u64>().unwrap();
    let ordinals = arguments[6]
        .split(',')
        .map(|ordinal| ordinal.parse().unwrap());
    let ordinals: Vec<u32> = ordinals.collect();
    let (layers, part_bytes) = (number(4) as u32, number(5) as u32);
    let by = lending(&arguments[7]);
    let (pool, blocks, _) = content(number(3), &by, ordinals.len(), layers, part_bytes);
    let mut config = SenderConfig::new(vec![pool.region()]);
    by.sender(&mut config);
    by.be_patient(&mut config);
    let sender = Sender::start(config);
    let target = LaneTarget {
        data_address: Some(arguments[8].parse().unwrap()),
        server_name: None,
        process_token: ProcessToken(u128::from_str_radix(&arguments[0], 16).unwrap()),
        lane_key: LaneKey(unhex(&arguments[1])),
        ticket: Ticket(u128::from_str_radix(&arguments[2], 16).unwrap()),
        epoch: EPOCH,
        attempt: Attempt(1),
        request_id: RequestId::from("r"),
        deadline: Duration::from_secs(20),
    };
    let transfer = sender.open(target, LAYOUT).unwrap();
    for layer in 0..layers {
        for (ordinal, block) in ordinals.iter().zip(&blocks) {
            let block = SourceBlock {
                ordinal: *ordinal,
                extent: pool.extent(*block, layer),
            };
            let _ = poll_once(transfer.push(0, layer, &[block]));
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    wait_to_be_killed()
}

/// The other process of [`receiver_killed`].
pub fn be_decode(arguments: &[String]) -> ! {
    let number = |at: usize| arguments[at].parse::<u32>().unwrap();
    let (blocks, layers) = (number(0), number(1));
    let pool = Pool::new(blocks as usize, layers, number(2));
    let taken: Vec<u32> = (0..blocks).collect();
    pool.take_these(&taken);
    let config = ReceiverConfig::new(EPOCH, LAYOUT, vec![pool.region()]);
    let receiver = Receiver::start(config, Box::new(|_| {})).unwrap();
    let mut port = DataPortConfig::default();
    lending(&arguments[3]).port(&mut port);
    let port = DataPort::bind(port, receiver.clone()).unwrap();
    let block = |block: &u32| BlockGrant {
        ordinal: *block,
        layers: (0..layers)
            .map(|layer| pool.extent(*block, layer))
            .collect(),
    };
    let request = GrantRequest {
        request_id: RequestId::from("r"),
        attempt: Attempt(1),
        epoch: EPOCH,
        groups: vec![GroupGrant {
            group: 0,
            layers: (0..layers).collect(),
            blocks: taken.iter().map(block).collect(),
        }],
        senders: Senders::SameLayout,
        deadline: Duration::from_secs(20),
    };
    let ticket = receiver.grant(request).unwrap().ticket;
    println!(
        "{:x} {} {:x} {}",
        receiver.process_token().0,
        hex(&receiver.lane_key().0),
        ticket.0,
        port.local_address()
    );
    std::io::stdout().flush().unwrap();
    wait_to_be_killed()
}

/// Ends with the suite, should that be killed first.
fn wait_to_be_killed() -> ! {
    let mut line = String::new();
    let _ = std::io::stdin().read_line(&mut line);
    std::process::exit(0)
}
