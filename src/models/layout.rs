//! Where a sequence's memory lies inside a slot and a block, in bytes.
//!
//! ```text
//! slot:  | S of recurrent layer 0 | window | S of layer 1 | window | ... | last hidden row |
//! block: | attention layer 0: 64 rows | attention layer 1: 64 rows | ... |
//! ```
//!
//! `S` is f32 `[head][value][key]`; a window is `[width - 1][channels]` raw rows, oldest first; the
//! hidden row is the last position's, after the final norm. Every part is padded to 64 bytes. A
//! block holds `[64][rank + rope]` of an MLA layer, `K [heads][64][dim]` then `V` of a GQA layer.
//! A model without recurrent layers has slots of zero bytes.

use kernels::Dtype;

use super::spec::{BLOCK_LEN, Mixer, ModelSpec};

const PART_ALIGN: usize = 64;

/// Byte layout of the slots and blocks of one model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateLayout {
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Each layer's place, in the order of the model's layers.
    pub layers: Vec<LayerLayout>,
    /// Offset of the last hidden row in a slot; none without recurrent layers.
    pub hidden_row: Option<usize>,
    /// How windows and hidden row are stored.
    pub window_dtype: Dtype,
    /// How per-token rows are stored.
    pub kv_dtype: Dtype,
}

/// Where one layer's memory lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerLayout {
    /// A recurrent layer: offsets in the slot.
    Recurrent {
        /// Offset of the recurrent state.
        state: usize,
        /// Offset of the convolution window.
        window: usize,
    },
    /// An attention layer: offset in each block.
    Attention {
        /// Offset of the layer's rows.
        rows: usize,
    },
}

impl StateLayout {
    /// The layout of `spec` with windows and hidden row in `window_dtype`, per-token rows in
    /// `kv_dtype`. The recurrent state is always f32.
    pub fn new(spec: &ModelSpec, window_dtype: Dtype, kv_dtype: Dtype) -> StateLayout {
        let mut slot_bytes = 0;
        let mut block_bytes = 0;
        let mut take_slot = |bytes: usize| {
            let offset = slot_bytes;
            slot_bytes += bytes.next_multiple_of(PART_ALIGN);
            offset
        };
        let mut layers = Vec::with_capacity(spec.layers.len());
        for layer in &spec.layers {
            layers.push(match &layer.mixer {
                Mixer::Kda(kda) => LayerLayout::Recurrent {
                    state: take_slot(kda.state_values() * Dtype::F32.bytes()),
                    window: take_slot(kda.window_values() * window_dtype.bytes()),
                },
                Mixer::Mla(_) | Mixer::Gqa(_) => {
                    let rows = block_bytes;
                    block_bytes += BLOCK_LEN * layer.mixer.values_per_token() * kv_dtype.bytes();
                    LayerLayout::Attention { rows }
                }
            });
        }
        let hidden_row = spec.is_recurrent().then(|| take_slot(spec.hidden * window_dtype.bytes()));
        StateLayout { slot_bytes, block_bytes, layers, hidden_row, window_dtype, kv_dtype }
    }
}
