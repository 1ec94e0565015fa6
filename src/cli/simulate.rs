//! `deltapool simulate`: what a scheduler does and costs, without a model; one subcommand each.

mod args;
mod charts;
mod compare;
mod curves;
mod explain;
mod perfetto;
mod report;
mod run;
mod sweep;
mod timeline;

use clap::{Args, Subcommand};

use super::CliError;

/// Arguments of `simulate`.
#[derive(Debug, Args)]
pub struct SimulateArgs {
    /// What to simulate.
    #[command(subcommand)]
    pub what: Simulate,
}

/// The simulations.
#[derive(Debug, Subcommand)]
pub enum Simulate {
    /// Run made-up traffic through the real scheduler on a virtual clock.
    Run(Box<run::RunArgs>),
    /// Run a trace of requests through it.
    Replay(Box<run::ReplayArgs>),
    /// Run one simulation for each of several values of a flag.
    Sweep(sweep::SweepArgs),
    /// Show what differs between two results.
    Compare(compare::CompareArgs),
    /// Draw a formula: the time of a step, the waste of static batches, places of two pools.
    Plot(curves::PlotArgs),
    /// Show a claim of the scheduling theory with the numbers put into its formula.
    Explain(explain::ExplainArgs),
}

/// Runs the command.
pub fn run(args: &SimulateArgs) -> Result<(), CliError> {
    match &args.what {
        Simulate::Run(args) => run::run(args),
        Simulate::Replay(args) => run::replay(args),
        Simulate::Sweep(args) => sweep::run(args),
        Simulate::Compare(args) => compare::run(args),
        Simulate::Plot(args) => curves::run(args),
        Simulate::Explain(args) => explain::run(args),
    }
}
