//! From what a worker's engine reports to the worker's metrics, for every role.

use std::time::Duration;

use crate::instrument::Counter;
use crate::labels::{BlockState, StepPhase};
use crate::metrics::WorkerMetrics;
use crate::roofline::{Peaks, Work};

/// One engine step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepFigures {
    pub duration: Duration,
    pub prefill_tokens: u32,
    pub decode_tokens: u32,
    pub flops: u64,
    pub bytes: u64,
    /// Real over foretold time of a step with decode rows.
    pub over_prediction: Option<f64>,
}

/// How full an engine is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoadFigures {
    pub requests_running: u32,
    pub requests_waiting: u32,
    pub preemptions_total: u64,
    pub prefix_queries_tokens_total: u64,
    pub prefix_hits_tokens_total: u64,
    pub not_finite_total: u64,
    pub itl_target: Option<Duration>,
    pub slo_delayed_total: u64,
    pub slo_cut_steps_total: u64,
}

/// Blocks by state, summed over the KV groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockFigures {
    pub free: u32,
    pub referenced: u32,
    pub cached: u32,
    pub reserved: u32,
    pub pinned: u32,
    pub quarantined: u32,
}

impl WorkerMetrics {
    /// States what the device does at best. Steps counted before it have no utilisation.
    pub fn record_peaks(&self, peaks: &Peaks) {
        self.peak_flops.set(peaks.flops_per_second);
        self.peak_memory_bytes.set(peaks.bytes_per_second);
    }

    /// Counts one step.
    pub fn record_step(&self, step: &StepFigures) {
        let phase = match (step.prefill_tokens > 0, step.decode_tokens > 0) {
            (true, true) => StepPhase::Mixed,
            (true, false) => StepPhase::Prefill,
            _ => StepPhase::Decode,
        };
        self.step.get(phase).observe_duration(step.duration);
        let tokens = step.prefill_tokens + step.decode_tokens;
        self.batch_tokens.get(phase).observe(f64::from(tokens));
        self.prompt_tokens.inc_by(u64::from(step.prefill_tokens));
        self.flops.inc_by(step.flops);
        self.memory_bytes.inc_by(step.bytes);
        self.record_utilisation(step, phase);
        if let Some(ratio) = step.over_prediction {
            self.step_over_prediction.observe(ratio);
        }
    }

    fn record_utilisation(&self, step: &StepFigures, phase: StepPhase) {
        let peaks = Peaks {
            flops_per_second: self.peak_flops.get(),
            bytes_per_second: self.peak_memory_bytes.get(),
        };
        let work = Work {
            flops: step.flops as f64,
            bytes: step.bytes as f64,
        };
        let seconds = step.duration.as_secs_f64();
        // A step that computed nothing has no utilisation, and without peaks none has.
        if peaks.flops_per_second > 0.0 && peaks.bytes_per_second > 0.0 && step.bytes > 0 {
            self.mfu.get(phase).observe(peaks.mfu(&work, seconds));
            self.mbu.get(phase).observe(peaks.mbu(&work, seconds));
        }
    }

    /// Sets the gauges and brings the counters that the engine keeps itself up to date.
    pub fn record_load(&self, load: &LoadFigures, blocks: &BlockFigures) {
        self.requests_running.set(i64::from(load.requests_running));
        self.requests_waiting.set(i64::from(load.requests_waiting));
        raise(&self.preemptions, load.preemptions_total);
        raise(&self.prefix_cache_queries, load.prefix_queries_tokens_total);
        raise(&self.prefix_cache_hits, load.prefix_hits_tokens_total);
        raise(&self.not_finite_requests, load.not_finite_total);
        raise(&self.slo_delayed_requests, load.slo_delayed_total);
        raise(&self.slo_cut_steps, load.slo_cut_steps_total);
        self.itl_target
            .set(load.itl_target.unwrap_or_default().as_secs_f64());
        let states = [
            (BlockState::Free, blocks.free),
            (BlockState::Referenced, blocks.referenced),
            (BlockState::Cached, blocks.cached),
            (BlockState::Reserved, blocks.reserved),
            (BlockState::Pinned, blocks.pinned),
            (BlockState::Quarantined, blocks.quarantined),
        ];
        let total: u32 = states.iter().map(|(_, count)| count).sum();
        for (state, count) in states {
            self.kv_blocks.get(state).set(i64::from(count));
        }
        let used = total - blocks.free - blocks.cached;
        self.kv_cache_usage
            .set(f64::from(used) / f64::from(total.max(1)));
    }
}

/// Raises a counter to a total that someone else keeps. Totals never fall, and only
/// the scrape calls this, so the difference is never counted twice.
fn raise(counter: &Counter, total: u64) {
    counter.inc_by(total.saturating_sub(counter.get()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_held_against_the_peaks_once_they_are_known() {
        let mut registry = crate::Registry::default();
        let metrics = WorkerMetrics::new(&mut registry);
        let step = StepFigures {
            duration: Duration::from_millis(10),
            decode_tokens: 4,
            flops: 2_000_000_000,
            bytes: 100_000_000,
            ..StepFigures::default()
        };
        metrics.record_step(&step);
        metrics.record_peaks(&Peaks {
            flops_per_second: 1e12,
            bytes_per_second: 20e9,
        });
        metrics.record_step(&step);
        // A step of cancelled rows reads nothing.
        metrics.record_step(&StepFigures::default());
        let text = crate::metrics_text(&registry);
        for line in [
            "baton_step_mfu_ratio_count{phase=\"decode\"} 1",
            "baton_step_mfu_ratio_sum{phase=\"decode\"} 0.2",
            "baton_step_mbu_ratio_sum{phase=\"decode\"} 0.5",
            "baton_flops_total 4000000000",
            "baton_device_peak_flops 1000000000000.0",
        ] {
            assert!(text.contains(line), "no `{line}` in {text}");
        }
    }

    #[test]
    fn usage_counts_neither_free_nor_cached_blocks_and_totals_are_not_added_twice() {
        let mut registry = crate::Registry::default();
        let metrics = WorkerMetrics::new(&mut registry);
        let load = LoadFigures {
            preemptions_total: 5,
            ..LoadFigures::default()
        };
        let blocks = BlockFigures {
            free: 2,
            cached: 4,
            referenced: 1,
            pinned: 1,
            ..BlockFigures::default()
        };
        metrics.record_load(&load, &blocks);
        metrics.record_load(&load, &blocks);
        assert_eq!(metrics.preemptions.get(), 5);
        assert!((metrics.kv_cache_usage.get() - 0.25).abs() < 1e-9);
    }
}
