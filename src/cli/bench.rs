//! `deltapool bench`: measurements, one subcommand each.

mod reuse;

use clap::{Args, Subcommand};

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
    /// How much of its prompts a workload does not compute: the real scheduler over a trace, with
    /// fake bytes.
    Reuse(reuse::ReuseArgs),
}

/// Runs the command.
pub fn run(args: &BenchArgs) -> Result<(), CliError> {
    match &args.what {
        Bench::Reuse(args) => reuse::run(args),
    }
}
