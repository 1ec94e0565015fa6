//! `deltapool bench`: measurements, one subcommand each.

mod machine;
mod reuse;
mod speed;
mod spread;
mod system;

use std::path::PathBuf;

use clap::{Args, Subcommand};
use kernels::Isa;

use super::CliError;

/// Arguments of `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    pub what: Bench,
}

/// The measurements.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// How fast prompts are computed.
    Prefill(speed::PrefillArgs),
    /// How fast tokens are generated.
    Decode(speed::DecodeArgs),
    /// What memory and arithmetic of this machine give at most.
    Machine(machine::MachineArgs),
    /// How much of its prompts a workload does not compute: the real scheduler over a trace, with
    /// fake bytes.
    Reuse(reuse::ReuseArgs),
}

/// Where a measurement without a model reports to.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Print one JSON object on one line instead of the table, or write it to FILE beside it.
    #[arg(
        long,
        value_name = "FILE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "-"
    )]
    pub json: Option<PathBuf>,
    /// Say nothing on standard error but errors.
    #[arg(short, long)]
    pub quiet: bool,
}

/// Runs the command.
pub fn run(args: &BenchArgs, isa: Isa) -> Result<(), CliError> {
    match &args.what {
        Bench::Prefill(args) => speed::prefill(args, isa),
        Bench::Decode(args) => speed::decode(args, isa),
        Bench::Machine(args) => machine::run(args, isa),
        Bench::Reuse(args) => reuse::run(args),
    }
}
