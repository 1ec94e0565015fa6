//! Models as data, and the one decoder that runs them.

pub mod batch;
mod compare;
mod config;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod decoder;
mod dense;
#[cfg(feature = "embedded-model")]
mod embedded;
mod family;
mod ffn;
pub mod files;
mod generation;
mod kimi_linear;
pub mod layout;
mod llama;
mod mixer;
mod qwen3;
pub mod spec;
mod workspace;

pub use batch::{Batch, BlockMove, LogitSource, Score, StatePair};
pub use config::ConfigFault;
pub use decoder::Model;
#[cfg(feature = "embedded-model")]
pub use embedded::EMBEDDED_CONFIG;
pub use family::{FAMILIES, Family};
#[cfg(feature = "cuda")]
pub use files::LayerFiles;
pub use files::{ModelError, ModelFiles, ModelWeights};
pub use generation::{GenerationDefaults, SamplingDefaults};
pub use workspace::Workspace;

pub use crate::weights::WeightBytes;
