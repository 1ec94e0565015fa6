//! The command line: arguments in, exit code out.
//!
//! Text that a command is asked for goes to standard output and nothing else does; progress, one
//! line of figures and errors go to standard error.

mod batch;
mod bench;
mod calibrate;
mod chart;
mod chat;
mod common;
mod doctor;
mod error;
mod generate;
pub mod inspect;
mod limits;
mod loading;
mod output;
mod profiles;
mod prompt;
mod sampling;
mod score;
mod serve;
mod simulate;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use kernels::Isa;

pub use error::CliError;

/// Runs hybrid linear-attention models (KDA + MLA).
#[derive(Debug, Parser)]
#[command(name = "deltapool", version, about, after_help = EXIT_CODES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXIT_CODES: &str = "\
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 model not loadable or not supported, \
4 not enough memory or no device, 5 address in use, 74 no listening there, 75 answers cut short, \
130 interrupted.

DELTAPOOL_ISA=scalar|avx2|avx512|avx512vnni|avx512bf16 forces an instruction set.";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Continue a prompt.
    Generate(generate::GenerateArgs),
    /// Talk with the model in the terminal.
    Chat(chat::ChatArgs),
    /// Run a file of requests, many at once.
    Batch(batch::BatchArgs),
    /// Serve the model over HTTP, to the clients of OpenAI's and Anthropic's APIs.
    Serve(Box<serve::ServeArgs>),
    /// Tell how likely a text is: log-probabilities, perplexity, bits per byte.
    Score(score::ScoreArgs),
    /// Show a model's layers, its bytes of state, and how many sequences fit in memory.
    Inspect(inspect::InspectArgs),
    /// Measure.
    Bench(bench::BenchArgs),
    /// Measure this machine, and a model on it, for the simulator and for --preempt auto.
    Calibrate(calibrate::CalibrateArgs),
    /// Show what this program was built with, and what this machine has for it.
    Doctor(doctor::DoctorArgs),
    /// What a scheduler does and costs, worked out without a model.
    Simulate(simulate::SimulateArgs),
}

/// Parses the arguments and runs the command. `isa` is the value of `DELTAPOOL_ISA`, if it is set.
pub fn main(isa: Option<&str>) -> ExitCode {
    let done = parse(std::env::args_os().collect()).and_then(|cli| run(cli, isa));
    let Err(error) = done else { return ExitCode::SUCCESS };
    match &error {
        CliError::Arguments(error) => {
            let _ = error.print();
        }
        error if error.is_quiet() => {}
        error => eprintln!("error: {error}"),
    }
    ExitCode::from(error.exit_code())
}

/// The arguments, those of a server with what its environment and its file add.
fn parse(args: Vec<OsString>) -> Result<Cli, CliError> {
    let as_usage = |error| CliError::Arguments(Box::new(error));
    let is_serve = args.get(1).is_some_and(|arg| arg == serve::COMMAND);
    let command = with_negative_numbers(Cli::command());
    if !is_serve {
        let matches = command.try_get_matches_from(args).map_err(as_usage)?;
        return Cli::from_arg_matches(&matches).map_err(as_usage);
    }
    let (matches, settings) = serve::parse(command, args)?;
    let mut cli = Cli::from_arg_matches(&matches).map_err(as_usage)?;
    if let Command::Serve(args) = &mut cli.command {
        args.settings = settings;
    }
    Ok(cli)
}

/// `--port -1` is a port that cannot be, and no argument too many.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| {
        let takes_value = !arg.is_positional() && arg.get_action().takes_values();
        if takes_value { arg.allow_negative_numbers(true) } else { arg }
    });
    command.mut_subcommands(with_negative_numbers)
}

fn run(cli: Cli, isa: Option<&str>) -> Result<(), CliError> {
    let isa = match isa {
        None => Isa::best(),
        Some(name) => {
            Isa::by_name(name).map_err(|e| CliError::Usage(format!("DELTAPOOL_ISA: {e}")))?
        }
    };
    match cli.command {
        Command::Generate(args) => generate::run(&args, isa),
        Command::Chat(args) => chat::run(&args, isa),
        Command::Batch(args) => batch::run(&args, isa),
        Command::Serve(args) => serve::run(&args, isa),
        Command::Score(args) => score::run(&args, isa),
        Command::Inspect(args) => {
            args.dir().map_or(Ok(()), common::check_folder)?;
            Ok(inspect::run(&args)?)
        }
        Command::Bench(args) => bench::run(&args, isa),
        Command::Calibrate(args) => calibrate::run(&args, isa),
        Command::Doctor(args) => doctor::run(&args, isa),
        Command::Simulate(args) => simulate::run(&args),
    }
}
