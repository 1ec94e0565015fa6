//! The model lines of a profile: the same report, and nothing is run.

use super::lines::Lines;
use super::report::{Arm, Crossover, Report, Row};
use super::{CrossoverArgs, checkpoint_below, checkpoint_every, lengths};
use crate::cli::{CliError, profiles};
use crate::simulate::{HardwareProfile, ModelProfile, StepModel, StepWork, step_cost};

/// The longest length unless told otherwise.
const LONGEST: usize = 131_072;

/// Sequences that decode beside the one that is computed again, and the context of each, as in
/// SEEDS.md section 3.3.
const DECODES: (usize, usize) = (32, 2048);

/// The report on `--model` and `--hardware`.
///
/// # Errors
/// Neither a preset nor a file; lengths beyond the model's context.
pub fn report(args: &CrossoverArgs) -> Result<Report, CliError> {
    let name = args.common.model.as_ref().map(|path| path.display().to_string());
    let name = name.ok_or_else(|| {
        let presets = crate::simulate::model::PRESETS.join(", ");
        CliError::Usage(format!("--modelled needs --model: a config.json, or one of {presets}"))
    })?;
    let model = profiles::model(&name)?;
    let mut hardware = profiles::hardware(&args.hardware)?;
    if let Some(rate) = args.link_gbps {
        hardware = hardware.with_link(rate * 1e9);
    }
    let context = model.max_context.unwrap_or(usize::MAX);
    let lengths = lengths(args, LONGEST.min(context));
    if let Some(tokens) = lengths.iter().find(|tokens| **tokens > context) {
        return Err(CliError::Usage(format!(
            "--lengths {tokens}: the model's context is {context} tokens"
        )));
    }
    let constants = Lines::modelled(&hardware, &model);
    let every = checkpoint_every(args);
    let mut rows = Vec::new();
    for tokens in lengths {
        let beside = marginal(&hardware, &model, tokens, args.max_num_batched_tokens);
        rows.extend(rows_of(&name, &constants, tokens, (every, beside)));
    }
    let link = args.link_gbps.unwrap_or(hardware.link_out / 1e9);
    Ok(Report {
        bench: "crossover",
        modelled: true,
        title: format!(
            "swap or recompute: {name} on {}, modelled, link {link:.4} GB/s",
            hardware.name
        ),
        model: name,
        machine: None,
        device: None,
        hardware: Some(hardware.name.clone()),
        threads: None,
        repeats: None,
        max_num_batched_tokens: args.max_num_batched_tokens,
        checkpoint_every: every,
        link_gbps: args.link_gbps,
        constants,
        crossover: Crossover {
            measured_tokens: None,
            predicted_tokens: constants.crossover(),
            predicted_linear_tokens: constants.linear().crossover(),
        },
        swap_line: None,
        rows,
    })
}

/// The arms at a length; no checkpoint where the nearest is the start, no marginal cost where none
/// is known.
fn rows_of(
    arch: &str,
    constants: &Lines,
    tokens: usize,
    (every, beside): (usize, Option<f64>),
) -> Vec<Row> {
    let length = tokens as f64;
    let held = constants.held_bytes(length);
    let row = |arm: Arm, bytes: f64, seconds: f64| {
        Row::new(arch, tokens, arm, bytes).modelled(Some(seconds))
    };
    let mut rows = vec![
        row(Arm::SwapOut, held, constants.out_seconds(length)),
        row(Arm::SwapIn, held, constants.in_seconds(length)),
        row(Arm::Swap, 2.0 * held, constants.swap_seconds(length)),
        row(Arm::Recompute, 0.0, constants.recompute_seconds(length)),
    ];
    rows.extend(beside.map(|seconds| row(Arm::RecomputeMarginal, 0.0, seconds)));
    rows.extend(checkpoint_below(tokens, every).map(|from| {
        let from = from as f64;
        let seconds = constants.restore_seconds(from, length);
        row(Arm::Checkpoint, constants.held_bytes(from), seconds)
    }));
    rows
}

/// Seconds by which the steps of a batch that decodes get longer when a prompt is computed in them.
/// None where a rate stands for the arithmetic: it is of many devices together, and weights that
/// are read by each step of one are no part of it.
fn marginal(
    hardware: &HardwareProfile,
    model: &ModelProfile,
    tokens: usize,
    budget: usize,
) -> Option<f64> {
    if model.prefill_rate.is_some() {
        return None;
    }
    let (decodes, context) = DECODES;
    let seconds = |chunks: &[(usize, usize)]| {
        let decode_context = (decodes * context) as f64;
        let work = StepWork { decodes, decode_context, chunks, dead_context: 0.0 };
        step_cost(StepModel::default(), hardware, model, &work).seconds
    };
    let rows = (budget.saturating_sub(decodes) / model.grid * model.grid).max(model.grid);
    let alone = seconds(&[]);
    let steps = (0..tokens).step_by(rows);
    Some(steps.map(|start| seconds(&[(start, rows.min(tokens - start))]) - alone).sum())
}
