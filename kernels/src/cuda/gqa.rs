//! Grouped-query attention on a device.
//!
//! The definition is [`gqa::naive`](crate::gqa::naive); blocks have its layout, so that keys and
//! values that one wrote the other can read.

use super::attention::{Attention, DevicePaged, Over, Part, Source, parts_len, write};
use super::{Cuda, CudaError, DeviceArena, DeviceBuffer, DeviceRows, DeviceRowsMut, DeviceSpans};
use crate::attention::KvPlace;
use crate::device::Compute;
use crate::gqa::Shape;
use crate::span::{BLOCK_LEN, SEGMENT_LEN};

/// Working memory of [`attend`], made once.
#[derive(Debug)]
pub struct Workspace {
    parts: DeviceBuffer<f32>,
}

impl Workspace {
    /// For steps of up to `most_steps` generated rows and sequences of up to `most_positions`.
    /// With less room than a step needs its segments are walked one after another.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn new(
        cuda: &Cuda,
        shape: Shape,
        most_steps: usize,
        most_positions: usize,
    ) -> Result<Workspace, CudaError> {
        let segments = most_positions.div_ceil(SEGMENT_LEN);
        let len = most_steps * segments * parts_len(shape.heads, shape.head_dim);
        Ok(Workspace { parts: DeviceBuffer::zeros(cuda, len)? })
    }
}

/// Writes the keys and values of every span's rows to their blocks, rounded to the cache's type.
///
/// # Errors
/// When a launch fails.
///
/// # Panics
/// When the shapes do not fit.
pub fn write_rows(
    cuda: &Cuda,
    shape: Shape,
    spans: &DeviceSpans<'_>,
    (keys, values): (DeviceRows<'_>, DeviceRows<'_>),
    arena: &mut DeviceArena,
    place: KvPlace,
) -> Result<(), CudaError> {
    let width = shape.kv_heads * shape.head_dim;
    assert_eq!([keys.extent.width, values.extent.width], [width; 2]);
    write(cuda, spans, keys.extent, (width, true), arena, place)?;
    let at = place.at + width * BLOCK_LEN * place.dtype.bytes();
    write(cuda, spans, values.extent, (shape.head_dim, false), arena, KvPlace { at, ..place })
}

/// Attends every row of every span, after [`write_rows`]; `q` and `out` are
/// `[rows][heads * head_dim]`. Padding rows become zeros.
///
/// Under [`Compute::Bf16`] over a bf16 cache queries and weights are rounded too, where heads are
/// up to 128 wide and of whole fragments of 16; else arithmetic is f32.
///
/// # Errors
/// When a launch fails.
///
/// # Panics
/// When the shapes do not fit.
pub fn attend(
    cuda: &Cuda,
    shape: Shape,
    (q, compute): (DeviceRows<'_>, Compute),
    paged: DevicePaged<'_>,
    work: &mut Workspace,
    out: DeviceRowsMut<'_>,
) -> Result<(), CudaError> {
    let (q, out, dim) = (q.extent, out.extent, shape.head_dim);
    assert_eq!((q.count, q.width), (paged.spans.rows, shape.heads * dim));
    assert_eq!((out.count, out.width), (q.count, q.width));
    assert!(shape.heads.is_multiple_of(shape.kv_heads));
    paged.check(2 * shape.kv_heads * dim * BLOCK_LEN);
    let attention = Attention {
        paged,
        source: Source::Heads,
        heads: shape.heads,
        key_heads: shape.kv_heads,
        q: Part { at: q.at, stride: q.stride, head: dim, width: dim },
        more: Part { at: q.at, stride: 0, head: 0, width: 0 },
        out: Part { at: out.at, stride: out.stride, head: dim, width: dim },
        scale: shape.scale(),
        rounds: compute == Compute::Bf16,
        parts: (work.parts.address(), work.parts.len()),
    };
    // SAFETY: q and out have the rows of the step by the assertions.
    unsafe {
        attention.launch(cuda, Over::Steps)?;
        attention.launch(cuda, Over::Chunks)
    }
}
