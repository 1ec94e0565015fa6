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
    /// One generated token: row `row` at position `position`, which reads and writes the slots at
    /// `(read, write)`.
    pub fn step(
        row: usize,
        position: usize,
        (read, write): (usize, usize),
        table: std::ops::Range<usize>,
    ) -> Span {
        Span {
            first_row: row,
            rows: 1,
            start: position,
            form: Form::Step,
            absorbed_from: 0,
            read,
            write,
            table,
            snapshots: 0..0,
        }
    }

    /// The rows of the span in the batch.
    pub fn batch_rows(&self) -> std::ops::Range<usize> {
        self.first_row..self.first_row + self.rows
    }

    /// Pairs of a row in `rows` and a position it sees: its own and all before it.
    pub(crate) fn seen(&self, rows: std::ops::Range<usize>) -> usize {
        rows.map(|row| self.start + row + 1).sum()
    }

    /// Position after the last row.
    pub fn end(&self) -> usize {
        self.start + self.rows
    }
}

/// The spans of a batch and their snapshots, checked once: what kernels rely on when they let
/// threads write one arena and one output together.
///
/// * spans cover rows `0..rows` in order, so no row belongs to two;
/// * each slot that is written, by a span or a snapshot, is apart from every other, and no span
///   reads what another writes;
/// * `absorbed_from` is at most `rows`, and snapshots rise within their span.
#[derive(Debug, Clone, Copy)]
pub struct Spans<'a> {
    spans: &'a [Span],
    snapshots: &'a [Snapshot],
    slot_bytes: usize,
}

impl<'a> Spans<'a> {
    /// Checks spans over `rows` rows of a batch, whose slots have `slot_bytes` bytes each.
    ///
    /// # Panics
    /// When they break a rule.
    pub fn new(
        spans: &'a [Span],
        snapshots: &'a [Snapshot],
        rows: usize,
        slot_bytes: usize,
    ) -> Self {
        let mut row = 0;
        let mut written = Vec::with_capacity(spans.len());
        for span in spans {
            assert!(span.first_row == row && span.rows > 0, "spans cover the rows in order");
            assert!(span.absorbed_from <= span.rows, "more rows expanded than there are");
            row += span.rows;
            let kept = &snapshots[span.snapshots.clone()];
            assert!(kept.iter().all(|s| (1..=span.rows).contains(&s.after_rows)));
            assert!(kept.is_sorted_by_key(|s| s.after_rows), "snapshots rise");
            written.extend(kept.iter().map(|s| s.slot));
            written.push(span.write);
        }
        assert_eq!(row, rows, "spans cover all rows");
        if slot_bytes > 0 {
            written.sort_unstable();
            assert!(written.iter().all(|slot| *slot != NO_SLOT), "a state is written nowhere");
            let apart = |pair: &[usize]| pair[1] - pair[0] >= slot_bytes;
            assert!(written.windows(2).all(apart), "a slot is written twice");
            for span in spans.iter().filter(|s| s.read != NO_SLOT && s.read != s.write) {
                let near = written.partition_point(|slot| *slot < span.read);
                let before = near.checked_sub(1).map(|i| written[i]);
                let clear = before.is_none_or(|slot| span.read - slot >= slot_bytes)
                    && written.get(near).is_none_or(|slot| slot - span.read >= slot_bytes);
                assert!(clear, "the slot at {} is read while it is written", span.read);
            }
        }
        Spans { spans, snapshots, slot_bytes }
    }

    /// The spans.
    pub fn all(&self) -> &'a [Span] {
        self.spans
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.spans.last().map_or(0, |span| span.first_row + span.rows)
    }

    /// The snapshots of a span.
    pub(crate) fn snapshots(&self, span: &Span) -> &'a [Snapshot] {
        &self.snapshots[span.snapshots.clone()]
    }

    /// Bytes of a slot.
    #[cfg(feature = "cuda")]
    pub(crate) fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Asserts that a part of a slot, `bytes` long from `at`, lies inside every slot.
    pub(crate) fn check_part(&self, at: usize, bytes: usize) {
        assert!(at + bytes <= self.slot_bytes, "{bytes} bytes at {at} leave the slot");
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
