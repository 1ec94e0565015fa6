//! A model as a step's time depends on it: weights, bytes per token, bytes of state, arithmetic.

mod config;
mod hybrid;
mod keys;
mod presets;
mod shape;

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::formulas::{Pairs, prefill_flops};
use super::hardware::ProfileError;

pub use config::ModelConfigError;
pub use presets::PRESETS;

/// Tokens of a cell: the grid of models with recurrent or MLA layers (DESIGN.md section 2).
const CELL_TOKENS: usize = 64;

/// What a model costs: a preset ([`PRESETS`]) or made from a `config.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelProfile {
    /// Its name, as reports print it.
    pub name: String,
    /// P: parameters that one token is multiplied with.
    pub active_params: f64,
    /// What a step reads of the weights.
    pub weights: Weights,
    /// Bytes a token leaves in the blocks, all attention layers together.
    pub kv_bytes: f64,
    /// Bytes of a sequence's recurrent state, all layers together, 0 without such layers.
    pub state_bytes: u64,
    /// Bytes of a sequence's convolution windows, all layers together.
    pub conv_bytes: u64,
    /// FLOPs per pair of a query and a key it sees, all attention layers together: scores and
    /// weighted sum, `2 heads (d_qk + d_v)` a layer. `4 d n` for plain MHA.
    pub attention: f64,
    /// Prompt spans end at multiples of so many tokens: 64 with recurrent or MLA layers, else 1.
    pub grid: usize,
    /// Tokens a second of prefill, where it was measured: instead of what FLOPs say.
    #[serde(default)]
    pub prefill_rate: Option<f64>,
    /// Longest context, in tokens; none where a lecture names no model.
    #[serde(default)]
    pub max_context: Option<usize>,
}

/// Bytes of weights that a step reads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Weights {
    /// Read by every step.
    pub always_bytes: f64,
    /// Read as far as they are chosen.
    #[serde(default)]
    pub experts: Option<Experts>,
}

/// Routed experts, alike in all layers that have them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experts {
    /// Layers with routed experts.
    pub layers: usize,
    /// E: routed experts of a layer.
    pub count: usize,
    /// k: experts that a token chooses.
    pub per_token: usize,
    /// Bytes of one expert of one layer.
    pub bytes: f64,
}

impl Experts {
    /// Experts of a layer that `tokens` tokens touch, each choosing as if at random:
    /// `E (1 - (1 - k/E)^T)` (F26).
    pub fn touched(&self, tokens: f64) -> f64 {
        let count = self.count as f64;
        count * (1.0 - (1.0 - self.per_token as f64 / count).powf(tokens))
    }
}

impl ModelProfile {
    /// Bytes of weights read by a step of `tokens` tokens (F26).
    pub fn weight_bytes(&self, tokens: f64) -> f64 {
        let experts = self.weights.experts.as_ref();
        let chosen = experts.map(|e| e.layers as f64 * e.touched(tokens) * e.bytes);
        self.weights.always_bytes + chosen.unwrap_or(0.0)
    }

    /// The preset of that name, else the model of the `config.json` at that path or in that folder.
    ///
    /// # Errors
    /// There is neither, or the file does not describe a model that is known; the key is named.
    pub fn read(name: &str) -> Result<ModelProfile, ProfileError> {
        if let Some(preset) = ModelProfile::preset(name) {
            return Ok(preset);
        }
        let path = Path::new(name);
        let path = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
        let text = fs::read_to_string(&path).map_err(|source| ProfileError::Unknown {
            name: path.display().to_string(),
            presets: PRESETS.join(", "),
            source,
        })?;
        let named = |profile| ModelProfile { name: name.to_owned(), ..profile };
        let path = path.display().to_string();
        let fault =
            |error: ModelConfigError| ProfileError::Text { path, reason: error.to_string() };
        ModelProfile::from_config(&text).map(named).map_err(fault)
    }

    /// Bytes of all weights: what a device has to hold.
    pub fn total_weight_bytes(&self) -> f64 {
        let experts = self.weights.experts.as_ref();
        let all = experts.map(|e| (e.layers * e.count) as f64 * e.bytes);
        self.weights.always_bytes + all.unwrap_or(0.0)
    }

    /// V: bytes of a sequence's slot, recurrent state and convolution windows.
    pub fn state(&self) -> f64 {
        (self.state_bytes + self.conv_bytes) as f64
    }

    /// Bytes a token leaves in the blocks.
    pub fn kv_per_token(&self) -> f64 {
        self.kv_bytes
    }

    /// Bytes a sequence of `tokens` tokens holds: `V + L kv`. One way of a swap.
    pub fn held_bytes(&self, tokens: f64) -> f64 {
        self.state() + tokens * self.kv_bytes
    }

    /// FLOPs of a prompt of `tokens` tokens (F8, causal).
    pub fn prefill_flops(&self, tokens: f64) -> f64 {
        prefill_flops(self.active_params, self.attention, tokens, Pairs::Causal)
    }

    /// FLOPs of the rows `start .. start + rows` of a prompt. The prefix counts, so the chunks of
    /// a prompt cost what the prompt costs, wherever it is cut (F7, SEEDS.md section 5, point 12).
    pub fn chunk_flops(&self, start: usize, rows: usize) -> f64 {
        2.0 * self.active_params * rows as f64 + self.chunk_attention(start, rows)
    }

    /// The part of [`ModelProfile::chunk_flops`] that is attention.
    pub fn chunk_attention(&self, start: usize, rows: usize) -> f64 {
        let (start, rows) = (start as f64, rows as f64);
        self.attention * (start * rows + rows * rows / 2.0)
    }
}
