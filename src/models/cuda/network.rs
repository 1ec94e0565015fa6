//! The weights of a model on the device, and the layers in their order.

use kernels::cuda::{Cuda, CudaError, DeviceArena, DeviceBuffer, DeviceSpans, Slots, dense, rows};
use kernels::{SEGMENT_LEN, Spans};

use super::ffn::{FfnWeights, Routed};
use super::mixer::MixerWeights;
use super::weights::{DeviceTensor, Loader};
use super::workspace::Workspace;
use super::{LoadError, Most, Step};
use crate::models::files::LayerFiles;
use crate::models::layout::StateLayout;
use crate::models::spec::{ModelSpec, Part};

/// A model's weights.
pub(super) struct Network {
    embedding: DeviceTensor,
    /// None where the embedding is the head.
    head: Option<DeviceTensor>,
    final_norm: DeviceBuffer<f32>,
    layers: Vec<LayerWeights>,
}

struct LayerWeights {
    mixer_norm: DeviceBuffer<f32>,
    mixer: MixerWeights,
    ffn_norm: DeviceBuffer<f32>,
    ffn: FfnWeights,
}

/// A step whose table is on the device.
pub(super) struct Uploaded<'a> {
    pub cuda: &'a Cuda,
    pub spec: &'a ModelSpec,
    pub layout: &'a StateLayout,
    /// The spans as the host knows them, without padding.
    pub host: Spans<'a>,
    pub spans: DeviceSpans<'a>,
    /// Segments of the longest sequence after the step, at least.
    pub segments: usize,
}

impl Network {
    /// Loads the weights and takes them to the device. What is loaded for a layer is given up, by
    /// us and by the driver on its way, before the next.
    pub fn new(
        cuda: &Cuda,
        spec: &ModelSpec,
        files: &mut LayerFiles<'_>,
    ) -> Result<Network, LoadError> {
        let mut layers = Vec::with_capacity(spec.layers.len());
        for (i, layer) in spec.layers.iter().enumerate() {
            let weights = &files.load(Some(i))?;
            let loader = Loader { cuda, weights, layer: Some(i) };
            layers.push(LayerWeights {
                mixer_norm: loader.vector(Part::MixerNorm)?,
                mixer: MixerWeights::new(&layer.mixer, &loader)?,
                ffn_norm: loader.vector(Part::FfnNorm)?,
                ffn: FfnWeights::new(&layer.ffn, &loader)?,
            });
            cuda.synchronize()?;
        }
        let weights = &files.load(None)?;
        let loader = Loader { cuda, weights, layer: None };
        Ok(Network {
            layers,
            embedding: loader.tensor(Part::Embedding)?,
            final_norm: loader.vector(Part::FinalNorm)?,
            head: match spec.head_is_embedding() {
                true => None,
                false => Some(loader.tensor(Part::Head)?),
            },
        })
    }

    /// What hidden rows are multiplied by to give logits.
    pub fn head(&self) -> &DeviceTensor {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    /// Working memory of routed layers, if there are any.
    pub fn routed(&self, cuda: &Cuda, most: Most) -> Result<Option<Routed>, CudaError> {
        let mut routed = self.layers.iter().map(|layer| layer.ffn.routed(cuda, most.rows));
        Ok(routed.find(|routed| !matches!(routed, Ok(None))).transpose()?.flatten())
    }

    /// The rows of a step, layer by layer: launches and nothing else, so that a graph can be made
    /// of them.
    pub fn forward(
        &self,
        step: &Uploaded<'_>,
        arena: &mut DeviceArena,
        work: &mut Workspace,
    ) -> Result<(), CudaError> {
        let Uploaded { cuda, spec, layout, host, spans, segments } = step;
        let (count, width) = (spans.rows(), spec.hidden);
        work.rotations(cuda, spans)?;
        let embedding = self.embedding.embedding();
        dense::embed(cuda, spans.tokens, embedding, work.x.rows_mut(count, width))?;
        let most_positions = segments * SEGMENT_LEN;
        for (layer, place) in self.layers.iter().zip(&layout.layers) {
            let (host, place) = (*host, *place);
            let mut step = Step { cuda, host, spans, arena, place, most_positions };
            work.norm(cuda, count, &layer.mixer_norm, spec.norm_eps)?;
            layer.mixer.forward(&mut step, work)?;
            work.norm(cuda, count, &layer.ffn_norm, spec.norm_eps)?;
            layer.ffn.forward(&step, work)?;
        }
        work.norm(cuda, count, &self.final_norm, spec.norm_eps)?;
        if let Some(at) = layout.hidden_row {
            let slots = Slots { spans, arena, at };
            rows::keep_last(cuda, work.normed.rows(count, width), slots)?;
        }
        Ok(())
    }
}
