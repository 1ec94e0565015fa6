//! `deltapool bench machine`: what memory and arithmetic of this machine give at most.

mod bursts;

use std::fmt;

use clap::Args;
use indicatif::ProgressBar;
use kernels::ceilings::{self, Arithmetic};
use kernels::{Arena, Isa};
use serde::Serialize;

use super::ReportArgs;
use super::spread::Spread;
use super::system::Machine;
use crate::cli::CliError;
use crate::cli::loading::bar;
use crate::cli::output::{JsonTarget, grouped, print};
use crate::config::{MOST_THREADS, default_threads, parse_bytes};
use crate::engine::EngineError;
use bursts::bursts;

/// Values that a thread reads in a burst: a millisecond or so.
const BURST_VALUES: usize = 4 << 20;

/// Rounds of arithmetic in a burst: a millisecond or so.
const BURST_ROUNDS: usize = 400_000;

/// Arguments of `bench machine`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct MachineArgs {
    /// Threads of the second half of the figures; default: one per core.
    #[arg(short, long, value_name = "N")]
    pub threads: Option<usize>,
    /// Bytes of each of the two arrays that are read and copied.
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = parse_bytes)]
    pub array: usize,
    /// Undisturbed bursts to take of each figure; ten times as many are tried.
    #[arg(long, value_name = "N", default_value_t = 40)]
    pub bursts: usize,
    /// Where its report goes.
    #[command(flatten)]
    pub report: ReportArgs,
}

const HELP: &str = "\
A figure is a rate over bursts of about a millisecond. Only those count in which every thread had
its core to itself: CPU time is 97 % of wall time or more. A copy counts what it reads and writes.";

/// Runs the command.
pub fn run(args: &MachineArgs, isa: Isa) -> Result<(), CliError> {
    let threads = args.threads.unwrap_or_else(default_threads);
    check(args, threads)?;
    let bar = bar(args.report.quiet, "measuring {bar:40} {pos}/{len} {msg}");
    let counts = if threads == 1 { vec![1] } else { vec![1, threads] };
    let measured = Limits::measure(isa, &counts, args.array, args.bursts, &bar);
    bar.finish_and_clear();
    let machine = Machine::this(isa);
    let report = Report { machine, array_bytes: args.array, limits: measured? };
    let target = args.report.json.target();
    if target != JsonTarget::Output {
        print(&report.to_string())?;
    }
    target.write(&serde_json::json!(report))
}

fn check(args: &MachineArgs, threads: usize) -> Result<(), CliError> {
    let refuse = |message: String| Err(CliError::Usage(message));
    if !(1..=MOST_THREADS).contains(&threads) {
        return refuse(format!("--threads {threads}: 1 to {MOST_THREADS}"));
    }
    let least = threads * LEAST_PART * size_of::<f32>();
    if args.array < least {
        return refuse(format!(
            "--array {}: {least} bytes or more for {threads} threads",
            args.array
        ));
    }
    if args.bursts == 0 {
        return refuse("--bursts 0: 1 or more".to_owned());
    }
    Ok(())
}

/// Least values of a thread's part of an array.
const LEAST_PART: usize = 4096;

/// A figure of the machine.
#[derive(Debug, Clone, Serialize)]
pub struct Limit {
    /// `read`, `copy`, or the name of an arithmetic.
    pub what: &'static str,
    /// `GB/s`, `GFLOP/s` or `GOP/s`.
    pub unit: &'static str,
    /// Threads that were at it together.
    pub threads: usize,
    /// The rate of all threads together; none when every burst was disturbed.
    pub rate: Option<Spread>,
    /// Undisturbed bursts.
    pub kept: usize,
    /// Bursts in all.
    pub tried: usize,
}

/// Figures of the machine.
#[derive(Debug, Clone, Serialize)]
pub struct Limits(pub Vec<Limit>);

impl Limits {
    /// Measures all figures with each of these numbers of threads; `bar` moves with them.
    ///
    /// # Errors
    /// When the system refuses the arrays.
    pub fn measure(
        isa: Isa,
        counts: &[usize],
        array_bytes: usize,
        wanted: usize,
        bar: &ProgressBar,
    ) -> Result<Limits, CliError> {
        let values = array_bytes / size_of::<f32>() / 64 * 64;
        let total = 2 * values * size_of::<f32>();
        let mut arena = Arena::new(total).map_err(EngineError::Arena)?;
        let (from, to) = arena.f32s_mut(0, 2 * values).split_at_mut(values);
        // The system gives pages when they are written first; that does not count.
        from.fill(1.0);
        to.fill(0.0);
        let there: Vec<Arithmetic> =
            Arithmetic::ALL.into_iter().filter(|a| a.is_available(isa)).collect();
        bar.set_length((counts.len() * (2 + there.len())) as u64);
        let mut limits = Vec::new();
        let mut push = |what, unit, threads, bursts: bursts::Bursts| {
            let (kept, tried) = (bursts.rates.len(), bursts.tried);
            limits.push(Limit { what, unit, threads, rate: Spread::of(bursts.rates), kept, tried });
            bar.inc(1);
        };
        for &threads in counts {
            bar.set_message("read");
            push("read", "GB/s", threads, read(isa, from, threads, wanted));
            bar.set_message("copy");
            push("copy", "GB/s", threads, copy(isa, from, to, threads, wanted));
            for &arithmetic in &there {
                let (name, unit) = (arithmetic.as_str(), unit(arithmetic));
                bar.set_message(name);
                let work = |_: &mut (), _| ceilings::compute(isa, arithmetic, BURST_ROUNDS);
                push(name, unit, threads, bursts(vec![(); threads], wanted, work));
            }
        }
        Ok(Limits(limits))
    }

    /// The median rate per second of `what` with `threads` threads, if it was measured.
    pub fn per_second(&self, what: &str, threads: usize) -> Option<f64> {
        let limit = self.0.iter().find(|limit| (limit.what, limit.threads) == (what, threads))?;
        Some(limit.rate?.median * 1e9)
    }
}

fn unit(arithmetic: Arithmetic) -> &'static str {
    match arithmetic {
        Arithmetic::F32 | Arithmetic::Bf16 => "GFLOP/s",
        Arithmetic::Int8 | Arithmetic::Int4 => "GOP/s",
    }
}

/// Each thread goes over its own part of the array, a stretch of it in a burst.
fn read(isa: Isa, data: &[f32], threads: usize, wanted: usize) -> bursts::Bursts {
    let len = data.len() / threads / 64 * 64;
    let parts = data.chunks_exact(len).take(threads).collect();
    bursts(parts, wanted, |part: &mut &[f32], burst| {
        let at = stretch(part.len(), burst);
        std::hint::black_box(ceilings::read(isa, &part[at.clone()]));
        (at.len() * size_of::<f32>()) as f64
    })
}

fn copy(isa: Isa, from: &[f32], to: &mut [f32], threads: usize, wanted: usize) -> bursts::Bursts {
    let len = from.len() / threads / 64 * 64;
    let parts = from.chunks_exact(len).zip(to.chunks_exact_mut(len)).take(threads).collect();
    bursts(parts, wanted, |(from, to): &mut (&[f32], &mut [f32]), burst| {
        let at = stretch(from.len(), burst);
        ceilings::copy(isa, &from[at.clone()], &mut to[at.clone()]);
        (2 * at.len() * size_of::<f32>()) as f64
    })
}

/// Where burst number `burst` works in a part of `len` values.
fn stretch(len: usize, burst: usize) -> std::ops::Range<usize> {
    let size = BURST_VALUES.min(len);
    let from = burst % (len / size) * size;
    from..from + size
}

/// What the command gives. Field names are the keys of the JSON form.
#[derive(Debug, Serialize)]
struct Report {
    machine: Machine,
    array_bytes: usize,
    limits: Limits,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "machine    {}", self.machine)?;
        writeln!(f, "arrays     {} bytes each\n", grouped(self.array_bytes))?;
        let titles = format!("{:>9} {:>9} {:>9}", "min", "median", "max");
        writeln!(f, "what   threads {titles}  unit     undisturbed bursts")?;
        for limit in &self.limits.0 {
            let rate = limit.rate.map_or(format!("{:>29}", "-"), |rate| rate.to_string());
            let Limit { what, threads, unit, kept, tried, .. } = limit;
            writeln!(f, "{what:<6} {threads:>7} {rate}  {unit:<8} {kept} of {tried}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bursts_go_over_all_of_a_part_and_never_leave_it() {
        assert_eq!([0, 1, 5].map(|burst| stretch(1000, burst)), [0..1000, 0..1000, 0..1000]);
        let size = BURST_VALUES;
        let len = 2 * size + 7;
        assert_eq!(stretch(len, 0), 0..size);
        assert_eq!(stretch(len, 1), size..2 * size);
        assert_eq!(stretch(len, 2), 0..size);
    }
}
