//! The nine errors of the lectures (SEEDS.md section 5), at our value.

use super::super::formulas::*;
use super::Tolerance::{Exact, Relative};
use super::Verdict::Differs;
use super::inputs::*;
use super::{Claim, Worked, batching, mixed, queue};

pub(super) const CLAIMS: &[Claim] = &[
    Claim {
        id: "E1",
        claim: "Static efficiency at a batch of 128",
        lecture: Some("17.0 %"),
        expected: &[18.41],
        tolerance: Relative(0.001),
        verdict: Differs { why: "17.0 % belongs to a batch of about 200 (C03)" },
        formula: "F3: 1 / H_128",
        work: || {
            Worked::by(|w| {
                w.result("1 / H_128", 100.0 / harmonic(128), "%");
                w.step("1 / H_200", 100.0 / harmonic(200), "%");
            })
        },
    },
    Claim {
        id: "E2",
        claim: "Mean time to the first token with ageing",
        lecture: Some("324 ms"),
        expected: &[343.0],
        tolerance: Relative(0.001),
        verdict: Differs { why: "the lecture's sum is wrong (C54)" },
        formula: "F22: 7 short, the long one, 13 short",
        work: || Worked::by(queue::aged_mean),
    },
    Claim {
        id: "E3",
        claim: "Places that ageing changes when all arrive together, k = 0.5, 1.31, 5",
        lecture: Some("implied to work"),
        expected: &[0.0, 0.0, 0.0],
        tolerance: Exact,
        verdict: Differs { why: "all age alike: it needs promotion or later arrivals (C55)" },
        formula: "F23: cost - k waited",
        work: || Worked::by(queue::ageing_of_equals),
    },
    Claim {
        id: "E4",
        claim: "Short ones that go before the long one at k = 1.31, and its first token",
        lecture: Some("7; under 400 ms"),
        expected: &[8.0, 407.9],
        tolerance: Relative(0.001),
        verdict: Differs { why: "7 need k of at least 1.393 (C53)" },
        formula: "F23 with promotion: S_long - k waited <= S_short",
        work: || Worked::by(queue::shorts_first),
    },
    Claim {
        id: "E5",
        claim: "Tokens of GQA-8 for each of 295 sequences in 30 ms",
        lecture: Some("2,360"),
        expected: &[2304.0],
        tolerance: Relative(0.0005),
        verdict: Differs { why: "0.295 GB over 128 KB, not 125 KB (C28)" },
        formula: "F20 for L",
        work: || {
            Worked::by(|w| {
                let each = (0.030 * BANDWIDTH - 13.5e9) / 295.0;
                w.result("(100.5e9 - 13.5e9) / 295 / 128e3", each / 128e3, "tokens");
            })
        },
    },
    Claim {
        id: "E6",
        claim: "Ratio of a step that a prompt of 4,096 hits, one after the other; of the roofline",
        lecture: Some("6.7x for 149 ms"),
        expected: &[7.44, 6.67],
        tolerance: Relative(0.001),
        verdict: Differs { why: "149 ms is 7.4x; 6.7x is 133.9 ms of another model (C43)" },
        formula: "F7, F8",
        work: || {
            Worked::by(|w| {
                let spike = Worked::by(mixed::spike);
                for (ms, times) in [(0, 1), (4, 5)].map(|(i, j)| (spike.values[i], spike.values[j]))
                {
                    w.result(&format!("{ms:.2} ms / {:.2} ms", ms / times), times, "x");
                }
            })
        },
    },
    Claim {
        id: "E7",
        claim: "Step of 164 sequences, and most sequences for 20 ms",
        lecture: Some("20 ms; 164"),
        expected: &[20.07, 163.0],
        tolerance: Relative(0.0005),
        verdict: Differs { why: "164 break the limit they are derived from (C25)" },
        formula: "F6, F20",
        work: || {
            Worked::by(|w| {
                let model = model("7b-mha-seed");
                let seconds = batching::step_seconds(&model, 164.0, CONTEXT_B, BANDWIDTH);
                w.result("(13.5e9 + 164 x 640 x 512e3) / 3.35e12", seconds * 1e3, "ms");
                let most = slo_batch(0.020, BANDWIDTH, 13.5e9, CONTEXT_B * 512e3, 0.0);
                w.result("floor((67e9 - 13.5e9) / (640 x 512e3))", most, "sequences");
            })
        },
    },
    Claim {
        id: "E8",
        claim: "Share of taking rows apart for attention, all 32 layers, at 164 rows; what it \
                rises to",
        lecture: Some("0.004 %, falling"),
        expected: &[0.128, 0.16],
        tolerance: Relative(0.002),
        verdict: Differs { why: "one layer of 32 was counted, and the share rises (C44)" },
        formula: "F6: 32 x 4 d B / (W + B L kv)",
        work: || {
            Worked::by(|w| {
                let once = Worked::by(mixed::selective_batching);
                let text = "32 x 4 x 4096 x 164 / (13.5e9 + 164 x 640 x 512e3)";
                w.result(text, once.values[3], "%");
                w.result("32 x 4 x 4096 / (640 x 512e3)", once.values[4], "%");
            })
        },
    },
    Claim {
        id: "E9",
        claim: "Chance that 32 outputs are all short, each with 90 %",
        lecture: Some("0.0342"),
        expected: &[0.03434],
        tolerance: Relative(0.0005),
        verdict: Differs { why: "0.0343 (C09)" },
        formula: "0.9^32",
        work: || {
            Worked::by(|w| {
                w.result("0.9^32", 0.9_f64.powi(32), "");
            })
        },
    },
];
