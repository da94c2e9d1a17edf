//! Predicted against measured step times, both logarithmic, as an SVG written by hand: a
//! square, two bands and some dots need no plotting library.

use std::fmt::Write as _;

use super::predict::{Judged, MEDIAN_ERROR_MAX, P95_ERROR_MAX, Prediction};
use super::report::Setup;
use super::sweep::Phase;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 700.0;
/// The square's corner and side.
const LEFT: f64 = 80.0;
const TOP: f64 = 70.0;
const SIDE: f64 = 560.0;

const PREFILL: &str = "#c2571a";
const DECODE: &str = "#1f5fa8";

/// The same logarithmic scale for both axes, over all times and a little beyond.
struct Scale {
    low: f64,
    high: f64,
}

impl Scale {
    fn over(points: &[Judged]) -> Self {
        let times = || {
            points
                .iter()
                .flat_map(|judged| [judged.predicted_ms, judged.measured_ms])
                .filter(|ms| ms.is_finite() && *ms > 0.0)
        };
        let low = times().fold(f64::INFINITY, f64::min);
        let high = times().fold(0.0, f64::max);
        if low > high {
            return Self {
                low: 0.1,
                high: 10.0,
            };
        }
        Self {
            low: low / 1.5,
            high: high * 1.5,
        }
    }

    /// 0 to 1 along the axis, kept inside.
    fn share(&self, ms: f64) -> f64 {
        ((ms / self.low).ln() / (self.high / self.low).ln()).clamp(0.0, 1.0)
    }

    fn x(&self, ms: f64) -> f64 {
        LEFT + SIDE * self.share(ms)
    }

    fn y(&self, ms: f64) -> f64 {
        TOP + SIDE * (1.0 - self.share(ms))
    }

    /// 1, 2 and 5 of every decade inside.
    fn ticks(&self) -> Vec<f64> {
        let decades = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
        decades
            .flat_map(|decade| [1.0, 2.0, 5.0].map(|n| n * 10f64.powi(decade)))
            .filter(|ms| (self.low..=self.high).contains(ms))
            .collect()
    }
}

/// The drawing.
pub fn svg(prediction: &Prediction, setup: &Setup) -> String {
    let scale = Scale::over(&prediction.points);
    let mut out = String::new();
    let mut line = |text: String| {
        out.push_str(&text);
        out.push('\n');
    };
    line(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         width=\"{WIDTH}\" height=\"{HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">"
    ));
    line(format!(
        "<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>"
    ));
    line(text(
        LEFT,
        28.0,
        "start",
        &format!(
            "Step time, predicted against measured: {}, {}, {}, KV {}",
            setup.model,
            setup.threads_in_words(),
            setup.isa,
            setup.kv_dtype
        ),
    ));
    line(text(
        LEFT,
        48.0,
        "start",
        &format!(
            "error over {} points: median {:.1} %, p95 {:.1} %",
            prediction.all.points,
            100.0 * prediction.all.median,
            100.0 * prediction.all.p95
        ),
    ));
    for (share, fill) in [(P95_ERROR_MAX, "#eeeeee"), (MEDIAN_ERROR_MAX, "#dddddd")] {
        line(band(&scale, share, fill));
    }
    for ms in scale.ticks() {
        let (x, y) = (scale.x(ms), scale.y(ms));
        let (right, bottom) = (LEFT + SIDE, TOP + SIDE);
        line(format!(
            "<path d=\"M{x:.1} {TOP}V{bottom}M{LEFT} {y:.1}H{right}\" stroke=\"#cccccc\" stroke-width=\"0.5\"/>"
        ));
        line(text(x, bottom + 18.0, "middle", &format!("{ms}")));
        line(text(LEFT - 8.0, y + 4.0, "end", &format!("{ms}")));
    }
    line(format!(
        "<path d=\"M{LEFT} {}L{} {TOP}\" stroke=\"black\"/>",
        TOP + SIDE,
        LEFT + SIDE
    ));
    line(format!(
        "<rect x=\"{LEFT}\" y=\"{TOP}\" width=\"{SIDE}\" height=\"{SIDE}\" fill=\"none\" stroke=\"black\"/>"
    ));
    for judged in &prediction.points {
        line(dot(&scale, judged));
    }
    legend(&mut line);
    line(text(
        LEFT + SIDE / 2.0,
        TOP + SIDE + 42.0,
        "middle",
        "measured, ms",
    ));
    line(format!(
        "<text transform=\"translate(24 {}) rotate(-90)\" text-anchor=\"middle\">predicted, ms</text>",
        TOP + SIDE / 2.0
    ));
    line("</svg>".to_owned());
    out
}

/// Predictions within `share` of what was measured.
fn band(scale: &Scale, share: f64, fill: &str) -> String {
    let mut path = String::new();
    let steps = 64;
    let at = |i: usize| scale.low * (scale.high / scale.low).powf(i as f64 / steps as f64);
    let upper = (0..=steps).map(|i| (at(i), at(i) * (1.0 + share)));
    let lower = (0..=steps).rev().map(|i| (at(i), at(i) * (1.0 - share)));
    for (n, (measured, predicted)) in upper.chain(lower).enumerate() {
        let command = if n == 0 { 'M' } else { 'L' };
        let _ = write!(
            path,
            "{command}{:.1} {:.1}",
            scale.x(measured),
            scale.y(predicted)
        );
    }
    format!("<path d=\"{path}Z\" fill=\"{fill}\"/>")
}

/// Full where the model had not seen the point, open where it had.
fn dot(scale: &Scale, judged: &Judged) -> String {
    let colour = match judged.point.phase {
        Phase::Prefill => PREFILL,
        Phase::Decode => DECODE,
    };
    format!(
        "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\" {}><title>{}: {:.2} ms predicted, {:.2} ms measured</title></circle>",
        scale.x(judged.measured_ms),
        scale.y(judged.predicted_ms),
        style(colour, judged.point.calibrates),
        judged.point,
        judged.predicted_ms,
        judged.measured_ms,
    )
}

fn style(colour: &str, open: bool) -> String {
    let fill = if open { "white" } else { colour };
    format!("fill=\"{fill}\" stroke=\"{colour}\" stroke-width=\"1.5\"")
}

fn legend(line: &mut impl FnMut(String)) {
    let entries = [
        (PREFILL, false, "prefill"),
        (PREFILL, true, "prefill, calibrated on"),
        (DECODE, false, "decode"),
        (DECODE, true, "decode, calibrated on"),
    ];
    for (n, (colour, open, name)) in entries.into_iter().enumerate() {
        let y = TOP + 20.0 + 18.0 * n as f64;
        line(format!(
            "<circle cx=\"{}\" cy=\"{y}\" r=\"4\" {}/>",
            LEFT + 16.0,
            style(colour, open)
        ));
        line(text(LEFT + 28.0, y + 4.0, "start", name));
    }
    let y = TOP + 20.0 + 18.0 * entries.len() as f64;
    let bands = format!(
        "bands: within {:.0} % and {:.0} %",
        100.0 * MEDIAN_ERROR_MAX,
        100.0 * P95_ERROR_MAX
    );
    line(text(LEFT + 12.0, y + 4.0, "start", &bands));
}

fn text(x: f64, y: f64, anchor: &str, said: &str) -> String {
    let said = said
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;");
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{said}</text>")
}
