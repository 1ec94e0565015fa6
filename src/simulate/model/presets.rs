//! Models by name: those the lectures reckon with, and some that exist.

use super::{CELL_TOKENS, Experts, ModelProfile, Weights};

/// Names that [`ModelProfile::preset`] knows.
pub const PRESETS: &[&str] = &[
    "70b-gqa",
    "70b-mla34",
    "7b-mha",
    "7b-mha-seed",
    "7b-gqa8",
    "7b-gqa8-seed",
    "8b-lab4",
    "k3",
    "k3-real",
    "kimi-linear",
    "qwen3-next",
    "deepseek-v3",
    "llama-3.1-8b",
    "llama-2-7b",
];

/// Parameters of the 7B: 32 layers of 202,375,168, embedding, head and norms.
const PARAMS_7B: f64 = 6_738_415_616.0;

/// Tokens a second that one accelerator prefills K3 with, as lecture A measured it.
const K3_PREFILL_RATE: f64 = 4550.0;

impl ModelProfile {
    /// The profile of that name, if there is one.
    ///
    /// The lectures' models (SEEDS.md section 1) have the figures the lectures use: `70b-gqa`
    /// 320,000 bytes a token where the model has 327,680, `70b-mla34` 34,000. Lecture B reckons
    /// with 512 KiB as 512,000 bytes in steps and as 524,288 in swaps: `7b-mha` and `7b-gqa8` have
    /// the exact bytes, `7b-mha-seed` and `7b-gqa8-seed` the rounded ones. `k3` keeps its state in
    /// bf16 and no windows, as lecture A reckons; `k3-real` what servers hold: f32, and windows in
    /// bf16. Both have the weights of the whole model, of which one accelerator of a group reads
    /// its share, and the prefill rate of one. The other names are models that exist, as their
    /// `config.json` gives them, but for `active_params` of `kimi-linear` and `qwen3-next`: 3e9, as
    /// both are called.
    pub fn preset(name: &str) -> Option<ModelProfile> {
        let name = *PRESETS.iter().find(|preset| **preset == name)?;
        let profile = match name {
            "70b-gqa" => lecture_a(320e3, 1),
            "70b-mla34" => lecture_a(34e3, CELL_TOKENS),
            "7b-mha" => lecture_b(2.0 * PARAMS_7B, 524_288.0),
            "7b-mha-seed" => lecture_b(13.5e9, 512e3),
            "7b-gqa8" => lecture_b(2.0 * PARAMS_7B, 131_072.0),
            "7b-gqa8-seed" => lecture_b(13.5e9, 128e3),
            "8b-lab4" => plain(8.03e9, 16.06e9, 131_072.0, mha_attention(4096.0, 32.0), None),
            "k3" => kimi_k3(217_055_232, 0),
            "k3-real" => kimi_k3(434_110_464, 15_261_696),
            "kimi-linear" => kimi_linear(),
            "qwen3-next" => qwen3_next(),
            "deepseek-v3" => deepseek_v3(),
            "llama-3.1-8b" => {
                let params = 7_504_658_432.0;
                plain(params, 2.0 * params, 131_072.0, mha_attention(4096.0, 32.0), Some(131_072))
            }
            "llama-2-7b" => {
                let params = 6_607_077_376.0;
                plain(params, 2.0 * params, 524_288.0, mha_attention(4096.0, 32.0), Some(4096))
            }
            _ => unreachable!("every name of PRESETS has its line"),
        };
        Some(ModelProfile { name: name.to_owned(), ..profile })
    }
}

/// `4 d n`: FLOPs per pair of query and key, where the heads together are `d` wide.
fn mha_attention(width: f64, layers: f64) -> f64 {
    4.0 * width * layers
}

/// `2 heads (d_qk + d_v) n`: the same for latent attention, whose rows are expanded.
fn mla_attention(heads: f64, layers: f64) -> f64 {
    2.0 * heads * (192.0 + 128.0) * layers
}

/// A dense model without recurrent layers.
fn plain(
    params: f64,
    weights: f64,
    kv_bytes: f64,
    attention: f64,
    max_context: Option<usize>,
) -> ModelProfile {
    ModelProfile {
        name: String::new(),
        active_params: params,
        weights: Weights { always_bytes: weights, experts: None },
        kv_bytes,
        state_bytes: 0,
        conv_bytes: 0,
        attention,
        grid: 1,
        prefill_rate: None,
        max_context,
    }
}

fn lecture_a(kv_bytes: f64, grid: usize) -> ModelProfile {
    let attention = mha_attention(8192.0, 80.0);
    ModelProfile { grid, ..plain(70e9, 140e9, kv_bytes, attention, None) }
}

fn lecture_b(weights: f64, kv_bytes: f64) -> ModelProfile {
    plain(PARAMS_7B, weights, kv_bytes, mha_attention(4096.0, 32.0), None)
}

/// 69 KDA and 24 MLA layers of 96 heads; experts in MXFP4, the rest in bf16 (MODELS.md section 2).
fn kimi_k3(state_bytes: u64, conv_bytes: u64) -> ModelProfile {
    let attention = mla_attention(96.0, 24.0);
    let context = Some(1_048_576);
    let mut model = plain(104_174_092_288.0, 111_107_440_640.0, 27_648.0, attention, context);
    model.weights.experts =
        Some(Experts { layers: 92, count: 896, per_token: 16, bytes: 17_547_264.0 });
    ModelProfile {
        state_bytes,
        conv_bytes,
        grid: CELL_TOKENS,
        prefill_rate: Some(K3_PREFILL_RATE),
        ..model
    }
}

/// 20 KDA and 7 MLA layers of 32 heads, state in f32 (MODELS.md section 1).
fn kimi_linear() -> ModelProfile {
    let attention = mla_attention(32.0, 7.0);
    let mut model = plain(3e9, 3_267_133_440.0, 8_064.0, attention, Some(1_048_576));
    model.weights.experts =
        Some(Experts { layers: 26, count: 256, per_token: 8, bytes: 14_155_776.0 });
    ModelProfile { state_bytes: 41_943_040, conv_bytes: 1_474_560, grid: CELL_TOKENS, ..model }
}

/// 36 layers of gated DeltaNet, 12 of attention with 16 heads of 256 (MODELS.md section 7).
fn qwen3_next() -> ModelProfile {
    let attention = mha_attention(16.0 * 256.0, 12.0);
    let mut model = plain(3e9, 4_104_847_360.0, 24_576.0, attention, Some(262_144));
    model.weights.experts =
        Some(Experts { layers: 48, count: 512, per_token: 10, bytes: 6_291_456.0 });
    ModelProfile { state_bytes: 75_497_472, conv_bytes: 1_769_472, grid: CELL_TOKENS, ..model }
}

/// 61 layers of MLA with 128 heads, matrices in fp8 but for router and head (MODELS.md section 12).
fn deepseek_v3() -> ModelProfile {
    let attention = mla_attention(128.0, 61.0);
    let mut model = plain(36_624_596_992.0, 17_226_764_640.0, 70_272.0, attention, Some(163_840));
    model.weights.experts =
        Some(Experts { layers: 58, count: 256, per_token: 8, bytes: 44_050_944.0 });
    ModelProfile { grid: CELL_TOKENS, ..model }
}
