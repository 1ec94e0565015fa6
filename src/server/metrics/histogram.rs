//! A histogram that the page can read too; the library's own can only be printed.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

/// Counts of values between fixed bounds. Clones are the same histogram.
#[derive(Debug, Clone)]
pub struct Histogram(Arc<Buckets>);

#[derive(Debug)]
struct Buckets {
    bounds: &'static [f64],
    /// One more than there are bounds: the last counts what is above all.
    counts: Box<[AtomicU64]>,
    /// The bits of the sum of all values.
    sum: AtomicU64,
}

impl Histogram {
    /// A histogram over `bounds`, which ascend.
    pub fn new(bounds: &'static [f64]) -> Histogram {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Histogram(Arc::new(Buckets { bounds, counts, sum: AtomicU64::new(0) }))
    }

    /// Counts a value, without a lock.
    pub fn observe(&self, value: f64) {
        let buckets = &*self.0;
        let at = buckets.bounds.partition_point(|bound| *bound < value);
        buckets.counts[at].fetch_add(1, Ordering::Relaxed);
        let add = |bits| Some((f64::from_bits(bits) + value).to_bits());
        let _ = buckets.sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    /// The bounds.
    pub fn bounds(&self) -> &'static [f64] {
        self.0.bounds
    }

    /// How many values were at most each bound and above the one before; last, those above all.
    pub fn counts(&self) -> Vec<u64> {
        self.0.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect()
    }
}

impl EncodeMetric for Histogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), fmt::Error> {
        let sum = f64::from_bits(self.0.sum.load(Ordering::Relaxed));
        encode(&mut encoder, self.0.bounds, &self.counts(), sum)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

/// Prints counts over bounds as a histogram.
pub fn encode(
    encoder: &mut MetricEncoder<'_>,
    bounds: &[f64],
    counts: &[u64],
    sum: f64,
) -> Result<(), fmt::Error> {
    let bounds = bounds.iter().copied().chain([f64::INFINITY]);
    let buckets: Vec<(f64, u64)> = bounds.zip(counts.iter().copied()).collect();
    encoder.encode_histogram::<NoLabelSet>(sum, counts.iter().sum(), &buckets, None)
}
