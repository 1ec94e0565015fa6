//! Steps of decodes and a chunk (SEEDS.md section 3.3): 70B, 32 decodes of 2,048 tokens.

use super::super::formulas::*;
use super::Tolerance::{Exact, Relative};
use super::Verdict::{Added, Agrees, Differs};
use super::batching::step_seconds;
use super::inputs::*;
use super::worked::GRIDS;
use super::{Claim, Worked};

mod chunks;
mod spike;

pub(super) use spike::{full_prefill, selective_batching, spike};

pub(super) const CLAIMS: &[Claim] = &[
    Claim {
        id: "C30",
        claim: "Bytes of a decode step, and its time",
        lecture: Some("161 GB; 56.5 ms"),
        expected: &[160.97, 56.53],
        tolerance: Relative(0.0005),
        verdict: Agrees,
        formula: "F6: (W + B L kv) / (beta MBU)",
        work: || {
            Worked::by(|w| {
                let bytes = w.step("140e9 + 32 x 2048 x 320e3", decode_step_bytes(), "B");
                w.result("that is", bytes / 1e9, "GB");
                w.result("over 0.85 x 3.35e12", bytes / BANDWIDTH_A * 1e3, "ms");
                let binary = decode_bytes(140e9, BATCH, CONTEXT, 327_680.0, 0.0) / BANDWIDTH_A;
                w.step("with 327,680 bytes a token", binary * 1e3, "ms");
            })
        },
    },
    Claim {
        id: "C31",
        claim: "FLOPs of a decode step, and their time",
        lecture: Some("4.6 TFLOP; 9.4 ms"),
        expected: &[4.65, 9.40],
        tolerance: Relative(0.001),
        verdict: Agrees,
        formula: "F7: 2 P B + 4 d n L B",
        work: || {
            Worked::by(|w| {
                let flops = mixed_step_flops(0.0, 0.0);
                let text = "2 x 70e9 x 32 + 4 x 8192 x 80 x 2048 x 32";
                w.result(text, flops / 1e12, "TFLOP");
                w.result("over 495e12", flops / COMPUTE * 1e3, "ms");
            })
        },
    },
    Claim {
        id: "C32",
        claim: "A whole prompt of 8,192 in a step of 32 decodes: products, attention and its \
                share; the step in s, and over a decode step",
        lecture: Some("1.147 PFLOP; 88 TFLOP; 7.1 %; 2.504 s; 44x"),
        expected: &[1.1469, 87.96, 7.12, 2.5040, 44.3],
        tolerance: Relative(0.0005),
        verdict: Agrees,
        formula: "F7, F8: 2 P L + 2 d n L^2, with the decodes over pi MFU",
        work: || {
            Worked::by(|w| {
                let model = model("70b-gqa");
                let linear = w.step("2 x 70e9 x 8192", 2.0 * 70e9 * 8192.0, "FLOP");
                w.result("that is", linear / 1e15, "PFLOP");
                let attention = model.prefill_flops(8192.0) - linear;
                w.result("2 x 8192 x 80 x 8192^2", attention / 1e12, "TFLOP");
                w.result("share", attention / (linear + attention) * 100.0, "%");
                let step = mixed_step_flops(0.0, 8192.0) / COMPUTE;
                w.result("with 32 decodes, over 495e12", step, "s");
                let decode = decode_step_bytes() / BANDWIDTH_A;
                w.result("over 56.53 ms", step / decode, "x");
            })
        },
    },
    Claim {
        id: "C33",
        claim: "Length at which attention costs as much as the products, all pairs and causal",
        lecture: Some("53K"),
        expected: &[53.4, 106.8],
        tolerance: Relative(0.001),
        verdict: Differs { why: "53K counts all pairs, the lecture's other figures causal ones" },
        formula: "F9: P / (2 d n) and P / (d n)",
        work: || {
            Worked::by(|w| {
                let attention = model("70b-gqa").attention;
                let full = parity_tokens(70e9, attention, Pairs::Full);
                w.result("70e9 / (2 x 8192 x 80)", full / 1e3, "thousand tokens");
                let causal = parity_tokens(70e9, attention, Pairs::Causal);
                w.result("70e9 / (8192 x 80)", causal / 1e3, "thousand tokens");
            })
        },
    },
    Claim {
        id: "C34",
        claim: "Share of peak arithmetic of decodes alone: 32, 64, 128, 256 of 2,048 tokens, 256 \
                of 4,096",
        lecture: Some("about 20 %"),
        expected: &[8.3, 14.7, 23.9, 34.8, 23.3],
        tolerance: Relative(0.005),
        verdict: Differs { why: "true near 100 sequences of 2,048 tokens only" },
        formula: "F6, F7: FLOPs / t / 990e12",
        work: || {
            Worked::by(|w| {
                let model = model("70b-gqa");
                for (batch, context) in [
                    (32.0, 2048.0),
                    (64.0, 2048.0),
                    (128.0, 2048.0),
                    (256.0, 2048.0),
                    (256.0, 4096.0),
                ] {
                    let seconds = step_seconds(&model, batch, context, BANDWIDTH_A);
                    let flops = mixed_flops(70e9, model.attention, (batch, context), (0.0, 0.0));
                    let text = format!(
                        "{batch} of {context}: {:.3}e12 / {:.5} s / 990e12",
                        flops / 1e12,
                        seconds
                    );
                    w.result(&text, flops / seconds / H100_FLOPS_A * 100.0, "%");
                }
            })
        },
    },
    Claim {
        id: "C35",
        claim: "Rise of the mean time per token by one prompt of 8,192 in a step, over outputs of \
                64, 128, 400 and 1,000 tokens",
        lecture: Some("barely moves"),
        expected: &[68.0, 34.0, 10.8, 4.3],
        tolerance: Relative(0.01),
        verdict: Differs { why: "it does for short outputs" },
        formula: "F7: (t(mixed) - t(decode)) / n / t(decode)",
        work: || {
            Worked::by(|w| {
                let decode = decode_step_bytes() / BANDWIDTH_A;
                let stall = mixed_step_flops(0.0, 8192.0) / COMPUTE - decode;
                w.step("2.504 s - 56.53 ms", stall, "s");
                for tokens in [64.0, 128.0, 400.0, 1000.0] {
                    let rise = stall / tokens / decode * 100.0;
                    w.result(&format!("{stall:.4} / {tokens} / 0.05653"), rise, "%");
                }
            })
        },
    },
    Claim {
        id: "C36",
        claim: "Largest budget for 250 ms between tokens: without prefix, and when each row sees \
                8,192 keys",
        lecture: None,
        expected: &[876.0, 769.0],
        tolerance: Exact,
        verdict: Added,
        formula: "F21, F7: largest T with t(B, T - B) <= SLO",
        work: || Worked::by(chunks::budget_for_an_slo),
    },
    Claim {
        id: "C37",
        claim: "Budget at which a step turns from bandwidth to arithmetic; tokens at which its \
                products alone do",
        lecture: None,
        expected: &[199.0, 173.8],
        tolerance: Relative(0.0005),
        verdict: Added,
        formula: "F7: first T with FLOPs / pi >= bytes / beta; W / beta pi / (2 P)",
        work: || Worked::by(chunks::flip),
    },
    Claim {
        id: "C38",
        claim: "512 decodes at a budget of 512: tokens left for prompts; their context; their step",
        lecture: None,
        expected: &[0.0, 335.5, 167.0],
        tolerance: Relative(0.0005),
        verdict: Added,
        formula: "F10, F6: T - B; B L kv; (W + B L kv) / (beta MBU)",
        work: || {
            Worked::by(|w| {
                for (grid, result) in GRIDS {
                    let left = chunk_plan(8192, 512, 512, grid).len() as f64;
                    result(w, "512 - 512, so chunks of a prompt", left, "");
                    let context = 512.0 * CONTEXT * 320e3;
                    result(w, "512 x 2048 x 320e3, of 80 GB", context / 1e9, "GB");
                    let seconds = step_seconds(&model("70b-gqa"), 512.0, CONTEXT, BANDWIDTH_A);
                    result(w, "(140e9 + that) / 2.8475e12", seconds * 1e3, "ms");
                }
            })
        },
    },
    Claim {
        id: "C39",
        claim: "Chunks of 8,192 tokens beside 32 decodes, budgets 512, 2,048, 8,192: how many, the \
                first, the last",
        lecture: None,
        expected: &[18.0, 480.0, 32.0, 5.0, 2016.0, 128.0, 2.0, 8160.0, 32.0],
        tolerance: Exact,
        verdict: Added,
        formula: "F10: ceil(L / c) chunks of c = T - B, on a grid down to a multiple of it",
        work: || Worked::by(chunks::plans),
    },
    Claim {
        id: "C40",
        claim: "Chunks of 8,192, 2,048 and 512 of the 8B of lab 4, products only",
        lecture: Some("266; 66; 17 ms"),
        expected: &[265.8, 66.4, 16.6],
        tolerance: Relative(0.001),
        verdict: Agrees,
        formula: "F7: 2 P c / (pi MFU)",
        work: || Worked::by(chunks::lab_4),
    },
    Claim {
        id: "C41",
        claim: "No step of that model is faster than its read of the weights",
        lecture: Some("4.8 ms"),
        expected: &[4.794],
        tolerance: Relative(0.0005),
        verdict: Agrees,
        formula: "F6: W / beta",
        work: || {
            Worked::by(|w| {
                w.result("16.06e9 / 3.35e12", 16.06e9 / BANDWIDTH * 1e3, "ms");
            })
        },
    },
    Claim {
        id: "C42",
        claim: "Prefill of the 7B, 512, 4,096 and 8,192 tokens: TFLOP and ms of each",
        lecture: Some("7.04, 14.2; 64.0, 129; 145.6, 294"),
        expected: &[7.0376, 14.217, 63.997, 129.29, 145.587, 294.11],
        tolerance: Relative(0.0002),
        verdict: Agrees,
        formula: "F8 with all pairs: 2 P L + 4 d n L^2",
        work: || Worked::by(spike::prefills),
    },
    Claim {
        id: "C43",
        claim: "164 decodes of the 7B hit by a prompt of 4,096: ms and ratio to a decode step, \
                one after the other, phased, roofline",
        lecture: Some("149 ms; 6.7x"),
        expected: &[149.4, 7.44, 149.8, 7.46, 133.9, 6.67],
        tolerance: Relative(0.001),
        verdict: Differs { why: "149 ms is 7.4x; 6.7x belongs to the roofline's 133.9 ms" },
        formula: "F7, F8 with all pairs; SEEDS.md section 5, point 17",
        work: || Worked::by(spike::spike),
    },
    Claim {
        id: "C44",
        claim: "Taking 164 rows apart and together for attention, d = 4,096: bytes; time; share \
                of the step once, in 32 layers, and at most",
        lecture: Some("2.69 MB; 0.80 us; 0.004 %, falling"),
        expected: &[2.687, 0.802, 0.0040, 0.128, 0.16],
        tolerance: Relative(0.002),
        verdict: Differs { why: "it happens in each of 32 layers, and the share rises" },
        formula: "F6: 2 x 2 d B bytes, over beta, over t(B)",
        work: || Worked::by(spike::selective_batching),
    },
    Claim {
        id: "C45",
        claim: "Arithmetic used, and idle, at 164 decodes of the 7B",
        lecture: None,
        expected: &[11.4, 88.6],
        tolerance: Relative(0.002),
        verdict: Added,
        formula: "F6, F7: FLOPs / t / 989e12",
        work: || Worked::by(spike::idle),
    },
];

/// F6: bytes of the decodes alone.
fn decode_step_bytes() -> f64 {
    decode_bytes(140e9, BATCH, CONTEXT, 320e3, 0.0)
}

/// F7: FLOPs of the decodes and a chunk after `prefix` tokens.
fn mixed_step_flops(prefix: f64, chunk: f64) -> f64 {
    mixed_flops(70e9, model("70b-gqa").attention, (BATCH, CONTEXT), (prefix, chunk))
}
