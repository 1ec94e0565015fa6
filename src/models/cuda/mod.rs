//! A model on a CUDA device: the decoder of [`super::decoder`] over the device's memory.
//!
//! The layers, their order and what they remember are those of the CPU; operators are
//! [`kernels::cuda`]'s, held to the same definitions. A batch goes up as one table, logits come
//! down; nothing else crosses the link in a step.

mod ffn;
mod mixer;
mod weights;
mod workspace;

use std::fmt;

use kernels::cuda::rows::{self, Origin};
use kernels::cuda::{
    Capacity, Cuda, CudaError, DeviceArena, DeviceBuffer, DeviceSpans, Slots, StepTable, dense,
};
use kernels::{BLOCK_LEN, Spans};

use self::ffn::FfnWeights;
use self::mixer::MixerWeights;
use self::weights::{DeviceTensor, Loader};
use self::workspace::Workspace;
use super::batch::{Batch, LogitSource};
use super::decoder::Model;
use super::files::{ModelFiles, ModelWeights};
use super::layout::{LayerLayout, StateLayout};
use super::spec::{ModelSpec, Part};

/// The most that batches of a model have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Most {
    /// Rows of a batch.
    pub rows: usize,
    /// Sequences of a batch.
    pub sequences: usize,
    /// Tokens of a sequence.
    pub positions: usize,
    /// Rows whose logits are asked for at once.
    pub logits: usize,
}

/// A model with its weights on a device, ready to run.
pub struct CudaModel {
    cuda: Cuda,
    spec: ModelSpec,
    layout: StateLayout,
    embedding: DeviceTensor,
    head: Option<DeviceTensor>,
    final_norm: DeviceBuffer<f32>,
    layers: Vec<LayerWeights>,
    table: StepTable,
    work: Workspace,
    /// Rows of the last batch.
    rows: usize,
}

struct LayerWeights {
    mixer_norm: DeviceBuffer<f32>,
    mixer: MixerWeights,
    ffn_norm: DeviceBuffer<f32>,
    ffn: FfnWeights,
}

/// What a layer's operators share in a step.
struct Step<'a> {
    cuda: &'a Cuda,
    /// The spans as the host knows them.
    host: Spans<'a>,
    /// The spans on the device.
    spans: &'a DeviceSpans<'a>,
    arena: &'a mut DeviceArena,
    /// Where the layer's memory lies in slots and blocks.
    place: LayerLayout,
    /// Positions of the longest sequence after the step, at least.
    most_positions: usize,
}

impl CudaModel {
    /// Takes loaded weights to the device. They are to be row after row
    /// ([`ModelFiles::load_rows`]).
    ///
    /// # Errors
    /// When the device has no room.
    pub fn new(
        mut cuda: Cuda,
        files: &ModelFiles,
        weights: ModelWeights,
        most: Most,
    ) -> Result<CudaModel, CudaError> {
        let spec = files.spec.clone();
        cuda.compute = spec.compute;
        let of = |layer| Loader { cuda: &cuda, weights: &weights, layer };
        let layer = |(i, layer): (usize, &super::spec::Layer)| {
            let loader = of(Some(i));
            Ok(LayerWeights {
                mixer_norm: loader.vector(Part::MixerNorm)?,
                mixer: MixerWeights::new(&layer.mixer, &loader)?,
                ffn_norm: loader.vector(Part::FfnNorm)?,
                ffn: FfnWeights::new(&layer.ffn, &loader)?,
            })
        };
        let layers = spec.layers.iter().enumerate().map(layer);
        let layers = layers.collect::<Result<Vec<LayerWeights>, CudaError>>()?;
        let (embedding, final_norm) =
            (of(None).tensor(Part::Embedding)?, of(None).vector(Part::FinalNorm)?);
        let head = match spec.head_is_embedding() {
            true => None,
            false => Some(of(None).tensor(Part::Head)?),
        };
        let mut routed = layers.iter().map(|layer| layer.ffn.routed(&cuda, most.rows));
        let routed = routed.find(|r| !matches!(r, Ok(None))).transpose()?.flatten();
        let capacity = Capacity {
            spans: most.rows.max(most.sequences),
            rows: most.rows,
            snapshots: most.rows.div_ceil(BLOCK_LEN) + most.sequences,
            blocks: most.sequences * most.positions.div_ceil(BLOCK_LEN),
        };
        Ok(CudaModel {
            table: StepTable::new(&cuda, capacity)?,
            work: Workspace::new(&cuda, &spec, most, routed)?,
            layout: Model::layout_of(&spec),
            embedding,
            head,
            final_norm,
            layers,
            spec,
            cuda,
            rows: 0,
        })
    }

    /// What the model is.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Where its memory lies in slots and blocks.
    pub fn layout(&self) -> &StateLayout {
        &self.layout
    }

    /// The device.
    pub fn cuda(&self) -> &Cuda {
        &self.cuda
    }

    /// Runs a batch: writes its states and per-token rows to `arena`, and returns the logits it
    /// asks for, `[sources][vocab_size]`.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When the batch breaks a rule of [`Batch::check`] or is larger than the model was made for.
    pub fn forward(&mut self, batch: &Batch, arena: &mut DeviceArena) -> Result<&[f32], CudaError> {
        let spans = batch.check(self.layout.slot_bytes);
        for copy in &batch.copies {
            arena.copy_within(&self.cuda, copy.source, copy.target, self.layout.block_bytes)?;
        }
        self.rows = batch.rows();
        if batch.rows() > 0 {
            self.compute(batch, spans, arena)?;
        }
        self.logits(&batch.logits, arena)
    }

    /// The rows of a batch, layer by layer.
    fn compute(
        &mut self,
        batch: &Batch,
        host: Spans<'_>,
        arena: &mut DeviceArena,
    ) -> Result<(), CudaError> {
        let CudaModel { cuda, spec, layout, table, work, .. } = self;
        let count = batch.rows();
        let spans = table.upload(
            cuda,
            kernels::cuda::Step {
                spans: host,
                tables: &batch.tables,
                block_bytes: layout.block_bytes,
                tokens: &batch.tokens,
                padded_rows: count,
                arena,
            },
        )?;
        let most_positions = batch.spans.iter().map(kernels::Span::end).max().unwrap_or(0);
        work.begin(cuda, spec, &spans)?;
        let width = spec.hidden;
        let embedding = self.embedding.embedding();
        dense::embed(cuda, spans.tokens, embedding, work.x.rows_mut(count, width))?;
        for (layer, place) in self.layers.iter().zip(&layout.layers) {
            let mut step = Step { cuda, host, spans: &spans, arena, place: *place, most_positions };
            work.norm(cuda, count, &layer.mixer_norm, spec.norm_eps)?;
            layer.mixer.forward(&mut step, work)?;
            work.norm(cuda, count, &layer.ffn_norm, spec.norm_eps)?;
            layer.ffn.forward(&step, work)?;
        }
        work.norm(cuda, count, &self.final_norm, spec.norm_eps)?;
        if let Some(at) = layout.hidden_row {
            let slots = Slots { spans: &spans, arena, at };
            rows::keep_last(cuda, work.normed.rows(count, width), slots)?;
        }
        Ok(())
    }

    /// The logits of rows of the last batch, or of slots, `[sources][vocab_size]`.
    ///
    /// # Errors
    /// When the device fails.
    ///
    /// # Panics
    /// When there are more sources than the model was made for.
    pub fn logits(
        &mut self,
        sources: &[LogitSource],
        arena: &DeviceArena,
    ) -> Result<&[f32], CudaError> {
        let CudaModel { cuda, layout, work, embedding, head, rows, .. } = self;
        let head = head.as_ref().unwrap_or(embedding);
        let origin = |source: &LogitSource| match source {
            LogitSource::Row(row) => Origin::Row(*row),
            LogitSource::Slot(slot) => {
                let at = layout.hidden_row.expect("only models with slots sample from one");
                Origin::Arena(slot + at)
            }
        };
        let origins: Vec<Origin> = sources.iter().map(origin).collect();
        work.logits(cuda, head, (*rows, arena), &origins)
    }
}

impl fmt::Debug for CudaModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaModel").field("spec", &self.spec).finish_non_exhaustive()
    }
}
