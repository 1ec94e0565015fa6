//! What a calibration gives: a table of one screen, and one JSON object.

use std::fmt;

use serde::Serialize;

use super::workloads::WorkloadReport;
use crate::cli::bench::system::Machine;
use crate::cli::output::grouped;
use crate::simulate::HardwareProfile;

/// The report. Field names are the keys of the JSON form.
#[derive(Debug, Serialize)]
pub struct Report {
    /// What measured.
    pub machine: Machine,
    /// Threads that computed.
    pub threads: usize,
    /// Reads of memory, B/s.
    pub stream_bytes_per_second: f64,
    /// `(rows, FLOP/s)`.
    pub products: Vec<(usize, f64)>,
    /// Bytes of the sequence that was copied.
    pub copied_bytes: u64,
    /// What was fitted.
    pub hardware: HardwareProfile,
    /// What the fit has not seen.
    pub workloads: Vec<WorkloadReport>,
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
            "\n{:<11} {:>5} {:>15} {:>10} {:>9} {:>14} {:>9} {:>9}",
            "workload", "steps", "p50 measured", "model", "off", "all measured", "model", "off"
        )?;
        self.workloads.iter().try_for_each(|workload| writeln!(f, "{workload}"))?;
        Ok(())
    }
}
