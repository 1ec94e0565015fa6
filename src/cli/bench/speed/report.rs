//! What `bench prefill` and `bench decode` print: a table, and one JSON object.

use std::fmt;

use serde::Serialize;

use super::case::Case;
use super::driver::{Measured, Round};
use super::roofline::{Ceiling, Roofline};
use crate::cli::bench::spread::Spread;
use crate::cli::bench::system::Machine;
use crate::cli::output::grouped;

/// The figures of a run. Field names are the keys of the JSON form.
#[derive(Debug, Serialize)]
pub struct Report {
    pub bench: &'static str,
    pub model: String,
    pub machine: Machine,
    /// What it was computed on.
    pub device: &'static str,
    pub threads: usize,
    pub rounds: usize,
    /// Whether weights are random, whatever the model's files are.
    pub has_random_weights: bool,
    /// Most tokens of a step.
    pub max_num_batched_tokens: usize,
    /// How large matrices are quantised, where they are.
    pub quantize: Option<&'static str>,
    /// How bf16 weights are multiplied.
    pub compute: &'static str,
    /// How per-token rows are kept.
    pub kv_dtype: &'static str,
    /// Weights as their files store them.
    pub weights_bytes: usize,
    /// Weights in memory.
    pub weights_held_bytes: usize,
    /// The pool of slots and blocks.
    pub pool_bytes: usize,
    /// None where the system does not say.
    pub peak_rss_bytes: Option<usize>,
    pub cases: Vec<CaseReport>,
    /// What operators are held against, where they are.
    #[serde(rename = "limits", skip_serializing_if = "Option::is_none")]
    pub ceiling: Option<Ceiling>,
}

/// The figures of a case.
#[derive(Debug, Serialize)]
pub struct CaseReport {
    #[serde(flatten)]
    case: Case,
    /// Mean tokens of the sequences at the first timed step; none in a prefill.
    #[serde(skip_serializing_if = "Option::is_none")]
    mean_context: Option<f64>,
    /// Tokens of a round.
    round_tokens: usize,
    tokens_per_cpu_second: Spread,
    tokens_per_wall_second: Spread,
    /// CPU time over wall time times threads. Threads that wait for work spin for a while, and that
    /// is CPU time too.
    busy_share: Spread,
    /// Operators beside the machine's limits, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    roofline: Option<Roofline>,
}

impl CaseReport {
    /// The figures of `case`, which ran with `threads` threads.
    pub fn new(
        case: Case,
        measured: Measured,
        threads: usize,
        roofline: Option<Roofline>,
    ) -> CaseReport {
        let Measured { rounds, context, .. } = measured;
        let spread = |figure: &dyn Fn(&Round) -> f64| {
            Spread::of(rounds.iter().map(figure).collect()).expect("a case has a round")
        };
        // A round shorter than the clock's tick has taken a nanosecond.
        let seconds = |time: std::time::Duration| time.as_secs_f64().max(1e-9);
        CaseReport {
            case,
            mean_context: matches!(case, Case::Decode { .. }).then_some(context),
            round_tokens: rounds[0].tokens,
            tokens_per_cpu_second: spread(&|r| r.tokens as f64 / seconds(r.cpu)),
            tokens_per_wall_second: spread(&|r| r.tokens as f64 / seconds(r.wall)),
            busy_share: spread(&|r| seconds(r.cpu) / (seconds(r.wall) * threads as f64)),
            roofline,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "machine    {}", self.machine)?;
        let (stored, held) = (grouped(self.weights_bytes), grouped(self.weights_held_bytes));
        write!(f, "model      {}, {stored} bytes of weights, {held} in memory", self.model)?;
        if self.has_random_weights {
            write!(f, ", random ones")?;
        }
        match self.quantize {
            Some(quantize) => writeln!(f, " ({quantize})")?,
            None => writeln!(f)?,
        }
        let (compute, kv_dtype) = (self.compute, self.kv_dtype);
        writeln!(f, "products   of bf16 weights in {compute}; rows of tokens kept in {kv_dtype}")?;
        let peak = self.peak_rss_bytes.map_or("unknown".to_owned(), grouped);
        writeln!(f, "memory     pools {} bytes, peak {peak} bytes", grouped(self.pool_bytes))?;
        let step = grouped(self.max_num_batched_tokens);
        writeln!(
            f,
            "threads    {}; {} rounds; steps of up to {step} tokens\n",
            self.threads, self.rounds
        )?;
        let titles = format!("{:>9} {:>9} {:>9}", "min", "median", "max");
        writeln!(f, "{:<20}{:>29}    {:>29}", "", "tokens per CPU second", "per wall second")?;
        writeln!(f, "{:<20}{titles}    {titles}   busy %", "")?;
        for of in &self.cases {
            let (cpu, wall) = (of.tokens_per_cpu_second, of.tokens_per_wall_second);
            let (case, busy) = (of.case.to_string(), 100.0 * of.busy_share.median);
            writeln!(f, "{case:<20}{cpu}    {wall} {busy:>8.1}")?;
        }
        let Some(ceiling) = &self.ceiling else { return Ok(()) };
        writeln!(f, "\nlimits of the machine with {} threads: {}", self.threads, ceiling.text())?;
        for of in &self.cases {
            if let Some(roofline) = &of.roofline {
                write!(f, "\n{}\n{roofline}", of.case)?;
            }
        }
        Ok(())
    }
}
