//! A model as data: what each layer is, how wide, and what it remembers.
//!
//! A [`ModelSpec`] says everything the decoder, the pools and `inspect` need to know, and nothing
//! about files: a family module (`kimi_linear.rs`, `llama.rs`, `qwen3.rs`) fills it from
//! `config.json` and names the tensors. No code elsewhere asks which family a model is.

use std::fmt;
use std::iter::repeat_n;

use kernels::{Compute, Dtype, Forms, KvDtype, Quantization};

use crate::weights::{Noise, Order, matrix_size};

/// Tokens of one block: the unit of per-token memory (DESIGN.md section 2).
pub const BLOCK_LEN: usize = kernels::BLOCK_LEN;

/// A whole model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// The family's name, as `inspect` prints it.
    pub family: &'static str,
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Epsilon of every plain norm of the residual stream.
    pub norm_eps: f32,
    /// The head is the embedding matrix.
    pub tied_head: bool,
    /// Longest context the model declares, in tokens.
    pub context: usize,
    /// How its large matrices are held in memory; none as stored.
    pub quantize: Option<Quantization>,
    /// How bf16 weights are multiplied.
    pub compute: Compute,
    /// How per-token rows are kept; no wider than the weights are stored, unless told otherwise.
    pub kv_dtype: KvDtype,
    /// The layers, first to last.
    pub layers: Vec<Layer>,
}

/// One decoder layer: `x += mixer(norm(x)); x += ffn(norm(x))`.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// What mixes positions.
    pub mixer: Mixer,
    /// What works on each position alone.
    pub ffn: Ffn,
}

/// What mixes positions.
#[derive(Debug, Clone, PartialEq)]
pub enum Mixer {
    /// Kimi Delta Attention: a fixed-size state per sequence (MODELS.md section 3).
    Kda(Kda),
    /// Multi-head latent attention: one latent row per token (MODELS.md section 5).
    Mla(Mla),
    /// Grouped-query attention: keys and values per token (MODELS.md section 11).
    Gqa(Gqa),
}

/// Kimi Delta Attention.
#[derive(Debug, Clone, PartialEq)]
pub struct Kda {
    /// Heads; key and value heads are as many.
    pub heads: usize,
    /// Width of a head's keys and values.
    pub head_dim: usize,
    /// Taps of the short convolution.
    pub conv_width: usize,
    /// Form of the decay gate.
    pub gate: kernels::kda::Gate,
    /// Epsilon of the gated output norm.
    pub norm_eps: f32,
}

/// Multi-head latent attention without rotation (NoPE).
#[derive(Debug, Clone, PartialEq)]
pub struct Mla {
    /// Query heads.
    pub heads: usize,
    /// Width of a head's part that is projected from the latent.
    pub nope: usize,
    /// Width of the key part that all heads share.
    pub rope: usize,
    /// Width of a head's values.
    pub value_dim: usize,
    /// Width of the latent.
    pub rank: usize,
    /// Epsilon of the latent's norm: 1e-6 in Kimi models whatever `rms_norm_eps` says.
    pub latent_eps: f32,
}

/// Grouped-query attention with rotary positions.
#[derive(Debug, Clone, PartialEq)]
pub struct Gqa {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Keys and queries are normed per head before the rotation (Qwen3).
    pub qk_norm: Option<f32>,
    /// The rotation.
    pub rope: kernels::rope::Rope,
}

/// What works on each position alone.
#[derive(Debug, Clone, PartialEq)]
pub enum Ffn {
    /// `down(silu(gate(x)) * up(x))`.
    Dense {
        /// Rows of gate and up.
        inter: usize,
    },
    /// Routed experts and one shared expert (MODELS.md section 6).
    Moe(Moe),
}

/// A mixture of experts.
#[derive(Debug, Clone, PartialEq)]
pub struct Moe {
    /// Rows of a routed expert's gate and up.
    pub inter: usize,
    /// Rows of the shared expert's gate and up; 0 when there is none.
    pub shared_inter: usize,
    /// How experts are chosen and weighed.
    pub router: kernels::moe::Router,
}

/// A tensor's place in the model, whatever a family calls it in its files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// Token embedding `[vocab, hidden]`.
    Embedding,
    /// Norm before the head `[hidden]`.
    FinalNorm,
    /// Output head `[vocab, hidden]`.
    Head,
    /// Norm before the mixer `[hidden]`.
    MixerNorm,
    /// Norm before the feed-forward part `[hidden]`.
    FfnNorm,
    /// Query projection.
    Query,
    /// Key projection.
    Key,
    /// Value projection.
    Value,
    /// Output projection of the mixer.
    Output,
    /// Per-head norm of queries `[head_dim]`.
    QueryNorm,
    /// Per-head norm of keys `[head_dim]`.
    KeyNorm,
    /// MLA: projection to latent and shared key `[rank + rope, hidden]`.
    LatentDown,
    /// MLA: norm of the latent `[rank]`.
    LatentNorm,
    /// MLA: projection of the latent to keys and values `[heads * (nope + value), rank]`.
    LatentUp,
    /// KDA: taps of the query convolution `[heads * head_dim, 1, width]`.
    QueryConv,
    /// KDA: taps of the key convolution.
    KeyConv,
    /// KDA: taps of the value convolution.
    ValueConv,
    /// KDA: decay gate, first factor `[head_dim, hidden]`.
    DecayDown,
    /// KDA: decay gate, second factor `[heads * head_dim, head_dim]`.
    DecayUp,
    /// KDA: logarithm of the decay rate, one a head.
    DecayLog,
    /// KDA: bias of the decay gate `[heads * head_dim]`.
    DecayBias,
    /// KDA: write strength `[heads, hidden]`.
    Beta,
    /// KDA: output gate, first factor `[head_dim, hidden]`.
    GateDown,
    /// KDA: output gate, second factor `[heads * head_dim, head_dim]`.
    GateUp,
    /// KDA: norm of a head's output `[head_dim]`.
    HeadNorm,
    /// Dense gate projection `[inter, hidden]`.
    FfnGate,
    /// Dense up projection `[inter, hidden]`.
    FfnUp,
    /// Dense down projection `[hidden, inter]`.
    FfnDown,
    /// Router `[experts, hidden]`.
    Router,
    /// Correction bias of the router `[experts]`.
    RouterBias,
    /// An expert's gate projection.
    ExpertGate(usize),
    /// An expert's up projection.
    ExpertUp(usize),
    /// An expert's down projection.
    ExpertDown(usize),
    /// The shared expert's gate projection.
    SharedGate,
    /// The shared expert's up projection.
    SharedUp,
    /// The shared expert's down projection.
    SharedDown,
}

impl Part {
    /// Whether it is read into quantised panels when the model is quantised: the large matrices.
    /// Not so routers and KDA's small projections, whose errors decide more than their bytes cost;
    /// the embedding, of which a row is read; and [`Part::LatentUp`], which attention quantises
    /// head by head, in two orders.
    fn is_quantized(self) -> bool {
        match self {
            Part::Head
            | Part::Query
            | Part::Key
            | Part::Value
            | Part::Output
            | Part::LatentDown
            | Part::FfnGate
            | Part::FfnUp
            | Part::FfnDown
            | Part::ExpertGate(_)
            | Part::ExpertUp(_)
            | Part::ExpertDown(_)
            | Part::SharedGate
            | Part::SharedUp
            | Part::SharedDown => true,
            Part::Embedding
            | Part::FinalNorm
            | Part::MixerNorm
            | Part::FfnNorm
            | Part::QueryNorm
            | Part::KeyNorm
            | Part::LatentNorm
            | Part::LatentUp
            | Part::QueryConv
            | Part::KeyConv
            | Part::ValueConv
            | Part::DecayDown
            | Part::DecayUp
            | Part::DecayLog
            | Part::DecayBias
            | Part::Beta
            | Part::GateDown
            | Part::GateUp
            | Part::HeadNorm
            | Part::Router
            | Part::RouterBias => false,
        }
    }
}

/// A tensor the model needs: its place and its shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Required {
    /// The layer it belongs to, none for embedding, final norm and head.
    pub layer: Option<usize>,
    /// Its place.
    pub part: Part,
    /// Its shape, slowest dimension first. Tensors whose file shape has extra dimensions of 1
    /// (`[1, 1, heads, 1]`) are compared with those removed.
    pub shape: Vec<usize>,
    /// The order in which it is used: what products multiply with lies in panels.
    pub order: Order,
}

impl Required {
    /// Number of values.
    pub fn values(&self) -> usize {
        self.shape.iter().product()
    }

    /// Random values in its place that keep rows of the size that they have, states bounded, and
    /// the choice of experts even.
    pub fn noise(&self) -> Noise {
        let (middle, spread) = match self.part {
            Part::FinalNorm
            | Part::MixerNorm
            | Part::FfnNorm
            | Part::QueryNorm
            | Part::KeyNorm
            | Part::LatentNorm
            | Part::HeadNorm => (1.0, 0.1),
            Part::Embedding => (0.0, 1.0),
            Part::DecayLog => (0.0, 1.0),
            Part::DecayBias => (-3.0, 1.0),
            Part::RouterBias => (0.0, 0.0),
            _ => (0.0, (3.0 / matrix_size(&self.shape).1 as f32).sqrt()),
        };
        Noise { middle, spread }
    }

    /// Bytes in memory, where files store it as `dtype`.
    pub fn held_bytes(&self, dtype: Dtype) -> usize {
        let (rows, cols) = matrix_size(&self.shape);
        self.order.bytes(dtype, rows, cols)
    }
}

impl ModelSpec {
    /// What products want of activations beside f32.
    pub fn forms(&self) -> Forms {
        Forms { int8: self.quantize.is_some(), bf16: self.compute == Compute::Bf16 }
    }

    /// Whether logits are products with the embedding as it lies. A quantised head that is tied
    /// is a copy of its own.
    pub fn head_is_embedding(&self) -> bool {
        self.tied_head && self.quantize.is_none()
    }

    /// Every tensor the model needs, in the order of the forward pass.
    pub fn required(&self) -> Vec<Required> {
        let mut list = Vec::new();
        let mut need = |layer, part: Part, shape: &[usize]| {
            let is_looked_up = part == Part::Embedding && !self.head_is_embedding();
            let order = match part {
                // Attention takes its rows apart by head; convolutions have vectors of their own.
                Part::LatentUp | Part::QueryConv | Part::KeyConv | Part::ValueConv => Order::Rows,
                _ if is_looked_up || shape.len() == 1 => Order::Rows,
                _ => match self.quantize.filter(|_| part.is_quantized()) {
                    Some(quantization) => Order::Quantized(quantization),
                    None => Order::Panels,
                },
            };
            list.push(Required { layer, part, shape: shape.to_vec(), order });
        };
        need(None, Part::Embedding, &[self.vocab_size, self.hidden]);
        for (i, layer) in self.layers.iter().enumerate() {
            let mut need = |part, shape: &[usize]| need(Some(i), part, shape);
            need(Part::MixerNorm, &[self.hidden]);
            layer.mixer.required(self.hidden, &mut need);
            need(Part::FfnNorm, &[self.hidden]);
            layer.ffn.required(self.hidden, &mut need);
        }
        need(None, Part::FinalNorm, &[self.hidden]);
        if !self.head_is_embedding() {
            need(None, Part::Head, &[self.vocab_size, self.hidden]);
        }
        list
    }

    /// Number of parameters, tied ones counted once.
    pub fn parameters(&self) -> usize {
        let is_tied = |required: &Required| self.tied_head && required.part == Part::Head;
        self.required().iter().filter(|r| !is_tied(r)).map(Required::values).sum()
    }

    /// Weights that the forward pass of one token multiplies with: all matrices, of the experts
    /// only as many as are chosen.
    pub fn active_weights(&self) -> usize {
        let top_k = |layer: usize| match &self.layers[layer].ffn {
            Ffn::Dense { .. } => 0,
            Ffn::Moe(moe) => moe.router.top_k,
        };
        let counts = |required: &Required| match (required.part, required.layer) {
            // A row of the embedding is read, not multiplied, unless it is the head too.
            (Part::Embedding, _) => self.head_is_embedding(),
            (
                Part::ExpertGate(expert) | Part::ExpertUp(expert) | Part::ExpertDown(expert),
                Some(layer),
            ) => expert < top_k(layer),
            (Part::QueryConv | Part::KeyConv | Part::ValueConv, _) => false,
            _ => required.shape.len() == 2,
        };
        let required = self.required();
        required.iter().filter(|required| counts(required)).map(Required::values).sum()
    }

    /// Positions at which prompt spans may end and states may be kept: multiples of this.
    pub fn grid(&self) -> usize {
        let cells = |layer: &Layer| !matches!(layer.mixer, Mixer::Gqa(_));
        if self.layers.iter().any(cells) { kernels::CELL_LEN } else { 1 }
    }

    /// Whether any layer keeps a recurrent state.
    pub fn is_recurrent(&self) -> bool {
        self.layers.iter().any(|layer| matches!(layer.mixer, Mixer::Kda(_)))
    }
}

impl Mixer {
    fn required(&self, hidden: usize, need: &mut impl FnMut(Part, &[usize])) {
        match self {
            Mixer::Kda(kda) => {
                let inner = kda.inner();
                for part in [Part::Query, Part::Key, Part::Value] {
                    need(part, &[inner, hidden]);
                }
                for part in [Part::QueryConv, Part::KeyConv, Part::ValueConv] {
                    need(part, &[inner, kda.conv_width]);
                }
                need(Part::DecayDown, &[kda.head_dim, hidden]);
                need(Part::DecayUp, &[inner, kda.head_dim]);
                need(Part::DecayLog, &[kda.heads]);
                need(Part::DecayBias, &[inner]);
                need(Part::Beta, &[kda.heads, hidden]);
                need(Part::GateDown, &[kda.head_dim, hidden]);
                need(Part::GateUp, &[inner, kda.head_dim]);
                need(Part::HeadNorm, &[kda.head_dim]);
                need(Part::Output, &[hidden, inner]);
            }
            Mixer::Mla(mla) => {
                need(Part::Query, &[mla.heads * (mla.nope + mla.rope), hidden]);
                need(Part::LatentDown, &[mla.rank + mla.rope, hidden]);
                need(Part::LatentNorm, &[mla.rank]);
                need(Part::LatentUp, &[mla.heads * (mla.nope + mla.value_dim), mla.rank]);
                need(Part::Output, &[hidden, mla.heads * mla.value_dim]);
            }
            Mixer::Gqa(gqa) => {
                need(Part::Query, &[gqa.heads * gqa.head_dim, hidden]);
                need(Part::Key, &[gqa.kv_heads * gqa.head_dim, hidden]);
                need(Part::Value, &[gqa.kv_heads * gqa.head_dim, hidden]);
                if gqa.qk_norm.is_some() {
                    need(Part::QueryNorm, &[gqa.head_dim]);
                    need(Part::KeyNorm, &[gqa.head_dim]);
                }
                need(Part::Output, &[hidden, gqa.heads * gqa.head_dim]);
            }
        }
    }

    /// Values remembered per token: MLA's latent row, GQA's keys and values.
    pub fn values_per_token(&self) -> usize {
        match self {
            Mixer::Kda(_) => 0,
            Mixer::Mla(mla) => mla.rank + mla.rope,
            Mixer::Gqa(gqa) => 2 * gqa.kv_heads * gqa.head_dim,
        }
    }

    /// What a block holds of the layer, in order: the widths of runs of 64 positions. Keys of GQA
    /// lie in columns, so each value of a key is a run of its own.
    pub fn runs(&self) -> impl Iterator<Item = usize> {
        let (ones, others, width) = match self {
            Mixer::Kda(_) => (0, 0, 0),
            Mixer::Mla(mla) => (0, 1, mla.rank + mla.rope),
            Mixer::Gqa(gqa) => (gqa.kv_heads * gqa.head_dim, gqa.kv_heads, gqa.head_dim),
        };
        repeat_n(1, ones).chain(repeat_n(width, others))
    }
}

impl Kda {
    /// Width of all heads together.
    pub fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Heads and widths as kernels take them.
    pub fn shape(&self) -> kernels::kda::Shape {
        kernels::kda::Shape {
            key_heads: self.heads,
            value_heads: self.heads,
            key_dim: self.head_dim,
            value_dim: self.head_dim,
        }
    }

    /// Values of the recurrent state `[heads][value][key]`.
    pub fn state_values(&self) -> usize {
        self.heads * self.head_dim * self.head_dim
    }

    /// Values of the convolution window `[width - 1][query | key | value channels]`.
    pub fn window_values(&self) -> usize {
        (self.conv_width - 1) * 3 * self.inner()
    }
}

impl Mla {
    /// Heads and widths as kernels take them.
    pub fn shape(&self) -> kernels::mla::Shape {
        let Mla { heads, nope, rope, value_dim, rank, .. } = *self;
        kernels::mla::Shape { heads, nope, rope, value_dim, rank }
    }
}

impl Gqa {
    /// Heads and widths as kernels take them.
    pub fn shape(&self) -> kernels::gqa::Shape {
        let Gqa { heads, kv_heads, head_dim, .. } = *self;
        kernels::gqa::Shape { heads, kv_heads, head_dim }
    }
}

impl Ffn {
    fn required(&self, hidden: usize, need: &mut impl FnMut(Part, &[usize])) {
        match self {
            Ffn::Dense { inter } => {
                need(Part::FfnGate, &[*inter, hidden]);
                need(Part::FfnUp, &[*inter, hidden]);
                need(Part::FfnDown, &[hidden, *inter]);
            }
            Ffn::Moe(moe) => {
                need(Part::Router, &[moe.router.experts, hidden]);
                if moe.router.has_bias() {
                    need(Part::RouterBias, &[moe.router.experts]);
                }
                for e in 0..moe.router.experts {
                    need(Part::ExpertGate(e), &[moe.inter, hidden]);
                    need(Part::ExpertUp(e), &[moe.inter, hidden]);
                    need(Part::ExpertDown(e), &[hidden, moe.inter]);
                }
                if moe.shared_inter > 0 {
                    need(Part::SharedGate, &[moe.shared_inter, hidden]);
                    need(Part::SharedUp, &[moe.shared_inter, hidden]);
                    need(Part::SharedDown, &[hidden, moe.shared_inter]);
                }
            }
        }
    }
}

impl fmt::Display for Mixer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mixer::Kda(kda) => write!(f, "KDA {} x {}", kda.heads, kda.head_dim),
            Mixer::Mla(mla) => {
                write!(f, "MLA {} x ({}+{}), latent {}", mla.heads, mla.nope, mla.rope, mla.rank)
            }
            Mixer::Gqa(gqa) => {
                write!(f, "GQA {} over {} x {}", gqa.heads, gqa.kv_heads, gqa.head_dim)
            }
        }
    }
}

impl fmt::Display for Ffn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ffn::Dense { inter } => write!(f, "dense {inter}"),
            Ffn::Moe(moe) => {
                write!(f, "MoE {} of {} x {}", moe.router.top_k, moe.router.experts, moe.inter)?;
                if moe.shared_inter > 0 {
                    write!(f, " + shared {}", moe.shared_inter)
                } else {
                    Ok(())
                }
            }
        }
    }
}
