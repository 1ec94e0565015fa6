//! How near each operator comes to what the machine can do.
//!
//! An operator has to do its operations and to move its bytes, whatever way it goes about it; the
//! machine's limits say how long that takes at least. The share of the limit it reaches is that
//! time over the time it took. The nearer limit is the one that asks for more time.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use indicatif::ProgressBar;
use kernels::Isa;
use kernels::meter::{Operator, Totals};
use serde::Serialize;

use crate::cli::CliError;
use crate::cli::bench::machine::Limits;

/// Bytes of an array that is read to see what memory gives: many times what a cache holds.
const ARRAY_BYTES: usize = 256 << 20;

/// Undisturbed bursts of each figure.
const BURSTS: usize = 20;

/// What operators did in a stretch of time.
#[derive(Debug, Clone)]
pub struct Metered {
    /// By operator.
    pub totals: BTreeMap<Operator, Totals>,
    /// CPU time of the calling thread in all.
    pub time: Duration,
}

/// What the machine gives with the threads of the benchmark.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub struct Ceiling {
    limits: Limits,
    #[serde(skip)]
    threads: usize,
}

/// The operators of a case, the costliest first. Field names are the keys of the JSON form.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub struct Roofline(Vec<Row>);

#[derive(Debug, Serialize)]
struct Row {
    operator: &'static str,
    arithmetic: &'static str,
    calls: u64,
    seconds: f64,
    /// Of all the time.
    share: f64,
    operations_per_second: f64,
    bytes_per_second: f64,
    /// Of the nearer limit; none when the machine's is not known.
    limit_share: Option<f64>,
    /// Which limit is nearer.
    limit: Option<&'static str>,
}

impl Ceiling {
    /// Measures what the machine gives to `threads` threads.
    ///
    /// # Errors
    /// When the system refuses memory to read.
    pub fn measure(isa: Isa, threads: usize, bar: &ProgressBar) -> Result<Ceiling, CliError> {
        let limits = Limits::measure(isa, &[threads], ARRAY_BYTES, BURSTS, bar)?;
        Ok(Ceiling { limits, threads })
    }

    /// The limits, for people.
    pub fn text(&self) -> String {
        let limits = self.limits.0.iter().filter(|limit| limit.what != "copy");
        let texts: Vec<String> = limits
            .map(|limit| match limit.rate {
                Some(rate) => format!("{} {:.1} {}", limit.what, rate.median, limit.unit),
                None => format!("{} unknown, all bursts disturbed", limit.what),
            })
            .collect();
        texts.join(", ")
    }

    /// Least seconds for a total, and what asks for them.
    fn least(&self, arithmetic: &str, totals: &Totals) -> Option<(f64, &'static str)> {
        let per_second = |what| self.limits.per_second(what, self.threads);
        let memory = totals.bytes / per_second("read")?;
        let compute = totals.operations / per_second(arithmetic)?;
        Some(if memory > compute { (memory, "memory") } else { (compute, "compute") })
    }
}

impl Roofline {
    /// The operators of `metered` under `ceiling`; what no operator accounts for is `other`.
    pub fn new(metered: &Metered, ceiling: &Ceiling) -> Roofline {
        let all = metered.time.as_secs_f64().max(1e-9);
        let row = |(&(operator, arithmetic), totals): (&Operator, &Totals)| {
            let (seconds, arithmetic) = (totals.time.as_secs_f64(), arithmetic.as_str());
            // An operator shorter than the clock's tick has taken a nanosecond.
            let time = seconds.max(1e-9);
            let least = ceiling.least(arithmetic, totals);
            Row {
                operator,
                arithmetic,
                calls: totals.calls,
                seconds,
                share: seconds / all,
                operations_per_second: totals.operations / time,
                bytes_per_second: totals.bytes / time,
                limit_share: least.map(|(seconds, _)| seconds / time),
                limit: least.map(|(_, limit)| limit),
            }
        };
        let mut rows: Vec<Row> = metered.totals.iter().map(row).collect();
        rows.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        let other = (all - rows.iter().map(|row| row.seconds).sum::<f64>()).max(0.0);
        rows.push(Row {
            operator: "other",
            arithmetic: "",
            calls: 0,
            seconds: other,
            share: other / all,
            operations_per_second: 0.0,
            bytes_per_second: 0.0,
            limit_share: None,
            limit: None,
        });
        Roofline(rows)
    }
}

impl fmt::Display for Roofline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.0.iter().map(|row| row.operator.len()).max().unwrap_or(0).max(8);
        let titles = "calls   time %    GFLOP/s      GB/s   limit %";
        writeln!(f, "{:<width$}  arithmetic    {titles}", "operator")?;
        for row in &self.0 {
            let Row { operator, arithmetic, calls, .. } = row;
            write!(f, "{operator:<width$}  {arithmetic:<10}")?;
            if *calls == 0 {
                writeln!(f, " {:>8} {:>8.1}", "", 100.0 * row.share)?;
                continue;
            }
            let (operations, bytes) = (row.operations_per_second, row.bytes_per_second);
            write!(f, " {calls:>8} {:>8.1}", 100.0 * row.share)?;
            write!(f, " {:>10.2} {:>9.2}", operations / 1e9, bytes / 1e9)?;
            match (row.limit_share, row.limit) {
                (Some(share), Some(limit)) => writeln!(f, " {:>9.1}  {limit}", 100.0 * share)?,
                _ => writeln!(f, " {:>9}", "-")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kernels::ceilings::Arithmetic;

    use super::*;
    use crate::cli::bench::machine::Limit;
    use crate::cli::bench::spread::Spread;

    fn ceiling() -> Ceiling {
        let limit = |what, unit, rate: f64| {
            let rate = Spread::of(vec![rate]);
            Limit { what, unit, threads: 2, rate, kept: 1, tried: 1 }
        };
        let limits = Limits(vec![limit("read", "GB/s", 10.0), limit("f32", "GFLOP/s", 100.0)]);
        Ceiling { limits, threads: 2 }
    }

    #[test]
    fn an_operator_is_held_against_the_nearer_limit_and_the_rest_is_other() {
        let totals = |seconds, operations, bytes| Totals {
            calls: 3,
            time: Duration::from_secs(seconds),
            operations,
            bytes,
        };
        let metered = Metered {
            totals: BTreeMap::from([
                // A second at the limit of memory, half a second at that of arithmetic.
                (("conv", Arithmetic::F32), totals(2, 50e9, 10e9)),
                (("kda", Arithmetic::F32), totals(4, 300e9, 10e9)),
                (("gemm", Arithmetic::Bf16), totals(1, 1e9, 1e9)),
            ]),
            time: Duration::from_secs(10),
        };
        let roofline = Roofline::new(&metered, &ceiling());
        let rows: Vec<_> =
            roofline.0.iter().map(|r| (r.operator, r.limit_share, r.limit)).collect();
        let expected = [
            ("kda", Some(0.75), Some("compute")),
            ("conv", Some(0.5), Some("memory")),
            ("gemm", None, None),
            ("other", None, None),
        ];
        assert_eq!(rows, expected);
        let shares: Vec<f64> = roofline.0.iter().map(|row| row.share).collect();
        assert_eq!(shares, [0.4, 0.2, 0.1, 0.3]);
        assert_eq!(roofline.0[1].operations_per_second, 25e9);
    }
}
