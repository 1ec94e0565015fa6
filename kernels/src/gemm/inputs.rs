//! Rows in the form in which weights want them: as they are, or in fewer bits.

use std::ops::Range;

use super::pairs::{MultiplyPairs, Pair};
use super::strip::Multiply;
use crate::device::{Compute, Cpu};
use crate::matrix::Values;
use crate::panels::Panels;
use crate::quant::strip::MultiplyInt8;
use crate::quant::{GROUP_LEN, Group};
use crate::rows::Rows;

/// How rows lie for a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// Single precision.
    Stored,
    /// Pairs of bf16 values.
    Bf16,
    /// Groups of 8-bit integers.
    Int8,
}

impl Form {
    /// The form in which `w` wants the rows it multiplies.
    pub(crate) fn of(cpu: &Cpu, w: Panels<'_>) -> Form {
        match w {
            Panels::Quantized(_) => Form::Int8,
            Panels::Stored(w) if matches!(w.values(), Values::Bf16(_)) => match cpu.compute {
                Compute::F32 => Form::Stored,
                Compute::Bf16 => Form::Bf16,
            },
            Panels::Stored(_) => Form::Stored,
        }
    }

    /// Values, pairs or groups of a row of `width` values.
    pub(crate) fn per_row(self, width: usize) -> usize {
        match self {
            Form::Stored => width,
            Form::Bf16 => width.div_ceil(2),
            Form::Int8 => width.div_ceil(GROUP_LEN),
        }
    }

    /// Bytes of a row of `width` values.
    pub(crate) fn row_bytes(self, width: usize) -> usize {
        let unit = match self {
            Form::Stored => size_of::<f32>(),
            Form::Bf16 => size_of::<Pair>(),
            Form::Int8 => size_of::<Group>(),
        };
        self.per_row(width) * unit
    }
}

/// Rows in one of the forms; pairs and groups row after row, with so many of them in each.
#[derive(Clone, Copy)]
pub(crate) enum Inputs<'a> {
    Stored(Rows<'a>),
    Bf16(&'a [Pair], usize),
    Int8(&'a [Group], usize),
}

impl Inputs<'_> {
    /// Rows `rows` against outputs `outputs` of `w`, the first of which begins a panel. The first
    /// output of the first row goes to `out`, which comes with the values from one row to the next.
    ///
    /// # Panics
    /// When there are no such rows or outputs, or `w` wants another form.
    ///
    /// # Safety
    /// As many rows of `out` are valid for writes and reads of as many outputs, and nothing else
    /// uses them meanwhile.
    pub(crate) unsafe fn multiply(
        self,
        cpu: &Cpu,
        rows: Range<usize>,
        (w, outputs): (Panels<'_>, Range<usize>),
        out: (*mut f32, usize),
        add: bool,
    ) {
        let count = rows.len();
        match (self, w) {
            (Inputs::Stored(x), Panels::Stored(w)) => {
                assert!(w.cols() == x.width() && rows.end <= x.count(), "rows for other weights");
                let w = w.slice_rows(outputs.start, outputs.len());
                let first = x.data()[rows.start * x.stride()..].as_ptr();
                // SAFETY: the rows are those of `x` by the assertion, those of `out` the caller's
                // promise.
                cpu.isa.run(unsafe { Multiply::new(count, (first, x.stride()), w, out, add) });
            }
            (Inputs::Bf16(x, per_row), Panels::Stored(w)) => {
                let x = &x[rows.start * per_row..rows.end * per_row];
                let Values::Bf16(w) = w.slice_rows(outputs.start, outputs.len()).values() else {
                    panic!("pairs of bf16 values for other weights");
                };
                let w = (w, outputs.len());
                // SAFETY: the rows of `out` are the caller's promise.
                cpu.isa.run(unsafe { MultiplyPairs::new(count, x, w, out, add) });
            }
            (Inputs::Int8(x, per_row), Panels::Quantized(w)) => {
                let x = &x[rows.start * per_row..rows.end * per_row];
                let w = w.slice_rows(outputs.start, outputs.len());
                // SAFETY: the rows of `out` are the caller's promise.
                cpu.isa.run(unsafe { MultiplyInt8::new(count, x, w, out, add) });
            }
            _ => panic!("rows in a form for other weights"),
        }
    }
}
