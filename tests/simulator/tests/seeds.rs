//! A thousand clusters hold what they promise, and those with a planted defect do not.
//!
//! `BATON_SIMULATE_SEEDS` runs another number of seeds; `baton simulate` runs single ones
//! and tells their stories.

use baton_simulator::trace::{Invariant, digest};
use baton_simulator::{Defect, Report, Seeds, run};

const SEEDS: u64 = 1000;
/// Seeds that a planted defect may stay unnoticed in.
const NOTICED_WITHIN: u64 = 400;

#[test]
fn a_thousand_seeds_hold() {
    let seeds = std::env::var("BATON_SIMULATE_SEEDS")
        .ok()
        .and_then(|seeds| seeds.parse().ok())
        .unwrap_or(SEEDS);
    let report = Seeds::new(0, seeds).run(|_| {});
    println!("{report}");
    for broken in report.broken.iter().take(3) {
        println!("{broken}");
    }
    let broken: Vec<u64> = report.broken.iter().map(|broken| broken.seed).collect();
    assert!(broken.is_empty(), "broken seeds: {broken:?}");
    // A simulation in which little happens would hold anything.
    let counts = report.counts;
    assert!(counts.completed > seeds * 7, "{report}");
    assert!(counts.handoffs > seeds * 3, "{report}");
    assert!(counts.retries > seeds, "{report}");
    assert!(counts.cancelled > seeds / 2, "{report}");
}

#[test]
fn the_same_seed_does_the_same() {
    for seed in 5000..5030 {
        let (first, second) = (run(seed, None), run(seed, None));
        let differs = first.lines.iter().zip(&second.lines).find(|(a, b)| a != b);
        assert_eq!(differs, None, "seed {seed}");
        assert_eq!(digest(&first.lines), digest(&second.lines), "seed {seed}");
        assert_eq!(first.counts, second.counts, "seed {seed}");
    }
}

/// Runs seeds with a defect until one of them is noticed.
fn with(defect: Defect) -> Report {
    let seeds = Seeds {
        defect: Some(defect),
        stop_at_first: true,
        ..Seeds::new(0, NOTICED_WITHIN)
    };
    let report = seeds.run(|_| {});
    println!("{defect:?} was noticed after {} seeds", report.seeds);
    assert!(
        !report.broken.is_empty(),
        "{defect:?} was not noticed: {report}"
    );
    report
}

fn broken(report: &Report) -> Vec<Invariant> {
    let violations = report.broken.iter().flat_map(|broken| &broken.violations);
    violations.map(|violation| violation.invariant).collect()
}

#[test]
fn a_dropped_epoch_check_is_noticed() {
    let report = with(Defect::EpochUnchecked);
    assert!(broken(&report).contains(&Invariant::OneOwner), "{report}");
}

#[test]
fn blocks_freed_without_waiting_are_noticed() {
    let report = with(Defect::FreeBeforeQuiet);
    assert!(
        broken(&report).contains(&Invariant::NoUseAfterFree),
        "{report}"
    );
}

#[test]
fn a_retry_without_deduplication_is_noticed_and_told() {
    let report = with(Defect::RetryNotDeduplicated);
    assert!(
        broken(&report).contains(&Invariant::RightTokens),
        "{report}"
    );
    let broken = &report.broken[0];
    let first = &broken.violations[0];
    let request = first.request.expect("a client's request");
    // In order, with the request's whole life up to the break, at every worker it saw.
    assert!(broken.story.is_sorted_by_key(|line| line.at));
    let own: Vec<_> = broken
        .story
        .iter()
        .filter(|line| line.request == Some(request))
        .collect();
    assert!(own[0].text.starts_with("sent: "), "{broken}");
    assert!(
        own.iter()
            .any(|line| line.attempt > 1 && line.worker.is_some()),
        "{broken}"
    );
    assert!(
        own.iter().any(|line| line.text.starts_with("BROKEN: ")),
        "{broken}"
    );
    assert!(
        broken
            .story
            .iter()
            .all(|line| line.request.is_none_or(|number| number == request)),
        "{broken}"
    );
}

/// The pools' blocks are of unlike sizes in half of the seeds: KV is laid out anew there.
#[test]
fn kv_is_handed_over_between_blocks_of_unlike_sizes() {
    let runs: Vec<_> = (0..24).map(|seed| run(seed, None)).collect();
    for sizes in [(16, 16), (16, 32), (32, 16)] {
        let with = runs
            .iter()
            .filter(|run| run.scenario.worker.block_sizes == sizes);
        let handoffs: u64 = with.map(|run| run.counts.handoffs).sum();
        assert!(handoffs > 5, "{handoffs} handoffs with blocks of {sizes:?}");
    }
}
