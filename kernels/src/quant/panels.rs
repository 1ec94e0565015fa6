//! Quantised weights as they lie in panels.

use half::f16;

use super::{GROUP_LEN, LINE_BYTES, QUAD_LEN, Quantization, SCALES_BYTES};
use crate::panels::PANEL_LEN;

/// A weight matrix in panels, quantised: their layout is in [`crate::panels`].
#[derive(Debug, Clone, Copy)]
pub struct QuantizedPanels<'a> {
    quantization: Quantization,
    rows: usize,
    cols: usize,
    bytes: &'a [u8],
}

impl<'a> QuantizedPanels<'a> {
    /// A view of `bytes`, in panels, as a matrix of `rows` outputs and `cols` inputs.
    ///
    /// # Panics
    /// When their number is not [`Quantization::bytes`], or scales would not be aligned.
    pub fn new(quantization: Quantization, rows: usize, cols: usize, bytes: &'a [u8]) -> Self {
        let len = quantization.bytes(rows, cols);
        assert_eq!(bytes.len(), len, "a [{rows}, {cols}] matrix in panels");
        assert!(bytes.as_ptr().cast::<f16>().is_aligned(), "scales at odd bytes");
        QuantizedPanels { quantization, rows, cols, bytes }
    }

    /// How they are quantised.
    pub fn quantization(&self) -> Quantization {
        self.quantization
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// All panels: [`Quantization::bytes`] bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Outputs `from..from + rows`; `from` begins a panel.
    ///
    /// # Panics
    /// When it does not, or the outputs leave the matrix.
    pub fn slice_rows(&self, from: usize, rows: usize) -> QuantizedPanels<'a> {
        assert!(from.is_multiple_of(PANEL_LEN), "output {from} begins no panel");
        assert!(from + rows <= self.rows, "outputs {from}+{rows} leave {}", self.rows);
        let panel_bytes = self.quantization.panel_bytes(self.cols);
        let first = from / PANEL_LEN * panel_bytes;
        let bytes = &self.bytes[first..first + rows.div_ceil(PANEL_LEN) * panel_bytes];
        QuantizedPanels { rows, bytes, ..*self }
    }

    /// The weights of output `row`: values times scales.
    pub(crate) fn copy_row(&self, row: usize, out: &mut [f32]) {
        let panel_bytes = self.quantization.panel_bytes(self.cols);
        let panel = &self.bytes[row / PANEL_LEN * panel_bytes..];
        let lane = row % PANEL_LEN;
        let groups = panel.chunks_exact(self.quantization.group_bytes());
        for (out, group) in out.chunks_mut(GROUP_LEN).zip(groups) {
            let (scales, lines) = group.split_at(SCALES_BYTES);
            let scale = f16::from_le_bytes([scales[2 * lane], scales[2 * lane + 1]]).to_f32();
            for (i, out) in out.iter_mut().enumerate() {
                let (quad, at) = (i / QUAD_LEN, QUAD_LEN * lane + i % QUAD_LEN);
                let value = match self.quantization {
                    Quantization::Q8 => lines[quad * LINE_BYTES + at] as i8,
                    Quantization::Q4 => {
                        let pair = lines[quad / 2 * LINE_BYTES + at];
                        (pair >> (4 * (quad % 2)) & 0x0f) as i8 - 8
                    }
                };
                *out = f32::from(value) * scale;
            }
        }
    }
}
