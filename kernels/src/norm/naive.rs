//! The definition of the norms.

use super::{GateKind, L2_EPS, Scale};
use crate::rows::{Rows, RowsMut};

/// `out = x / sqrt(mean(x²) + eps) * w`, row by row.
pub fn rms_norm(x: Rows<'_>, scale: Scale<'_>, eps: f32, mut out: RowsMut<'_>) {
    let (weights, offset) = scale.weights();
    for i in 0..x.count() {
        let mean = x.row(i).iter().map(|x| x * x).sum::<f32>() / x.width() as f32;
        let factor = 1.0 / (mean + eps).sqrt();
        for ((y, x), w) in out.row(i).iter_mut().zip(x.row(i)).zip(weights) {
            *y = x * factor * (w + offset);
        }
    }
}

/// [`rms_norm`] times the gate.
pub fn rms_norm_gated(
    x: Rows<'_>,
    weights: &[f32],
    eps: f32,
    gate: Rows<'_>,
    kind: GateKind,
    mut out: RowsMut<'_>,
) {
    for i in 0..x.count() {
        let row = Rows::new(x.row(i), x.width());
        rms_norm(row, Scale::Plain(weights), eps, RowsMut::new(out.row(i), x.width()));
        for (y, gate) in out.row(i).iter_mut().zip(gate.row(i)) {
            let sigmoid = 1.0 / (1.0 + (-gate).exp());
            *y *= match kind {
                GateKind::Sigmoid => sigmoid,
                GateKind::Silu => gate * sigmoid,
            };
        }
    }
}

/// `out = x / sqrt(Σx² + 1e-6) * scale`, row by row.
pub fn l2_norm(x: Rows<'_>, scale: f32, mut out: RowsMut<'_>) {
    for i in 0..x.count() {
        let sum = x.row(i).iter().map(|x| x * x).sum::<f32>();
        let factor = scale / (sum + L2_EPS).sqrt();
        for (y, x) in out.row(i).iter_mut().zip(x.row(i)) {
            *y = x * factor;
        }
    }
}
