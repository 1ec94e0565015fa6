//! The feed-forward part of a layer: dense, or routed experts with a shared one.

use kernels::gemm::Product;
use kernels::moe::{self, ExpertWeights};
use kernels::{Cpu, NarrowRows, Panels, Rows, RowsMut, activation, gemm};

use super::decoder::Step;
use super::files::ModelWeights;
use super::spec::{Ffn, Part};
use super::workspace::{Workspace, rows};
use crate::weights::Tensor;

/// A feed-forward part with its weights.
#[derive(Debug)]
pub(super) enum FfnWeights {
    Dense(Glu),
    Moe(MoeWeights),
}

/// Gate, up and down of one SwiGLU.
#[derive(Debug, Clone, Copy)]
pub(super) struct Glu {
    gate: Tensor,
    up: Tensor,
    down: Tensor,
}

#[derive(Debug)]
pub(super) struct MoeWeights {
    router: moe::Router,
    logits: Tensor,
    bias: Vec<f32>,
    experts: Vec<Glu>,
    shared: Option<Glu>,
}

impl FfnWeights {
    pub(super) fn new(ffn: &Ffn, layer: usize, weights: &ModelWeights) -> FfnWeights {
        let glu = |parts: [Part; 3]| {
            let [gate, up, down] = parts.map(|part| weights.tensor(Some(layer), part));
            Glu { gate, up, down }
        };
        match ffn {
            Ffn::Dense { .. } => {
                FfnWeights::Dense(glu([Part::FfnGate, Part::FfnUp, Part::FfnDown]))
            }
            Ffn::Moe(moe) => {
                let expert = |e| glu([Part::ExpertGate(e), Part::ExpertUp(e), Part::ExpertDown(e)]);
                let shared = [Part::SharedGate, Part::SharedUp, Part::SharedDown];
                let bias = moe.router.has_bias();
                FfnWeights::Moe(MoeWeights {
                    router: moe.router.clone(),
                    logits: weights.tensor(Some(layer), Part::Router),
                    bias: match bias {
                        true => weights.vector(Some(layer), Part::RouterBias),
                        false => Vec::new(),
                    },
                    experts: (0..moe.router.experts).map(expert).collect(),
                    shared: (moe.shared_inter > 0).then(|| glu(shared)),
                })
            }
        }
    }

    /// `x += ffn(normed)`.
    pub(super) fn forward(&self, step: &mut Step<'_>, work: &mut Workspace) {
        match self {
            FfnWeights::Dense(glu) => {
                let width = step.panels(&glu.down).rows();
                let x = Rows::new(rows(&mut work.normed, step.batch.rows(), width), width);
                let (gate, up) = (&mut work.ffn_gate[..], &mut work.ffn_up[..]);
                glu.project(step, x, (&mut *gate, &mut *up), &mut work.narrowed, None);
                glu.finish(step, (gate, up), &mut work.narrowed, &mut work.x);
            }
            FfnWeights::Moe(moe) => moe.forward(step, work),
        }
    }
}

impl Glu {
    /// `gate x` and `up x`, and with them `beside`, a product of the same rows.
    fn project<'a>(
        &self,
        step: &Step<'_>,
        x: Rows<'_>,
        (gate, up): (&'a mut [f32], &'a mut [f32]),
        narrowed: &mut NarrowRows,
        beside: Option<Product<'a>>,
    ) {
        let [gate_w, up_w] = [&self.gate, &self.up].map(|tensor| step.panels(tensor));
        let (count, inter) = (x.count(), gate_w.rows());
        let products = [
            Product { w: &[gate_w], out: RowsMut::new(rows(gate, count, inter), inter) },
            Product { w: &[up_w], out: RowsMut::new(rows(up, count, inter), inter) },
        ];
        gemm::gemm_each(step.cpu, x, products.into_iter().chain(beside), narrowed);
    }

    /// `out += down(silu(gate) · up)`.
    fn finish(
        &self,
        step: &Step<'_>,
        (gate, up): (&mut [f32], &mut [f32]),
        narrowed: &mut NarrowRows,
        out: &mut [f32],
    ) {
        let (cpu, count) = (step.cpu, step.batch.rows());
        let down = step.panels(&self.down);
        let (width, inter) = (down.rows(), down.cols());
        let (gate, up) = (rows(gate, count, inter), rows(up, count, inter));
        activation::silu_mul(cpu, RowsMut::new(gate, inter), Rows::new(up, inter));
        let out = RowsMut::new(rows(out, count, width), width);
        gemm::gemm_add(cpu, Rows::new(gate, inter), down, narrowed, out);
    }
}

impl MoeWeights {
    fn forward(&self, step: &mut Step<'_>, work: &mut Workspace) {
        let (cpu, count): (&Cpu, usize) = (step.cpu, step.batch.rows());
        let router: Panels<'_> = step.panels(&self.logits);
        let (experts, width) = (router.rows(), router.cols());
        let x = Rows::new(rows(&mut work.normed, count, width), width);
        let logits = rows(&mut work.router, count, experts);
        let scores = Product { w: &[router], out: RowsMut::new(logits, experts) };
        let (gate, up) = (&mut work.ffn_gate[..], &mut work.ffn_up[..]);
        match &self.shared {
            Some(shared) => {
                let buffers = (&mut *gate, &mut *up);
                shared.project(step, x, buffers, &mut work.narrowed, Some(scores));
            }
            None => gemm::gemm_each(cpu, x, [scores], &mut work.narrowed),
        }
        let choices = &mut work.choices[..count * self.router.top_k];
        let logits = Rows::new(logits, experts);
        moe::route(cpu, &self.router, logits, &self.bias, &mut work.scratch, choices);
        let weights: Vec<ExpertWeights<Panels<'_>>> = self
            .experts
            .iter()
            .map(|glu| ExpertWeights {
                gate: step.panels(&glu.gate),
                up: step.panels(&glu.up),
                down: step.panels(&glu.down),
            })
            .collect();
        let routed = work.experts.as_mut().expect("a routed layer has its workspace");
        let sum = rows(&mut work.experts_out, count, width);
        moe::experts(cpu, x, choices, &weights, routed, RowsMut::new(sum, width));
        if let Some(shared) = &self.shared {
            shared.finish(step, (gate, up), &mut work.narrowed, &mut work.experts_out);
        }
        let out = RowsMut::new(rows(&mut work.x, count, width), width);
        activation::add(cpu, out, Rows::new(rows(&mut work.experts_out, count, width), width));
    }
}
