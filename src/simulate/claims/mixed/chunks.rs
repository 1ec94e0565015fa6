//! Budgets and chunks: C36, C37, C39, C40.

use super::super::super::formulas::*;
use super::super::Worked;
use super::super::inputs::*;
use super::{decode_step_bytes, mixed_step_flops};

/// F7: seconds of a step with this budget, the chunk as the lecture has it.
fn seconds(budget: usize, flops: impl Fn(f64) -> f64) -> (f64, f64) {
    let chunk = budget as f64 - BATCH;
    let bytes = mixed_bytes(decode_step_bytes(), chunk, 320e3);
    (bytes / BANDWIDTH_A, flops(chunk) / COMPUTE)
}

pub(super) fn budget_for_an_slo(w: &mut Worked) {
    let attention = model("70b-gqa").attention;
    let alone = |chunk| mixed_step_flops(0.0, chunk);
    let full = |chunk: f64| mixed_step_flops(0.0, 0.0) + chunk * (140e9 + attention * 8192.0);
    let after = |chunk| mixed_step_flops(8192.0, chunk);
    let largest = |flops: &dyn Fn(f64) -> f64| {
        let longer = |budget: usize| {
            let (memory, arithmetic) = seconds(budget + 32, flops);
            memory.max(arithmetic)
        };
        slo_budget(0.25, 8192, longer).map_or(0, |budget| budget + 32)
    };
    let text =
        "largest T with (2 P T + 4 d n (32 x 2048 + c^2 / 2)) / 495e12 <= 250 ms, c = T - 32";
    let budget = w.result(text, largest(&alone) as f64, "tokens");
    let (_, arithmetic) = seconds(budget as usize, alone);
    w.step(&format!("at {budget}"), arithmetic * 1e3, "ms");
    let (_, arithmetic) = seconds(budget as usize + 1, alone);
    w.step(&format!("at {}", budget + 1.0), arithmetic * 1e3, "ms");
    w.result("the same with 8192 c in place of c^2 / 2", largest(&full) as f64, "tokens");
    let text = "the same with c (8192 + c / 2): a chunk after 8,192 tokens";
    w.step(text, largest(&after) as f64, "tokens");
}

pub(super) fn flip(w: &mut Worked) {
    let waits = |budget: &usize| {
        let (memory, arithmetic) = seconds(*budget, |chunk| mixed_step_flops(0.0, chunk));
        arithmetic >= memory
    };
    let first = (32..8192).find(waits).map_or(f64::INFINITY, |budget| budget as f64);
    for budget in [first - 1.0, first] {
        let (memory, arithmetic) = seconds(budget as usize, |chunk| mixed_step_flops(0.0, chunk));
        let text = format!("T = {budget}: bytes {:.2} ms, FLOPs", memory * 1e3);
        w.step(&text, arithmetic * 1e3, "ms");
    }
    w.result("first T whose FLOPs take longer", first, "tokens");
    let alone = 140e9 / BANDWIDTH_A * COMPUTE / (2.0 * 70e9);
    w.result("140e9 / 2.8475e12 x 495e12 / 140e9", alone, "tokens");
}

pub(super) fn plans(w: &mut Worked, grid: usize) {
    for budget in [512, 2048, 8192] {
        let plan = chunk_plan(8192, budget, 32, grid);
        let (first, last) = (plan[0] as f64, plan[plan.len() - 1] as f64);
        w.result(&format!("budget {budget}: chunks"), plan.len() as f64, "");
        w.result("of", first, "tokens");
        w.result("the last of", last, "tokens");
    }
}

pub(super) fn lab_4(w: &mut Worked) {
    let model = model("8b-lab4");
    for chunk in [8192.0, 2048.0, 512.0] {
        let seconds = 2.0 * model.active_params * chunk / COMPUTE;
        w.result(&format!("2 x 8.03e9 x {chunk} / 495e12"), seconds * 1e3, "ms");
    }
    let whole = model.prefill_flops(8192.0) / COMPUTE;
    w.step("8192 with attention", whole * 1e3, "ms");
}
