//! `deltapool simulate plot`: charts of the theory's formulas, for which nothing is run.

use clap::{Args, Subcommand};

use super::args::{MachineArgs, usage};
use crate::cli::CliError;
use crate::cli::chart::{Axis, Chart, DrawingArgs, Mark, Scale, Series};
use crate::cli::limits::{at_least_one_token, parse_tokens};
use crate::config::parse_bytes;
use crate::simulate::formulas::{PoolSplit, harmonic, static_efficiency};
use crate::simulate::sampling::{LENGTHS, Random};
use crate::simulate::{
    Bound, HardwareProfile, Lengths, ModelProfile, StepModel, StepWork, step_cost,
};

/// Lengths drawn to know how they are spread.
const DRAWS: usize = 100_000;

/// Steps from one power of two to the next on an axis.
const A_DOUBLING: u32 = 4;

/// Fixed ratios of slots to blocks (SEEDS.md M4).
const RATIOS: [f64; 4] = [0.1, 0.25, 0.9, 2.0];

/// Arguments of `simulate plot`.
#[derive(Debug, Args)]
pub struct PlotArgs {
    /// What to draw.
    #[command(subcommand)]
    pub curve: Curve,
}

/// The charts.
#[derive(Debug, Subcommand)]
pub enum Curve {
    /// Time of a step over the prompt tokens in it by each step model; where arithmetic takes over.
    StepTime {
        /// On what.
        #[command(flatten)]
        machine: MachineArgs,
        /// Sequences that generate beside the prompt.
        #[arg(long, value_name = "N", value_parser = parse_tokens, default_value_t = 32)]
        decodes: usize,
        /// Tokens of context that each of them has.
        #[arg(long, value_name = "N", value_parser = at_least_one_token, default_value_t = 2048)]
        context: usize,
        /// Where the chart goes.
        #[command(flatten)]
        drawing: DrawingArgs,
    },
    /// Part of the steps of a static batch's places that gives a token, over its size (F3).
    #[command(after_help = format!("Lengths: {LENGTHS}"))]
    Efficiency {
        /// Tokens of an answer: a distribution, or file:PATH with the lengths of your own log.
        #[arg(long, value_name = "LENGTHS", default_value = "exp:128")]
        answers: Lengths,
        /// Where the chart goes.
        #[command(flatten)]
        drawing: DrawingArgs,
    },
    /// Sequences that fit over their length: two pools of fixed ratios, and one for both (F19).
    Places {
        /// On what.
        #[command(flatten)]
        machine: MachineArgs,
        /// Memory of slots and blocks; default: what the weights leave of the hardware's.
        #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
        device_memory: Option<usize>,
        /// Where the chart goes.
        #[command(flatten)]
        drawing: DrawingArgs,
    },
}

/// Runs the command.
pub fn run(args: &PlotArgs) -> Result<(), CliError> {
    match &args.curve {
        Curve::StepTime { machine, decodes, context, drawing } => {
            let (hardware, model) = machine.profiles()?;
            drawing.show(&step_time((&hardware, &model), (*decodes, *context)))
        }
        Curve::Efficiency { answers, drawing } => drawing.show(&efficiency(answers)),
        Curve::Places { machine, device_memory, drawing } => {
            let (hardware, model) = machine.profiles()?;
            if model.state() == 0.0 {
                let reason = format!("{} keeps no state: it has blocks alone", model.name);
                return Err(usage(reason));
            }
            let left = hardware.memory_bytes as f64 - model.total_weight_bytes();
            let memory = device_memory.map_or(left, |bytes| bytes as f64);
            if memory <= 0.0 {
                let reason = "the weights leave nothing; give --device-memory or other --hardware";
                return Err(usage(reason));
            }
            drawing.show(&places(&model, memory))
        }
    }
}

/// Values from `least` to `most`, each a fixed part more than the one before.
fn growing(least: usize, most: usize) -> Vec<usize> {
    let steps = A_DOUBLING * (most / least).ilog2();
    let value = |i: u32| least as f64 * (f64::from(i) / f64::from(A_DOUBLING)).exp2();
    let mut values: Vec<usize> = (0..=steps).map(|i| value(i).round() as usize).collect();
    values.dedup();
    values
}

fn line(name: String, colour: usize, points: Vec<(f64, f64)>) -> Series {
    Series { name, mark: Mark::Line, colour, points }
}

fn step_time(
    (hardware, model): (&HardwareProfile, &ModelProfile),
    (decodes, context): (usize, usize),
) -> Chart {
    let cost = |step_model: StepModel, tokens: usize| {
        let work = StepWork {
            decodes,
            decode_context: decodes as f64 * context as f64,
            chunks: &[(0, tokens)],
            dead_context: 0.0,
        };
        step_cost(step_model, hardware, model, &work)
    };
    let tokens = growing(1, 16_384);
    let models = [StepModel::Roofline, StepModel::Phased, StepModel::Additive];
    let mut series: Vec<Series> = models
        .into_iter()
        .enumerate()
        .map(|(i, step_model)| {
            let point = |x: &usize| (*x as f64, 1e3 * cost(step_model, *x).seconds);
            line(step_model.to_string(), i, tokens.iter().map(point).collect())
        })
        .collect();
    let turns = |x: &usize| cost(StepModel::Roofline, *x).bound == Bound::Compute;
    if let Some(ridge) = (1..=16_384).find(turns) {
        series.push(Series {
            name: format!("arithmetic takes over at {ridge}"),
            mark: Mark::Points,
            colour: models.len(),
            points: vec![(ridge as f64, 1e3 * cost(StepModel::Roofline, ridge).seconds)],
        });
    }
    Chart {
        title: format!(
            "Step of {} on {} beside {decodes} decodes of {context} tokens",
            model.name, hardware.name
        ),
        x: Axis::new("prompt tokens in the step", Scale::Log),
        y: Axis::new("ms", Scale::Log),
        series,
    }
}

/// Mean of the longest of `batch` lengths that are drawn from `sorted` with putting back.
fn mean_longest(sorted: &[usize], batch: usize) -> f64 {
    let count = sorted.len() as f64;
    let below = |i: usize| (i as f64 / count).powi(batch as i32);
    let part = |(i, length): (usize, &usize)| *length as f64 * (below(i + 1) - below(i));
    sorted.iter().enumerate().map(part).sum()
}

fn efficiency(answers: &Lengths) -> Chart {
    let mut random = Random::new(0, 0);
    let mut lengths: Vec<usize> = match answers {
        Lengths::File(_, lengths) => lengths.to_vec(),
        answers => (0..DRAWS).map(|_| answers.draw(&mut random)).collect(),
    };
    lengths.sort_unstable();
    let mean = lengths.iter().sum::<usize>() as f64 / lengths.len() as f64;
    let batches = growing(1, 256);
    let of = |longest: &dyn Fn(usize) -> f64| {
        let percent = |batch: &usize| 100.0 * static_efficiency(mean, longest(*batch));
        batches.iter().map(|batch| (*batch as f64, percent(batch))).collect()
    };
    let exponential = |batch: usize| mean * harmonic(batch);
    Chart {
        title: format!("Static batches of answers {answers}, mean {mean:.1}"),
        x: Axis::new("sequences of a batch", Scale::Log),
        y: Axis::new("% of the slot-steps used", Scale::Linear),
        series: vec![
            line(answers.to_string(), 0, of(&|batch| mean_longest(&lengths, batch))),
            line("exponential of that mean".to_owned(), 1, of(&exponential)),
        ],
    }
}

fn places(model: &ModelProfile, memory: f64) -> Chart {
    let (state, kv) = (model.state(), model.kv_bytes);
    let lengths = growing(256, 262_144);
    let of = |sequences: &dyn Fn(f64) -> f64| {
        lengths.iter().map(|tokens| (*tokens as f64, sequences(*tokens as f64))).collect()
    };
    let one = |context: f64| (memory / (state + context * kv)).floor();
    let mut series = vec![line("one pool for both".to_owned(), 0, of(&one))];
    for (i, ratio) in RATIOS.into_iter().enumerate() {
        let split = PoolSplit::by_ratio(memory, ratio);
        let name = format!("slots to blocks {ratio}");
        series.push(line(name, i + 1, of(&|context| split.sequences(state, kv, context))));
    }
    Chart {
        title: format!("{} in {:.1} GB of slots and blocks", model.name, memory / 1e9),
        x: Axis::new("tokens of a sequence", Scale::Log),
        y: Axis::new("sequences", Scale::Log),
        series,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(series: &Series, x: f64) -> f64 {
        series.points.iter().find(|point| point.0 == x).expect("a point").1
    }

    /// C02 and C04: 24.6 % of a batch of 32, by lengths that were drawn and by the formula.
    #[test]
    fn drawn_lengths_are_as_efficient_as_the_formula_says() {
        let chart = efficiency(&"exp:1000".parse().expect("lengths"));
        let [drawn, formula] = [0, 1].map(|i| point(&chart.series[i], 32.0));
        assert!((formula - 24.64).abs() < 0.01, "{formula}");
        assert!((drawn / formula - 1.0).abs() < 0.02, "{drawn}");
        let two = Lengths::File("log".to_owned(), vec![10, 30].into());
        // Of two draws the longest is 30 but for a quarter of the time.
        let expected = 100.0 * 20.0 / (0.75 * 30.0 + 0.25 * 10.0);
        assert!((point(&efficiency(&two).series[0], 2.0) - expected).abs() < 1e-9);
    }

    /// M4: K3 in 200 GB holds 116 sequences of 32,768 tokens at 0.9 and 44 at 0.25.
    #[test]
    fn one_pool_holds_as_many_as_the_best_ratio() {
        let model = ModelProfile::read("k3-real").expect("a preset");
        let chart = places(&model, 200e9);
        let of = |series: usize| point(&chart.series[series], 32_768.0);
        assert_eq!((of(1), of(2), of(3), of(4)), (40.0, 89.0, 116.0, 73.0));
        assert!(of(0) >= 147.0, "{}", of(0));
    }

    /// C37: 199 tokens in all, 32 of them generated.
    #[test]
    fn arithmetic_takes_over_where_the_claim_says() {
        let hardware = HardwareProfile::preset("h100-seed-a").expect("a preset");
        let model = ModelProfile::read("70b-gqa").expect("a preset");
        let chart = step_time((&hardware, &model), (32, 2048));
        assert_eq!(chart.series[3].points[0].0, 199.0 - 32.0);
    }
}
