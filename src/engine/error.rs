//! Why the engine refuses or ends a request.

use std::io;

use kernels::ArenaError;
use state_pool::{LayoutError, PoolError};

use crate::config::InvalidLimit;
use crate::request::InvalidParam;
use crate::text::TextError;

/// Why the engine refuses or ends a request.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A limit cannot work.
    #[error(transparent)]
    Limit(#[from] InvalidLimit),
    /// A parameter of a request is out of its range.
    #[error(transparent)]
    Param(#[from] InvalidParam),
    /// A request is longer than the engine's limit.
    #[error("{tokens} tokens do not fit: the limit is {limit} tokens, prompt and answer together")]
    TooLong {
        /// Tokens asked for.
        tokens: usize,
        /// The limit.
        limit: usize,
    },
    /// The machine has not enough memory for a sequence of the limit's length.
    #[error(
        "a sequence of {tokens} tokens takes {needed} bytes of memory, and {available} are free; \
         {would_fit} tokens would fit"
    )]
    Memory {
        /// The limit.
        tokens: usize,
        /// Bytes it takes.
        needed: usize,
        /// Bytes that are free.
        available: usize,
        /// Tokens that would fit.
        would_fit: usize,
    },
    /// The system refused to start threads.
    #[error("cannot start the threads to compute with: {0}")]
    Threads(io::Error),
    /// The system refused memory it said it had.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// No pool can be made for the model.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The pool lacks a unit.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The model's logits are broken.
    #[error("token {position}: {reason}")]
    Sample {
        /// Position of the token that could not be drawn.
        position: usize,
        /// What is broken.
        reason: String,
    },
    /// Stop strings or tokenizer.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The caller cancelled.
    #[error("cancelled")]
    Cancelled,
}
