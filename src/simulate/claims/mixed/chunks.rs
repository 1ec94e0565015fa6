//! Budgets and chunks: C36, C37, C39, C40.

use super::super::super::formulas::*;
use super::super::Worked;
use super::super::inputs::*;
use super::super::worked::GRIDS;
use super::{decode_step_bytes, mixed_step_flops};

/// F7: seconds of a step with a chunk of so many tokens that cost `flops`, by memory and by
/// arithmetic.
fn seconds(chunk: f64, flops: impl Fn(f64) -> f64) -> (f64, f64) {
    let bytes = mixed_bytes(decode_step_bytes(), chunk, 320e3);
    (bytes / BANDWIDTH_A, flops(chunk) / COMPUTE)
}

/// The chunk that a budget leaves beside the decodes.
fn chunk_of(budget: usize, grid: usize) -> f64 {
    chunk_plan(8192, budget, BATCH as usize, grid).first().map_or(0.0, |chunk| *chunk as f64)
}

/// FLOPs of a chunk in front of which nothing is, as the lecture has it.
fn alone(chunk: f64) -> f64 {
    mixed_step_flops(0.0, chunk)
}

pub(super) fn budget_for_an_slo(w: &mut Worked) {
    let attention = model("70b-gqa").attention;
    let full = |chunk: f64| mixed_step_flops(0.0, 0.0) + chunk * (140e9 + attention * 8192.0);
    let after = |chunk| mixed_step_flops(8192.0, chunk);
    let largest = |grid, flops: &dyn Fn(f64) -> f64| {
        let longer = |budget: usize| {
            let (memory, arithmetic) = seconds(chunk_of(budget, grid), flops);
            memory.max(arithmetic)
        };
        slo_budget(0.25, 8192, longer).map_or(0.0, |budget| budget as f64)
    };
    for (grid, result) in GRIDS {
        let text = "largest T with (2 P (32 + c) + 4 d n (32 x 2048 + c^2 / 2)) / 495e12 <= 250 ms";
        let budget = result(w, text, largest(grid, &alone), "tokens");
        for budget in [budget, budget + 1.0] {
            let chunk = chunk_of(budget as usize, grid);
            let (_, arithmetic) = seconds(chunk, alone);
            w.step(&format!("T = {budget}, c = {chunk}"), arithmetic * 1e3, "ms");
        }
        result(w, "with 8192 c in place of c^2 / 2", largest(grid, &full), "tokens");
    }
    let text = "with c (8192 + c / 2), a chunk after 8,192 tokens";
    w.step(text, largest(1, &after), "tokens");
}

pub(super) fn flip(w: &mut Worked) {
    let products = 140e9 / BANDWIDTH_A * COMPUTE / (2.0 * 70e9);
    for (grid, result) in GRIDS {
        let first = |waits: &dyn Fn(f64) -> bool| {
            (32..8192).find(|budget| waits(chunk_of(*budget, grid))).unwrap_or(0) as f64
        };
        let is_arithmetic = |chunk| {
            let (memory, arithmetic) = seconds(chunk, alone);
            arithmetic >= memory
        };
        let flip = first(&is_arithmetic);
        for budget in [flip - 1.0, flip] {
            let chunk = chunk_of(budget as usize, grid);
            let (memory, arithmetic) = seconds(chunk, alone);
            let text = format!("T = {budget}, c = {chunk}: bytes {:.2} ms, FLOPs", memory * 1e3);
            w.step(&text, arithmetic * 1e3, "ms");
        }
        result(w, "first T whose FLOPs take longer than its bytes", flip, "tokens");
        let (text, rows) = match grid {
            1 => ("140e9 / 2.8475e12 x 495e12 / (2 x 70e9)".to_owned(), products),
            _ => {
                (format!("first T with 32 + c >= {products:.2}"), first(&|c| BATCH + c >= products))
            }
        };
        result(w, &text, rows, "tokens");
    }
}

pub(super) fn plans(w: &mut Worked) {
    for (grid, result) in GRIDS {
        for budget in [512, 2048, 8192] {
            let plan = chunk_plan(8192, budget, 32, grid);
            let (count, first, last) = (plan.len(), plan[0], plan[plan.len() - 1]);
            result(w, &format!("ceil(8192 / {first})"), count as f64, "");
            let text = format!("{budget} - 32 down to a multiple of {grid}");
            result(w, &text, first as f64, "tokens");
            let text = format!("8192 - {} x {first}", count - 1);
            result(w, &text, last as f64, "tokens");
        }
    }
}

pub(super) fn lab_4(w: &mut Worked) {
    let model = model("8b-lab4");
    for (grid, result) in GRIDS {
        for budget in [8192, 2048, 512] {
            let chunk = chunk_plan(8192, budget, 0, grid)[0] as f64;
            let seconds = 2.0 * model.active_params * chunk / COMPUTE;
            result(w, &format!("2 x 8.03e9 x {chunk} / 495e12"), seconds * 1e3, "ms");
        }
    }
    let whole = model.prefill_flops(8192.0) / COMPUTE;
    w.step("8192 with attention", whole * 1e3, "ms");
}
