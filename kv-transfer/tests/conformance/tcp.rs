//! The kinds over real sockets, threads and time, through the fault proxy. Less of each
//! can be steered than in memory, and nothing depends on how fast the machine is.

use std::time::Duration;

use baton_kv_transfer::LayoutDigest;
use baton_kv_transfer::fault_proxy::Fault;
use baton_proto::Epoch;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::fabric::Leases;
use crate::job::Plan;
use crate::kinds::Kind;
use crate::verdict::{Ending, Verdict};
use crate::world::{EPOCH, World};

/// A world with its main job, and often some bystanders on the same lane.
fn begin(seed: u64, leases: Leases, shape: impl FnOnce(&mut World, &mut Plan)) -> (World, usize) {
    let mut world = World::over_tcp(seed, leases);
    let blocks = world.blocks();
    let mut plan = Plan::new(blocks, &mut world.rng);
    shape(&mut world, &mut plan);
    let main = world.start(0, plan);
    for _ in 0..world.rng.random_range(0..3) {
        let blocks = world.blocks();
        let plan = Plan::new(blocks, &mut world.rng);
        world.start(0, plan);
    }
    (world, main)
}

/// The end of a run that must end in the right bytes.
fn recovers(world: World, main: usize, hit: bool) -> Verdict {
    let mut verdict = world.finish(main);
    verdict.hit = hit;
    verdict.expect(true);
    verdict
}

/// One run of one kind.
pub fn run(kind: Kind, seed: u64) -> Verdict {
    let mut rng = StdRng::seed_from_u64(seed ^ 0x00c0_ffee);
    let rng = &mut rng;
    match kind {
        Kind::Clean => hurt(seed, rng, |_, _| vec![]),
        Kind::Drop => hurt(seed, rng, |rng, n| match rng.random_range(0..4) {
            0 => vec![Fault::DropCommit],
            _ => vec![Fault::DropData(n)],
        }),
        Kind::Duplicate => hurt(seed, rng, |_, n| vec![Fault::RepeatData(n)]),
        Kind::Reorder => hurt(seed, rng, |_, n| vec![Fault::SwapData(n)]),
        Kind::Truncate => hurt(seed, rng, |rng, n| match rng.random_range(0..2) {
            0 => vec![Fault::TruncateData(n)],
            _ => vec![Fault::CutInData(n)],
        }),
        Kind::FlipPayload => hurt(seed, rng, |_, n| {
            vec![Fault::DamagePayload(n), Fault::DamagePayload(n + 1)]
        }),
        Kind::FlipHeader => hurt(seed, rng, |_, n| vec![Fault::DamageHeader(n)]),
        Kind::StaleTicket => stale_ticket(seed, rng),
        Kind::WrongEpoch => wrong_epoch(seed, rng),
        Kind::SenderKilled(percent) => sender_killed(seed, rng, percent),
        Kind::ReceiverKilled => receiver_killed(seed, rng),
        Kind::LinkCut => link_cut(seed, rng),
        Kind::Blackhole => blackhole(seed, rng),
        Kind::SlowLink => slow_link(seed, rng),
        Kind::Cancel => cancel(seed, rng),
        Kind::LeaseEnd => lease_end(seed, rng),
        Kind::DuplicateCommit => hurt(seed, rng, |rng, _| {
            [Fault::RepeatCommit, Fault::CutAfterCommit][rng.random_range(0..2)..][..1].to_vec()
        }),
        Kind::LayoutMismatch => layout_mismatch(seed),
    }
}

/// Frames are hurt; the request must not notice.
fn hurt(
    seed: u64,
    rng: &mut StdRng,
    faults: impl FnOnce(&mut StdRng, u64) -> Vec<Fault>,
) -> Verdict {
    let (mut world, main) = begin(seed, Leases::LONG, |world, _| {
        // Every layer is at least one frame.
        let frame = rng.random_range(0..u64::from(world.source.layers) - 1);
        for fault in faults(rng, frame) {
            world.proxy().inject(fault);
        }
    });
    world.run(|_| false);
    let hit = world.proxy().is_spent();
    recovers(world, main, hit)
}

fn stale_ticket(seed: u64, rng: &mut StdRng) -> Verdict {
    let (mut world, stale) = begin(seed, Leases::LONG, |world, _| {
        let frame = rng.random_range(0..u64::from(world.source.layers));
        world.proxy().inject(Fault::HoldInData(frame));
    });
    world.run(|world| world.proxy().is_holding());
    let soon = world.now() + Duration::from_millis(20);
    world.run_to(soon);
    let hit = !world.jobs[stale].is_over();
    // The proxy holds every lane: only its own release lets the new owner's bytes pass,
    // and with them the stale ones.
    let other = world.add_sender();
    let new = if rng.random() {
        world.regrant(stale, other, rng.random())
    } else {
        world.revoke(stale);
        world.run(|world| world.jobs[stale].receiver_back.is_some());
        let blocks = world.jobs[stale].destination_blocks.clone();
        world.destination.take_these(&blocks);
        let plan = Plan::new(blocks.len(), &mut world.rng);
        Some(world.start_on(other, plan, blocks))
    };
    world.proxy().release();
    match new {
        Some(new) => recovers(world, new, hit),
        None => recovers(world, stale, false),
    }
}

fn wrong_epoch(seed: u64, rng: &mut StdRng) -> Verdict {
    let epoch = rng.random_bool(0.5);
    let (world, main) = begin(seed, Leases::LONG, |_, plan| {
        plan.deadline = Duration::from_millis(300);
        if epoch {
            plan.sent_epoch = Epoch(EPOCH.0 ^ 2);
        } else {
            plan.sent_attempt = 2;
        }
    });
    let mut verdict = world.finish(main);
    verdict.hit = true;
    verdict.expect(false);
    verdict
}

/// Slow enough that there is a middle.
fn slow_down(world: &World, millis: u64) -> u64 {
    let blocks: usize = world.jobs.iter().map(|job| job.source_blocks.len()).sum();
    let bytes = blocks as u64 * u64::from(world.source.layers * world.source.part_bytes);
    world.proxy().throttle((bytes * 1000 / millis).max(50_000));
    bytes
}

fn sender_killed(seed: u64, rng: &mut StdRng, percent: u64) -> Verdict {
    let (mut world, main) = begin(seed, Leases::SHORT, |_, plan| plan.commit_after = None);
    let at = slow_down(&world, 150) * percent / 100;
    world.run(|world| world.proxy().bytes() >= at);
    let hit = !world.jobs[main].is_over();
    world.kill_sender(0);
    world.proxy().throttle(0);
    let again = if rng.random() {
        let other = world.add_sender();
        world.regrant(main, other, rng.random())
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

fn receiver_killed(seed: u64, rng: &mut StdRng) -> Verdict {
    let (mut world, main) = begin(seed, Leases::SHORT, |_, _| {});
    let at = slow_down(&world, 150) * rng.random_range(0..100) / 100;
    world.run(|world| world.proxy().bytes() >= at);
    let committed = world.jobs[main].receiver_end.is_some();
    world.kill_receiver();
    let mut verdict = world.finish(main);
    verdict.hit = !committed;
    if !committed {
        verdict.expect(false);
    }
    verdict
}

fn link_cut(seed: u64, rng: &mut StdRng) -> Verdict {
    let leases = if rng.random() {
        Leases::LONG
    } else {
        Leases::SHORT
    };
    let (mut world, main) = begin(seed, leases, |_, _| {});
    let at = slow_down(&world, 100) * rng.random_range(0..100) / 100;
    world.run(|world| world.proxy().bytes() >= at);
    let hit = !world.jobs[main].is_over();
    world.proxy().refuse(true);
    world.proxy().cut();
    let restored = world.now() + Duration::from_millis(rng.random_range(0..600));
    world.run_to(restored);
    world.proxy().refuse(false);
    world.proxy().throttle(0);
    let mut verdict = world.finish(main);
    verdict.hit = hit;
    if leases.lease == Leases::LONG.lease {
        verdict.expect(true);
    }
    verdict
}

fn blackhole(seed: u64, rng: &mut StdRng) -> Verdict {
    let outage = [Some(100), Some(600), None][rng.random_range(0..3)];
    let (mut world, main) = begin(seed, Leases::SHORT, |_, _| {});
    let at = slow_down(&world, 100) * rng.random_range(0..100) / 100;
    world.run(|world| world.proxy().bytes() >= at);
    let hit = world.jobs[main].receiver_end.is_none();
    world.proxy().hold();
    if let Some(outage) = outage {
        let restored = world.now() + Duration::from_millis(outage);
        world.run_to(restored);
        world.proxy().release();
        world.proxy().throttle(0);
    }
    let mut verdict = world.finish(main);
    verdict.hit = hit;
    verdict
}

fn slow_link(seed: u64, rng: &mut StdRng) -> Verdict {
    let (world, main) = begin(seed, Leases::LONG, |_, _| {});
    slow_down(&world, rng.random_range(200..800));
    recovers(world, main, true)
}

fn cancel(seed: u64, rng: &mut StdRng) -> Verdict {
    let (mut world, main) = begin(seed, Leases::LONG, |_, _| {});
    let at = slow_down(&world, 50) * rng.random_range(0..110) / 100;
    let latest = world.now() + Duration::from_millis(rng.random_range(0..80));
    world.run(|world| world.proxy().bytes() >= at || world.now() >= latest);
    let hit = world.jobs[main].receiver_end.is_none();
    match rng.random_range(0..3) {
        0 => world.abort(main),
        1 => world.revoke(main),
        _ => {
            world.abort(main);
            world.revoke(main);
        }
    }
    world.proxy().throttle(0);
    let mut verdict = world.finish(main);
    verdict.hit = hit;
    verdict
}

fn lease_end(seed: u64, rng: &mut StdRng) -> Verdict {
    let part_way = Duration::from_millis(rng.random_range(20..200));
    let who = rng.random_range(0..2);
    let (mut world, main) = begin(seed, Leases::LONG, |world, plan| {
        match who {
            0 => plan.deadline = part_way,
            _ => {
                plan.sent_deadline = part_way;
                plan.commit_after = None;
            }
        }
        // Both ends still live when the rest comes.
        world.proxy().inject(Fault::HoldInData(0));
    });
    world.run(|world| world.proxy().is_holding());
    let past = world.now() + part_way + Duration::from_millis(50);
    world.run_to(past);
    world.proxy().release();
    let mut verdict = world.finish(main);
    verdict.hit = verdict.ending != Some(Ending::Right);
    verdict
}

fn layout_mismatch(seed: u64) -> Verdict {
    let (mut world, main) = begin(seed, Leases::LONG, |_, plan| {
        plan.layout = LayoutDigest([1; 32]);
    });
    let blocks = world.jobs[main].destination_blocks.clone();
    world.run(|_| false);
    let written = world.destination.writes(&blocks);
    let mut verdict = world.finish(main);
    verdict.hit = true;
    verdict.expect(false);
    if written > 0 {
        verdict
            .wrong
            .push("bytes of another layout were placed".to_owned());
    }
    verdict
}
