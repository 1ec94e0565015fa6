//! Mixture of experts: routing, and the products of the chosen experts.
//!
//! Routing (MODELS.md section 6): scores are `sigmoid` or `softmax` of the logits; experts are
//! chosen by score plus correction bias, weighed by the score alone, then renormalised, then
//! scaled. With groups, a group's worth is the sum of its two best, and experts of groups that are
//! not kept count as minus infinity. Ties go to the lower id.
//!
//! A token's experts are kept by ascending id, and their outputs are summed in that order, so the
//! sum does not depend on the batch.

mod experts;
pub mod naive;
mod route;

pub use experts::{ExpertWeights, Workspace, experts};
pub use route::{MOST_EXPERTS, route, route_scratch_len};

/// How a router scores experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Score {
    /// `sigmoid(logit)`, chosen by score plus correction bias.
    Sigmoid,
    /// `softmax(logits)`.
    Softmax,
}

/// How experts are chosen and weighed.
#[derive(Debug, Clone, PartialEq)]
pub struct Router {
    /// Number of routed experts.
    pub experts: usize,
    /// Experts chosen per token.
    pub top_k: usize,
    /// Scoring function.
    pub score: Score,
    /// Groups the experts are split into; 1 for none.
    pub groups: usize,
    /// Groups kept before the experts are chosen.
    pub top_groups: usize,
    /// Divide the chosen weights by their sum.
    pub renormalize: bool,
    /// Factor on the weights, after renormalising.
    pub scale: f32,
}

impl Router {
    /// Whether a correction bias takes part in the choice.
    pub fn has_bias(&self) -> bool {
        self.score == Score::Sigmoid
    }
}

/// An expert chosen for a token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// The expert.
    pub expert: u32,
    /// Its weight.
    pub weight: f32,
}
