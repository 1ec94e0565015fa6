//! Qwen3, dense (MODELS.md section 11): queries and keys are normed per head before the rotation.

use super::config::{Config, ConfigFault};
use super::dense::{self, Traits};
use super::family::Family;
use super::spec::ModelSpec;

pub(super) const FAMILY: Family = Family {
    architecture: "Qwen3ForCausalLM",
    model_type: "qwen3",
    read,
    tensor_name: dense::tensor_name,
    ignores: dense::is_rotary_table,
};

fn read(config: &mut Config<'_>) -> Result<ModelSpec, Vec<ConfigFault>> {
    config.only("use_sliding_window", &["false", "null"]);
    config.only_list_of("layer_types", "full_attention");
    // Without a sliding window nobody asks how wide it is or where it begins.
    config.inert(&["sliding_window", "max_window_layers"]);
    let traits = Traits { family: "qwen3", head_dim_by_division: false, qk_norm: true };
    dense::read(config, &traits)
}
