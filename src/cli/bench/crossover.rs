//! `deltapool bench crossover`: does copying a sequence's state out and in take less time than
//! computing it again, and from which length on?
//!
//! The real engine over the real executor, stepped in this thread; or, with `--modelled`, the model
//! lines of SEEDS.md F12 to F17 alone.

mod draw;
mod lines;
mod measure;
mod modelled;
mod report;

use std::ops::RangeInclusive;

use clap::Args;
use kernels::{CELL_LEN, Isa};

use super::speed::{RandomArgs, advise, pool_bytes};
use super::stepper::Stepper;
use super::system::Machine;
use crate::cli::CliError;
use crate::cli::chart::DrawingArgs;
use crate::cli::common::{CommonArgs, JsonArgs};
use crate::cli::loading::{Files, bar, loading_bar};
use crate::cli::output::{JsonTarget, check_outputs, print};
use crate::config::{
    DEFAULT_MAX_NUM_BATCHED_TOKENS, EngineConfig, LEAST_MAX_NUM_BATCHED_TOKENS, MOST_THREADS,
    MemorySize, Preempt,
};
use crate::engine::link::LinkExecutor;
use crate::engine::{Engine, EngineError, OpenDevice};
use crate::models::{Model, ModelFiles};
use crate::simulate::sampling::MOST_TOKENS;
use lines::{Lines, fit, measured_crossover};
use measure::{ANSWER, Bench, Case, DECODERS, Measured};
use report::{Arm, Crossover, Report, Row, SwapLine};

/// Fewest repeats of an arm.
const LEAST_REPEATS: usize = 5;

/// Most repeats of an arm.
const MOST_REPEATS: usize = 1000;

/// The longest length that is measured unless told otherwise.
const LONGEST: usize = 8192;

/// Tokens between two checkpoints, unless told otherwise.
const CHECKPOINT_EVERY: usize = 1024;

/// GB a second to which copies can be held: what a state takes hours for is a slip.
const LINKS: RangeInclusive<f64> = 1e-4..=1e6;

/// Size of the chart in a terminal.
const CHART: (usize, usize) = (100, 22);

/// Arguments of `bench crossover`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct CrossoverArgs {
    /// Lengths to measure, multiples of 64 tokens; default: powers of two from 64 to 8192, as far
    /// as context and memory go.
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    pub lengths: Vec<usize>,
    /// Hold copies to this rate each way, in GB per second; default: as fast as they are.
    #[arg(long, value_name = "GB/S", allow_negative_numbers = true)]
    pub link_gbps: Option<f64>,
    /// Repeats of each arm, 5 or more.
    #[arg(long, value_name = "N", default_value_t = LEAST_REPEATS, conflicts_with = "modelled")]
    pub repeats: usize,
    /// Most tokens of a step, as of the engine.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_MAX_NUM_BATCHED_TOKENS)]
    pub max_num_batched_tokens: usize,
    /// Tokens between the checkpoints of which the nearest is restored; default: 1024, or the
    /// tokens of a step if these are more.
    #[arg(long, value_name = "N")]
    pub checkpoint_every: Option<usize>,
    /// Measure nothing: print what the model lines say of --model (a preset, or a config.json) on
    /// --hardware.
    #[arg(long)]
    pub modelled: bool,
    /// With --modelled: a preset of hardware, or a profile's file.
    #[arg(long, value_name = "NAME", default_value = "h100", requires = "modelled")]
    pub hardware: String,
    /// Where the chart goes.
    #[command(flatten)]
    pub drawing: DrawingArgs,
    /// Which weights are measured with.
    #[command(flatten)]
    pub weights: RandomArgs,
    /// Which model, how it is computed, and whether that is told.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Where the result is reported.
    #[command(flatten)]
    pub report: JsonArgs,
}

const HELP: &str = "\
Arms, of a sequence with so many tokens that has just drawn its first one:
  swap_out, swap_in   its blocks and its slot are copied to the host, and back; swap is both
  recompute           its state is given up and computed again, alone
  recompute_marginal  it is computed beside 8 sequences that decode: what their steps take longer
                      (--modelled: beside 32 of 2,048 tokens)
  checkpoint          the nearest checkpoint, held on the host, is copied in, and the rest computed
The model lines are F12, F13, F16 and F17 of the scheduling theory with the constants that are
printed. L* is the length at which swap and recompute take the same time: below it recomputing
takes less. The measured one lies between two of the lengths, or is outside of them.
A CPU copies so fast that swap mostly wins; --link-gbps shows the crossover of a slower link.";

/// Runs the command.
pub fn run(args: &CrossoverArgs, isa: Isa) -> Result<(), CliError> {
    check(args)?;
    let target = args.report.target();
    // Before minutes of work: a file that cannot be written is told at once.
    check_outputs(args.drawing.files().chain(target.file()))?;
    let report = match args.modelled {
        true => modelled::report(args)?,
        false => measured(args, isa)?,
    };
    if target != JsonTarget::Output {
        let chart = draw::text_chart(&report).text(CHART.0, CHART.1);
        print(&format!("{report}\n{chart}"))?;
    }
    args.drawing.write(&draw::full_chart(&report))?;
    target.write(&serde_json::json!(report))
}

/// Refuses numbers that make no sense.
fn check(args: &CrossoverArgs) -> Result<(), CliError> {
    let refuse = |message: String| Err(CliError::Usage(message));
    let off_grid = |tokens: usize| tokens == 0 || !tokens.is_multiple_of(CELL_LEN);
    if let Some(tokens) = args.lengths.iter().find(|tokens| off_grid(**tokens)) {
        return refuse(format!("--lengths {tokens}: a multiple of {CELL_LEN}, {CELL_LEN} or more"));
    }
    if !(LEAST_REPEATS..=MOST_REPEATS).contains(&args.repeats) {
        let repeats = args.repeats;
        return refuse(format!("--repeats {repeats}: {LEAST_REPEATS} to {MOST_REPEATS}"));
    }
    if let Some(tokens) = args.lengths.iter().find(|tokens| **tokens > MOST_TOKENS) {
        return refuse(format!("--lengths {tokens}: {MOST_TOKENS} at most"));
    }
    if let Some(rate) = args.link_gbps.filter(|rate| !LINKS.contains(rate)) {
        let (least, most) = (LINKS.start(), LINKS.end());
        return refuse(format!("--link-gbps {rate}: above 0, from {least} to {most}"));
    }
    if args.max_num_batched_tokens < LEAST_MAX_NUM_BATCHED_TOKENS {
        let tokens = args.max_num_batched_tokens;
        return refuse(format!("--max-num-batched-tokens {tokens}: 64 or more"));
    }
    let chunk = chunk(args);
    match args.checkpoint_every {
        Some(every) if every == 0 || !every.is_multiple_of(chunk) && !args.modelled => {
            refuse(format!(
                "--checkpoint-every {every}: a multiple of {chunk}, the tokens of a prompt that a \
                 step computes"
            ))
        }
        _ => Ok(()),
    }
}

/// Tokens of a prompt that a step computes.
fn chunk(args: &CrossoverArgs) -> usize {
    args.max_num_batched_tokens / CELL_LEN * CELL_LEN
}

/// Tokens between two checkpoints: a prompt's chunks end at each of them.
fn checkpoint_every(args: &CrossoverArgs) -> usize {
    args.checkpoint_every.unwrap_or_else(|| CHECKPOINT_EVERY.next_multiple_of(chunk(args)))
}

/// The last checkpoint before the end of so many tokens, unless that is the start.
fn checkpoint_below(tokens: usize, every: usize) -> Option<usize> {
    let position = tokens.saturating_sub(1) / every * every;
    (position > 0).then_some(position)
}

/// The lengths that were asked for, in order; or powers of two up to `longest`.
fn lengths(args: &CrossoverArgs, longest: usize) -> Vec<usize> {
    if args.lengths.is_empty() {
        let powers = std::iter::successors(Some(CELL_LEN), |tokens| Some(tokens * 2));
        return powers.take_while(|tokens| *tokens <= longest).collect();
    }
    let mut lengths = args.lengths.clone();
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

/// What the title says of the link.
fn link_title(link_gbps: Option<f64>) -> String {
    match link_gbps {
        Some(rate) => format!("link held to {rate} GB/s"),
        None => "link as fast as it copies".to_owned(),
    }
}

/// Measures.
fn measured(args: &CrossoverArgs, isa: Isa) -> Result<Report, CliError> {
    let common = &args.common;
    let threads = common.threads();
    if !(1..=MOST_THREADS).contains(&threads) {
        return Err(CliError::Usage(format!("--threads {threads}: 1 to {MOST_THREADS}")));
    }
    let is_random = args.weights.random_weights;
    let Files { model: files, device, .. } = Files::open_for_bench(common, is_random, isa)?;
    let on = device.kind();
    let layout = Model::layout_of(&files.spec);
    let vocab_size = files.spec.vocab_size;
    let (lengths, config) = plan(args, &files, &device)?;
    let rate = args.link_gbps.map(|rate| rate * 1e9);
    let copies = device.link_bytes_per_second()?;
    let [link_out, link_in] = copies.map(|copies| rate.map_or(copies, |rate| rate.min(copies)));
    let (loading, show) = loading_bar(common.quiet);
    let builder = Engine::builder(files).isa(isa).config(config).on(device).on_load(show);
    let core = builder.build_over(|executor| LinkExecutor::new(executor, rate));
    loading.finish_and_clear();
    let mut bench = Bench::new(Stepper::new(core.map_err(advise)?), vocab_size);
    let bar = bar(common.quiet, "{msg} {bar:40} {pos}/{len}");
    let every = checkpoint_every(args);
    let held = |tokens: usize| {
        (layout.slot_bytes + tokens / kernels::BLOCK_LEN * layout.block_bytes) as u64
    };
    let mut cases: Vec<Case> = Vec::new();
    bar.set_length((lengths.len() * (1 + 4 * args.repeats)) as u64);
    for tokens in lengths {
        bar.set_message(format!("undisturbed, {tokens} tokens"));
        let checkpoint = checkpoint_below(tokens, every).map(|at| (at, held(at)));
        cases.push(bench.case(tokens, held(tokens), checkpoint)?);
        bar.inc(1);
    }
    let measured = bench.measure(&cases, args.repeats, &bar)?;
    bar.finish_and_clear();
    let (token_seconds, pair_seconds) = fit(&measured.prompts);
    let constants = Lines {
        slot_bytes: layout.slot_bytes as f64,
        kv_bytes_per_token: layout.block_bytes as f64 / kernels::BLOCK_LEN as f64,
        link_out_bytes_per_second: link_out,
        link_in_bytes_per_second: link_in,
        link_latency_seconds: 0.0,
        token_seconds,
        pair_seconds,
    };
    Ok(Report {
        machine: Some(Machine::this(isa)),
        device: Some(on.as_str()),
        threads: Some(threads),
        repeats: Some(args.repeats),
        ..report_of(args, &constants, (&cases, &measured))
    })
}

/// The lengths that fit, and the limits of an engine that just holds the longest.
fn plan(
    args: &CrossoverArgs,
    files: &ModelFiles,
    device: &OpenDevice,
) -> Result<(Vec<usize>, EngineConfig), CliError> {
    let context = files.spec.context;
    let mut lengths = lengths(args, LONGEST.min(context.saturating_sub(ANSWER)));
    let reach = |tokens: usize| (tokens + ANSWER).max(Case::decoder_tokens(tokens));
    if let Some(tokens) = lengths.iter().find(|tokens| reach(**tokens) > context) {
        return Err(CliError::Usage(format!(
            "--lengths {tokens}: a sequence reaches {} tokens, and the model's context is \
             {context} tokens",
            reach(*tokens)
        )));
    }
    loop {
        let longest = *lengths.last().ok_or_else(|| {
            CliError::Usage(format!("a context of {context} tokens is too short to measure"))
        })?;
        let config = config(args, files, longest)?;
        match device.limits(files, &config) {
            Ok(_) => return Ok((lengths, config)),
            Err(EngineError::Memory { .. }) if args.lengths.is_empty() && lengths.len() > 1 => {
                lengths.pop();
            }
            Err(error) => return Err(advise(error).into()),
        }
    }
}

fn config(
    args: &CrossoverArgs,
    files: &ModelFiles,
    longest: usize,
) -> Result<EngineConfig, CliError> {
    let (one, beside) = (longest + ANSWER, Case::decoder_tokens(longest));
    let host = pool_bytes(files, 1, one)?;
    let device = pool_bytes(files, 1, one.max(beside))? + pool_bytes(files, DECODERS, beside)?;
    Ok(EngineConfig {
        max_num_batched_tokens: args.max_num_batched_tokens,
        max_num_seqs: Some(1 + DECODERS),
        max_model_len: Some(one.max(beside)),
        device_memory: MemorySize::Bytes(device),
        host_memory: MemorySize::Bytes(host),
        watermark_percent: 0.0,
        preempt: Preempt::Swap,
        prefix_cache: false,
        threads: args.common.threads(),
        ..EngineConfig::default()
    })
}

/// The report of what was measured, beside the model lines.
fn report_of(
    args: &CrossoverArgs,
    constants: &Lines,
    (cases, measured): (&[Case], &Measured),
) -> Report {
    let model = args.common.model.as_ref();
    let arch = model.map_or("embedded".into(), |path| path.display().to_string());
    let row = |times: &measure::Times| {
        let tokens = times.tokens as f64;
        let case = cases.iter().find(|case| case.tokens == times.tokens);
        let case = case.expect("what was measured was a case");
        let (held, from) = (case.held_bytes as f64, case.checkpoint.unwrap_or((0, 0)));
        let (bytes, model) = match times.arm {
            Arm::SwapOut => (held, constants.out_seconds(tokens)),
            Arm::SwapIn => (held, constants.in_seconds(tokens)),
            Arm::Swap => (2.0 * held, constants.swap_seconds(tokens)),
            Arm::Recompute | Arm::RecomputeMarginal => (0.0, constants.recompute_seconds(tokens)),
            Arm::Checkpoint => (from.1 as f64, constants.restore_seconds(from.0 as f64, tokens)),
        };
        let row = Row::new(&arch, times.tokens, times.arm, bytes);
        row.measured(times.spread()).modelled(Some(model))
    };
    let median = |tokens: usize, arm: Arm| {
        let of = measured.times.iter().find(|times| (times.tokens, times.arm) == (tokens, arm));
        of.expect("every length has this arm").spread().median
    };
    let points: Vec<(usize, f64, f64)> = cases
        .iter()
        .map(|case| case.tokens)
        .map(|tokens| (tokens, median(tokens, Arm::Swap), median(tokens, Arm::Recompute)))
        .collect();
    let swaps: Vec<(f64, f64)> =
        points.iter().map(|(tokens, swap, _)| (*tokens as f64, swap * 1e3)).collect();
    Report {
        bench: "crossover",
        modelled: false,
        title: format!("swap or recompute: {arch}, {}", link_title(args.link_gbps)),
        model: arch.clone(),
        machine: None,
        device: None,
        hardware: None,
        threads: None,
        repeats: None,
        max_num_batched_tokens: args.max_num_batched_tokens,
        checkpoint_every: checkpoint_every(args),
        link_gbps: args.link_gbps,
        constants: *constants,
        crossover: Crossover {
            measured_tokens: measured_crossover(&points),
            predicted_tokens: constants.crossover(),
            predicted_linear_tokens: constants.linear().crossover(),
        },
        swap_line: SwapLine::through(&swaps),
        rows: measured.times.iter().map(row).collect(),
    }
}
