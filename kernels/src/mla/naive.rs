//! The definition: keys and values of every position, all scores of a row, one softmax. Both forms
//! of the fast kernel are held to it. With a quantised up-projection they round different rows, so
//! [`attend_quantized`] defines each of them.

use super::{Inputs, Shape};
use crate::attention::Paged;
use crate::gemm;
use crate::gqa::naive::{dot, softmax, weighted_sum};
use crate::matrix::{Matrix, Values};
use crate::quant::{self, Quantization};
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
            let both = expand(shape, inputs.up, &latents, head, gemm::naive::gemm);
            for r in 0..span.rows {
                expanded_row(shape, inputs.q, (span, r, head), &both, &mut out);
            }
        }
    }
}

/// As [`attend`], with the up-projection quantised: rows in the expanded form multiply its rows by
/// quantised latents; others multiply the transpose of its key rows by their quantised query, and
/// its value rows by the quantised latent they attended.
pub fn attend_quantized(
    shape: Shape,
    quantization: Quantization,
    inputs: Inputs<'_, Matrix<'_>>,
    paged: Paged<'_>,
    mut out: RowsMut<'_>,
) {
    let gemm = |x: Rows<'_>, w: Matrix<'_>, out: RowsMut<'_>| {
        quant::naive::gemm(quantization, x, w, out);
    };
    for span in paged.spans.all() {
        let latents = latents(shape, paged, span);
        for head in 0..shape.heads {
            let both = expand(shape, inputs.up, &latents, head, gemm);
            for r in 0..span.absorbed_from {
                expanded_row(shape, inputs.q, (span, r, head), &both, &mut out);
            }
            for r in span.absorbed_from..span.rows {
                let q = query(shape, inputs.q, (span, r, head));
                let up = inputs.up.slice_rows(head * shape.up(), shape.up());
                let keys = up.slice_rows(0, shape.nope).transposed();
                let keys = Matrix::new(shape.rank, shape.nope, Values::F32(&keys));
                let mut absorbed = vec![0.0; shape.rank];
                let nope = Rows::new(&q[..shape.nope], shape.nope);
                gemm(nope, keys, RowsMut::new(&mut absorbed, shape.rank));
                absorbed.extend(&q[shape.nope..]);
                let rows = Rows::new(&latents, shape.row());
                let seen = 0..=span.start + r;
                let scores = seen.map(|i| dot(&absorbed, rows.row(i)) * shape.scale()).collect();
                let mut attended = vec![0.0; shape.rank];
                let latent = |i| &rows.row(i)[..shape.rank];
                weighted_sum(&softmax(scores), latent, &mut attended);
                let values = up.slice_rows(shape.nope, shape.value_dim);
                let out = &mut out.row(span.first_row + r)[head * shape.value_dim..];
                let out = RowsMut::new(&mut out[..shape.value_dim], shape.value_dim);
                gemm(Rows::new(&attended, shape.rank), values, out);
            }
        }
    }
}

/// A head's query of a row of a span.
fn query<'a>(shape: Shape, q: Rows<'a>, (span, r, head): (&Span, usize, usize)) -> &'a [f32] {
    &q.row(span.first_row + r)[head * shape.query()..][..shape.query()]
}

/// Attends a row of a span to the keys and values of a head.
fn expanded_row(
    shape: Shape,
    q: Rows<'_>,
    (span, r, head): (&Span, usize, usize),
    (keys, values): &(Vec<Vec<f32>>, Vec<Vec<f32>>),
    out: &mut RowsMut<'_>,
) {
    let q = query(shape, q, (span, r, head));
    let seen = 0..=span.start + r;
    let scores = seen.map(|i| dot(q, &keys[i]) * shape.scale()).collect();
    let out = &mut out.row(span.first_row + r)[head * shape.value_dim..][..shape.value_dim];
    weighted_sum(&softmax(scores), |i| &values[i], out);
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
    up: Matrix<'_>,
    rows: &[f32],
    head: usize,
    gemm: impl Fn(Rows<'_>, Matrix<'_>, RowsMut<'_>),
) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let rows = Rows::new(rows, shape.row());
    let up = up.slice_rows(head * shape.up(), shape.up());
    let mut both = vec![0.0; rows.count() * shape.up()];
    gemm(rows.columns(0, shape.rank), up, RowsMut::new(&mut both, shape.up()));
    let split = both.chunks_exact(shape.up()).enumerate().map(|(i, both)| {
        let (key, value) = both.split_at(shape.nope);
        ([key, &rows.row(i)[shape.rank..]].concat(), value.to_vec())
    });
    split.unzip()
}
