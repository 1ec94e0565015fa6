//! `deltapool bench`: measurements, one subcommand each.

mod batching;
mod crossover;
mod device;
pub(super) mod ids;
pub(super) mod line;
mod machine;
mod reuse;
pub(super) mod speed;
pub(super) mod spread;
pub(super) mod stepper;
pub(super) mod system;

use clap::{Args, Subcommand};
use kernels::Isa;

use super::CliError;
use super::common::JsonArgs;

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
    /// What continuous batching gains over batches of requests.
    Batching(batching::BatchingArgs),
    /// What memory and arithmetic of this machine give at most.
    Machine(machine::MachineArgs),
    /// What a CUDA device takes for each operator, beside what it gives at most.
    Device(device::DeviceArgs),
    /// How much of its prompts a workload does not compute: the real scheduler over a trace, with
    /// fake bytes.
    Reuse(reuse::ReuseArgs),
    /// Whether copying a sequence out and in takes less than computing it again, and from which
    /// length on.
    Crossover(crossover::CrossoverArgs),
}

/// Where a measurement without a model reports to.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Where the result goes.
    #[command(flatten)]
    pub json: JsonArgs,
    /// Say nothing on standard error but errors.
    #[arg(short, long)]
    pub quiet: bool,
}

/// Runs the command.
pub fn run(args: &BenchArgs, isa: Isa) -> Result<(), CliError> {
    match &args.what {
        Bench::Prefill(args) => speed::prefill(args, isa),
        Bench::Decode(args) => speed::decode(args, isa),
        Bench::Batching(args) => batching::run(args, isa),
        Bench::Machine(args) => machine::run(args, isa),
        Bench::Device(args) => device::run(args),
        Bench::Reuse(args) => reuse::run(args),
        Bench::Crossover(args) => crossover::run(args, isa),
    }
}
