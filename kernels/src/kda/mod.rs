//! Kimi Delta Attention: the gated delta rule with one fixed-size state per sequence and head.
//!
//! Per value head, with `S[v][k]` f32 (key index contiguous), for each row in order (MODELS.md
//! section 3 step 7; Moonshot's Kimi Linear report; FLA `ops/kda/naive.py`):
//!
//! ```text
//! S[v][k] *= exp(g[k])                      decay first
//! r[v]     = Σ_k S[v][k] k[k]               then read with the key
//! S[v][k] += beta (v[v] - r[v]) k[k]        then write
//! o[v]     = Σ_k S[v][k] q[k]               then read with the query
//! ```
//!
//! `q` and `k` are L2-normed per head inside, `q` also times `key_dim^-1/2`. Three mistakes here
//! still give fluent text: writing before decaying, reading before writing, and scaling `k`
//! instead of `q`; the end states in the goldens catch each.
//!
//! A span of form `Step` runs this row by row. A span of form `Chunk` runs the chunkwise form of
//! MODELS.md section 4 on chunks that end on the grid (64 positions) or with the span; a chunk that
//! starts off the grid is the shorter. The state crosses a chunk border as the value a slot holds.
//! With `decay` one value wide per head this is Qwen's gated DeltaNet.

mod chunk;
mod cpu;
mod gate;
pub mod naive;
mod step;

pub use cpu::{kda, scratch_len};
pub use gate::gate;

use crate::arena::Arena;
use crate::rows::Rows;
use crate::span::Spans;

/// Form of the decay gate (MODELS.md section 3, step 5).
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gate {
    /// `-exp(a_log) * softplus(raw)`; unbounded below.
    Softplus,
    /// `lower * sigmoid(exp(a_log) * raw)`, within `(lower, 0)`.
    Bounded {
        /// The bound, below zero.
        lower: f32,
    },
}

/// Heads and widths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values, a multiple of `key_heads`: value head `j` uses key head
    /// `j / (value_heads / key_heads)`.
    pub value_heads: usize,
    /// Width of a key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
}

impl Shape {
    /// Values of a row of queries, keys and values.
    pub fn qkv_width(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// Values of one head's state.
    pub fn head_state(&self) -> usize {
        self.value_dim * self.key_dim
    }

    /// Columns of the query, key and value of value head `head` in a row.
    fn columns(&self, head: usize) -> [usize; 3] {
        let key_head = head / (self.value_heads / self.key_heads);
        let keys = self.key_heads * self.key_dim;
        [key_head * self.key_dim, keys + key_head * self.key_dim, 2 * keys + head * self.value_dim]
    }
}

/// The rows of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// `[rows][query heads | key heads | value heads]`, after convolution and SiLU.
    pub qkv: Rows<'a>,
    /// Natural-log decays, at most 0: `[rows][value_heads * key_dim]`, or `[rows][value_heads]`.
    pub decay: Rows<'a>,
    /// Write strengths `[rows][value_heads]`.
    pub beta: Rows<'a>,
}

impl Inputs<'_> {
    fn check(&self, shape: &Shape) {
        assert_eq!(shape.value_heads % shape.key_heads, 0);
        assert_eq!(self.qkv.width(), shape.qkv_width());
        assert_eq!(self.beta.width(), shape.value_heads);
        let per_head = self.decay.width() == shape.value_heads;
        assert!(per_head || self.decay.width() == shape.value_heads * shape.key_dim);
        assert_eq!((self.qkv.count(), self.qkv.count()), (self.decay.count(), self.beta.count()));
    }
}

/// The spans of a batch and the states they carry.
#[derive(Debug)]
pub struct States<'a> {
    /// The spans.
    pub spans: Spans<'a>,
    /// Where slots lie.
    pub arena: &'a mut Arena,
    /// Byte offset of this layer's state in a slot.
    pub at: usize,
}
