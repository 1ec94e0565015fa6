//! Products with weights, experts, and what is done row by row.

use kernels::cuda::gemm::{Inputs, RoundedRows, gemm};
use kernels::cuda::moe::{self, Choice, Experts};
use kernels::cuda::sampling::judge;
use kernels::cuda::{CudaError, DeviceBuffer, dense};
use kernels::moe::ExpertWeights;
use kernels::{Matrix, Values};

use super::lab::{bf16_noise, noise};
use super::link::rates;
use super::report::{Bench, Cost};
use super::shapes::Shapes;
use crate::cli::bench::spread::Spread;

/// Microseconds of a product, with weights of its own for each of `count`.
fn product(
    bench: &mut Bench<'_>,
    (rows, outputs, inputs): (usize, usize, usize),
    count: usize,
) -> Result<(Spread, Cost), CudaError> {
    let lab = &bench.lab;
    let weights =
        (0..count).map(|_| lab.weights(outputs, inputs)).collect::<Result<Vec<_>, _>>()?;
    let x = lab.floats(rows * inputs, (0.0, 1.0))?;
    let mut out = lab.floats(rows * outputs, (0.0, 1.0))?;
    let mut room = RoundedRows::new(&lab.cuda, rows, inputs)?;
    let rounded = room.round(&lab.cuda, x.rows(rows, inputs))?;
    let micros = bench.lab.time(count, |cuda, i| {
        gemm(cuda, Inputs::Bf16(rounded), weights[i].matrix(), out.rows_mut(rows, outputs))
    })?;
    let cost = Cost {
        bytes: 2 * (outputs * inputs + rows * inputs) + 4 * rows * outputs,
        operations: 2 * rows * outputs * inputs,
    };
    Ok((micros, cost))
}

/// Operations a microsecond of the largest product.
pub fn ceiling(bench: &mut Bench<'_>, shapes: &Shapes) -> Result<Spread, CudaError> {
    let side = shapes.square;
    let (micros, cost) = product(bench, (side, side, side), 1)?;
    Ok(rates(micros, cost.operations as f64))
}

fn rows(shapes: &Shapes) -> Vec<usize> {
    shapes.sequences.iter().copied().chain([shapes.step]).collect()
}

/// Products of a KDA layer and of the head.
pub fn products(bench: &mut Bench<'_>, shapes: &Shapes) -> Result<(), CudaError> {
    let inner = shapes.heads * shapes.head_dim;
    for (name, outputs, inputs, count) in [
        ("q, k, v", 3 * inner, shapes.hidden, 4),
        ("output", shapes.hidden, inner, 4),
        ("head", shapes.vocabulary, shapes.hidden, 1),
    ] {
        for rows in rows(shapes) {
            // Logits are asked for of generated tokens alone.
            if name == "head" && rows == shapes.step {
                continue;
            }
            let (micros, cost) = product(bench, (rows, outputs, inputs), count)?;
            let case = format!("{name}: {rows} x {outputs} x {inputs}");
            bench.row("product", case, micros, cost, Vec::new());
        }
    }
    Ok(())
}

/// Routed experts, chosen evenly.
pub fn experts(bench: &mut Bench<'_>, shapes: &Shapes) -> Result<(), CudaError> {
    let Shapes { hidden, inter, experts: count, top_k, .. } = *shapes;
    let lab = &bench.lab;
    // One expert's values for all: they lie apart on the device.
    let len = inter * hidden;
    let scale = (3.0 / hidden as f32).sqrt();
    let values: Vec<_> = bf16_noise(len, scale).into_iter().cycle().take(len).collect();
    let matrix = |rows: usize, cols: usize| Matrix::new(rows, cols, Values::Bf16(&values));
    let (wide, narrow) = (matrix(inter, hidden), matrix(hidden, inter));
    let each = || ExpertWeights { gate: wide, up: wide, down: narrow };
    let weights: Vec<_> = (0..count).map(|_| each()).collect();
    let weights = Experts::new(&lab.cuda, &weights)?;
    for rows in rows(shapes) {
        let lab = &bench.lab;
        let (choices, chosen) = choices(rows, count, top_k);
        let choices = DeviceBuffer::of(&lab.cuda, &choices)?;
        let mut work = moe::Workspace::new(&lab.cuda, &weights, rows, top_k)?;
        let x = lab.floats(rows * hidden, (0.0, 1.0))?;
        let mut out = lab.floats(rows * hidden, (0.0, 1.0))?;
        let mut room = RoundedRows::new(&lab.cuda, rows, hidden)?;
        let rounded = room.round(&lab.cuda, x.rows(rows, hidden))?;
        let micros = bench.lab.time(1, |cuda, _| {
            let x = (Inputs::Bf16(rounded), &choices, top_k);
            moe::experts(cuda, x, &weights, &mut work, out.rows_mut(rows, hidden))
        })?;
        let cost = Cost {
            bytes: 2 * (3 * chosen * len + rows * hidden) + 4 * rows * hidden,
            operations: 2 * 3 * rows * top_k * len,
        };
        let case = format!("{rows} rows, {chosen} of {count}");
        bench.row("experts", case, micros, cost, Vec::new());
    }
    Ok(())
}

/// Choices of `top_k` experts a row by rising id, and how many different ones there are.
fn choices(rows: usize, experts: usize, top_k: usize) -> (Vec<Choice>, usize) {
    let noise = noise(rows * experts);
    let mut is_chosen = vec![false; experts];
    let mut choices = Vec::with_capacity(rows * top_k);
    for row in 0..rows {
        let score = |e: usize| noise[(row * experts + e) % noise.len()];
        let mut ids: Vec<usize> = (0..experts).collect();
        ids.sort_by(|a, b| score(*a).total_cmp(&score(*b)));
        ids.truncate(top_k);
        ids.sort_unstable();
        ids.iter().for_each(|&id| is_chosen[id] = true);
        let weight = 1.0 / top_k as f32;
        choices.extend(ids.into_iter().map(|id| Choice { expert: id as u32, weight }));
    }
    (choices, is_chosen.into_iter().filter(|is| *is).count())
}

/// A norm and a sum of a step's rows, and the likeliest tokens.
pub fn rows_alone(bench: &mut Bench<'_>, shapes: &Shapes) -> Result<(), CudaError> {
    let (rows, width) = (shapes.step, shapes.hidden);
    let x = bench.lab.floats(rows * width, (0.0, 1.0))?;
    let mut out = bench.lab.floats(rows * width, (0.0, 1.0))?;
    let norm = bench.lab.floats(width, (1.0, 0.1))?;
    let micros = bench.lab.time(1, |cuda, _| {
        let scale = dense::Scale::Plain(norm.slice());
        dense::rms_norm(cuda, x.rows(rows, width), scale, 1e-5, out.rows_mut(rows, width))
    })?;
    let cost = Cost { bytes: 2 * 4 * rows * width, operations: 4 * rows * width };
    bench.row("norm", format!("{rows} x {width}"), micros, cost, Vec::new());
    let micros = bench
        .lab
        .time(1, |cuda, _| dense::add(cuda, out.rows_mut(rows, width), x.rows(rows, width)))?;
    let cost = Cost { bytes: 3 * 4 * rows * width, operations: rows * width };
    bench.row("add", format!("{rows} x {width}"), micros, cost, Vec::new());
    let (rows, width) = (shapes.sequences[shapes.sequences.len() - 1], shapes.vocabulary);
    let logits = bench.lab.floats(rows * width, (0.0, 1.0))?;
    let mut judged = DeviceBuffer::zeros(&bench.lab.cuda, rows)?;
    let micros = bench.lab.time(1, |cuda, _| judge(cuda, logits.rows(rows, width), &mut judged))?;
    let cost = Cost { bytes: 4 * rows * width, operations: rows * width };
    bench.row("likeliest", format!("{rows} x {width}"), micros, cost, Vec::new());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_different_and_rise_within_a_row() {
        let (choices, chosen) = choices(20, 9, 3);
        for row in choices.chunks(3) {
            assert!(row.is_sorted_by(|a, b| a.expert < b.expert), "{row:?}");
        }
        assert_eq!((choices.len(), chosen), (60, 9));
    }
}
