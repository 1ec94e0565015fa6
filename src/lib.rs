//! deltapool: an inference engine for hybrid linear-attention models.

pub mod models;
pub mod weights;
