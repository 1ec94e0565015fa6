//! Softmax over tiles and segments for some query rows, on one thread.

use crate::gemm::tile::{Nn, Nt};
use crate::scratch::take;
use crate::simd::{Simd, load, math, store};
use crate::span::{BLOCK_LEN, SEGMENT_LEN};

/// Values of scratch for `rows` query rows with values of `value_dim`.
pub(crate) const fn core_scratch(rows: usize, value_dim: usize) -> usize {
    rows * (BLOCK_LEN + 4 + 2 * value_dim)
}

/// Keys and values of one tile: up to 64 positions.
#[derive(Clone, Copy)]
pub(crate) struct TileKeys<'a> {
    /// Keys, one every `key_stride` values.
    pub keys: &'a [f32],
    pub key_stride: usize,
    /// Values, one every `value_stride` values.
    pub values: &'a [f32],
    pub value_stride: usize,
}

/// Running softmax of some query rows.
///
/// Queries are ordered by position: `per_position` of them (heads that share keys) at `start`, as
/// many at `start + 1`, and so on.
pub(crate) struct Running<'a> {
    queries: &'a [f32],
    key_dim: usize,
    value_dim: usize,
    scale: f32,
    start: usize,
    per_position: usize,
    rows: usize,
    scores: &'a mut [f32],
    /// Maximum and sum of the current segment, then of all before it, per row.
    segment: &'a mut [f32],
    total: &'a mut [f32],
    /// Weighted values of the current segment, then of all before it.
    segment_values: &'a mut [f32],
    total_values: &'a mut [f32],
}

/// Widths of keys and values, and the factor on scores.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Widths {
    pub key: usize,
    pub value: usize,
    pub scale: f32,
}

impl<'a> Running<'a> {
    /// `queries` are rows of `widths.key` values, the first `per_position` of them at `start`.
    pub(crate) fn new(
        queries: &'a [f32],
        widths: Widths,
        start: usize,
        per_position: usize,
        mut scratch: &'a mut [f32],
    ) -> Self {
        let rows = queries.len() / widths.key;
        assert_eq!(rows % per_position, 0);
        let mut running = Running {
            queries,
            key_dim: widths.key,
            value_dim: widths.value,
            scale: widths.scale,
            start,
            per_position,
            rows,
            scores: take(&mut scratch, rows * BLOCK_LEN),
            segment: take(&mut scratch, rows * 2),
            total: take(&mut scratch, rows * 2),
            segment_values: take(&mut scratch, rows * widths.value),
            total_values: take(&mut scratch, rows * widths.value),
        };
        running.total_values.fill(0.0);
        empty(running.total);
        running.clear_segment();
        running
    }

    /// Positions the last query sees.
    pub(crate) fn end(&self) -> usize {
        self.start + self.rows / self.per_position
    }

    fn clear_segment(&mut self) {
        self.segment_values.fill(0.0);
        empty(self.segment);
    }

    /// Rows `0..tile_len` of a tile that starts at position `at` are seen by query row `row` up to
    /// its own position.
    fn visible(&self, row: usize, at: usize) -> usize {
        (self.start + row / self.per_position + 1).saturating_sub(at).min(BLOCK_LEN)
    }

    /// Attends to the tile at position `at`. Tiles come in order, from position 0.
    #[inline(always)]
    pub(crate) fn tile<S: Simd>(&mut self, s: S, at: usize, tile: TileKeys<'_>) {
        if at > 0 && at.is_multiple_of(SEGMENT_LEN) {
            self.merge_segment(s);
            self.clear_segment();
        }
        let mut row = 0;
        while row < self.rows {
            let seen = self.visible(row, at);
            // Rows that see a whole tile go together, others by position.
            let next = if seen == BLOCK_LEN { self.rows } else { row + self.per_position };
            if seen > 0 {
                self.rows_of_tile(s, row, next - row, seen, &tile);
            }
            row = next;
        }
    }

    /// Rows `first..first + rows` against the first `seen` keys of the tile.
    #[inline(always)]
    fn rows_of_tile<S: Simd>(
        &mut self,
        s: S,
        first: usize,
        rows: usize,
        seen: usize,
        tile: &TileKeys<'_>,
    ) {
        let (dk, dv) = (self.key_dim, self.value_dim);
        assert!((seen - 1) * tile.key_stride + dk <= tile.keys.len());
        assert!((seen - 1) * tile.value_stride + dv <= tile.values.len());
        // SAFETY: query rows first..first + rows exist, the tile holds `seen` keys by the
        // assertion, and each row has 64 scores.
        unsafe {
            let queries = (self.queries.as_ptr().add(first * dk), dk);
            let scores = (self.scores.as_mut_ptr().add(first * BLOCK_LEN), BLOCK_LEN);
            let keys = (tile.keys.as_ptr(), tile.key_stride);
            s.vectorize(Nt::new((rows, seen, dk), queries, keys, scores, false));
        }
        for row in first..first + rows {
            self.softmax_row(s, row, seen);
        }
        // SAFETY: as above for the scores, which are weights now; the tile holds `seen` values by
        // the assertion, and each row has dv weighted values.
        unsafe {
            let weights = (self.scores.as_ptr().add(first * BLOCK_LEN), (BLOCK_LEN, 1));
            let values = (tile.values.as_ptr(), tile.value_stride);
            let out = (self.segment_values.as_mut_ptr().add(first * dv), dv);
            s.vectorize(Nn::new((rows, dv, seen), weights, values, out, true));
        }
    }

    /// Turns a row's scores into weights relative to its running maximum.
    #[inline(always)]
    fn softmax_row<S: Simd>(&mut self, s: S, row: usize, seen: usize) {
        let scores = &mut self.scores[row * BLOCK_LEN..(row + 1) * BLOCK_LEN];
        scores[seen..].fill(f32::NEG_INFINITY);
        let scale = s.splat(self.scale);
        let mut best = s.splat(f32::NEG_INFINITY);
        let mut c = 0;
        while c < seen {
            let score = s.mul(load(s, &scores[c..], S::LANES), scale);
            store(s, &mut scores[c..], S::LANES, score);
            best = s.max(best, score);
            c += S::LANES;
        }
        let segment = &mut self.segment[row * 2..row * 2 + 2];
        let new = s.max_lane(best).max(segment[0]);
        let shrink = (segment[0] - new).exp();
        let mut total = s.splat(0.0);
        let mut c = 0;
        while c < seen {
            let x = s.sub(load(s, &scores[c..], S::LANES), s.splat(new));
            let weight = math::exp(s, x);
            store(s, &mut scores[c..], S::LANES, weight);
            total = s.add(total, weight);
            c += S::LANES;
        }
        segment[1] = segment[1] * shrink + s.sum(total);
        segment[0] = new;
        if shrink != 1.0 {
            let dv = self.value_dim;
            scale_row(s, &mut self.segment_values[row * dv..(row + 1) * dv], shrink);
        }
    }

    /// Adds the current segment to the total, row by row.
    #[inline(always)]
    fn merge_segment<S: Simd>(&mut self, s: S) {
        let dv = self.value_dim;
        for row in 0..self.rows {
            let (max, sum) = (self.segment[row * 2], self.segment[row * 2 + 1]);
            if max == f32::NEG_INFINITY {
                continue; // the row saw nothing of this segment
            }
            let total = &mut self.total[row * 2..row * 2 + 2];
            let new = total[0].max(max);
            let (keep, scale) = ((total[0] - new).exp(), (max - new).exp());
            total[1] = total[1] * keep + sum * scale;
            total[0] = new;
            let values = &mut self.total_values[row * dv..(row + 1) * dv];
            let added = &self.segment_values[row * dv..(row + 1) * dv];
            let mut c = 0;
            while c < dv {
                let n = (dv - c).min(S::LANES);
                let kept = s.mul(load(s, &values[c..], n), s.splat(keep));
                let new = s.fma(load(s, &added[c..], n), s.splat(scale), kept);
                store(s, &mut values[c..], n, new);
                c += n;
            }
        }
    }

    /// The attended values, `[rows][value_dim]`.
    #[inline(always)]
    pub(crate) fn finish<S: Simd>(mut self, s: S) -> &'a [f32] {
        self.merge_segment(s);
        for row in 0..self.rows {
            let values = &mut self.total_values[row * self.value_dim..(row + 1) * self.value_dim];
            scale_row(s, values, 1.0 / self.total[row * 2 + 1]);
        }
        self.total_values
    }
}

/// No key seen: maximum minus infinity, sum 0.
fn empty(pairs: &mut [f32]) {
    for pair in pairs.chunks_exact_mut(2) {
        pair.copy_from_slice(&[f32::NEG_INFINITY, 0.0]);
    }
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
