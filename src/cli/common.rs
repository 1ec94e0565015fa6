//! Arguments that commands share.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::output::JsonTarget;
use crate::config::default_threads;

/// Which model, how it is computed, and what is printed.
#[derive(Debug, Args)]
pub struct CommonArgs {
    /// Folder of a model (config.json, safetensors, tokenizer); default: the model in the binary.
    #[arg(short, long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Threads to compute with; default: one per core.
    #[arg(short, long, value_name = "N")]
    pub threads: Option<usize>,
    /// Precision of activations and state.
    #[arg(long, value_enum, default_value_t = Compute::F32)]
    pub compute: Compute,
    /// Print one JSON object on one line instead of text, or write it to FILE beside the text.
    #[arg(
        long,
        value_name = "FILE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "-"
    )]
    pub json: Option<PathBuf>,
    /// Say nothing on standard error but errors.
    #[arg(short, long)]
    pub quiet: bool,
}

impl CommonArgs {
    /// Threads to compute with.
    pub fn threads(&self) -> usize {
        self.threads.unwrap_or_else(default_threads)
    }

    /// Where a JSON result goes.
    pub fn json_target(&self) -> JsonTarget {
        JsonTarget::new(self.json.as_deref())
    }
}

/// Precision of activations and state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Compute {
    /// Single precision: the exact path.
    F32,
}
