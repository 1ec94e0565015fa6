//! What the benchmark gives: a table with a chart, and one JSON object.

use std::fmt;

use serde::{Serialize, Serializer};

use super::lines::Lines;
use super::measure::{COMPARED, DECODERS};
use crate::cli::bench::line::Line;
use crate::cli::bench::spread::Spread;
use crate::cli::bench::system::Machine;
use crate::cli::output::grouped;
use crate::config::Device;

/// What is done with a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Arm {
    /// Its blocks and its slot are copied to the host.
    SwapOut,
    /// They are copied back.
    SwapIn,
    /// Both.
    Swap,
    /// It is computed again, alone.
    Recompute,
    /// It is computed beside sequences that decode; what their steps take longer.
    RecomputeMarginal,
    /// The nearest checkpoint is copied in, and what follows it is computed again.
    Checkpoint,
}

impl Arm {
    /// Its name in tables and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Arm::SwapOut => "swap_out",
            Arm::SwapIn => "swap_in",
            Arm::Swap => "swap",
            Arm::Recompute => "recompute",
            Arm::RecomputeMarginal => "recompute_marginal",
            Arm::Checkpoint => "checkpoint",
        }
    }
}

impl Serialize for Arm {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// An arm at a length. Field names are the keys of the JSON form.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// The model.
    pub arch: String,
    /// Tokens of the prompt.
    #[serde(rename = "L")]
    pub tokens: usize,
    /// What was done.
    pub arm: Arm,
    /// Bytes copied.
    pub bytes: u64,
    /// Milliseconds, the middle of the repeats; none where nothing was measured.
    pub ms_p50: Option<f64>,
    /// The least of them.
    pub ms_min: Option<f64>,
    /// The greatest.
    pub ms_max: Option<f64>,
    /// What the model line says; none where it says nothing.
    pub model_ms: Option<f64>,
}

impl Row {
    /// A row whose times are to be told.
    pub fn new(arch: &str, tokens: usize, arm: Arm, bytes: f64) -> Row {
        Row {
            arch: arch.to_owned(),
            tokens,
            arm,
            bytes: bytes.round() as u64,
            ms_p50: None,
            ms_min: None,
            ms_max: None,
            model_ms: None,
        }
    }

    /// The row with what was measured, in seconds.
    pub fn measured(self, seconds: Spread) -> Row {
        Row {
            ms_p50: Some(seconds.median * 1e3),
            ms_min: Some(seconds.min * 1e3),
            ms_max: Some(seconds.max * 1e3),
            ..self
        }
    }

    /// The row with what the model line says, in seconds.
    pub fn modelled(self, seconds: Option<f64>) -> Row {
        Row { model_ms: seconds.map(|seconds| seconds * 1e3), ..self }
    }

    /// What was measured, else what the model line says.
    pub fn ms(&self) -> Option<f64> {
        self.ms_p50.or(self.model_ms)
    }
}

/// Where recomputation stops to be cheaper than swap, in tokens. Field names are the keys of the
/// JSON form.
#[derive(Debug, Clone, Serialize)]
pub struct Crossover {
    /// Between the measured medians; none outside of the lengths, or where nothing was measured.
    pub measured_tokens: Option<f64>,
    /// By the model lines (F14, F16); 0 where swap always wins, none where it never does.
    pub predicted_tokens: Option<f64>,
    /// The same without the cost of attention, as SEEDS.md F16 reckons.
    pub predicted_linear_tokens: Option<f64>,
}

/// The measured swaps as a straight line over the length. Field names are the keys of the JSON
/// form.
#[derive(Debug, Clone, Serialize)]
pub struct SwapLine {
    /// Milliseconds at length 0.
    pub intercept_ms: f64,
    /// Milliseconds a token.
    pub slope_ms: f64,
    /// R^2.
    pub r_squared: f64,
}

impl SwapLine {
    /// The line through `(tokens, milliseconds)`; none through fewer than three, or where they have
    /// no spread.
    pub fn through(swaps: &[(f64, f64)]) -> Option<SwapLine> {
        let line = Line::through(swaps);
        let r_squared = line.r_squared.filter(|_| swaps.len() >= 3)?;
        Some(SwapLine { intercept_ms: line.at(0.0), slope_ms: line.slope, r_squared })
    }
}

/// The report. Field names are the keys of the JSON form.
#[derive(Debug, Serialize)]
pub struct Report {
    /// `crossover`.
    pub bench: &'static str,
    /// Whether the figures are of the model lines alone.
    pub modelled: bool,
    /// What was measured, on what.
    pub title: String,
    /// The model.
    pub model: String,
    /// The machine it was measured on.
    pub machine: Option<Machine>,
    /// What of it computed.
    pub device: Option<&'static str>,
    /// The hardware it was reckoned for.
    pub hardware: Option<String>,
    /// Threads that computed.
    pub threads: Option<usize>,
    /// Repeats of each arm.
    pub repeats: Option<usize>,
    /// Tokens of a step.
    pub max_num_batched_tokens: usize,
    /// Tokens between two checkpoints.
    pub checkpoint_every: usize,
    /// The rate that copies were held to; none when to none.
    pub link_gbps: Option<f64>,
    /// What the model lines are made of.
    pub constants: Lines,
    /// The result.
    pub crossover: Crossover,
    /// The swaps; none where too few were measured.
    pub swap_line: Option<SwapLine>,
    /// All arms at all lengths.
    pub rows: Vec<Row>,
}

impl Report {
    /// The crossover in words.
    pub fn verdict(&self) -> String {
        let crossover = &self.crossover;
        let predicted = match crossover.predicted_tokens {
            None => "recomputing wins at every length".to_owned(),
            Some(0.0) => "swap wins at every length".to_owned(),
            Some(tokens) => format!("{tokens:.0} tokens"),
        };
        if self.modelled {
            return match crossover.predicted_tokens.is_some_and(|tokens| tokens > 0.0) {
                true => format!("L* {predicted}: below it recomputing takes less, above it swap"),
                false => predicted,
            };
        }
        let measured = match crossover.measured_tokens {
            Some(tokens) => format!("{tokens:.0} tokens"),
            None => format!("outside the sweep ({})", self.winner()),
        };
        format!("L* measured {measured}, predicted {predicted}")
    }

    /// Who wins at all lengths, if there is such a one.
    fn winner(&self) -> &'static str {
        let of = |arm: Arm| self.rows.iter().filter(move |row| row.arm == arm);
        let pairs = of(Arm::Swap).zip(of(Arm::Recompute));
        let wins: Vec<bool> = pairs.map(|(swap, again)| swap.ms_p50 <= again.ms_p50).collect();
        match (wins.contains(&true), wins.contains(&false)) {
            (true, false) => "swap wins at all lengths",
            (false, true) => "recomputing wins at all lengths",
            _ => "the two change places the other way round",
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title)?;
        if let Some(machine) = &self.machine {
            let threads = self.threads.unwrap_or(1);
            write!(f, "machine    {machine}, {threads} threads")?;
            let other = self.device.filter(|device| *device != Device::Cpu.as_str());
            other.map_or(Ok(()), |device| write!(f, "; on a {device} device"))?;
            writeln!(f)?;
        }
        write_constants(f, self)?;
        writeln!(
            f,
            "\n{:>8} {:<18} {:>15} {:>10} {:>10} {:>10} {:>10}",
            "tokens", "arm", "bytes", "min ms", "median", "max", "model ms"
        )?;
        let time = |ms: Option<f64>| ms.map_or("-".to_owned(), |ms| format!("{ms:.3}"));
        for row in &self.rows {
            writeln!(
                f,
                "{:>8} {:<18} {:>15} {:>10} {:>10} {:>10} {:>10}",
                grouped(row.tokens),
                row.arm.as_str(),
                grouped(row.bytes as usize),
                time(row.ms_min),
                time(row.ms_p50),
                time(row.ms_max),
                time(row.model_ms),
            )?;
        }
        writeln!(f, "\n{}", self.verdict())?;
        if let Some(line) = &self.swap_line {
            let SwapLine { intercept_ms, slope_ms, r_squared } = line;
            let tokens = intercept_ms / slope_ms;
            writeln!(
                f,
                "swap is a line: {intercept_ms:.3} ms + {slope_ms:.6} ms a token ({tokens:.0} \
                 tokens' worth; V / kv is {:.0}), R^2 {r_squared:.4}",
                self.constants.slot_bytes / self.constants.kv_bytes_per_token,
            )?;
        }
        if self.repeats.is_some() {
            writeln!(
                f,
                "after each arm the next {COMPARED} tokens were those of a run that nothing \
                 disturbs; recompute_marginal is beside {DECODERS} sequences that decode"
            )?;
        }
        Ok(())
    }
}

fn write_constants(f: &mut fmt::Formatter<'_>, report: &Report) -> fmt::Result {
    let constants = &report.constants;
    let giga = |bytes: f64| bytes / 1e9;
    writeln!(
        f,
        "constants  slot {} bytes, {:.0} bytes a token; link {:.4} GB/s out, {:.4} in",
        grouped(constants.slot_bytes as usize),
        constants.kv_bytes_per_token,
        giga(constants.link_out_bytes_per_second),
        giga(constants.link_in_bytes_per_second),
    )?;
    writeln!(
        f,
        "           {:.1} prompt tokens/s, attention {:.3e} s a pair; steps of {} tokens, a \
         checkpoint every {}",
        1.0 / constants.token_seconds,
        constants.pair_seconds,
        grouped(report.max_num_batched_tokens),
        grouped(report.checkpoint_every),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_points_make_no_line_of_swaps() {
        assert!(SwapLine::through(&[(1., 1.), (2., 5.)]).is_none());
        assert!(SwapLine::through(&[(1., 1.), (2., 5.), (3., 9.)]).is_some());
    }
}
