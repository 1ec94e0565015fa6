//! The up-projection, head by head, in the orders in which the two forms multiply by it.

use super::Shape;
use crate::arena::{Arena, ArenaError};
use crate::matrix::{Dtype, Matrix, Values};
use crate::panels::{StoredPanels, pack, pack_transposed};

/// The up-projection of one layer in panels. Its key rows are there twice: a prompt multiplies
/// latents by them, an absorbed query their transpose.
#[derive(Debug)]
pub struct Up {
    shape: Shape,
    dtype: Dtype,
    memory: Arena,
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
    /// A copy of `matrix`, `[heads * (nope + value), rank]`.
    ///
    /// # Errors
    /// When the system refuses the memory.
    ///
    /// # Panics
    /// When the matrix is not of the shape.
    pub fn new(shape: Shape, matrix: Matrix<'_>) -> Result<Up, ArenaError> {
        assert_eq!((matrix.rows, matrix.cols), (shape.heads * shape.up(), shape.rank));
        let dtype = matrix.values.dtype();
        let bytes = shape.heads * Up::head_values(shape, dtype) * dtype.bytes();
        let mut up = Up { shape, dtype, memory: Arena::new(bytes)? };
        for head in 0..shape.heads {
            let rows = matrix.slice_rows(head * shape.up(), shape.up());
            let keys = rows.slice_rows(0, shape.nope);
            pack(keys, up.part_mut(head, Part::Keys));
            pack_transposed(keys, up.part_mut(head, Part::KeysTransposed));
            let values = rows.slice_rows(shape.nope, shape.value_dim);
            pack(values, up.part_mut(head, Part::Values));
        }
        Ok(up)
    }

    /// The key rows of a head, `[nope, rank]`.
    pub(super) fn keys(&self, head: usize) -> StoredPanels<'_> {
        self.panels(head, Part::Keys)
    }

    /// Their transpose, `[rank, nope]`.
    pub(super) fn keys_transposed(&self, head: usize) -> StoredPanels<'_> {
        self.panels(head, Part::KeysTransposed)
    }

    /// The value rows of a head, `[value_dim, rank]`.
    pub(super) fn values(&self, head: usize) -> StoredPanels<'_> {
        self.panels(head, Part::Values)
    }

    /// The shape it was made for.
    pub(super) fn shape(&self) -> Shape {
        self.shape
    }

    /// How the values are encoded.
    pub(super) fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn part_mut(&mut self, head: usize, part: Part) -> &mut [u8] {
        let (offset, len) = self.place(head, part);
        self.memory.values_mut(offset, len * self.dtype.bytes())
    }

    fn panels(&self, head: usize, part: Part) -> StoredPanels<'_> {
        let (offset, len) = self.place(head, part);
        let (rows, cols) = part.size(self.shape);
        StoredPanels::new(rows, cols, Values::of_arena(&self.memory, self.dtype, offset, len))
    }

    /// Offset in bytes, and number of values.
    fn place(&self, head: usize, part: Part) -> (usize, usize) {
        let len = |part: Part| part.values(self.shape, self.dtype);
        let before = match part {
            Part::Keys => 0,
            Part::KeysTransposed => len(Part::Keys),
            Part::Values => len(Part::Keys) + len(Part::KeysTransposed),
        };
        let head = head * Up::head_values(self.shape, self.dtype);
        ((head + before) * self.dtype.bytes(), len(part))
    }

    fn head_values(shape: Shape, dtype: Dtype) -> usize {
        let parts = [Part::Keys, Part::KeysTransposed, Part::Values];
        parts.map(|part| part.values(shape, dtype)).iter().sum()
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

    fn values(self, shape: Shape, dtype: Dtype) -> usize {
        let (rows, cols) = self.size(shape);
        StoredPanels::len(dtype, rows, cols)
    }
}
