//! `deltapool simulate run` and `replay`: made-up traffic or a trace through the real scheduler.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};

use super::args::{
    MachineArgs, OutputArgs, SimulationArgs, parse_above_0, parse_from_0, simulation, usage,
};
use super::charts::{self, Plot};
use super::perfetto::ChromeTrace;
use super::report::Shown;
use super::timeline::Recorder;
use crate::cli::CliError;
use crate::cli::limits::at_least_one_token;
use crate::cli::loading::bar;
use crate::cli::output::{Draft, JsonTarget, grouped, print};
use crate::simulate::sampling::{ARRIVALS, LENGTHS, MOST_TOKENS};
use crate::simulate::{
    Arrivals, Lengths, MadeUp, NAMED, Report, Simulation, SimulationError, StepLine, TraceError,
    Traffic, Workload,
};

/// Requests that are open at a time in a named workload.
const OPEN: usize = 16;

/// Requests that are made up, their turns counted; and turns of one, each of which says again what
/// was said before.
const MOST_REQUESTS: usize = 10_000_000;
const MOST_TURNS: usize = 1_000;

/// Programs of a traffic, and requests of one in a round.
const MOST_PROGRAMS: usize = 100_000;

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
const OWN: [&str; 10] = [
    "requests",
    "arrivals",
    "turns",
    "think_ms",
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
    /// Turns of each, as of a chat or an agent: a turn's prompt is all that was said and --prompts
    /// tokens more, and it comes --think-ms after the answer before it.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one_token)]
    pub turns: usize,
    /// Milliseconds between an answer and the next turn, in the forms of a length, or 0.
    #[arg(
        long,
        value_name = "LENGTHS",
        default_value = "1000",
        value_parser = parse_think,
        requires = "turns"
    )]
    pub think_ms: Lengths,
    /// The requests are of so many programs by turns, or with 7,1: seven of the first, then one of
    /// the second, and so on; see --scheduling-policy fair.
    #[arg(long, value_name = "N|N,N..", value_parser = parse_programs)]
    pub programs: Option<Programs>,
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
    ///
    /// # Errors
    /// More requests than there is memory to make up.
    pub fn traffic(&self) -> Result<Traffic, CliError> {
        if let Some(name) = &self.workload {
            let workload = Workload::named(name, None).expect("clap knows the names");
            return Ok(Traffic::of_workload(workload, OPEN));
        }
        let (requests, turns) = (self.requests, self.turns);
        if turns > MOST_TURNS || requests.saturating_mul(turns) > MOST_REQUESTS {
            return Err(usage(format!(
                "--requests {requests}, --turns {turns}: {MOST_REQUESTS} of all turns together, \
                 and {MOST_TURNS} turns at most"
            )));
        }
        Ok(Traffic::made_up(&MadeUp {
            requests: self.requests,
            arrivals: self.arrivals,
            turns: self.turns,
            think: self.think_ms.clone(),
            prompts: self.prompts.clone(),
            answers: self.answers.clone(),
            most_answer: self.max_tokens,
            programs: self.programs.clone().unwrap_or_default().0,
            groups: self.shared_prefix,
            seed: self.seed,
        }))
    }
}

/// Runs `simulate run`.
pub fn run(args: &RunArgs) -> Result<(), CliError> {
    let simulation = simulation(&args.machine, &args.rules, &args.output)?;
    tell(&simulation, &args.traffic.traffic()?, &args.output)
}

/// Runs `simulate replay`.
pub fn replay(args: &ReplayArgs) -> Result<(), CliError> {
    let simulation = simulation(&args.machine, &args.rules, &args.output)?;
    let (limit, pace) = (args.limit, (args.speed, args.jitter));
    let traffic =
        Traffic::of_trace(&args.file, args.chat, limit, pace, args.seed).map_err(trace_fault)?;
    tell(&simulation, &traffic, &args.output)
}

fn trace_fault(error: TraceError) -> CliError {
    match error {
        TraceError::Io { path, source } => CliError::File { path, source },
        error => usage(error),
    }
}

/// Simulates, and says what came of it.
fn tell(simulation: &Simulation, traffic: &Traffic, output: &OutputArgs) -> Result<(), CliError> {
    let target = output.json.target();
    if let Some(plot) = output.plot.filter(|plot| !plot.is_of_run()) {
        return Err(usage(wrong_plot(plot, "a sweep", Plot::is_of_run)));
    }
    let has_programs = traffic.requests.iter().any(|request| request.program.is_some());
    if output.plot == Some(Plot::Programs) && !has_programs {
        return Err(usage(charts::NO_PROGRAMS));
    }
    output.check()?;
    let mut follower = Follower::new(traffic, output)?;
    let mut observe = |line: &StepLine| follower.note(line);
    let is_followed = output.trace.is_some() || output.perfetto.is_some() || output.draws();
    let report = simulate(simulation, traffic, output.quiet, is_followed.then_some(&mut observe))?;
    let Follower { recorder: Recorder { timeline, .. }, trace, chrome } = follower;
    trace.map_or(Ok(()), Trace::end)?;
    if let (Some(chrome), Some(path)) = (chrome, &output.perfetto) {
        chrome.write(&timeline, path)?;
    }
    target.write(&serde_json::to_value(&report).expect("a report is plain data"))?;
    if target != JsonTarget::Output {
        print(&Shown(&report).to_string())?;
    }
    if !output.draws() {
        return Ok(());
    }
    let chart = charts::of_run(output.plot.unwrap_or(Plot::Where), &timeline, &report);
    output.show(chart, output.plot.is_some())
}

/// Says that a chart is not of what was run, and which ones are.
pub fn wrong_plot(plot: Plot, of: &str, is_right: impl Fn(Plot) -> bool) -> String {
    let name = |plot: &Plot| plot.to_possible_value().map(|value| value.get_name().to_owned());
    let right = Plot::value_variants().iter().filter(|plot| is_right(**plot));
    let names: Vec<String> = right.filter_map(name).collect();
    let plot = name(&plot).unwrap_or_default();
    format!("--plot {plot} is of {of}; here there are {}", names.join(", "))
}

/// Keeps of the steps what is asked for.
struct Follower<'p> {
    recorder: Recorder,
    trace: Option<Trace<'p>>,
    chrome: Option<ChromeTrace>,
}

impl<'p> Follower<'p> {
    fn new(traffic: &Traffic, output: &'p OutputArgs) -> Result<Follower<'p>, CliError> {
        let trace = output.trace.as_deref().map(Trace::new).transpose()?;
        let chrome = output.perfetto.is_some().then(ChromeTrace::default);
        Ok(Follower { recorder: Recorder::new(traffic), trace, chrome })
    }

    fn note(&mut self, line: &StepLine) {
        self.recorder.note(line);
        if let Some(trace) = &mut self.trace {
            trace.write(line);
        }
        if let Some(chrome) = &mut self.chrome {
            chrome.note(line);
        }
    }
}

/// Simulates, with a bar of the requests that have ended and, at the end, how fast that was.
pub fn simulate(
    simulation: &Simulation,
    traffic: &Traffic,
    quiet: bool,
    observe: Option<&mut dyn FnMut(&StepLine)>,
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
    draft: Draft,
    error: Option<std::io::Error>,
}

impl<'p> Trace<'p> {
    fn new(path: &'p Path) -> Result<Trace<'p>, CliError> {
        let draft = Draft::new(path).map_err(|source| CliError::file(path, source))?;
        Ok(Trace { path, draft, error: None })
    }

    fn write(&mut self, line: &StepLine) {
        if self.error.is_none() {
            let text = serde_json::to_string(line).expect("a step is plain data");
            self.error = writeln!(self.draft, "{text}").err();
        }
    }

    fn end(self) -> Result<(), CliError> {
        let written = self.error.map_or_else(|| self.draft.end(), Err);
        written.map_err(|source| CliError::file(self.path, source))
    }
}

/// Requests of each program in a round.
#[derive(Debug, Clone, Default)]
pub struct Programs(Vec<usize>);

fn parse_programs(text: &str) -> Result<Programs, String> {
    let numbers = text.split(',').map(|number| match number.parse() {
        Ok(number @ 1..=MOST_PROGRAMS) => Ok(number),
        _ => Err(format!("{number}: numbers from 1 to {MOST_PROGRAMS}")),
    });
    let numbers = numbers.collect::<Result<Vec<usize>, String>>()?;
    match numbers.as_slice() {
        [count] => Ok(Programs(vec![1; *count])),
        _ => Ok(Programs(numbers)),
    }
}

fn parse_think(text: &str) -> Result<Lengths, String> {
    match text {
        "0" => Ok(Lengths::Const(0)),
        text => text.parse(),
    }
}

fn parse_groups(text: &str) -> Result<(usize, usize), String> {
    let (groups, tokens) = text.split_once(':').ok_or("GROUPS:TOKENS, as 4:2000")?;
    let (groups, tokens) = (at_least_one_token(groups)?, at_least_one_token(tokens)?);
    match tokens <= MOST_TOKENS {
        true => Ok((groups, tokens)),
        false => Err(format!("{tokens} tokens; {MOST_TOKENS} at most")),
    }
}
