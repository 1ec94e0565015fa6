//! The definition: keys and values of every position, all scores of a row, one softmax. Both forms
//! of the fast kernel are held to it.

use super::{Inputs, Shape};
use crate::attention::Paged;
use crate::gemm;
use crate::gqa::naive::{dot, softmax, weighted_sum};
use crate::matrix::Matrix;
use crate::rows::{Rows, RowsMut};
use crate::span::{BLOCK_LEN, Span};

/// Attends every row of every span.
pub fn attend(
    shape: Shape,
    inputs: Inputs<'_, Matrix<'_>>,
    paged: Paged<'_>,
    mut out: RowsMut<'_>,
) {
    for span in paged.spans.all() {
        let latents = latents(shape, paged, span);
        for head in 0..shape.heads {
            let (keys, values) = expand(shape, inputs, &latents, head);
            for r in 0..span.rows {
                let q = &inputs.q.row(span.first_row + r)[head * shape.query()..][..shape.query()];
                let seen = 0..=span.start + r;
                let scores = seen.map(|i| dot(q, &keys[i]) * shape.scale()).collect();
                let out = out.row(span.first_row + r);
                let out = &mut out[head * shape.value_dim..][..shape.value_dim];
                weighted_sum(&softmax(scores), |i| &values[i], out);
            }
        }
    }
}

/// The cached rows of a span's sequence, gathered from their blocks.
fn latents(shape: Shape, paged: Paged<'_>, span: &Span) -> Vec<f32> {
    let mut rows = Vec::new();
    for block in 0..span.end().div_ceil(BLOCK_LEN) {
        rows.extend(paged.widened(span, block, 0, BLOCK_LEN * shape.row()));
    }
    rows.truncate(span.end() * shape.row());
    rows
}

/// Keys and values of one head at every position.
fn expand(
    shape: Shape,
    inputs: Inputs<'_, Matrix<'_>>,
    rows: &[f32],
    head: usize,
) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let rows = Rows::new(rows, shape.row());
    let up = inputs.up.slice_rows(head * shape.up(), shape.up());
    let mut both = vec![0.0; rows.count() * shape.up()];
    gemm::naive::gemm(rows.columns(0, shape.rank), up, RowsMut::new(&mut both, shape.up()));
    let split = both.chunks_exact(shape.up()).enumerate().map(|(i, both)| {
        let (key, value) = both.split_at(shape.nope);
        ([key, &rows.row(i)[shape.rank..]].concat(), value.to_vec())
    });
    split.unzip()
}
