//! The plan of a step and the report on it: plain data.
//!
//! ```text
//! StepPlan::add(sequence)  takes units and tokens of the budget, writes a span
//! lower(plan)              turns spans into row numbers and byte offsets
//! StepPlan::retire(pool)    at commit: what the step was the last to read goes back
//! ```

use std::time::Duration;

use state_pool::{PoolError, SlotHandle, SlotId, StatePool};

use super::sequence::{Sequence, SequenceId};
use crate::request::Logprobs;

/// How the rows of a span came to be; it chooses their arithmetic (DESIGN.md rule 3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Tokens known when the request was submitted.
    Chunk,
    /// Generated tokens.
    Step,
}

/// Whose logits a span is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Nobody's: the span ends inside its sequence.
    None,
    /// The last row's.
    Last,
    /// Every row's.
    All,
}

/// Tokens a step may still compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenBudget {
    left: usize,
}

impl TokenBudget {
    /// A budget of `tokens`.
    pub fn new(tokens: usize) -> TokenBudget {
        TokenBudget { left: tokens }
    }

    /// Tokens left.
    pub fn left(self) -> usize {
        self.left
    }
}

/// A run of tokens of one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedSpan {
    /// The sequence.
    pub sequence: SequenceId,
    /// Position of the first token.
    pub start: usize,
    /// Number of tokens.
    pub rows: usize,
    /// Their form.
    pub form: Form,
    /// The slot the state is read from; none for the zero state.
    pub read: Option<SlotId>,
    /// The slot it is written to.
    pub write: SlotId,
    /// Copies of the state on the way: tokens of the span absorbed, and the slot to write.
    pub snapshots: Vec<(usize, SlotId)>,
    /// Whose logits are asked for.
    pub wanted: Wanted,
}

/// What one step computes. Owns the handles it retires.
#[derive(Debug, Default)]
pub struct StepPlan {
    /// The spans, in order of their rows.
    pub spans: Vec<PlannedSpan>,
    /// Handles of slots that are still read in this step; released at commit.
    retired: Vec<SlotHandle>,
}

impl StepPlan {
    /// Plans the next span of `sequence` within `budget`, or nothing when the budget is too small
    /// for one. `grid` is the model's: where a prompt span may end. The first prompt span of a
    /// step may always take one cell, beyond its budget if need be.
    ///
    /// # Errors
    /// When the pool lacks a unit; then nothing is taken and nothing planned.
    ///
    /// # Panics
    /// When the sequence has nothing to compute.
    pub fn add(
        &mut self,
        sequence: &mut Sequence,
        pool: &mut StatePool,
        budget: &mut TokenBudget,
        grid: usize,
    ) -> Result<(), PoolError> {
        let in_prompt = sequence.computed() < sequence.prompt_len();
        let floor = if self.spans.is_empty() && in_prompt { grid } else { 0 };
        let Some((form, rows)) = sequence.next_span(budget.left.max(floor), grid) else {
            return Ok(());
        };
        let id = sequence.id();
        let last = sequence.computed() + rows == sequence.tokens().len();
        let state = sequence.state_mut();
        let start = state.len();
        let (blocks, sole) = (state.missing_blocks(start + rows), state.is_slot_sole(pool));
        if !pool.fits(blocks, usize::from(!sole)) {
            return Err(no_room(pool, blocks, usize::from(!sole)));
        }
        state.grow(pool, start + rows)?;
        assert_eq!(state.shared_blocks_to_write(pool, start + rows).next(), None);
        let old = state.slot().id();
        if !sole {
            self.retired.push(state.renew_slot(pool)?);
        }
        self.spans.push(PlannedSpan {
            sequence: id,
            start,
            rows,
            form,
            read: (start > 0).then_some(old),
            write: state.slot().id(),
            snapshots: Vec::new(),
            wanted: if last { Wanted::Last } else { Wanted::None },
        });
        budget.left = budget.left.saturating_sub(rows);
        Ok(())
    }

    /// Releases what the step was the last to read. The caller has advanced its sequences.
    pub fn retire(self, pool: &mut StatePool) {
        for handle in self.retired {
            pool.release(handle);
        }
    }
}

fn no_room(pool: &StatePool, blocks: usize, slots: usize) -> PoolError {
    let (free_blocks, free_slots) = (pool.free_blocks(), pool.free_slots());
    PoolError::NoRoom { tier: pool.tier(), blocks, slots, free_blocks, free_slots }
}

/// A token that was drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct SampledToken {
    /// The sequence it continues.
    pub sequence: SequenceId,
    /// The token.
    pub id: u32,
    /// Its logprob and alternatives, where asked for.
    pub logprobs: Option<Logprobs>,
}

/// What became of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct StepReport {
    /// The drawn tokens, in the order of the draws.
    pub sampled: Vec<SampledToken>,
    /// Duration of the step.
    pub duration: Duration,
}
