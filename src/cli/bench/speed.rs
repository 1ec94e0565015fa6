//! `deltapool bench prefill` and `deltapool bench decode`: how fast the engine is.
//!
//! The real engine over the real executor, stepped in this thread, without prefix cache. Its pools
//! hold what the largest case needs and no more.

mod case;
mod driver;
mod report;
mod roofline;

use clap::Args;
use kernels::{Isa, Quantization};

use super::system::{Machine, peak_rss_bytes};
use crate::cli::CliError;
use crate::cli::common::{CommonArgs, JsonArgs};
use crate::cli::loading::{Files, bar, is_shown, loading_bar};
use crate::cli::output::{JsonTarget, print};
use crate::config::{
    DEFAULT_MAX_NUM_BATCHED_TOKENS, Device, EngineConfig, MOST_THREADS, MemorySize,
};
use crate::engine::{Engine, EngineError, EngineLimits};
use crate::models::{ModelFiles, WeightBytes};
use case::{Case, MOST_SEQUENCES, step_tokens};
use driver::Driver;
use report::{CaseReport, Report};
use roofline::{Ceiling, Roofline};

/// Most rounds of a case.
const MOST_ROUNDS: usize = 10_000;

/// Arguments of `bench prefill`.
#[derive(Debug, Args)]
pub struct PrefillArgs {
    /// Lengths of prompts.
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "512,4096")]
    pub tokens: Vec<usize>,
    /// Most tokens of a step, as of the engine.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_MAX_NUM_BATCHED_TOKENS)]
    pub max_num_batched_tokens: usize,
    /// How it is measured.
    #[command(flatten)]
    pub speed: SpeedArgs,
}

/// Arguments of `bench decode`.
#[derive(Debug, Args)]
pub struct DecodeArgs {
    /// Sequences that are generated together.
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "1,8,32")]
    pub sequences: Vec<usize>,
    /// Tokens that each of them has already.
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "0,4096")]
    pub context: Vec<usize>,
    /// Steps of a round: tokens that each sequence gets in it.
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub steps: usize,
    /// How it is measured.
    #[command(flatten)]
    pub speed: SpeedArgs,
}

/// How speed is measured.
#[derive(Debug, Args)]
pub struct SpeedArgs {
    /// Timed rounds of each case.
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub rounds: usize,
    /// Show each operator beside the machine's limits, from one more round.
    #[arg(long)]
    pub roofline: bool,
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

/// Which weights a measurement is made with.
#[derive(Debug, Args)]
pub struct RandomArgs {
    /// Random weights of the shapes that the model's config.json names; its folder needs no weight
    /// files. Answers mean nothing, and what it takes is what the shapes take.
    #[arg(long)]
    pub random_weights: bool,
}

/// Runs `bench prefill`.
pub fn prefill(args: &PrefillArgs, isa: Isa) -> Result<(), CliError> {
    let cases: Vec<Case> = args.tokens.iter().map(|&tokens| Case::Prefill { tokens }).collect();
    if let Some(tokens) = args.tokens.iter().find(|tokens| **tokens == 0) {
        return Err(CliError::Usage(format!("--tokens {tokens}: 1 or more")));
    }
    run("prefill", (&cases, args.max_num_batched_tokens), &args.speed, isa)
}

/// Runs `bench decode`.
pub fn decode(args: &DecodeArgs, isa: Isa) -> Result<(), CliError> {
    if let Some(n) = args.sequences.iter().find(|n| !(1..=MOST_SEQUENCES).contains(*n)) {
        return Err(CliError::Usage(format!("--sequences {n}: 1 to {MOST_SEQUENCES}")));
    }
    if args.steps == 0 {
        return Err(CliError::Usage("--steps 0: 1 or more".to_owned()));
    }
    let steps = args.steps;
    let of = |&context: &usize| {
        args.sequences.iter().map(move |&sequences| Case::Decode { sequences, context, steps })
    };
    let cases: Vec<Case> = args.context.iter().flat_map(of).collect();
    let sequences = cases.iter().map(Case::sequences).max().unwrap_or(1);
    run("decode", (&cases, step_tokens(sequences)), &args.speed, isa)
}

/// Measures the cases with steps of up to `step_tokens` tokens.
fn run(
    bench: &'static str,
    (cases, step_tokens): (&[Case], usize),
    args: &SpeedArgs,
    isa: Isa,
) -> Result<(), CliError> {
    let (common, rounds) = (&args.common, args.rounds);
    if !(1..=MOST_ROUNDS).contains(&rounds) {
        return Err(CliError::Usage(format!("--rounds {rounds}: 1 to {MOST_ROUNDS}")));
    }
    let threads = common.threads();
    if !(1..=MOST_THREADS).contains(&threads) {
        return Err(CliError::Usage(format!("--threads {threads}: 1 to {MOST_THREADS}")));
    }
    let is_random = args.weights.random_weights;
    let Files { model: files, device, .. } = Files::open_for_bench(common, is_random, isa)?;
    if args.roofline && device.kind() != Device::Cpu {
        let message = "--roofline: only operators of the processor are held against its limits; \
                       use --device cpu";
        return Err(CliError::Usage(message.to_owned()));
    }
    let on = device.kind();
    let (compute, kv_dtype) = (files.spec.compute, files.spec.kv_dtype);
    let all_rounds = rounds + usize::from(args.roofline);
    check_context(cases, all_rounds, files.spec.context)?;
    let weights = files.weight_bytes()?.unwrap_or(WeightBytes { stored: 0, held: 0 });
    let config = config(&files, (cases, step_tokens), all_rounds, threads)?;
    let (loading, show) = loading_bar(common.quiet);
    let mut builder = Engine::builder(files).isa(isa).config(config).on(device).on_load(show);
    let limits = builder.limits().map_err(advise)?;
    let core = builder.build_loop();
    loading.finish_and_clear();
    let mut driver = Driver::new(core?);
    let bar = bar(common.quiet, "{msg} {bar:40} {pos}/{len} rounds");
    bar.set_length((cases.len() * rounds) as u64);
    let mut measured = Vec::new();
    for (place, case) in cases.iter().enumerate() {
        if !common.quiet && !is_shown(common.quiet) {
            // A log has no bar, and the prompts of a case may take minutes.
            eprintln!("{case}, case {} of {}", place + 1, cases.len());
        }
        measured.push((*case, driver.measure(case, rounds, args.roofline, &bar)?));
    }
    // Before the limits are measured: that takes memory.
    let peak_rss_bytes = peak_rss_bytes();
    bar.set_message("limits of the machine");
    bar.set_position(0);
    let ceiling = args.roofline.then(|| Ceiling::measure(isa, threads, &bar)).transpose()?;
    bar.finish_and_clear();
    let reports = measured.into_iter().map(|(case, measured)| {
        let roofline = measured.metered.as_ref().zip(ceiling.as_ref());
        let roofline = roofline.map(|(metered, ceiling)| Roofline::new(metered, ceiling));
        CaseReport::new(case, measured, threads, roofline)
    });
    let model = common.model.as_ref().map_or("embedded".to_owned(), |p| p.display().to_string());
    let report = Report {
        bench,
        model,
        machine: Machine::this(isa),
        device: on.as_str(),
        threads,
        rounds,
        has_random_weights: is_random,
        max_num_batched_tokens: step_tokens,
        quantize: common.weights.quantization().map(Quantization::as_str),
        compute: compute.as_str(),
        kv_dtype: kv_dtype.as_str(),
        weights_bytes: weights.stored,
        weights_held_bytes: weights.held,
        pool_bytes: limits.device.arena_bytes(),
        peak_rss_bytes,
        cases: reports.collect(),
        ceiling,
    };
    let target = args.report.target();
    if target != JsonTarget::Output {
        print(&report.to_string())?;
    }
    target.write(&serde_json::json!(report))
}

/// Refuses cases that are longer than the model's context.
fn check_context(cases: &[Case], rounds: usize, context: usize) -> Result<(), CliError> {
    for case in cases {
        let tokens = case.longest(rounds);
        if tokens > context {
            return Err(CliError::Usage(format!(
                "{}: a sequence reaches {tokens} tokens in {rounds} rounds, and the model's \
                 context is {context} tokens",
                case.flag()
            )));
        }
    }
    Ok(())
}

/// The limits of an engine that just holds each of the cases.
fn config(
    files: &ModelFiles,
    (cases, step_tokens): (&[Case], usize),
    rounds: usize,
    threads: usize,
) -> Result<EngineConfig, CliError> {
    let sequences = cases.iter().map(Case::sequences).max().unwrap_or(1);
    let longest = cases.iter().map(|case| case.longest(rounds)).max().unwrap_or(2);
    let mut bytes = 0;
    for case in cases {
        bytes = bytes.max(pool_bytes(files, case.sequences(), case.longest(rounds))?);
    }
    // One sequence of the longest case must fit whatever the others need.
    bytes = bytes.max(pool_bytes(files, 1, longest)?);
    Ok(EngineConfig {
        max_num_batched_tokens: step_tokens,
        max_num_seqs: Some(sequences),
        max_model_len: Some(longest),
        device_memory: MemorySize::Bytes(bytes),
        host_memory: MemorySize::Bytes(0),
        watermark_percent: 0.0,
        prefix_cache: false,
        threads,
        ..EngineConfig::default()
    })
}

/// Bytes of the pages that hold `sequences` sequences of `tokens` tokens each.
pub fn pool_bytes(files: &ModelFiles, sequences: usize, tokens: usize) -> Result<usize, CliError> {
    let one = EngineConfig::one_sequence(tokens);
    let page = EngineLimits::derive(&files.spec, &one, None)?.device;
    let blocks = if page.block_bytes == 0 { 0 } else { tokens.div_ceil(kernels::BLOCK_LEN) };
    let of_blocks = (sequences * blocks).div_ceil(page.blocks_per_page.max(1));
    let of_slots = if page.slot_bytes == 0 { 0 } else { sequences.div_ceil(page.slots_per_page) };
    Ok((of_blocks + of_slots) * page.page_bytes)
}

/// Names flags of this command where the engine would name its own.
pub fn advise(error: EngineError) -> EngineError {
    match error {
        EngineError::Memory { needed, what, available, .. } => EngineError::Memory {
            needed,
            what,
            available,
            advice: "ask for fewer sequences, or fewer tokens of each".to_owned(),
        },
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_hold_just_the_sequences_of_the_case() {
        let config = include_str!("../../../assets/tiny-model/config.json");
        let files = ModelFiles::of_texts(config, None, &[]).expect("the embedded config");
        for (sequences, context) in [(1, 0), (3, 100), (32, 4096)] {
            let case = Case::Decode { sequences, context, steps: 8 };
            let config = config_of(&files, &[case]);
            let of = |config| EngineLimits::derive(&files.spec, &config, None).expect("limits");
            let limits = of(config);
            let longest = case.longest(5);
            assert!(limits.device.max_sequences(longest, 0) >= sequences, "{case}");
            let less = limits.device.arena_bytes() - limits.device.page_bytes;
            let smaller = EngineConfig { device_memory: MemorySize::Bytes(less), ..config };
            let fits = EngineLimits::derive(&files.spec, &smaller, None)
                .is_ok_and(|limits| limits.device.max_sequences(longest, 0) >= sequences);
            assert!(!fits, "{case} fits in a page less");
        }
    }

    fn config_of(files: &ModelFiles, cases: &[Case]) -> EngineConfig {
        config(files, (cases, 512), 5, 1).expect("a config")
    }

    #[test]
    fn too_little_memory_is_told_with_what_this_command_can_be_given() {
        let what = "device 7, host 0, working memory 3".to_owned();
        let advice = "give --device-memory less".to_owned();
        let error = advise(EngineError::Memory { needed: 10, what, available: 5, advice });
        let text = error.to_string();
        assert!(text.starts_with("10 bytes of memory are needed"), "{text}");
        assert!(text.ends_with("ask for fewer sequences, or fewer tokens of each"), "{text}");
    }
}
