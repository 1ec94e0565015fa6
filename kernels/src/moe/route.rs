//! The fast routing: scores as vectors, the best picked one after another.

use super::{Choice, Router, Score};
use crate::device::Cpu;
use crate::rows::Rows;
use crate::scratch::{Scratch, take};
use crate::simd::{Kernel, Simd, load, math, store};
use crate::threads::Shards;

/// Most experts a router may have.
pub const MOST_EXPERTS: usize = 1024;

/// Rows per task.
const ROWS: usize = 8;

/// Values of scratch that [`route`] needs per thread.
pub fn route_scratch_len(router: &Router) -> usize {
    2 * router.experts + router.groups
}

/// Chooses `top_k` experts for each row of `logits` `[rows][experts]`: `choices` is
/// `[rows][top_k]`, by ascending expert. `bias` is `[experts]` where the router has one, else
/// empty.
///
/// # Panics
/// When the shapes do not fit, `scratch` is too small, or there are more than 1,024 experts.
pub fn route(
    cpu: &Cpu,
    router: &Router,
    logits: Rows<'_>,
    bias: &[f32],
    scratch: &mut Scratch,
    choices: &mut [Choice],
) {
    assert!(router.experts <= MOST_EXPERTS && router.top_k <= router.experts);
    assert_eq!(logits.width(), router.experts);
    assert_eq!(bias.len(), if router.has_bias() { router.experts } else { 0 });
    assert_eq!(choices.len(), logits.count() * router.top_k);
    let scratch = scratch.pieces(cpu.gang.threads(), route_scratch_len(router));
    let choices = Shards::new(choices);
    cpu.gang.run(logits.count().div_ceil(ROWS), |worker, task| {
        // SAFETY: this is the worker.
        let mut rest = unsafe { scratch.of(worker) };
        let scores = take(&mut rest, router.experts);
        let worth = take(&mut rest, router.experts);
        for i in task * ROWS..logits.count().min((task + 1) * ROWS) {
            // SAFETY: row i belongs to one task.
            let choices = unsafe { choices.slice_mut(i * router.top_k..(i + 1) * router.top_k) };
            cpu.isa.run(Scores { score: router.score, logits: logits.row(i), scores });
            worth.copy_from_slice(scores);
            worth.iter_mut().zip(bias).for_each(|(w, b)| *w += b);
            if router.groups > 1 {
                mask_groups(router, worth, &mut rest[..router.groups]);
            }
            if worth.iter().any(|w| w.is_nan()) {
                broken(choices);
            } else {
                choose(router, scores, worth, choices);
            }
        }
    });
}

struct Scores<'a> {
    score: Score,
    logits: &'a [f32],
    scores: &'a mut [f32],
}

impl Kernel for Scores<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let max = self.logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0;
        let mut at = 0;
        while at < self.logits.len() {
            let n = (self.logits.len() - at).min(S::LANES);
            let x = load(s, &self.logits[at..], n);
            let y = match self.score {
                Score::Sigmoid => math::sigmoid(s, x),
                Score::Softmax => math::exp(s, s.sub(x, s.splat(max))),
            };
            store(s, &mut self.scores[at..], n, y);
            for score in &self.scores[at..at + n] {
                sum += score;
            }
            at += n;
        }
        if self.score == Score::Softmax {
            self.scores.iter_mut().for_each(|score| *score /= sum);
        }
    }
}

fn choose(router: &Router, scores: &[f32], worth: &mut [f32], choices: &mut [Choice]) {
    let mut sum = 0.0;
    for choice in choices.iter_mut() {
        let best = best(worth);
        worth[best] = f32::NEG_INFINITY;
        *choice = Choice { expert: best as u32, weight: scores[best] };
    }
    choices.sort_unstable_by_key(|choice| choice.expert);
    choices.iter().for_each(|choice| sum += choice.weight);
    let factor = if router.renormalize { router.scale / (sum + 1e-20) } else { router.scale };
    choices.iter_mut().for_each(|choice| choice.weight *= factor);
}

/// Where a score is not a number there is no choice: the first experts, and weights that make the
/// row's logits not a number, so that its request fails instead of going on with another text.
pub(super) fn broken(choices: &mut [Choice]) {
    for (expert, choice) in choices.iter_mut().enumerate() {
        *choice = Choice { expert: expert as u32, weight: f32::NAN };
    }
}

/// Index of the largest value, the lowest of equals.
fn best(worth: &[f32]) -> usize {
    let mut best = 0;
    for (i, w) in worth.iter().enumerate() {
        if *w > worth[best] {
            best = i;
        }
    }
    best
}

/// Rules out the experts of all but the best groups; `of_groups` is working memory.
fn mask_groups(router: &Router, worth: &mut [f32], of_groups: &mut [f32]) {
    let size = router.experts / router.groups;
    for (group, total) in worth.chunks_exact(size).zip(of_groups.iter_mut()) {
        let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for w in group {
            if *w > first {
                (first, second) = (*w, first);
            } else if *w > second {
                second = *w;
            }
        }
        *total = if size > 1 { first + second } else { first };
    }
    // A group that is kept is marked by a worth no group has.
    for _ in 0..router.top_groups {
        let group = best(of_groups);
        of_groups[group] = f32::NEG_INFINITY;
    }
    for (worth, total) in worth.chunks_exact_mut(size).zip(of_groups.iter()) {
        if *total > f32::NEG_INFINITY {
            worth.fill(f32::NEG_INFINITY);
        }
    }
}
