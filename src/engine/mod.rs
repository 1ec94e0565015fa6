//! The engine.
pub mod executor;
pub mod lower;
pub mod sampler;
