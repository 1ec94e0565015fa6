//! Closed forms of SEEDS.md sections 4.1 and 4.6: chunks, two pools, crossovers.

use super::super::formulas::*;
use super::super::model::ModelProfile;
use super::Tolerance::{Exact, Relative};
use super::Verdict::Added;
use super::inputs::*;
use super::swap::k3_rate;
use super::worked::{GRIDS, TakeDown};
use super::{Claim, Worked};

const INFINITE: f64 = f64::INFINITY;

/// Contexts of the tables, tokens.
const CONTEXTS: [f64; 4] = [2048.0, 8192.0, 32_768.0, 131_072.0];

pub(super) const CLAIMS: &[Claim] = &[
    Claim {
        id: "G4",
        claim: "FLOPs of 8,192 tokens of the 70B in chunks of 480, 2,016 and 8,160",
        lecture: Some("1.152; 1.168; 1.234 PFLOP"),
        expected: &[1.234841, 1.234841, 1.234841],
        tolerance: Relative(1e-6),
        verdict: super::Verdict::Differs { why: "F7 of the lecture leaves the prefix out" },
        formula: "F7 with the prefix: 2 P c + 4 d n (c start + c^2 / 2), summed",
        work: || {
            Worked::by(|w| {
                for (grid, result) in GRIDS {
                    for budget in [512, 2048, 8192] {
                        chunked_flops(w, chunk_plan(8192, budget, 32, grid), result);
                    }
                }
            })
        },
    },
    Claim {
        id: "M4",
        claim: "200 GB for K3 (f32, windows), slots to blocks 0.1, 0.25, 0.9, 2: slots; most \
                sequences of 2,048, 32,768 and 131,072 tokens",
        lecture: None,
        expected: &[
            40.0, 89.0, 210.0, 296.0, 40.0, 89.0, 210.0, 296.0, 40.0, 89.0, 116.0, 73.0, 40.0,
            44.0, 29.0, 18.0,
        ],
        tolerance: Exact,
        verdict: Added,
        formula: "F19: min(floor(M r / (1 + r) / V), floor(M / (1 + r) / (L kv)))",
        work: || Worked::by(two_pools),
    },
    Claim {
        id: "M5",
        claim: "Ratio at which both pools run full together, at 2,048, 8,192, 32,768 and 131,072 \
                tokens: K3 bf16, K3 f32, Kimi-Linear; context below which slots run out first at \
                0.9: K3 f32, K3 bf16, Kimi-Linear",
        lecture: None,
        expected: &[
            3.83, 0.958, 0.240, 0.060, 7.94, 1.98, 0.496, 0.124, 2.63, 0.657, 0.164, 0.041,
            18_059.0, 8723.0, 5982.0,
        ],
        tolerance: Relative(0.005),
        verdict: Added,
        formula: "F19: V / (L kv); V / (r kv)",
        work: || Worked::by(ratios),
    },
    Claim {
        id: "M7",
        claim: "State that 64 decodes of K3 (f32, windows) read and write; its time on one H100; \
                tokens of MLA rows that take as long, f32 and bf16",
        lecture: None,
        expected: &[57.5, 17.2, 32_506.0, 15_701.0],
        tolerance: Relative(0.002),
        verdict: Added,
        formula: "F6: 2 V B; 2 V / kv",
        work: || {
            Worked::by(|w| {
                let (bf16, real) = (model("k3"), model("k3-real"));
                let bytes = decode_bytes(0.0, 64.0, 0.0, 0.0, real.state());
                w.result("64 x 2 x 449,372,160", bytes / 1e9, "GB");
                w.result("over 3.35e12", bytes / BANDWIDTH * 1e3, "ms");
                w.result("f32: 2 V / 27,648", 2.0 * real.state() / real.kv_bytes, "tokens");
                w.result("bf16: 2 V / 27,648", 2.0 * bf16.state() / bf16.kv_bytes, "tokens");
            })
        },
    },
    Claim {
        id: "M8",
        claim: "Longest length at which recompute wins, by link in GB/s: 7B MHA 64, 36, 32, 25, \
                16; 7B GQA-8 9, 8, 6; 70B 2.2, 2, 1.5, 1; 70B at 34 KB 0.2",
        lecture: None,
        expected: &[
            0.0, 3593.0, 10_468.0, 27_793.0, 72_343.0, 3593.0, 10_468.0, 31_093.0, 3052.0,
            14_038.0, 54_321.0, 134_888.0, 21_591.0,
        ],
        tolerance: Relative(0.005),
        verdict: Added,
        formula: "F14: L* = (2 kv / link - 2 P / pi) / (2 d n / pi)",
        work: || Worked::by(dense_crossovers),
    },
    Claim {
        id: "M8-links",
        claim: "Link above which swap always wins: 7B MHA, 7B GQA-8, 70B, 70B at 34 KB; break-even \
                links at 512, 4,096, 32,768 and 131,072 tokens, 70B and 70B at 34 KB",
        lecture: None,
        expected: &[
            38.52, 9.63, 2.263, 0.2404, 2.252, 2.179, 1.732, 1.016, 0.239, 0.232, 0.184, 0.108,
        ],
        tolerance: Relative(0.005),
        verdict: Added,
        formula: "F14: kv pi / P; F15: 2 L kv / T_recompute",
        work: || Worked::by(dense_links),
    },
    Claim {
        id: "M9",
        claim: "Length from which on swap wins, by link of 64, 32, 16, 8, 4 and 1 GB/s: K3 bf16, \
                K3 f32, Kimi-Linear, Qwen3-Next; Kimi-Linear at 100 tok/s and 1 GB/s",
        lecture: None,
        expected: &[
            31.0, 62.2, 125.0, 255.0, 527.0, 2639.0, 64.1, 129.0, 260.0, 528.0, 1091.0, 5464.0,
            114.0, 234.0, 488.0, 1074.0, 2684.0, INFINITE, 213.0, 456.0, 1067.0, 3232.0, INFINITE,
            INFINITE, 8.7,
        ],
        tolerance: Relative(0.005),
        verdict: Added,
        formula: "F16: L* = (2 V / link) / (1 / R - 2 kv / link)",
        work: || Worked::by(hybrid_crossovers),
    },
    Claim {
        id: "M10",
        claim: "K3 bf16 at 2,048, 8,192, 32,768 and 131,072 tokens: replay in s, swap in ms, \
                checkpoint every 6,144 and replay of the rest in s; break-even link at 131,072, \
                bf16 and f32, in GB/s; the worst rest in s",
        lecture: None,
        expected: &[
            0.450, 8.55, 0.450, 1.80, 13.86, 0.456, 7.20, 35.1, 0.467, 28.8, 120.0, 0.509, 0.267,
            0.283, 1.35,
        ],
        tolerance: Relative(0.002),
        verdict: Added,
        formula: "F16, F17: L / R; (2 V + 2 L kv) / link; (V + K kv) / link + (L - K) / R",
        work: || Worked::by(ladder),
    },
];

/// FLOPs of a prompt of the 70B in these chunks, the first of which are of one length.
fn chunked_flops(w: &mut Worked, plan: Vec<usize>, result: TakeDown) {
    let model = model("70b-gqa");
    let ends = plan.iter().scan(0, |end, rows| {
        *end += rows;
        Some(*end)
    });
    let chunks: Vec<(usize, usize)> = ends.zip(&plan).map(|(end, c)| (end - c, *c)).collect();
    for &(start, c) in [chunks.first(), chunks.last()].into_iter().flatten() {
        let text = format!("2 x 70e9 x {c} + 4 x 8192 x 80 x ({c} x {start} + {c}^2 / 2)");
        w.step(&text, model.chunk_flops(start, c) / 1e15, "PFLOP");
    }
    let flops: f64 = chunks.iter().map(|(start, c)| model.chunk_flops(*start, *c)).sum();
    let text = format!("sum of {} x {} and {}", chunks.len() - 1, plan[0], plan[plan.len() - 1]);
    result(w, &text, flops / 1e15, "PFLOP");
}

fn two_pools(w: &mut Worked) {
    let k3 = model("k3-real");
    let (state, kv) = (k3.state(), k3.kv_bytes);
    let ratios = [0.1, 0.25, 0.9, 2.0];
    for ratio in ratios {
        let split = PoolSplit::by_ratio(200e9, ratio);
        let text = format!("r = {ratio}: floor(200e9 x {ratio} / (1 + {ratio}) / {state})");
        w.result(&text, split.slots(state), "slots");
    }
    for context in [2048.0, 32_768.0, 131_072.0] {
        for ratio in ratios {
            let split = PoolSplit::by_ratio(200e9, ratio);
            let most = split.sequences(state, kv, context);
            let slots = split.slots(state);
            let text = format!(
                "r = {ratio}: min({slots}, floor(200e9 / (1 + {ratio}) / ({context} x {kv})))"
            );
            w.result(&text, most, "sequences");
        }
    }
}

fn ratios(w: &mut Worked) {
    for name in ["k3", "k3-real", "kimi-linear"] {
        let model = model(name);
        for context in CONTEXTS {
            let text = format!("{name}: {} / ({context} x {})", model.state(), model.kv_bytes);
            w.result(&text, balanced_ratio(model.state(), model.kv_bytes, context), "");
        }
    }
    for name in ["k3-real", "k3", "kimi-linear"] {
        let model = model(name);
        let text = format!("{name}: {} / (0.9 x {})", model.state(), model.kv_bytes);
        w.result(&text, slot_bound_context(model.state(), model.kv_bytes, 0.9), "tokens");
    }
}

fn dense_crossovers(w: &mut Worked) {
    let links: [(&str, &[f64]); 4] = [
        ("7b-mha", &[64.0, 36.0, 32.0, 25.0, 16.0]),
        ("7b-gqa8", &[9.0, 8.0, 6.0]),
        ("70b-gqa", &[2.2, 2.0, 1.5, 1.0]),
        ("70b-mla34", &[0.2]),
    ];
    for (name, links) in links {
        let model = model(name);
        w.note(&format!("{name}:"));
        for link in links {
            let (text, longest) = dense_longest(&model, *link);
            w.result(&text, longest, "tokens");
        }
    }
    w.note("0: swap wins at every length; where all pairs count the others halve:");
    let mha = model("7b-mha");
    let all_pairs = ModelProfile { attention: 2.0 * mha.attention, ..mha.clone() };
    for link in [32.0, 25.0] {
        let (text, longest) = dense_longest(&all_pairs, link);
        w.step(&text, longest, "tokens");
    }
    w.note("at 38.5 GB/s, beside the 7B's threshold, L* hangs on the fourth digit of P:");
    for active_params in [6_738_415_616.0, 6.738e9] {
        let (text, longest) = dense_longest(&ModelProfile { active_params, ..mha.clone() }, 38.5);
        w.step(&text, longest, "tokens");
    }
}

/// F14 with a link in GB/s, and what it gives.
fn dense_longest(model: &ModelProfile, link: f64) -> (String, f64) {
    let (params, attention, kv) = (model.active_params, model.attention, model.kv_bytes);
    let longest = dense_crossover(params, attention, kv, link * 1e9, COMPUTE);
    let text = format!(
        "max(0, (2 x {kv} / {link}e9 - 2 x {params} / 495e12) / ({attention} / 2 / 495e12))"
    );
    (text, longest)
}

fn dense_links(w: &mut Worked) {
    for name in ["7b-mha", "7b-gqa8", "70b-gqa", "70b-mla34"] {
        let model = model(name);
        let link = dense_threshold_link(model.active_params, model.kv_bytes, COMPUTE);
        let text = format!("{name}: {} x 495e12 / {:e}", model.kv_bytes, model.active_params);
        w.result(&text, link / 1e9, "GB/s");
    }
    for name in ["70b-gqa", "70b-mla34"] {
        let model = model(name);
        for tokens in [512.0, 4096.0, 32_768.0, 131_072.0] {
            let again = recompute_seconds(70e9, model.attention, tokens, COMPUTE);
            let link = break_even_link(0.0, tokens, model.kv_bytes, again);
            let kv = model.kv_bytes;
            let text = format!("{name}: 2 x {tokens} x {kv} / {:.2} ms", again * 1e3);
            w.result(&text, link / 1e9, "GB/s");
        }
    }
}

fn hybrid_crossovers(w: &mut Worked) {
    for name in ["k3", "k3-real", "kimi-linear", "qwen3-next"] {
        let model = model(name);
        let (state, kv) = (model.state(), model.kv_bytes);
        // The linear part only, as the formula has it.
        let rate = model.prefill_rate.unwrap_or(COMPUTE / (2.0 * model.active_params));
        w.note(&format!("{name}: V = {state}, kv = {kv}, R = {rate} tok/s"));
        for link in [64.0, 32.0, 16.0, 8.0, 4.0, 1.0] {
            let from = hybrid_crossover(state, kv, link * 1e9, rate);
            let (v, swap) = (format!("2 x {state} / {link}e9"), format!("2 x {kv} / {link}e9"));
            w.result(&format!("({v}) / (1 / {rate:.1} - {swap})"), from, "tokens");
        }
    }
    let kimi = model("kimi-linear");
    let from = hybrid_crossover(kimi.state(), kimi.kv_bytes, 1e9, 100.0);
    let (state, kv) = (kimi.state(), kimi.kv_bytes);
    let text = format!("kimi-linear: (2 x {state} / 1e9) / (1 / 100 - 2 x {kv} / 1e9)");
    w.result(&text, from, "tokens");
}

fn ladder(w: &mut Worked) {
    let (k3, real, rate) = (model("k3"), model("k3-real"), k3_rate());
    for tokens in CONTEXTS {
        let replay = replay_seconds(tokens, rate);
        w.result(&format!("{tokens} / 4550"), replay, "s");
        let swap = swap_seconds(k3.state(), tokens, k3.kv_bytes, LINK);
        let (state, kv) = (k3.state(), k3.kv_bytes);
        w.result(&format!("2 x ({state} + {tokens} x {kv}) / 64e9"), swap * 1e3, "ms");
        let kept = (tokens / 6144.0).floor() * 6144.0;
        let (text, restored) = match kept > 0.0 {
            true => (
                format!("({state} + {kept} x {kv}) / 64e9 + ({tokens} - {kept}) / 4550"),
                checkpoint_seconds((state, kv), (kept, tokens), LINK, rate),
            ),
            false => (format!("no checkpoint yet: {tokens} / 4550"), replay),
        };
        w.result(&text, restored, "s");
    }
    for model in [k3, real] {
        let link = break_even_link(model.state(), 131_072.0, model.kv_bytes, 131_072.0 / rate);
        let (state, kv) = (model.state(), model.kv_bytes);
        let text = format!("2 x ({state} + 131072 x {kv}) / (131072 / 4550)");
        w.result(&text, link / 1e9, "GB/s");
    }
    w.result("6143 / 4550", replay_seconds(6143.0, rate), "s");
}
