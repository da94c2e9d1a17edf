//! The metric types: what can be counted, and how cheaply.
//!
//! Counters and gauges are prometheus-client's atomics. Its histogram takes a
//! mutex and its label family a lock and a hash per access, which a decode worker
//! would pay for every token; [`Histogram`] and [`ByLabel`] replace them with
//! atomics and an array. All are cheap to clone and share their state.

use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use crate::label_value::label_value;
use crate::labels::Label;

/// A count that only goes up.
pub type Counter = prometheus_client::metrics::counter::Counter<u64, AtomicU64>;
/// A whole number that goes up and down.
pub type Gauge = prometheus_client::metrics::gauge::Gauge;
/// A real number that goes up and down.
pub type GaugeF64 = prometheus_client::metrics::gauge::Gauge<f64, AtomicU64>;

/// What kind of series an instrument makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Counter,
    Gauge,
    Histogram,
}

impl Kind {
    /// The name used in the exposition and in the documentation.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// A metric type that the catalogue can make and describe.
pub trait Instrument: EncodeMetric + Clone + fmt::Debug + Send + Sync + 'static {
    const KIND: Kind;

    /// A fresh instrument; `bounds` matters to histograms only.
    fn with_bounds(bounds: &'static [f64]) -> Self;

    /// Each label key with the values it can take.
    fn labels() -> Vec<(&'static str, Vec<&'static str>)> {
        Vec::new()
    }
}

impl Instrument for Counter {
    const KIND: Kind = Kind::Counter;
    fn with_bounds(_: &'static [f64]) -> Self {
        Self::default()
    }
}

impl Instrument for Gauge {
    const KIND: Kind = Kind::Gauge;
    fn with_bounds(_: &'static [f64]) -> Self {
        Self::default()
    }
}

impl Instrument for GaugeF64 {
    const KIND: Kind = Kind::Gauge;
    fn with_bounds(_: &'static [f64]) -> Self {
        Self::default()
    }
}

/// A histogram of atomics: one addition for the bucket, one for the sum.
///
/// A scrape that overlaps an observation may see the bucket without the sum; the
/// next scrape has both.
#[derive(Clone)]
pub struct Histogram {
    inner: Arc<HistogramInner>,
}

struct HistogramInner {
    bounds: &'static [f64],
    /// One cell per bound and a last one for everything above.
    cells: Box<[AtomicU64]>,
    /// The bits of an `f64`.
    sum: AtomicU64,
}

impl Histogram {
    /// A histogram with ascending upper bounds (inclusive).
    pub fn new(bounds: &'static [f64]) -> Self {
        let cells = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self {
            inner: Arc::new(HistogramInner {
                bounds,
                cells,
                sum: AtomicU64::new(0),
            }),
        }
    }

    /// Records one value. A negative value counts as 0, a NaN is dropped.
    pub fn observe(&self, value: f64) {
        self.observe_n(value, 1);
    }

    /// Records the same value `count` times, at the price of one.
    pub fn observe_n(&self, value: f64, count: u64) {
        if value.is_nan() || count == 0 {
            return;
        }
        let value = value.max(0.0);
        let cell = self.inner.bounds.partition_point(|bound| *bound < value);
        self.inner.cells[cell].fetch_add(count, Ordering::Relaxed);
        let added = value * count as f64;
        let add = |bits| Some((f64::from_bits(bits) + added).to_bits());
        // The closure always returns a value, so the update cannot fail.
        let _ = self
            .inner
            .sum
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    /// Records a duration in seconds.
    pub fn observe_duration(&self, duration: Duration) {
        self.observe(duration.as_secs_f64());
    }

    /// How many values were recorded.
    pub fn count(&self) -> u64 {
        self.inner
            .cells
            .iter()
            .map(|cell| cell.load(Ordering::Relaxed))
            .sum()
    }

    /// The sum of the values.
    pub fn sum(&self) -> f64 {
        f64::from_bits(self.inner.sum.load(Ordering::Relaxed))
    }
}

impl fmt::Debug for Histogram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Histogram {{ count: {}, sum: {} }}",
            self.count(),
            self.sum()
        )
    }
}

impl EncodeMetric for Histogram {
    fn encode(&self, mut encoder: MetricEncoder) -> Result<(), fmt::Error> {
        // f64::MAX is how the encoder is told `+Inf`.
        let bounds = self.inner.bounds.iter().copied().chain([f64::MAX]);
        let cells = self
            .inner
            .cells
            .iter()
            .map(|cell| cell.load(Ordering::Relaxed));
        let buckets: Vec<(f64, u64)> = bounds.zip(cells).collect();
        let count = buckets.iter().map(|(_, count)| count).sum();
        encoder.encode_histogram::<NoLabelSet>(self.sum(), count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

impl Instrument for Histogram {
    const KIND: Kind = Kind::Histogram;
    fn with_bounds(bounds: &'static [f64]) -> Self {
        Self::new(bounds)
    }
}

/// One instrument per label value, all of them present from the start.
#[derive(Debug)]
pub struct ByLabel<L, M> {
    series: Arc<[M]>,
    label: PhantomData<fn() -> L>,
}

impl<L, M> Clone for ByLabel<L, M> {
    fn clone(&self) -> Self {
        Self {
            series: Arc::clone(&self.series),
            label: PhantomData,
        }
    }
}

impl<L: Label, M> ByLabel<L, M> {
    /// The series of one label value: an array access.
    pub fn get(&self, label: L) -> &M {
        &self.series[label.index()]
    }
}

impl<L: Label, M: Instrument> EncodeMetric for ByLabel<L, M> {
    fn encode(&self, mut encoder: MetricEncoder) -> Result<(), fmt::Error> {
        for (label, metric) in L::all().into_iter().zip(self.series.iter()) {
            let pairs = label.pairs();
            metric.encode(encoder.encode_family(&pairs)?)?;
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        metric_type(M::KIND)
    }
}

impl<L: Label, M: Instrument> Instrument for ByLabel<L, M> {
    const KIND: Kind = M::KIND;

    fn with_bounds(bounds: &'static [f64]) -> Self {
        let series = L::all().iter().map(|_| M::with_bounds(bounds)).collect();
        Self {
            series,
            label: PhantomData,
        }
    }

    fn labels() -> Vec<(&'static str, Vec<&'static str>)> {
        let mut labels: Vec<(&'static str, Vec<&'static str>)> = Vec::new();
        for (key, value) in L::all().into_iter().flat_map(Label::pairs) {
            match labels.iter_mut().find(|(known, _)| *known == key) {
                Some((_, values)) if values.contains(&value) => {}
                Some((_, values)) => values.push(value),
                None => labels.push((key, vec![value])),
            }
        }
        labels
    }
}

/// Facts as labels of a gauge that is always 1. Absent until set.
#[derive(Clone, Debug, Default)]
pub struct Info {
    /// Escaped.
    pairs: Arc<RwLock<Vec<(&'static str, String)>>>,
}

impl Info {
    /// Replaces the facts, which may be any text.
    pub fn set(&self, pairs: &[(&'static str, &str)]) {
        let pairs = pairs
            .iter()
            .map(|(key, value)| (*key, label_value(value)))
            .collect();
        // The lock guards plain data that a panic cannot leave half written.
        *self
            .pairs
            .write()
            .unwrap_or_else(std::sync::PoisonError::into_inner) = pairs;
    }
}

impl EncodeMetric for Info {
    fn encode(&self, mut encoder: MetricEncoder) -> Result<(), fmt::Error> {
        let pairs = self
            .pairs
            .read()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if pairs.is_empty() {
            return Ok(());
        }
        encoder.encode_family(&*pairs)?.encode_gauge(&1_i64)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Gauge
    }
}

impl Instrument for Info {
    const KIND: Kind = Kind::Gauge;
    fn with_bounds(_: &'static [f64]) -> Self {
        Self::default()
    }
}

const fn metric_type(kind: Kind) -> MetricType {
    match kind {
        Kind::Counter => MetricType::Counter,
        Kind::Gauge => MetricType::Gauge,
        Kind::Histogram => MetricType::Histogram,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static BOUNDS: &[f64] = &[1.0, 2.0, 4.0];

    fn cells(histogram: &Histogram) -> Vec<u64> {
        histogram
            .inner
            .cells
            .iter()
            .map(|cell| cell.load(Ordering::Relaxed))
            .collect()
    }

    #[test]
    fn a_bound_belongs_to_its_own_bucket_and_the_rest_to_the_last() {
        let histogram = Histogram::new(BOUNDS);
        for value in [0.0, 1.0, 1.5, 4.0, 4.1, f64::INFINITY, -3.0, f64::NAN] {
            histogram.observe(value);
        }
        assert_eq!(cells(&histogram), [3, 1, 1, 2]);
        assert_eq!(histogram.count(), 7);
    }

    #[test]
    fn many_threads_lose_nothing() {
        let histogram = Histogram::new(BOUNDS);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..10_000).for_each(|_| histogram.observe_n(1.5, 2)));
            }
        });
        assert_eq!(histogram.count(), 80_000);
        assert_eq!(histogram.sum(), 120_000.0);
    }
}
