//! The mixers of a layer: projections around the kernels of `kda`, `mla` and `gqa`.

use kernels::gemm::Product;
use kernels::norm::{GateKind, Scale, rms_norm_gated, rms_norm_in_place};
use kernels::{
    ArenaError, Paged, Quantization, Rows, RowsMut, activation, conv, gemm, gqa, kda, mla, rope,
};

use super::decoder::Step;
use super::files::ModelWeights;
use super::layout::LayerLayout;
use super::spec::{Gqa, Kda, Mixer, Mla, Part};
use super::workspace::{Workspace, rows};
use crate::weights::Tensor;

/// A mixer with its weights.
#[derive(Debug)]
pub(super) enum MixerWeights {
    Kda(Box<KdaWeights>),
    Mla(Box<MlaWeights>),
    Gqa(Box<GqaWeights>),
}

impl MixerWeights {
    pub(super) fn new(
        mixer: &Mixer,
        layer: usize,
        weights: &ModelWeights,
        quantize: Option<Quantization>,
    ) -> Result<MixerWeights, ArenaError> {
        Ok(match mixer {
            Mixer::Kda(kda) => MixerWeights::Kda(Box::new(KdaWeights::new(kda, layer, weights))),
            Mixer::Mla(mla) => {
                let latent_up = weights.matrix(&weights.tensor(Some(layer), Part::LatentUp));
                let latent_up = mla::Up::new(mla.shape(), latent_up, quantize)?;
                MixerWeights::Mla(Box::new(MlaWeights::new(mla, layer, weights, latent_up)))
            }
            Mixer::Gqa(gqa) => MixerWeights::Gqa(Box::new(GqaWeights::new(gqa, layer, weights))),
        })
    }

    /// `x += mixer(normed)`.
    pub(super) fn forward(&self, step: &mut Step<'_>, work: &mut Workspace) {
        let (output, width) = match self {
            MixerWeights::Kda(kda) => kda.forward(step, work),
            MixerWeights::Mla(mla) => mla.forward(step, work),
            MixerWeights::Gqa(gqa) => gqa.forward(step, work),
        };
        let count = step.batch.rows();
        let output = step.panels(output);
        let attended = Rows::new(rows(&mut work.attended, count, width), width);
        let x = RowsMut::new(rows(&mut work.x, count, output.rows()), output.rows());
        gemm::gemm_add(step.cpu, attended, output, &mut work.narrowed, x);
    }
}

#[derive(Debug)]
pub(super) struct KdaWeights {
    shape: Kda,
    qkv: [Tensor; 3],
    /// `[width][query | key | value channels]`.
    taps: Vec<f32>,
    decay: [Tensor; 2],
    decay_log: Vec<f32>,
    decay_bias: Vec<f32>,
    beta: Tensor,
    gate: [Tensor; 2],
    head_norm: Vec<f32>,
    output: Tensor,
}

/// The taps of a layer's convolutions by tap, `[width][query | key | value channels]`, oldest
/// first; `vector` gives a part `[channels][width]`.
pub(super) fn taps(kda: &Kda, vector: impl Fn(Part) -> Vec<f32>) -> Vec<f32> {
    let convs = [Part::QueryConv, Part::KeyConv, Part::ValueConv].map(vector);
    let mut taps = Vec::with_capacity(3 * kda.inner() * kda.conv_width);
    for tap in 0..kda.conv_width {
        for conv in &convs {
            taps.extend(conv.chunks_exact(kda.conv_width).map(|channel| channel[tap]));
        }
    }
    taps
}

impl KdaWeights {
    fn new(kda: &Kda, layer: usize, weights: &ModelWeights) -> KdaWeights {
        let tensor = |part| weights.tensor(Some(layer), part);
        let vector = |part| weights.vector(Some(layer), part);
        KdaWeights {
            shape: kda.clone(),
            qkv: [Part::Query, Part::Key, Part::Value].map(tensor),
            taps: taps(kda, vector),
            decay: [Part::DecayDown, Part::DecayUp].map(tensor),
            decay_log: vector(Part::DecayLog),
            decay_bias: vector(Part::DecayBias),
            beta: tensor(Part::Beta),
            gate: [Part::GateDown, Part::GateUp].map(tensor),
            head_norm: vector(Part::HeadNorm),
            output: tensor(Part::Output),
        }
    }

    fn forward(&self, step: &mut Step<'_>, work: &mut Workspace) -> (&Tensor, usize) {
        let LayerLayout::Recurrent { state, window } = step.place else {
            unreachable!("a KDA layer has its memory in slots")
        };
        let (inner, count) = (self.shape.inner(), step.batch.rows());
        self.project(step, work);
        let qkv = Rows::new(rows(&mut work.qkv, count, 3 * inner), 3 * inner);
        let taps =
            conv::Taps { channels: 3 * inner, width: self.shape.conv_width, values: &self.taps };
        let spans = step.spans;
        let windows = conv::Windows { spans, arena: step.arena, at: window };
        let mixed = RowsMut::new(rows(&mut work.mixed, count, 3 * inner), 3 * inner);
        conv::conv(step.cpu, qkv, taps, windows, mixed);
        let inputs = kda::Inputs {
            qkv: Rows::new(rows(&mut work.mixed, count, 3 * inner), 3 * inner),
            decay: Rows::new(rows(&mut work.decay, count, inner), inner),
            beta: Rows::new(rows(&mut work.beta, count, self.shape.heads), self.shape.heads),
        };
        let states = kda::States { spans, arena: step.arena, at: state };
        let out = RowsMut::new(rows(&mut work.attended, count, inner), inner);
        kda::kda(step.cpu, self.shape.shape(), inputs, states, &mut work.scratch, out);
        self.norm_heads(step, work);
        (&self.output, inner)
    }

    /// Queries, keys and values; log-decays; write strengths; the output gate.
    fn project(&self, step: &Step<'_>, work: &mut Workspace) {
        let (cpu, count, inner) = (step.cpu, step.batch.rows(), self.shape.inner());
        let width = step_width(step, &self.output);
        let x = Rows::new(rows(&mut work.normed, count, width), width);
        let (dim, heads) = (self.shape.head_dim, self.shape.heads);
        let qkv = self.qkv.each_ref().map(|tensor| step.panels(tensor));
        let [downs, ups] =
            [0, 1].map(|i| [step.panels(&self.decay[i]), step.panels(&self.gate[i])]);
        let narrow = rows(&mut work.narrow, count, 2 * dim);
        let beta = rows(&mut work.beta, count, heads);
        let products = [
            Product {
                w: &qkv,
                out: RowsMut::new(rows(&mut work.qkv, count, 3 * inner), 3 * inner),
            },
            Product { w: &downs, out: RowsMut::new(narrow, 2 * dim) },
            Product { w: &[step.panels(&self.beta)], out: RowsMut::new(beta, heads) },
        ];
        gemm::gemm_each(cpu, x, products, &mut work.narrowed);
        activation::sigmoid(cpu, RowsMut::new(beta, heads));
        for (i, out) in [&mut work.decay, &mut work.gate].into_iter().enumerate() {
            let out = RowsMut::new(rows(out, count, inner), inner);
            let narrow = Rows::new(narrow, 2 * dim).columns(i * dim, dim);
            gemm::gemm(cpu, narrow, ups[i], &mut work.narrowed, out);
        }
        let decay = RowsMut::new(rows(&mut work.decay, count, inner), inner);
        kda::gate(cpu, self.shape.gate, &self.decay_log, &self.decay_bias, decay);
    }

    /// Each head's output, normed and gated, where it lies; the ungated copy goes to `mixed`.
    fn norm_heads(&self, step: &Step<'_>, work: &mut Workspace) {
        let (count, inner, dim) = (step.batch.rows(), self.shape.inner(), self.shape.head_dim);
        let raw = rows(&mut work.mixed, count, inner);
        raw.copy_from_slice(rows(&mut work.attended, count, inner));
        let raw = Rows::new(raw, dim);
        let gate = Rows::new(rows(&mut work.gate, count, inner), dim);
        let out = RowsMut::new(rows(&mut work.attended, count, inner), dim);
        let (norm, eps) = (&self.head_norm, self.shape.norm_eps);
        rms_norm_gated(step.cpu, raw, norm, eps, gate, GateKind::Sigmoid, out);
    }
}

#[derive(Debug)]
pub(super) struct MlaWeights {
    shape: Mla,
    query: Tensor,
    latent_down: Tensor,
    latent_norm: Vec<f32>,
    latent_up: mla::Up,
    output: Tensor,
}

impl MlaWeights {
    fn new(mla: &Mla, layer: usize, weights: &ModelWeights, latent_up: mla::Up) -> MlaWeights {
        let tensor = |part| weights.tensor(Some(layer), part);
        MlaWeights {
            shape: mla.clone(),
            query: tensor(Part::Query),
            latent_down: tensor(Part::LatentDown),
            latent_norm: weights.vector(Some(layer), Part::LatentNorm),
            latent_up,
            output: tensor(Part::Output),
        }
    }

    fn forward(&self, step: &mut Step<'_>, work: &mut Workspace) -> (&Tensor, usize) {
        let LayerLayout::Attention { rows: place } = step.place else {
            unreachable!("an MLA layer has its memory in blocks")
        };
        let (shape, count, cpu) = (self.shape.shape(), step.batch.rows(), step.cpu);
        let width = step_width(step, &self.output);
        let x = Rows::new(rows(&mut work.normed, count, width), width);
        let queries = shape.heads * shape.query();
        let q = rows(&mut work.qkv, count, queries);
        let latents = rows(&mut work.mixed, count, shape.row());
        let products = [
            Product { w: &[step.panels(&self.query)], out: RowsMut::new(q, queries) },
            Product {
                w: &[step.panels(&self.latent_down)],
                out: RowsMut::new(latents, shape.row()),
            },
        ];
        gemm::gemm_each(cpu, x, products, &mut work.narrowed);
        let normed = RowsMut::new(latents, shape.row()).columns(0, shape.rank);
        rms_norm_in_place(cpu, normed, Scale::Plain(&self.latent_norm), self.shape.latent_eps);
        let (spans, tables) = (&step.batch.spans[..], &step.batch.tables[..]);
        mla::write(shape, (spans, tables), Rows::new(latents, shape.row()), step.arena, place);
        let inputs = mla::Inputs { q: Rows::new(q, queries), up: &self.latent_up };
        let paged = Paged { spans: step.spans, tables, arena: step.arena, place };
        let values = shape.heads * shape.value_dim;
        let out = RowsMut::new(rows(&mut work.attended, count, values), values);
        mla::attend(cpu, inputs, paged, &mut work.scratch, &mut work.mla, out);
        (&self.output, values)
    }
}

#[derive(Debug)]
pub(super) struct GqaWeights {
    shape: Gqa,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    /// Weights of the per-head norms of queries and keys.
    norms: Option<(Vec<f32>, Vec<f32>)>,
    output: Tensor,
}

impl GqaWeights {
    fn new(gqa: &Gqa, layer: usize, weights: &ModelWeights) -> GqaWeights {
        let tensor = |part| weights.tensor(Some(layer), part);
        let vector = |part| weights.vector(Some(layer), part);
        GqaWeights {
            shape: gqa.clone(),
            query: tensor(Part::Query),
            key: tensor(Part::Key),
            value: tensor(Part::Value),
            norms: gqa.qk_norm.map(|_| (vector(Part::QueryNorm), vector(Part::KeyNorm))),
            output: tensor(Part::Output),
        }
    }

    fn forward(&self, step: &mut Step<'_>, work: &mut Workspace) -> (&Tensor, usize) {
        let LayerLayout::Attention { rows: place } = step.place else {
            unreachable!("a GQA layer has its memory in blocks")
        };
        let (shape, count, cpu) = (self.shape.shape(), step.batch.rows(), step.cpu);
        let width = step_width(step, &self.output);
        let x = Rows::new(rows(&mut work.normed, count, width), width);
        let (queries, keys) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let (q, rest) = work.qkv.split_at_mut(count * queries);
        let (k, rest) = rest.split_at_mut(count * keys);
        let v = &mut rest[..count * keys];
        let products = [
            Product { w: &[step.panels(&self.query)], out: RowsMut::new(q, queries) },
            Product { w: &[step.panels(&self.key)], out: RowsMut::new(k, keys) },
            Product { w: &[step.panels(&self.value)], out: RowsMut::new(v, keys) },
        ];
        gemm::gemm_each(cpu, x, products, &mut work.narrowed);
        let dim = shape.head_dim;
        if let (Some((query_norm, key_norm)), Some(eps)) = (&self.norms, self.shape.qk_norm) {
            rms_norm_in_place(cpu, RowsMut::new(q, dim), Scale::Plain(query_norm), eps);
            rms_norm_in_place(cpu, RowsMut::new(k, dim), Scale::Plain(key_norm), eps);
        }
        let table = Workspace::angles_of(&work.angles, &self.shape.rope);
        let angles = Rows::new(&work.angles[table].1, self.shape.rope.dim);
        rope::rotate(cpu, RowsMut::new(q, queries), dim, angles);
        rope::rotate(cpu, RowsMut::new(k, keys), dim, angles);
        let (spans, tables) = (&step.batch.spans[..], &step.batch.tables[..]);
        let (k, v) = (Rows::new(k, keys), Rows::new(v, keys));
        gqa::write(shape, (spans, tables), k, v, step.arena, place);
        let paged = Paged { spans: step.spans, tables, arena: step.arena, place };
        let out = RowsMut::new(rows(&mut work.attended, count, queries), queries);
        let q = Rows::new(q, queries);
        gqa::attend(cpu, shape, q, paged, &mut work.scratch, &mut work.gqa, out);
        (&self.output, queries)
    }
}

/// Width of the residual stream: what the output projection gives.
fn step_width(step: &Step<'_>, output: &Tensor) -> usize {
    step.panels(output).rows()
}
