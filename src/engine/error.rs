//! Why an engine cannot be built, or a score not be computed.

use std::io;

use kernels::ArenaError;
use state_pool::LayoutError;

use super::device::DeviceError;
use crate::config::InvalidLimit;
use crate::models::ModelError;
use crate::request::InvalidParam;

/// Why an engine cannot be built, or a score not be computed.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A limit cannot work.
    #[error(transparent)]
    Limit(#[from] InvalidLimit),
    /// A tier's memory does not suit the model.
    #[error("{flag}: {source}")]
    Layout {
        /// The flag that sets the memory.
        flag: &'static str,
        /// What is wrong.
        source: LayoutError,
    },
    /// The machine has less memory than the limits ask for.
    #[error(
        "{needed} bytes of memory are needed ({what}), and {available} are free after the weights; \
         {advice}"
    )]
    Memory {
        /// Bytes needed.
        needed: usize,
        /// What for.
        what: String,
        /// Bytes that are free.
        available: usize,
        /// What would work.
        advice: String,
    },
    /// What it is to be computed on is not there, or failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The model's weights.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The system refused to start threads.
    #[error("cannot start the threads to compute with: {0}")]
    Threads(io::Error),
    /// The system refused memory it said it had.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// What is to be scored is out of range.
    #[error(transparent)]
    Param(#[from] InvalidParam),
    /// More tokens than a limit allows.
    #[error("{tokens} tokens do not fit: the limit is {limit} tokens, prompt and answer together")]
    TooLong {
        /// Tokens asked for.
        tokens: usize,
        /// The limit.
        limit: usize,
    },
    /// The model's logits are broken.
    #[error("token {position}: {reason}")]
    Sample {
        /// Position of the token that could not be drawn.
        position: usize,
        /// What is broken.
        reason: String,
    },
    /// The caller cancelled.
    #[error("cancelled")]
    Cancelled,
}
