//! Quantised weights: 8 or 4 bits each and a scale for every group of 32 inputs of an output.
//!
//! ```text
//! weights      Q8: scale = max|w| / 127      value = w / scale in -127..=127
//!              Q4: scale = m / -8, or better value = w / scale in -8..=7
//! activations      scale = max|x| / 127      value = x / scale in -127..=127, sum of the values
//! output           sum over groups, in order: (Σ value · value) · (scale of w · scale of x)
//! ```
//!
//! A scale of weights is stored as f16, and the values are quotients by the stored one. Activations
//! are quantised once for each operator, row by row, with scales in f32. What a group's values give
//! is an integer that f32 holds exactly, so every instruction set and every batch gives an output
//! the same bits. Inputs that do not fill a group are zero.
//!
//! Where an activation is not finite its group's scale is not a number, and so is every output of
//! the row: a broken sequence fails as it does with weights as stored.

pub mod naive;
mod panels;
mod rows;
pub(crate) mod strip;
mod weights;

use bytemuck::{Pod, Zeroable};

use crate::matrix::Values;
use crate::panels::PANEL_LEN;

pub use panels::QuantizedPanels;
pub(crate) use rows::{quantize_row, quantize_rows};
pub use weights::pack;

/// Inputs that share a scale.
pub const GROUP_LEN: usize = 32;

/// Inputs whose products are summed in one step: four bytes.
const QUAD_LEN: usize = 4;

/// Bytes of the scales of a group of a panel.
const SCALES_BYTES: usize = PANEL_LEN * 2;

/// Bytes of a line: a quad of each output of a panel, or two quads of 4 bits.
const LINE_BYTES: usize = PANEL_LEN * QUAD_LEN;

/// How weights are quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Quantization {
    /// 8 bits: 8.5 a weight, with its share of a scale.
    Q8,
    /// 4 bits: 4.5 a weight, with its share of a scale.
    Q4,
}

impl Quantization {
    /// The name people see: `q8` or `q4`.
    pub fn as_str(self) -> &'static str {
        match self {
            Quantization::Q8 => "q8",
            Quantization::Q4 => "q4",
        }
    }

    /// Lines of a group of a panel.
    const fn lines(self) -> usize {
        match self {
            Quantization::Q8 => GROUP_LEN / QUAD_LEN,
            Quantization::Q4 => GROUP_LEN / QUAD_LEN / 2,
        }
    }

    /// Bytes of a group of a panel.
    const fn group_bytes(self) -> usize {
        SCALES_BYTES + self.lines() * LINE_BYTES
    }

    /// Bytes of a panel with `cols` inputs.
    pub(crate) fn panel_bytes(self, cols: usize) -> usize {
        cols.div_ceil(GROUP_LEN) * self.group_bytes()
    }

    /// Bytes that a matrix of `rows` outputs and `cols` inputs takes in panels.
    ///
    /// # Panics
    /// When they are more than can be counted.
    pub fn bytes(self, rows: usize, cols: usize) -> usize {
        let panels = rows.div_ceil(PANEL_LEN);
        panels.checked_mul(self.panel_bytes(cols)).expect("the bytes can be counted")
    }
}

/// A group of quantised activations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Group {
    /// Values in -127..=127.
    values: [i8; GROUP_LEN],
    /// Their sum.
    sum: i32,
    /// What they are multiplied by.
    scale: f32,
}

impl Group {
    /// Values of f32 in whose place a row of `width` values lies in groups.
    pub(crate) const fn scratch_len(width: usize) -> usize {
        width.div_ceil(GROUP_LEN) * size_of::<Group>() / size_of::<f32>()
    }

    /// What no product may rely on.
    pub(crate) const POISON: Group =
        Group { values: [-127; GROUP_LEN], sum: i32::MIN, scale: f32::NAN };
}

/// Adding and taking away this rounds |v| < 2^22 to a whole number, ties to even; before it is
/// taken away, the low bits are that number.
const ROUNDING: f32 = 12_582_912.0;

/// The nearest whole number to |v| < 2^22, ties to even.
#[inline(always)]
fn round(v: f32) -> f32 {
    (v + ROUNDING) - ROUNDING
}

/// Widens some stored values.
#[inline(always)]
fn widen(values: Values<'_>, out: &mut [f32]) {
    match values {
        Values::F32(v) => out.copy_from_slice(v),
        Values::Bf16(v) => out.iter_mut().zip(v).for_each(|(o, x)| *o = x.to_f32()),
        Values::F16(v) => out.iter_mut().zip(v).for_each(|(o, x)| *o = x.to_f32()),
    }
}
