//! Weights, quantised into panels.

use half::f16;

use super::{
    GROUP_LEN, LINE_BYTES, QUAD_LEN, Quantization, SCALES_BYTES, naive::STEPS, round, widen,
};
use crate::matrix::Matrix;
use crate::panels::PANEL_LEN;
use crate::simd::{Isa, Kernel, Simd};

/// Quantises rows of a matrix as stored into the panels that they begin: `out` is
/// [`Quantization::bytes`] long.
///
/// # Panics
/// When it has another length.
pub fn pack(quantization: Quantization, matrix: Matrix<'_>, out: &mut [u8]) {
    assert_eq!(out.len(), quantization.bytes(matrix.rows, matrix.cols), "panels of another size");
    Isa::best().run(Pack { quantization, matrix, out });
}

struct Pack<'a> {
    quantization: Quantization,
    matrix: Matrix<'a>,
    out: &'a mut [u8],
}

impl Kernel for Pack<'_> {
    type Out = ();

    /// Plain Rust: the set only gives the compiler its vectors.
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Pack { quantization, matrix, out } = self;
        let (rows, cols) = (matrix.rows, matrix.cols);
        if cols == 0 {
            return;
        }
        let panels = out.chunks_exact_mut(quantization.panel_bytes(cols));
        for (panel, first) in panels.zip((0..rows).step_by(PANEL_LEN)) {
            let groups = panel.chunks_exact_mut(quantization.group_bytes());
            for (group, from) in groups.zip((0..cols).step_by(GROUP_LEN)) {
                let len = GROUP_LEN.min(cols - from);
                for lane in 0..PANEL_LEN {
                    let mut w = [0.0; GROUP_LEN];
                    if first + lane < rows {
                        let at = (first + lane) * cols + from;
                        widen(matrix.values.slice(at..at + len), &mut w[..len]);
                    }
                    put(quantization, &w, lane, group);
                }
            }
        }
    }
}

/// Quantises the weights of output `lane` to their places in a group of a panel.
#[inline(always)]
fn put(quantization: Quantization, w: &[f32; GROUP_LEN], lane: usize, group: &mut [u8]) {
    let (scales, lines) = group.split_at_mut(SCALES_BYTES);
    let (scale, values) = match quantization {
        Quantization::Q8 => {
            let scale = f16::from_f32(largest(w).abs() / 127.0);
            (scale, values(w, scale, -127.0, 127.0))
        }
        Quantization::Q4 => q4(w),
    };
    scales[2 * lane..2 * lane + 2].copy_from_slice(&scale.to_le_bytes());
    let at = QUAD_LEN * lane;
    match quantization {
        Quantization::Q8 => {
            let quads = values.as_chunks::<QUAD_LEN>().0.iter();
            for (line, quad) in lines.chunks_exact_mut(LINE_BYTES).zip(quads) {
                line[at..at + QUAD_LEN].copy_from_slice(&quad.map(|v| v as i8 as u8));
            }
        }
        Quantization::Q4 => {
            let pairs = values.as_chunks::<{ 2 * QUAD_LEN }>().0.iter();
            for (line, pair) in lines.chunks_exact_mut(LINE_BYTES).zip(pairs) {
                for (i, byte) in line[at..at + QUAD_LEN].iter_mut().enumerate() {
                    let (low, high) = (pair[i] + 8.0, pair[QUAD_LEN + i] + 8.0);
                    *byte = low as u8 | (high as u8) << 4;
                }
            }
        }
    }
}

/// The scale with the least squared error.
#[inline(always)]
fn q4(w: &[f32; GROUP_LEN]) -> (f16, [f32; GROUP_LEN]) {
    let largest = largest(w);
    let mut best = (f32::NAN, f16::ZERO, [0.0; GROUP_LEN]);
    for step in STEPS {
        let scale = f16::from_f32(largest / step);
        let values = values(w, scale, -8.0, 7.0);
        let error = squared_error(w, scale.to_f32(), &values);
        if error < best.0 || step == STEPS[0] {
            best = (error, scale, values);
        }
    }
    (best.1, best.2)
}

/// The first weight of largest magnitude; not a number if any is not.
#[inline(always)]
fn largest(w: &[f32; GROUP_LEN]) -> f32 {
    let mut best = 0.0f32;
    for w in w {
        if w.abs() > best.abs() || w.is_nan() {
            best = *w;
        }
    }
    best
}

/// Whole numbers; where the scale is zero or not a number they do not matter.
#[inline(always)]
fn values(w: &[f32; GROUP_LEN], scale: f16, least: f32, most: f32) -> [f32; GROUP_LEN] {
    let scale = scale.to_f32();
    if scale == 0.0 {
        return [0.0; GROUP_LEN];
    }
    let mut out = [0.0; GROUP_LEN];
    for (out, w) in out.iter_mut().zip(w) {
        let quotient = w / scale;
        let clamped = if quotient < least { least } else { quotient };
        *out = round(if clamped > most { most } else { clamped });
    }
    out
}

/// The sum of squares, by halves.
#[inline(always)]
fn squared_error(w: &[f32; GROUP_LEN], scale: f32, values: &[f32; GROUP_LEN]) -> f32 {
    let mut squares = [0.0; GROUP_LEN];
    for (square, (w, value)) in squares.iter_mut().zip(w.iter().zip(values)) {
        let error = w - value * scale;
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
