//! Two states compared bit for bit, layer by layer.

use kernels::{Arena, Dtype};

use super::batch::StatePair;
use super::decoder::Model;
use super::layout::LayerLayout;
use super::spec::{BLOCK_LEN, Mixer};

impl Model {
    /// The first layer in which two states differ; the number of layers if only their last hidden
    /// rows do. Padding is not compared.
    pub fn first_difference(&self, arena: &Arena, pair: &StatePair) -> Option<usize> {
        let (spec, layout) = (self.spec(), self.layout());
        let slots = |at: usize, values: usize, dtype: Dtype| {
            let bytes = values * dtype.bytes();
            pair.slots.is_none_or(|(one, other)| same(arena, (one + at, other + at), bytes))
        };
        let is_same = |index: &usize| match (&spec.layers[*index].mixer, layout.layers[*index]) {
            (Mixer::Kda(kda), LayerLayout::Recurrent { state, window }) => {
                slots(state, kda.state_values(), Dtype::F32)
                    && slots(window, kda.window_values(), layout.window_dtype)
            }
            (mixer, LayerLayout::Attention { rows }) => {
                let value_bytes = rows.dtype.bytes();
                pair.blocks.iter().enumerate().all(|(block, (one, other))| {
                    let count = (pair.tokens - block * BLOCK_LEN).min(BLOCK_LEN);
                    let mut next = rows.at;
                    mixer.runs().all(|width| {
                        let at = next;
                        next += BLOCK_LEN * width * value_bytes;
                        same(arena, (one + at, other + at), count * width * value_bytes)
                    })
                })
            }
            (_, LayerLayout::Recurrent { .. }) => unreachable!("layers have their own layout"),
        };
        let layers = 0..spec.layers.len();
        layers.clone().find(|index| !is_same(index)).or_else(|| {
            let at = layout.hidden_row?;
            (!slots(at, spec.hidden, layout.window_dtype)).then_some(layers.end)
        })
    }
}

fn same(arena: &Arena, (one, other): (usize, usize), bytes: usize) -> bool {
    arena.values::<u8>(one, bytes) == arena.values::<u8>(other, bytes)
}
