//! What layers add up to: matrices a token is multiplied with, their bytes, what they remember.

use super::{CELL_TOKENS, Experts, ModelProfile, Weights};

/// Bytes of a value of the recurrent state: servers keep it in f32.
const STATE_VALUE_BYTES: usize = 4;

/// How a matrix lies in memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Stored {
    /// So many bytes a value.
    Plain(usize),
    /// A byte a value, and an f32 scale for each block of so many rows and columns.
    Fp8([usize; 2]),
    /// Half a byte a value, and a byte of scale for each 32 values of a row.
    Mxfp4,
}

impl Stored {
    fn bytes(self, [rows, cols]: [usize; 2]) -> f64 {
        let bytes = match self {
            Stored::Plain(width) => rows * cols * width,
            Stored::Fp8([tall, wide]) => {
                rows * cols + 4 * rows.div_ceil(tall) * cols.div_ceil(wide)
            }
            Stored::Mxfp4 => rows * cols.div_ceil(2) + rows * cols.div_ceil(32),
        };
        bytes as f64
    }
}

/// A sum over a model's layers. Matrices count; norms, biases and taps of convolutions, under a
/// thousandth of them, do not. Nor does an embedding: a row of it is read.
#[derive(Debug, Clone)]
pub struct Shape {
    /// How the large matrices lie in memory.
    pub stored: Stored,
    /// How those of experts lie.
    pub experts_stored: Stored,
    /// Bytes of a value that is stored as it is: heads, routers, blocks, windows.
    pub width: usize,
    params: f64,
    bytes: f64,
    kv_values: usize,
    attention: usize,
    state_values: usize,
    window_values: usize,
    experts: Option<Experts>,
    is_celled: bool,
}

/// Widths of a recurrent layer.
#[derive(Debug, Clone, Copy)]
pub struct Recurrent {
    /// Heads of keys.
    pub key_heads: usize,
    /// Heads of values.
    pub value_heads: usize,
    /// Width of a key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// Taps of the convolution.
    pub taps: usize,
}

impl Shape {
    /// No layers yet.
    pub fn new(width: usize, stored: Stored, experts_stored: Stored) -> Shape {
        Shape {
            stored,
            experts_stored,
            width,
            params: 0.0,
            bytes: 0.0,
            kv_values: 0,
            attention: 0,
            state_values: 0,
            window_values: 0,
            experts: None,
            is_celled: false,
        }
    }

    /// Matrices `[rows, cols]`, stored as the large ones are.
    pub fn matrices(&mut self, matrices: &[[usize; 2]]) {
        for &matrix in matrices {
            self.params += (matrix[0] * matrix[1]) as f64;
            self.bytes += self.stored.bytes(matrix);
        }
    }

    /// A matrix that is not quantised: a head, a router.
    pub fn plain_matrix(&mut self, matrix: [usize; 2]) {
        self.params += (matrix[0] * matrix[1]) as f64;
        self.bytes += Stored::Plain(self.width).bytes(matrix);
    }

    /// A layer of attention: values kept per token, query heads, widths of a query and of a value.
    pub fn attends(&mut self, kept: usize, heads: usize, query: usize, value: usize) {
        self.kv_values += kept;
        self.attention += 2 * heads * (query + value);
    }

    /// A layer of latent attention, with its matrices but those of queries and output.
    pub fn attends_latent(&mut self, hidden: usize, heads: usize, latent: &Latent) {
        let Latent { rank, nope, rope, value } = *latent;
        self.matrices(&[[rank + rope, hidden], [heads * (nope + value), rank]]);
        self.attends(rank + rope, heads, nope + rope, value);
        self.is_celled = true;
    }

    /// A recurrent layer's state `[value heads][value][key]` and windows.
    pub fn remembers(&mut self, layer: &Recurrent) {
        let Recurrent { key_heads, value_heads, key_dim, value_dim, taps } = *layer;
        self.state_values += value_heads * value_dim * key_dim;
        self.window_values += (taps - 1) * (2 * key_heads * key_dim + value_heads * value_dim);
        self.is_celled = true;
    }

    /// A layer of `count` routed experts `[inter, hidden]`, of which a token chooses `per_token`.
    pub fn routes(&mut self, hidden: usize, inter: usize, count: usize, per_token: usize) {
        let matrices = [[inter, hidden], [inter, hidden], [hidden, inter]];
        let bytes = matrices.map(|matrix| self.experts_stored.bytes(matrix)).iter().sum();
        self.params += (per_token * 3 * inter * hidden) as f64;
        let layers = self.experts.map_or(0, |experts| experts.layers) + 1;
        self.experts = Some(Experts { layers, count, per_token, bytes });
    }

    /// What it costs.
    pub fn profile(self, name: &str, max_context: usize) -> ModelProfile {
        ModelProfile {
            name: name.to_owned(),
            active_params: self.params,
            weights: Weights { always_bytes: self.bytes, experts: self.experts },
            kv_bytes: (self.kv_values * self.width) as f64,
            state_bytes: (self.state_values * STATE_VALUE_BYTES) as u64,
            conv_bytes: (self.window_values * self.width) as u64,
            attention: self.attention as f64,
            grid: if self.is_celled { CELL_TOKENS } else { 1 },
            prefill_rate: None,
            max_context: Some(max_context),
        }
    }
}

/// Widths of latent attention.
#[derive(Debug, Clone, Copy)]
pub struct Latent {
    /// Of the latent.
    pub rank: usize,
    /// Of a head's key part that comes from the latent.
    pub nope: usize,
    /// Of the key part that all heads share.
    pub rope: usize,
    /// Of a head's values.
    pub value: usize,
}
