//! Where a sequence's memory lies inside a slot and a block, in bytes.
//!
//! ```text
//! slot:  | S of recurrent layer 0 | window | S of layer 1 | window | ... | last hidden row |
//! block: | attention layer 0: 64 tokens | attention layer 1: 64 tokens | ... |
//! ```
//!
//! `S` is f32 `[head][value][key]`; a window is `[width - 1][channels]` raw rows, oldest first; the
//! hidden row is the last position's, after the final norm. Every part is padded to 64 bytes. A
//! block holds `[64][rank + rope]` of an MLA layer, `K [heads][dim][64]`, then
//! `V [heads][64][dim]`, of a GQA layer.
//! A model without recurrent layers has slots of zero bytes.

use kernels::pack::{PART_ALIGN, Part};
use kernels::{Dtype, KvPlace, PackedDtype, Packing};

use super::spec::{BLOCK_LEN, Mixer, ModelSpec};

/// Byte layout of the slots and blocks of one model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateLayout {
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Each layer's place, in the order of the model's layers.
    pub layers: Vec<LayerLayout>,
    /// The parts of a slot, in order.
    pub slot_parts: Vec<Part>,
    /// Offset of the last hidden row in a slot; none without recurrent layers.
    pub hidden_row: Option<usize>,
    /// How windows and hidden row are stored.
    pub window_dtype: Dtype,
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
        /// Where the layer's rows lie.
        rows: KvPlace,
    },
}

impl StateLayout {
    /// The layout of `spec` with windows and hidden row in `window_dtype`. The recurrent state is
    /// always f32.
    pub fn new(spec: &ModelSpec, window_dtype: Dtype) -> StateLayout {
        let mut slot_bytes = 0;
        let mut block_bytes = 0;
        let mut slot_parts = Vec::new();
        let mut take_slot = |part: Part| {
            let offset = slot_bytes;
            slot_bytes += part.slot_bytes().next_multiple_of(PART_ALIGN);
            slot_parts.push(part);
            offset
        };
        let plain = |values: usize| Part::Plain { bytes: values * window_dtype.bytes() };
        let mut layers = Vec::with_capacity(spec.layers.len());
        for layer in &spec.layers {
            layers.push(match &layer.mixer {
                Mixer::Kda(kda) => {
                    let kernels::kda::Shape { value_heads: heads, value_dim, key_dim, .. } =
                        kda.shape();
                    LayerLayout::Recurrent {
                        state: take_slot(Part::State { heads, value_dim, key_dim }),
                        window: take_slot(plain(kda.window_values())),
                    }
                }
                Mixer::Mla(_) | Mixer::Gqa(_) => {
                    let rows = KvPlace { at: block_bytes, dtype: spec.kv_dtype };
                    block_bytes += BLOCK_LEN * layer.mixer.values_per_token() * rows.dtype.bytes();
                    LayerLayout::Attention { rows }
                }
            });
        }
        let hidden_row = spec.is_recurrent().then(|| take_slot(plain(spec.hidden)));
        StateLayout { slot_bytes, block_bytes, layers, slot_parts, hidden_row, window_dtype }
    }

    /// How a slot is packed with its states in `dtype`.
    pub fn packing(&self, dtype: PackedDtype) -> Packing {
        Packing::new(dtype, self.slot_parts.clone())
    }

    /// Bytes of a slot packed with its states in `dtype`; 0 without recurrent layers.
    pub fn packed_slot_bytes(&self, dtype: PackedDtype) -> usize {
        self.packing(dtype).packed_bytes()
    }
}

#[cfg(all(test, feature = "embedded-model"))]
mod tests {
    use super::*;
    use crate::models::ModelFiles;

    #[test]
    fn the_parts_of_a_slot_lie_where_the_layers_are_told() {
        let files = ModelFiles::embedded().expect("the model is sound");
        for window_dtype in [Dtype::F32, Dtype::Bf16] {
            let layout = StateLayout::new(&files.spec, window_dtype);
            let mut offset = 0;
            let mut offsets = Vec::new();
            for part in &layout.slot_parts {
                offsets.push(offset);
                offset += part.slot_bytes().next_multiple_of(64);
            }
            let mut told = Vec::new();
            for layer in &layout.layers {
                if let LayerLayout::Recurrent { state, window } = layer {
                    told.extend([*state, *window]);
                }
            }
            told.extend(layout.hidden_row);
            assert_eq!((told, layout.slot_bytes), (offsets, offset));
            assert_eq!(layout.packing(PackedDtype::Bf16).slot_bytes(), layout.slot_bytes);
        }
    }

    /// Six layers of 2 heads of 64 x 64; the rest of a slot is kept as it is.
    #[test]
    fn a_packed_slot_has_fewer_bytes_for_its_states_alone() {
        let files = ModelFiles::embedded().expect("the model is sound");
        let layout = StateLayout::new(&files.spec, Dtype::F32);
        let (values, scales) = (6 * 2 * 64 * 64, 6 * 2 * 64);
        let saved = |dtype| layout.slot_bytes - layout.packed_slot_bytes(dtype);
        assert_eq!(saved(PackedDtype::Bf16), 2 * values);
        assert_eq!(saved(PackedDtype::Int8), 3 * values - 4 * scales);
    }
}
