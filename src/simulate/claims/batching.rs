//! Static against continuous batching (SEEDS.md section 3.1).

use super::super::formulas::*;
use super::super::model::ModelProfile;
use super::Tolerance::Relative;
use super::Verdict::{Agrees, Differs};
use super::inputs::*;
use super::{Claim, Worked};

pub(super) const CLAIMS: &[Claim] = &[
    Claim {
        id: "C01",
        claim: "Share of slot-steps a static batch of 8 uses: exponential exactly, by ln B + \
                gamma, geometric of mean 128",
        lecture: Some("36.8 %"),
        expected: &[36.79, 37.6, 36.88],
        tolerance: Relative(0.01),
        verdict: Agrees,
        formula: "F2, F3: eta = mean / E[longest] = 1 / H_B",
        work: || efficiency(8),
    },
    Claim {
        id: "C02",
        claim: "Share of slot-steps a static batch of 32 uses: exponential exactly, by ln B + \
                gamma, geometric of mean 128",
        lecture: Some("24.7 %"),
        expected: &[24.64, 24.73, 24.71],
        tolerance: Relative(0.01),
        verdict: Agrees,
        formula: "F2, F3: eta = mean / E[longest] = 1 / H_B",
        work: || efficiency(32),
    },
    Claim {
        id: "C03",
        claim: "Share of slot-steps a static batch of 128 uses: exponential exactly, by ln B + \
                gamma, geometric of mean 128",
        lecture: Some("17.0 %"),
        expected: &[18.41, 18.41, 18.46],
        tolerance: Relative(0.01),
        verdict: Differs { why: "17.0 % belongs to a batch of about 200" },
        formula: "F2, F3: eta = mean / E[longest] = 1 / H_B",
        work: || efficiency(128),
    },
    Claim {
        id: "C04",
        claim: "Longest of 32 outputs of mean 128: exponential, geometric",
        lecture: Some("519"),
        expected: &[519.49, 517.96],
        tolerance: Relative(0.005),
        verdict: Agrees,
        formula: "F3: mean H_B; sum over k of 1 - (1 - q^k)^B",
        work: || {
            Worked::by(|w| {
                let harmonic = w.step("H_32", harmonic(32), "");
                let text = format!("128 x {harmonic:.4}");
                w.result(&text, longest_exponential(32, MEAN), "tokens");
                let text = "sum over k >= 0 of 1 - (1 - (127/128)^k)^32";
                w.result(text, longest_geometric(32, MEAN), "tokens");
            })
        },
    },
    Claim {
        id: "C05",
        claim: "Slots of a static batch of 32 that are alive in a mean step",
        lecture: Some("7.9"),
        expected: &[7.88],
        tolerance: Relative(0.01),
        verdict: Agrees,
        formula: "F4: eta B",
        work: || {
            Worked::by(|w| {
                let eta = w.step("eta = 1 / H_32", 1.0 / harmonic(32), "");
                w.result(&format!("{eta:.4} x 32"), effective_batch(BATCH, eta), "sequences");
            })
        },
    },
    Claim {
        id: "C06",
        claim: "Gain of continuous batching at 32 if finished slots cost their reads",
        lecture: Some("4.05x"),
        expected: &[4.058],
        tolerance: Relative(0.01),
        verdict: Agrees,
        formula: "F4: 1 / eta = H_B",
        work: || {
            Worked::by(|w| {
                let eta = w.step("eta = 1 / H_32", 1.0 / harmonic(32), "");
                w.result(&format!("1 / {eta:.4}"), gain_dead_slots_pay(eta), "x");
            })
        },
    },
    Claim {
        id: "C07",
        claim: "70B, 32 slots, context 2,048, finished slots free: gain; static and continuous \
                tok/s; their steps in ms; their FLOP/B",
        lecture: Some("3.65x"),
        expected: &[3.647, 155.2, 566.1, 51.0, 56.5, 7.63, 27.8],
        tolerance: Relative(0.005),
        verdict: Agrees,
        formula: "F4, F6, F1: (B / t(B)) / (b / t(b)) with b = eta B",
        work: || Worked::by(worked_example_1),
    },
    Claim {
        id: "C08",
        claim: "Gain of continuous batching over conventions and models: 7B with finished slots \
                free, any with finished slots paying",
        lecture: Some("3-4x"),
        expected: &[2.70, 4.06],
        tolerance: Relative(0.005),
        verdict: Agrees,
        formula: "F4",
        work: || {
            Worked::by(|w| {
                let model = model("7b-mha");
                let eta = w.step("eta = 1 / H_32", 1.0 / harmonic(32), "");
                let seconds = |batch| step_seconds(&model, batch, CONTEXT_B, BANDWIDTH);
                let alive = effective_batch(BATCH, eta);
                w.step("7B, context 640: t(32)", seconds(BATCH) * 1e3, "ms");
                w.step(&format!("t({alive:.3})"), seconds(alive) * 1e3, "ms");
                let gain = gain_dead_slots_free(BATCH, eta, seconds);
                w.result("(32 / t(32)) / (b / t(b))", gain, "x");
                w.result("1 / eta", gain_dead_slots_pay(eta), "x");
            })
        },
    },
    Claim {
        id: "C09",
        claim: "90 % of outputs 64 tokens, 10 % 2,048, batch of 32: mean; chance of no long one; \
                longest; efficiency in %; alive slots; gain",
        lecture: Some("262.4; 0.0342; 1,981; 13.2 %; 4.2; 7.6x"),
        expected: &[262.4, 0.03434, 1979.9, 13.25, 4.24, 7.55],
        tolerance: Relative(0.01),
        verdict: Agrees,
        formula: "F2: E[longest] = 0.9^B 64 + (1 - 0.9^B) 2048",
        work: || {
            Worked::by(|w| {
                let mean = w.result("0.9 x 64 + 0.1 x 2048", 0.9 * 64.0 + 0.1 * 2048.0, "tokens");
                w.result("0.9^32", 0.9_f64.powi(32), "");
                let longest = longest_bimodal(32, 0.1, 64.0, 2048.0);
                w.result("0.9^32 x 64 + (1 - 0.9^32) x 2048", longest, "tokens");
                let eta = static_efficiency(mean, longest);
                w.result(&format!("{mean:.1} / {longest:.1}"), eta * 100.0, "%");
                w.result("32 eta", effective_batch(BATCH, eta), "sequences");
                w.result("1 / eta", gain_dead_slots_pay(eta), "x");
            })
        },
    },
    Claim {
        id: "C10",
        claim: "Efficiency of a batch of 32 with 90 % of outputs 64 tokens, 10 % 2,048, capped at \
                512: if every batch has a long one, and exactly",
        lecture: Some("21.3 %"),
        expected: &[21.25, 21.91],
        tolerance: Relative(0.005),
        verdict: Agrees,
        formula: "F2: the lecture takes E[longest] = 512",
        work: || {
            Worked::by(|w| {
                let mean = w.step("0.9 x 64 + 0.1 x 512", 0.9 * 64.0 + 0.1 * 512.0, "tokens");
                let share = static_efficiency(mean, 512.0) * 100.0;
                w.result(&format!("{mean:.1} / 512"), share, "%");
                let longest = longest_bimodal(32, 0.1, 64.0, 512.0);
                w.step("0.9^32 x 64 + (1 - 0.9^32) x 512", longest, "tokens");
                let exact = static_efficiency(mean, longest) * 100.0;
                w.result(&format!("{mean:.1} / {longest:.1}"), exact, "%");
            })
        },
    },
    Claim {
        id: "C11",
        claim: "Wait for a static batch over half its mean time, batches of 1, 8, 32, 128; and \
                seconds of it at 7.16 ms a step and 32",
        lecture: Some("at least 1x"),
        expected: &[1.96, 1.20, 1.10, 1.05, 2.03],
        tolerance: Relative(0.03),
        verdict: Agrees,
        formula: "F5: E[W] = E[T^2] / (2 E[T]), T the longest of B geometric lengths of mean 128",
        work: || Worked::by(waits),
    },
];

fn efficiency(batch: usize) -> Worked {
    Worked::by(|w| {
        let exact = static_efficiency(MEAN, longest_exponential(batch, MEAN));
        let text = format!("1 / H_{batch} = 1 / {:.4}", harmonic(batch));
        w.result(&text, exact * 100.0, "%");
        let rough = static_efficiency(MEAN, longest_approximate(batch, MEAN));
        w.result(&format!("1 / (ln {batch} + 0.5772)"), rough * 100.0, "%");
        let longest = longest_geometric(batch, MEAN);
        let text = format!("geometric: 128 / {longest:.2}");
        w.result(&text, static_efficiency(MEAN, longest) * 100.0, "%");
    })
}

/// F6: seconds of a decode step.
pub(super) fn step_seconds(model: &ModelProfile, batch: f64, context: f64, bandwidth: f64) -> f64 {
    let weights = model.weights.always_bytes;
    decode_bytes(weights, batch, context, model.kv_bytes, model.state()) / bandwidth
}

fn worked_example_1(w: &mut Worked) {
    let model = model("70b-gqa");
    let (weights, params) = (model.weights.always_bytes, model.active_params);
    // The lecture's mean is not given; ln B + gamma needs none.
    let eta = static_efficiency(MEAN, longest_approximate(32, MEAN));
    w.step("eta = 1 / (ln 32 + 0.5772)", eta, "");
    let alive = w.step("b = 32 eta", effective_batch(BATCH, eta), "sequences");
    let seconds = |batch| step_seconds(&model, batch, CONTEXT, BANDWIDTH_A);
    let gain = gain_dead_slots_free(BATCH, eta, seconds);
    w.result("(32 / t(32)) / (b / t(b))", gain, "x");
    w.result("static: b / t(b)", alive / seconds(alive), "tok/s");
    w.result("continuous: 32 / t(32)", BATCH / seconds(BATCH), "tok/s");
    let text = "t(b) = (140e9 + b x 2048 x 320e3) / 2.8475e12";
    w.result(text, seconds(alive) * 1e3, "ms");
    w.result("t(32)", seconds(BATCH) * 1e3, "ms");
    let sequence = CONTEXT * model.kv_bytes;
    let intensity = |batch| intensity(params, weights, batch, sequence);
    w.result("140e9 b / (140e9 + b x 655.36e6)", intensity(alive), "FLOP/B");
    w.result("140e9 x 32 / (140e9 + 32 x 655.36e6)", intensity(BATCH), "FLOP/B");
}

fn waits(w: &mut Worked) {
    for batch in [1, 8, 32, 128] {
        let mean = longest_geometric(batch, MEAN);
        let square = longest_geometric_square(batch, MEAN);
        let ratio = static_wait(mean, square) / (mean / 2.0);
        w.result(&format!("B = {batch}: {square:.0} / {mean:.2}^2"), ratio, "x");
    }
    let (mean, square) = (longest_geometric(32, MEAN), longest_geometric_square(32, MEAN));
    let steps = w.step("E[W] at 32", static_wait(mean, square), "steps");
    let seconds = step_seconds(&model("7b-mha-seed"), BATCH, CONTEXT_B, BANDWIDTH);
    w.result(&format!("{steps:.1} x 7.16 ms"), steps * seconds, "s");
}
