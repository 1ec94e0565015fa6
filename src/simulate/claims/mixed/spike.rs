//! Lecture B's 7B with 164 decodes of 640 tokens: C42 to C45.

use super::super::super::formulas::*;
use super::super::super::model::ModelProfile;
use super::super::super::step::{StepModel, StepWork, step_cost};
use super::super::Worked;
use super::super::batching::step_seconds;
use super::super::inputs::*;

const DECODES: f64 = 164.0;

pub(super) fn prefills(w: &mut Worked) {
    for tokens in [512.0, 4096.0, 8192.0] {
        let flops = full_prefill(tokens);
        let text = format!("2 x 6,738,415,616 x {tokens} + 4 x 4096 x 32 x {tokens}^2");
        w.result(&text, flops / 1e12, "TFLOP");
        w.result("over 495e12", flops / COMPUTE * 1e3, "ms");
    }
}

/// F8 with all pairs, as lecture B has it.
pub(in super::super) fn full_prefill(tokens: f64) -> f64 {
    let model = model("7b-mha");
    prefill_flops(model.active_params, model.attention, tokens, Pairs::Full)
}

fn decode_seconds() -> f64 {
    step_seconds(&model("7b-mha-seed"), DECODES, CONTEXT_B, BANDWIDTH)
}

pub(in super::super) fn spike(w: &mut Worked) {
    let decode = w.step("t(164)", decode_seconds() * 1e3, "ms");
    let prefill = w.step("S(4096) / 495e12, all pairs", full_prefill(4096.0) / COMPUTE * 1e3, "ms");
    let after = w.result(&format!("{decode:.3} + {prefill:.2}"), decode + prefill, "ms");
    w.result(&format!("{after:.2} / {decode:.3}"), after / decode, "x");
    for (name, step_model) in [("phased", StepModel::Phased), ("roofline", StepModel::Roofline)] {
        let seconds = mixed_seconds(step_model);
        let spike = w.result(&format!("{name} step"), seconds * 1e3, "ms");
        w.result(&format!("{spike:.2} / {decode:.3}"), spike / decode, "x");
    }
}

/// A step of the decodes and the prompt, whose pairs all count: as many as of a causal prompt
/// behind a prefix of half its length.
fn mixed_seconds(step_model: StepModel) -> f64 {
    let model = ModelProfile { kv_bytes: 512e3, ..model("7b-mha-seed") };
    let (hardware, chunks) = (hardware("h100-seed-b"), [(2048, 4096)]);
    let decode_context = DECODES * CONTEXT_B;
    let work =
        StepWork { decodes: DECODES as usize, decode_context, chunks: &chunks, dead_context: 0.0 };
    step_cost(step_model, &hardware, &model, &work).seconds
}

pub(in super::super) fn selective_batching(w: &mut Worked) {
    let split = 2.0 * 2.0 * 4096.0 * DECODES;
    w.result("read and written: 2 x 2 x 4096 x 164", split / 1e6, "MB");
    let seconds = split / BANDWIDTH;
    w.result("over 3.35e12", seconds * 1e6, "us");
    let step = decode_seconds();
    w.result(
        &format!("{:.5} us / {:.3} ms", seconds * 1e6, step * 1e3),
        seconds / step * 100.0,
        "%",
    );
    w.result("in 32 layers", 32.0 * seconds / step * 100.0, "%");
    let limit = 32.0 * 2.0 * 2.0 * 4096.0 / (CONTEXT_B * 512e3);
    let text = "for ever more rows: 32 x 2 x 2 x 4096 / (640 x 512e3)";
    w.result(text, limit * 100.0, "%");
}

pub(super) fn idle(w: &mut Worked) {
    let model = model("7b-mha-seed");
    let flops = mixed_flops(model.active_params, model.attention, (DECODES, CONTEXT_B), (0.0, 0.0));
    let text = "2 x 6.738e9 x 164 + 4 x 4096 x 32 x 164 x 640";
    w.step(text, flops / 1e12, "TFLOP");
    let used = flops / decode_seconds() / H100_FLOPS * 100.0;
    let text = format!("{:.4}e12 / {:.5} s / 989e12", flops / 1e12, decode_seconds());
    w.result(&text, used, "%");
    w.result(&format!("100 - {used:.3}"), 100.0 - used, "%");
}
