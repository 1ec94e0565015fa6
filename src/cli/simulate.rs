//! `deltapool simulate`: what a scheduler does and costs, without a model; one subcommand each.

mod explain;

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
    /// Show a claim of the scheduling theory with the numbers put into its formula.
    Explain(explain::ExplainArgs),
}

/// Runs the command.
pub fn run(args: &SimulateArgs) -> Result<(), CliError> {
    match &args.what {
        Simulate::Explain(args) => explain::run(args),
    }
}
