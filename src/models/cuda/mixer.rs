//! The mixers of a layer on the device: projections around the kernels of `kda`, `mla` and `gqa`.

use std::slice;

use kernels::cuda::attention::DevicePaged;
use kernels::cuda::dense::{self, Scale};
use kernels::cuda::{CudaError, DeviceBuffer, Slots, conv, gqa, kda, mla};
use kernels::norm::GateKind;

use super::Step;
use super::weights::{DeviceTensor, Loader, Multiplied};
use super::workspace::Workspace;
use crate::models::layout::LayerLayout;
use crate::models::mixer::taps;
use crate::models::spec::{Gqa, Kda, Mixer, Mla, Part};

/// A mixer with its weights.
pub(super) enum MixerWeights {
    Kda(Box<KdaWeights>),
    Mla(Box<MlaWeights>),
    Gqa(Box<GqaWeights>),
}

impl MixerWeights {
    pub fn new(mixer: &Mixer, loader: &Loader<'_>) -> Result<MixerWeights, CudaError> {
        Ok(match mixer {
            Mixer::Kda(kda) => MixerWeights::Kda(Box::new(KdaWeights::new(kda, loader)?)),
            Mixer::Mla(mla) => MixerWeights::Mla(Box::new(MlaWeights::new(mla, loader)?)),
            Mixer::Gqa(gqa) => MixerWeights::Gqa(Box::new(GqaWeights::new(gqa, loader)?)),
        })
    }

    /// `x += mixer(normed)`.
    pub fn forward(&self, step: &mut Step<'_>, work: &mut Workspace) -> Result<(), CudaError> {
        let (output, width) = match self {
            MixerWeights::Kda(kda) => kda.forward(step, work)?,
            MixerWeights::Mla(mla) => mla.forward(step, work)?,
            MixerWeights::Gqa(gqa) => gqa.forward(step, work)?,
        };
        let (cuda, rows) = (step.cuda, step.spans.rows());
        let attended = work.attended.rows(rows, width);
        let attended = Multiplied::new(cuda, attended, &mut work.rounded)?;
        attended.add_to(cuda, output, work.x.rows_mut(rows, output.rows()))
    }
}

/// Weights of a KDA layer.
pub(super) struct KdaWeights {
    shape: Kda,
    /// Queries, keys and values.
    qkv: Vec<DeviceTensor>,
    /// `[width][query | key | value channels]`.
    taps: DeviceBuffer<f32>,
    /// What decay and output gate are projected up from.
    downs: Vec<DeviceTensor>,
    decay_up: DeviceTensor,
    decay_log: DeviceBuffer<f32>,
    decay_bias: DeviceBuffer<f32>,
    beta: DeviceTensor,
    gate_up: DeviceTensor,
    head_norm: DeviceBuffer<f32>,
    output: DeviceTensor,
}

impl KdaWeights {
    fn new(kda: &Kda, loader: &Loader<'_>) -> Result<KdaWeights, CudaError> {
        let taps = taps(kda, |part| loader.weights.vector(loader.layer, part));
        Ok(KdaWeights {
            shape: kda.clone(),
            qkv: loader.stacked(&[Part::Query, Part::Key, Part::Value])?,
            taps: DeviceBuffer::of(loader.cuda, &taps)?,
            downs: loader.stacked(&[Part::DecayDown, Part::GateDown])?,
            decay_up: loader.tensor(Part::DecayUp)?,
            decay_log: loader.vector(Part::DecayLog)?,
            decay_bias: loader.vector(Part::DecayBias)?,
            beta: loader.tensor(Part::Beta)?,
            gate_up: loader.tensor(Part::GateUp)?,
            head_norm: loader.vector(Part::HeadNorm)?,
            output: loader.tensor(Part::Output)?,
        })
    }

    fn forward(
        &self,
        step: &mut Step<'_>,
        work: &mut Workspace,
    ) -> Result<(&DeviceTensor, usize), CudaError> {
        let LayerLayout::Recurrent { state, window } = step.place else {
            unreachable!("a KDA layer has its memory in slots")
        };
        let (cuda, spans, rows) = (step.cuda, step.spans, step.spans.rows());
        let (inner, dim, heads) = (self.shape.inner(), self.shape.head_dim, self.shape.heads);
        let width = self.output.rows();
        {
            let x = Multiplied::new(cuda, work.normed.rows(rows, width), &mut work.rounded)?;
            x.times(cuda, &self.qkv, &mut work.qkv, rows)?;
            x.times(cuda, &self.downs, &mut work.narrow, rows)?;
            x.times(cuda, slice::from_ref(&self.beta), &mut work.beta, rows)?;
        }
        for (i, up) in [&self.decay_up, &self.gate_up].into_iter().enumerate() {
            let narrow = work.narrow.rows(rows, 2 * dim).columns(i * dim, dim);
            let narrow = Multiplied::new(cuda, narrow, &mut work.rounded)?;
            let out = if i == 0 { &mut work.decay } else { &mut work.gate };
            narrow.times(cuda, slice::from_ref(up), out, rows)?;
        }
        let taps = conv::Taps {
            channels: 3 * inner,
            width: self.shape.conv_width,
            values: self.taps.slice(),
        };
        let windows = Slots { spans, arena: step.arena, at: window };
        let qkv = work.qkv.rows(rows, 3 * inner);
        conv::conv(cuda, qkv, taps, windows, work.mixed.rows_mut(rows, 3 * inner))?;
        let inputs = kda::Inputs {
            qkv: work.mixed.rows(rows, 3 * inner),
            decay: work.decay.rows(rows, inner),
            gate: Some(kda::DecayGate {
                kind: self.shape.gate,
                a_log: self.decay_log.slice(),
                bias: self.decay_bias.slice(),
            }),
            beta: work.beta.rows(rows, heads),
        };
        let output = kda::Output {
            gate: work.gate.rows(rows, inner),
            kind: GateKind::Sigmoid,
            weights: self.head_norm.slice(),
            eps: self.shape.norm_eps,
        };
        let states = Slots { spans, arena: step.arena, at: state };
        let out = work.attended.rows_mut(rows, inner);
        kda::kda(cuda, self.shape.shape(), inputs, states, Some(output), &mut work.kda, out)?;
        Ok((&self.output, inner))
    }
}

/// Weights of an MLA layer.
pub(super) struct MlaWeights {
    shape: Mla,
    query: DeviceTensor,
    latent_down: DeviceTensor,
    latent_norm: DeviceBuffer<f32>,
    latent_up: mla::Up,
    output: DeviceTensor,
}

impl MlaWeights {
    fn new(mla: &Mla, loader: &Loader<'_>) -> Result<MlaWeights, CudaError> {
        Ok(MlaWeights {
            shape: mla.clone(),
            query: loader.tensor(Part::Query)?,
            latent_down: loader.tensor(Part::LatentDown)?,
            latent_norm: loader.vector(Part::LatentNorm)?,
            latent_up: mla::Up::new(loader.cuda, mla.shape(), loader.host(Part::LatentUp))?,
            output: loader.tensor(Part::Output)?,
        })
    }

    fn forward(
        &self,
        step: &mut Step<'_>,
        work: &mut Workspace,
    ) -> Result<(&DeviceTensor, usize), CudaError> {
        let LayerLayout::Attention { rows: place } = step.place else {
            unreachable!("an MLA layer has its memory in blocks")
        };
        let (cuda, spans, rows) = (step.cuda, step.spans, step.spans.rows());
        let shape = self.shape.shape();
        let (queries, values) = (shape.heads * shape.query(), shape.heads * shape.value_dim);
        let x = work.normed.rows(rows, self.output.rows());
        let x = Multiplied::new(cuda, x, &mut work.rounded)?;
        x.times(cuda, slice::from_ref(&self.query), &mut work.qkv, rows)?;
        x.times(cuda, slice::from_ref(&self.latent_down), &mut work.mixed, rows)?;
        let latents = work.mixed.rows_mut(rows, shape.row()).columns(0, shape.rank);
        let norm = Scale::Plain(self.latent_norm.slice());
        dense::rms_norm_in_place(cuda, latents, norm, self.shape.latent_eps)?;
        let latents = work.mixed.rows(rows, shape.row());
        mla::write_rows(cuda, shape, spans, latents, step.arena, place)?;
        let most_positions = step.most_positions;
        let paged = DevicePaged { spans, arena: step.arena, place, most_positions };
        let inputs = (work.qkv.rows(rows, queries), &self.latent_up, cuda.compute);
        let mla = work.mla.as_mut().expect("a model with MLA layers has their workspace");
        mla::attend(cuda, inputs, step.host, paged, mla, work.attended.rows_mut(rows, values))?;
        Ok((&self.output, values))
    }
}

/// Weights of a GQA layer.
pub(super) struct GqaWeights {
    shape: Gqa,
    /// Queries, keys and values: each has rows of its own, which are normed head by head.
    qkv: [DeviceTensor; 3],
    /// Weights of the per-head norms of queries and keys.
    norms: Option<[DeviceBuffer<f32>; 2]>,
    output: DeviceTensor,
}

impl GqaWeights {
    fn new(gqa: &Gqa, loader: &Loader<'_>) -> Result<GqaWeights, CudaError> {
        let norms = match gqa.qk_norm {
            Some(_) => Some([loader.vector(Part::QueryNorm)?, loader.vector(Part::KeyNorm)?]),
            None => None,
        };
        Ok(GqaWeights {
            shape: gqa.clone(),
            qkv: [
                loader.tensor(Part::Query)?,
                loader.tensor(Part::Key)?,
                loader.tensor(Part::Value)?,
            ],
            norms,
            output: loader.tensor(Part::Output)?,
        })
    }

    fn forward(
        &self,
        step: &mut Step<'_>,
        work: &mut Workspace,
    ) -> Result<(&DeviceTensor, usize), CudaError> {
        let LayerLayout::Attention { rows: place } = step.place else {
            unreachable!("a GQA layer has its memory in blocks")
        };
        let (cuda, spans, rows) = (step.cuda, step.spans, step.spans.rows());
        let shape = self.shape.shape();
        let dim = shape.head_dim;
        let (queries, keys) = (shape.heads * dim, shape.kv_heads * dim);
        let Workspace { normed, rounded, qkv, mixed, values, angles, gqa, attended, .. } = work;
        let x = Multiplied::new(cuda, normed.rows(rows, self.output.rows()), rounded)?;
        for (tensor, out) in self.qkv.iter().zip([&mut *qkv, &mut *mixed, &mut *values]) {
            x.times(cuda, slice::from_ref(tensor), out, rows)?;
        }
        let angles = angles.of(&self.shape.rope, rows);
        for (i, (x, width)) in [(&mut *qkv, queries), (&mut *mixed, keys)].into_iter().enumerate() {
            if let (Some(norms), Some(eps)) = (&self.norms, self.shape.qk_norm) {
                let heads = x.rows_mut(rows * width / dim, dim);
                dense::rms_norm_in_place(cuda, heads, Scale::Plain(norms[i].slice()), eps)?;
            }
            dense::rotate(cuda, x.rows_mut(rows, width), dim, angles)?;
        }
        let kv = (mixed.rows(rows, keys), values.rows(rows, keys));
        gqa::write_rows(cuda, shape, spans, kv, step.arena, place)?;
        let most_positions = step.most_positions;
        let paged = DevicePaged { spans, arena: step.arena, place, most_positions };
        let work = gqa.as_mut().expect("a model with GQA layers has their workspace");
        let (q, out) = (qkv.rows(rows, queries), attended.rows_mut(rows, queries));
        gqa::attend(cuda, shape, (q, cuda.compute), paged, work, out)?;
        Ok((&self.output, queries))
    }
}
