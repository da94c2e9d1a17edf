//! The list of all metrics, for documentation and for tests.
//!
//! It is derived from the declarations in [`crate::metrics`]; a metric cannot be
//! in a scrape and not in here.

use std::fmt::Write as _;

use crate::instrument::Kind;
use crate::metrics::{RouterMetrics, WorkerMetrics};

/// What a metric's value counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Seconds,
    Bytes,
    BytesPerSecond,
    Flops,
    FlopsPerSecond,
    Tokens,
    Blocks,
    Requests,
    Sequences,
    Workers,
    Lanes,
    Events,
    /// A share between 0 and 1.
    Ratio,
    /// One quantity over another of its kind.
    Times,
    /// 0 or 1.
    Flag,
}

impl Unit {
    /// The unit as documentation shows it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Seconds => "s",
            Self::Bytes => "bytes",
            Self::BytesPerSecond => "bytes/s",
            Self::Flops => "FLOP",
            Self::FlopsPerSecond => "FLOP/s",
            Self::Tokens => "tokens",
            Self::Blocks => "blocks",
            Self::Requests => "requests",
            Self::Sequences => "sequences",
            Self::Workers => "workers",
            Self::Lanes => "lanes",
            Self::Events => "events",
            Self::Ratio => "0 to 1",
            Self::Times => "times",
            Self::Flag => "0 or 1",
        }
    }
}

/// One metric as declared.
#[derive(Clone, Debug)]
pub struct MetricSpec {
    /// As in a scrape; counters include `_total`.
    pub name: &'static str,
    pub kind: Kind,
    pub unit: Unit,
    /// Label keys and the values each can take.
    pub labels: Vec<(&'static str, Vec<&'static str>)>,
    /// Upper bounds of a histogram's buckets, empty otherwise.
    pub bounds: &'static [f64],
    pub help: &'static str,
}

/// The catalogue as markdown: one table for routers, one for workers.
pub fn markdown() -> String {
    let mut text = String::new();
    for (title, specs) in [
        ("Router", RouterMetrics::catalogue()),
        ("Worker", WorkerMetrics::catalogue()),
    ] {
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "## {title}\n\n| metric | type | unit | labels | meaning |"
        );
        text.push_str("|---|---|---|---|---|\n");
        for spec in specs {
            let labels: Vec<String> = spec
                .labels
                .iter()
                .map(|(key, values)| format!("`{key}`: {}", values.join(", ")))
                .collect();
            let _ = writeln!(
                text,
                "| `{}` | {} | {} | {} | {} |",
                spec.name,
                spec.kind.name(),
                spec.unit.name(),
                labels.join("; "),
                spec.help,
            );
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exposition::{CONSTANT_LABELS, metrics_text};
    use crate::{Registry, metrics_text_merged};

    fn families(text: &str) -> Vec<(String, String)> {
        text.lines()
            .filter_map(|line| line.strip_prefix("# TYPE "))
            .filter_map(|line| line.split_once(' '))
            .map(|(name, kind)| (name.to_owned(), kind.to_owned()))
            .collect()
    }

    fn expected(specs: &[MetricSpec]) -> Vec<(String, String)> {
        specs
            .iter()
            .map(|spec| {
                let name = match spec.kind {
                    Kind::Counter => spec.name.strip_suffix("_total").unwrap(),
                    _ => spec.name,
                };
                (name.to_owned(), spec.kind.name().to_owned())
            })
            .collect()
    }

    #[test]
    fn a_scrape_holds_exactly_the_declared_families() {
        let mut registry = Registry::default();
        let _router = RouterMetrics::new(&mut registry);
        assert_eq!(
            families(&metrics_text(&registry)),
            expected(&RouterMetrics::catalogue())
        );
        let mut registry = Registry::default();
        let _worker = WorkerMetrics::new(&mut registry);
        assert_eq!(
            families(&metrics_text(&registry)),
            expected(&WorkerMetrics::catalogue())
        );
    }

    #[test]
    fn the_two_sets_share_no_name() {
        let mut registry = Registry::default();
        let _router = RouterMetrics::new(&mut registry);
        let mut other = Registry::default();
        let _worker = WorkerMetrics::new(&mut other);
        let merged = families(&metrics_text_merged(&[&registry, &other]));
        let all = RouterMetrics::catalogue().len() + WorkerMetrics::catalogue().len();
        assert_eq!(merged.len(), all);
    }

    #[test]
    fn names_end_in_their_unit_and_counters_in_total() {
        for spec in RouterMetrics::catalogue()
            .iter()
            .chain(&WorkerMetrics::catalogue())
        {
            assert_eq!(
                spec.name.ends_with("_total"),
                spec.kind == Kind::Counter,
                "{}",
                spec.name
            );
            assert_eq!(
                spec.bounds.is_empty(),
                spec.kind != Kind::Histogram,
                "{}",
                spec.name
            );
            if spec.unit == Unit::Seconds {
                assert!(spec.name.ends_with("_seconds"), "{}", spec.name);
            }
            assert!(spec.help.ends_with('.'), "{}", spec.name);
            assert!(!spec.help.contains('|'), "{}", spec.name);
            for (key, _) in &spec.labels {
                assert!(
                    !CONSTANT_LABELS.contains(key),
                    "{} has label {key} twice",
                    spec.name
                );
            }
        }
    }

    #[test]
    fn the_documentation_names_every_metric_and_label_value() {
        let text = markdown();
        assert!(text.contains("| `vllm:kv_cache_usage_perc` | gauge | 0 to 1 |"));
        assert!(text.contains("`phase`: admit, tokenize, route, reserve, prefill_queue, prefill, first_token_return, send"));
        let rows = text.lines().filter(|line| line.starts_with("| `")).count();
        assert_eq!(
            rows,
            RouterMetrics::catalogue().len() + WorkerMetrics::catalogue().len()
        );
    }
}
