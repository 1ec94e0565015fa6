//! The one decoder: runs any [`ModelSpec`] over a batch.
//!
//! ```text
//! x = embedding(tokens)
//! each layer:  x += mixer(norm(x));  x += ffn(norm(x))
//! hidden = norm(x)      the last row of each span is kept in its slot
//! logits = head(hidden) of the rows that are asked for
//! ```

use kernels::norm::{Scale, rms_norm};
use kernels::{Arena, ArenaError, Cpu, Dtype, Panels, Rows, RowsMut, Spans, gemm};

use super::batch::{Batch, LogitSource};
use super::ffn::FfnWeights;
use super::files::{ModelFiles, ModelWeights};
use super::layout::{LayerLayout, StateLayout};
use super::mixer::MixerWeights;
use super::spec::{ModelSpec, Part};
use super::workspace::{Workspace, rows};
use crate::weights::Tensor;

/// A model with its weights, ready to run.
#[derive(Debug)]
pub struct Model {
    spec: ModelSpec,
    layout: StateLayout,
    weights: ModelWeights,
    embedding: Tensor,
    head: Tensor,
    final_norm: Vec<f32>,
    layers: Vec<LayerWeights>,
}

#[derive(Debug)]
struct LayerWeights {
    mixer_norm: Vec<f32>,
    mixer: MixerWeights,
    ffn_norm: Vec<f32>,
    ffn: FfnWeights,
}

/// What a layer's operators share in a step.
pub(super) struct Step<'a> {
    pub cpu: &'a Cpu,
    pub weights: &'a ModelWeights,
    pub batch: &'a Batch,
    pub spans: Spans<'a>,
    pub arena: &'a mut Arena,
    /// Where the layer's memory lies in slots and blocks.
    pub place: LayerLayout,
}

impl Step<'_> {
    pub(super) fn panels(&self, tensor: &Tensor) -> Panels<'_> {
        self.weights.panels(tensor)
    }
}

/// Hears the residual stream: after the embedding (0), after layer `i` (`i + 1`), and after the
/// final norm (one more). For tests that compare layer by layer.
pub type Observer<'a> = &'a mut dyn FnMut(usize, Rows<'_>);

impl Model {
    /// Puts loaded weights in their places. Small tensors are widened; matrices stay where they
    /// are.
    ///
    /// # Errors
    /// When the system refuses the memory of what is stored in another order too.
    pub fn new(files: &ModelFiles, weights: ModelWeights) -> Result<Model, ArenaError> {
        let spec = files.spec.clone();
        let layer = |(i, layer): (usize, &super::spec::Layer)| {
            Ok(LayerWeights {
                mixer_norm: weights.vector(Some(i), Part::MixerNorm),
                mixer: MixerWeights::new(&layer.mixer, i, &weights, spec.quantize)?,
                ffn_norm: weights.vector(Some(i), Part::FfnNorm),
                ffn: FfnWeights::new(&layer.ffn, i, &weights),
            })
        };
        let embedding = weights.tensor(None, Part::Embedding);
        let head = match spec.head_is_embedding() {
            true => embedding,
            false => weights.tensor(None, Part::Head),
        };
        Ok(Model {
            layers: spec.layers.iter().enumerate().map(layer).collect::<Result<_, ArenaError>>()?,
            layout: Model::layout_of(&spec),
            final_norm: weights.vector(None, Part::FinalNorm),
            spec,
            weights,
            embedding,
            head,
        })
    }

    /// Where the memory of a model lies in slots and blocks, before its weights are there.
    pub fn layout_of(spec: &ModelSpec) -> StateLayout {
        StateLayout::new(spec, Dtype::F32)
    }

    /// What the model is.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Where its memory lies in slots and blocks.
    pub fn layout(&self) -> &StateLayout {
        &self.layout
    }

    /// Runs a batch: writes its states and per-token rows to `arena`, and returns the logits it
    /// asks for, `[sources][vocab_size]`.
    ///
    /// # Panics
    /// When the batch breaks a rule of [`Batch::check`] or is larger than `work` was made for.
    pub fn forward<'w>(
        &self,
        cpu: &Cpu,
        batch: &Batch,
        arena: &mut Arena,
        work: &'w mut Workspace,
        observe: Observer<'_>,
    ) -> &'w [f32] {
        let spans = batch.check(self.layout.slot_bytes);
        for copy in &batch.copies {
            arena.copy_within(copy.source, copy.target, self.layout.block_bytes);
        }
        if batch.rows() > 0 {
            self.compute(cpu, batch, spans, arena, work, observe);
        }
        self.logits(cpu, &batch.logits, arena, work)
    }

    /// The rows of a batch, layer by layer.
    fn compute(
        &self,
        cpu: &Cpu,
        batch: &Batch,
        spans: Spans<'_>,
        arena: &mut Arena,
        work: &mut Workspace,
        observe: Observer<'_>,
    ) {
        work.begin(batch, &self.spec);
        self.embed(batch, work);
        let width = self.spec.hidden;
        observe(0, Rows::new(rows(&mut work.x, batch.rows(), width), width));
        for (i, layer) in self.layers.iter().enumerate() {
            let place = self.layout.layers[i];
            let mut step = Step { cpu, weights: &self.weights, batch, spans, arena, place };
            self.normed(cpu, batch, &layer.mixer_norm, work);
            layer.mixer.forward(&mut step, work);
            self.normed(cpu, batch, &layer.ffn_norm, work);
            layer.ffn.forward(&mut step, work);
            observe(i + 1, Rows::new(rows(&mut work.x, batch.rows(), width), width));
        }
        self.normed(cpu, batch, &self.final_norm, work);
        let hidden = Rows::new(rows(&mut work.normed, batch.rows(), width), width);
        observe(self.layers.len() + 1, hidden);
        self.keep_hidden_rows(batch, hidden, arena);
    }

    fn embed(&self, batch: &Batch, work: &mut Workspace) {
        let weights = self.weights.by_name();
        let width = self.spec.hidden;
        for (token, row) in batch.tokens.iter().zip(work.x.chunks_exact_mut(width)) {
            weights.copy_row(&self.embedding, *token as usize, row);
        }
    }

    /// `normed = rms_norm(x)`.
    fn normed(&self, cpu: &Cpu, batch: &Batch, weights: &[f32], work: &mut Workspace) {
        let (count, width) = (batch.rows(), self.spec.hidden);
        let x = Rows::new(rows(&mut work.x, count, width), width);
        let out = RowsMut::new(rows(&mut work.normed, count, width), width);
        rms_norm(cpu, x, Scale::Plain(weights), self.spec.norm_eps, out);
    }

    /// Keeps the hidden row of each span's last position, and of each snapshot's, in its slot.
    fn keep_hidden_rows(&self, batch: &Batch, hidden: Rows<'_>, arena: &mut Arena) {
        let Some(at) = self.layout.hidden_row else { return };
        for span in &batch.spans {
            let snapshots = batch.snapshots[span.snapshots.clone()].iter();
            let kept = snapshots.map(|s| (s.slot, s.after_rows)).chain([(span.write, span.rows)]);
            for (slot, rows) in kept {
                let row = hidden.row(span.first_row + rows - 1);
                arena.f32s_mut(slot + at, row.len()).copy_from_slice(row);
            }
        }
    }

    /// The logits of rows of the batch that `work` was last used for, or of slots,
    /// `[sources][vocab_size]`.
    pub fn logits<'w>(
        &self,
        cpu: &Cpu,
        sources: &[LogitSource],
        arena: &Arena,
        work: &'w mut Workspace,
    ) -> &'w [f32] {
        let (width, vocab) = (self.spec.hidden, self.spec.vocab_size);
        let count = sources.len();
        work.head_rows.resize(count * width, 0.0);
        for (source, out) in sources.iter().zip(work.head_rows.chunks_exact_mut(width)) {
            out.copy_from_slice(match source {
                LogitSource::Row(row) => &work.normed[row * width..(row + 1) * width],
                LogitSource::Slot(slot) => {
                    let at =
                        self.layout.hidden_row.expect("only models with slots sample from one");
                    arena.f32s(slot + at, width)
                }
            });
        }
        work.logits.resize(count * vocab, 0.0);
        let (x, head) = (Rows::new(&work.head_rows, width), self.weights.panels(&self.head));
        gemm::gemm(cpu, x, head, &mut work.narrowed, RowsMut::new(&mut work.logits, vocab));
        &work.logits
    }
}
