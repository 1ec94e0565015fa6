//! Kimi Delta Attention on a device, with the gates and the norm that stand around it.
//!
//! The definition is [`kda::naive`](crate::kda::naive) after its `gate` and a sigmoid of the write
//! strengths, then [`rms_norm_gated`](crate::norm::naive::rms_norm_gated) of every head. States in
//! slots have the CPU's layout.

use super::dense::gate_number;
use super::launch::{Argument, Kernel};
use super::memory::Extent;
use super::{
    Cuda, CudaError, DeviceBuffer, DeviceRows, DeviceRowsMut, DeviceSlice, DeviceSpans, Slots,
};
use crate::device::Compute;
use crate::kda::{Gate, Shape};
use crate::norm::GateKind;
use crate::span::CELL_LEN;

/// Widest key and value there is code for.
const MAX_KEY: usize = 128;
const MAX_VALUE: usize = 256;
/// Columns of V that a block of the scan has.
const SPLIT: usize = 32;

const STEP_SHARED: usize = 4 * (3 * MAX_KEY + MAX_VALUE + 4 * 8);
const PREPARE_SHARED: usize = 4
    * ((3 * CELL_LEN + 2 * 16 + CELL_LEN - 16) * (MAX_KEY + 4)
        + CELL_LEN * (CELL_LEN + 4)
        + CELL_LEN);
const SCAN_SHARED: usize = 4
    * ((2 * CELL_LEN + SPLIT) * (MAX_KEY + 4)
        + CELL_LEN * (MAX_KEY + 8)
        + 2 * CELL_LEN * (CELL_LEN + 4)
        + CELL_LEN * (SPLIT + 8));

const fn kernel(name: &'static str, shared: usize) -> Kernel<KdaArgument> {
    Kernel::new("kda.cu", name, 256).shared(shared)
}
const STEP_32: Kernel<KdaArgument> = kernel("kda_step_32", STEP_SHARED);
const STEP_64: Kernel<KdaArgument> = kernel("kda_step_64", STEP_SHARED);
const STEP_128: Kernel<KdaArgument> = kernel("kda_step_128", STEP_SHARED);
const PREPARE: Kernel<KdaArgument> = kernel("kda_prepare", PREPARE_SHARED);
const SCAN: Kernel<KdaArgument> = kernel("kda_scan", SCAN_SHARED);
const SCAN_TF32: Kernel<KdaArgument> = kernel("kda_scan_tf32", SCAN_SHARED);
const NORM: Kernel<KdaArgument> = kernel("kda_norm", 0);

#[repr(C)]
#[derive(Clone, Copy)]
struct KdaArgument {
    qkv: u64,
    decay: u64,
    beta: u64,
    a_log: u64,
    bias: u64,
    output_gate: u64,
    norm: u64,
    out: u64,
    work: u64,
    spans: u64,
    snapshots: u64,
    arena: u64,
    qkv_stride: i64,
    decay_stride: i64,
    beta_stride: i64,
    gate_stride: i64,
    out_stride: i64,
    at: i64,
    key_heads: i32,
    value_heads: i32,
    key_dim: i32,
    value_dim: i32,
    gate: i32,
    beta_is_raw: i32,
    output: i32,
    decay_per_head: i32,
    lower: f32,
    eps: f32,
    rows: i32,
    unused: i32,
}
// SAFETY: the struct of the same name in kda.cu.
unsafe impl Argument for KdaArgument {}

/// The rows of a step.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// `[rows][query heads | key heads | value heads]`, after convolution and SiLU.
    pub qkv: DeviceRows<'a>,
    /// `[rows][value_heads * key_dim]` or `[rows][value_heads]`: raw values of the gate, or
    /// natural-log decays where there is none.
    pub decay: DeviceRows<'a>,
    /// Turns `decay` into log-decays.
    pub gate: Option<DecayGate<'a>>,
    /// Write strengths `[rows][value_heads]`, before their sigmoid if `gate` is there, else after.
    pub beta: DeviceRows<'a>,
}

/// The decay gate ([`kda::naive::gate`](crate::kda::naive::gate)).
#[derive(Debug, Clone, Copy)]
pub struct DecayGate<'a> {
    /// Its form.
    pub kind: Gate,
    /// `[value_heads]`.
    pub a_log: DeviceSlice<'a, f32>,
    /// As wide as a row of raw values.
    pub bias: DeviceSlice<'a, f32>,
}

/// The gated norm of each head's outputs.
#[derive(Debug, Clone, Copy)]
pub struct Output<'a> {
    /// `[rows][value_heads * value_dim]`.
    pub gate: DeviceRows<'a>,
    /// What the gate goes through.
    pub kind: GateKind,
    /// `[value_dim]`.
    pub weights: DeviceSlice<'a, f32>,
    /// Added under the root.
    pub eps: f32,
}

/// Values of working memory for a step of `cells` chunks ([`DeviceSpans::cells`]).
pub fn work_len(shape: Shape, cells: usize) -> usize {
    let each = 2 * CELL_LEN * CELL_LEN + shape.key_dim + 3 * CELL_LEN * shape.key_dim;
    cells * shape.value_heads * each
}

/// Runs every span of a step whose states are in `slots`; padding rows become zeros. Under
/// [`Compute::Bf16`] the products with states of Chunk spans are made in tf32, on tensor cores.
///
/// # Errors
/// When a launch fails.
///
/// # Panics
/// When the shapes do not fit, or a key is wider than 128 or not a multiple of 4, or a value is
/// wider than 256.
pub fn kda(
    cuda: &Cuda,
    shape: Shape,
    inputs: Inputs<'_>,
    slots: Slots<'_>,
    output: Option<Output<'_>>,
    work: &mut DeviceBuffer<f32>,
    out: DeviceRowsMut<'_>,
) -> Result<(), CudaError> {
    let spans = slots.spans;
    check(shape, inputs, &slots, output, work, out.extent);
    let argument = argument(shape, inputs, &slots, output, work, out.extent);
    let heads = shape.value_heads;
    if spans.chunks > 0 {
        let of_chunks = chunks_of(argument, spans);
        // A tensor core takes eight channels at once.
        let tensor = cuda.compute == Compute::Bf16 && shape.key_dim.is_multiple_of(8);
        let scan = if tensor { &SCAN_TF32 } else { &SCAN };
        // SAFETY: blocks touch rows of their spans, which are rows of the step; parts of slots
        // inside this arena, by `check_part`; and working memory of chunks below `cells`, which is
        // there by `check`.
        unsafe {
            cuda.launch(&PREPARE, [heads, spans.chunks, spans.most_cells], of_chunks)?;
            cuda.launch(scan, [heads, spans.chunks, shape.value_dim.div_ceil(SPLIT)], of_chunks)?;
            if output.is_some() {
                cuda.launch(&NORM, [(spans.rows * heads).div_ceil(8), 1, 1], of_chunks)?;
            }
        }
    }
    let step = match shape.key_dim {
        ..=32 => &STEP_32,
        33..=64 => &STEP_64,
        _ => &STEP_128,
    };
    // SAFETY: as above.
    unsafe { cuda.launch(step, [heads, spans.steps, 1], argument) }
}

fn check(
    shape: Shape,
    inputs: Inputs<'_>,
    slots: &Slots<'_>,
    output: Option<Output<'_>>,
    work: &DeviceBuffer<f32>,
    out: Extent,
) {
    let (heads, rows) = (shape.value_heads, slots.spans.rows);
    let (dk, dv) = (shape.key_dim, shape.value_dim);
    assert!(dk <= MAX_KEY && dk.is_multiple_of(4) && dv <= MAX_VALUE, "a state of {dv} by {dk}");
    assert_eq!(heads % shape.key_heads, 0);
    let (decay, beta) = (inputs.decay.extent, inputs.beta.extent);
    assert_eq!((inputs.qkv.extent.count, inputs.qkv.extent.width), (rows, shape.qkv_width()));
    assert_eq!((beta.count, beta.width), (rows, heads));
    assert!(decay.count == rows && (decay.width == heads || decay.width == heads * dk));
    if let Some(gate) = inputs.gate {
        assert_eq!((gate.a_log.len(), gate.bias.len()), (heads, decay.width));
    }
    if let Some(output) = output {
        let gate = output.gate.extent;
        assert_eq!((gate.count, gate.width, output.weights.len()), (rows, heads * dv, dv));
    }
    assert_eq!((out.count, out.width), (rows, heads * dv));
    let need = work_len(shape, slots.spans.cells);
    assert!(work.len() >= need, "{} values of working memory, {need} needed", work.len());
    slots.check_part(heads * shape.head_state() * size_of::<f32>());
}

fn argument(
    shape: Shape,
    inputs: Inputs<'_>,
    slots: &Slots<'_>,
    output: Option<Output<'_>>,
    work: &DeviceBuffer<f32>,
    out: Extent,
) -> KdaArgument {
    let (gate, lower) = match inputs.gate.map(|gate| gate.kind) {
        None => (0, 0.0),
        Some(Gate::Softplus) => (1, 0.0),
        Some(Gate::Bounded { lower }) => (2, lower),
    };
    KdaArgument {
        qkv: inputs.qkv.extent.at,
        decay: inputs.decay.extent.at,
        beta: inputs.beta.extent.at,
        a_log: inputs.gate.map_or(0, |gate| gate.a_log.at),
        bias: inputs.gate.map_or(0, |gate| gate.bias.at),
        output_gate: output.map_or(0, |output| output.gate.extent.at),
        norm: output.map_or(0, |output| output.weights.at),
        out: out.at,
        work: work.address(),
        spans: slots.spans.spans,
        snapshots: slots.spans.snapshots,
        arena: slots.arena.address(),
        qkv_stride: inputs.qkv.extent.stride as i64,
        decay_stride: inputs.decay.extent.stride as i64,
        beta_stride: inputs.beta.extent.stride as i64,
        gate_stride: output.map_or(0, |output| output.gate.extent.stride as i64),
        out_stride: out.stride as i64,
        at: slots.at as i64,
        key_heads: shape.key_heads as i32,
        value_heads: shape.value_heads as i32,
        key_dim: shape.key_dim as i32,
        value_dim: shape.value_dim as i32,
        gate,
        beta_is_raw: inputs.gate.is_some().into(),
        output: output.map_or(0, |output| gate_number(output.kind)),
        decay_per_head: (inputs.decay.extent.width == shape.value_heads).into(),
        lower,
        eps: output.map_or(0.0, |output| output.eps),
        rows: slots.spans.rows as i32,
        unused: 0,
    }
}

/// The same for the spans of form Chunk, which come behind the others.
fn chunks_of(argument: KdaArgument, spans: &DeviceSpans<'_>) -> KdaArgument {
    KdaArgument { spans: spans.chunk_spans(), ..argument }
}
