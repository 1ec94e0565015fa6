//! What families of plain decoders share: grouped-query attention with rotary positions, one
//! feed-forward part, and the tensor names of the first Llama (MODELS.md section 11).

use kernels::rope::{Rope, RopeScaling};

use super::config::{Config, ConfigFault};
use super::spec::{Ffn, Gqa, Layer, Mixer, ModelSpec, Part};

/// Layers are listed one by one, so their number has a bound of its own.
const LAYER_LIMIT: u64 = 10_000;

/// Where a family departs from the others.
pub(super) struct Traits {
    /// The family's name.
    pub(super) family: &'static str,
    /// `head_dim` may be absent and is then `hidden_size / num_attention_heads`.
    pub(super) head_dim_by_division: bool,
    /// Queries and keys are normed per head.
    pub(super) qk_norm: bool,
}

/// Reads a plain decoder.
pub(super) fn read(
    config: &mut Config<'_>,
    traits: &Traits,
) -> Result<ModelSpec, Vec<ConfigFault>> {
    config.only("hidden_act", &[r#""silu""#]);
    config.only("attention_bias", &["false", "null"]);
    let depth = config.size_up_to("num_hidden_layers", LAYER_LIMIT);
    let inter = config.size("intermediate_size");
    let (heads, kv_heads) =
        (config.size("num_attention_heads"), config.size("num_key_value_heads"));
    let declared_dim = match traits.head_dim_by_division {
        true => config.optional_size("head_dim"),
        false => Some(config.size("head_dim")),
    };
    let theta = config.positive("rope_theta");
    let scaling = read_scaling(config);
    let norm_eps = config.positive("rms_norm_eps") as f32;
    let mut spec = ModelSpec {
        family: traits.family,
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

    let hidden = spec.hidden;
    config.rule(heads.is_multiple_of(kv_heads), || {
        format!(
            "num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})"
        )
    });
    config.rule(declared_dim.is_some() || hidden.is_multiple_of(heads), || {
        format!(
            "without head_dim, hidden_size ({hidden}) must be a multiple of \
             num_attention_heads ({heads})"
        )
    });
    let head_dim = declared_dim.unwrap_or(hidden / heads);
    // The frequencies of a rotation are listed one by one too.
    config.rule(head_dim.is_multiple_of(2) && head_dim <= 4096, || {
        format!("a head_dim of {head_dim} cannot be rotated; it must be even and at most 4096")
    });
    config.settled()?;
    let gqa = Gqa {
        heads,
        kv_heads,
        head_dim,
        qk_norm: traits.qk_norm.then_some(norm_eps),
        rope: Rope::new(head_dim, theta, scaling),
    };
    let layer = Layer { mixer: Mixer::Gqa(gqa), ffn: Ffn::Dense { inter } };
    spec.layers = vec![layer; depth];
    Ok(spec)
}

fn read_scaling(config: &mut Config<'_>) -> RopeScaling {
    let kind = config.optional_text("rope_scaling.rope_type");
    match kind {
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: config.positive("rope_scaling.factor") },
        Some("llama3") => RopeScaling::Llama3 {
            factor: config.positive("rope_scaling.factor"),
            low_freq_factor: config.positive("rope_scaling.low_freq_factor"),
            high_freq_factor: config.positive("rope_scaling.high_freq_factor"),
            original_context: config.positive("rope_scaling.original_max_position_embeddings"),
        },
        Some(_) => {
            config.only("rope_scaling.rope_type", &[r#""default""#, r#""linear""#, r#""llama3""#]);
            // The type is refused; its other keys need no word of their own.
            config.inert(&["rope_scaling", "rope_parameters"]);
            RopeScaling::None
        }
    }
}

/// The tensor names that Llama began and others took over.
///
/// # Panics
/// When a plain decoder has no such part.
pub(super) fn tensor_name(layer: Option<usize>, part: Part) -> String {
    let place = match part {
        Part::Embedding => return "model.embed_tokens.weight".to_owned(),
        Part::FinalNorm => return "model.norm.weight".to_owned(),
        Part::Head => return "lm_head.weight".to_owned(),
        Part::MixerNorm => "input_layernorm",
        Part::FfnNorm => "post_attention_layernorm",
        Part::Query => "self_attn.q_proj",
        Part::Key => "self_attn.k_proj",
        Part::Value => "self_attn.v_proj",
        Part::Output => "self_attn.o_proj",
        Part::QueryNorm => "self_attn.q_norm",
        Part::KeyNorm => "self_attn.k_norm",
        Part::FfnGate => "mlp.gate_proj",
        Part::FfnUp => "mlp.up_proj",
        Part::FfnDown => "mlp.down_proj",
        other => unreachable!("a plain decoder has no {other:?}"),
    };
    let layer = layer.expect("only embedding, final norm and head belong to no layer");
    format!("model.layers.{layer}.{place}.weight")
}

/// Whether `tensor` is a table of rotary frequencies, which old files carry along.
pub(super) fn is_rotary_table(tensor: &str) -> bool {
    tensor.ends_with("rotary_emb.inv_freq")
}
