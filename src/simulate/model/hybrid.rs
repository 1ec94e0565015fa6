//! The families with recurrent layers: Kimi-Linear, Kimi K3, Qwen3-Next.

use serde_json::Value;

use super::ModelProfile;
use super::config::{Widths, experts, feed_forward, ffn, latent, mla, moe, shares_heads, widths};
use super::keys::Keys;
use super::shape::{Recurrent, Stored};

/// Kimi-Linear and Kimi K3: KDA, and MLA where the lists say so (MODELS.md sections 1 and 2).
pub fn kimi(keys: &mut Keys<'_>) -> Result<ModelProfile, Vec<String>> {
    keys.inert(&[
        "activation_situ_beta",
        "activation_situ_linear_beta",
        "attn_res_block_size",
        "head_dim",
        "image_placeholder",
        "latent_moe_use_norm",
        "linear_attn_config.gate_lower_bound",
        "media_placeholder_token_id",
        "mla_use_nope",
        "moe_renormalize",
        "moe_router_activation_func",
        "num_key_value_heads",
        "num_nextn_predict_layers",
        "use_grouped_topk",
        "vision_config",
    ]);
    keys.only("moe_layer_freq", &["1"]);
    let Widths { hidden, layers, context, mut shape, .. } = widths(keys);
    if keys.value("quantization_config").is_some() {
        // What its list of exceptions leaves are the routed experts.
        keys.only("quantization_config.quant_method", &["\"compressed-tensors\""]);
        keys.only("quantization_config.format", &["\"mxfp4-pack-quantized\""]);
        keys.inert(&["quantization_config"]);
        shape.experts_stored = Stored::Mxfp4;
    }
    let heads = keys.size(&["num_attention_heads"]);
    let query_rank = keys.optional_size(&["q_lora_rank"]);
    let latent = latent(keys);
    let (output_gate, inter) =
        (keys.switch("mla_use_output_gate"), keys.size(&["intermediate_size"]));
    let moe = moe(keys);
    let (kda, full_rank) = (kda(keys), keys.switch("linear_attn_config.use_full_rank_gate"));
    let kda_layers = keys.sizes("linear_attn_config.kda_layers");
    let full_layers = keys.sizes("linear_attn_config.full_attn_layers");
    let named = (1..=layers).all(|i| kda_layers.contains(&i) != full_layers.contains(&i));
    keys.rule(named && kda_layers.len() + full_layers.len() == layers, || {
        format!(
            "linear_attn_config.kda_layers and .full_attn_layers must name each layer from 1 to \
             {layers} once"
        )
    });
    keys.settled()?;
    let inner = kda.value_heads * kda.value_dim;
    for layer in 0..layers {
        if kda_layers.contains(&(layer + 1)) {
            let low_rank = [[kda.key_dim, hidden], [inner, kda.key_dim]];
            shape.matrices(&[[inner, hidden]; 3]);
            shape.matrices(&low_rank);
            match full_rank {
                true => shape.matrices(&[[inner, hidden]]),
                false => shape.matrices(&low_rank),
            }
            shape.matrices(&[[kda.value_heads, hidden], [hidden, inner]]);
            shape.remembers(&kda);
        } else {
            mla(&mut shape, hidden, heads, query_rank, &latent);
            if output_gate {
                shape.matrices(&[[heads * latent.value, hidden]]);
            }
        }
        feed_forward(&mut shape, hidden, (layer < moe.dense).then_some(inter), &moe);
    }
    Ok(shape.profile("", context))
}

fn kda(keys: &mut Keys<'_>) -> Recurrent {
    let heads = keys.size(&["linear_attn_config.num_heads"]);
    let dim = keys.size(&["linear_attn_config.head_dim"]);
    let taps = keys.size(&["linear_attn_config.short_conv_kernel_size"]);
    Recurrent { key_heads: heads, value_heads: heads, key_dim: dim, value_dim: dim, taps }
}

/// Qwen3-Next: gated DeltaNet, and gated attention now and then (MODELS.md section 7).
pub fn qwen3_next(keys: &mut Keys<'_>) -> Result<ModelProfile, Vec<String>> {
    // Every layer has experts; `intermediate_size` is of the dense part that none has.
    keys.inert(&["intermediate_size", "partial_rotary_factor"]);
    keys.only("decoder_sparse_step", &["1"]);
    keys.only("mlp_only_layers", &["[]"]);
    keys.only("use_sliding_window", &["false"]);
    let Widths { hidden, layers, context, mut shape, .. } = widths(keys);
    let heads = keys.size(&["num_attention_heads"]);
    let kv_heads = keys.size(&["num_key_value_heads"]);
    let head_dim = keys.size(&["head_dim"]);
    shares_heads(keys, heads, kv_heads);
    let gdn = Recurrent {
        key_heads: keys.size(&["linear_num_key_heads"]),
        value_heads: keys.size(&["linear_num_value_heads"]),
        key_dim: keys.size(&["linear_key_head_dim"]),
        value_dim: keys.size(&["linear_value_head_dim"]),
        taps: keys.size(&["linear_conv_kernel_dim"]),
    };
    let (count, per_token) = experts(keys);
    let inter = keys.size(&["moe_intermediate_size"]);
    let shared = keys.size(&["shared_expert_intermediate_size"]);
    let is_full = full_layers(keys, layers);
    keys.settled()?;
    for is_full in is_full {
        if is_full {
            let (queries, kept) = (heads * head_dim, kv_heads * head_dim);
            shape.matrices(&[[2 * queries, hidden], [kept, hidden], [kept, hidden]]);
            shape.matrices(&[[hidden, queries]]);
            shape.attends(2 * kept, heads, head_dim, head_dim);
        } else {
            let (keyed, valued) = (gdn.key_heads * gdn.key_dim, gdn.value_heads * gdn.value_dim);
            shape.matrices(&[[2 * keyed + 2 * valued, hidden], [2 * gdn.value_heads, hidden]]);
            shape.matrices(&[[hidden, valued]]);
            shape.remembers(&gdn);
        }
        shape.plain_matrix([count, hidden]);
        shape.matrices(&ffn(hidden, shared));
        shape.matrices(&[[1, hidden]]);
        shape.routes(hidden, inter, count, per_token);
    }
    Ok(shape.profile("", context))
}

/// Which layers attend: `layer_types`, else every `full_attention_interval`-th.
fn full_layers(keys: &mut Keys<'_>, layers: usize) -> Vec<bool> {
    let every = keys.optional_size(&["full_attention_interval"]);
    let Some(list) = keys.value("layer_types").cloned() else {
        keys.rule(every.is_some(), || "layer_types | full_attention_interval is missing".into());
        return (1..=layers).map(|layer| layer.is_multiple_of(every.unwrap_or(1))).collect();
    };
    let kinds: Vec<Value> = list.as_array().cloned().unwrap_or_default();
    let known = kinds.iter().all(|k| k == "full_attention" || k == "linear_attention");
    keys.rule(known && kinds.len() == layers, || {
        format!("layer_types must name {layers} layers, each full_attention or linear_attention")
    });
    kinds.iter().map(|kind| kind == "full_attention").collect()
}
