//! Weights as they lie in their file.

use half::{bf16, f16};

/// How a stored value is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE single precision, little-endian.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl Dtype {
    /// Bytes of one value.
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
        }
    }
}

/// The values of a weight matrix, row after row.
#[derive(Debug, Clone, Copy)]
pub enum Values<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// bfloat16.
    Bf16(&'a [bf16]),
    /// Half precision.
    F16(&'a [f16]),
}

/// A weight matrix `[rows, cols]` as stored: `rows` outputs, `cols` inputs, inputs contiguous.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// The values.
    pub values: Values<'a>,
}

impl<'a> Matrix<'a> {
    /// A view of `values` as `[rows, cols]`.
    ///
    /// # Panics
    /// When the number of values is not `rows * cols`.
    pub fn new(rows: usize, cols: usize, values: Values<'a>) -> Self {
        let len = match values {
            Values::F32(v) => v.len(),
            Values::Bf16(v) => v.len(),
            Values::F16(v) => v.len(),
        };
        assert_eq!(len, rows * cols, "a [{rows}, {cols}] matrix over {len} values");
        Matrix { rows, cols, values }
    }

    /// Rows `from..from + rows` of the matrix.
    pub fn slice_rows(&self, from: usize, rows: usize) -> Matrix<'a> {
        let at = from * self.cols..(from + rows) * self.cols;
        let values = match self.values {
            Values::F32(v) => Values::F32(&v[at]),
            Values::Bf16(v) => Values::Bf16(&v[at]),
            Values::F16(v) => Values::F16(&v[at]),
        };
        Matrix { rows, cols: self.cols, values }
    }

    /// Copies row `row`, widened to single precision, into `out` (`cols` values).
    pub fn copy_row(&self, row: usize, out: &mut [f32]) {
        let at = row * self.cols..(row + 1) * self.cols;
        match self.values {
            Values::F32(v) => out.copy_from_slice(&v[at]),
            Values::Bf16(v) => out.iter_mut().zip(&v[at]).for_each(|(o, x)| *o = x.to_f32()),
            Values::F16(v) => out.iter_mut().zip(&v[at]).for_each(|(o, x)| *o = x.to_f32()),
        }
    }
}
