//! The closed forms of the scheduling theory, F1 to F26 of SEEDS.md section 2, one function each.
//!
//! Bytes, FLOPs, seconds and tokens are `f64`; a rate is per second. The formulas of whole steps
//! are also in [`super::step`], which prices any step; here is what a hand can check. F26 is
//! [`super::model::Experts::touched`].

mod batching;
mod moving;
mod queue;
mod step;

pub use batching::*;
pub use moving::*;
pub use queue::*;
pub use step::*;
