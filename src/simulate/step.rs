//! What a step costs: bytes, FLOPs and seconds (F6, F7, F26; SEEDS.md section 5, point 17).

use std::fmt;
use std::str::FromStr;

use super::hardware::HardwareProfile;
use super::model::ModelProfile;

/// How a step's reads and its arithmetic share the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StepModel {
    /// All reads beside all arithmetic: the longer of both. A lower bound.
    Roofline,
    /// Kernels one after the other, each its own roofline: the products, then the mixers of
    /// decodes, then those of chunks. What engines do.
    #[default]
    Phased,
    /// All reads, then all arithmetic. An upper bound.
    Additive,
}

/// The names of all step models.
pub const STEP_MODELS: &str = "roofline, phased, additive";

impl FromStr for StepModel {
    type Err = String;

    fn from_str(text: &str) -> Result<StepModel, String> {
        match text {
            "roofline" => Ok(StepModel::Roofline),
            "phased" => Ok(StepModel::Phased),
            "additive" => Ok(StepModel::Additive),
            _ => Err(format!("{text:?} is no step model; there are {STEP_MODELS}")),
        }
    }
}

impl fmt::Display for StepModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            StepModel::Roofline => "roofline",
            StepModel::Phased => "phased",
            StepModel::Additive => "additive",
        })
    }
}

/// What is in a step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepWork<'w> {
    /// Sequences that compute one generated token.
    pub decodes: usize,
    /// Their contexts together, in tokens.
    pub decode_context: f64,
    /// Pieces of prompts, `(start, rows)` in tokens.
    pub chunks: &'w [(usize, usize)],
    /// Context of padding or finished rows that is read for nothing, in tokens.
    pub dead_context: f64,
}

impl StepWork<'_> {
    fn rows(&self) -> usize {
        self.decodes + self.chunks.iter().map(|chunk| chunk.1).sum::<usize>()
    }
}

/// What a step waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    /// The device's memory.
    Bandwidth,
    /// The device's arithmetic.
    Compute,
    /// What every step costs, whatever is in it.
    Overhead,
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Bound::Bandwidth => "bandwidth",
            Bound::Compute => "compute",
            Bound::Overhead => "overhead",
        })
    }
}

/// What a step costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepCost {
    /// From its start to its end.
    pub seconds: f64,
    /// Bytes of the device's memory read and written.
    pub bytes: f64,
    /// Floating-point operations, by the model's formulas also where `prefill_rate` sets the time.
    pub flops: f64,
    /// What most of the time is spent on.
    pub bound: Bound,
}

/// Bytes and seconds of arithmetic of kernels that run together.
#[derive(Clone, Copy, Default)]
struct Phase {
    bytes: f64,
    flops: f64,
    compute: f64,
}

/// The cost of a step; an empty one costs nothing.
///
/// Bytes: the weights (F26), the context of each decode, `2 V` per decode and per chunk of a model
/// with recurrent layers (their state is read and written), and of a chunk the rows it writes and
/// the prefix it reads. F7 leaves that last term out, as it does in its FLOPs.
/// FLOPs: `2 P` a row, and attention per pair of query and key.
pub fn step_cost(
    model: StepModel,
    hardware: &HardwareProfile,
    profile: &ModelProfile,
    work: &StepWork<'_>,
) -> StepCost {
    let rows = work.rows();
    if rows == 0 && work.dead_context == 0.0 {
        return StepCost { seconds: 0.0, bytes: 0.0, flops: 0.0, bound: Bound::Overhead };
    }
    let phases = phases(hardware, profile, work, rows);
    let bandwidth = hardware.bandwidth();
    let bytes: f64 = phases.iter().map(|phase| phase.bytes).sum();
    let flops: f64 = phases.iter().map(|phase| phase.flops).sum();
    let read = bytes / bandwidth;
    let compute: f64 = phases.iter().map(|phase| phase.compute).sum();
    // Seconds that are waited for memory, and for arithmetic.
    let (memory, arithmetic) = match model {
        StepModel::Roofline if read >= compute => (read, 0.0),
        StepModel::Roofline => (0.0, compute),
        StepModel::Additive => (read, compute),
        StepModel::Phased => phases.iter().fold((0.0, 0.0), |(memory, arithmetic), phase| {
            let read = phase.bytes / bandwidth;
            match read >= phase.compute {
                true => (memory + read, arithmetic),
                false => (memory, arithmetic + phase.compute),
            }
        }),
    };
    let overhead = hardware.step_overhead;
    let bound = match memory.max(arithmetic) {
        most if overhead > most => Bound::Overhead,
        most if memory == most => Bound::Bandwidth,
        _ => Bound::Compute,
    };
    StepCost { seconds: memory + arithmetic + overhead, bytes, flops, bound }
}

/// Products, mixers of decodes, mixers of chunks.
fn phases(
    hardware: &HardwareProfile,
    profile: &ModelProfile,
    work: &StepWork<'_>,
    rows: usize,
) -> [Phase; 3] {
    let decodes = work.decodes as f64;
    let (gemm, peak) = (hardware.compute(rows), hardware.peak_compute());
    let (kv, state) = (profile.kv_bytes, 2.0 * profile.state());
    let mut products = Phase {
        bytes: profile.weight_bytes(rows as f64),
        flops: 2.0 * profile.active_params * rows as f64,
        compute: 2.0 * profile.active_params * decodes / gemm,
    };
    let attention = profile.attention * work.decode_context;
    let decode = Phase {
        bytes: (work.decode_context + work.dead_context) * kv + decodes * state,
        flops: attention,
        compute: attention / (peak * hardware.decode_attention_efficiency),
    };
    let mut chunk = Phase::default();
    for &(start, rows) in work.chunks.iter().filter(|chunk| chunk.1 > 0) {
        let attention = profile.chunk_attention(start, rows);
        chunk.bytes += (start + rows) as f64 * kv + state;
        chunk.flops += attention;
        match profile.prefill_rate {
            // What was measured has both parts in it.
            Some(rate) => products.compute += rows as f64 / rate,
            None => {
                products.compute += 2.0 * profile.active_params * rows as f64 / gemm;
                chunk.compute += attention / (peak * hardware.chunk_attention_efficiency);
            }
        }
    }
    [products, decode, chunk]
}
