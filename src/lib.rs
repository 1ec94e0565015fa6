//! deltapool: an inference engine for hybrid linear-attention models.

pub mod cli;
pub mod engine;
pub mod inspect;
pub mod models;
pub mod request;
pub mod scheduler;
pub mod weights;
pub mod text;
