//! `baton bench engine`: one engine alone against the limits of the machine it runs on.
//!
//! ```text
//! flags      the command line
//! machine    which machine this is, and what its threads could do at best
//! sweep      the points: prefill chunks and decode batches at depths; which fit the KV pool
//! rig        an executor with filled KV, driven step by step and timed
//! predict    a part of the points calibrates the step-time model, all of them judge it
//! report     the result as a table and as JSON
//! plot       predicted against measured as an SVG
//! ```
//!
//! Steps are driven through the executor, without scheduler, sampling or sockets: what is
//! measured is the arithmetic and the memory, and both limits are measured in the same run.

pub mod flags;
mod machine;
mod plot;
mod predict;
mod report;
mod rig;
mod sweep;

use std::time::Duration;

use anyhow::Context as _;
use baton_engine::device::{DeviceLimits, DeviceThreads};
use baton_engine::kv::PoolSharing;
use baton_engine::step_work::ModelCost;
use baton_kernels::Isa;

use super::cost::Meter;
use super::report::{points_bar, publish};
use crate::settings::{flag_error, load_model};

use flags::EngineBenchArgs;
use machine::Machine;
use report::{EngineReport, Setup};
use rig::Rig;
use sweep::Sweep;

/// What one figure of the machine's limits may take.
const LIMIT_FIGURE: Duration = Duration::from_millis(60);

/// Measures, prints and stores.
///
/// # Errors
/// A model that cannot be loaded, flags that leave nothing to measure, a file that cannot
/// be written.
pub fn run(args: &EngineBenchArgs) -> anyhow::Result<()> {
    let report = measure(args)?;
    if let (Some(path), Some(prediction)) = (&args.plot, &report.prediction) {
        std::fs::write(path, plot::svg(prediction, &report.setup))
            .with_context(|| format!("`--plot {}`: write", path.display()))?;
    }
    publish(&report, &report.table(), &args.report)
}

fn measure(args: &EngineBenchArgs) -> anyhow::Result<EngineReport> {
    let quiet = args.report.quiet;
    let machine = Machine::here();
    let threads = DeviceThreads {
        isa: args.isa.unwrap_or_else(Isa::detect),
        threads: args.threads.map_or(machine.cores.max(1), |n| n as usize),
        cores: Vec::new(),
    };
    let served = load_model(&args.model, None, quiet)?;
    let model = served.model;
    let layout = model.kv_layout(args.block_size, args.kv_dtype);
    let pool_bytes = args.kv_pool.unwrap_or_else(|| machine.kv_pool_bytes());
    let sweep = Sweep::plan(args, &layout, model.context_max(), pool_bytes);
    if sweep.points.is_empty() {
        return Err(flag_error(sweep.nothing_left()));
    }

    let meter = Meter::start(None);
    let bar = points_bar(sweep.points.len() as u64, quiet);
    bar.set_message("the machine's limits");
    let cost = ModelCost::of_model(&model, &layout);
    let sizes = machine.working_sets(cost.weight_bytes());
    let look = || {
        DeviceLimits::measure(&threads, &sizes, LIMIT_FIGURE)
            .context("measure the machine's limits")
    };
    let before = look()?;
    let sharing = match args.kv_lendable {
        true => PoolSharing::Lendable,
        false => PoolSharing::Private,
    };
    let mut rig = Rig::new(&model, layout.clone(), &threads, &sweep, sharing)?;
    let mut measured = Vec::new();
    for point in &sweep.points {
        bar.set_message(point.to_string());
        measured.push(rig.measure(point, args.rounds, args.point_seconds)?);
        bar.inc(1);
    }
    bar.set_message("the machine's limits again");
    let (limits, limits_drift) = before.best_of(&look()?);
    bar.finish_and_clear();

    let rates = limits.rates(&cost);
    let prediction = match args.predict {
        true => Some(predict::judge(&measured, rates).map_err(flag_error)?),
        false => None,
    };
    let setup = Setup {
        machine,
        model: served.name,
        architecture: model.config().architecture.clone(),
        parameters: model.parameters(),
        weight_bytes: cost.weight_bytes(),
        formats: model.formats().to_owned(),
        numerics: layout.numerics.to_string(),
        threads: threads.threads,
        isa: threads.isa.to_string(),
        isa_asked_for: args.isa.is_some(),
        kv_dtype: layout.dtype.to_string(),
        block_size: layout.block_size,
        kv_pool_bytes: rig.kv_bytes(),
        kv_lendable: args.kv_lendable,
        kv_token_bytes: layout.token_bytes() as u64,
        rounds: args.rounds,
    };
    Ok(EngineReport {
        bench: "engine",
        setup,
        limits: report::Limits::of(&limits, limits_drift, rates),
        points: report::points(&measured, &limits, rates),
        skipped: sweep.skipped,
        prediction,
        cost: meter.stop(),
    })
}
