//! Llama 2 and 3 (MODELS.md section 11).

use super::config::{Config, ConfigFault};
use super::dense::{self, Traits};
use super::family::Family;
use super::spec::ModelSpec;

pub(super) const FAMILY: Family = Family {
    architecture: "LlamaForCausalLM",
    model_type: "llama",
    read,
    tensor_name: dense::tensor_name,
    ignores: dense::is_rotary_table,
};

fn read(config: &mut Config<'_>) -> Result<ModelSpec, Vec<ConfigFault>> {
    config.only("mlp_bias", &["false", "null"]);
    let traits = Traits { family: "llama", head_dim_by_division: true, qk_norm: false };
    dense::read(config, &traits)
}
