//! What attention operators share: paged rows, and softmax over them in tiles and segments.
//!
//! Keys and values of a sequence lie in blocks of 64 positions, found through a table. A query row
//! at position `p` sees positions `0..=p`. It walks them in tiles of one block; tiles are gathered
//! in **segments** of 1,024 positions, each with its own running maximum, sum and weighted values,
//! and the segments are merged in order. Tiles and segments lie at absolute positions, so a row's
//! result depends on its position alone, not on how its prompt was cut or who computes it.

mod core;
mod segments;

pub(crate) use self::core::{
    Keys, Queries, Running, Softmax, Tile, core_scratch, running_scratch, softmax_len, widen,
};
pub(crate) use self::segments::{MOST_ROWS, RowTask, Segments, Totals, Unit, first_tasks};

use std::ops::Range;

use half::bf16;

use crate::arena::Arena;
use crate::rows::Rows;
use crate::simd::Element;
use crate::span::{BLOCK_LEN, Span, Spans};

/// How per-token rows are stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// As they are computed.
    #[default]
    F32,
    /// Rounded to bfloat16, to the nearest, ties to even.
    Bf16,
}

impl KvDtype {
    /// Bytes of a value.
    pub fn bytes(self) -> usize {
        match self {
            KvDtype::F32 => 4,
            KvDtype::Bf16 => 2,
        }
    }

    /// The name people see: `f32` or `bf16`.
    pub fn as_str(self) -> &'static str {
        match self {
            KvDtype::F32 => "f32",
            KvDtype::Bf16 => "bf16",
        }
    }
}

/// Where a layer's per-token rows lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvPlace {
    /// Byte offset in each block.
    pub at: usize,
    /// How they are stored.
    pub dtype: KvDtype,
}

/// The spans of a batch and the per-token rows of one layer.
#[derive(Debug, Clone, Copy)]
pub struct Paged<'a> {
    /// The spans.
    pub spans: Spans<'a>,
    /// Byte offsets of blocks; a span's `table` is its part.
    pub tables: &'a [usize],
    /// Where blocks lie.
    pub arena: &'a Arena,
    /// Where the layer's rows lie in a block.
    pub place: KvPlace,
}

impl<'a> Paged<'a> {
    /// `len` values of the layer in the block that holds position `block * 64` of `span`, `from`
    /// values after the layer's start.
    ///
    /// # Panics
    /// When the rows are not stored as `E`.
    pub(crate) fn block<E: Element>(
        &self,
        span: &Span,
        block: usize,
        from: usize,
        len: usize,
    ) -> &'a [E] {
        assert_eq!(size_of::<E>(), self.place.dtype.bytes());
        let table = &self.tables[span.table.clone()];
        self.arena.values(table[block] + self.place.at + from * size_of::<E>(), len)
    }

    /// The same values, widened.
    pub(crate) fn widened(&self, span: &Span, block: usize, from: usize, len: usize) -> Vec<f32> {
        match self.place.dtype {
            KvDtype::F32 => self.block(span, block, from, len).to_vec(),
            KvDtype::Bf16 => {
                self.block(span, block, from, len).iter().copied().map(bf16::to_f32).collect()
            }
        }
    }
}

/// Writes the rows of every span to their places: `rows` is `[rows][groups * width]`, a block holds
/// `[group][64][width]`.
///
/// Attention reads what was written, the current span's rows too, so this comes first.
///
/// # Panics
/// When a table is shorter than its span's end, or a place leaves the arena.
pub fn write_rows(
    (spans, tables): (&[Span], &[usize]),
    rows: Rows<'_>,
    width: usize,
    arena: &mut Arena,
    place: KvPlace,
) {
    match place.dtype {
        KvDtype::F32 => rows_as::<f32>((spans, tables), rows, width, arena, place.at),
        KvDtype::Bf16 => rows_as::<bf16>((spans, tables), rows, width, arena, place.at),
    }
}

fn rows_as<E: Element>(
    (spans, tables): (&[Span], &[usize]),
    rows: Rows<'_>,
    width: usize,
    arena: &mut Arena,
    at: usize,
) {
    for_each_row((spans, tables), rows, |block, place, row| {
        for (group, values) in row.chunks_exact(width).enumerate() {
            let place = (group * BLOCK_LEN + place) * width * size_of::<E>();
            let out: &mut [E] = arena.values_mut(block + at + place, width);
            out.iter_mut().zip(values).for_each(|(out, value)| *out = E::nearest(*value));
        }
    });
}

/// As [`write_rows`], for a block that holds `[width][64]`.
///
/// # Panics
/// As [`write_rows`].
pub fn write_columns(
    (spans, tables): (&[Span], &[usize]),
    rows: Rows<'_>,
    arena: &mut Arena,
    place: KvPlace,
) {
    match place.dtype {
        KvDtype::F32 => columns_as::<f32>((spans, tables), rows, arena, place.at),
        KvDtype::Bf16 => columns_as::<bf16>((spans, tables), rows, arena, place.at),
    }
}

fn columns_as<E: Element>(
    (spans, tables): (&[Span], &[usize]),
    rows: Rows<'_>,
    arena: &mut Arena,
    at: usize,
) {
    for_each_row((spans, tables), rows, |block, place, row| {
        let columns: &mut [E] = arena.values_mut(block + at, row.len() * BLOCK_LEN);
        for (value, column) in row.iter().zip(columns.chunks_exact_mut(BLOCK_LEN)) {
            column[place] = E::nearest(*value);
        }
    });
}

/// Calls `write` with each row of every span: the offset of its block, its place there, the row.
fn for_each_row(
    (spans, tables): (&[Span], &[usize]),
    rows: Rows<'_>,
    mut write: impl FnMut(usize, usize, &[f32]),
) {
    for span in spans {
        let table = &tables[span.table.clone()];
        for r in 0..span.rows {
            let position = span.start + r;
            let row = rows.row(span.first_row + r);
            write(table[position / BLOCK_LEN], position % BLOCK_LEN, row);
        }
    }
}

/// A task's rows: at most `most` rows of a span that lie in `range`.
pub(crate) fn row_tasks(
    spans: &[Span],
    most: usize,
    range: impl Fn(&Span) -> Range<usize>,
    tasks: &mut Vec<RowTask>,
) {
    tasks.clear();
    for (i, span) in spans.iter().enumerate() {
        let range = range(span);
        let mut at = range.start;
        while at < range.end {
            let end = range.end.min(at + most);
            tasks.push((i, at..end));
            at = end;
        }
    }
}
