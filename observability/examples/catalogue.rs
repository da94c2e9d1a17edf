//! Prints the metric catalogue as markdown, or with the argument `scrape` what a
//! fresh router and worker expose, for checking with another parser.

use baton_observability::{RouterMetrics, WorkerMetrics, catalogue, exposition};

fn main() {
    if std::env::args().nth(1).as_deref() != Some("scrape") {
        print!("{}", catalogue::markdown());
        return;
    }
    let mut router = exposition::registry(&[("role", "router")]);
    let metrics = RouterMetrics::new(&mut router);
    metrics.build.set(&[("version", env!("CARGO_PKG_VERSION"))]);
    metrics
        .request_duration
        .get(baton_observability::labels::Path::Local)
        .observe(0.25);
    let mut worker =
        exposition::registry(&[("model_name", "m"), ("engine", "0"), ("role", "decode")]);
    WorkerMetrics::new(&mut worker).kv_cache_usage.set(0.5);
    print!("{}", exposition::metrics_text_merged(&[&router, &worker]));
}
