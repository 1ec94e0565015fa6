//! `deltapool bench reuse`: a trace or a small workload through the real scheduler, no model.

mod report;
mod sizes;

use std::path::PathBuf;
use std::sync::LazyLock;

use clap::builder::PossibleValuesParser;
use clap::{ArgGroup, Args};

use super::ReportArgs;
use crate::cli::CliError;
use crate::cli::loading::bar;
use crate::cli::output::{JsonTarget, print};
use crate::config::parse_bytes;
use crate::simulate::{
    self, DeviceMemory, NAMED, Outcome, Policy, ReplayError, Setup, Share, TraceError, Workload,
};
use report::Report;
use sizes::Sizes;

/// Arguments of `bench reuse`.
#[derive(Debug, Args)]
#[command(after_help = HELP.as_str())]
#[command(group(ArgGroup::new("source").required(true).args(["trace", "workload"])))]
pub struct ReuseArgs {
    /// A Mooncake trace: one JSON object a line with input_length, output_length and hash_ids.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// A small workload; see below.
    #[arg(
        long,
        value_name = "NAME",
        value_parser = PossibleValuesParser::new(NAMED.map(|(name, _)| name)),
        hide_possible_values = true
    )]
    pub workload: Option<String>,
    /// Prompts of the trace that go on where an earlier one ended contain its answer.
    #[arg(long, conflicts_with = "workload")]
    pub chat: bool,
    /// A model's config.json, whose bytes of state are used; default: those of Kimi-Linear-48B.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Memory of the device: bytes (64MiB, 8GB), or unlimited.
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "35GB",
        value_parser = device_memory,
        allow_negative_numbers = true
    )]
    pub device_memory: DeviceMemory,
    /// Memory of the host, bytes.
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "0",
        value_parser = host_memory,
        allow_negative_numbers = true
    )]
    pub host_memory: usize,
    /// States of prompts are kept at multiples of N tokens, itself a multiple of 64.
    #[arg(long, value_name = "N", default_value_t = 64, allow_negative_numbers = true)]
    pub grid: usize,
    /// Where states are kept; see below.
    #[arg(long, value_name = "POLICY", default_value_t = Policy::Default)]
    pub policy: Policy,
    /// Only the first N requests.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub limit: Option<usize>,
    /// Requests that are open at a time, in order [default: 1, all of a burst].
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub concurrency: Option<usize>,
    /// Where its report goes.
    #[command(flatten)]
    pub report: ReportArgs,
}

static HELP: LazyLock<String> = LazyLock::new(|| {
    let mut help = "Workloads:\n".to_owned();
    for (name, what) in NAMED {
        help += &format!("  {name:<18} {what}\n");
    }
    help + POLICIES
});

const POLICIES: &str = "
Policies:
  default            as an engine keeps them
  end                at the last grid position of each prompt
  end+branch         and where a prompt leaves what earlier ones had
  every=N            at multiples of N tokens
  every=N+end+branch all of these
All but default keep no state of a finished answer.

A token is cached when no step computes it. Ideal is what an endless memory of perfect states would
save. The halves are those of the requests in their order.";

fn device_memory(text: &str) -> Result<DeviceMemory, String> {
    match text {
        "unlimited" => Ok(DeviceMemory::Unlimited),
        _ => parse_bytes(text).map(DeviceMemory::Bytes),
    }
}

fn host_memory(text: &str) -> Result<usize, String> {
    match text {
        "unlimited" => Err("only --device-memory can be unlimited".to_owned()),
        _ => parse_bytes(text),
    }
}

/// Runs the command.
pub fn run(args: &ReuseArgs) -> Result<(), CliError> {
    check(args)?;
    let sizes = Sizes::read(args.config.as_deref())?;
    let workload = workload(args)?;
    let setup = Setup {
        slot_bytes: sizes.slot_bytes,
        block_bytes: sizes.block_bytes,
        span_grid: sizes.span_grid,
        device_memory: args.device_memory,
        host_memory: args.host_memory,
        policy: args.policy,
        state_grid: args.grid,
        concurrency: args.concurrency,
    };
    let outcome = replay(&workload, &setup, args.report.quiet)?;
    let report = Report::new(&workload, &sizes, &setup, &outcome);
    let target = args.report.json.target();
    if target != JsonTarget::Output {
        print(&format!("{report}\n"))?;
    }
    target.write(&serde_json::json!(report))
}

/// Refuses numbers that make no sense.
fn check(args: &ReuseArgs) -> Result<(), CliError> {
    let refuse = |message: String| Err(CliError::Usage(message));
    let grid = args.grid;
    if grid == 0 || !grid.is_multiple_of(64) {
        return refuse(format!("--grid {grid}: a multiple of 64, 64 or more"));
    }
    if args.concurrency == Some(0) {
        return refuse("--concurrency 0: 1 or more".to_owned());
    }
    if args.limit == Some(0) {
        return refuse("--limit 0: 1 or more".to_owned());
    }
    args.policy.check(grid).map_err(|error| CliError::Usage(format!("--policy {error}")))
}

fn workload(args: &ReuseArgs) -> Result<Workload, CliError> {
    if let Some(name) = &args.workload {
        return Ok(Workload::named(name, args.limit).expect("the parser knows the names"));
    }
    let path = args.trace.as_ref().expect("one of the two is there");
    Workload::of_trace(path, args.chat, args.limit).map_err(|error| match error {
        TraceError::Io { path, source } => CliError::File { path, source },
        other => CliError::Usage(other.to_string()),
    })
}

fn replay(workload: &Workload, setup: &Setup, quiet: bool) -> Result<Outcome, CliError> {
    let bar = bar(quiet, "{bar:40} {pos}/{len} requests, {msg}");
    bar.set_length(workload.requests.len() as u64);
    let outcome = simulate::replay(workload, setup, &mut |all: &Share| {
        bar.set_position(all.requests as u64);
        // A message for each request would cost more than the request.
        if all.requests.is_multiple_of(64) {
            bar.set_message(format!("{:.1} % cached", all.cached_percent()));
        }
    });
    bar.finish_and_clear();
    outcome.map_err(|error| match error {
        ReplayError::Stuck { .. } => CliError::Failed(error.to_string()),
        _ => CliError::Usage(error.to_string()),
    })
}
