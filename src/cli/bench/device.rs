//! `deltapool bench device`: what a CUDA device takes for each operator, beside what its memory,
//! its products and its link give at most.
//!
//! Shapes are those of Kimi-Linear-48B and of published measurements; weights and rows are random.
//! Operators run as graphs, as the engine runs them, with the second-level cache emptied before
//! each repeat: in a step its layers come between two uses of one state.

#[cfg(feature = "cuda")]
mod attention;
#[cfg(feature = "cuda")]
mod lab;
#[cfg(feature = "cuda")]
mod link;
#[cfg(feature = "cuda")]
mod products;
#[cfg(feature = "cuda")]
mod recurrent;
#[cfg(feature = "cuda")]
mod report;
#[cfg(feature = "cuda")]
mod shapes;

use clap::Args;

use super::ReportArgs;
use crate::cli::CliError;
use crate::config::Device;
use crate::engine::{EngineError, OpenDevice};

/// Most repeats of an operator.
const MOST_REPEATS: usize = 1000;

/// Arguments of `bench device`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct DeviceArgs {
    /// Shapes of some kilobytes instead, to see that all of it runs: what they take says nothing.
    #[arg(long)]
    pub tiny: bool,
    /// Repeats of each operator, all of them timed.
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub repeats: usize,
    /// Where its report goes.
    #[command(flatten)]
    pub report: ReportArgs,
}

const HELP: &str = "\
The floor of an operator is the time in which its bytes are copied at the rate measured, or its
operations made at the rate of the largest product measured, whichever is longer; bytes are those
that it cannot do without, its activations in f32. A copy counts what it reads and what it writes.
Targets are of an H200: on other devices they are shown and nothing is judged.";

/// Runs the command.
pub fn run(args: &DeviceArgs) -> Result<(), CliError> {
    if !(1..=MOST_REPEATS).contains(&args.repeats) {
        let repeats = args.repeats;
        return Err(CliError::Usage(format!("--repeats {repeats}: 1 to {MOST_REPEATS}")));
    }
    match OpenDevice::open(Device::Cuda).map_err(EngineError::from)? {
        OpenDevice::Cpu => unreachable!("a CUDA device was asked for"),
        #[cfg(feature = "cuda")]
        OpenDevice::Cuda(cuda) => measure(args, *cuda),
    }
}

#[cfg(feature = "cuda")]
fn measure(args: &DeviceArgs, cuda: kernels::cuda::Cuda) -> Result<(), CliError> {
    use crate::cli::loading::bar;
    use crate::cli::output::{JsonTarget, print};
    use crate::engine::DeviceError;

    let shapes = if args.tiny { &shapes::TINY } else { &shapes::KIMI_LINEAR };
    let bar = bar(args.report.quiet, "measuring {msg}");
    let measured = report::measure(cuda, shapes, args.repeats, &bar);
    bar.finish_and_clear();
    let report = measured.map_err(|error| {
        let device = Device::Cuda.as_str();
        EngineError::from(DeviceError { device, reason: error.to_string() })
    })?;
    let target = args.report.json.target();
    if target != JsonTarget::Output {
        print(&report.to_string())?;
    }
    target.write(&serde_json::json!(report))
}
