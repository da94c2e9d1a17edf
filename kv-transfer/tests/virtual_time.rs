//! What a lane promises about time and order, where no clock but the test's counts.

#[allow(dead_code)]
#[path = "conformance/books.rs"]
mod books;
#[allow(dead_code)]
#[path = "conformance/fabric.rs"]
mod fabric;
#[allow(dead_code)]
#[path = "conformance/job.rs"]
mod job;
#[allow(dead_code)]
#[path = "conformance/pool.rs"]
mod pool;
#[path = "conformance/relaid.rs"]
mod relaid;
#[allow(dead_code)]
#[path = "conformance/verdict.rs"]
mod verdict;
#[allow(dead_code)]
#[path = "conformance/world.rs"]
mod world;

use std::time::Duration;

use baton_kv_transfer::codec::Kind;
use baton_kv_transfer::mem::{Conditions, Direction, Fault, Frame, Hurt};
use baton_kv_transfer::receiver::Protections;
use job::{Plan, ReceiverEnd};
use verdict::Ending;
use world::World;

/// Parts of 64 KiB, four to a block.
fn world(in_flight_parts_max: usize) -> World {
    let mut world = World::shaped(7, (100, 4, 64 << 10), Protections::ALL);
    world.in_flight_parts_max = in_flight_parts_max;
    world.link().set(Conditions {
        bytes_per_second: 20 << 20,
        buffer: 128 << 10,
        ..Conditions::default()
    });
    world.add_sender();
    world
}

/// A request whose parts are all there at once.
fn plan(world: &mut World, blocks: usize) -> Plan {
    let mut plan = Plan::new(blocks, &mut world.rng);
    plan.pushes_over = Duration::ZERO;
    plan.commit_after = Some(Duration::ZERO);
    plan
}

fn assert_right(world: World, job: usize) {
    let verdict = world.finish(job);
    assert!(verdict.is_good(), "{verdict:?}");
    assert_eq!(verdict.ending, Some(Ending::Right));
}

#[test]
fn a_short_prompt_passes_any_number_of_long_ones() {
    let mut world = world(16_384);
    let long: Vec<usize> = (0..8)
        .map(|_| {
            let plan = plan(&mut world, 12);
            world.start(0, plan)
        })
        .collect();
    world.run(|world| world.frames() >= 20);
    let before = world.link().data_bytes();
    let short = plan(&mut world, 1);
    let short = world.start(0, short);
    world.run(|world| world.jobs[short].is_over());
    let passed = world.link().data_bytes() - before;
    assert!(
        long.iter().all(|job| !world.jobs[*job].is_over()),
        "a long one was faster"
    );
    // What was gathered for the write under way, and a turn of everybody, of the 24 MiB
    // that are queued.
    let most = (1 << 20) + 8 * (256 << 10) + (512 << 10);
    assert!(passed <= most, "`{passed}` bytes went first");
    assert_right(world, short);
}

#[test]
fn blocks_in_flight_are_bounded_and_lost_ones_are_asked_for_once() {
    let mut world = world(4);
    for frame in [1, 2, 3] {
        world.link().inject(Fault {
            direction: Direction::Forth,
            frame: Frame::Data(frame),
            hurt: Hurt::Drop,
        });
    }
    let plan = plan(&mut world, 12);
    let job = world.start(0, plan);
    let receiver = world.receiver.clone().unwrap();
    world.run(|_| false);
    let link = world.link();
    assert!(link.is_spent());
    // Frames of four parts at most, although eight would fit one by their bytes.
    let parts = 12 * 4;
    assert!(link.frames(Direction::Forth, Kind::Data) >= parts / 4);
    // The window was closed by bytes that never arrived: the sender asked.
    assert!(link.frames(Direction::Forth, Kind::Open) >= 2);
    let statistics = receiver.statistics();
    assert_eq!(
        (statistics.frames_duplicate, statistics.bytes_scratched),
        (0, 0),
        "something came that was here already"
    );
    drop(receiver);
    assert_right(world, job);
}

#[test]
fn an_abort_is_repeated_until_it_is_heard() {
    for (direction, kind) in [
        (Direction::Forth, Kind::Abort),
        (Direction::Back, Kind::Aborted),
    ] {
        let mut world = world(16_384);
        for number in 0..4 {
            world.link().inject(Fault {
                direction,
                frame: Frame::Control(kind, number),
                hurt: Hurt::Drop,
            });
        }
        let plan = plan(&mut world, 12);
        let job = world.start(0, plan);
        world.run(|world| world.frames() >= 3);
        world.abort(job);
        world.run(|_| false);
        // Both sides are over; the sender still says so until it is answered.
        let later = world.now() + Duration::from_secs(5);
        world.run_to(later);
        assert_eq!(world.link().frames(Direction::Forth, Kind::Abort), 5);
        let ended = world.jobs[job].receiver_end.clone();
        assert!(matches!(ended, Some(ReceiverEnd::Ended(how)) if how.contains("BySender")));
        let verdict = world.finish(job);
        assert!(verdict.is_good(), "{verdict:?}");
    }
}

#[test]
fn a_machine_that_stood_still_is_not_a_dead_peer() {
    let mut world = world(16_384);
    world.link().set(Conditions {
        bytes_per_second: 2 << 20,
        buffer: 64 << 10,
        ..Conditions::default()
    });
    let plan = plan(&mut world, 12);
    let job = world.start(0, plan);
    world.run(|world| world.frames() >= 2);
    for _ in 0..3 {
        let fabric::Fabric::Mem { network, .. } = &world.fabric else {
            unreachable!()
        };
        network
            .environment()
            .advance_to(world.now() + Duration::from_secs(3));
        network.poke();
        let later = world.now() + Duration::from_millis(300);
        world.run_to(later);
        assert!(!world.jobs[job].is_over());
    }
    world.run(|_| false);
    assert_eq!(world.link().connections(), 1, "the lane was given up");
    assert_right(world, job);
}

#[test]
fn an_idle_lane_with_an_open_transfer_outlives_every_silence() {
    let mut world = world(16_384);
    let mut plan = plan(&mut world, 2);
    plan.pushes_over = Duration::from_secs(10);
    plan.commit_after = Some(plan.pushes_over);
    let job = world.start(0, plan);
    world.run(|_| false);
    assert_eq!(world.link().connections(), 1, "the lane was given up");
    assert_right(world, job);
}

#[test]
fn ended_grants_are_forgotten_in_time() {
    let mut world = world(16_384);
    let plan = plan(&mut world, 2);
    let job = world.start(0, plan);
    world.run(|_| false);
    let receiver = world.receiver.clone().unwrap();
    assert_eq!(receiver.grants_remembered(), 1);
    let later = world.now() + Duration::from_secs(33);
    world.run_to(later);
    assert_eq!(receiver.grants_remembered(), 0);
    drop(receiver);
    assert_right(world, job);
}
