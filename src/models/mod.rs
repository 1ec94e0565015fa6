//! Models as data, and the one decoder that runs them.

mod config;
mod dense;
#[cfg(feature = "embedded-model")]
mod embedded;
mod family;
pub mod files;
mod generation;
mod kimi_linear;
pub mod layout;
mod llama;
mod qwen3;
pub mod spec;

pub use config::ConfigFault;
pub use family::{FAMILIES, Family};
pub use files::{ModelError, ModelFiles, ModelWeights};
pub use generation::GenerationDefaults;
