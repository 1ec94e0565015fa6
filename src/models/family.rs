//! The table of model families.

use serde_json::{Map, Value};

use super::config::{Config, ConfigFault};
use super::spec::{Ffn, Layer, Mixer, ModelSpec, Part};
use super::{kimi_linear, llama, qwen3};

/// A family: how its `config.json` becomes a [`ModelSpec`] and what it calls its tensors.
#[derive(Debug)]
pub struct Family {
    /// The name that `config.json` gives it under `architectures`.
    pub architecture: &'static str,
    /// The name that `config.json` gives it under `model_type`.
    pub model_type: &'static str,
    /// Reads the sizes.
    pub(super) read: fn(&mut Config<'_>) -> Result<ModelSpec, Vec<ConfigFault>>,
    /// The name of a tensor in the family's files. Asked only for tensors that the family's specs
    /// require, and for [`Part::Head`].
    pub(super) tensor_name: fn(Option<usize>, Part) -> String,
    /// Whether a tensor that the model does not need may lie in the files all the same.
    pub(super) ignores: fn(&str) -> bool,
}

/// Every family.
pub const FAMILIES: &[Family] = &[kimi_linear::FAMILY, llama::FAMILY, qwen3::FAMILY];

/// Values above which a config is a mistake: hundreds of times the largest model published.
const VALUES_LIMIT: f64 = 1e15;

impl Family {
    /// The family that `config`, the content of a `config.json`, belongs to: by `architectures`, or
    /// by `model_type` where there are none.
    ///
    /// # Errors
    /// What the file says instead of a family's name.
    pub fn of(config: &Map<String, Value>) -> Result<&'static Family, String> {
        let named =
            config.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
        let kind = config.get("model_type").and_then(Value::as_str);
        let found = match (named, kind) {
            (Some(name), _) => FAMILIES.iter().find(|family| family.architecture == name),
            (None, Some(kind)) => FAMILIES.iter().find(|family| family.model_type == kind),
            (None, None) => return Err("neither architectures nor model_type".to_owned()),
        };
        found.ok_or_else(|| named.or(kind).unwrap_or_default().to_owned())
    }

    /// The supported architectures, for messages.
    pub fn supported() -> String {
        FAMILIES.iter().map(|family| family.architecture).collect::<Vec<_>>().join(", ")
    }

    /// Reads the sizes, and refuses a model that no machine could hold: what follows may then
    /// multiply sizes without a thought for overflow.
    pub(super) fn spec(&self, config: &mut Config<'_>) -> Result<ModelSpec, Vec<ConfigFault>> {
        let spec = (self.read)(config)?;
        let values = magnitude(&spec);
        config.rule(values <= VALUES_LIMIT, || {
            format!("the sizes describe a model of {values:.1e} parameters")
        });
        config.settled()?;
        Ok(spec)
    }
}

/// About how many values the weights and one sequence's state have, computed so that it cannot
/// overflow.
fn magnitude(spec: &ModelSpec) -> f64 {
    let product = |sizes: &[usize]| sizes.iter().map(|&size| size as f64).product::<f64>();
    let hidden = spec.hidden;
    let layer = |layer: &Layer| {
        let mixer = match &layer.mixer {
            Mixer::Kda(kda) => {
                product(&[kda.heads, kda.head_dim, hidden.max(kda.head_dim).max(kda.conv_width)])
            }
            Mixer::Mla(mla) => {
                let width = (mla.nope + mla.rope).max(mla.value_dim);
                product(&[mla.heads, width, hidden.max(mla.rank)])
                    + product(&[mla.rank + mla.rope, hidden])
            }
            Mixer::Gqa(gqa) => product(&[gqa.heads, gqa.head_dim, hidden]),
        };
        let ffn = match &layer.ffn {
            Ffn::Dense { inter } => product(&[*inter, hidden]),
            Ffn::Moe(moe) => {
                product(&[moe.router.experts, moe.inter, hidden])
                    + product(&[moe.shared_inter, hidden])
            }
        };
        mixer + ffn
    };
    product(&[spec.vocab_size, hidden]) + spec.layers.iter().map(layer).sum::<f64>()
}
