//! Swap or recompute (SEEDS.md section 3.5).

use super::super::formulas::*;
use super::Tolerance::{Exact, Relative};
use super::Verdict::{Agrees, Differs};
use super::inputs::*;
use super::mixed::full_prefill;
use super::{Claim, Worked};

const LENGTHS: [f64; 4] = [512.0, 4096.0, 32_768.0, 131_072.0];

pub(super) const CLAIMS: &[Claim] = &[
    Claim {
        id: "C60",
        claim: "Recompute of 512, 4,096, 32,768 and 131,072 tokens of the 70B",
        lecture: Some("145; 1,203; 12,111; 82,600 ms"),
        expected: &[145.50, 1202.9, 12_110.9, 82_560.0],
        tolerance: Relative(0.0005),
        verdict: Agrees,
        formula: "F12: (2 P L + 2 d n L^2) / (pi MFU)",
        work: || {
            Worked::by(|w| {
                for tokens in LENGTHS {
                    let text =
                        format!("(2 x 70e9 x {tokens} + 2 x 8192 x 80 x {tokens}^2) / 495e12");
                    w.result(&text, recompute_70b(tokens) * 1e3, "ms");
                }
            })
        },
    },
    Claim {
        id: "C61",
        claim: "Swap of 512, 4,096, 32,768 and 131,072 tokens of the 70B, out and in, 320 KB a \
                token",
        lecture: Some("5.1; 41.0; 327.7; 1,310 ms"),
        expected: &[5.12, 40.96, 327.68, 1310.7],
        tolerance: Relative(0.0005),
        verdict: Agrees,
        formula: "F13: 2 L kv / link",
        work: || {
            Worked::by(|w| {
                swaps(w, 320e3, "320e3");
                let binary = swap_seconds(0.0, 512.0, 327_680.0, LINK) * 1e3;
                w.step("512 tokens of 327,680 bytes", binary, "ms");
            })
        },
    },
    Claim {
        id: "C62",
        claim: "Swap of 512, 4,096, 32,768 and 131,072 tokens of the 70B, out and in, 34 KB a \
                token",
        lecture: Some("0.5; 4.4; 34.8; 139 ms"),
        expected: &[0.544, 4.352, 34.816, 139.26],
        tolerance: Relative(0.0005),
        verdict: Agrees,
        formula: "F13: 2 L kv / link",
        work: || Worked::by(|w| swaps(w, 34e3, "34e3")),
    },
    Claim {
        id: "C63",
        claim: "Swap wins everywhere: us per token to recompute and to swap; least and largest \
                ratio, at 320 KB and at 34 KB; longest length at which recompute wins",
        lecture: Some("swap"),
        expected: &[282.8, 10.0, 28.4, 63.0, 267.5, 592.8, 0.0],
        tolerance: Relative(0.002),
        verdict: Agrees,
        formula: "F14: L* = (s - a) / c",
        work: || Worked::by(swap_everywhere),
    },
    Claim {
        id: "C64",
        claim: "7B at 4,096 tokens: swap and recompute in ms; how much faster swap is, of MHA and \
                of GQA-8",
        lecture: Some("67; 129 ms; 1.9x; 7.7x"),
        expected: &[67.11, 129.29, 1.927, 7.706],
        tolerance: Relative(0.0005),
        verdict: Agrees,
        formula: "F13; F12 with all pairs",
        work: || {
            Worked::by(|w| {
                let mha = swap_seconds(0.0, 4096.0, 524_288.0, LINK);
                let gqa = swap_seconds(0.0, 4096.0, 131_072.0, LINK);
                let again = full_prefill(4096.0) / COMPUTE;
                w.result("2 x 4096 x 524,288 / 64e9", mha * 1e3, "ms");
                w.result("63.997e12 / 495e12", again * 1e3, "ms");
                w.result("MHA", again / mha, "x");
                w.result("GQA-8, 131,072 bytes a token", again / gqa, "x");
            })
        },
    },
    Claim {
        id: "C65",
        claim: "Link at which both take as long at 4,096 tokens, MHA and GQA-8",
        lecture: Some("33.3; 8.3 GB/s"),
        expected: &[33.22, 8.31],
        tolerance: Relative(0.001),
        verdict: Agrees,
        formula: "F15: 2 L kv / T_recompute",
        work: || {
            Worked::by(|w| {
                let again = full_prefill(4096.0) / COMPUTE;
                for kv in [524_288.0, 131_072.0] {
                    let link = break_even_link(0.0, 4096.0, kv, again);
                    w.result(&format!("2 x 4096 x {kv} / 129.29 ms"), link / 1e9, "GB/s");
                }
            })
        },
    },
    Claim {
        id: "C66",
        claim: "K3: bytes a token, bytes of state in bf16",
        lecture: Some("27.0 KiB; 0.20 GiB"),
        expected: &[27_648.0, 217_055_232.0],
        tolerance: Exact,
        verdict: Agrees,
        formula: "24 MLA layers x 576 x 2; 69 KDA layers x 96 heads x 128^2 x 2",
        work: || {
            Worked::by(|w| {
                let k3 = model("k3");
                let kv = w.result("24 x 576 x 2", k3.kv_bytes, "B");
                w.step("that is", kv / 1024.0, "KiB");
                let state = w.result("69 x 96 x 128^2 x 2", k3.state_bytes as f64, "B");
                w.step("that is", state / 1024.0_f64.powi(3), "GiB");
            })
        },
    },
    Claim {
        id: "C67",
        claim: "K3's state out and in: bf16; f32 with its windows, as servers hold it",
        lecture: Some("6.8 ms"),
        expected: &[6.783, 14.04],
        tolerance: Relative(0.0005),
        verdict: Agrees,
        formula: "F16: 2 V / link",
        work: || {
            Worked::by(|w| {
                for name in ["k3", "k3-real"] {
                    let state = model(name).state();
                    let seconds = swap_seconds(state, 0.0, 0.0, LINK);
                    w.result(&format!("2 x {state} / 64e9"), seconds * 1e3, "ms");
                }
            })
        },
    },
    Claim {
        id: "C68",
        claim: "K3: replay of 131,072 tokens",
        lecture: Some("29 s"),
        expected: &[28.81],
        tolerance: Relative(0.0005),
        verdict: Agrees,
        formula: "F16: L / R",
        work: || {
            Worked::by(|w| {
                w.result("131072 / 4550", replay_seconds(131_072.0, k3_rate()), "s");
            })
        },
    },
    Claim {
        id: "C69",
        claim: "K3's state in f32 on each of 8 ranks",
        lecture: Some("54 MB"),
        expected: &[54.26],
        tolerance: Relative(0.0005),
        verdict: Agrees,
        formula: "69 x 96 x 128^2 x 4 / 8",
        work: || {
            Worked::by(|w| {
                let state = model("k3-real").state_bytes as f64;
                w.result(&format!("{state} / 8"), state / 8.0 / 1e6, "MB");
            })
        },
    },
    Claim {
        id: "C70",
        claim: "K3: the whole swap, bf16 state and blocks, at 2,048, 8,192, 32,768 and 131,072 \
                tokens",
        lecture: Some("6.8 ms at any length"),
        expected: &[8.55, 13.86, 35.1, 120.0],
        tolerance: Relative(0.0005),
        verdict: Differs { why: "its MLA blocks grow: 113 ms of 120 at 131,072 tokens" },
        formula: "F16: (2 V + 2 L kv) / link",
        work: || {
            Worked::by(|w| {
                let k3 = model("k3");
                for tokens in [2048.0, 8192.0, 32_768.0, 131_072.0] {
                    let seconds = swap_seconds(k3.state(), tokens, k3.kv_bytes, LINK);
                    let text = format!("2 x (217,055,232 + {tokens} x 27,648) / 64e9");
                    w.result(&text, seconds * 1e3, "ms");
                }
            })
        },
    },
    Claim {
        id: "C71",
        claim: "Tokens whose MLA rows take as much as a KDA layer's state and window of K3; the \
                next multiple of 512",
        lecture: Some("6,144"),
        expected: &[5653.3, 6144.0],
        tolerance: Relative(0.00001),
        verdict: Agrees,
        formula: "(96 x 128^2 x 4 + 3 x 3 x 96 x 128 x 2) / 1152",
        work: || {
            Worked::by(|w| {
                let k3 = model("k3-real");
                let layer = w.step("(V + windows) / 69", k3.state() / 69.0, "B");
                let tokens = w.result("over 27,648 / 24", layer / (k3.kv_bytes / 24.0), "tokens");
                w.result("rounded up", (tokens / 512.0).ceil() * 512.0, "tokens");
            })
        },
    },
];

/// Tokens a second that lecture A replays K3 with.
pub(super) fn k3_rate() -> f64 {
    model("k3").prefill_rate.expect("the preset has the measured rate")
}

fn recompute_70b(tokens: f64) -> f64 {
    let model = model("70b-gqa");
    recompute_seconds(model.active_params, model.attention, tokens, COMPUTE)
}

fn swaps(w: &mut Worked, kv: f64, shown: &str) {
    for tokens in LENGTHS {
        let seconds = swap_seconds(0.0, tokens, kv, LINK);
        w.result(&format!("2 x {tokens} x {shown} / 64e9"), seconds * 1e3, "ms");
    }
}

fn swap_everywhere(w: &mut Worked) {
    w.result("a = 2 x 70e9 / 495e12", 2.0 * 70e9 / COMPUTE * 1e6, "us");
    w.result("s = 2 x 320e3 / 64e9", 2.0 * 320e3 / LINK * 1e6, "us");
    for kv in [320e3, 34e3] {
        for tokens in [512.0, 131_072.0] {
            let ratio = recompute_70b(tokens) / swap_seconds(0.0, tokens, kv, LINK);
            let text = format!("{:.5} s / (2 x {tokens} x {kv} / 64e9)", recompute_70b(tokens));
            w.result(&text, ratio, "x");
        }
    }
    let attention = model("70b-gqa").attention;
    let crossover = dense_crossover(70e9, attention, 320e3, LINK, COMPUTE);
    w.result("max(0, (10e-6 - 282.83e-6) / (2 x 8192 x 80 / 495e12))", crossover, "tokens");
}
