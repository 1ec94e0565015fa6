//! Kimi-Linear (MODELS.md section 1): KDA layers with an MLA layer now and then, and a mixture of
//! experts in all but the first layers.
//!
//! Three things that still produce fluent text when they are wrong: the layer lists count from 1;
//! the latent's norm has epsilon 1e-6 whatever `rms_norm_eps` says; and without `gate_lower_bound`
//! the decay gate is the unbounded one.

use kernels::conv::MAX_WIDTH;
use kernels::kda::Gate;
use kernels::moe::{MOST_EXPERTS, Router, Score};

use super::config::{Config, ConfigFault};
use super::family::Family;
use super::spec::{Ffn, Kda, Layer, Mixer, Mla, ModelSpec, Moe, Part};

pub(super) const FAMILY: Family = Family {
    architecture: "KimiLinearForCausalLM",
    model_type: "kimi_linear",
    read,
    tensor_name,
    ignores: |_| false,
};

/// Moonshot's code builds this norm with its class default, not with `rms_norm_eps`.
const LATENT_EPS: f32 = 1e-6;

/// Layers are listed one by one, so their number has a bound of its own.
const LIST_LIMIT: u64 = 10_000;

fn read(config: &mut Config<'_>) -> Result<ModelSpec, Vec<ConfigFault>> {
    refuse_variants(config);
    let depth = config.size_up_to("num_hidden_layers", LIST_LIMIT);
    let dense = config.count("first_k_dense_replace");
    let inter = config.size("intermediate_size");
    let norm_eps = config.positive("rms_norm_eps") as f32;
    let (kda, mla) = (read_kda(config, norm_eps), read_mla(config));
    let moe = read_moe(config);
    let kda_layers = config.sizes("linear_attn_config.kda_layers");
    let full_layers = config.sizes("linear_attn_config.full_attn_layers");
    let mut spec = ModelSpec {
        family: "kimi_linear",
        vocab_size: config.size("vocab_size"),
        hidden: config.size("hidden_size"),
        norm_eps,
        tied_head: config.flag("tie_word_embeddings"),
        context: config.size("model_max_length"),
        quantize: None,
        compute: kernels::Compute::F32,
        kv_dtype: kernels::KvDtype::F32,
        layers: Vec::new(),
    };
    config.settled()?;

    config.rule((2..=MAX_WIDTH).contains(&kda.conv_width), || {
        format!("short_conv_kernel_size is {}; supported: 2 to {MAX_WIDTH}", kda.conv_width)
    });
    check_router(config, &moe.router);
    check_layer_lists(config, depth, &kda_layers, &full_layers);
    config.settled()?;
    spec.layers = (0..depth)
        .map(|i| {
            let recurrent = kda_layers.contains(&(i + 1));
            let mixer = if recurrent { Mixer::Kda(kda.clone()) } else { Mixer::Mla(mla.clone()) };
            let ffn = if i < dense { Ffn::Dense { inter } } else { Ffn::Moe(moe.clone()) };
            Layer { mixer, ffn }
        })
        .collect();
    Ok(spec)
}

/// Refuses what Kimi-Linear's config could say and what Kimi K3 does say.
fn refuse_variants(config: &mut Config<'_>) {
    // `head_dim` is read by nobody; without rotation the rotary keys mean nothing.
    config.inert(&["head_dim", "rope_theta", "rope_scaling", "rope_parameters"]);
    config.only("mla_use_nope", &["true"]);
    config.only("hidden_act", &[r#""silu""#]);
    config.only("moe_layer_freq", &["1"]);
    config.only("moe_router_activation_func", &[r#""sigmoid""#]);
    config.only("topk_method", &["null", r#""noaux_tc""#]);
    config.only("num_nextn_predict_layers", &["0", "null"]);
    config.only("q_lora_rank", &["null"]);
    config.only("mla_use_output_gate", &["null", "false"]);
    config.only("linear_attn_config.use_full_rank_gate", &["null", "false"]);
    config.only("latent_moe_use_norm", &["null", "false"]);
    for key in [
        "attn_res_block_size",
        "routed_expert_hidden_size",
        "activation_situ_beta",
        "activation_situ_linear_beta",
    ] {
        config.only(key, &["null"]);
    }
}

fn read_kda(config: &mut Config<'_>, norm_eps: f32) -> Kda {
    let gate = match config.optional_negative("linear_attn_config.gate_lower_bound") {
        Some(lower) => Gate::Bounded { lower: lower as f32 },
        None => Gate::Softplus,
    };
    Kda {
        heads: config.size("linear_attn_config.num_heads"),
        head_dim: config.size("linear_attn_config.head_dim"),
        conv_width: config.size("linear_attn_config.short_conv_kernel_size"),
        gate,
        norm_eps,
    }
}

fn read_mla(config: &mut Config<'_>) -> Mla {
    let heads = config.size("num_attention_heads");
    let kv_heads = config.size("num_key_value_heads");
    config.rule(heads == kv_heads, || {
        format!("num_key_value_heads is {kv_heads}, but latent attention has all {heads} heads")
    });
    Mla {
        heads,
        nope: config.size("qk_nope_head_dim"),
        rope: config.size("qk_rope_head_dim"),
        value_dim: config.size("v_head_dim"),
        rank: config.size("kv_lora_rank"),
        latent_eps: LATENT_EPS,
    }
}

fn read_moe(config: &mut Config<'_>) -> Moe {
    let inter = config.size("moe_intermediate_size");
    let shared = config.count("num_shared_experts");
    let (groups, top_groups) = (config.size("num_expert_group"), config.size("topk_group"));
    let grouped = config.flag("use_grouped_topk");
    Moe {
        inter,
        // The shared experts are stored as one, wide as all of them.
        shared_inter: inter * shared,
        router: Router {
            experts: config.size_up_to("num_experts", MOST_EXPERTS as u64),
            top_k: config.size("num_experts_per_token"),
            score: Score::Sigmoid,
            groups: if grouped { groups } else { 1 },
            top_groups: if grouped { top_groups } else { 1 },
            renormalize: config.flag("moe_renormalize"),
            scale: config.positive("routed_scaling_factor") as f32,
        },
    }
}

fn check_router(config: &mut Config<'_>, router: &Router) {
    let Router { experts, top_k, groups, top_groups, .. } = *router;
    let split = experts.is_multiple_of(groups) && (groups == 1 || experts / groups >= 2);
    config.rule(split, || {
        format!(
            "num_experts ({experts}) cannot be split into num_expert_group ({groups}) groups of \
             2 or more"
        )
    });
    config.rule(top_groups <= groups, || {
        format!("topk_group ({top_groups}) is above num_expert_group ({groups})")
    });
    let choice = experts / groups * top_groups.min(groups);
    config.rule(top_k <= choice, || {
        format!(
            "num_experts_per_token ({top_k}) is above the {choice} experts there are to choose from"
        )
    });
}

/// The two lists together must name each of the layers 1..=depth once.
fn check_layer_lists(config: &mut Config<'_>, depth: usize, kda: &[usize], full: &[usize]) {
    let mut named: Vec<usize> = kda.iter().chain(full).copied().collect();
    named.sort_unstable();
    config.rule(named.iter().copied().eq(1..=depth), || {
        let strange: Vec<usize> = named
            .iter()
            .copied()
            .filter(|&layer| layer > depth)
            .chain(named.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| pair[0]))
            .collect();
        let absent: Vec<usize> = (1..=depth).filter(|n| named.binary_search(n).is_err()).collect();
        format!(
            "kda_layers and full_attn_layers must name each layer from 1 to {depth} once; \
             not named: {absent:?}, named twice or not there: {strange:?}"
        )
    });
}

fn tensor_name(layer: Option<usize>, part: Part) -> String {
    let place = match part {
        Part::Embedding => return "model.embed_tokens.weight".to_owned(),
        Part::FinalNorm => return "model.norm.weight".to_owned(),
        Part::Head => return "lm_head.weight".to_owned(),
        Part::MixerNorm => "input_layernorm.weight",
        Part::FfnNorm => "post_attention_layernorm.weight",
        Part::Query => "self_attn.q_proj.weight",
        Part::Key => "self_attn.k_proj.weight",
        Part::Value => "self_attn.v_proj.weight",
        Part::Output => "self_attn.o_proj.weight",
        Part::LatentDown => "self_attn.kv_a_proj_with_mqa.weight",
        Part::LatentNorm => "self_attn.kv_a_layernorm.weight",
        Part::LatentUp => "self_attn.kv_b_proj.weight",
        Part::QueryConv => "self_attn.q_conv1d.weight",
        Part::KeyConv => "self_attn.k_conv1d.weight",
        Part::ValueConv => "self_attn.v_conv1d.weight",
        Part::DecayDown => "self_attn.f_a_proj.weight",
        Part::DecayUp => "self_attn.f_b_proj.weight",
        Part::DecayLog => "self_attn.A_log",
        Part::DecayBias => "self_attn.dt_bias",
        Part::Beta => "self_attn.b_proj.weight",
        Part::GateDown => "self_attn.g_a_proj.weight",
        Part::GateUp => "self_attn.g_b_proj.weight",
        Part::HeadNorm => "self_attn.o_norm.weight",
        Part::FfnGate => "mlp.gate_proj.weight",
        Part::FfnUp => "mlp.up_proj.weight",
        Part::FfnDown => "mlp.down_proj.weight",
        Part::Router => "block_sparse_moe.gate.weight",
        Part::RouterBias => "block_sparse_moe.gate.e_score_correction_bias",
        Part::ExpertGate(e) => &format!("block_sparse_moe.experts.{e}.w1.weight"),
        Part::ExpertUp(e) => &format!("block_sparse_moe.experts.{e}.w3.weight"),
        Part::ExpertDown(e) => &format!("block_sparse_moe.experts.{e}.w2.weight"),
        Part::SharedGate => "block_sparse_moe.shared_experts.gate_proj.weight",
        Part::SharedUp => "block_sparse_moe.shared_experts.up_proj.weight",
        Part::SharedDown => "block_sparse_moe.shared_experts.down_proj.weight",
        Part::QueryNorm | Part::KeyNorm => unreachable!("Kimi-Linear has no {part:?}"),
    };
    let layer = layer.expect("only embedding, final norm and head belong to no layer");
    format!("model.layers.{layer}.{place}")
}
