//! The declarations: each metric once, with name, unit, meaning and bounds.
//!
//! `metric_set!` turns a list of them into a struct whose fields are the live
//! instruments, its registration, and its part of the [catalogue](crate::catalogue).
//! The name is written as it appears in a scrape; counters end in `_total`, which
//! the encoder adds by itself, so registration takes it off again.

mod router;
mod worker;
mod worker_figures;

pub use router::RouterMetrics;
pub use worker::WorkerMetrics;
pub use worker_figures::{BlockFigures, LoadFigures, StepFigures};

use prometheus_client::registry::Registry;

use crate::instrument::{Instrument, Kind};

/// Registers under the name that makes `name` appear in the exposition.
pub(crate) fn register<M: Instrument>(
    registry: &mut Registry,
    name: &'static str,
    help: &'static str,
    metric: &M,
) {
    let base = match M::KIND {
        Kind::Counter => name.strip_suffix("_total").unwrap_or(name),
        Kind::Gauge | Kind::Histogram => name,
    };
    registry.register(base, help.trim_end_matches('.'), metric.clone());
}

macro_rules! metric_set {
    (
        $(#[$doc:meta])*
        $set:ident {
            $($field:ident: $type:ty = $name:literal, $unit:ident, $bounds:expr, $help:literal;)+
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Debug)]
        pub struct $set {
            $(#[doc = concat!("`", $name, "`: ", $help)] pub $field: $type,)+
        }

        impl $set {
            /// Makes every metric of the set and registers it.
            pub fn new(registry: &mut $crate::Registry) -> Self {
                $(
                    let $field: $type = $crate::instrument::Instrument::with_bounds($bounds);
                    $crate::metrics::register(registry, $name, $help, &$field);
                )+
                Self { $($field,)+ }
            }

            /// The set's part of the catalogue.
            pub fn catalogue() -> Vec<$crate::catalogue::MetricSpec> {
                vec![$(
                    $crate::catalogue::MetricSpec {
                        name: $name,
                        kind: <$type as $crate::instrument::Instrument>::KIND,
                        unit: $crate::catalogue::Unit::$unit,
                        labels: <$type as $crate::instrument::Instrument>::labels(),
                        bounds: $bounds,
                        help: $help,
                    },
                )+]
            }
        }
    };
}
pub(crate) use metric_set;
