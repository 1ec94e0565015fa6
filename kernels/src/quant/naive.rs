//! The definition: one group at a time, one value at a time.

use half::f16;

use super::{GROUP_LEN, Quantization};
use crate::matrix::Matrix;
use crate::rows::{Rows, RowsMut};

/// Groups of activations below this are taken for zero: 127 over it is still finite.
pub(super) const LEAST: f32 = f32::from_bits(27 << 23); // 2^-100

/// A Q4 scale is the weight of largest magnitude over one of these, whichever gives the least
/// squared error: -8 uses all sixteen values, the others treat its opposites better.
pub(super) const STEPS: [f32; 3] = [-8.0, -7.5, 7.0];

/// The scale and the values of a group of weights.
pub fn weights(quantization: Quantization, w: &[f32; GROUP_LEN]) -> (f16, [i8; GROUP_LEN]) {
    match quantization {
        Quantization::Q8 => {
            let scale = f16::from_f32(largest(w).abs() / 127.0);
            (scale, values(w, scale, -127.0, 127.0))
        }
        Quantization::Q4 => {
            let tried = STEPS.map(|step| {
                let scale = f16::from_f32(largest(w) / step);
                let values = values(w, scale, -8.0, 7.0);
                (squared_error(w, scale, &values), scale, values)
            });
            let [mut best, rest @ ..] = tried;
            for other in rest {
                if other.0 < best.0 {
                    best = other;
                }
            }
            (best.1, best.2)
        }
    }
}

/// The first weight of largest magnitude; not a number if any is not.
fn largest(w: &[f32; GROUP_LEN]) -> f32 {
    let larger = |a: f32, b: f32| if b.abs() > a.abs() || b.is_nan() { b } else { a };
    w.iter().copied().fold(0.0, larger)
}

fn values(w: &[f32; GROUP_LEN], scale: f16, least: f32, most: f32) -> [i8; GROUP_LEN] {
    let scale = scale.to_f32();
    w.map(|w| if scale == 0.0 { 0 } else { (w / scale).round_ties_even().clamp(least, most) as i8 })
}

/// The sum of squares, by halves: of the first sixteen and the last, and so on.
fn squared_error(w: &[f32; GROUP_LEN], scale: f16, values: &[i8; GROUP_LEN]) -> f32 {
    let mut squares = [0.0; GROUP_LEN];
    for (square, (w, value)) in squares.iter_mut().zip(w.iter().zip(values)) {
        let error = w - f32::from(*value) * scale.to_f32();
        *square = error * error;
    }
    let mut half = GROUP_LEN / 2;
    while half > 0 {
        for i in 0..half {
            squares[i] += squares[i + half];
        }
        half /= 2;
    }
    squares[0]
}

/// The scale and the values of a group of activations.
pub fn activations(x: &[f32; GROUP_LEN]) -> (f32, [i8; GROUP_LEN]) {
    if x.iter().any(|x| !x.is_finite()) {
        return (f32::NAN, [0; GROUP_LEN]);
    }
    let most = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    if most < LEAST {
        return (0.0, [0; GROUP_LEN]);
    }
    let inverse = 127.0 / most;
    (most / 127.0, x.map(|x| (x * inverse).round_ties_even() as i8))
}

/// `x` in groups, the last one filled with zeros.
fn groups(x: &[f32]) -> impl Iterator<Item = [f32; GROUP_LEN]> {
    x.chunks(GROUP_LEN).map(|part| {
        let mut group = [0.0; GROUP_LEN];
        group[..part.len()].copy_from_slice(part);
        group
    })
}

/// `out = x wᵀ`, both quantised.
///
/// # Panics
/// When the shapes do not fit.
pub fn gemm(quantization: Quantization, x: Rows<'_>, w: Matrix<'_>, out: RowsMut<'_>) {
    let mut out = out;
    assert_eq!((x.width(), x.count(), w.rows), (w.cols, out.count(), out.width()));
    let rows = (0..x.count()).map(|i| groups(x.row(i)).map(|group| activations(&group)).collect());
    let rows: Vec<Vec<_>> = rows.collect();
    let mut row = vec![0.0; w.cols];
    for output in 0..w.rows {
        w.copy_row(output, &mut row);
        let weights: Vec<_> = groups(&row).map(|group| weights(quantization, &group)).collect();
        for (i, x) in rows.iter().enumerate() {
            let mut sum = 0.0;
            for ((x_scale, x), (w_scale, w)) in x.iter().zip(&weights) {
                let dot: i32 = x.iter().zip(w).map(|(x, w)| i32::from(*x) * i32::from(*w)).sum();
                sum += dot as f32 * (w_scale.to_f32() * x_scale);
            }
            out.row(i)[output] = sum;
        }
    }
}
