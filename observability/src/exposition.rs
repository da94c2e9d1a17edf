//! From registries to OpenMetrics text.
//!
//! A process that runs several roles has one registry for each; a scrape of the
//! process must still name each family once, so [`metrics_text_merged`] joins
//! them. The registries' constant labels keep their series apart.

use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;

use crate::label_value::label_value;

/// The content type of the text this module makes.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Names of constant labels; no metric has a label of its own that is called so.
pub const CONSTANT_LABELS: [&str; 4] = ["model_name", "engine", "role", "pool"];

/// A registry whose every series carries `labels`, out of [`CONSTANT_LABELS`]. The values
/// may be any text.
pub fn registry(labels: &[(&'static str, &str)]) -> Registry {
    let labels = labels
        .iter()
        .map(|(key, value)| ((*key).into(), label_value(value).into()));
    Registry::with_labels(labels)
}

/// The complete exposition of one registry.
pub fn metrics_text(registry: &Registry) -> String {
    metrics_text_merged(&[registry])
}

/// The exposition of several registries as one: each family once, in order of
/// first appearance, with the series of all of them.
pub fn metrics_text_merged(registries: &[&Registry]) -> String {
    let mut families: Vec<(String, String, String)> = Vec::new();
    for registry in registries {
        let mut text = String::new();
        // Writing to a string fails only if a metric's own encoding does; what
        // was written before is still worth serving.
        let complete = text::encode_registry(&mut text, registry);
        if let Err(error) = complete {
            tracing::error!(%error, "encode metrics");
        }
        let mut current = None;
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let name = rest.split(' ').next().unwrap_or(rest);
                current = Some(
                    match families.iter().position(|(known, ..)| known == name) {
                        Some(position) => position,
                        None => {
                            families.push((name.to_owned(), String::new(), String::new()));
                            families.len() - 1
                        }
                    },
                );
            }
            let Some((_, header, series)) = current.and_then(|at| families.get_mut(at)) else {
                continue;
            };
            if !line.starts_with('#') {
                series.push_str(line);
                series.push('\n');
            } else if !header.contains(line) {
                header.push_str(line);
                header.push('\n');
            }
        }
    }
    let mut merged = String::new();
    for (_, header, series) in families {
        merged.push_str(&header);
        merged.push_str(&series);
    }
    merged.push_str("# EOF\n");
    merged
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::labels::{Outcome, Path};
    use crate::{RouterMetrics, WorkerMetrics};

    #[test]
    fn colons_and_totals_come_out_as_declared() {
        let mut registry = registry(&[("model_name", "m"), ("engine", "0")]);
        let worker = WorkerMetrics::new(&mut registry);
        worker.prompt_tokens.inc_by(7);
        worker.kv_cache_usage.set(0.25);
        worker
            .cache_config
            .set(&[("block_size", "16"), ("num_gpu_blocks", "100")]);
        let text = metrics_text(&registry);
        for line in [
            "vllm:prompt_tokens_total{model_name=\"m\",engine=\"0\"} 7",
            "vllm:kv_cache_usage_perc{model_name=\"m\",engine=\"0\"} 0.25",
            "vllm:num_requests_running{model_name=\"m\",engine=\"0\"} 0",
            "vllm:cache_config_info{model_name=\"m\",engine=\"0\",block_size=\"16\",num_gpu_blocks=\"100\"} 1",
        ] {
            assert!(
                text.lines().any(|known| known == line),
                "no line {line} in\n{text}"
            );
        }
        assert!(!text.contains("_total_total"));
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn a_histogram_is_cumulative_and_ends_at_infinity() {
        let mut registry = Registry::default();
        let router = RouterMetrics::new(&mut registry);
        router.time_to_first_token.get(Path::Disagg).observe(0.0015);
        router.time_to_first_token.get(Path::Disagg).observe(9999.0);
        router.requests.get(Outcome::ShedKv).inc();
        let text = metrics_text(&registry);
        for line in [
            "baton_time_to_first_token_seconds_count{path=\"disagg\"} 2",
            "baton_time_to_first_token_seconds_bucket{le=\"0.001\",path=\"disagg\"} 0",
            "baton_time_to_first_token_seconds_bucket{le=\"0.002\",path=\"disagg\"} 1",
            "baton_time_to_first_token_seconds_bucket{le=\"2560.0\",path=\"disagg\"} 1",
            "baton_time_to_first_token_seconds_bucket{le=\"+Inf\",path=\"disagg\"} 2",
            "baton_time_to_first_token_seconds_count{path=\"local\"} 0",
            "baton_requests_total{code=\"RESOURCE_EXHAUSTED\",reason=\"shed_kv\"} 1",
        ] {
            assert!(
                text.lines().any(|known| known == line),
                "no line {line} in\n{text}"
            );
        }
    }

    #[test]
    fn two_registries_share_one_header_per_family() {
        let mut prefill = registry(&[("role", "prefill")]);
        WorkerMetrics::new(&mut prefill).preemptions.inc();
        let mut decode = registry(&[("role", "decode")]);
        WorkerMetrics::new(&mut decode);
        let text = metrics_text_merged(&[&prefill, &decode]);
        assert_eq!(
            text.matches("# TYPE vllm:num_preemptions counter").count(),
            1
        );
        assert_eq!(text.matches("# HELP vllm:num_preemptions ").count(), 1);
        assert!(text.contains("vllm:num_preemptions_total{role=\"prefill\"} 1\nvllm:num_preemptions_total{role=\"decode\"} 0\n"));
        assert_eq!(text.matches("# EOF").count(), 1);
    }
}
