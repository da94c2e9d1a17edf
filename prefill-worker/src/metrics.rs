//! What a prefill worker counts, and how it reads its engine's figures.

use std::time::Duration;

use baton_engine::api::{Load, StepStatistics};
use baton_engine::step_time::DeviceRates;
use baton_kv_transfer::sender::TransferStatistics;
use baton_observability::labels::{Direction, TransferFailure};
use baton_observability::roofline::Peaks;
use baton_observability::{BlockFigures, LoadFigures, StepFigures, WorkerMetrics};

/// The worker's metrics with this role's verbs.
#[derive(Clone)]
pub(crate) struct Metrics(pub(crate) WorkerMetrics);

impl Metrics {
    /// What the engine's device does at best, if that is known.
    pub(crate) fn device(&self, rates: Option<DeviceRates>) {
        if let Some(rates) = rates {
            self.0.record_peaks(&Peaks {
                flops_per_second: rates.product_ops_per_second,
                bytes_per_second: rates.bytes_per_second,
            });
        }
    }

    pub(crate) fn step(&self, step: &StepStatistics) {
        self.0.record_step(&StepFigures {
            duration: step.duration,
            prefill_tokens: step.prefill_tokens,
            decode_tokens: step.decode_tokens,
            flops: step.flops,
            bytes: step.bytes,
            over_prediction: step.over_prediction,
        });
    }

    pub(crate) fn load(&self, load: &Load) {
        let mut blocks = BlockFigures::default();
        for counts in &load.blocks {
            blocks.free += counts.free;
            blocks.referenced += counts.referenced;
            blocks.cached += counts.cached;
            blocks.reserved += counts.reserved;
            blocks.pinned += counts.pinned;
            blocks.quarantined += counts.quarantined;
        }
        let figures = LoadFigures {
            requests_running: load.requests_running,
            requests_waiting: load.requests_waiting,
            preemptions_total: load.preemptions_total,
            prefix_queries_tokens_total: load.prefix_queries_tokens_total,
            prefix_hits_tokens_total: load.prefix_hits_tokens_total,
            not_finite_total: load.not_finite_total,
            itl_target: load.itl_target,
            slo_delayed_total: load.slo_delayed_total,
            slo_cut_steps_total: load.slo_cut_steps_total,
        };
        self.0.record_load(&figures, &blocks);
    }

    pub(crate) fn sent(&self, bytes: u64, statistics: &TransferStatistics, exposed: Duration) {
        let duration = statistics.duration;
        if let Some(transport) = statistics.transport {
            self.0
                .kv_transfer_bytes
                .get((Direction::Send, transport.into()))
                .inc_by(bytes);
        }
        self.0
            .kv_transfer
            .get(Direction::Send)
            .observe_duration(duration);
        self.0.kv_transfer_exposed.observe_duration(exposed);
        if !duration.is_zero() {
            let share = exposed.as_secs_f64() / duration.as_secs_f64();
            self.0.kv_transfer_overlap.observe(1.0 - share.min(1.0));
        }
    }

    pub(crate) fn send_failed(&self, cause: TransferFailure) {
        self.0
            .kv_transfer_failures
            .get((Direction::Send, cause))
            .inc();
    }
}
