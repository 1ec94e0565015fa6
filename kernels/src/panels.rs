//! Weights in the order in which products read them.
//!
//! ```text
//! panel 0: outputs 0..16                  panel 1: outputs 16..32    ...
//! f32, f16:  input 0: 16 values | input 1: 16 values | ...
//! bf16:      inputs 0 and 1: 16 pairs | inputs 2 and 3: 16 pairs | ...
//! q8:        inputs 0 to 31: 16 scales | 16 quads of inputs 0 to 3 | of 4 to 7 | ... of 28 to 31
//! q4:        inputs 0 to 31: 16 scales | 16 quads of inputs 0 to 3 in the low bits and of 4 to 7
//!            in the high bits | ... of 24 to 27 and 28 to 31
//! ```
//!
//! A product of one row reads a panel from its first byte to its last, and a line of the cache
//! holds 16 outputs of one f32 input, of two bf16 inputs, or of four or eight quantised ones.
//! Outputs beyond the last, and inputs that do not fill a pair or a group, are zero.

use bytemuck::cast_slice_mut;
use half::{bf16, f16};

use crate::arena::{Arena, ArenaError};
use crate::ceilings::Arithmetic;
use crate::device::{Compute, Cpu};
use crate::matrix::{Dtype, Matrix, Values};
use crate::quant::{self, Quantization, QuantizedPanels};

/// Outputs of a panel.
pub const PANEL_LEN: usize = 16;

/// A weight matrix in panels.
#[derive(Debug, Clone, Copy)]
pub enum Panels<'a> {
    /// Values as stored.
    Stored(StoredPanels<'a>),
    /// Quantised ones.
    Quantized(QuantizedPanels<'a>),
}

impl<'a> Panels<'a> {
    /// Outputs.
    pub fn rows(&self) -> usize {
        match self {
            Panels::Stored(panels) => panels.rows,
            Panels::Quantized(panels) => panels.rows(),
        }
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        match self {
            Panels::Stored(panels) => panels.cols,
            Panels::Quantized(panels) => panels.cols(),
        }
    }

    /// Bytes, padding included.
    pub fn bytes(&self) -> usize {
        match self {
            Panels::Stored(panels) => panels.values.len() * panels.values.dtype().bytes(),
            Panels::Quantized(panels) => panels.bytes().len(),
        }
    }

    /// The arithmetic of products with them.
    pub(crate) fn arithmetic(&self, cpu: &Cpu) -> Arithmetic {
        match self {
            Panels::Stored(panels) => match panels.values {
                Values::Bf16(_) if cpu.compute == Compute::Bf16 && cpu.isa.has_bf16() => {
                    Arithmetic::Bf16
                }
                _ => Arithmetic::F32,
            },
            Panels::Quantized(panels) => match panels.quantization() {
                Quantization::Q8 => Arithmetic::Int8,
                Quantization::Q4 => Arithmetic::Int4,
            },
        }
    }

    /// Copies the weights of output `row`, widened to single precision, into `out` (`cols`
    /// values).
    ///
    /// # Panics
    /// When there is no such output, or `out` has another length.
    pub fn copy_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows() && out.len() == self.cols(), "output {row} of {}", self.rows());
        match self {
            Panels::Stored(panels) => panels.copy_row(row, out),
            Panels::Quantized(panels) => panels.copy_row(row, out),
        }
    }
}

/// A weight matrix in panels, its values as stored.
#[derive(Debug, Clone, Copy)]
pub struct StoredPanels<'a> {
    rows: usize,
    cols: usize,
    values: Values<'a>,
}

/// A stored value as it lies in a panel.
pub(crate) trait PanelValue: Copy + Default {
    /// Inputs that lie beside each other for one output.
    const INPUTS: usize;
}

impl PanelValue for f32 {
    const INPUTS: usize = 1;
}

impl PanelValue for f16 {
    const INPUTS: usize = 1;
}

impl PanelValue for bf16 {
    const INPUTS: usize = 2;
}

/// Inputs that lie beside each other for one output of this type.
fn inputs(dtype: Dtype) -> usize {
    match dtype {
        Dtype::F32 => f32::INPUTS,
        Dtype::Bf16 => bf16::INPUTS,
        Dtype::F16 => f16::INPUTS,
    }
}

impl<'a> StoredPanels<'a> {
    /// Values that a matrix of `rows` outputs and `cols` inputs takes in panels.
    ///
    /// # Panics
    /// When they are more than can be counted.
    pub fn len(dtype: Dtype, rows: usize, cols: usize) -> usize {
        let rows = rows.checked_next_multiple_of(PANEL_LEN);
        let cols = cols.checked_next_multiple_of(inputs(dtype));
        let len = rows.zip(cols).and_then(|(rows, cols)| rows.checked_mul(cols));
        len.expect("the values can be counted")
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The values, panel after panel: [`StoredPanels::len`] of them.
    pub fn values(&self) -> Values<'a> {
        self.values
    }

    /// A view of `values`, in panels, as a matrix of `rows` outputs and `cols` inputs.
    ///
    /// # Panics
    /// When the number of values is not [`StoredPanels::len`].
    pub fn new(rows: usize, cols: usize, values: Values<'a>) -> StoredPanels<'a> {
        let len = StoredPanels::len(values.dtype(), rows, cols);
        assert_eq!(values.len(), len, "a [{rows}, {cols}] matrix in panels");
        StoredPanels { rows, cols, values }
    }

    /// Values of a panel.
    pub fn panel_values(&self) -> usize {
        PANEL_LEN * self.cols.next_multiple_of(inputs(self.values.dtype()))
    }

    /// Outputs `from..from + rows`; `from` begins a panel.
    ///
    /// # Panics
    /// When it does not, or the outputs leave the matrix.
    pub fn slice_rows(&self, from: usize, rows: usize) -> StoredPanels<'a> {
        assert!(from.is_multiple_of(PANEL_LEN), "output {from} begins no panel");
        assert!(from + rows <= self.rows, "outputs {from}+{rows} leave {}", self.rows);
        let first = from / PANEL_LEN * self.panel_values();
        let len = rows.div_ceil(PANEL_LEN) * self.panel_values();
        StoredPanels { rows, cols: self.cols, values: self.values.slice(first..first + len) }
    }

    fn copy_row(&self, row: usize, out: &mut [f32]) {
        let panel = row / PANEL_LEN * self.panel_values();
        let lane = row % PANEL_LEN;
        match self.values {
            Values::F32(v) => gather(&v[panel..], lane, out, |x| x),
            Values::Bf16(v) => gather(&v[panel..], lane, out, bf16::to_f32),
            Values::F16(v) => gather(&v[panel..], lane, out, f16::to_f32),
        }
    }
}

fn gather<E: PanelValue>(panel: &[E], lane: usize, out: &mut [f32], widen: impl Fn(E) -> f32) {
    let lines = panel.chunks_exact(PANEL_LEN * E::INPUTS);
    for (out, line) in out.chunks_mut(E::INPUTS).zip(lines) {
        let values = &line[lane * E::INPUTS..(lane + 1) * E::INPUTS];
        out.iter_mut().zip(values).for_each(|(out, value)| *out = widen(*value));
    }
}

/// Puts rows of a matrix as stored into the panels that they begin: `out` is the bytes of
/// [`StoredPanels::len`] values of its type.
///
/// # Panics
/// When it has another length, or is not aligned for the type.
pub fn pack(matrix: Matrix<'_>, out: &mut [u8]) {
    let (rows, cols) = (matrix.rows, matrix.cols);
    match matrix.values {
        Values::F32(values) => pack_values(values, rows, cols, cast_slice_mut(out)),
        Values::Bf16(values) => pack_values(values, rows, cols, cast_slice_mut(out)),
        Values::F16(values) => pack_values(values, rows, cols, cast_slice_mut(out)),
    }
}

/// As [`pack`] of the transpose of a matrix.
///
/// # Panics
/// As [`pack`].
pub fn pack_transposed(matrix: Matrix<'_>, out: &mut [u8]) {
    let (rows, cols) = (matrix.rows, matrix.cols);
    match matrix.values {
        Values::F32(values) => pack_columns(values, rows, cols, cast_slice_mut(out)),
        Values::Bf16(values) => pack_columns(values, rows, cols, cast_slice_mut(out)),
        Values::F16(values) => pack_columns(values, rows, cols, cast_slice_mut(out)),
    }
}

/// Each column of the matrix is an output.
fn pack_columns<E: PanelValue>(values: &[E], rows: usize, cols: usize, out: &mut [E]) {
    let padded = rows.next_multiple_of(E::INPUTS);
    assert_eq!(out.len(), cols.next_multiple_of(PANEL_LEN) * padded, "panels of another size");
    out.fill(E::default());
    for (input, row) in values.chunks_exact(cols.max(1)).enumerate() {
        let line = input / E::INPUTS * PANEL_LEN * E::INPUTS + input % E::INPUTS;
        for (output, value) in row.iter().enumerate() {
            let panel = output / PANEL_LEN * PANEL_LEN * padded;
            out[panel + line + output % PANEL_LEN * E::INPUTS] = *value;
        }
    }
}

fn pack_values<E: PanelValue>(values: &[E], rows: usize, cols: usize, out: &mut [E]) {
    let padded = cols.next_multiple_of(E::INPUTS);
    let panel_values = PANEL_LEN * padded;
    assert_eq!(out.len(), rows.next_multiple_of(PANEL_LEN) * padded, "panels of another size");
    if cols == 0 {
        return;
    }
    let panels = out.chunks_exact_mut(panel_values);
    for (panel, rows) in panels.zip(values.chunks(PANEL_LEN * cols)) {
        if rows.len() < PANEL_LEN * cols || padded > cols {
            panel.fill(E::default());
        }
        match E::INPUTS {
            1 => put_lines::<E, 1>(rows, cols, panel),
            _ => put_lines::<E, 2>(rows, cols, panel),
        }
    }
}

/// Puts rows beside each other, `N` inputs of each at a time.
fn put_lines<E: PanelValue, const N: usize>(rows: &[E], cols: usize, panel: &mut [E]) {
    // So many lines that they stay in the first-level cache while row after row goes there.
    const LINES: usize = 32;
    let (panel, _) = panel.as_chunks_mut::<N>();
    for from in (0..cols.div_ceil(N)).step_by(LINES) {
        let lines = &mut panel[from * PANEL_LEN..];
        for (lane, row) in rows.chunks_exact(cols).enumerate() {
            let (inputs, rest) = row[from * N..cols.min((from + LINES) * N)].as_chunks::<N>();
            for (line, inputs) in lines.chunks_exact_mut(PANEL_LEN).zip(inputs) {
                line[lane] = *inputs;
            }
            if !rest.is_empty() {
                lines[inputs.len() * PANEL_LEN + lane][..rest.len()].copy_from_slice(rest);
            }
        }
    }
}

/// Panels in memory of their own: for what is no part of a model.
#[derive(Debug)]
pub struct PackedMatrix {
    rows: usize,
    cols: usize,
    dtype: Dtype,
    quantization: Option<Quantization>,
    memory: Arena,
}

impl PackedMatrix {
    /// A copy of `matrix` in panels.
    ///
    /// # Errors
    /// When the system refuses the memory.
    pub fn new(matrix: Matrix<'_>) -> Result<PackedMatrix, ArenaError> {
        let (rows, cols, dtype) = (matrix.rows, matrix.cols, matrix.values.dtype());
        let bytes = StoredPanels::len(dtype, rows, cols) * dtype.bytes();
        let mut memory = Arena::new(bytes)?;
        pack(matrix, memory.values_mut(0, bytes));
        Ok(PackedMatrix { rows, cols, dtype, quantization: None, memory })
    }

    /// A quantised copy of `matrix` in panels.
    ///
    /// # Errors
    /// When the system refuses the memory.
    pub fn quantized(
        matrix: Matrix<'_>,
        quantization: Quantization,
    ) -> Result<PackedMatrix, ArenaError> {
        let (rows, cols, dtype) = (matrix.rows, matrix.cols, matrix.values.dtype());
        let bytes = quantization.bytes(rows, cols);
        let mut memory = Arena::new(bytes)?;
        quant::pack(quantization, matrix, memory.values_mut(0, bytes));
        Ok(PackedMatrix { rows, cols, dtype, quantization: Some(quantization), memory })
    }

    /// The panels.
    pub fn panels(&self) -> Panels<'_> {
        let (rows, cols) = (self.rows, self.cols);
        match self.quantization {
            None => {
                let len = StoredPanels::len(self.dtype, rows, cols);
                let values = Values::of_arena(&self.memory, self.dtype, 0, len);
                Panels::Stored(StoredPanels::new(rows, cols, values))
            }
            Some(quantization) => {
                let bytes = self.memory.values(0, quantization.bytes(rows, cols));
                Panels::Quantized(QuantizedPanels::new(quantization, rows, cols, bytes))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(panels: Panels<'_>) -> StoredPanels<'_> {
        match panels {
            Panels::Stored(panels) => panels,
            Panels::Quantized(_) => panic!("nobody quantised them"),
        }
    }

    /// Every value of every output comes back, of sizes around a panel and a pair.
    #[test]
    fn packing_keeps_every_value_and_pads_with_zeros() {
        for (rows, cols) in [(1, 1), (15, 7), (16, 8), (17, 9), (40, 3), (3, 0)] {
            let numbers: Vec<f32> = (1..=rows * cols).map(|i| i as f32).collect();
            let narrow: Vec<bf16> = numbers.iter().map(|x| bf16::from_f32(*x)).collect();
            let half: Vec<f16> = numbers.iter().map(|x| f16::from_f32(*x)).collect();
            for values in [Values::F32(&numbers), Values::Bf16(&narrow), Values::F16(&half)] {
                let matrix = Matrix::new(rows, cols, values);
                let packed = PackedMatrix::new(matrix).expect("memory");
                let panels = packed.panels();
                let mut sum = 0.0;
                for row in 0..rows {
                    let (mut expected, mut found) = (vec![0.0; cols], vec![f32::NAN; cols]);
                    matrix.copy_row(row, &mut expected);
                    panels.copy_row(row, &mut found);
                    assert_eq!(found, expected, "row {row} of {rows}x{cols}");
                    sum += expected.iter().sum::<f32>();
                }
                let all: f32 = match stored(panels).values() {
                    Values::F32(v) => v.iter().sum(),
                    Values::Bf16(v) => v.iter().map(|x| x.to_f32()).sum(),
                    Values::F16(v) => v.iter().map(|x| x.to_f32()).sum(),
                };
                assert_eq!(all, sum, "padding is zero");
            }
        }
    }

    #[test]
    fn packing_the_transpose_is_packing_what_was_transposed() {
        let (rows, cols) = (17, 21);
        let at = |row: usize, col: usize| bf16::from_f32((row * cols + col) as f32);
        let plain: Vec<bf16> = (0..rows * cols).map(|i| at(i / cols, i % cols)).collect();
        let turned: Vec<bf16> = (0..rows * cols).map(|i| at(i % rows, i / rows)).collect();
        let turned = PackedMatrix::new(Matrix::new(cols, rows, Values::Bf16(&turned)));
        let turned = turned.expect("memory");
        let mut memory =
            Arena::new(StoredPanels::len(Dtype::Bf16, cols, rows) * 2).expect("memory");
        let bytes = memory.bytes();
        memory.values_mut::<u8>(0, bytes).fill(0xff);
        pack_transposed(Matrix::new(rows, cols, Values::Bf16(&plain)), memory.values_mut(0, bytes));
        let Values::Bf16(expected) = stored(turned.panels()).values() else { panic!("bf16") };
        assert_eq!(memory.values::<bf16>(0, bytes / 2), expected);
    }

    #[test]
    fn a_slice_of_outputs_begins_with_a_panel() {
        let numbers: Vec<f32> = (0..50 * 3).map(|i| i as f32).collect();
        let packed = PackedMatrix::new(Matrix::new(50, 3, Values::F32(&numbers)));
        let packed = packed.expect("memory");
        let slice = stored(packed.panels()).slice_rows(32, 18);
        let mut row = [0.0; 3];
        slice.copy_row(17, &mut row);
        assert_eq!(row, [147.0, 148.0, 149.0]);
        let odd = std::panic::catch_unwind(|| stored(packed.panels()).slice_rows(8, 8).rows);
        assert!(odd.is_err());
    }
}
