//! `deltapool bench batching`: request-level batches beside continuous ones, on the real engine,
//! and the gain that the theory says (SEEDS.md F2 to F4).

use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use indicatif::ProgressBar;
use kernels::Isa;
use serde::Serialize;

use super::ids::TokenIds;
use super::line::Line;
use super::speed::{advise, pool_bytes};
use super::spread::Spread;
use super::stepper::events;
use super::system::Machine;
use crate::cli::CliError;
use crate::cli::common::{CommonArgs, JsonArgs};
use crate::cli::loading::{Files, bar, loading_bar};
use crate::cli::output::{JsonTarget, check_outputs, print};
use crate::config::{Batching, EngineConfig, MemorySize};
use crate::engine::core::Core;
use crate::engine::device::AnyExecutor;
use crate::engine::{Engine, RequestId};
use crate::request::Request;
use crate::simulate::Lengths;
use crate::simulate::formulas::{
    effective_batch, gain_dead_slots_free, gain_dead_slots_pay, longest_exponential,
    static_efficiency,
};
use crate::simulate::sampling::Random;

/// Tokens of a prompt: little, since the theory leaves prompts out.
const PROMPT_TOKENS: usize = 16;

/// No answer is longer than so many means.
const MOST_MEANS: usize = 12;

/// Arguments of `bench batching`.
#[derive(Debug, Args)]
pub struct BatchingArgs {
    /// Sequences that run at once.
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub places: usize,
    /// Batches of so many requests in a round.
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub batches: usize,
    /// Mean tokens of an answer; lengths are exponential.
    #[arg(long, value_name = "N", default_value_t = 48)]
    pub mean_tokens: usize,
    /// Rounds of either way, by turns.
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub rounds: usize,
    /// Of the lengths.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Which model, how it is computed, and whether that is told.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Where the result is reported.
    #[command(flatten)]
    pub report: JsonArgs,
}

/// What a way of batching did in a round.
#[derive(Debug, Clone, Default)]
struct Round {
    seconds: f64,
    tokens: Vec<Vec<u32>>,
    /// Sequences that generated in each step, and the step's seconds.
    steps: Vec<(f64, f64)>,
}

/// What was measured, and what was to be expected. Field names are the keys of the JSON form.
#[derive(Debug, Serialize)]
struct Report {
    bench: &'static str,
    model: String,
    machine: Machine,
    threads: usize,
    places: usize,
    requests: usize,
    generated_tokens: usize,
    /// Seconds of a round.
    static_seconds: Spread,
    continuous_seconds: Spread,
    /// Static over continuous, round by round.
    gain: Spread,
    /// Of the slots of a static batch, the part that gave a token: measured, and for exponential
    /// lengths.
    efficiency: f64,
    predicted_efficiency: f64,
    /// Sequences in the mean of a static step.
    effective_batch: f64,
    /// Where ended sequences cost as much as others, and where they cost nothing, by the times of
    /// steps that were measured.
    predicted_gain_dead_slots_pay: f64,
    predicted_gain_dead_slots_free: f64,
}

/// Runs the command.
pub fn run(args: &BatchingArgs, isa: Isa) -> Result<(), CliError> {
    for (flag, value) in [
        ("--places", args.places),
        ("--batches", args.batches),
        ("--mean-tokens", args.mean_tokens),
        ("--rounds", args.rounds),
    ] {
        if !(1..=4096).contains(&value) {
            return Err(CliError::Usage(format!("{flag} {value}: 1 to 4096")));
        }
    }
    let target = args.report.target();
    check_outputs(target.file())?;
    let (mut fixed, mut joined) =
        (core(args, isa, Batching::Static)?, core(args, isa, Batching::Continuous)?);
    let lens = lengths(args);
    let bar = bar(args.common.quiet, "{msg} {bar:40} {pos}/{len} rounds");
    bar.set_length(2 * args.rounds as u64);
    let mut rounds: [Vec<Round>; 2] = Default::default();
    // One of each to warm up.
    for round in 0..=args.rounds {
        for (core, rounds) in [&mut fixed, &mut joined].into_iter().zip(&mut rounds) {
            let done = run_round(core, &lens, args.seed, round);
            if round > 0 {
                rounds.push(done?);
                bar.inc(1);
            }
        }
    }
    finish(&bar, &rounds)?;
    let report = report(args, isa, &rounds);
    if target != JsonTarget::Output {
        print(&shown(&report))?;
    }
    target.write(&serde_json::json!(report))
}

/// Both ways give the same tokens, or the measurement means nothing.
fn finish(bar: &ProgressBar, [fixed, joined]: &[Vec<Round>; 2]) -> Result<(), CliError> {
    bar.finish_and_clear();
    match fixed.iter().zip(joined).all(|(fixed, joined)| fixed.tokens == joined.tokens) {
        true => Ok(()),
        false => Err(CliError::Failed("static and continuous batches gave other tokens".into())),
    }
}

fn core(args: &BatchingArgs, isa: Isa, batching: Batching) -> Result<Core<AnyExecutor>, CliError> {
    let Files { model: files, device, .. } = Files::open(&args.common, isa)?;
    let longest = PROMPT_TOKENS + MOST_MEANS * args.mean_tokens;
    let (mean, context) = (args.mean_tokens, files.spec.context);
    if longest > context {
        return Err(CliError::Usage(format!(
            "--mean-tokens {mean}: prompt and answer are up to {longest} tokens, and the model's \
             context is {context} tokens"
        )));
    }
    let bytes = pool_bytes(&files, args.places, longest)?;
    let config = EngineConfig {
        batching,
        max_num_seqs: Some(args.places),
        max_num_batched_tokens: (args.places * PROMPT_TOKENS).max(64),
        max_model_len: Some(longest),
        device_memory: MemorySize::Bytes(bytes),
        host_memory: MemorySize::Bytes(0),
        watermark_percent: 0.0,
        prefix_cache: false,
        threads: args.common.threads(),
        ..EngineConfig::default()
    };
    let (loading, show) = loading_bar(args.common.quiet);
    let builder = Engine::builder(files).isa(isa).config(config).on(device).on_load(show);
    let core = builder.build_loop();
    loading.finish_and_clear();
    core.map_err(|error| advise(error).into())
}

fn lengths(args: &BatchingArgs) -> Vec<usize> {
    let lengths = Lengths::Exp(args.mean_tokens as f64);
    let mut random = Random::new(args.seed, 0);
    let most = MOST_MEANS * args.mean_tokens;
    (0..args.places * args.batches).map(|_| lengths.draw(&mut random).min(most)).collect()
}

/// All requests at once, until the last has its answer.
fn run_round(
    core: &mut Core<AnyExecutor>,
    lens: &[usize],
    seed: u64,
    round: usize,
) -> Result<Round, CliError> {
    let mut ids = TokenIds::new(seed, core.door().vocab_size);
    let first = (round * lens.len()) as u64;
    for (i, len) in (0..).zip(lens) {
        let prompt = ids.take(PROMPT_TOKENS);
        let request = Request { ignore_eos: true, ..Request::new(prompt, *len) };
        core.submit(RequestId(first + i), Arc::new(request), i);
    }
    let mut done = Round { tokens: vec![Vec::new(); lens.len()], ..Round::default() };
    let start = Instant::now();
    while !core.is_idle() {
        for (id, event) in events(core)? {
            done.tokens[(id.0 - first) as usize].extend(event.token);
        }
        let step = core.last_step();
        if step.prompt_tokens == 0 {
            done.steps.push((step.decoding as f64, step.duration.as_secs_f64()));
        }
    }
    done.seconds = start.elapsed().as_secs_f64();
    Ok(done)
}

fn report(args: &BatchingArgs, isa: Isa, [fixed, joined]: &[Vec<Round>; 2]) -> Report {
    let spread = |values: Vec<f64>| Spread::of(values).expect("a round at least");
    let seconds = |rounds: &[Round]| spread(rounds.iter().map(|round| round.seconds).collect());
    let steps: Vec<(f64, f64)> =
        fixed.iter().chain(joined).flat_map(|round| round.steps.iter().copied()).collect();
    let static_steps: usize = fixed.iter().map(|round| round.steps.len()).sum();
    let generated: f64 =
        fixed.iter().flat_map(|round| &round.steps).map(|(decoding, _)| decoding).sum();
    let places = args.places as f64;
    let efficiency = generated / (places * static_steps.max(1) as f64);
    let mean = args.mean_tokens as f64;
    let predicted_efficiency = static_efficiency(mean, longest_exponential(args.places, mean));
    let line = Line::through(&steps);
    let gain = fixed.iter().zip(joined).map(|(fixed, joined)| fixed.seconds / joined.seconds);
    let model = args.common.model.as_ref();
    Report {
        bench: "batching",
        model: model.map_or("embedded".to_owned(), |path| path.display().to_string()),
        machine: Machine::this(isa),
        threads: args.common.threads(),
        places: args.places,
        requests: args.places * args.batches,
        generated_tokens: joined[0].tokens.iter().map(Vec::len).sum(),
        static_seconds: seconds(fixed),
        continuous_seconds: seconds(joined),
        gain: spread(gain.collect()),
        efficiency,
        predicted_efficiency,
        effective_batch: effective_batch(places, efficiency),
        predicted_gain_dead_slots_pay: gain_dead_slots_pay(predicted_efficiency),
        predicted_gain_dead_slots_free: gain_dead_slots_free(
            places,
            predicted_efficiency,
            |sequences| line.at(sequences),
        ),
    }
}

fn shown(report: &Report) -> String {
    let Report { places, requests, generated_tokens, .. } = report;
    format!(
        "{requests} requests, {generated_tokens} tokens, {places} at once; the same tokens either \
         way\n\
         {:<26}{:>9} {:>9} {:>9}\n\
         static, s                 {:.3}\n\
         continuous, s             {:.3}\n\
         gain                      {:.2}\n\n\
         a static step has {:.1} sequences in the mean: {:.1} % of its slots, {:.1} % by theory\n\
         gain by theory            {:.2} where ended sequences cost nothing, {:.2} where they cost \
         as much as others\n",
        "",
        "min",
        "median",
        "max",
        report.static_seconds,
        report.continuous_seconds,
        report.gain,
        report.effective_batch,
        100.0 * report.efficiency,
        100.0 * report.predicted_efficiency,
        report.predicted_gain_dead_slots_free,
        report.predicted_gain_dead_slots_pay,
    )
}
