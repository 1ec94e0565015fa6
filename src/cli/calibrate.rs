//! `deltapool calibrate`: what this machine gives, and what steps of a model take on it, as a
//! hardware profile.

mod draw;
mod fit;
mod measure;
mod report;
mod workloads;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use kernels::Isa;

use super::CliError;
use super::bench::speed::{advise, pool_bytes};
use super::bench::stepper::Stepper;
use super::bench::system::Machine;
use super::chart::{Chart, DrawingArgs};
use super::common::{CommonArgs, JsonArgs};
use super::loading::{Files, bar, loading_bar};
use super::output::{Draft, JsonTarget, check_outputs, print};
use super::profiles::{self, EMBEDDED, THIS_MACHINE};
use crate::config::{EngineConfig, MOST_THREADS, MemorySize, Preempt};
use crate::engine::link::LinkExecutor;
use crate::engine::{Engine, EngineLimits};
use crate::models::ModelFiles;
use crate::simulate::{Calibration, HardwareProfile, ModelProfile};
use fit::{Fitted, Samples, fit};
use measure::{BATCHES, CHUNK, Copies, Steps};
use report::Report;

/// The longest sequence that is measured.
const LONGEST: usize = 4096;

/// Arguments of `calibrate`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct CalibrateArgs {
    /// Where the profile is written; default: deltapool/hardware.json in $XDG_CONFIG_HOME, or in
    /// ~/.config.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Which model, how it is computed, and whether that is told.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Where the result is reported.
    #[command(flatten)]
    pub report: JsonArgs,
    /// Steps as they were measured, beside what the profile says of them.
    #[command(flatten)]
    pub drawing: DrawingArgs,
}

const HELP: &str = "\
Measured: reads of memory, products of 1 to 512 rows, copies of a sequence each way, what a step
costs beside its executor, and steps of the model: batches of 1 to 32, prompts of 64 to 512 tokens,
the steps of a long prompt.
Fitted, so that the simulator's phased steps take what the engine's do with this model: bandwidth
(more than that of memory where weights lie in a cache), gemm_efficiency, and the shares that
attention reaches. What is not a product is in gemm_efficiency. Three workloads that the fit has not
seen, run by the engine and by the simulator, show how well it holds.

A default profile is `this-machine` wherever hardware is named. With the same model, precision,
processor, instruction set and threads, --preempt auto takes its rates from it instead of measuring
them at the start.";

/// Runs the command.
pub fn run(args: &CalibrateArgs, isa: Isa) -> Result<(), CliError> {
    let common = &args.common;
    let threads = common.threads();
    if !(1..=MOST_THREADS).contains(&threads) {
        return Err(CliError::Usage(format!("--threads {threads}: 1 to {MOST_THREADS}")));
    }
    let path = match &args.out {
        Some(path) => path.clone(),
        None => {
            let path = profiles::default_path()?;
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            if let Some(folder) = folder {
                fs::create_dir_all(folder).map_err(|source| CliError::file(folder, source))?;
            }
            path
        }
    };
    // Before minutes of work: a file that cannot be written is told at once.
    let target = args.report.target();
    let files = [path.as_path()].into_iter().chain(target.file()).chain(args.drawing.files());
    check_outputs(files)?;
    let files = Files::open_on_cpu(common, isa)?.model;
    let name = common.model.as_ref().map_or(EMBEDDED.into(), |path| path.display().to_string());
    let model = profiles::model(&name)?;
    let (report, chart) = measure(common, isa, files, (&name, &model))?;
    save(&report.hardware, &path)?;
    if target != JsonTarget::Output {
        print(&format!("{report}written to {}\n", path.display()))?;
    }
    args.drawing.write(&chart)?;
    target.write(&serde_json::json!(report))
}

/// Writes a profile; the old one is there until it is whole.
fn save(hardware: &HardwareProfile, path: &Path) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(hardware).expect("a profile is numbers and names");
    let written = Draft::new(path).and_then(|mut draft| {
        writeln!(draft, "{text}")?;
        draft.end()
    });
    written.map_err(|source| CliError::file(path, source))
}

fn measure(
    common: &CommonArgs,
    isa: Isa,
    files: ModelFiles,
    (name, model): (&str, &ModelProfile),
) -> Result<(Report, Chart), CliError> {
    let threads = common.threads();
    let fingerprint = profiles::fingerprint(&files)?;
    let (spec, weights) = (files.spec.clone(), files.weight_bytes()?);
    let usual = EngineLimits::of_machine(&files, &EngineConfig { threads, ..Default::default() })?;
    let longest = LONGEST.min(spec.context.saturating_sub(1 + measure::STEPS));
    let needed = shortest_context();
    if spec.context < needed {
        let context = spec.context;
        return Err(CliError::Usage(format!(
            "--model: a context of {context} tokens is too short to measure; {needed} or more"
        )));
    }
    let config = config(&files, longest, threads)?;
    let limits = EngineLimits::of_machine(&files, &config)?;
    let bar = bar(common.quiet, "{msg} {bar:40} {pos}/{len}");
    bar.set_length(measure::turns() + measure::ROWS.len() as u64 + 1);
    bar.set_message("reads of memory");
    let stream = measure::stream(isa, threads)?;
    bar.inc(1);
    let products = measure::products((isa, threads), &spec, &bar)?;
    let best = products.iter().map(|product| product.1).fold(0.0, f64::max);
    let (loading, show) = loading_bar(common.quiet);
    let builder = Engine::builder(files).isa(isa).config(config).on_load(show);
    let core = builder.build_over(|executor| LinkExecutor::new(executor, None));
    loading.finish_and_clear();
    let stepper = Stepper::new(core.map_err(advise)?);
    let mut steps = Steps::new(stepper, spec.vocab_size, &bar);
    let (samples, copies, workloads) = steps.measure(longest, (stream, best))?;
    bar.finish_and_clear();
    let fitted = fit(model, &samples);
    let machine = Machine::this(isa);
    let calibration = Calibration {
        processor: machine.processor.clone(),
        isa: machine.isa.to_owned(),
        threads,
        model: name.to_owned(),
        fingerprint,
        prefill_tokens_per_second: fitted.prefill_tokens_per_second,
        pair_seconds: fitted.pair_seconds,
    };
    let held = weights.map_or(0, |weights| weights.held);
    let memory = (held + usual.device.arena_bytes(), usual.host.arena_bytes());
    let hardware = profile(&samples, fitted, (copies, memory), calibration);
    hardware.check(THIS_MACHINE).map_err(|error| CliError::Failed(error.to_string()))?;
    let chart = draw::chart(&hardware, model, &samples);
    let simulation = workloads::simulation(&hardware, model, (&spec, config, &limits));
    let workloads = workloads.into_iter().map(|workload| workload.report(&simulation));
    let report = Report {
        machine,
        threads,
        stream_bytes_per_second: stream,
        products,
        copied_bytes: copies.bytes,
        hardware,
        workloads: workloads.collect::<Result<_, _>>()?,
    };
    Ok((report, chart))
}

/// The profile. Memory is what an engine takes by default beside the weights.
fn profile(
    samples: &Samples,
    fitted: Fitted,
    (copies, memory): (Copies, (usize, usize)),
    calibration: Calibration,
) -> HardwareProfile {
    let rate = |seconds: f64| copies.bytes as f64 / seconds.max(1e-9);
    HardwareProfile {
        name: THIS_MACHINE.to_owned(),
        memory_bandwidth: fitted.bandwidth,
        mbu: 1.0,
        flops: fitted.flops,
        mfu: 1.0,
        gemm_efficiency: fitted.gemm_efficiency,
        chunk_attention_efficiency: fitted.chunk_attention,
        decode_attention_efficiency: fitted.decode_attention,
        link_out: rate(copies.out_seconds),
        link_in: rate(copies.in_seconds),
        link_latency: 0.0,
        memory_bytes: memory.0 as u64,
        host_memory_bytes: memory.1.max(1) as u64,
        step_overhead: samples.overhead,
        price_per_hour: None,
        calibration: Some(calibration),
    }
}

/// Tokens of the shortest context in which everything can be measured.
fn shortest_context() -> usize {
    (CHUNK + measure::fill_tokens(most_sequences())).max(workloads::most_tokens(CHUNK))
}

fn most_sequences() -> usize {
    BATCHES.into_iter().max().expect("some batches are measured")
}

/// Limits of an engine that holds what is measured.
fn config(files: &ModelFiles, longest: usize, threads: usize) -> Result<EngineConfig, CliError> {
    let most = most_sequences();
    let one = (longest + 1 + measure::STEPS).max(workloads::most_tokens(longest / 2));
    let beside = shortest_context();
    let device = pool_bytes(files, 1, one)? + pool_bytes(files, most, beside)?;
    Ok(EngineConfig {
        max_num_batched_tokens: CHUNK,
        max_num_seqs: Some(most),
        max_model_len: Some(one.max(beside)),
        device_memory: MemorySize::Bytes(device),
        host_memory: MemorySize::Bytes(pool_bytes(files, 1, one)?),
        watermark_percent: 0.0,
        preempt: Preempt::Swap,
        prefix_cache: false,
        threads,
        ..EngineConfig::default()
    })
}
