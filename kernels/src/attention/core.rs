//! Softmax over the tiles of a segment for some query rows, on one thread.

use std::ops::Range;

use crate::gemm::tile::{Nn, Nt};
use crate::rows::Rows;
use crate::scratch::take;
use crate::simd::{Element, Simd, load, math, store};
use crate::span::{BLOCK_LEN, SEGMENT_LEN};

/// Query rows whose scores against a tile are kept at once: the nearest cache holds them.
const ROWS_AT_ONCE: usize = 64;

/// Values of scratch for `rows` query rows.
pub(crate) const fn core_scratch(rows: usize) -> usize {
    (if rows < ROWS_AT_ONCE { rows } else { ROWS_AT_ONCE }) * BLOCK_LEN
}

/// Values of a [`Softmax`] of `rows` query rows.
pub(crate) const fn softmax_len(rows: usize, value_dim: usize) -> usize {
    rows * (2 + value_dim)
}

/// Values of scratch of a [`Running`] of `rows` query rows.
pub(crate) const fn running_scratch(rows: usize, value_dim: usize) -> usize {
    2 * softmax_len(rows, value_dim) + core_scratch(rows)
}

/// Query rows, ordered by position: `per_position` of them (heads that share keys) at `start`, as
/// many at `start + 1`, and so on.
#[derive(Clone, Copy)]
pub(crate) struct Queries<'a> {
    /// `[rows][width]`.
    pub values: &'a [f32],
    pub rows: usize,
    pub start: usize,
    pub per_position: usize,
    /// Width of a key, and the factor on scores.
    pub width: usize,
    pub scale: f32,
}

impl Queries<'_> {
    /// Positions that row `row` sees of the tile that starts at position `at`.
    fn seen(&self, row: usize, at: usize) -> usize {
        (self.start + row / self.per_position + 1).saturating_sub(at).min(BLOCK_LEN)
    }

    /// Position after the last row's.
    pub(crate) fn end(&self) -> usize {
        self.start + self.rows / self.per_position
    }
}

/// Keys and values of one tile: up to 64 positions.
#[derive(Clone, Copy)]
pub(crate) struct Tile<'a, E> {
    /// Position of the first.
    pub at: usize,
    /// Keys.
    pub keys: Keys<'a, E>,
    /// Values, and the values from one row of theirs to the next.
    pub values: (&'a [E], usize),
    /// What to ask memory for while values are multiplied.
    pub fetch: &'a [u8],
}

/// Keys of a tile.
#[derive(Clone, Copy)]
pub(crate) enum Keys<'a, E> {
    /// `[width][64]`, and what to ask memory for while they are multiplied.
    Columns(&'a [E], &'a [u8]),
    /// `[64][width]`.
    Rows(&'a [E]),
}

/// What some query rows have attended to so far: per row, the sum of weighted values, then the
/// largest score and the sum of weights relative to it.
pub(crate) struct Softmax<'a> {
    rows: &'a mut [f32],
    width: usize,
}

impl<'a> Softmax<'a> {
    /// Nothing attended yet, by as many rows of values of `width` as `memory` holds.
    pub(crate) fn empty(memory: &'a mut [f32], width: usize) -> Self {
        assert_eq!(memory.len() % softmax_len(1, width), 0);
        let mut softmax = Softmax { rows: memory, width };
        softmax.clear();
        softmax
    }

    fn clear(&mut self) {
        for row in self.rows.chunks_exact_mut(softmax_len(1, self.width)) {
            row.fill(0.0);
            row[self.width] = f32::NEG_INFINITY;
        }
    }

    /// Attends to a tile, the next of its segment.
    #[inline(always)]
    pub(crate) fn tile<S: Simd, E: Element>(
        &mut self,
        s: S,
        queries: Queries<'_>,
        tile: Tile<'_, E>,
        scratch: &mut [f32],
    ) {
        let mut row = 0;
        while row < queries.rows {
            let seen = queries.seen(row, tile.at);
            // Rows that see a whole tile go together, others by position.
            let last = if seen == BLOCK_LEN { queries.rows } else { row + queries.per_position };
            let rows = row..last.min(row + ROWS_AT_ONCE);
            row = rows.end;
            if seen == 0 {
                continue;
            }
            let scores = &mut scratch[..rows.len() * BLOCK_LEN];
            match tile.keys {
                Keys::Columns(keys, fetch) => {
                    score_columns(s, queries, rows.clone(), seen, (keys, fetch), scores);
                }
                Keys::Rows(keys) => score_rows(s, queries, rows.clone(), seen, keys, scores),
            }
            for (row, scores) in rows.clone().zip(scores.chunks_exact_mut(BLOCK_LEN)) {
                self.weigh_row(s, row, queries.scale, seen, scores);
            }
            self.add_values(s, rows, seen, tile, scores);
        }
    }

    /// Turns a row's scores, `[64]`, into weights relative to its running maximum.
    #[inline(always)]
    fn weigh_row<S: Simd>(
        &mut self,
        s: S,
        row: usize,
        scale: f32,
        seen: usize,
        scores: &mut [f32],
    ) {
        scores[seen..].fill(f32::NEG_INFINITY);
        let scale = s.splat(scale);
        let mut best = s.splat(f32::NEG_INFINITY);
        let mut c = 0;
        while c < seen {
            let score = s.mul(load(s, &scores[c..], S::LANES), scale);
            store(s, &mut scores[c..], S::LANES, score);
            best = s.max(best, score);
            c += S::LANES;
        }
        let len = softmax_len(1, self.width);
        let (values, pair) = self.rows[row * len..(row + 1) * len].split_at_mut(self.width);
        let new = s.max_lane(best).max(pair[0]);
        let shrink = (pair[0] - new).exp();
        let mut total = s.splat(0.0);
        let mut c = 0;
        while c < seen {
            let x = s.sub(load(s, &scores[c..], S::LANES), s.splat(new));
            let weight = math::exp(s, x);
            store(s, &mut scores[c..], S::LANES, weight);
            total = s.add(total, weight);
            c += S::LANES;
        }
        pair[1] = pair[1] * shrink + s.sum(total);
        pair[0] = new;
        if shrink != 1.0 {
            scale_row(s, values, shrink);
        }
    }

    /// Adds the first `seen` values of the tile to some rows, by their weights, `[rows][64]`.
    #[inline(always)]
    fn add_values<S: Simd, E: Element>(
        &mut self,
        s: S,
        rows: Range<usize>,
        seen: usize,
        tile: Tile<'_, E>,
        weights: &[f32],
    ) {
        let (values, stride) = tile.values;
        let (width, len) = (self.width, softmax_len(1, self.width));
        assert!((seen - 1) * stride + width <= values.len());
        assert!(rows.len() * BLOCK_LEN <= weights.len() && rows.end * len <= self.rows.len());
        // SAFETY: each of the rows has 64 weights and `width` sums, the tile `seen` rows of
        // `width` values, by the assertions.
        unsafe {
            let weights = (weights.as_ptr(), (BLOCK_LEN, 1));
            let out = (self.rows.as_mut_ptr().add(rows.start * len), len);
            let values = (values.as_ptr(), stride);
            multiply(s, Nn::new((rows.len(), width, seen), weights, values, out, true), tile.fetch);
        }
    }

    /// Adds what `other` attended to, row by row.
    #[inline(always)]
    pub(crate) fn merge<S: Simd>(&mut self, s: S, other: &Softmax<'_>) {
        let len = softmax_len(1, self.width);
        assert_eq!((self.width, self.rows.len()), (other.width, other.rows.len()));
        let pairs = self.rows.chunks_exact_mut(len).zip(other.rows.chunks_exact(len));
        pairs.for_each(|(row, other)| merge_row(s, row, other));
    }

    /// Rows of values, of which each has two more behind it.
    #[inline(always)]
    pub(crate) fn finish<S: Simd>(self, s: S) -> Rows<'a> {
        let len = softmax_len(1, self.width);
        self.rows.chunks_exact_mut(len).for_each(|row| finish_row(s, row));
        Rows::new(self.rows, len).columns(0, self.width)
    }

    /// The rows as they are, for [`merge_row`] of another task.
    pub(crate) fn into_rows(self) -> std::slice::ChunksExact<'a, f32> {
        self.rows.chunks_exact(softmax_len(1, self.width))
    }
}

/// Adds what one row of a [`Softmax`] attended to, to another.
#[inline(always)]
pub(crate) fn merge_row<S: Simd>(s: S, row: &mut [f32], other: &[f32]) {
    let (values, pair) = row.split_at_mut(row.len() - 2);
    let (added, other) = other.split_at(values.len());
    let (max, sum) = (other[0], other[1]);
    if max == f32::NEG_INFINITY {
        return; // the row saw nothing there
    }
    let new = pair[0].max(max);
    let (keep, scale) = ((pair[0] - new).exp(), (max - new).exp());
    pair[1] = pair[1] * keep + sum * scale;
    pair[0] = new;
    let mut c = 0;
    while c < values.len() {
        let n = (values.len() - c).min(S::LANES);
        let kept = s.mul(load(s, &values[c..], n), s.splat(keep));
        let new = s.fma(load(s, &added[c..], n), s.splat(scale), kept);
        store(s, &mut values[c..], n, new);
        c += n;
    }
}

/// Divides the values of a row of a [`Softmax`] by the sum of their weights.
#[inline(always)]
pub(crate) fn finish_row<S: Simd>(s: S, row: &mut [f32]) {
    let (values, pair) = row.split_at_mut(row.len() - 2);
    scale_row(s, values, 1.0 / pair[1]);
}

/// Query rows that attend to all their positions, segment after segment.
pub(crate) struct Running<'a> {
    queries: Queries<'a>,
    segment: Softmax<'a>,
    total: Softmax<'a>,
    scratch: &'a mut [f32],
}

impl<'a> Running<'a> {
    /// `scratch` is [`running_scratch`] values.
    pub(crate) fn new(queries: Queries<'a>, value_dim: usize, mut scratch: &'a mut [f32]) -> Self {
        let len = softmax_len(queries.rows, value_dim);
        let segment = Softmax::empty(take(&mut scratch, len), value_dim);
        let total = Softmax::empty(take(&mut scratch, len), value_dim);
        Running { queries, segment, total, scratch }
    }

    /// Attends to a tile. Tiles come in order, from position 0.
    #[inline(always)]
    pub(crate) fn tile<S: Simd, E: Element>(&mut self, s: S, tile: Tile<'_, E>) {
        if tile.at > 0 && tile.at.is_multiple_of(SEGMENT_LEN) {
            self.total.merge(s, &self.segment);
            self.segment.clear();
        }
        self.segment.tile(s, self.queries, tile, self.scratch);
    }

    /// The attended values.
    #[inline(always)]
    pub(crate) fn finish<S: Simd>(mut self, s: S) -> Rows<'a> {
        self.total.merge(s, &self.segment);
        self.total.finish(s)
    }
}

/// Scores of some rows, `[rows][64]`, against keys in columns.
#[inline(always)]
fn score_columns<S: Simd, E: Element>(
    s: S,
    queries: Queries<'_>,
    rows: Range<usize>,
    seen: usize,
    (keys, fetch): (&[E], &[u8]),
    scores: &mut [f32],
) {
    let width = queries.width;
    // Whole vectors: what stands behind the last position seen is not looked at.
    let columns = seen.next_multiple_of(S::LANES);
    assert!(rows.end * width <= queries.values.len() && rows.len() * BLOCK_LEN <= scores.len());
    assert!(width * BLOCK_LEN <= keys.len() && columns <= BLOCK_LEN);
    // SAFETY: the rows have `width` values and 64 scores each, and each of the `width` rows of keys
    // `columns` values, by the assertions.
    unsafe {
        let queries = (queries.values.as_ptr().add(rows.start * width), (width, 1));
        let out = (scores.as_mut_ptr(), BLOCK_LEN);
        let size = (rows.len(), columns, width);
        multiply(s, Nn::new(size, queries, (keys.as_ptr(), BLOCK_LEN), out, false), fetch);
    }
}

/// Runs a product that asks memory for what comes next, if anything does.
#[inline(always)]
fn multiply<S: Simd, E: Element>(s: S, product: Nn<E, false>, next: &[u8]) {
    match next {
        [] => s.vectorize(product),
        next => s.vectorize(product.fetching::<S>(next)),
    }
}

/// Scores of some rows, `[rows][64]`, against keys in rows.
#[inline(always)]
fn score_rows<S: Simd, E: Element>(
    s: S,
    queries: Queries<'_>,
    rows: Range<usize>,
    seen: usize,
    keys: &[E],
    scores: &mut [f32],
) {
    let width = queries.width;
    assert!(rows.end * width <= queries.values.len() && rows.len() * BLOCK_LEN <= scores.len());
    assert!(seen * width <= keys.len() && seen <= BLOCK_LEN);
    // SAFETY: the rows have `width` values and 64 scores each, and the tile `seen` keys of `width`
    // values, by the assertions.
    unsafe {
        let queries = (queries.values.as_ptr().add(rows.start * width), width);
        let out = (scores.as_mut_ptr(), BLOCK_LEN);
        let size = (rows.len(), seen, width);
        s.vectorize(Nt::new(size, queries, (keys.as_ptr(), width), out, false));
    }
}

/// `values`, widened to `out`.
#[inline(always)]
pub(crate) fn widen<'a, S: Simd, E: Element>(s: S, values: &[E], out: &'a mut [f32]) -> &'a [f32] {
    assert_eq!(values.len(), out.len());
    let mut at = 0;
    while at < values.len() {
        let n = (values.len() - at).min(S::LANES);
        let p = values[at..].as_ptr();
        // SAFETY: n values remain from `at` on, and no more are read.
        let v = unsafe { if n == S::LANES { E::load(s, p) } else { E::load_head(s, p, n) } };
        store(s, &mut out[at..], n, v);
        at += n;
    }
    out
}

#[inline(always)]
fn scale_row<S: Simd>(s: S, row: &mut [f32], factor: f32) {
    let mut c = 0;
    while c < row.len() {
        let n = (row.len() - c).min(S::LANES);
        let value = s.mul(load(s, &row[c..], n), s.splat(factor));
        store(s, &mut row[c..], n, value);
        c += n;
    }
}
