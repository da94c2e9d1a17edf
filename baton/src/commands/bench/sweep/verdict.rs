//! Whether a run kept its target, and at which throughput beside runs that did too.

use serde::Serialize;

use super::{Curve, Point, offered};

/// How far over the target the p99 may be, and which share of the best throughput of
/// the other runs there must be.
const P99_RATIO_MAX: f64 = 1.1;
const THROUGHPUT_RATIO_MIN: f64 = 0.95;

/// A run beside others, under one target on the gap between tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    pub target_ms: f64,
    /// The worst ITL p99 of all loads, over the target.
    pub p99_ratio: f64,
    /// The load the throughput is compared at: the last that all runs were offered.
    pub load: String,
    /// The other run with the highest throughput of those whose p99 is within the
    /// target there; none if there is no such run.
    pub best: Option<String>,
    /// This run's throughput over the best's.
    pub throughput_ratio: Option<f64>,
    pub within_limits: bool,
}

impl Verdict {
    /// `None` if the runs have no load in common, or there is nothing to compare.
    pub fn of(curve: &Curve, against: &[Curve], target_ms: f64) -> Option<Self> {
        let at = |curve: &Curve, load: &Point| {
            let same = |point: &&Point| point.offered == load.offered;
            curve.points.iter().find(same).cloned()
        };
        let shared = |load: &&Point| against.iter().all(|other| at(other, load).is_some());
        let here = curve.points.iter().rev().find(shared)?;
        let best = against
            .iter()
            .filter_map(|other| Some((other, at(other, here)?)))
            .filter(|(_, point)| point.gaps > 0 && point.itl_p99_ms <= target_ms)
            .max_by(|(_, a), (_, b)| a.output_tokens_per_s.total_cmp(&b.output_tokens_per_s));
        let worst = curve.points.iter().map(|point| point.itl_p99_ms);
        let p99_ratio = worst.fold(0.0, f64::max) / target_ms;
        let throughput_ratio = best
            .as_ref()
            .map(|(_, point)| here.output_tokens_per_s / point.output_tokens_per_s.max(1e-9));
        (!against.is_empty()).then(|| Self {
            target_ms,
            p99_ratio,
            load: offered(here.offered),
            best: best.map(|(other, _)| other.label.clone()),
            throughput_ratio,
            within_limits: p99_ratio <= P99_RATIO_MAX
                && throughput_ratio.is_none_or(|ratio| ratio >= THROUGHPUT_RATIO_MIN),
        })
    }

    /// The verdict for people.
    pub fn lines(&self) -> Vec<String> {
        let word = |kept: bool| if kept { "within" } else { "beyond" };
        let mut lines = vec![format!(
            "worst ITL p99 / target of {} ms: {:.2} ({} {P99_RATIO_MAX})",
            self.target_ms,
            self.p99_ratio,
            word(self.p99_ratio <= P99_RATIO_MAX),
        )];
        lines.push(match (&self.best, self.throughput_ratio) {
            (Some(best), Some(ratio)) => format!(
                "throughput at {} / that of `{best}`, the best that keeps the target: {ratio:.2} ({} {THROUGHPUT_RATIO_MIN})",
                self.load,
                word(ratio >= THROUGHPUT_RATIO_MIN),
            ),
            _ => format!("no other run keeps the target at {}", self.load),
        });
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::super::Pace;
    use super::*;

    fn curve(label: &str, points: &[(u32, f64, f64)]) -> Curve {
        let point = |(clients, p99, tokens): &(u32, f64, f64)| Point {
            offered: Pace::Concurrency(*clients),
            gaps: 100,
            itl_p50_ms: p99 / 2.0,
            itl_p99_ms: *p99,
            ttft_p50_ms: 1.0,
            ttft_p99_ms: 1.0,
            output_tokens_per_s: *tokens,
            requests_per_s: 1.0,
            goodput_requests_per_s: 1.0,
            failed: 0,
        };
        Curve {
            label: label.to_owned(),
            points: points.iter().map(point).collect(),
        }
    }

    #[test]
    fn the_best_is_the_fastest_of_those_that_keep_the_target() {
        let others = [
            curve("N=4", &[(64, 15.0, 300.0)]),
            curve("N=8", &[(64, 19.9, 400.0)]),
            curve("N=16", &[(64, 30.0, 600.0)]),
        ];
        let run = |p99, tokens| {
            let run = curve("slo", &[(8, 18.0, 350.0), (64, p99, tokens)]);
            Verdict::of(&run, &others, 20.0).unwrap()
        };
        let good = run(21.0, 390.0);
        assert_eq!(good.best.as_deref(), Some("N=8"));
        assert!((good.throughput_ratio.unwrap() - 0.975).abs() < 1e-9);
        assert!((good.p99_ratio - 1.05).abs() < 1e-9 && good.within_limits);
        assert!(!run(22.5, 390.0).within_limits);
        assert!(!run(20.0, 370.0).within_limits);
    }

    #[test]
    fn without_a_load_in_common_or_a_run_beside_it_there_is_no_verdict() {
        let run = curve("slo", &[(8, 18.0, 350.0)]);
        assert_eq!(Verdict::of(&run, &[], 20.0), None);
        assert_eq!(
            Verdict::of(&run, &[curve("N=4", &[(64, 1.0, 1.0)])], 20.0),
            None
        );
        let slow = [curve("N=4", &[(8, 50.0, 900.0)])];
        let alone = Verdict::of(&run, &slow, 20.0).unwrap();
        assert!(alone.within_limits && alone.best.is_none());
        assert!(alone.lines()[1].contains("no other run"));
    }
}
