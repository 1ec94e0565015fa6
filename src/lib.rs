//! deltapool: an inference engine for hybrid linear-attention models.

pub mod cli;
pub mod inspect;
pub mod models;
pub mod weights;
pub mod engine;
pub mod request;
