//! What a model costs: parameters, bytes of state per sequence and per token, and how many
//! sequences a memory holds. Everything follows from the [`ModelSpec`]; no weights are loaded.

use std::collections::HashMap;

use kernels::{Dtype, Quantization};
use serde::Serialize;
use state_pool::{LayoutError, PoolLayout, TierSizes};

use crate::models::layout::StateLayout;
use crate::models::spec::{BLOCK_LEN, Layer, Mixer, ModelSpec};
use crate::models::{Model, WeightBytes};

/// Lengths of sequences that a memory is filled with, in tokens.
const LENGTHS: [usize; 4] = [1 << 10, 8 << 10, 32 << 10, 128 << 10];

/// What a model costs. Field names are the keys of the JSON form.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// The family.
    pub family: &'static str,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Longest context the model declares.
    pub context_tokens: usize,
    /// Parameters, tied ones counted once.
    pub parameters: usize,
    /// Bytes of the weights as stored.
    pub weights_bytes: usize,
    /// Whether `weights_bytes` is what files hold; else it is two bytes a parameter.
    pub weights_bytes_from_files: bool,
    /// How large matrices are quantised in memory, where they are.
    pub quantize: Option<&'static str>,
    /// Bytes of the weights in memory.
    pub weights_held_bytes: usize,
    /// Runs of equal layers.
    pub layers: Vec<LayerRun>,
    /// What one sequence remembers whatever its length.
    pub per_sequence: PerSequence,
    /// What one token adds.
    pub per_token: PerToken,
    /// How memory is cut up.
    pub page: Page,
    /// The memory that `fits` is about.
    pub device_memory_bytes: Option<usize>,
    /// Sequences that fit, by their length; empty without a memory.
    pub fits: Vec<Fit>,
}

/// Equal layers in a row, with the costs of one of them.
#[derive(Debug, Clone, Serialize)]
pub struct LayerRun {
    /// The first, from 0.
    pub first: usize,
    /// The last.
    pub last: usize,
    /// What mixes positions.
    pub mixer: String,
    /// What works on each position alone.
    pub ffn: String,
    /// Parameters of one layer.
    pub parameters: usize,
    /// Recurrent state and window of one layer.
    pub state_bytes_per_sequence: usize,
    /// Keys and values, or latents, of one layer.
    pub kv_bytes_per_token: usize,
}

/// What one sequence remembers whatever its length, all layers together.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct PerSequence {
    /// Recurrent states, always f32.
    pub recurrent_bytes: usize,
    /// Windows of the short convolutions.
    pub conv_bytes: usize,
    /// The last position's hidden row, kept by models with recurrent layers.
    pub hidden_row_bytes: usize,
    /// All of it, with padding: what one sequence takes from the pool.
    pub slot_bytes: usize,
    /// How windows and hidden row are stored.
    pub window_dtype: &'static str,
}

/// What one token adds, all layers together.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct PerToken {
    /// Keys, values and latents.
    pub kv_bytes: usize,
    /// How they are stored.
    pub kv_dtype: &'static str,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// Bytes of a block.
    pub block_bytes: usize,
}

/// A page: a piece of memory that holds either slots or blocks.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Page {
    /// Its bytes.
    pub page_bytes: usize,
    /// Slots in it.
    pub slots: usize,
    /// Blocks in it.
    pub blocks: usize,
    /// Part of it that is lost when it holds slots.
    pub slot_loss: f64,
    /// Part of it that is lost when it holds blocks.
    pub block_loss: f64,
}

/// How many sequences of one length a memory holds.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Fit {
    /// Tokens of each sequence.
    pub tokens: usize,
    /// Sequences that fit.
    pub sequences: usize,
    /// Whether the model's context is as long as that.
    pub within_context: bool,
}

impl Report {
    /// The costs of `spec`, with its state as an engine lays it out. `weights` is what weight files
    /// hold, if there are any; `device_memory_bytes` is memory for state, after the weights.
    ///
    /// # Errors
    /// A memory that holds no sequence, or more than can be numbered.
    pub fn new(
        spec: &ModelSpec,
        weights: Option<WeightBytes>,
        device_memory_bytes: Option<usize>,
    ) -> Result<Report, LayoutError> {
        let layout = Model::layout_of(spec);
        let (page, fits) = pool_figures(&layout, spec.context, device_memory_bytes)?;
        let parameters = spec.parameters();
        let is_from_files = weights.is_some();
        let weights = weights.unwrap_or_else(|| bf16_bytes(spec));
        Ok(Report {
            family: spec.family,
            vocab_size: spec.vocab_size,
            hidden_size: spec.hidden,
            context_tokens: spec.context,
            parameters,
            weights_bytes: weights.stored,
            weights_bytes_from_files: is_from_files,
            quantize: spec.quantize.map(Quantization::as_str),
            weights_held_bytes: weights.held,
            layers: layer_runs(spec, layout.window_dtype),
            per_sequence: per_sequence(spec, &layout),
            per_token: PerToken {
                kv_bytes: layout.block_bytes / BLOCK_LEN,
                kv_dtype: spec.kv_dtype.as_str(),
                block_tokens: BLOCK_LEN,
                block_bytes: layout.block_bytes,
            },
            page,
            device_memory_bytes,
            fits,
        })
    }
}

/// The bytes of weights whose files would store them as bf16.
fn bf16_bytes(spec: &ModelSpec) -> WeightBytes {
    let held = spec.required().iter().map(|r| r.held_bytes(Dtype::Bf16)).sum();
    WeightBytes { stored: spec.parameters() * Dtype::Bf16.bytes(), held }
}

/// The page for slots and blocks of `layout`, and how many sequences fit in a memory.
fn pool_figures(
    layout: &StateLayout,
    context: usize,
    device_memory_bytes: Option<usize>,
) -> Result<(Page, Vec<Fit>), LayoutError> {
    let sizes = |memory_bytes| TierSizes {
        slot_bytes: layout.slot_bytes,
        block_bytes: layout.block_bytes,
        packed_bytes: 0,
        memory_bytes,
        max_zero_byte_slots: u32::MAX as usize,
    };
    let pool = match device_memory_bytes {
        Some(bytes) => PoolLayout::new(sizes(bytes))?,
        // The size of a page does not depend on how many there are.
        None => match PoolLayout::new(sizes(0)) {
            Err(LayoutError::TooSmall { needed_bytes, .. }) => PoolLayout::new(sizes(needed_bytes)),
            other => other,
        }?,
    };
    let page = Page {
        page_bytes: pool.page_bytes,
        slots: pool.slots_per_page,
        blocks: pool.blocks_per_page,
        slot_loss: pool.slot_loss(),
        block_loss: pool.block_loss(),
    };
    let fit = |tokens| Fit {
        tokens,
        sequences: pool.max_sequences(tokens, 0),
        within_context: tokens <= context,
    };
    let fits = device_memory_bytes.map_or_else(Vec::new, |_| LENGTHS.map(fit).to_vec());
    Ok((page, fits))
}

fn per_sequence(spec: &ModelSpec, layout: &StateLayout) -> PerSequence {
    let (mut recurrent_bytes, mut conv_bytes) = (0, 0);
    for layer in &spec.layers {
        if let Mixer::Kda(kda) = &layer.mixer {
            recurrent_bytes += kda.state_values() * Dtype::F32.bytes();
            conv_bytes += kda.window_values() * layout.window_dtype.bytes();
        }
    }
    PerSequence {
        recurrent_bytes,
        conv_bytes,
        hidden_row_bytes: layout
            .hidden_row
            .map_or(0, |_| spec.hidden * layout.window_dtype.bytes()),
        slot_bytes: layout.slot_bytes,
        window_dtype: name(layout.window_dtype),
    }
}

fn layer_runs(spec: &ModelSpec, window_dtype: Dtype) -> Vec<LayerRun> {
    let mut parameters = HashMap::<usize, usize>::new();
    for required in spec.required() {
        if let Some(layer) = required.layer {
            *parameters.entry(layer).or_default() += required.values();
        }
    }
    let mut first = 0;
    let runs = spec.layers.chunk_by(PartialEq::eq).map(|run| {
        let Layer { mixer, ffn } = &run[0];
        let state_bytes_per_sequence = match mixer {
            Mixer::Kda(kda) => {
                kda.state_values() * Dtype::F32.bytes() + kda.window_values() * window_dtype.bytes()
            }
            Mixer::Mla(_) | Mixer::Gqa(_) => 0,
        };
        let row = LayerRun {
            first,
            last: first + run.len() - 1,
            mixer: mixer.to_string(),
            ffn: ffn.to_string(),
            parameters: parameters[&first],
            state_bytes_per_sequence,
            kv_bytes_per_token: mixer.values_per_token() * spec.kv_dtype.bytes(),
        };
        first += run.len();
        row
    });
    runs.collect()
}

fn name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "f32",
        Dtype::Bf16 => "bf16",
        Dtype::F16 => "f16",
    }
}
