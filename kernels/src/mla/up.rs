//! The up-projection, head by head, in the orders in which the two forms multiply by it.

use super::Shape;
use crate::arena::{Arena, ArenaError};
use crate::matrix::{Dtype, Matrix, Values};
use crate::panels::{Panels, StoredPanels, pack, pack_transposed};
use crate::quant::{self, Quantization, QuantizedPanels};

/// The up-projection of one layer in panels. Its key rows are there twice: a prompt multiplies
/// latents by them, an absorbed query their transpose. Quantised, each of the two orders has
/// scales along its own inputs.
#[derive(Debug)]
pub struct Up {
    shape: Shape,
    order: Order,
    memory: Arena,
}

/// How values lie in panels.
#[derive(Debug, Clone, Copy)]
enum Order {
    Stored(Dtype),
    Quantized(Quantization),
}

impl Order {
    /// Bytes of a matrix.
    fn bytes(self, (outputs, inputs): (usize, usize)) -> usize {
        match self {
            Order::Stored(dtype) => StoredPanels::len(dtype, outputs, inputs) * dtype.bytes(),
            Order::Quantized(quantization) => quantization.bytes(outputs, inputs),
        }
    }
}

/// A part of a head's up-projection.
#[derive(Debug, Clone, Copy)]
enum Part {
    /// `[nope, rank]`.
    Keys,
    /// `[rank, nope]`.
    KeysTransposed,
    /// `[value_dim, rank]`.
    Values,
}

impl Up {
    /// A copy of `matrix`, `[heads * (nope + value), rank]`, quantised if asked.
    ///
    /// # Errors
    /// When the system refuses the memory.
    ///
    /// # Panics
    /// When the matrix is not of the shape.
    pub fn new(
        shape: Shape,
        matrix: Matrix<'_>,
        quantization: Option<Quantization>,
    ) -> Result<Up, ArenaError> {
        assert_eq!((matrix.rows, matrix.cols), (shape.heads * shape.up(), shape.rank));
        let order = quantization.map_or(Order::Stored(matrix.values.dtype()), Order::Quantized);
        let mut up = Up { shape, order, memory: Arena::new(Up::held_bytes(shape, order))? };
        for head in 0..shape.heads {
            let rows = matrix.slice_rows(head * shape.up(), shape.up());
            let keys = rows.slice_rows(0, shape.nope);
            let values = rows.slice_rows(shape.nope, shape.value_dim);
            for (part, matrix) in [(Part::Keys, keys), (Part::Values, values)] {
                match order {
                    Order::Stored(_) => pack(matrix, up.part_mut(head, part)),
                    Order::Quantized(q) => quant::pack(q, matrix, up.part_mut(head, part)),
                }
            }
            let out = up.part_mut(head, Part::KeysTransposed);
            match order {
                Order::Stored(_) => pack_transposed(keys, out),
                Order::Quantized(q) => {
                    let transposed = keys.transposed();
                    let values = Values::F32(&transposed);
                    quant::pack(q, Matrix::new(shape.rank, shape.nope, values), out);
                }
            }
        }
        Ok(up)
    }

    /// The key rows of a head, `[nope, rank]`.
    pub(super) fn keys(&self, head: usize) -> Panels<'_> {
        self.panels(head, Part::Keys)
    }

    /// Their transpose, `[rank, nope]`.
    pub(super) fn keys_transposed(&self, head: usize) -> Panels<'_> {
        self.panels(head, Part::KeysTransposed)
    }

    /// The value rows of a head, `[value_dim, rank]`.
    pub(super) fn values(&self, head: usize) -> Panels<'_> {
        self.panels(head, Part::Values)
    }

    /// The shape it was made for.
    pub(super) fn shape(&self) -> Shape {
        self.shape
    }

    /// Bytes that a form reads of it: key rows in one order, and value rows.
    pub(super) fn bytes(&self) -> usize {
        let parts = [Part::Keys, Part::Values];
        let of_head: usize = parts.map(|part| self.order.bytes(part.size(self.shape))).iter().sum();
        self.shape.heads * of_head
    }

    fn part_mut(&mut self, head: usize, part: Part) -> &mut [u8] {
        let (offset, bytes) = self.place(head, part);
        self.memory.values_mut(offset, bytes)
    }

    fn panels(&self, head: usize, part: Part) -> Panels<'_> {
        let (offset, bytes) = self.place(head, part);
        let (outputs, inputs) = part.size(self.shape);
        match self.order {
            Order::Stored(dtype) => {
                let values = Values::of_arena(&self.memory, dtype, offset, bytes / dtype.bytes());
                Panels::Stored(StoredPanels::new(outputs, inputs, values))
            }
            Order::Quantized(quantization) => {
                let bytes = self.memory.values(offset, bytes);
                Panels::Quantized(QuantizedPanels::new(quantization, outputs, inputs, bytes))
            }
        }
    }

    /// Offset and length in bytes.
    fn place(&self, head: usize, part: Part) -> (usize, usize) {
        let bytes = |part: Part| self.order.bytes(part.size(self.shape));
        let before = match part {
            Part::Keys => 0,
            Part::KeysTransposed => bytes(Part::Keys),
            Part::Values => bytes(Part::Keys) + bytes(Part::KeysTransposed),
        };
        (head * Up::held_bytes_of_head(self.shape, self.order) + before, bytes(part))
    }

    fn held_bytes(shape: Shape, order: Order) -> usize {
        shape.heads * Up::held_bytes_of_head(shape, order)
    }

    fn held_bytes_of_head(shape: Shape, order: Order) -> usize {
        let parts = [Part::Keys, Part::KeysTransposed, Part::Values];
        parts.map(|part| order.bytes(part.size(shape))).iter().sum()
    }
}

impl Part {
    /// Outputs and inputs.
    fn size(self, shape: Shape) -> (usize, usize) {
        match self {
            Part::Keys => (shape.nope, shape.rank),
            Part::KeysTransposed => (shape.rank, shape.nope),
            Part::Values => (shape.value_dim, shape.rank),
        }
    }
}
