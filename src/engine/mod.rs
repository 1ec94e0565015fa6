//! The engine: runs requests step by step.

pub mod sampler;
