//! Every kind in virtual time: one thread, seeded, repeatable step by step.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_kv_transfer::codec::Kind as FrameKind;
use baton_kv_transfer::mem::{Conditions, Direction, Fault, Frame, Hurt, Moment};
use baton_kv_transfer::receiver::Protections;
use baton_kv_transfer::{LayoutDigest, Ticket};
use baton_proto::Epoch;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::job::Plan;
use crate::kinds::Kind;
use crate::verdict::{Ending, Verdict};
use crate::world::{BACK_AFTER_CANCEL, BACK_AFTER_DEATH, EPOCH, World, poll_once};

/// What the same seed does when nothing is hurt.
struct Clean {
    /// What its senders open tickets with.
    open: FrameKind,
    frames: u64,
    steps: u64,
    duration: Duration,
}

/// A world with its main job, and often some bystanders on the same lane.
fn begin(seed: u64, protections: Protections, shape: impl FnOnce(&mut Plan)) -> (World, usize) {
    let mut world = World::new(seed, protections);
    let blocks = world.blocks();
    let mut plan = Plan::new(blocks, &mut world.rng);
    shape(&mut plan);
    let main = world.start(0, plan);
    for _ in 0..world.rng.random_range(0..3) {
        let blocks = world.blocks();
        let plan = Plan::new(blocks, &mut world.rng);
        world.start(0, plan);
    }
    (world, main)
}

fn clean(seed: u64) -> Clean {
    let (mut world, _) = begin(seed, Protections::ALL, |_| {});
    let started = world.now();
    world.run(|_| false);
    let clean = Clean {
        open: match world.relaid {
            Some(_) => FrameKind::OpenAs,
            None => FrameKind::Open,
        },
        frames: world.frames().max(1),
        steps: world.steps,
        duration: world.now() - started,
    };
    world.fabric.end();
    clean
}

/// One run of one kind.
pub fn run(kind: Kind, seed: u64, protections: Protections) -> Verdict {
    // The choices of a kind are its own, so that the world stays the clean run's.
    let mut rng = StdRng::seed_from_u64(seed ^ 0x00c0_ffee);
    let rng = &mut rng;
    match kind {
        Kind::Clean => {
            let (world, main) = begin(seed, protections, |_| {});
            recovers(world, main, true)
        }
        Kind::Drop => hurt(seed, protections, rng, |_| Hurt::Drop),
        Kind::Duplicate => hurt(seed, protections, rng, |rng| match rng.random_range(0..2) {
            0 => Hurt::Duplicate,
            _ => Hurt::Echo(rng.random_range(1..8)),
        }),
        Kind::Reorder => hurt(seed, protections, rng, |_| Hurt::Swap),
        Kind::Truncate => hurt(seed, protections, rng, |rng| match rng.random_range(0..3) {
            0 => Hurt::CutInside,
            _ => Hurt::Truncate,
        }),
        Kind::FlipPayload => hurt(seed, protections, rng, |rng| {
            Hurt::FlipPayload(rng.random())
        }),
        Kind::FlipHeader => hurt(seed, protections, rng, |rng| Hurt::FlipHeader(rng.random())),
        Kind::StaleTicket => stale_ticket(seed, protections, rng),
        Kind::WrongEpoch => wrong_epoch(seed, protections, rng),
        Kind::SenderKilled(percent) => sender_killed(seed, protections, rng, percent),
        Kind::ReceiverKilled => receiver_killed(seed, protections, rng),
        Kind::LinkCut => link_cut(seed, protections, rng),
        Kind::Blackhole => blackhole(seed, protections, rng),
        Kind::SlowLink => slow_link(seed, protections, rng),
        Kind::Cancel => cancel(seed, protections, rng),
        Kind::LeaseEnd => lease_end(seed, protections, rng),
        Kind::DuplicateCommit => duplicate_commit(seed, protections, rng),
        Kind::LayoutMismatch => layout_mismatch(seed, protections),
    }
}

/// The end of a run that must end in the right bytes.
fn recovers(world: World, main: usize, hit: bool) -> Verdict {
    let mut verdict = world.finish(main);
    verdict.hit = hit;
    verdict.expect(true);
    verdict
}

/// Some frame, mostly a data frame, of those a clean run has.
fn some_frame(rng: &mut StdRng, clean: &Clean) -> (Direction, Frame) {
    match rng.random_range(0..10) {
        0 => (Direction::Forth, Frame::Control(clean.open, 0)),
        1 => (Direction::Forth, Frame::Control(FrameKind::Commit, 0)),
        2 => (Direction::Back, Frame::Control(FrameKind::Opened, 0)),
        3 => (Direction::Back, Frame::Control(FrameKind::Committed, 0)),
        4 => (
            Direction::Back,
            Frame::Control(FrameKind::Ack, rng.random_range(0..3)),
        ),
        _ => (
            Direction::Forth,
            Frame::Data(rng.random_range(0..clean.frames)),
        ),
    }
}

/// One to three frames are hurt; the request must not notice.
fn hurt(
    seed: u64,
    protections: Protections,
    rng: &mut StdRng,
    mut what: impl FnMut(&mut StdRng) -> Hurt,
) -> Verdict {
    let clean = clean(seed);
    let (mut world, main) = begin(seed, protections, |_| {});
    for _ in 0..rng.random_range(1..4) {
        let (direction, frame) = some_frame(rng, &clean);
        let hurt = what(rng);
        world.link().inject(Fault {
            direction,
            frame,
            hurt,
        });
    }
    world.run(|_| false);
    let hit = world.link().is_spent();
    recovers(world, main, hit)
}

/// An attempt is held in the middle of a frame, loses its reservation, and speaks again
/// when its blocks belong to somebody else.
fn stale_ticket(seed: u64, protections: Protections, rng: &mut StdRng) -> Verdict {
    let clean = clean(seed);
    let (mut world, stale) = begin(seed, protections, |_| {});
    let hurt = if rng.random_bool(0.8) {
        Hurt::HoldInside
    } else {
        Hurt::HoldAfter
    };
    world.link().inject(Fault {
        direction: Direction::Forth,
        frame: Frame::Data(rng.random_range(0..clean.frames)),
        hurt,
    });
    world.run(|world| world.link().is_holding());
    // What was let through arrives before anything else happens.
    let soon = world.now() + Duration::from_millis(5);
    world.run_to(soon);
    let hit = world.link().is_holding() && !world.jobs[stale].is_over();
    let other = world.add_sender();
    let new = if rng.random_bool(0.5) {
        world.regrant(stale, other, rng.random())
    } else {
        world.revoke(stale);
        world.run(|world| world.jobs[stale].receiver_back.is_some());
        let blocks = world.jobs[stale].destination_blocks.clone();
        world.destination.take_these(&blocks);
        let plan = Plan::new(blocks.len(), &mut world.rng);
        Some(world.start_on(other, plan, blocks))
    };
    let Some(new) = new else {
        return recovers(world, stale, false);
    };
    let frames = world.frames();
    match rng.random_range(0..3) {
        // Before the new owner's bytes, between them, after them.
        0 => {}
        1 => world.run(|world| world.frames() > frames + 1),
        _ => {
            let soon = world.now() + rng_duration(rng, 900);
            world.run_to(soon);
        }
    }
    world.link().release();
    world.fabric.poke();
    let mut verdict = recovers(world, new, hit);
    verdict.hit = hit;
    verdict
}

fn rng_duration(rng: &mut StdRng, up_to_millis: u64) -> Duration {
    Duration::from_micros(rng.random_range(0..up_to_millis * 1000))
}

/// A sender that means another life or attempt of the receiver, or frames that say so.
fn wrong_epoch(seed: u64, protections: Protections, rng: &mut StdRng) -> Verdict {
    let named = rng.random_range(0..3);
    if named == 2 {
        let hurts = [Hurt::OtherEpoch, Hurt::OtherAttempt];
        return hurt(seed, protections, rng, |rng| hurts[rng.random_range(0..2)]);
    }
    let (mut world, main) = begin(seed, protections, |plan| {
        plan.deadline = Duration::from_secs(3);
        if named == 0 {
            plan.sent_epoch = Epoch(EPOCH.0 ^ 2);
        } else {
            plan.sent_attempt = 2;
        }
    });
    world.run(|world| world.jobs[main].sender_back.is_some());
    let mut verdict = world.finish(main);
    verdict.hit = true;
    verdict.expect(false);
    verdict
}

fn sender_killed(seed: u64, protections: Protections, rng: &mut StdRng, percent: u64) -> Verdict {
    let clean = clean(seed);
    let frames = (clean.frames * percent).div_ceil(100);
    // The last word is never said: without it nothing may be decoded.
    let (mut world, main) = begin(seed, protections, |plan| plan.commit_after = None);
    // A commit that is asked for cuts groups of layers short: without it there may be fewer
    // frames, and the last is out soon after the clean run's end.
    let late = world.now() + clean.duration + Duration::from_millis(100);
    world.run(|world| world.frames() >= frames || world.now() >= late);
    let hit = !world.jobs[main].is_over();
    // With its host, or only the process.
    if rng.random() {
        world.link().lose();
    }
    world.kill_sender(0);
    for job in 0..world.jobs.len() {
        world.expect_back(job, Some(BACK_AFTER_DEATH), None);
    }
    if rng.random_bool(0.5) {
        let mut verdict = world.finish(main);
        verdict.hit = hit;
        verdict.expect(false);
        return verdict;
    }
    // The router finds another prefill worker before the lease is over.
    let later = world.now() + rng_duration(rng, 1000);
    world.run_to(later);
    let other = world.add_sender();
    let keep = rng.random();
    match world.regrant(main, other, keep) {
        Some(again) => recovers(world, again, hit),
        None => {
            let mut verdict = world.finish(main);
            verdict
                .wrong
                .push("the lease was over too early".to_owned());
            verdict
        }
    }
}

fn receiver_killed(seed: u64, protections: Protections, rng: &mut StdRng) -> Verdict {
    let clean = clean(seed);
    let frames = rng.random_range(0..=clean.frames);
    let (mut world, main) = begin(seed, protections, |_| {});
    world.run(|world| world.frames() >= frames);
    let committed = world.jobs[main].receiver_end.is_some();
    if rng.random() {
        world.link().lose();
    }
    world.kill_receiver();
    for job in 0..world.jobs.len() {
        world.expect_back(job, None, Some(BACK_AFTER_DEATH));
    }
    let mut verdict = world.finish(main);
    verdict.hit = !committed;
    if !committed {
        verdict.expect(false);
    }
    verdict
}

/// Short outages must not be noticed; long ones may end in an error.
fn link_cut(seed: u64, protections: Protections, rng: &mut StdRng) -> Verdict {
    let clean = clean(seed);
    let (mut world, main) = begin(seed, protections, |_| {});
    let mut hit = false;
    let mut longest = Duration::ZERO;
    for _ in 0..rng.random_range(1..4) {
        let frames = world.frames() + rng.random_range(0..=clean.frames / 2 + 1);
        world.run(|world| world.frames() >= frames);
        hit |= !world.jobs[main].is_over();
        world.link().refuse(true);
        world.link().cut();
        world.fabric.poke();
        let most = if rng.random() { 800 } else { 3000 };
        let outage = rng_duration(rng, most);
        longest = longest.max(outage);
        let restored = world.now() + outage;
        world.run_to(restored);
        world.link().refuse(false);
    }
    let mut verdict = world.finish(main);
    verdict.hit = hit;
    if longest < Duration::from_millis(800) {
        verdict.expect(true);
    }
    verdict
}

/// Nothing arrives any more, for a while or for ever.
fn blackhole(seed: u64, protections: Protections, rng: &mut StdRng) -> Verdict {
    let clean = clean(seed);
    let frames = rng.random_range(0..=clean.frames);
    let (mut world, main) = begin(seed, protections, |_| {});
    world.run(|world| world.frames() >= frames);
    let over: Vec<bool> = world
        .jobs
        .iter()
        .map(|job| job.receiver_end.is_some())
        .collect();
    world.link().darken(true);
    let outage = match rng.random_range(0..3) {
        0 => Some(rng_duration(rng, 600)),
        1 => Some(rng_duration(rng, 3000)),
        _ => None,
    };
    match outage {
        None => {
            for job in 0..world.jobs.len() {
                world.expect_back(job, Some(BACK_AFTER_DEATH), Some(BACK_AFTER_DEATH));
            }
        }
        Some(outage) => {
            let restored = world.now() + outage;
            world.run_to(restored);
            world.link().darken(false);
            world.fabric.poke();
        }
    }
    let mut verdict = world.finish(main);
    verdict.hit = !over[main];
    match outage {
        Some(outage) if outage < Duration::from_millis(600) => verdict.expect(true),
        None if !over[main] => {
            // Bytes that had arrived before may be read in the dark, the commit included.
            let lucky = verdict.ending == Some(Ending::Right);
            verdict.expect(lucky);
        }
        _ => {}
    }
    verdict
}

/// As slow and far as a link may be without being dead.
fn slow_link(seed: u64, protections: Protections, rng: &mut StdRng) -> Verdict {
    let (mut world, main) = begin(seed, protections, |_| {});
    let bytes: usize = world
        .jobs
        .iter()
        .map(|job| job.source_blocks.len())
        .sum::<usize>()
        * (world.source.layers * world.source.part_bytes) as usize;
    world.link().set(Conditions {
        latency: Duration::from_millis(rng.random_range(0..150)),
        jitter: Duration::from_millis(rng.random_range(0..50)),
        bytes_per_second: (bytes as u64 / rng.random_range(1..4)).max(20_000),
        buffer: rng.random_range(4 << 10..64 << 10),
    });
    let started = world.now();
    world.run(|_| false);
    let hit = world.now() - started > Duration::from_millis(100);
    recovers(world, main, hit)
}

/// The request is given up at any step of its life, by either side or both; some of the
/// times in the middle of a read or a write.
fn cancel(seed: u64, protections: Protections, rng: &mut StdRng) -> Verdict {
    let clean = clean(seed);
    let (mut world, main) = begin(seed, protections, |_| {});
    let who = rng.random_range(0..4);
    if rng.random_bool(0.3) {
        return cancel_inside(world, main, rng.random_range(0..clean.steps / 2 + 1));
    }
    lose_a_last_word(&world, rng);
    let step = rng.random_range(0..=clean.steps);
    world.run(|world| world.steps >= step);
    let over = world.jobs[main].receiver_end.is_some();
    match who {
        // The router's word reaches both, one of them first; or one side gives up alone
        // and tells the other.
        0 => world.abort(main),
        1 => world.revoke(main),
        _ => {
            world.abort(main);
            let soon = world.now() + rng_duration(rng, 3);
            world.run_to(soon);
            world.revoke(main);
        }
    }
    world.expect_back(main, Some(BACK_AFTER_CANCEL), Some(BACK_AFTER_CANCEL));
    let mut verdict = world.finish(main);
    verdict.hit = !over;
    verdict
}

/// Cancels during the `after`th read or write: the guard that is held then outlives the
/// cancel, and the blocks come back only behind it.
fn cancel_inside(mut world: World, main: usize, after: u64) -> Verdict {
    let receiver = world.receiver.clone().unwrap();
    let ticket: Ticket = world.jobs[main].ticket;
    let transfer = Arc::new(Mutex::new(world.jobs[main].transfer.clone()));
    let (calls, fired) = (AtomicU64::new(0), Arc::new(AtomicBool::new(false)));
    let (seen, of) = (Arc::clone(&fired), Arc::clone(&transfer));
    let early = Arc::new(AtomicBool::new(false));
    let too_early = Arc::clone(&early);
    world.link().watch(move |moment| {
        if calls.fetch_add(1, Ordering::Relaxed) != after {
            return;
        }
        seen.store(true, Ordering::Relaxed);
        match moment {
            Moment::Reading => {
                // Ready at once only if no lane is inside a read of this ticket.
                let ready = poll_once(receiver.revoke(ticket)).is_some();
                if ready == receiver.may_be_written(ticket) {
                    too_early.store(true, Ordering::Relaxed);
                }
            }
            Moment::Sending => {
                let transfer = of.lock().unwrap().take();
                if let Some(transfer) = transfer {
                    transfer.abort("inside a write");
                    let ready = poll_once(transfer.quiesced()).is_some();
                    if ready == transfer.may_be_read() {
                        too_early.store(true, Ordering::Relaxed);
                    }
                }
            }
        }
    });
    let flag = Arc::clone(&fired);
    world.run(move |_| flag.load(Ordering::Relaxed));
    transfer.lock().unwrap().take();
    world.link().watch(|_| {});
    let hit = fired.load(Ordering::Relaxed) && world.jobs[main].receiver_end.is_none();
    if fired.load(Ordering::Relaxed) {
        world.revoke(main);
        world.abort(main);
        world.expect_back(main, Some(BACK_AFTER_CANCEL), Some(BACK_AFTER_CANCEL));
    }
    let mut verdict = world.finish(main);
    verdict.hit = hit;
    if early.load(Ordering::Relaxed) {
        let text = "a cancel was done before the last guard was gone, or not although it was";
        verdict.wrong.push(text.to_owned());
    }
    verdict
}

/// Sometimes the first of a side's last words does not arrive.
fn lose_a_last_word(world: &World, rng: &mut StdRng) {
    let (direction, kind) = match rng.random_range(0..6) {
        0 => (Direction::Forth, FrameKind::Abort),
        1 => (Direction::Back, FrameKind::Refused),
        2 => (Direction::Back, FrameKind::Aborted),
        _ => return,
    };
    world.link().inject(Fault {
        direction,
        frame: Frame::Control(kind, 0),
        hurt: Hurt::Drop,
    });
}

/// A deadline passes while the bytes come.
fn lease_end(seed: u64, protections: Protections, rng: &mut StdRng) -> Verdict {
    let clean = clean(seed);
    let part_way = clean.duration.mul_f64(rng.random_range(0.0..0.8)) + Duration::from_millis(1);
    let who = rng.random_range(0..3);
    let (mut world, main) = begin(seed, protections, |plan| match who {
        0 => plan.deadline = part_way,
        1 => plan.sent_deadline = part_way,
        _ => plan.deadline = Duration::from_millis(400),
    });
    lose_a_last_word(&world, rng);
    if who == 2 {
        // The rest of the frame comes when the lease is over, and the lane still lives:
        // what is held is short against the silence limit.
        world.link().inject(Fault {
            direction: Direction::Forth,
            frame: Frame::Data(rng.random_range(0..clean.frames)),
            hurt: Hurt::HoldInside,
        });
        world.run(|world| world.link().is_holding());
        let past = world.now() + Duration::from_millis(600);
        world.run_to(past);
        world.link().release();
        world.fabric.poke();
    }
    let mut verdict = world.finish(main);
    verdict.hit = verdict.ending != Some(Ending::Right);
    verdict
}

fn duplicate_commit(seed: u64, protections: Protections, rng: &mut StdRng) -> Verdict {
    let (mut world, main) = begin(seed, protections, |_| {});
    let commit = Frame::Control(FrameKind::Commit, 0);
    let fault = |hurt| Fault {
        direction: Direction::Forth,
        frame: commit,
        hurt,
    };
    match rng.random_range(0..4) {
        0 => world.link().inject(fault(Hurt::Duplicate)),
        1 => world
            .link()
            .inject(fault(Hurt::Echo(rng.random_range(1..5)))),
        // It arrives, its answer does not, and it comes again on another lane.
        2 => world.link().inject(fault(Hurt::CutAfter)),
        // The same on this lane.
        _ => world.link().inject(Fault {
            direction: Direction::Back,
            frame: Frame::Control(FrameKind::Committed, 0),
            hurt: Hurt::Drop,
        }),
    }
    world.run(|_| false);
    let hit = world.link().is_spent();
    recovers(world, main, hit)
}

fn layout_mismatch(seed: u64, protections: Protections) -> Verdict {
    let (mut world, main) = begin(seed, protections, |plan| {
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
