//! The result of `baton bench engine`, as JSON and as a table of at most 120 columns.

use baton_engine::device::DeviceLimits;
use baton_engine::step_time::DeviceRates;
use baton_observability::roofline::{Peaks, Work};
use serde::Serialize;

use super::machine::Machine;
use super::predict::{Errors, MEDIAN_ERROR_MAX, P95_ERROR_MAX, Prediction};
use super::rig::Measured;
use super::sweep::{Phase, Point, Skipped};
use crate::commands::bench::cost::Cost;
use crate::commands::bench::report::Table;

/// What was measured, on what.
#[derive(Clone, Debug, Serialize)]
pub struct Setup {
    pub machine: Machine,
    pub model: String,
    pub architecture: String,
    pub parameters: u64,
    /// Bytes of weights that a decode step reads.
    pub weight_bytes: u64,
    pub formats: String,
    pub numerics: String,
    pub threads: usize,
    pub isa: String,
    /// Whether a flag chose the instruction set; otherwise the processor's features did.
    pub isa_asked_for: bool,
    pub kv_dtype: String,
    pub block_size: u32,
    pub kv_pool_bytes: u64,
    /// Whether the pool lies in memory that other processes can be lent.
    pub kv_lendable: bool,
    pub kv_token_bytes: u64,
    pub rounds: u32,
}

impl Setup {
    /// `1 thread`, `2 threads`.
    pub fn threads_in_words(&self) -> String {
        let ending = if self.threads == 1 { "" } else { "s" };
        format!("{} thread{ending}", self.threads)
    }
}

/// What the threads could do at best, measured in the same run.
#[derive(Clone, Debug, Serialize)]
pub struct Limits {
    pub int8_ops_per_s: f64,
    pub f32_ops_per_s: f64,
    /// Absent where f16 is only a storage format.
    pub f16_ops_per_s: Option<f64>,
    /// The peak that MFU is a share of: of the arithmetic this model's weights ask for.
    pub product_ops_per_s: f64,
    pub read: Vec<ReadRate>,
    /// By which share the two looks, before and after the sweep, differ at most; the
    /// better one counts.
    pub drift: f64,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub struct ReadRate {
    pub working_set_bytes: usize,
    pub bytes_per_s: f64,
}

/// What one kind of step took.
#[derive(Clone, Debug, Serialize)]
pub struct PointReport {
    #[serde(flatten)]
    pub point: Point,
    pub steps: usize,
    /// The median step.
    pub step_ms: f64,
    pub step_ms_min: f64,
    pub step_ms_max: f64,
    /// Tokens computed per second; for decode these are new tokens.
    pub tokens_per_s: f64,
    pub weight_bytes: u64,
    pub kv_bytes: u64,
    pub product_ops: u64,
    pub attention_ops: u64,
    /// Reading a working set of this step's size at best.
    pub read_limit_bytes_per_s: f64,
    pub mfu: f64,
    pub mbu: f64,
    /// The time the step would take at the limit that binds it, over its time.
    pub share_of_limit: f64,
    /// `memory` or `compute`.
    pub bound_by: &'static str,
}

/// The whole result.
#[derive(Clone, Debug, Serialize)]
pub struct EngineReport {
    pub bench: &'static str,
    pub setup: Setup,
    pub limits: Limits,
    pub points: Vec<PointReport>,
    pub skipped: Vec<Skipped>,
    pub prediction: Option<Prediction>,
    pub cost: Cost,
}

impl Limits {
    /// As measured, and as this model's work is held against them.
    pub fn of(limits: &DeviceLimits, drift: f64, rates: DeviceRates) -> Self {
        Self {
            int8_ops_per_s: limits.compute.int8_ops_per_second,
            f32_ops_per_s: limits.compute.f32_ops_per_second,
            f16_ops_per_s: limits.compute.f16_ops_per_second,
            product_ops_per_s: rates.product_ops_per_second,
            read: limits
                .read
                .iter()
                .map(|limit| ReadRate {
                    working_set_bytes: limit.bytes,
                    bytes_per_s: limit.bytes_per_second,
                })
                .collect(),
            drift,
        }
    }
}

/// Each point against the limits.
pub fn points(
    measured: &[Measured],
    limits: &DeviceLimits,
    rates: DeviceRates,
) -> Vec<PointReport> {
    let report = |of| point(of, limits, rates);
    measured.iter().map(report).collect()
}

fn point(of: &Measured, limits: &DeviceLimits, rates: DeviceRates) -> PointReport {
    let (work, seconds) = (&of.work, of.median());
    let read = limits.read_bytes_per_second(work.bytes());
    let peaks = Peaks {
        flops_per_second: rates.product_ops_per_second,
        bytes_per_second: read,
    };
    let needed = Work {
        flops: work.ops() as f64,
        bytes: work.bytes() as f64,
    };
    // Attention is of floats, whose peak is lower than that of integer products.
    let attention_at_peak = work.attention_ops as f64 / rates.attention_ops_per_second;
    let at_peaks = Work {
        flops: work.product_ops as f64 + attention_at_peak * rates.product_ops_per_second,
        ..needed
    };
    let bounds = |from: f64, to: f64| if from > to { from } else { to };
    PointReport {
        point: of.point,
        steps: of.seconds.len(),
        step_ms: seconds * 1e3,
        step_ms_min: of.seconds.iter().copied().fold(f64::INFINITY, f64::min) * 1e3,
        step_ms_max: of.seconds.iter().copied().fold(0.0, bounds) * 1e3,
        tokens_per_s: work.tokens as f64 / seconds,
        weight_bytes: work.weight_bytes,
        kv_bytes: work.kv_bytes,
        product_ops: work.product_ops,
        attention_ops: work.attention_ops,
        read_limit_bytes_per_s: read,
        mfu: peaks.mfu(&needed, seconds),
        mbu: peaks.mbu(&needed, seconds),
        share_of_limit: peaks.seconds_min(&at_peaks) / seconds,
        bound_by: if peaks.is_memory_bound(&at_peaks) {
            "memory"
        } else {
            "compute"
        },
    }
}

impl EngineReport {
    /// The result for people.
    pub fn table(&self) -> String {
        let setup = &self.setup;
        let mut table = Table::new(format!(
            "{}: {}, {:.0} M parameters, {:.1} MB of weights a step",
            setup.model,
            setup.architecture,
            setup.parameters as f64 / 1e6,
            setup.weight_bytes as f64 / 1e6,
        ));
        table.line(format!("weights {}", setup.formats));
        table.line(format!(
            "numerics {}; KV {} in blocks of {}, {:.1} KiB a token, pool {} MiB{}",
            setup.numerics,
            setup.kv_dtype,
            setup.block_size,
            setup.kv_token_bytes as f64 / 1024.0,
            setup.kv_pool_bytes >> 20,
            if setup.kv_lendable { ", lendable" } else { "" },
        ));
        table.line(format!(
            "{}, {} cores, {:.1} GiB; {}, kernels {} ({})",
            setup.machine.cpu,
            setup.machine.cores,
            setup.machine.memory_bytes as f64 / f64::from(1 << 30),
            setup.threads_in_words(),
            setup.isa,
            if setup.isa_asked_for {
                "asked for"
            } else {
                "the widest the processor has"
            },
        ));
        self.limits(&mut table);
        for phase in [Phase::Prefill, Phase::Decode] {
            self.points(&mut table, phase);
        }
        for skipped in &self.skipped {
            table.line(format!("skipped {}: {}", skipped.point, skipped.reason));
        }
        if let Some(prediction) = &self.prediction {
            judged(&mut table, prediction);
        }
        self.others(&mut table);
        table.finish()
    }

    fn limits(&self, table: &mut Table) {
        let limits = &self.limits;
        let f16 = limits.f16_ops_per_s.map_or_else(
            || "f16 only stored".to_owned(),
            |rate| format!("f16 {:.0}", rate / 1e9),
        );
        table.line(format!(
            "\nlimits of these threads, Gop/s: int8 {:.0}, f32 {:.0}, {f16}; of this model's products {:.0}",
            limits.int8_ops_per_s / 1e9,
            limits.f32_ops_per_s / 1e9,
            limits.product_ops_per_s / 1e9,
        ));
        let (mut sizes, mut rates) = ("read, MiB ".to_owned(), "     GB/s ".to_owned());
        for read in &limits.read {
            sizes += &format!("{:>8}", read.working_set_bytes >> 20);
            rates += &format!("{:>8.1}", read.bytes_per_s / 1e9);
        }
        table.line(sizes);
        table.line(rates);
        table.line(format!(
            "the better of a look before and one after the sweep, which differ by up to {:.0} %",
            100.0 * limits.drift
        ));
    }

    fn points(&self, table: &mut Table, phase: Phase) {
        let of_phase = |point: &&PointReport| point.point.phase == phase;
        if !self.points.iter().any(|point| of_phase(&point)) {
            return;
        }
        let (name, size) = match phase {
            Phase::Prefill => ("prefill", "tokens"),
            Phase::Decode => ("decode", "batch"),
        };
        table.line(format!(
            "\n{name:<8}{size:>7}{:>8}{:>7}{:>11}{:>21}{:>11}{:>10}{:>9}{:>6}{:>6}  of limit",
            "context",
            "steps",
            "ms/step",
            "min .. max",
            "tokens/s",
            "MB/step",
            "Gop/step",
            "MBU",
            "MFU",
        ));
        for point in self.points.iter().filter(of_phase) {
            let size = match phase {
                Phase::Prefill => point.point.tokens,
                Phase::Decode => point.point.sequences,
            };
            table.line(format!(
                "{:<8}{size:>7}{:>8}{:>7}{:>11.2}{:>21}{:>11.1}{:>10.1}{:>9.2}{:>5.0}%{:>5.0}%{:>5.0}% {}",
                "",
                point.point.depth,
                point.steps,
                point.step_ms,
                format!("{:.2} .. {:.2}", point.step_ms_min, point.step_ms_max),
                point.tokens_per_s,
                (point.weight_bytes + point.kv_bytes) as f64 / 1e6,
                (point.product_ops + point.attention_ops) as f64 / 1e9,
                100.0 * point.mbu,
                100.0 * point.mfu,
                100.0 * point.share_of_limit,
                point.bound_by,
            ));
        }
    }

    /// What else the machine did meanwhile: noise that the figures contain.
    fn others(&self, table: &mut Table) {
        let cost = &self.cost;
        let mut text = format!("\n{:.0} s on {} cores", cost.wall_s, cost.cores);
        if let Some(others) = cost.other_cores {
            text += &format!("; others used {others:.2} of them");
        }
        if let Some([one, five, fifteen]) = cost.load_average {
            text += &format!("; load average before {one} {five} {fifteen}");
        }
        table.line(text);
    }
}

fn judged(table: &mut Table, prediction: &Prediction) {
    table.line(format!(
        "\npredicted from {} steps of the points marked *; `error` is predicted over measured, minus 1",
        prediction.steps_learned_from
    ));
    table.line(format!(
        "{:<30}{:>14}{:>14}{:>9}",
        "", "predicted ms", "measured ms", "error"
    ));
    for point in &prediction.points {
        let mark = if point.point.calibrates { " *" } else { "" };
        table.line(format!(
            "{:<30}{:>14.2}{:>14.2}{:>+8.1}%",
            format!("{}{mark}", point.point),
            point.predicted_ms,
            point.measured_ms,
            100.0 * point.error,
        ));
    }
    let mut line = |what: &str, errors: &Errors| {
        table.line(format!(
            "{what}: median {:.1} %, p95 {:.1} %, largest {:.1} % of {} points",
            100.0 * errors.median,
            100.0 * errors.p95,
            100.0 * errors.max,
            errors.points,
        ));
    };
    if let Some(unseen) = &prediction.unseen {
        line("errors at unseen points", unseen);
    }
    line("errors at all points", &prediction.all);
    let met = if prediction.within_targets {
        "met"
    } else {
        "missed"
    };
    table.line(format!(
        "target (median {:.0} %, p95 {:.0} %): {met}",
        100.0 * MEDIAN_ERROR_MAX,
        100.0 * P95_ERROR_MAX
    ));
    table.line("times longer than at its limit, by part of a step:".to_owned());
    for half in prediction.terms.chunks(4) {
        let terms: Vec<String> = half
            .iter()
            .map(|term| format!("{} {:.2}", term.name, term.coefficient))
            .collect();
        table.line(format!("  {}", terms.join(", ")));
    }
}
