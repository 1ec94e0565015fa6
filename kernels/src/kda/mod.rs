//! Kimi Delta Attention.

/// Form of the decay gate (MODELS.md section 3, step 5).
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gate {
    /// `-exp(a_log) * softplus(raw)`; unbounded below.
    Softplus,
    /// `lower * sigmoid(exp(a_log) * raw)`, within `(lower, 0)`.
    Bounded {
        /// The bound, below zero.
        lower: f32,
    },
}
