//! What a Baton process tells about itself: metrics, logs, latency arithmetic
//! and the small HTTP endpoint that probes and scrapers ask, over TLS if need be.
//!
//! Every metric is declared once, in [`RouterMetrics`] or [`WorkerMetrics`]; the
//! catalogue, its documentation and the exposition all follow from that one
//! declaration. Nothing here looks a label up or takes a lock when a token is
//! recorded: a labelled metric is an array indexed by an enum, a histogram is a
//! row of atomics.
//!
//! This crate records and renders. It does not decide what is slow, it knows no
//! request and no model, and it depends on no other Baton crate.

pub mod admin;
pub mod buckets;
pub mod catalogue;
pub mod exposition;
pub mod instrument;
pub mod label_value;
pub mod labels;
pub mod latency;
mod listener;
pub mod logging;
pub mod metrics;
pub mod one_line;
pub mod roofline;
#[cfg(feature = "test-support")]
pub mod test_certificates;
pub mod tls_listener;

pub use admin::{AdminState, Readiness};
pub use exposition::{metrics_text, metrics_text_merged};
pub use instrument::{ByLabel, Counter, Gauge, GaugeF64, Histogram, Info};
pub use listener::PlainListener;
pub use metrics::{BlockFigures, LoadFigures, RouterMetrics, StepFigures, WorkerMetrics};
pub use prometheus_client::registry::Registry;
pub use tls_listener::TlsListener;
