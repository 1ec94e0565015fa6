//! Mixture of experts.

/// How a router scores experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Score {
    /// `sigmoid(logit)`, chosen by score plus correction bias.
    Sigmoid,
    /// `softmax(logits)`.
    Softmax,
}

/// How experts are chosen and weighed (MODELS.md section 6).
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
