//! A sweep as a picture: the gaps between tokens above, the throughput below, each
//! over the offered loads in their order. Plain SVG, readable on light and dark pages.

use std::fmt::Write as _;

use super::{Curve, Point, SweepReport, offered};

const WIDTH: f64 = 860.0;
const PANEL: f64 = 250.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 210.0;
const TOP: f64 = 50.0;
const BETWEEN: f64 = 60.0;
const COLOURS: [&str; 8] = [
    "#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#17becf", "#bcbd22", "#7f7f7f",
];
/// This run's own colour.
const OWN: &str = "#d62728";

/// One panel: what it shows, and where.
struct Panel<'a> {
    title: &'a str,
    top: f64,
    value: fn(&Point) -> f64,
    /// A line across, with its name.
    mark: Option<(f64, String)>,
}

/// The picture.
pub fn svg(report: &SweepReport) -> String {
    let curves: Vec<&Curve> = report.against.iter().chain([&report.curve]).collect();
    let loads = loads(&curves);
    let height = TOP + 2.0 * PANEL + BETWEEN + 60.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n\
         <text x=\"{LEFT}\" y=\"24\" font-size=\"15\">{}: prompt {}, output {}</text>\n",
        escape(&report.target.model),
        escape(&report.prompt_tokens),
        escape(&report.output_tokens),
    );
    let mark = report.slo_itl_ms.map(|ms| (ms, format!("target {ms} ms")));
    let panels = [
        Panel {
            title: "ITL p99, ms",
            top: TOP,
            value: |point| point.itl_p99_ms,
            mark,
        },
        Panel {
            title: "output tokens/s",
            top: TOP + PANEL + BETWEEN,
            value: |point| point.output_tokens_per_s,
            mark: None,
        },
    ];
    for panel in &panels {
        draw(&mut out, panel, &curves, &loads);
    }
    for (at, curve) in curves.iter().enumerate() {
        let (y, x) = (TOP + 16.0 + 18.0 * at as f64, WIDTH - RIGHT + 20.0);
        let colour = colour(at, curves.len());
        let _ = writeln!(
            out,
            "<rect x=\"{x}\" y=\"{:.1}\" width=\"12\" height=\"12\" fill=\"{colour}\"/>\
             <text x=\"{:.1}\" y=\"{y:.1}\">{}</text>",
            y - 10.0,
            x + 18.0,
            escape(&curve.label),
        );
    }
    out.push_str("</svg>\n");
    out
}

/// Every load that some curve has, in the order of the longest curve, then of the others.
fn loads(curves: &[&Curve]) -> Vec<String> {
    let mut by_length: Vec<&&Curve> = curves.iter().collect();
    by_length.sort_by_key(|curve| std::cmp::Reverse(curve.points.len()));
    let mut loads = Vec::new();
    for point in by_length.into_iter().flat_map(|curve| &curve.points) {
        let load = offered(point.offered);
        if !loads.contains(&load) {
            loads.push(load);
        }
    }
    loads
}

fn draw(out: &mut String, panel: &Panel<'_>, curves: &[&Curve], loads: &[String]) {
    let values = curves
        .iter()
        .flat_map(|curve| &curve.points)
        .map(panel.value);
    let marked = panel.mark.as_ref().map_or(0.0, |(value, _)| *value);
    let most = nice(values.fold(marked, f64::max));
    let right = WIDTH - RIGHT;
    let bottom = panel.top + PANEL;
    let y = |value: f64| bottom - value / most * PANEL;
    let step = (right - LEFT) / loads.len().max(2).saturating_sub(1) as f64;
    let x = |load: &str| {
        let at = loads.iter().position(|known| known == load).unwrap_or(0);
        LEFT + step * at as f64
    };
    let _ = writeln!(
        out,
        "<text x=\"{LEFT}\" y=\"{:.1}\" font-weight=\"bold\">{}</text>",
        panel.top - 8.0,
        panel.title
    );
    for fifth in 0..=5 {
        let value = most * f64::from(fifth) / 5.0;
        let at = y(value);
        let _ = writeln!(
            out,
            "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#dddddd\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 8.0,
            at + 4.0,
            (value * 100.0).round() / 100.0,
        );
    }
    for load in loads {
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{load}</text>",
            x(load),
            bottom + 18.0,
        );
    }
    if let Some((value, name)) = &panel.mark {
        let at = y(*value);
        let _ = writeln!(
            out,
            "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#000000\" stroke-dasharray=\"6 4\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{name}</text>",
            right,
            at - 5.0,
        );
    }
    for (at, curve) in curves.iter().enumerate() {
        let colour = colour(at, curves.len());
        let places: Vec<(f64, f64)> = curve
            .points
            .iter()
            .map(|point| (x(&offered(point.offered)), y((panel.value)(point))))
            .collect();
        let line: Vec<String> = places
            .iter()
            .map(|(x, y)| format!("{x:.1},{y:.1}"))
            .collect();
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            line.join(" ")
        );
        for (x, y) in places {
            let _ = writeln!(
                out,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"{colour}\"/>"
            );
        }
    }
}

/// The colour of curve `at` of `count`; the last is this run.
fn colour(at: usize, count: usize) -> &'static str {
    if at + 1 == count {
        OWN
    } else {
        COLOURS[at % COLOURS.len()]
    }
}

/// The next of 1, 2, 5 times a power of ten: the top of an axis.
fn nice(most: f64) -> f64 {
    if !(most.is_finite() && most > 0.0) {
        return 1.0;
    }
    let power = 10_f64.powf(most.log10().floor());
    let steps = [1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0];
    let step = steps.iter().find(|step| **step * power >= most);
    step.unwrap_or(&10.0) * power
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_ends_at_a_round_number_at_or_above_the_largest_value() {
        for (most, top) in [
            (0.0, 1.0),
            (f64::NAN, 1.0),
            (9.1, 10.0),
            (100.0, 100.0),
            (110.0, 150.0),
        ] {
            assert!((nice(most) - top).abs() < 1e-9, "{most}");
        }
    }

    #[test]
    fn text_cannot_break_the_picture() {
        assert_eq!(escape("a<b>&c"), "a&lt;b&gt;&amp;c");
    }
}
