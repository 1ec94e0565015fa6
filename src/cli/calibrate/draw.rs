//! Steps as they were measured, over what the fitted profile says of them.

use super::fit::{Chunk, Decode, Samples};
use crate::cli::chart::{Axis, Chart, Mark, Scale, Series};
use crate::simulate::{HardwareProfile, ModelProfile, StepModel, StepWork, step_cost};

/// Time of a step over its tokens: batches that generate, and prompts.
pub fn chart(hardware: &HardwareProfile, model: &ModelProfile, samples: &Samples) -> Chart {
    let milliseconds =
        |work: &StepWork| 1e3 * step_cost(StepModel::default(), hardware, model, work).seconds;
    let decode = |step: &Decode| {
        let (decodes, decode_context) = (step.sequences, step.context);
        let work = StepWork { decodes, decode_context, ..StepWork::default() };
        (decodes as f64, milliseconds(&work))
    };
    let prompt = |step: &Chunk| {
        let chunks = &[(step.start, step.rows)];
        (step.rows as f64, milliseconds(&StepWork { chunks, ..StepWork::default() }))
    };
    let measured = [
        samples.decodes.iter().map(|step| (step.sequences as f64, 1e3 * step.seconds)).collect(),
        samples.prompts.iter().map(|step| (step.rows as f64, 1e3 * step.seconds)).collect(),
    ];
    let modelled = [
        samples.decodes.iter().map(decode).collect(),
        samples.prompts.iter().map(prompt).collect(),
    ];
    let mut series = Vec::new();
    for (colour, name) in ["generated", "prompts"].into_iter().enumerate() {
        let of = |kind: &str, mark, points: &[Vec<(f64, f64)>; 2]| Series {
            name: format!("{name}, {kind}"),
            mark,
            colour,
            points: points[colour].clone(),
        };
        series.push(of("by the profile", Mark::Line, &modelled));
        series.push(of("measured", Mark::Points, &measured));
    }
    Chart {
        title: format!("Steps of {} on this machine", model.name),
        x: Axis::new("tokens in the step", Scale::Log),
        y: Axis::new("ms", Scale::Log),
        series,
    }
}
