//! Grouped-query attention over paged keys and values (MHA where groups have one head).
//!
//! A block holds, per layer, `K [kv_heads][dim][64]`, then `V [kv_heads][64][dim]`: positions lie
//! side by side in keys, so that scores of several are summed at once. Query head `h` uses key head
//! `h / (heads / kv_heads)`. Scores are times `dim^-1/2`, causal, softmax in f32.

mod cpu;
pub mod naive;

pub use cpu::{Workspace, attend, scratch_len};

use crate::arena::Arena;
use crate::attention::{KvPlace, write_columns, write_rows};
use crate::rows::Rows;
use crate::span::{BLOCK_LEN, Span};

/// Heads and widths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

impl Shape {
    /// Values of a layer's keys in a block; its values follow.
    fn keys_in_block(&self) -> usize {
        self.kv_heads * BLOCK_LEN * self.head_dim
    }

    pub(crate) fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }
}

/// Writes the keys and values of every span's rows to their blocks.
pub fn write(
    shape: Shape,
    (spans, tables): (&[Span], &[usize]),
    keys: Rows<'_>,
    values: Rows<'_>,
    arena: &mut Arena,
    place: KvPlace,
) {
    write_columns((spans, tables), keys, arena, place);
    let at = place.at + shape.keys_in_block() * place.dtype.bytes();
    write_rows((spans, tables), values, shape.head_dim, arena, KvPlace { at, ..place });
}
