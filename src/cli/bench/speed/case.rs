//! What is measured in one row of the table, and what it takes.

use std::fmt;

use kernels::CELL_LEN;
use serde::Serialize;

use crate::config::DEFAULT_MAX_NUM_BATCHED_TOKENS;

/// Most sequences of a case.
pub const MOST_SEQUENCES: usize = 1024;

/// Untimed steps before the rounds of a decode.
pub const WARM_UP_STEPS: usize = 2;

/// What is measured. Field names are the keys of the JSON form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Case {
    /// A prompt, alone.
    Prefill {
        /// Its tokens.
        tokens: usize,
    },
    /// Sequences that generate together.
    Decode {
        /// How many.
        sequences: usize,
        /// Tokens that each has before the first step.
        context: usize,
        /// Steps of a round.
        steps: usize,
    },
}

/// Tokens of a step of an engine that runs `sequences` sequences: half of it, or the default, is
/// left to prompts.
pub fn step_tokens(sequences: usize) -> usize {
    DEFAULT_MAX_NUM_BATCHED_TOKENS.max(2 * sequences)
}

impl Case {
    /// Sequences that run at a time.
    pub fn sequences(&self) -> usize {
        match self {
            Case::Prefill { .. } => 1,
            Case::Decode { sequences, .. } => *sequences,
        }
    }

    /// Tokens that the longest sequence reaches.
    pub fn longest(&self, rounds: usize) -> usize {
        match self {
            Case::Prefill { tokens } => tokens.saturating_add(1),
            Case::Decode { context, steps, .. } => {
                let timed = rounds.saturating_mul(*steps).saturating_add(WARM_UP_STEPS);
                (*context).max(1).saturating_add(timed).saturating_add(self.margin())
            }
        }
    }

    /// Tokens that a sequence may have beyond its context before all have theirs.
    fn margin(&self) -> usize {
        if self.sequences() > 1 { CELL_LEN } else { 1 }
    }

    /// The flags that ask for it.
    pub fn flag(&self) -> String {
        match self {
            Case::Prefill { tokens } => format!("--tokens {tokens}"),
            Case::Decode { context, steps, .. } => format!("--context {context} --steps {steps}"),
        }
    }
}

/// Lengths of the prompts after which all of `sequences` sequences have about `context` tokens.
///
/// Prompts are computed one after the other, and those that are done generate meanwhile, so the
/// first ones are given shorter prompts.
pub fn prompts(sequences: usize, context: usize) -> Vec<usize> {
    // Rows of a step that generated tokens leave to prompts, on the grid.
    let rows = (step_tokens(sequences) - (sequences - 1)) / CELL_LEN * CELL_LEN;
    let prompt = |i: usize| {
        let lead = (sequences - 1 - i) * context / rows;
        context.saturating_sub(lead).max(1)
    };
    (0..sequences).map(prompt).collect()
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Case::Prefill { tokens } => write!(f, "prefill {tokens}"),
            Case::Decode { sequences, context, .. } => write!(f, "decode x{sequences} @{context}"),
        }
    }
}
