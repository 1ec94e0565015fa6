//! Short causal convolution with a carried window, then SiLU, on a device.
//!
//! The definition is [`conv::naive`](crate::conv::naive); windows in slots have its layout.

use super::launch::{Argument, Kernel};
use super::{Cuda, CudaError, DeviceRows, DeviceRowsMut, DeviceSlice, Slots};
use crate::conv::MAX_WIDTH;

const CONV: Kernel<ConvArgument> = Kernel::new("conv.cu", "conv", 128);

/// Rows of a span that one thread has. More would leave a single prompt on few threads.
const RUN: usize = 32;

#[repr(C)]
#[derive(Clone, Copy)]
struct ConvArgument {
    x: u64,
    taps: u64,
    out: u64,
    spans: u64,
    snapshots: u64,
    arena: u64,
    x_stride: i64,
    out_stride: i64,
    at: i64,
    channels: i32,
    width: i32,
    run: i32,
    unused: i32,
}
// SAFETY: the struct of the same name in conv.cu.
unsafe impl Argument for ConvArgument {}

/// Shape and taps of a convolution ([`conv::Taps`](crate::conv::Taps)).
#[derive(Debug, Clone, Copy)]
pub struct Taps<'a> {
    /// Channels.
    pub channels: usize,
    /// Taps per channel, 2 to [`MAX_WIDTH`].
    pub width: usize,
    /// `[width][channels]`, oldest first.
    pub values: DeviceSlice<'a, f32>,
}

/// Convolves the rows of every span, whose windows are in `slots`; padding rows become zeros.
///
/// # Errors
/// When the launch fails.
///
/// # Panics
/// When the shapes do not fit.
pub fn conv(
    cuda: &Cuda,
    x: DeviceRows<'_>,
    taps: Taps<'_>,
    slots: Slots<'_>,
    out: DeviceRowsMut<'_>,
) -> Result<(), CudaError> {
    let (x, out, spans) = (x.extent, out.extent, slots.spans);
    assert!((2..=MAX_WIDTH).contains(&taps.width), "a convolution of {} taps", taps.width);
    assert_eq!(taps.values.len(), taps.width * taps.channels);
    assert_eq!((x.count, x.width), (spans.rows, taps.channels));
    assert_eq!((x.count, x.width), (out.count, out.width));
    slots.check_part((taps.width - 1) * taps.channels * size_of::<f32>());
    let argument = ConvArgument {
        x: x.at,
        taps: taps.values.at,
        out: out.at,
        spans: spans.spans,
        snapshots: spans.snapshots,
        arena: slots.arena.address(),
        x_stride: x.stride as i64,
        out_stride: out.stride as i64,
        at: slots.at as i64,
        channels: taps.channels as i32,
        width: taps.width as i32,
        run: RUN as i32,
        unused: 0,
    };
    let runs =
        [taps.channels.div_ceil(128), spans.steps + spans.chunks, spans.longest.div_ceil(RUN)];
    // SAFETY: a thread touches its channel, below `channels`, in the rows of its span, which are
    // rows of the step, and in windows inside slots of this arena: by `check_part`.
    unsafe { cuda.launch(&CONV, runs, argument) }
}
