//! What a model costs, from its `config.json` (MODELS.md has the keys).
//!
//! Layer lists are read, never inferred; a key that is missing or that nobody knows is an error.

use serde_json::Value;

use super::ModelProfile;
use super::hybrid;
use super::keys::Keys;
use super::shape::{Latent, Shape, Stored};

/// All that is wrong with a `config.json`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("config.json cannot be used:\n  {}", .faults.join("\n  "))]
pub struct ModelConfigError {
    /// One line each, with the key.
    pub faults: Vec<String>,
}

/// Families by `model_type`, and how each is read.
const FAMILIES: &[(&str, Read)] = &[
    ("llama", |keys| dense(keys, Dense { divides: true, experts: false })),
    ("qwen2", |keys| dense(keys, Dense { divides: true, experts: false })),
    ("qwen3", |keys| dense(keys, Dense { divides: false, experts: false })),
    ("qwen3_moe", |keys| dense(keys, Dense { divides: false, experts: true })),
    ("deepseek_v2", deepseek),
    ("deepseek_v3", deepseek),
    ("kimi_linear", hybrid::kimi),
    ("qwen3_next", hybrid::qwen3_next),
];

type Read = fn(&mut Keys<'_>) -> Result<ModelProfile, Vec<String>>;

/// Keys that change no cost, in any family.
const INERT: &[&str] = &[
    "_name_or_path",
    "architectures",
    "attention_bias",
    "attention_dropout",
    "auto_map",
    "aux_loss_alpha",
    "bos_token_id",
    "eos_token_id",
    "ep_size",
    "hidden_act",
    "initializer_range",
    "mlp_bias",
    "model_type",
    "n_group",
    "norm_topk_prob",
    "num_expert_group",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "routed_scaling_factor",
    "router_aux_loss_coef",
    "scoring_func",
    "seq_aux",
    "tie_word_embeddings",
    "topk_group",
    "topk_method",
    "transformers_version",
    "use_cache",
];

const DTYPE: &[&str] = &["dtype", "torch_dtype"];
const CONTEXT: &[&str] = &["model_max_length", "max_position_embeddings"];
const EXPERTS: &[&str] = &["num_experts", "n_routed_experts", "num_local_experts"];
const PER_TOKEN: &[&str] = &["num_experts_per_token", "num_experts_per_tok"];
const SHARED: &[&str] = &["num_shared_experts", "n_shared_experts"];

impl ModelProfile {
    /// What the model of this `config.json` costs. Weights, blocks and windows have the file's
    /// dtype, the recurrent state is f32.
    ///
    /// # Errors
    /// The family is not known; keys are missing, not understood or out of range: all of them.
    pub fn from_config(text: &str) -> Result<ModelProfile, ModelConfigError> {
        let fail = |faults| Err(ModelConfigError { faults });
        let top: Value = match serde_json::from_str(text) {
            Ok(top) => top,
            Err(error) => return fail(vec![error.to_string()]),
        };
        let Some(top) = top.as_object() else { return fail(vec!["it is no object".into()]) };
        let mut keys = Keys::new(top);
        keys.inert(INERT);
        let names: Vec<&str> = FAMILIES.iter().map(|family| family.0).collect();
        let family = keys.choice(&["model_type"], &names);
        // An unknown family makes every other complaint noise.
        if let Some(fault) = keys.first_fault() {
            return fail(vec![fault]);
        }
        match FAMILIES[family].1(&mut keys) {
            Ok(profile) => Ok(ModelProfile { name: names[family].replace('_', "-"), ..profile }),
            Err(faults) => fail(faults),
        }
    }
}

/// Widths that every family has.
pub(super) struct Widths {
    pub hidden: usize,
    pub layers: usize,
    vocab: usize,
    pub context: usize,
    pub shape: Shape,
}

pub(super) fn widths(keys: &mut Keys<'_>) -> Widths {
    let width = [2, 2, 4][keys.choice(DTYPE, &["bfloat16", "float16", "float32"])];
    let stored = Stored::Plain(width);
    let mut widths = Widths {
        hidden: keys.size(&["hidden_size"]),
        layers: keys.size(&["num_hidden_layers"]),
        vocab: keys.size(&["vocab_size"]),
        context: keys.size(CONTEXT),
        shape: Shape::new(width, stored, stored),
    };
    // Tied or not, a step multiplies with one matrix of this shape.
    widths.shape.plain_matrix([widths.vocab, widths.hidden]);
    keys.rule(widths.layers <= 10_000, || {
        format!("num_hidden_layers is {}; it must be at most 10000", widths.layers)
    });
    widths
}

/// Gate, up and down of a feed-forward part.
pub(super) fn ffn(hidden: usize, inter: usize) -> [[usize; 2]; 3] {
    [[inter, hidden], [inter, hidden], [hidden, inter]]
}

/// What plain decoders differ in.
struct Dense {
    /// An absent `head_dim` is `hidden_size / num_attention_heads`.
    divides: bool,
    experts: bool,
}

/// Each head of keys and values serves as many of queries as the others.
pub(super) fn shares_heads(keys: &mut Keys<'_>, heads: usize, kv_heads: usize) {
    keys.rule(heads.is_multiple_of(kv_heads.max(1)), || {
        format!("num_key_value_heads is {kv_heads}; it must divide num_attention_heads, {heads}")
    });
}

/// Llama and Qwen: grouped-query attention in every layer (MODELS.md section 11).
fn dense(keys: &mut Keys<'_>, family: Dense) -> Result<ModelProfile, Vec<String>> {
    keys.only("use_sliding_window", &["false"]);
    keys.inert(&["sliding_window", "max_window_layers", "layer_types"]);
    let heads = keys.size(&["num_attention_heads"]);
    let kv_heads = keys.size(&["num_key_value_heads"]);
    let Widths { hidden, layers, context, mut shape, .. } = widths(keys);
    let head_dim = match family.divides {
        true => keys.optional_size(&["head_dim"]).unwrap_or_else(|| {
            // Keys that are missing are 0 here.
            let divides = hidden.is_multiple_of(heads.max(1)) && (hidden == 0 || hidden >= heads);
            let wanted = "a multiple of num_attention_heads where head_dim is absent";
            keys.rule(divides, || format!("hidden_size is {hidden}; it must be {wanted}"));
            hidden / heads.max(1)
        }),
        false => keys.size(&["head_dim"]),
    };
    shares_heads(keys, heads, kv_heads);
    full_attention_only(keys);
    let inter = keys.size(&["intermediate_size"]);
    let experts = family.experts.then(|| {
        keys.only("decoder_sparse_step", &["1"]);
        keys.only("mlp_only_layers", &["[]"]);
        let (count, per_token) = experts(keys);
        (count, per_token, keys.size(&["moe_intermediate_size"]))
    });
    keys.settled()?;
    for _ in 0..layers {
        let (queries, kept) = (heads * head_dim, kv_heads * head_dim);
        shape.matrices(&[[queries, hidden], [kept, hidden], [kept, hidden], [hidden, queries]]);
        shape.attends(2 * kept, heads, head_dim, head_dim);
        match experts {
            None => shape.matrices(&ffn(hidden, inter)),
            Some((count, per_token, inter)) => {
                shape.plain_matrix([count, hidden]);
                shape.routes(hidden, inter, count, per_token);
            }
        }
    }
    Ok(shape.profile("", context))
}

/// Refuses layers of windowed attention, whose blocks hold less than the context.
fn full_attention_only(keys: &mut Keys<'_>) {
    let list = keys.value("layer_types").cloned();
    let is_full = |list: &Value| {
        list.as_array().is_some_and(|list| list.iter().all(|kind| kind == "full_attention"))
    };
    keys.rule(list.as_ref().is_none_or(is_full), || {
        "layer_types must be a list of nothing but \"full_attention\"".into()
    });
}

/// DeepSeek V2 and V3: latent attention in every layer (MODELS.md section 12).
fn deepseek(keys: &mut Keys<'_>) -> Result<ModelProfile, Vec<String>> {
    // The layers beyond the last, which predict further tokens, do not run.
    keys.inert(&["num_nextn_predict_layers", "num_key_value_heads"]);
    keys.only("moe_layer_freq", &["1"]);
    let Widths { hidden, layers, context, mut shape, .. } = widths(keys);
    let heads = keys.size(&["num_attention_heads"]);
    let query_rank = keys.optional_size(&["q_lora_rank"]);
    let latent = latent(keys);
    let inter = keys.size(&["intermediate_size"]);
    let moe = moe(keys);
    if keys.value("quantization_config").is_some() {
        shape.stored = fp8(keys);
        shape.experts_stored = shape.stored;
    }
    keys.settled()?;
    for layer in 0..layers {
        mla(&mut shape, hidden, heads, query_rank, &latent);
        feed_forward(&mut shape, hidden, (layer < moe.dense).then_some(inter), &moe);
    }
    Ok(shape.profile("", context))
}

fn fp8(keys: &mut Keys<'_>) -> Stored {
    keys.only("quantization_config.quant_method", &["\"fp8\""]);
    keys.inert(&["quantization_config.activation_scheme", "quantization_config.fmt"]);
    let block = keys.sizes("quantization_config.weight_block_size");
    keys.rule(block.len() == 2, || {
        format!("quantization_config.weight_block_size has {} numbers, not 2", block.len())
    });
    Stored::Fp8([block.first(), block.get(1)].map(|size| size.copied().unwrap_or(1)))
}

pub(super) fn latent(keys: &mut Keys<'_>) -> Latent {
    Latent {
        rank: keys.size(&["kv_lora_rank"]),
        nope: keys.size(&["qk_nope_head_dim"]),
        rope: keys.whole(&["qk_rope_head_dim"], 0),
        value: keys.size(&["v_head_dim"]),
    }
}

pub(super) fn mla(
    shape: &mut Shape,
    hidden: usize,
    heads: usize,
    rank: Option<usize>,
    latent: &Latent,
) {
    let queries = heads * (latent.nope + latent.rope);
    match rank {
        None => shape.matrices(&[[queries, hidden]]),
        Some(rank) => shape.matrices(&[[rank, hidden], [queries, rank]]),
    }
    shape.attends_latent(hidden, heads, latent);
    shape.matrices(&[[hidden, heads * latent.value]]);
}

/// A mixture of experts.
pub(super) struct Moe {
    /// Layers before the first with experts.
    pub dense: usize,
    count: usize,
    per_token: usize,
    inter: usize,
    shared: usize,
    /// Width that experts work in, where it is not the model's.
    latent: Option<usize>,
}

pub(super) fn moe(keys: &mut Keys<'_>) -> Moe {
    let (count, per_token) = experts(keys);
    Moe {
        dense: keys.whole(&["first_k_dense_replace"], 0),
        count,
        per_token,
        inter: keys.size(&["moe_intermediate_size"]),
        shared: keys.whole(SHARED, 0),
        latent: keys.optional_size(&["routed_expert_hidden_size"]),
    }
}

/// Routed experts of a layer, and how many of them a token chooses.
pub(super) fn experts(keys: &mut Keys<'_>) -> (usize, usize) {
    let (count, per_token) = (keys.size(EXPERTS), keys.size(PER_TOKEN));
    keys.rule(count == 0 || per_token <= count, || {
        format!("{per_token} experts a token, but there are {count}")
    });
    (count, per_token)
}

/// A dense feed-forward part of that width, else experts.
pub(super) fn feed_forward(shape: &mut Shape, hidden: usize, dense: Option<usize>, moe: &Moe) {
    if let Some(inter) = dense {
        return shape.matrices(&ffn(hidden, inter));
    }
    shape.plain_matrix([moe.count, hidden]);
    if let Some(latent) = moe.latent {
        shape.matrices(&[[latent, hidden], [hidden, latent]]);
    }
    if moe.shared > 0 {
        shape.matrices(&ffn(hidden, moe.shared * moe.inter));
    }
    shape.routes(moe.latent.unwrap_or(hidden), moe.inter, moe.count, moe.per_token);
}
