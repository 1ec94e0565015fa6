//! Buffers of the forward pass on the device, made once for the largest batch and reused.

use kernels::SEGMENT_LEN;
use kernels::cuda::dense::{self, Frequencies, Scale};
use kernels::cuda::gemm::RoundedRows;
use kernels::cuda::{Cuda, CudaError, DeviceBuffer, DeviceRows, DeviceSpans, gqa, kda, mla};
use kernels::rope::Rope;

use super::Most;
use super::ffn::Routed;
use super::logits::Logits;
use crate::models::spec::{Ffn, Mixer, ModelSpec};

/// Positions whose latents are expanded at once.
pub const EXPANDED: usize = 4 * SEGMENT_LEN;

/// Buffers, `[rows][width]` with the widest that a layer needs.
pub(super) struct Workspace {
    /// The residual stream.
    pub x: DeviceBuffer<f32>,
    /// The normed stream; after the last layer the hidden rows.
    pub normed: DeviceBuffer<f32>,
    /// Rows rounded for a product.
    pub rounded: RoundedRows,
    /// Queries; of KDA keys and values too.
    pub qkv: DeviceBuffer<f32>,
    /// Of KDA what the convolution gives, of MLA latents, of GQA keys.
    pub mixed: DeviceBuffer<f32>,
    /// Values of GQA.
    pub values: DeviceBuffer<f32>,
    /// What KDA's decay and output gate are projected up from.
    pub narrow: DeviceBuffer<f32>,
    pub decay: DeviceBuffer<f32>,
    pub gate: DeviceBuffer<f32>,
    pub beta: DeviceBuffer<f32>,
    pub attended: DeviceBuffer<f32>,
    pub ffn_gate: DeviceBuffer<f32>,
    pub ffn_up: DeviceBuffer<f32>,
    pub angles: Angles,
    pub kda: DeviceBuffer<f32>,
    pub mla: Option<mla::Workspace>,
    pub gqa: Option<gqa::Workspace>,
    pub routed: Option<Routed>,
    pub logits: Logits,
}

/// Cosines and sines of a step's positions, for each rotation of the model.
pub(super) struct Angles {
    all: Vec<(Rope, Frequencies, DeviceBuffer<f32>)>,
}

impl Angles {
    /// Those of a rotation, made by [`Workspace::begin`].
    pub fn of(&self, rope: &Rope, rows: usize) -> DeviceRows<'_> {
        let found = self.all.iter().find(|(known, ..)| known == rope);
        let (rope, _, values) = found.expect("every rotation of the model is known");
        values.rows(rows, rope.dim)
    }
}

impl Workspace {
    pub fn new(
        cuda: &Cuda,
        spec: &ModelSpec,
        most: Most,
        routed: Option<Routed>,
    ) -> Result<Workspace, CudaError> {
        let widest = Widest::of(spec);
        let of = |width: usize| DeviceBuffer::zeros(cuda, most.rows * width);
        let (mut mla, mut gqa) = (None, None);
        let mut angles: Vec<(Rope, Frequencies, DeviceBuffer<f32>)> = Vec::new();
        for layer in &spec.layers {
            match &layer.mixer {
                Mixer::Mla(shape) if mla.is_none() => {
                    let most = mla::Most {
                        rows: most.rows,
                        steps: most.sequences,
                        positions: most.split,
                        expanded: EXPANDED,
                    };
                    mla = Some(mla::Workspace::new(cuda, shape.shape(), most)?);
                }
                Mixer::Gqa(shape) => {
                    if gqa.is_none() {
                        let (steps, positions) = (most.sequences, most.split);
                        gqa = Some(gqa::Workspace::new(cuda, shape.shape(), steps, positions)?);
                    }
                    if angles.iter().all(|(rope, ..)| *rope != shape.rope) {
                        let frequencies = Frequencies::new(cuda, &shape.rope)?;
                        angles.push((shape.rope.clone(), frequencies, of(shape.rope.dim)?));
                    }
                }
                _ => {}
            }
        }
        Ok(Workspace {
            x: of(spec.hidden)?,
            normed: of(spec.hidden)?,
            rounded: RoundedRows::new(cuda, most.rows.max(most.logits), widest.input)?,
            qkv: of(widest.qkv)?,
            mixed: of(widest.mixed)?,
            values: of(widest.values)?,
            narrow: of(widest.narrow)?,
            decay: of(widest.inner)?,
            gate: of(widest.inner)?,
            beta: of(widest.heads)?,
            attended: of(widest.attended)?,
            ffn_gate: of(widest.ffn)?,
            ffn_up: of(widest.ffn)?,
            angles: Angles { all: angles },
            kda: DeviceBuffer::zeros(cuda, 0)?,
            mla,
            gqa,
            routed,
            logits: Logits::new(cuda, most.logits, (spec.hidden, spec.vocab_size))?,
        })
    }

    /// Makes room for the chunks of a step of KDA, and tells whether memory was made anew.
    pub fn reserve(
        &mut self,
        cuda: &Cuda,
        spec: &ModelSpec,
        spans: &DeviceSpans<'_>,
    ) -> Result<bool, CudaError> {
        let chunks = |mixer: &Mixer| match mixer {
            Mixer::Kda(kda) => kda::work_len(kda.shape(), spans.cells()),
            _ => 0,
        };
        let needed = spec.layers.iter().map(|layer| chunks(&layer.mixer)).max().unwrap_or(0);
        let grows = needed > self.kda.len();
        if grows {
            // Steps of more chunks than any before are few.
            self.kda = DeviceBuffer::zeros(cuda, needed)?;
        }
        Ok(grows)
    }

    /// Turns the positions of a step into its rotations.
    pub fn rotations(&mut self, cuda: &Cuda, spans: &DeviceSpans<'_>) -> Result<(), CudaError> {
        for (rope, frequencies, values) in &mut self.angles.all {
            let out = values.rows_mut(spans.rows(), rope.dim);
            dense::angles(cuda, frequencies, spans.positions, out)?;
        }
        Ok(())
    }

    /// `normed = rms_norm(x)`.
    pub fn norm(
        &mut self,
        cuda: &Cuda,
        rows: usize,
        weights: &DeviceBuffer<f32>,
        eps: f32,
    ) -> Result<(), CudaError> {
        let width = weights.len();
        let (x, out) = (self.x.rows(rows, width), self.normed.rows_mut(rows, width));
        dense::rms_norm(cuda, x, Scale::Plain(weights.slice()), eps, out)
    }
}

/// The widest rows of any layer.
#[derive(Default)]
pub(super) struct Widest {
    pub input: usize,
    pub qkv: usize,
    pub mixed: usize,
    pub values: usize,
    pub narrow: usize,
    pub inner: usize,
    pub heads: usize,
    pub attended: usize,
    pub ffn: usize,
}

impl Widest {
    pub fn of(spec: &ModelSpec) -> Widest {
        let mut widest = Widest::default();
        let raise = |width: &mut usize, to: usize| *width = (*width).max(to);
        for layer in &spec.layers {
            match &layer.mixer {
                Mixer::Kda(kda) => {
                    raise(&mut widest.qkv, 3 * kda.inner());
                    raise(&mut widest.mixed, 3 * kda.inner());
                    raise(&mut widest.narrow, 2 * kda.head_dim);
                    raise(&mut widest.inner, kda.inner());
                    raise(&mut widest.heads, kda.heads);
                    raise(&mut widest.attended, kda.inner());
                }
                Mixer::Mla(mla) => {
                    raise(&mut widest.qkv, mla.heads * (mla.nope + mla.rope));
                    raise(&mut widest.mixed, mla.rank + mla.rope);
                    raise(&mut widest.attended, mla.heads * mla.value_dim);
                }
                Mixer::Gqa(gqa) => {
                    raise(&mut widest.qkv, gqa.heads * gqa.head_dim);
                    raise(&mut widest.mixed, gqa.kv_heads * gqa.head_dim);
                    raise(&mut widest.values, gqa.kv_heads * gqa.head_dim);
                    raise(&mut widest.attended, gqa.heads * gqa.head_dim);
                }
            }
            match &layer.ffn {
                Ffn::Dense { inter } => raise(&mut widest.ffn, *inter),
                Ffn::Moe(moe) => raise(&mut widest.ffn, moe.shared_inter),
            }
        }
        widest.input = spec.hidden.max(widest.attended).max(widest.ffn).max(widest.narrow);
        widest
    }
}
