//! Norms: root mean square with weights (plain, or with `1 + w`), the same times a gate.
//!
//! `rms_norm`: `x / sqrt(mean(x²) + eps) * w` per row. `rms_norm_gated`: that times
//! `sigmoid(gate)` (KDA's output, MODELS.md section 3 step 8) or `silu(gate)` (Qwen's GDN).
//! `l2_norm`: `x / sqrt(Σx² + 1e-6) * scale`, the sum and not the mean (section 3 step 4).

mod cpu;
pub mod naive;

pub(crate) use cpu::l2_norm_row;
pub use cpu::{l2_norm, rms_norm, rms_norm_gated, rms_norm_in_place};

/// Added under the root by [`l2_norm`].
pub const L2_EPS: f32 = 1e-6;

/// What multiplies a gated norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateKind {
    /// `sigmoid(gate)`.
    Sigmoid,
    /// `gate * sigmoid(gate)`.
    Silu,
}

/// The weight of a norm.
#[derive(Debug, Clone, Copy)]
pub enum Scale<'a> {
    /// The weights as stored.
    Plain(&'a [f32]),
    /// One plus the weights as stored (Qwen3-Next and later).
    OnePlus(&'a [f32]),
}

impl<'a> Scale<'a> {
    fn weights(self) -> (&'a [f32], f32) {
        match self {
            Scale::Plain(w) => (w, 0.0),
            Scale::OnePlus(w) => (w, 1.0),
        }
    }
}
