//! What a calibration gives: a table of one screen, and one JSON object.

use std::fmt;

use serde::Serialize;

use super::measure::{Check, Copies};
use crate::cli::bench::system::Machine;
use crate::cli::output::grouped;
use crate::simulate::{HardwareProfile, ModelProfile, StepModel, StepWork, step_cost};

/// The report. Field names are the keys of the JSON form.
#[derive(Debug, Serialize)]
pub struct Report {
    machine: Machine,
    threads: usize,
    /// Reads of memory, B/s.
    stream_bytes_per_second: f64,
    /// `(rows, FLOP/s)`.
    products: Vec<(usize, f64)>,
    /// Bytes of the sequence that was copied.
    copied_bytes: u64,
    /// What was fitted.
    pub hardware: HardwareProfile,
    /// Steps that the fit has not seen.
    checks: Vec<CheckReport>,
}

/// A step, measured and modelled. Field names are the keys of the JSON form.
#[derive(Debug, Serialize)]
struct CheckReport {
    step: String,
    measured_ms: f64,
    modelled_ms: f64,
    /// Modelled beside measured, percent.
    off_percent: f64,
}

impl Report {
    /// The report.
    pub fn new(
        (machine, threads): (Machine, usize),
        (stream_bytes_per_second, products): (f64, Vec<(usize, f64)>),
        (hardware, copies): (HardwareProfile, Copies),
        (model, checks): (&ModelProfile, Vec<Check>),
    ) -> Report {
        let check = |check: &Check| {
            let work = StepWork {
                decodes: check.decode.0,
                decode_context: check.decode.1,
                chunks: &check.chunks,
                dead_context: 0.0,
            };
            let modelled = step_cost(StepModel::default(), &hardware, model, &work).seconds;
            CheckReport {
                step: check.name.clone(),
                measured_ms: check.seconds * 1e3,
                modelled_ms: modelled * 1e3,
                off_percent: (modelled / check.seconds - 1.0) * 100.0,
            }
        };
        let checks = checks.iter().map(check).collect();
        let copied_bytes = copies.bytes;
        Report {
            machine,
            threads,
            stream_bytes_per_second,
            products,
            copied_bytes,
            hardware,
            checks,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (hardware, giga) = (&self.hardware, |rate: f64| rate / 1e9);
        writeln!(f, "machine    {}, {} threads", self.machine, self.threads)?;
        writeln!(
            f,
            "memory     {:.1} GB/s read; {:.1} where the model's weights lie",
            giga(self.stream_bytes_per_second),
            giga(hardware.memory_bandwidth),
        )?;
        let rates = self.products.iter().map(|(rows, rate)| format!("{rows}: {:.0}", giga(*rate)));
        let rates: Vec<String> = rates.collect();
        writeln!(f, "products   rows: GFLOP/s  {}", rates.join("  "))?;
        writeln!(
            f,
            "copies     {:.2} GB/s out, {:.2} in, of {} bytes",
            giga(hardware.link_out),
            giga(hardware.link_in),
            grouped(self.copied_bytes as usize),
        )?;
        writeln!(f, "overhead   {:.1} microseconds a step", hardware.step_overhead * 1e6)?;
        if let Some(calibration) = &hardware.calibration {
            writeln!(
                f,
                "prefill    {:.1} tokens/s and {:.3e} s of attention a pair, of {}",
                calibration.prefill_tokens_per_second, calibration.pair_seconds, calibration.model
            )?;
        }
        writeln!(
            f,
            "\n{:<50} {:>10} {:>10} {:>8}",
            "steps not fitted", "measured", "model", "off"
        )?;
        for check in &self.checks {
            writeln!(
                f,
                "{:<50} {:>7.3} ms {:>7.3} ms {:>+6.1} %",
                check.step, check.measured_ms, check.modelled_ms, check.off_percent
            )?;
        }
        Ok(())
    }
}
