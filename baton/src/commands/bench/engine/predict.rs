//! How well the engine's step-time model foretells what was measured.
//!
//! The model starts from the measured limits, learns from the steps of every other point
//! (as on a chessboard, so that it must carry over to other batches and depths), and is
//! judged against the median time of every point.

use std::time::Duration;

use baton_engine::step_time::{DeviceRates, StepTimeModel, TERM_NAMES};
use baton_proto::Error;
use serde::Serialize;

use super::rig::Measured;
use super::sweep::Point;

/// The targets that the prediction is held to.
pub const MEDIAN_ERROR_MAX: f64 = 0.15;
pub const P95_ERROR_MAX: f64 = 0.30;

/// A predicted and a measured time of one point.
#[derive(Clone, Debug, Serialize)]
pub struct Judged {
    pub point: Point,
    pub predicted_ms: f64,
    pub measured_ms: f64,
    /// Predicted over measured, minus 1.
    pub error: f64,
}

/// Sizes of relative errors over some points.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Errors {
    pub points: usize,
    pub median: f64,
    pub p95: f64,
    pub max: f64,
}

/// How far a part of a step is from its limit.
#[derive(Clone, Debug, Serialize)]
pub struct Term {
    pub name: &'static str,
    /// Times as long as at the limit.
    pub coefficient: f64,
}

/// The verdict.
#[derive(Clone, Debug, Serialize)]
pub struct Prediction {
    pub steps_learned_from: u64,
    /// Over points it had not seen; `None` if it had seen all.
    pub unseen: Option<Errors>,
    pub all: Errors,
    pub within_targets: bool,
    pub terms: Vec<Term>,
    pub points: Vec<Judged>,
}

/// Calibrates and judges.
///
/// # Errors
/// Rates that are none.
pub fn judge(measured: &[Measured], rates: DeviceRates) -> Result<Prediction, Error> {
    let mut model = StepTimeModel::new(rates)?;
    for of in measured.iter().filter(|of| of.point.calibrates) {
        for seconds in &of.seconds {
            model.observe(&of.work, Duration::from_secs_f64(*seconds));
        }
    }
    let points: Vec<Judged> = measured
        .iter()
        .map(|of| {
            let (predicted, median) = (model.predict(&of.work).as_secs_f64(), of.median());
            Judged {
                point: of.point,
                predicted_ms: predicted * 1e3,
                measured_ms: median * 1e3,
                error: predicted / median - 1.0,
            }
        })
        .collect();
    let all = errors(points.iter()).ok_or_else(|| Error::invalid("batch", "no point"))?;
    Ok(Prediction {
        steps_learned_from: model.steps_observed(),
        unseen: errors(points.iter().filter(|judged| !judged.point.calibrates)),
        all,
        within_targets: all.median <= MEDIAN_ERROR_MAX && all.p95 <= P95_ERROR_MAX,
        terms: TERM_NAMES
            .into_iter()
            .zip(model.coefficients())
            .map(|(name, coefficient)| Term { name, coefficient })
            .collect(),
        points,
    })
}

/// Nearest-rank percentiles of the errors' sizes.
fn errors<'a>(points: impl Iterator<Item = &'a Judged>) -> Option<Errors> {
    let mut sizes: Vec<f64> = points.map(|judged| judged.error.abs()).collect();
    sizes.sort_unstable_by(f64::total_cmp);
    let rank = |share: f64| {
        let at = (share * sizes.len() as f64).ceil() as usize;
        sizes[at.clamp(1, sizes.len()) - 1]
    };
    (!sizes.is_empty()).then(|| Errors {
        points: sizes.len(),
        median: rank(0.5),
        p95: rank(0.95),
        max: rank(1.0),
    })
}
