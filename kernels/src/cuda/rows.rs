//! Rows that outlive their step, and rows that logits are asked for, on a device.

use super::launch::{Argument, Kernel};
use super::{Cuda, CudaError, DeviceArena, DeviceBuffer, DeviceRows, DeviceRowsMut, Slots};

const KEEP: Kernel<KeepArgument> = Kernel::new("rows.cu", "keep_last_rows", 256);
const GATHER: Kernel<GatherRowsArgument> = Kernel::new("rows.cu", "gather_rows", 256);

#[repr(C)]
#[derive(Clone, Copy)]
struct KeepArgument {
    x: u64,
    spans: u64,
    snapshots: u64,
    arena: u64,
    x_stride: i64,
    at: i64,
    width: i32,
    unused: i32,
}
// SAFETY: the struct of the same name in rows.cu.
unsafe impl Argument for KeepArgument {}

#[repr(C)]
#[derive(Clone, Copy)]
struct GatherRowsArgument {
    x: u64,
    arena: u64,
    origins: u64,
    out: u64,
    x_stride: i64,
    out_stride: i64,
    width: i32,
    unused: i32,
}
// SAFETY: the struct of the same name in rows.cu.
unsafe impl Argument for GatherRowsArgument {}

/// Keeps the row of each span's last position, and of each snapshot's, in its slot; `x` is
/// `[rows][width]`, the part of a slot has `width` values. Padding keeps nothing.
///
/// # Errors
/// When the launch fails.
///
/// # Panics
/// When the shapes do not fit.
pub fn keep_last(cuda: &Cuda, x: DeviceRows<'_>, slots: Slots<'_>) -> Result<(), CudaError> {
    let (x, spans) = (x.extent, slots.spans);
    assert_eq!(x.count, spans.rows);
    slots.check_part(x.width * size_of::<f32>());
    let argument = KeepArgument {
        x: x.at,
        spans: spans.spans,
        snapshots: spans.snapshots,
        arena: slots.arena.address(),
        x_stride: x.stride as i64,
        at: slots.at as i64,
        width: x.width as i32,
        unused: 0,
    };
    let grid = [x.width.div_ceil(256), spans.steps + spans.chunks, 1 + spans.most_snapshots];
    // SAFETY: a thread reads column c below `width` of a row of its span, which is a row of the
    // step, and writes value c of a part inside a slot of this arena, by `check_part`.
    unsafe { cuda.launch(&KEEP, grid, argument) }
}

/// Where a row comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Of the rows.
    Row(usize),
    /// Of the arena, at this byte, a multiple of 4.
    Arena(usize),
}

/// The places of [`gather`], on the device: made once for so many.
#[derive(Debug)]
pub struct Origins {
    values: DeviceBuffer<i64>,
}

impl Origins {
    /// For up to `most` rows.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn new(cuda: &Cuda, most: usize) -> Result<Origins, CudaError> {
        Ok(Origins { values: DeviceBuffer::zeros(cuda, most)? })
    }
}

/// `out[i]` = the row at `origins[i]`, of `x` or of the arena.
///
/// # Errors
/// When the launch fails.
///
/// # Panics
/// When an origin is not there, there are more than `places` is for, or the shapes do not fit.
pub fn gather(
    cuda: &Cuda,
    (x, arena): (DeviceRows<'_>, &DeviceArena),
    origins: &[Origin],
    places: &mut Origins,
    out: DeviceRowsMut<'_>,
) -> Result<(), CudaError> {
    let (x, out) = (x.extent, out.extent);
    assert_eq!((origins.len(), x.width), (out.count, out.width));
    let bytes = x.width * size_of::<f32>();
    let number = |origin: &Origin| match *origin {
        Origin::Row(row) => {
            assert!(row < x.count, "row {row} of {}", x.count);
            row as i64
        }
        Origin::Arena(at) => {
            assert!(at + bytes <= arena.bytes() && at.is_multiple_of(4), "a row at {at}");
            -1 - at as i64
        }
    };
    let numbers: Vec<i64> = origins.iter().map(number).collect();
    places.values.write(cuda, 0, &numbers)?;
    let argument = GatherRowsArgument {
        x: x.at,
        arena: arena.address(),
        origins: places.values.address(),
        out: out.at,
        x_stride: x.stride as i64,
        out_stride: out.stride as i64,
        width: x.width as i32,
        unused: 0,
    };
    // SAFETY: every origin names `width` values of x or of the arena by the assertions above, and
    // out has a row for each.
    unsafe { cuda.launch(&GATHER, [x.width.div_ceil(256), origins.len(), 1], argument) }
}
