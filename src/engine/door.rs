//! The door: what an engine cannot honour is refused here, before it is queued, on the caller's
//! own thread.

use std::sync::Arc;

use state_pool::PoolLayout;

use super::constraint::{ConstraintError, Grammars};
use crate::request::{InvalidParam, Request};
use crate::scheduler::{Limits, Refused};
use crate::text::Tokenizer;

/// What a request is held against. All of it is known when the engine is built.
pub struct Door {
    /// Limits of the scheduler.
    pub limits: Limits,
    /// The device tier.
    pub device: PoolLayout,
    /// Tokens of the model.
    pub vocab_size: usize,
    /// From tokens to text; without it events have no text.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// Tokens that end an answer unless it ignores them.
    pub stop_tokens: Vec<u32>,
    /// Compiles constraints.
    pub grammars: Grammars,
}

/// Why a request is not taken. Nothing is kept of it.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// A parameter is out of its range.
    #[error(transparent)]
    Param(#[from] InvalidParam),
    /// It can never run.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// Its constraint makes no sense, cannot be enforced, or costs too much.
    #[error(transparent)]
    Constraint(#[from] ConstraintError),
    /// Stop strings without text to look for them in.
    #[error("stop needs a tokenizer, and the model has none")]
    StopWithoutTokenizer,
    /// The engine finishes what it has and takes nothing more.
    #[error("the engine is draining and takes no more requests")]
    Draining,
    /// The device failed, and nothing more can be computed.
    #[error("{0}")]
    Failed(String),
    /// The engine's thread has ended.
    #[error("the engine has stopped")]
    Stopped,
}

impl Door {
    /// Refuses what can never run. A constraint is compiled, which takes milliseconds.
    ///
    /// # Errors
    /// The first reason, naming field or limit.
    pub fn check(&self, request: &Request) -> Result<(), SubmitError> {
        request.check(self.vocab_size)?;
        let tokens = request.prompt.len().saturating_add(request.max_tokens);
        self.limits.check(tokens, request.priority, &self.device)?;
        if self.tokenizer.is_none() && !request.stop.is_empty() {
            return Err(SubmitError::StopWithoutTokenizer);
        }
        if let Some(constraint) = &request.constraint {
            // What is compiled here is found again when the answers begin.
            self.grammars.matcher(constraint)?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for Door {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Door").field("limits", &self.limits).finish_non_exhaustive()
    }
}
