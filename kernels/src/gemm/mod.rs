//! Products with weight matrices: `out = x wᵀ`.
//!
//! `x` is `[rows, k]` f32, `w` is `[n, k]` in f32, bf16, f16 or quantised, in
//! [`Panels`](crate::Panels) (as stored for the definition), `out` is `[rows, n]` f32; sums are
//! f32. A row's result does not depend on how many rows are computed with it, which thread computes
//! it, or where in the batch it lies: the sum over `k` runs in one order always.

pub(crate) mod ahead;
mod cpu;
pub(crate) mod inputs;
pub mod naive;
pub(crate) mod pairs;
pub(crate) mod strip;
pub(crate) mod tile;

pub use cpu::{MOST_MATRICES, Product, gemm, gemm_add, gemm_each};
