//! `deltapool simulate run` and `replay`: made-up traffic or a trace through the real scheduler.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::args::{
    MachineArgs, OutputArgs, SimulationArgs, parse_above_0, parse_from_0, simulation, usage,
};
use super::charts::Timeline;
use super::report::Shown;
use crate::cli::CliError;
use crate::cli::limits::at_least_one_token;
use crate::cli::loading::bar;
use crate::cli::output::{JsonTarget, grouped, print};
use crate::simulate::sampling::{ARRIVALS, LENGTHS};
use crate::simulate::{
    Arrivals, Lengths, MadeUp, NAMED, Report, Simulation, SimulationError, StepLine, Traffic,
    Workload,
};

/// Requests that are open at a time in a named workload.
const OPEN: usize = 16;

/// Arguments of `simulate run`.
#[derive(Debug, Args)]
#[command(args_override_self = true, after_help = AFTER_HELP.as_str())]
pub struct RunArgs {
    /// The requests.
    #[command(flatten)]
    pub traffic: TrafficArgs,
    /// On what they run.
    #[command(flatten)]
    pub machine: MachineArgs,
    /// By which rules.
    #[command(flatten)]
    pub rules: SimulationArgs,
    /// What comes of it.
    #[command(flatten)]
    pub output: OutputArgs,
}

static AFTER_HELP: std::sync::LazyLock<String> = std::sync::LazyLock::new(|| {
    let workloads = NAMED.map(|(name, what)| format!("  {name:<18}{what}\n")).concat();
    format!("Lengths: {LENGTHS}\nArrivals: {ARRIVALS}\nWorkloads:\n{workloads}")
});

/// What a named workload has of its own.
const OWN: [&str; 8] = [
    "requests",
    "arrivals",
    "prompts",
    "answers",
    "max_tokens",
    "programs",
    "shared_prefix",
    "seed",
];

/// Made-up traffic.
#[derive(Debug, Args)]
#[command(next_help_heading = "Traffic")]
pub struct TrafficArgs {
    /// How many requests.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = at_least_one_token)]
    pub requests: usize,
    /// When they arrive: all, poisson:4.5, gamma:4.5:2, burst:32:1, closed:32.
    #[arg(long, value_name = "WHEN", default_value = "all")]
    pub arrivals: Arrivals,
    /// Tokens of a prompt: 512, uniform:64:512, exp:128, choice:512=0.7,8192=0.3; see below.
    #[arg(long, value_name = "LENGTHS", default_value = "512")]
    pub prompts: Lengths,
    /// Tokens of an answer, in the same forms.
    #[arg(long, value_name = "LENGTHS", default_value = "exp:128")]
    pub answers: Lengths,
    /// No answer is longer.
    #[arg(long, value_name = "N", value_parser = at_least_one_token)]
    pub max_tokens: Option<usize>,
    /// The requests are of so many programs by turns; see --scheduling-policy fair.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub programs: usize,
    /// Prompts are of so many groups by turns, each of which begins with the same tokens.
    #[arg(long, value_name = "GROUPS:TOKENS", value_parser = parse_groups)]
    pub shared_prefix: Option<(usize, usize)>,
    /// A small workload with shared prefixes instead, 16 requests of it open at a time.
    #[arg(
        long,
        value_name = "NAME",
        value_parser = PossibleValuesParser::new(NAMED.map(|(name, _)| name)),
        hide_possible_values = true,
        conflicts_with_all = OWN
    )]
    pub workload: Option<String>,
    /// Of the random numbers: one seed, one traffic, whatever it runs on.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
}

/// Arguments of `simulate replay`.
#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// A Mooncake trace: one JSON object a line with timestamp, input_length, output_length and
    /// hash_ids.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// The first N requests.
    #[arg(long, value_name = "N", value_parser = at_least_one_token)]
    pub limit: Option<usize>,
    /// So many times as fast as they came.
    #[arg(
        long,
        value_name = "X",
        default_value_t = 1.0,
        value_parser = parse_above_0,
        allow_negative_numbers = true
    )]
    pub speed: f64,
    /// Each comes up to so many seconds later than its line says: some traces round to three.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 0.0,
        value_parser = parse_from_0,
        allow_negative_numbers = true
    )]
    pub jitter: f64,
    /// Prompts that go on where an earlier one ended contain its answer.
    #[arg(long)]
    pub chat: bool,
    /// Of the random numbers of --jitter.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// On what they run.
    #[command(flatten)]
    pub machine: MachineArgs,
    /// By which rules.
    #[command(flatten)]
    pub rules: SimulationArgs,
    /// What comes of it.
    #[command(flatten)]
    pub output: OutputArgs,
}

impl TrafficArgs {
    /// The requests.
    pub fn traffic(&self) -> Traffic {
        if let Some(name) = &self.workload {
            let workload = Workload::named(name, None).expect("clap knows the names");
            return Traffic::of_workload(workload, OPEN);
        }
        Traffic::made_up(&MadeUp {
            requests: self.requests,
            arrivals: self.arrivals,
            prompts: self.prompts.clone(),
            answers: self.answers.clone(),
            most_answer: self.max_tokens,
            programs: self.programs,
            groups: self.shared_prefix,
            seed: self.seed,
        })
    }
}

/// Runs `simulate run`.
pub fn run(args: &RunArgs) -> Result<(), CliError> {
    let simulation = simulation(&args.machine, &args.rules, &args.output)?;
    tell(&simulation, &args.traffic.traffic(), &args.output)
}

/// Runs `simulate replay`.
pub fn replay(args: &ReplayArgs) -> Result<(), CliError> {
    let simulation = simulation(&args.machine, &args.rules, &args.output)?;
    let (limit, pace) = (args.limit, (args.speed, args.jitter));
    let traffic =
        Traffic::of_trace(&args.file, args.chat, limit, pace, args.seed).map_err(usage)?;
    tell(&simulation, &traffic, &args.output)
}

/// Simulates, and says what came of it.
fn tell(simulation: &Simulation, traffic: &Traffic, output: &OutputArgs) -> Result<(), CliError> {
    let target = output.json.target();
    let mut trace = output.trace.as_deref().map(Trace::new).transpose()?;
    let mut timeline = Timeline::default();
    let report = simulate(simulation, traffic, output.quiet, &mut |line| {
        if let Some(trace) = &mut trace {
            trace.write(line);
        }
        if output.svg.is_some() {
            timeline.note(line);
        }
    })?;
    trace.map_or(Ok(()), Trace::end)?;
    if let Some(path) = &output.svg {
        let pages = report.pools.device_pages;
        timeline.chart(&report.header.traffic, pages).write_svg(path)?;
    }
    target.write(&serde_json::to_value(&report).expect("a report is plain data"))?;
    if target != JsonTarget::Output {
        print(&Shown(&report).to_string())?;
    }
    Ok(())
}

/// Simulates, with a bar of the requests that have ended and, at the end, how fast that was.
pub fn simulate(
    simulation: &Simulation,
    traffic: &Traffic,
    quiet: bool,
    observe: &mut dyn FnMut(&StepLine),
) -> Result<Report, CliError> {
    const BAR: &str = "{wide_bar} {pos}/{len} requests, {eta} left";
    let bar = bar(quiet, BAR);
    bar.set_length(traffic.requests.len() as u64);
    let start = Instant::now();
    let report = simulation.run(traffic, &mut |ended| bar.set_position(ended as u64), observe);
    bar.finish_and_clear();
    let report = report.map_err(|error| match error {
        SimulationError::Stuck { .. } => CliError::Failed(error.to_string()),
        error => usage(error),
    })?;
    if !quiet {
        let (steps, took) = (report.steps.count as usize, start.elapsed().as_secs_f64());
        let rate = grouped((steps as f64 / took.max(1e-9)) as usize);
        eprintln!("{} steps in {took:.1} s, {rate} a second", grouped(steps));
    }
    Ok(report)
}

/// A file with a line for each step.
struct Trace<'p> {
    path: &'p Path,
    file: BufWriter<File>,
    error: Option<std::io::Error>,
}

impl<'p> Trace<'p> {
    fn new(path: &'p Path) -> Result<Trace<'p>, CliError> {
        let file = File::create(path).map_err(|source| CliError::file(path, source))?;
        Ok(Trace { path, file: BufWriter::new(file), error: None })
    }

    fn write(&mut self, line: &StepLine) {
        if self.error.is_none() {
            let text = serde_json::to_string(line).expect("a step is plain data");
            self.error = writeln!(self.file, "{text}").err();
        }
    }

    fn end(mut self) -> Result<(), CliError> {
        let done = self.error.take().map_or_else(|| self.file.flush(), Err);
        done.map_err(|source| CliError::file(self.path, source))
    }
}

fn parse_groups(text: &str) -> Result<(usize, usize), String> {
    let (groups, tokens) = text.split_once(':').ok_or("GROUPS:TOKENS, as 4:2000")?;
    Ok((at_least_one_token(groups)?, at_least_one_token(tokens)?))
}
