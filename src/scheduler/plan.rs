//! The plan of a step and the report on it: plain data.
//!
//! The plan names units by id; the handles behind them stay with their sequences, or with the plan
//! when this step is the last to read them.

use std::ops::Range;
use std::time::Duration;

use state_pool::{
    BLOCK_LEN, BlockHandle, BlockId, PackedId, SequenceState, SlotHandle, SlotId, StatePool,
};

use super::audit::{Comparison, Verdict};
use super::sequence::{Sequence, SequenceId};
use crate::request::{Logprobs, PromptLogprobs};

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
    /// Of these, what generated tokens leave to others.
    reserved: usize,
    /// The first prompt span may always take this many.
    floor: usize,
}

impl TokenBudget {
    /// A budget of `tokens`, of which the first prompt span may always take `floor`.
    pub fn new(tokens: usize, floor: usize) -> TokenBudget {
        TokenBudget { left: tokens, reserved: 0, floor }
    }

    /// Tokens that a span of `form` may take.
    pub fn for_form(self, form: Form) -> usize {
        match form {
            Form::Step => self.left.saturating_sub(self.reserved).max(self.left.min(1)),
            Form::Chunk => self.left.max(self.floor),
        }
    }

    /// Leaves `tokens` to others when generated tokens are replayed, but for one.
    pub fn reserve(&mut self, tokens: usize) {
        self.reserved = tokens;
    }

    /// Tokens left.
    pub fn left(self) -> usize {
        self.left
    }

    /// Takes the rows of a span.
    pub fn take(&mut self, form: Form, rows: usize) {
        self.left = self.left.saturating_sub(rows);
        if form == Form::Chunk {
            self.floor = 0;
        }
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
    /// Who draws a token from the last row's logits, as a part of [`StepPlan::draws`].
    pub draws: Range<usize>,
}

/// A block copied inside the device tier before the spans of its plan: a shared tail that is about
/// to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    /// The block that is read.
    pub source: BlockId,
    /// The block that is written.
    pub target: BlockId,
}

/// A transfer's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId(pub u64);

/// Which way a transfer goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the device to the host.
    Out,
    /// From the host to the device.
    In,
}

/// Units of a sequence or of a checkpoint copied between the device and the host. It may take
/// several steps; its handles belong to the list of transfers in flight until it is reported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// Its name.
    pub id: TransferId,
    /// Which way.
    pub direction: Direction,
    /// Blocks: source in one tier, target in the other.
    pub blocks: Vec<(BlockId, BlockId)>,
    /// The slot; none for a checkpoint without recurrent layers.
    pub slot: Option<SlotCopy>,
}

/// How a transfer copies a slot, source first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotCopy {
    /// As it is.
    Plain(SlotId, SlotId),
    /// To the host, packed.
    Pack(SlotId, PackedId),
    /// From the host, where it is packed.
    Unpack(PackedId, SlotId),
}

/// A draw without a span: the state behind the whole prompt was there, and its slot keeps the last
/// hidden row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hit {
    /// The sequence.
    pub sequence: SequenceId,
    /// Its slot.
    pub slot: SlotId,
    /// Who draws, as a part of [`StepPlan::draws`].
    pub draws: Range<usize>,
}

/// What one step does. Owns the handles it retires.
#[derive(Debug, Default)]
pub struct StepPlan {
    /// Copies inside the device tier, done before the spans.
    pub copies: Vec<BlockCopy>,
    /// The spans, in order of their rows.
    pub spans: Vec<PlannedSpan>,
    /// Draws without a span.
    pub hits: Vec<Hit>,
    /// Who draws a token: of each span that is asked for one the sequence, then its forks; then of
    /// each hit.
    pub draws: Vec<SequenceId>,
    /// Transfers that start in this step.
    pub transfers: Vec<Transfer>,
    retired_slots: Vec<SlotHandle>,
    retired_blocks: Vec<BlockHandle>,
    /// Shares of the slots that the spans leave snapshots in: nobody may take them before.
    pub(super) kept: Vec<SlotHandle>,
    /// Units to be compared once the spans are computed.
    pub comparison: Option<Comparison>,
}

impl StepPlan {
    /// Whether the step has nothing to do.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty() && self.hits.is_empty() && self.transfers.is_empty()
    }

    /// Plans the next span of a sequence on the device within `budget`, taking the units it needs;
    /// returns its rows, 0 when the budget holds none. `grid` is the model's: where prompt spans
    /// may end.
    ///
    /// A slot that is shared is read where it is and a fresh one written; a shared block that is
    /// about to be written is replaced by a fresh one, and copied if it holds computed rows. The
    /// old handles are retired by this plan.
    ///
    /// # Errors
    /// When the pool lacks a unit; then nothing is taken and nothing planned.
    ///
    /// # Panics
    /// When the sequence is not on the device or has nothing to compute.
    pub fn add(
        &mut self,
        sequence: &mut Sequence,
        pool: &mut StatePool,
        budget: &mut TokenBudget,
        grid: usize,
    ) -> Result<usize, Lack> {
        let form = sequence.next_form();
        let rows = sequence.next_rows(budget.for_form(form), grid);
        if rows == 0 {
            return Ok(0);
        }
        let last = sequence.computed() + rows == sequence.tokens().len() && !sequence.is_shadow;
        let (id, state) = (sequence.id(), sequence.state_mut());
        let (start, old) = (state.len(), state.slot().id());
        self.take_units(state, pool, start + rows)?;
        let write = state.slot().id();
        let first_draw = self.draws.len();
        if last {
            self.draws.push(id);
            self.draws.extend_from_slice(&sequence.forks);
        }
        self.spans.push(PlannedSpan {
            sequence: id,
            start,
            rows,
            form,
            read: (start > 0).then_some(old),
            write,
            snapshots: Vec::new(),
            wanted: if last { Wanted::Last } else { Wanted::None },
            draws: first_draw..self.draws.len(),
        });
        budget.take(form, rows);
        Ok(rows)
    }

    /// Plans the first draw of a sequence whose whole prompt was there.
    pub(super) fn add_hit(&mut self, sequence: &Sequence) {
        let first = self.draws.len();
        self.draws.push(sequence.id());
        self.draws.extend_from_slice(&sequence.forks);
        let slot = sequence.state().expect("it runs").slot().id();
        self.hits.push(Hit { sequence: sequence.id(), slot, draws: first..self.draws.len() });
    }

    /// Everything that `state` needs to be computed up to `end`, or nothing.
    fn take_units(
        &mut self,
        state: &mut SequenceState,
        pool: &mut StatePool,
        end: usize,
    ) -> Result<(), Lack> {
        let shared: Vec<usize> = state.shared_blocks_to_write(pool, end).collect();
        let fork = !state.is_slot_sole(pool);
        if shared.is_empty() && !fork && state.missing_blocks(end) == 0 {
            return Ok(());
        }
        let blocks = state.missing_blocks(end) + shared.len();
        if !pool.fits(blocks, usize::from(fork)) {
            return Err(Lack { blocks, slots: usize::from(fork), places: 0 });
        }
        const FITS: &str = "the pool was asked for all of it";
        state.grow(pool, end).expect(FITS);
        for index in shared {
            let old = state.renew_block(pool, index).expect(FITS);
            if index * BLOCK_LEN < state.len() {
                let target = state.table().as_slice()[index].id();
                self.copies.push(BlockCopy { source: old.id(), target });
            }
            self.retired_blocks.push(old);
        }
        if fork {
            self.retired_slots.push(state.renew_slot(pool).expect(FITS));
        }
        Ok(())
    }

    /// Whose logits are asked for, in the order they come out, and who draws from each: of the
    /// spans, then of the hits.
    pub fn drawing(&self) -> impl Iterator<Item = (SequenceId, &[SequenceId])> {
        let spans = self.spans.iter().map(|span| (span.sequence, span.draws.clone()));
        let hits = self.hits.iter().map(|hit| (hit.sequence, hit.draws.clone()));
        let drawing = spans.chain(hits).filter(|(_, draws)| !draws.is_empty());
        drawing.map(|(sequence, draws)| (sequence, &self.draws[draws]))
    }

    /// Slots that this step reads for the last time, each beside the one its sequence writes.
    pub fn second_slots(&self) -> usize {
        self.retired_slots.len()
    }

    /// Releases what the step was the last to read: part of commit. The plan is empty afterwards,
    /// to be used again.
    pub fn retire(&mut self, pool: &mut StatePool) {
        self.release_retired(pool);
        for slot in self.kept.drain(..) {
            pool.release(slot);
        }
        self.copies.clear();
        self.spans.clear();
        self.hits.clear();
        self.draws.clear();
        self.transfers.clear();
        self.comparison = None;
    }

    pub(super) fn release_retired(&mut self, pool: &mut StatePool) {
        for handle in self.retired_slots.drain(..) {
            pool.release(handle);
        }
        for handle in self.retired_blocks.drain(..) {
            pool.release(handle);
        }
    }
}

/// What a sequence lacks for its next span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lack {
    /// Blocks it needs and the pool may not have.
    pub blocks: usize,
    /// Slots it needs and the pool may not have: one for a fork's first step, none for others that
    /// run.
    pub slots: usize,
    /// Places among the sequences that may hold device memory at once.
    pub places: usize,
}

/// A token that was drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct SampledToken {
    /// The sequence it continues.
    pub sequence: SequenceId,
    /// The token, or why none could be drawn.
    pub drawn: Result<u32, String>,
    /// The token's logprob and alternatives, where asked for.
    pub logprobs: Option<Logprobs>,
}

/// What became of a plan.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StepReport {
    /// The drawn tokens, in the order of the draws.
    pub sampled: Vec<SampledToken>,
    /// The scores of prompts, in the order of the spans and of their rows, or why there is none.
    pub scored: Vec<Result<PromptLogprobs, String>>,
    /// Transfers that are done.
    pub finished: Vec<TransferId>,
    /// Transfers that failed; their targets hold nothing of use.
    pub failed: Vec<TransferId>,
    /// What the comparison found, if one was planned.
    pub verdict: Option<Verdict>,
    /// Duration of the step.
    pub duration: Duration,
}
