//! Spans: which rows of a batch belong to which sequence, and where its state lies.

/// Tokens of one block of per-token memory.
pub const BLOCK_LEN: usize = 64;

/// Positions of one cell of the grid: prompt chunks of recurrent layers start at its multiples.
pub const CELL_LEN: usize = 64;

/// Attention walks its keys in segments of this many positions, merged in order.
pub const SEGMENT_LEN: usize = 1024;

/// A read offset that means the zero state.
pub const NO_SLOT: usize = usize::MAX;

/// How the rows of a span came to be (DESIGN.md rule 3): it chooses the arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// Tokens known when the request was submitted.
    Chunk,
    /// Generated tokens, row by row.
    Step,
}

/// A run of rows of one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// First row in the batch.
    pub first_row: usize,
    /// Number of rows, at least 1.
    pub rows: usize,
    /// Position of the first row in its sequence.
    pub start: usize,
    /// The form of every row.
    pub form: Form,
    /// Rows of the span before this one attend expanded in MLA, from it on absorbed.
    pub absorbed_from: usize,
    /// Byte offset of the slot the state is read from, or [`NO_SLOT`].
    pub read: usize,
    /// Byte offset of the slot the state is written to.
    pub write: usize,
    /// The sequence's part of the batch's block table: one entry per block, in order.
    pub table: std::ops::Range<usize>,
    /// The span's part of the batch's snapshots, by rising row.
    pub snapshots: std::ops::Range<usize>,
}

impl Span {
    /// The rows of the span in the batch.
    pub fn batch_rows(&self) -> std::ops::Range<usize> {
        self.first_row..self.first_row + self.rows
    }

    /// Position after the last row.
    pub fn end(&self) -> usize {
        self.start + self.rows
    }
}

/// A copy of the state to be written while a span passes over a grid position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Snapshot {
    /// Rows of the span the state has absorbed: `1..=rows`, at a grid position.
    pub after_rows: usize,
    /// Byte offset of the slot it is written to.
    pub slot: usize,
}
