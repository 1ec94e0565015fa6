//! The definitions: a full sort to route, one token and one expert at a time to compute.

use super::route::broken;
use super::{Choice, ExpertWeights, Router, Score};
use crate::activation;
use crate::gemm::naive::gemm;
use crate::matrix::Matrix;
use crate::rows::{Rows, RowsMut};

/// Chooses `top_k` experts for each row of `logits` `[rows][experts]`: `choices` is
/// `[rows][top_k]`, by ascending expert.
pub fn route(router: &Router, logits: Rows<'_>, bias: &[f32], choices: &mut [Choice]) {
    for (i, choices) in choices.chunks_exact_mut(router.top_k).enumerate() {
        let scores = scores(router.score, logits.row(i));
        let mut worth: Vec<f32> = match router.has_bias() {
            true => scores.iter().zip(bias).map(|(s, b)| s + b).collect(),
            false => scores.clone(),
        };
        if worth.iter().any(|w| w.is_nan()) {
            broken(choices);
            continue;
        }
        mask_groups(router, &mut worth);
        let mut order: Vec<usize> = (0..router.experts).collect();
        // A stable sort: equal worth stays by ascending id.
        order.sort_by(|a, b| worth[*b].total_cmp(&worth[*a]));
        order.truncate(router.top_k);
        order.sort_unstable();
        let sum: f32 = order.iter().map(|e| scores[*e]).sum();
        let factor = if router.renormalize { router.scale / (sum + 1e-20) } else { router.scale };
        for (choice, e) in choices.iter_mut().zip(order) {
            *choice = Choice { expert: e as u32, weight: scores[e] * factor };
        }
    }
}

fn scores(score: Score, logits: &[f32]) -> Vec<f32> {
    match score {
        Score::Sigmoid => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
        Score::Softmax => crate::gqa::naive::softmax(logits.to_vec()),
    }
}

fn mask_groups(router: &Router, worth: &mut [f32]) {
    if router.groups == 1 {
        return;
    }
    let size = router.experts / router.groups;
    let group_worth = |group: &[f32]| {
        let mut sorted = group.to_vec();
        sorted.sort_by(|a, b| b.total_cmp(a));
        sorted.iter().take(2).sum::<f32>()
    };
    let of_groups: Vec<f32> = worth.chunks_exact(size).map(group_worth).collect();
    let mut order: Vec<usize> = (0..router.groups).collect();
    order.sort_by(|a, b| of_groups[*b].total_cmp(&of_groups[*a]));
    for group in &order[router.top_groups..] {
        worth[group * size..(group + 1) * size].fill(f32::NEG_INFINITY);
    }
}

/// `out = Σ weight · down(silu(gate x) · up x)` over each row's choices.
pub fn experts(
    x: Rows<'_>,
    choices: &[Choice],
    weights: &[ExpertWeights<Matrix<'_>>],
    out: RowsMut<'_>,
) {
    let mut out = out;
    let top_k = choices.len() / x.count().max(1);
    for i in 0..x.count() {
        out.row(i).fill(0.0);
        let row = Rows::new(x.row(i), x.width());
        for choice in &choices[i * top_k..(i + 1) * top_k] {
            let expert = &weights[choice.expert as usize];
            let inter = expert.gate.rows;
            let (mut gate, mut up) = (vec![0.0; inter], vec![0.0; inter]);
            gemm(row, expert.gate, RowsMut::new(&mut gate, inter));
            gemm(row, expert.up, RowsMut::new(&mut up, inter));
            activation::naive::silu_mul(RowsMut::new(&mut gate, inter), Rows::new(&up, inter));
            let mut y = vec![0.0; x.width()];
            gemm(Rows::new(&gate, inter), expert.down, RowsMut::new(&mut y, x.width()));
            out.row(i).iter_mut().zip(&y).for_each(|(o, y)| *o += choice.weight * y);
        }
    }
}
