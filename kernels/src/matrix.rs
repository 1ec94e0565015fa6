//! Weights as they lie in their file.

use std::ops::Range;

use half::{bf16, f16};

use crate::arena::Arena;

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

/// The values of a weight matrix.
#[derive(Debug, Clone, Copy)]
pub enum Values<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// bfloat16.
    Bf16(&'a [bf16]),
    /// Half precision.
    F16(&'a [f16]),
}

impl<'a> Values<'a> {
    /// `len` values at byte `offset` of an arena.
    ///
    /// # Panics
    /// As [`Arena::values`].
    pub fn of_arena(arena: &'a Arena, dtype: Dtype, offset: usize, len: usize) -> Values<'a> {
        match dtype {
            Dtype::F32 => Values::F32(arena.values(offset, len)),
            Dtype::Bf16 => Values::Bf16(arena.values(offset, len)),
            Dtype::F16 => Values::F16(arena.values(offset, len)),
        }
    }

    /// The values encoded in `bytes`, little-endian and aligned.
    ///
    /// # Panics
    /// When the bytes are not whole values or not aligned for them.
    pub fn of_bytes(bytes: &'a [u8], dtype: Dtype) -> Values<'a> {
        match dtype {
            Dtype::F32 => Values::F32(bytemuck::cast_slice(bytes)),
            Dtype::Bf16 => Values::Bf16(bytemuck::cast_slice(bytes)),
            Dtype::F16 => Values::F16(bytemuck::cast_slice(bytes)),
        }
    }

    /// How they are encoded.
    pub fn dtype(&self) -> Dtype {
        match self {
            Values::F32(_) => Dtype::F32,
            Values::Bf16(_) => Dtype::Bf16,
            Values::F16(_) => Dtype::F16,
        }
    }

    /// Their bytes.
    pub fn bytes(&self) -> &'a [u8] {
        match self {
            Values::F32(v) => bytemuck::cast_slice(v),
            Values::Bf16(v) => bytemuck::cast_slice(v),
            Values::F16(v) => bytemuck::cast_slice(v),
        }
    }

    /// How many they are.
    pub fn len(&self) -> usize {
        match self {
            Values::F32(v) => v.len(),
            Values::Bf16(v) => v.len(),
            Values::F16(v) => v.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Those at `range`.
    ///
    /// # Panics
    /// When the range leaves them.
    pub fn slice(&self, range: Range<usize>) -> Values<'a> {
        match self {
            Values::F32(v) => Values::F32(&v[range]),
            Values::Bf16(v) => Values::Bf16(&v[range]),
            Values::F16(v) => Values::F16(&v[range]),
        }
    }
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
        let len = values.len();
        assert_eq!(len, rows * cols, "a [{rows}, {cols}] matrix over {len} values");
        Matrix { rows, cols, values }
    }

    /// Rows `from..from + rows` of the matrix.
    pub fn slice_rows(&self, from: usize, rows: usize) -> Matrix<'a> {
        let at = from * self.cols..(from + rows) * self.cols;
        Matrix { rows, cols: self.cols, values: self.values.slice(at) }
    }

    /// Its columns as rows, `[cols, rows]`, widened to single precision.
    pub(crate) fn transposed(&self) -> Vec<f32> {
        let mut row = vec![0.0; self.cols];
        let mut out = vec![0.0; self.rows * self.cols];
        for i in 0..self.rows {
            self.copy_row(i, &mut row);
            row.iter().enumerate().for_each(|(j, value)| out[j * self.rows + i] = *value);
        }
        out
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
