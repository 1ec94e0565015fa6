//! Throughput and the bytes of a step: 7B, 640 tokens of context (SEEDS.md section 3.2).

use super::super::formulas::*;
use super::Tolerance::Relative;
use super::Verdict::{Agrees, Differs, Untestable};
use super::batching::step_seconds;
use super::inputs::*;
use super::{Claim, Worked};

pub(super) const CLAIMS: &[Claim] = &[
    Claim {
        id: "C20",
        claim: "Time per output token at 32 and 164 sequences",
        lecture: Some("7.16; 20.1 ms"),
        expected: &[7.160, 20.07],
        tolerance: Relative(0.0005),
        verdict: Agrees,
        formula: "F6: (W + B L kv) / bandwidth",
        work: || {
            Worked::by(|w| {
                for batch in [32.0, 164.0] {
                    let text = format!("(13.5e9 + {batch} x 640 x 512e3) / 3.35e12");
                    w.result(&text, seconds(batch) * 1e3, "ms");
                }
                let binary = (13.5e9 + 164.0 * 640.0 * 524_288.0) / BANDWIDTH;
                w.step("164 with 524,288 bytes a token", binary * 1e3, "ms");
            })
        },
    },
    Claim {
        id: "C21",
        claim: "Tokens a second: static 32, continuous 32, continuous 164",
        lecture: Some("1,102; 4,469; 8,159"),
        expected: &[1101.0, 4469.0, 8171.0],
        tolerance: Relative(0.0005),
        verdict: Agrees,
        formula: "F4, F6: eta B / t(B); B / t(B)",
        work: || {
            Worked::by(|w| {
                let eta = w.step("eta = 1 / H_32", 1.0 / harmonic(32), "");
                w.result("32 eta / t(32)", BATCH * eta / seconds(BATCH), "tok/s");
                w.result("32 / t(32)", BATCH / seconds(BATCH), "tok/s");
                w.result("164 / t(164)", 164.0 / seconds(164.0), "tok/s");
                w.note("8,159 is 164 over the rounded 20.1 ms");
            })
        },
    },
    Claim {
        id: "C22",
        claim: "Tokens a second: continuous 32 over static 32, continuous 164 over continuous 32",
        lecture: Some("4.05x; 1.83x"),
        expected: &[4.058, 1.828],
        tolerance: Relative(0.0005),
        verdict: Agrees,
        formula: "F4: 1 / eta; F6",
        work: || {
            Worked::by(|w| {
                w.result("continuous 32 over static 32 = H_32", harmonic(32), "x");
                let ratio = (164.0 / seconds(164.0)) / (BATCH / seconds(BATCH));
                let text = format!(
                    "(164 / {:.3} ms) / (32 / {:.4} ms)",
                    seconds(164.0) * 1e3,
                    seconds(BATCH) * 1e3
                );
                w.result(&text, ratio, "x");
            })
        },
    },
    Claim {
        id: "C23",
        claim: "Bytes of a step at 164: weights, context, together; share of the weights",
        lecture: Some("13.5 + 53.8 = 67.3 GB; 20 %"),
        expected: &[13.5, 53.74, 67.24, 20.08],
        tolerance: Relative(0.0005),
        verdict: Agrees,
        formula: "F6: W + B L kv",
        work: || {
            Worked::by(|w| {
                let weights = w.result("weights", 13.5e9 / 1e9, "GB");
                let context = w.result("164 x 640 x 512e3", 164.0 * 640.0 * 512e3 / 1e9, "GB");
                let all = w.result("together", weights + context, "GB");
                w.result("13.5 over that", weights / all * 100.0, "%");
            })
        },
    },
    Claim {
        id: "C24",
        claim: "Price of a million tokens at 1 an hour: static 32, continuous 32 and 164",
        lecture: Some("0.252; 0.062; 0.034"),
        expected: &[0.2521, 0.0622, 0.0340],
        tolerance: Relative(0.002),
        verdict: Agrees,
        formula: "F24: 1e6 / (3600 tok/s)",
        work: || {
            Worked::by(|w| {
                let eta = 1.0 / harmonic(32);
                for (batch, eta) in [(32.0, eta), (32.0, 1.0), (164.0, 1.0)] {
                    let rate = batch * eta / seconds(batch);
                    let text = format!("1e6 / (3600 x {rate:.1})");
                    w.result(&text, price_per_million(rate, 1.0), "");
                }
            })
        },
    },
    Claim {
        id: "C25",
        claim: "Most sequences for 20 ms a token; their step and tok/s; for 30 ms; for 20 ms with \
                524,288 bytes a token",
        lecture: Some("164"),
        expected: &[163.0, 19.97, 8161.0, 265.0, 159.0],
        tolerance: Relative(0.0005),
        verdict: Differs { why: "164 sequences take 20.07 ms; 163 fit" },
        formula: "F20: floor((SLO bandwidth - W) / (L kv))",
        work: || Worked::by(most_sequences),
    },
    Claim {
        id: "C26",
        claim: "Sequences at which products stop waiting for weights",
        lecture: Some("295"),
        expected: &[295.2],
        tolerance: Relative(0.0005),
        verdict: Agrees,
        formula: "F1: pi / beta",
        work: || {
            Worked::by(|w| {
                w.result("989e12 / 3.35e12", ridge_batch(H100_FLOPS, BANDWIDTH), "sequences");
            })
        },
    },
    Claim {
        id: "C27",
        claim: "295 sequences in 20 ms: bytes each; tokens each of MHA and GQA-8",
        lecture: Some("0.181 GB; 354; 1,416"),
        expected: &[0.1814, 354.2, 1416.8],
        tolerance: Relative(0.0005),
        verdict: Agrees,
        formula: "F20 for L: (SLO bandwidth - W) / B, over kv",
        work: || {
            Worked::by(|w| {
                let each = w.result("(67e9 - 13.5e9) / 295", share(0.020) / 1e9, "GB");
                w.result("over 512e3", each * 1e9 / 512e3, "tokens");
                w.result("over 128e3", each * 1e9 / 128e3, "tokens");
                w.step("over 524,288", each * 1e9 / 524_288.0, "tokens");
                w.step("over 131,072", each * 1e9 / 131_072.0, "tokens");
            })
        },
    },
    Claim {
        id: "C28",
        claim: "295 sequences in 30 ms: tokens each of GQA-8, at 128,000 and at 131,072 bytes",
        lecture: Some("2,360"),
        expected: &[2304.0, 2250.0],
        tolerance: Relative(0.0005),
        verdict: Differs { why: "the lecture divided by 125 KB" },
        formula: "F20 for L: (SLO bandwidth - W) / B, over kv",
        work: || {
            Worked::by(|w| {
                let each = w.step("(100.5e9 - 13.5e9) / 295", share(0.030), "B");
                w.result("over 128e3", each / 128e3, "tokens");
                w.result("over 131,072", each / 131_072.0, "tokens");
                w.step("over 125e3", each / 125e3, "tokens");
            })
        },
    },
    Claim {
        id: "C29",
        claim: "29 sequences become 199 with blocks instead of reservations",
        lecture: Some("29; 199"),
        expected: &[],
        tolerance: Relative(0.0),
        verdict: Untestable { why: "its inputs are in another lecture" },
        formula: "F19",
        work: || {
            Worked::by(|w| {
                w.note("199 sequences of 0.328 GB need 65.2 to 65.6 GB;");
                w.note("reservations of 4,096 tokens in that memory give 30 or 31, not 29");
            })
        },
    },
];

/// Seconds of lecture B's decode step.
fn seconds(batch: f64) -> f64 {
    step_seconds(&model("7b-mha-seed"), batch, CONTEXT_B, BANDWIDTH)
}

/// Bytes of context that each of 295 sequences may have in a step of `seconds`.
fn share(seconds: f64) -> f64 {
    (seconds * BANDWIDTH - 13.5e9) / 295.0
}

fn most_sequences(w: &mut Worked) {
    let most = |slo: f64, kv: f64| slo_batch(slo, BANDWIDTH, 13.5e9, CONTEXT_B * kv, 0.0);
    let text = "floor((0.020 x 3.35e12 - 13.5e9) / (640 x 512e3))";
    let batch = w.result(text, most(0.020, 512e3), "sequences");
    let text = format!("(13.5e9 + {batch} x 640 x 512e3) / 3.35e12");
    w.result(&text, seconds(batch) * 1e3, "ms");
    w.result(&format!("{batch} / {:.3} ms", seconds(batch) * 1e3), batch / seconds(batch), "tok/s");
    w.step("t(164)", seconds(164.0) * 1e3, "ms");
    w.result("floor((0.030 x 3.35e12 - 13.5e9) / (640 x 512e3))", most(0.030, 512e3), "sequences");
    let text = "floor((0.020 x 3.35e12 - 13.5e9) / (640 x 524288))";
    w.result(text, most(0.020, 524_288.0), "sequences");
}
