//! The definition: all scores of a row, one softmax.

use super::Shape;
use crate::attention::Paged;
use crate::rows::{Rows, RowsMut};
use crate::span::BLOCK_LEN;

/// Attends every row of every span; `q` and `out` are `[rows][heads * head_dim]`.
pub fn attend(shape: Shape, q: Rows<'_>, paged: Paged<'_>, mut out: RowsMut<'_>) {
    let (dim, group) = (shape.head_dim, shape.heads / shape.kv_heads);
    let part = BLOCK_LEN * dim;
    for span in paged.spans.all() {
        for head in 0..shape.heads {
            let kv = head / group * part;
            let (mut keys, mut values) = (Vec::new(), Vec::new());
            for block in 0..span.end().div_ceil(BLOCK_LEN) {
                let columns = paged.widened(span, block, kv, part);
                let rows = paged.widened(span, block, shape.keys_in_block() + kv, part);
                let key = |i| columns[i..].iter().step_by(BLOCK_LEN).copied().collect::<Vec<f32>>();
                keys.extend((0..BLOCK_LEN).map(key));
                values.extend(rows.chunks_exact(dim).map(<[f32]>::to_vec));
            }
            for r in 0..span.rows {
                let columns = head * dim..(head + 1) * dim;
                let q = &q.row(span.first_row + r)[columns.clone()];
                let seen = 0..=span.start + r;
                let scores = seen.map(|i| dot(q, &keys[i]) * shape.scale());
                let out = &mut out.row(span.first_row + r)[columns];
                weighted_sum(&softmax(scores.collect()), |i| &values[i], out);
            }
        }
    }
}

pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

pub(crate) fn softmax(mut scores: Vec<f32>) -> Vec<f32> {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    scores.iter_mut().for_each(|s| *s = (*s - max).exp());
    let sum: f32 = scores.iter().sum();
    scores.iter_mut().for_each(|s| *s /= sum);
    scores
}

pub(crate) fn weighted_sum<'a>(
    weights: &[f32],
    values: impl Fn(usize) -> &'a [f32],
    out: &mut [f32],
) {
    out.fill(0.0);
    for (i, weight) in weights.iter().enumerate() {
        out.iter_mut().zip(values(i)).for_each(|(o, v)| *o += weight * v);
    }
}
