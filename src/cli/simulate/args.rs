//! On what a simulation runs and by which rules: the flags that its commands share.

use std::path::PathBuf;

use clap::Args;

use super::charts::Plot;
use crate::cli::CliError;
use crate::cli::chart::{Chart, DrawingArgs};
use crate::cli::common::JsonArgs;
use crate::cli::limits::{RuleArgs, parse_tokens};
use crate::cli::output::{JsonTarget, check_outputs, print};
use crate::cli::profiles;
use crate::config::{Batching, EngineConfig, parse_bytes};
use crate::simulate::{HardwareProfile, ModelProfile, Simulation, StepModel, Timing};

/// Of the device's memory that weights leave, the part that slots and blocks take by default.
const POOL_PART: f64 = 0.9;

/// Tokens of a step by default, as on a GPU.
const MAX_NUM_BATCHED_TOKENS: usize = 2048;

/// Hardware and model.
#[derive(Debug, Args)]
#[command(next_help_heading = "Hardware and model")]
pub struct MachineArgs {
    /// Hardware: h100-seed-a, h100-seed-b, h100, h200, this-machine (once `calibrate` has run), or
    /// a JSON or TOML file of a profile.
    #[arg(long, value_name = "NAME|FILE", default_value = "h200")]
    pub hardware: String,
    /// Model: a preset such as kimi-linear, k3, 7b-mha, 70b-gqa, a config.json or its folder, or
    /// embedded: the one in this binary.
    #[arg(long, value_name = "NAME|PATH", default_value = "kimi-linear")]
    pub model: String,
    /// GB per second between device and host each way, instead of the hardware's.
    #[arg(long, value_name = "GB/S", value_parser = parse_above_0, allow_negative_numbers = true)]
    pub link_gbps: Option<f64>,
    /// Milliseconds that each step costs whatever is in it, instead of the hardware's.
    #[arg(long, value_name = "MS", value_parser = parse_from_0, allow_negative_numbers = true)]
    pub step_overhead_ms: Option<f64>,
    /// Positions at which prompt spans may end, instead of the model's: 1 or 64.
    #[arg(long, value_name = "N", value_parser = parse_grid)]
    pub grid: Option<usize>,
}

/// Memory of a simulation, its scheduler's rules, and what a step is charged for.
#[derive(Debug, Args)]
#[command(next_help_heading = "Memory and scheduling")]
pub struct SimulationArgs {
    /// Memory of slots and blocks: bytes (8GB, 64GiB); default: 90 % of what the weights leave.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, allow_negative_numbers = true)]
    pub device_memory: Option<usize>,
    /// The same as the tokens that fit beside a slot for each of --max-num-seqs.
    #[arg(long, value_name = "N", value_parser = parse_tokens, conflicts_with = "device_memory")]
    pub device_tokens: Option<usize>,
    /// Memory of sequences that were pushed out; default: the hardware's. 0: computed again.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, allow_negative_numbers = true)]
    pub host_memory: Option<usize>,
    /// Most tokens to compute in one step.
    #[arg(
        long,
        value_name = "N",
        value_parser = parse_tokens,
        default_value_t = MAX_NUM_BATCHED_TOKENS
    )]
    pub max_num_batched_tokens: usize,
    /// Who is served when, who leaves and what is kept. Figures are told apart by --long-prompt.
    #[command(flatten)]
    pub rules: RuleArgs,
    /// How reads and arithmetic share the time of a step: roofline, phased or additive.
    #[arg(long, value_name = "MODEL", default_value_t = StepModel::default())]
    pub step_model: StepModel,
    /// A step waits for the copies between device and host that begin in it.
    #[arg(long)]
    pub no_overlap: bool,
    /// Answers of a static batch that have ended are read on until all have.
    #[arg(long)]
    pub dead_slots_pay: bool,
    /// Numbers of sequences that a step may generate for, ascending; it is filled up to the next.
    #[arg(long, value_name = "N,N..", value_delimiter = ',')]
    pub buckets: Vec<usize>,
    /// A row that only fills up reads the mean context.
    #[arg(long, requires = "buckets")]
    pub padding_reads: bool,
}

/// What is asked of the requests, and where the result goes.
#[derive(Debug, Args)]
#[command(next_help_heading = "Targets and output")]
pub struct OutputArgs {
    /// Milliseconds to the first token that a request should keep to.
    #[arg(long, value_name = "MS", value_parser = parse_above_0, allow_negative_numbers = true)]
    pub slo_ttft_ms: Option<f64>,
    /// Milliseconds of a token after it, in the mean of a request.
    #[arg(long, value_name = "MS", value_parser = parse_above_0, allow_negative_numbers = true)]
    pub slo_tpot_ms: Option<f64>,
    /// Where the result goes.
    #[command(flatten)]
    pub json: JsonArgs,
    /// Write a line of JSON for each step: what it computed, and what became of requests.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Write the run as a Chrome trace, for ui.perfetto.dev.
    #[arg(long, value_name = "FILE")]
    pub perfetto: Option<PathBuf>,
    /// Draw a chart in letters; the same goes to --svg and --csv [default there: where, of a sweep
    /// waiting].
    #[arg(long, value_name = "CHART")]
    pub plot: Option<Plot>,
    /// Where the chart goes.
    #[command(flatten)]
    pub drawing: DrawingArgs,
    /// Say nothing on standard error but errors.
    #[arg(short, long)]
    pub quiet: bool,
}

impl OutputArgs {
    /// Tries the files that are asked for, so that one that cannot be written is told before the
    /// work.
    ///
    /// # Errors
    /// Such a file; two results that are to go to one.
    pub fn check(&self) -> Result<(), CliError> {
        let json = self.json.target();
        let steps = [self.perfetto.as_deref(), self.trace.as_deref()].into_iter().flatten();
        check_outputs(json.file().into_iter().chain(steps).chain(self.drawing.files()))
    }

    /// Whether a chart is asked for.
    pub fn draws(&self) -> bool {
        self.plot.is_some() || self.drawing.is_asked()
    }

    /// Writes a chart where it is asked for, below the result in a terminal if `is_shown`.
    ///
    /// # Errors
    /// A file that cannot be written; no chart where one is asked for, with the reason.
    pub fn show(&self, chart: Result<Chart, String>, is_shown: bool) -> Result<(), CliError> {
        match chart {
            Ok(chart) if is_shown && self.json.target() != JsonTarget::Output => {
                print("\n")?;
                self.drawing.show(&chart)
            }
            Ok(chart) => self.drawing.write(&chart),
            Err(reason) if self.draws() => Err(usage(reason)),
            Err(_) => Ok(()),
        }
    }
}

impl MachineArgs {
    /// The hardware and the model.
    ///
    /// # Errors
    /// As [`profiles::hardware`] and [`profiles::model`].
    pub fn profiles(&self) -> Result<(HardwareProfile, ModelProfile), CliError> {
        let mut hardware = profiles::hardware(&self.hardware)?;
        if let Some(gb) = self.link_gbps {
            hardware = hardware.with_link(gb * 1e9);
        }
        if let Some(milliseconds) = self.step_overhead_ms {
            hardware.step_overhead = milliseconds / 1e3;
        }
        let mut model = profiles::model(&self.model)?;
        model.grid = self.grid.unwrap_or(model.grid);
        Ok((hardware, model))
    }

    /// How steps and copies are timed.
    fn timing(&self, rules: &SimulationArgs) -> Result<Timing, CliError> {
        let (hardware, model) = self.profiles()?;
        if rules.dead_slots_pay && rules.rules.batching != Batching::Static {
            let reason = "--dead-slots-pay: answers that have ended are read on in batches of \
                          --batching static alone";
            return Err(CliError::Usage(reason.to_owned()));
        }
        if !rules.buckets.is_sorted() || rules.buckets.contains(&0) {
            return Err(CliError::Usage("--buckets: ascending numbers above 0".to_owned()));
        }
        Ok(Timing {
            model,
            hardware,
            step_model: rules.step_model,
            overlap_copies: !rules.no_overlap,
            dead_slots_pay: rules.dead_slots_pay,
            buckets: rules.buckets.clone(),
            padding_reads: rules.padding_reads,
        })
    }
}

impl SimulationArgs {
    fn config(&self) -> EngineConfig {
        self.rules.apply(EngineConfig {
            max_num_batched_tokens: self.max_num_batched_tokens,
            threads: 1,
            ..EngineConfig::default()
        })
    }

    /// Bytes of slots and blocks on the device.
    fn device_bytes(&self, timing: &Timing, config: &EngineConfig) -> Result<usize, CliError> {
        if let Some(bytes) = self.device_memory {
            return Ok(bytes);
        }
        let model = &timing.model;
        if let Some(tokens) = self.device_tokens {
            let slots = config.max_num_seqs() as f64 * model.state();
            return Ok((slots + tokens as f64 * model.kv_bytes) as usize);
        }
        let (memory, weights) = (timing.hardware.memory_bytes as f64, model.total_weight_bytes());
        let left = memory - weights;
        if left <= 0.0 {
            let reason = format!(
                "{} has {:.1} GB of memory and the weights of {} take {:.1} GB: give another \
                 --hardware, or --device-memory",
                timing.hardware.name,
                memory / 1e9,
                model.name,
                weights / 1e9,
            );
            return Err(CliError::Usage(reason));
        }
        Ok((POOL_PART * left) as usize)
    }
}

/// What a result leaves out, for people: a profile that knows another model, weights that are not
/// there.
fn notes(timing: &Timing, model_name: &str) -> Vec<String> {
    let Timing { hardware, model, .. } = timing;
    let mut notes = Vec::new();
    if let Some(made) = hardware.calibration.as_ref().filter(|made| made.model != model_name) {
        let (name, known) = (&hardware.name, &made.model);
        notes.push(format!(
            "{name} was measured with {known}: how well its steps stand for those of {model_name} \
             nobody has measured"
        ));
    }
    let (memory, weights) = (hardware.memory_bytes as f64, model.total_weight_bytes());
    if weights > memory {
        notes.push(format!(
            "the weights of {} take {:.1} GB and {} has {:.1} GB: a step reads them as if they \
             were there",
            model.name,
            weights / 1e9,
            hardware.name,
            memory / 1e9,
        ));
    }
    notes
}

/// A simulation by these flags; what it leaves out is told on standard error.
pub fn simulation(
    machine: &MachineArgs,
    rules: &SimulationArgs,
    output: &OutputArgs,
) -> Result<Simulation, CliError> {
    let timing = machine.timing(rules)?;
    let config = rules.config();
    config.check().map_err(usage)?;
    let device_bytes = rules.device_bytes(&timing, &config)?;
    if !output.quiet {
        notes(&timing, &machine.model).iter().for_each(|note| eprintln!("note: {note}"));
    }
    let host_bytes = rules.host_memory.unwrap_or(timing.hardware.host_memory_bytes as usize);
    Ok(Simulation {
        timing,
        config,
        device_bytes,
        host_bytes,
        slo_ttft: output.slo_ttft_ms.map(|ms| ms / 1e3),
        slo_tpot: output.slo_tpot_ms.map(|ms| ms / 1e3),
    })
}

/// A fault of what was asked for.
pub fn usage(error: impl std::fmt::Display) -> CliError {
    CliError::Usage(error.to_string())
}

/// Numbers from this to its inverse are meant by somebody; time and memory bear them.
const LEAST: f64 = 1e-6;
const MOST: f64 = 1e6;

/// A number above 0.
pub fn parse_above_0(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (LEAST..=MOST).contains(number));
    number.ok_or_else(|| format!("{text}: a number above 0, from {LEAST} to {MOST}"))
}

/// A number, 0 or more.
pub fn parse_from_0(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| (0.0..=MOST).contains(number));
    number.ok_or_else(|| format!("{text}: a number from 0 to {MOST}"))
}

fn parse_grid(text: &str) -> Result<usize, String> {
    let grid = text.parse().ok().filter(|grid| [1, 64].contains(grid));
    grid.ok_or_else(|| format!("{text}: 1 or 64"))
}
