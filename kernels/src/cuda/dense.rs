//! Element-wise functions, norms, rotary positions and the embedding, on a device.
//!
//! The definitions are [`activation::naive`](crate::activation::naive),
//! [`norm::naive`](crate::norm::naive), [`rope::naive`](crate::rope::naive) and
//! [`rope::angles`](crate::rope::angles), and [`Matrix::copy_row`](crate::Matrix::copy_row).

use super::launch::{Argument, Kernel};
use super::{Cuda, CudaError, DeviceBuffer, DeviceRows, DeviceRowsMut, DeviceSlice};
use crate::matrix::Dtype;
use crate::norm::GateKind;
use crate::rope::Rope;

const FILE: &str = "dense.cu";
const ADD: Kernel<RowsArgument> = Kernel::new(FILE, "add", 256);
const SILU_MUL: Kernel<RowsArgument> = Kernel::new(FILE, "silu_mul", 256);
const SIGMOID: Kernel<RowsArgument> = Kernel::new(FILE, "sigmoid_rows", 256);
const NORM_WIDE: Kernel<NormArgument> = Kernel::new(FILE, "norm_wide", 256).shared(32);
const NORM_NARROW: Kernel<NormArgument> = Kernel::new(FILE, "norm_narrow", 256);
const ANGLES: Kernel<AnglesArgument> = Kernel::new(FILE, "angles", 256);
const ROTATE: Kernel<RotateArgument> = Kernel::new(FILE, "rotate", 256);
const EMBED: Kernel<EmbedArgument> = Kernel::new(FILE, "embed", 256);

/// Rows up to this width are normed by a warp, wider ones by a block.
const NARROW: usize = 512;

#[repr(C)]
#[derive(Clone, Copy)]
struct RowsArgument {
    x: u64,
    y: u64,
    x_stride: i64,
    y_stride: i64,
    width: i32,
    by_four: i32,
}
// SAFETY: the struct of the same name in dense.cu.
unsafe impl Argument for RowsArgument {}

/// `gate = silu(gate) * up`.
///
/// # Errors
/// When the launch fails.
///
/// # Panics
/// When the shapes differ.
pub fn silu_mul(cuda: &Cuda, gate: DeviceRowsMut<'_>, up: DeviceRows<'_>) -> Result<(), CudaError> {
    in_place(cuda, &SILU_MUL, gate, Some(up))
}

/// `x = 1 / (1 + e^-x)`.
///
/// # Errors
/// When the launch fails.
pub fn sigmoid(cuda: &Cuda, x: DeviceRowsMut<'_>) -> Result<(), CudaError> {
    in_place(cuda, &SIGMOID, x, None)
}

/// `x += y`.
///
/// # Errors
/// When the launch fails.
///
/// # Panics
/// When the shapes differ.
pub fn add(cuda: &Cuda, x: DeviceRowsMut<'_>, y: DeviceRows<'_>) -> Result<(), CudaError> {
    in_place(cuda, &ADD, x, Some(y))
}

fn in_place(
    cuda: &Cuda,
    kernel: &Kernel<RowsArgument>,
    x: DeviceRowsMut<'_>,
    y: Option<DeviceRows<'_>>,
) -> Result<(), CudaError> {
    let x = x.extent;
    let y = y.map_or(x, |y| y.extent);
    assert_eq!((x.count, x.width), (y.count, y.width));
    let argument = RowsArgument {
        x: x.at,
        y: y.at,
        x_stride: x.stride as i64,
        y_stride: y.stride as i64,
        width: x.width as i32,
        by_four: (x.by_four() && y.by_four()).into(),
    };
    // SAFETY: block (i, r) touches columns below `width` of row r of both, which are there by the
    // extents.
    unsafe { cuda.launch(kernel, [x.width.div_ceil(1024), x.count, 1], argument) }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct NormArgument {
    x: u64,
    weights: u64,
    gate: u64,
    out: u64,
    x_stride: i64,
    gate_stride: i64,
    out_stride: i64,
    rows: i32,
    width: i32,
    gate_kind: i32,
    eps: f32,
    offset: f32,
    unused: i32,
}
// SAFETY: the struct of the same name in dense.cu.
unsafe impl Argument for NormArgument {}

/// The weight of a norm ([`norm::Scale`](crate::norm::Scale)).
#[derive(Debug, Clone, Copy)]
pub enum Scale<'a> {
    /// The weights as stored.
    Plain(DeviceSlice<'a, f32>),
    /// One plus the weights as stored.
    OnePlus(DeviceSlice<'a, f32>),
}

/// `out = x / sqrt(mean(x²) + eps) * w`, row by row.
///
/// # Errors
/// When the launch fails.
///
/// # Panics
/// When the shapes do not fit.
pub fn rms_norm(
    cuda: &Cuda,
    x: DeviceRows<'_>,
    scale: Scale<'_>,
    eps: f32,
    out: DeviceRowsMut<'_>,
) -> Result<(), CudaError> {
    let x = (x.extent.at, x.extent.stride, x.extent.count, x.extent.width);
    norm(cuda, x, scale, eps, None, out)
}

/// [`rms_norm`] of rows where they lie.
///
/// # Errors
/// When the launch fails.
///
/// # Panics
/// When the shapes do not fit.
pub fn rms_norm_in_place(
    cuda: &Cuda,
    x: DeviceRowsMut<'_>,
    scale: Scale<'_>,
    eps: f32,
) -> Result<(), CudaError> {
    let rows = (x.extent.at, x.extent.stride, x.extent.count, x.extent.width);
    norm(cuda, rows, scale, eps, None, x)
}

/// [`rms_norm`] times `sigmoid(gate)` or `silu(gate)`.
///
/// # Errors
/// When the launch fails.
///
/// # Panics
/// When the shapes do not fit.
pub fn rms_norm_gated(
    cuda: &Cuda,
    x: DeviceRows<'_>,
    weights: DeviceSlice<'_, f32>,
    eps: f32,
    gate: (DeviceRows<'_>, GateKind),
    out: DeviceRowsMut<'_>,
) -> Result<(), CudaError> {
    let x = (x.extent.at, x.extent.stride, x.extent.count, x.extent.width);
    norm(cuda, x, Scale::Plain(weights), eps, Some(gate), out)
}

/// Number of a gate in the kernels.
pub(super) fn gate_number(kind: GateKind) -> i32 {
    match kind {
        GateKind::Sigmoid => 1,
        GateKind::Silu => 2,
    }
}

fn norm(
    cuda: &Cuda,
    (x, x_stride, count, width): (u64, usize, usize, usize),
    scale: Scale<'_>,
    eps: f32,
    gate: Option<(DeviceRows<'_>, GateKind)>,
    out: DeviceRowsMut<'_>,
) -> Result<(), CudaError> {
    let (weights, offset) = match scale {
        Scale::Plain(weights) => (weights, 0.0),
        Scale::OnePlus(weights) => (weights, 1.0),
    };
    let out = out.extent;
    assert_eq!((count, width, width), (out.count, out.width, weights.len()));
    let gate = gate.map(|(rows, kind)| (rows.extent, gate_number(kind)));
    assert!(gate.is_none_or(|(rows, _)| (rows.count, rows.width) == (count, width)));
    let argument = NormArgument {
        x,
        weights: weights.at,
        gate: gate.map_or(0, |(rows, _)| rows.at),
        out: out.at,
        x_stride: x_stride as i64,
        gate_stride: gate.map_or(0, |(rows, _)| rows.stride as i64),
        out_stride: out.stride as i64,
        rows: count as i32,
        width: width as i32,
        gate_kind: gate.map_or(0, |(_, kind)| kind),
        eps,
        offset,
        unused: 0,
    };
    // SAFETY: both kernels touch columns below `width` of rows below `rows`, which are there by
    // the extents, and `width` weights.
    unsafe {
        if width <= NARROW {
            cuda.launch(&NORM_NARROW, [count.div_ceil(8), 1, 1], argument)
        } else {
            cuda.launch(&NORM_WIDE, [count, 1, 1], argument)
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct AnglesArgument {
    positions: u64,
    frequencies: u64,
    out: u64,
    rows: i32,
    half: i32,
}
// SAFETY: the struct of the same name in dense.cu.
unsafe impl Argument for AnglesArgument {}

/// The frequencies of a rotation, on the device.
#[derive(Debug)]
pub struct Frequencies {
    dim: usize,
    values: DeviceBuffer<f64>,
}

impl Frequencies {
    /// Those of `rope`.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn new(cuda: &Cuda, rope: &Rope) -> Result<Frequencies, CudaError> {
        Ok(Frequencies { dim: rope.dim, values: DeviceBuffer::of(cuda, &rope.frequencies)? })
    }
}

/// Cosines and sines of a step's positions: rows of `dim`, a row's `dim / 2` cosines, then its
/// sines. Made once per step and used by every layer.
///
/// # Errors
/// When the launch fails.
///
/// # Panics
/// When `out` is not one whole row of `dim` values for each position.
pub fn angles(
    cuda: &Cuda,
    frequencies: &Frequencies,
    positions: DeviceSlice<'_, i32>,
    out: DeviceRowsMut<'_>,
) -> Result<(), CudaError> {
    let (out, half) = (out.extent, frequencies.dim / 2);
    assert_eq!((out.count, out.width, out.stride), (positions.len(), 2 * half, 2 * half));
    let argument = AnglesArgument {
        positions: positions.at,
        frequencies: frequencies.values.slice().at,
        out: out.at,
        rows: out.count as i32,
        half: half as i32,
    };
    // SAFETY: thread i below rows * half writes values i of the cosines and of the sines.
    unsafe { cuda.launch(&ANGLES, [(out.count * half).div_ceil(256), 1, 1], argument) }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RotateArgument {
    x: u64,
    angles: u64,
    x_stride: i64,
    angles_stride: i64,
    heads: i32,
    head_dim: i32,
    half: i32,
    unused: i32,
}
// SAFETY: the struct of the same name in dense.cu.
unsafe impl Argument for RotateArgument {}

/// Rotates the first channels of every head of every row, as many as a row has angles: pairs
/// `(i, i + dim / 2)`.
///
/// # Errors
/// When the launch fails.
///
/// # Panics
/// When the shapes do not fit.
pub fn rotate(
    cuda: &Cuda,
    x: DeviceRowsMut<'_>,
    head_dim: usize,
    angles: DeviceRows<'_>,
) -> Result<(), CudaError> {
    let (x, angles) = (x.extent, angles.extent);
    assert_eq!(x.count, angles.count);
    assert!(angles.width <= head_dim && x.width.is_multiple_of(head_dim));
    let (heads, half) = (x.width / head_dim, angles.width / 2);
    let argument = RotateArgument {
        x: x.at,
        angles: angles.at,
        x_stride: x.stride as i64,
        angles_stride: angles.stride as i64,
        heads: heads as i32,
        head_dim: head_dim as i32,
        half: half as i32,
        unused: 0,
    };
    // SAFETY: a thread touches channels c and half + c of a head, both below `head_dim`.
    unsafe { cuda.launch(&ROTATE, [(heads * half).div_ceil(256), x.count, 1], argument) }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct EmbedArgument {
    tokens: u64,
    table: u64,
    out: u64,
    out_stride: i64,
    width: i32,
    vocabulary: i32,
    dtype: i32,
    unused: i32,
}
// SAFETY: the struct of the same name in dense.cu.
unsafe impl Argument for EmbedArgument {}

/// An embedding as stored: `[vocabulary][width]` values of `dtype`.
#[derive(Debug, Clone, Copy)]
pub struct Embedding<'a> {
    /// The values' bytes.
    pub bytes: DeviceSlice<'a, u8>,
    /// How a value is encoded.
    pub dtype: Dtype,
    /// Values of a row.
    pub width: usize,
}

/// Gives each row its token's values, widened to single precision. A token outside the vocabulary
/// gives not-a-number.
///
/// # Errors
/// When the launch fails.
///
/// # Panics
/// When the shapes do not fit.
pub fn embed(
    cuda: &Cuda,
    tokens: DeviceSlice<'_, u32>,
    embedding: Embedding<'_>,
    out: DeviceRowsMut<'_>,
) -> Result<(), CudaError> {
    let (out, row_bytes) = (out.extent, embedding.width * embedding.dtype.bytes());
    let vocabulary = embedding.bytes.len() / row_bytes;
    assert_eq!(vocabulary * row_bytes, embedding.bytes.len(), "an embedding is whole rows");
    assert_eq!((out.count, out.width), (tokens.len(), embedding.width));
    let argument = EmbedArgument {
        tokens: tokens.at,
        table: embedding.bytes.at,
        out: out.at,
        out_stride: out.stride as i64,
        width: out.width as i32,
        vocabulary: vocabulary as i32,
        dtype: match embedding.dtype {
            Dtype::F32 => 0,
            Dtype::Bf16 => 1,
            Dtype::F16 => 2,
        },
        unused: 0,
    };
    // SAFETY: a row reads a row of the table below `vocabulary`, and writes its own.
    unsafe { cuda.launch(&EMBED, [out.width.div_ceil(256), out.count, 1], argument) }
}
