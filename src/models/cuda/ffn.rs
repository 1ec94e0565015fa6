//! The feed-forward part of a layer on the device: dense, or routed experts with a shared one.

use std::slice;

use kernels::cuda::gemm::{Inputs, RoundedRows};
use kernels::cuda::moe::{self, Choice, Experts};
use kernels::cuda::{Cuda, CudaError, DeviceBuffer, DeviceRows, DeviceRowsMut, dense};
use kernels::moe::{ExpertWeights, Router};

use super::Step;
use super::weights::{DeviceTensor, Loader, Multiplied};
use super::workspace::Workspace;
use crate::models::spec::{Ffn, Moe, Part};

/// A feed-forward part with its weights.
pub(super) enum FfnWeights {
    Dense(Glu),
    Moe(Box<MoeWeights>),
}

/// `down(silu(gate x) * up x)`.
pub(super) struct Glu {
    gate: DeviceTensor,
    up: DeviceTensor,
    down: DeviceTensor,
}

/// Routed experts, and one that all rows have.
pub(super) struct MoeWeights {
    router: Router,
    scores: DeviceTensor,
    bias: Option<DeviceBuffer<f32>>,
    experts: Experts,
    shared: Option<Glu>,
}

/// Working memory of routed layers.
pub(super) struct Routed {
    scores: DeviceBuffer<f32>,
    choices: DeviceBuffer<Choice>,
    experts: moe::Workspace,
    sum: DeviceBuffer<f32>,
}

impl FfnWeights {
    pub fn new(ffn: &Ffn, loader: &Loader<'_>) -> Result<FfnWeights, CudaError> {
        Ok(match ffn {
            Ffn::Dense { .. } => {
                FfnWeights::Dense(Glu::new(loader, [Part::FfnGate, Part::FfnUp, Part::FfnDown])?)
            }
            Ffn::Moe(moe) => FfnWeights::Moe(Box::new(MoeWeights::new(moe, loader)?)),
        })
    }

    /// Working memory for up to `rows` rows, if the layer is routed.
    pub fn routed(&self, cuda: &Cuda, rows: usize) -> Result<Option<Routed>, CudaError> {
        let FfnWeights::Moe(moe) = self else { return Ok(None) };
        let (experts, hidden) = moe.scores.size();
        Ok(Some(Routed {
            scores: DeviceBuffer::zeros(cuda, rows * experts)?,
            choices: DeviceBuffer::zeros(cuda, rows * moe.router.top_k)?,
            experts: moe::Workspace::new(cuda, &moe.experts, rows, moe.router.top_k)?,
            sum: DeviceBuffer::zeros(cuda, rows * hidden)?,
        }))
    }

    /// `x += ffn(normed)`.
    pub fn forward(&self, step: &Step<'_>, work: &mut Workspace) -> Result<(), CudaError> {
        let rows = step.spans.rows();
        match self {
            FfnWeights::Dense(glu) => {
                let Workspace { x, normed, rounded, ffn_gate, ffn_up, .. } = work;
                let width = glu.width();
                glu.inner(step, normed.rows(rows, width), (ffn_gate, ffn_up), rounded)?;
                glu.down(step, ffn_gate, rounded, x.rows_mut(rows, width))
            }
            FfnWeights::Moe(moe) => moe.forward(step, work),
        }
    }
}

impl Glu {
    fn new(loader: &Loader<'_>, [gate, up, down]: [Part; 3]) -> Result<Glu, CudaError> {
        Ok(Glu { gate: loader.tensor(gate)?, up: loader.tensor(up)?, down: loader.tensor(down)? })
    }

    /// Width of the residual stream.
    fn width(&self) -> usize {
        self.down.rows()
    }

    /// `gate = silu(gate x) * up x`.
    fn inner(
        &self,
        step: &Step<'_>,
        x: DeviceRows<'_>,
        (gate, up): (&mut DeviceBuffer<f32>, &mut DeviceBuffer<f32>),
        rounded: &mut RoundedRows,
    ) -> Result<(), CudaError> {
        let (cuda, rows, inter) = (step.cuda, step.spans.rows(), self.gate.rows());
        let x = Multiplied::new(cuda, x, rounded)?;
        x.times(cuda, slice::from_ref(&self.gate), gate, rows)?;
        x.times(cuda, slice::from_ref(&self.up), up, rows)?;
        dense::silu_mul(cuda, gate.rows_mut(rows, inter), up.rows(rows, inter))
    }

    /// `out += down(inner)`.
    fn down(
        &self,
        step: &Step<'_>,
        inner: &DeviceBuffer<f32>,
        rounded: &mut RoundedRows,
        out: DeviceRowsMut<'_>,
    ) -> Result<(), CudaError> {
        let inner = inner.rows(step.spans.rows(), self.gate.rows());
        Multiplied::new(step.cuda, inner, rounded)?.add_to(step.cuda, &self.down, out)
    }
}

impl MoeWeights {
    fn new(moe: &Moe, loader: &Loader<'_>) -> Result<MoeWeights, CudaError> {
        let expert = |e| ExpertWeights {
            gate: loader.host(Part::ExpertGate(e)),
            up: loader.host(Part::ExpertUp(e)),
            down: loader.host(Part::ExpertDown(e)),
        };
        let experts: Vec<_> = (0..moe.router.experts).map(expert).collect();
        let shared = [Part::SharedGate, Part::SharedUp, Part::SharedDown];
        Ok(MoeWeights {
            router: moe.router.clone(),
            scores: loader.tensor(Part::Router)?,
            bias: match moe.router.has_bias() {
                true => Some(loader.vector(Part::RouterBias)?),
                false => None,
            },
            experts: Experts::new(loader.cuda, &experts)?,
            shared: match moe.shared_inter {
                0 => None,
                _ => Some(Glu::new(loader, shared)?),
            },
        })
    }

    /// Experts are summed by ascending id, the shared one last, and the sum is added.
    fn forward(&self, step: &Step<'_>, work: &mut Workspace) -> Result<(), CudaError> {
        let (cuda, rows) = (step.cuda, step.spans.rows());
        let Workspace { x, normed, rounded, ffn_gate, ffn_up, routed, .. } = work;
        let work = routed.as_mut().expect("a model with routed layers has their workspace");
        let (experts, width) = self.scores.size();
        let normed = normed.rows(rows, width);
        {
            let rows_in = Multiplied::new(cuda, normed, rounded)?;
            rows_in.times(cuda, slice::from_ref(&self.scores), &mut work.scores, rows)?;
            let bias = self.bias.as_ref().map(DeviceBuffer::slice);
            let scores = work.scores.rows(rows, experts);
            moe::route(cuda, &self.router, scores, bias, &mut work.choices)?;
            let inputs: Inputs<'_> = match self.experts.takes_rounded() {
                true => rows_in.by(self.experts.dtype()),
                false => Inputs::F32(normed),
            };
            let chosen = (inputs, &work.choices, self.router.top_k);
            let sum = work.sum.rows_mut(rows, width);
            moe::experts(cuda, chosen, &self.experts, &mut work.experts, sum)?;
        }
        if let Some(shared) = &self.shared {
            shared.inner(step, normed, (ffn_gate, ffn_up), rounded)?;
            shared.down(step, ffn_gate, rounded, work.sum.rows_mut(rows, width))?;
        }
        dense::add(cuda, x.rows_mut(rows, width), work.sum.rows(rows, width))
    }
}
