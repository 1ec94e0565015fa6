//! The definition: one sum per output, inputs in order.

use half::{bf16, f16};

use crate::matrix::{Matrix, Values};
use crate::rows::{Rows, RowsMut};

/// `out = x wᵀ`.
///
/// # Panics
/// When the shapes do not fit.
pub fn gemm(x: Rows<'_>, w: Matrix<'_>, out: RowsMut<'_>) {
    match w.values {
        Values::F32(values) => product(x, values, out, |w| w),
        Values::Bf16(values) => product(x, values, out, bf16::to_f32),
        Values::F16(values) => product(x, values, out, f16::to_f32),
    }
}

/// `out = x wᵀ` with `x` rounded to bf16 first: what bf16 weights are multiplied by under
/// [`Compute::Bf16`](crate::Compute).
///
/// # Panics
/// When the shapes do not fit.
pub fn gemm_bf16(x: Rows<'_>, w: Matrix<'_>, out: RowsMut<'_>) {
    let rounded = |i| x.row(i).iter().map(|x| bf16::from_f32(*x).to_f32());
    let values: Vec<f32> = (0..x.count()).flat_map(rounded).collect();
    gemm(Rows::new(&values, x.width()), w, out);
}

fn product<E: Copy>(x: Rows<'_>, w: &[E], mut out: RowsMut<'_>, widen: fn(E) -> f32) {
    let k = x.width();
    assert_eq!((x.count(), w.len()), (out.count(), out.width() * k));
    for i in 0..x.count() {
        for (y, w) in out.row(i).iter_mut().zip(w.chunks_exact(k)) {
            *y = x.row(i).iter().zip(w).map(|(x, w)| x * widen(*w)).sum();
        }
    }
}
