//! Short causal convolution with a carried window, then SiLU.
//!
//! Per channel `c`: `y[t] = silu(Σ_j taps[j][c] x[t - W + 1 + j][c])`; the last tap meets the
//! current row. The window is the last `W - 1` raw rows before the span, oldest first (MODELS.md
//! section 3 step 2); [`NO_SLOT`](crate::NO_SLOT) reads as zero rows. A span writes the window
//! after its last row, and one for each of its snapshots.

mod cpu;
pub mod naive;

pub use cpu::conv;

use crate::arena::Arena;
use crate::span::Spans;

/// Widest convolution there is code for.
pub const MAX_WIDTH: usize = 8;

/// Shape and taps of a convolution.
#[derive(Debug, Clone, Copy)]
pub struct Taps<'a> {
    /// Channels.
    pub channels: usize,
    /// Taps per channel, 2 to [`MAX_WIDTH`].
    pub width: usize,
    /// `[width][channels]`, oldest first.
    pub values: &'a [f32],
}

/// The spans of a batch and the windows they carry.
#[derive(Debug)]
pub struct Windows<'a> {
    /// The spans.
    pub spans: Spans<'a>,
    /// Where slots lie.
    pub arena: &'a mut Arena,
    /// Byte offset of this layer's window in a slot.
    pub at: usize,
}
