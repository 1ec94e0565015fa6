//! Faults for the simulation to catch, each what a careless scheduler would do. Built with the
//! feature `faults` alone.

use checkpoints::MatchOptions;
use state_pool::{BLOCK_LEN, SequenceState, Tier};

use super::{Scheduler, SequenceId, StepPlan};

/// A fault that cannot be planted from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// What a step reads for the last time is free before the step has run.
    FreeAtPlan,
    /// A refused admission keeps a block.
    RefusedKeepsUnit,
    /// A sequence that is cancelled while it waits for a slot of its own keeps its share.
    CancelledKeepsShare,
    /// A sequence goes on where its blocks match, not where its state stands.
    ResumeAtMatch,
    /// A turn's end is kept under one token too few.
    KeyedOneOff,
    /// Prompts of all salts meet.
    SaltIgnored,
    /// A sequence that is computed again goes on from states behind its own prompt.
    BeyondOwnPrompt,
    /// Who waits for the snapshot of a sequence that is gone waits on.
    LeaderForgotten,
}

/// Frees what a span reads for the last time as soon as it is planned.
pub(super) fn free_at_plan(scheduler: &mut Scheduler, plan: &mut StepPlan) {
    if scheduler.fault == Some(Fault::FreeAtPlan) {
        plan.release_retired(&mut scheduler.device);
    }
}

/// Loses the state of a sequence whose slot is shared.
pub(super) fn keep_share(scheduler: &Scheduler, state: SequenceState) -> Option<SequenceState> {
    let shared = !state.is_slot_sole(&scheduler.device);
    if shared && scheduler.fault == Some(Fault::CancelledKeepsShare) {
        std::mem::forget(state);
        return None;
    }
    Some(state)
}

/// Puts the length of a state at what matched, with the blocks of it.
pub(super) fn at_match(
    scheduler: &mut Scheduler,
    id: SequenceId,
    state: SequenceState,
) -> SequenceState {
    if scheduler.fault != Some(Fault::ResumeAtMatch) {
        return state;
    }
    let (table, slot, len) = state.into_parts();
    let sequence = &scheduler.sequences[&id];
    let (salt, tokens) = (sequence.salt(), &sequence.tokens[..sequence.prompt_len]);
    let tree = scheduler.tree.as_ref().expect("it resumes from one");
    let count = tree.exact_blocks(Tier::Device, salt, tokens);
    if count <= table.len() {
        return SequenceState::from_parts(table, slot, len);
    }
    table.release(&mut scheduler.device);
    let blocks = tree.share_exact_blocks(&mut scheduler.device, salt, tokens, count);
    SequenceState::from_parts(blocks.into(), slot, count * BLOCK_LEN)
}

/// Loses a block.
pub(super) fn keep_unit(scheduler: &mut Scheduler) {
    if scheduler.fault == Some(Fault::RefusedKeepsUnit)
        && let Ok(block) = scheduler.device.alloc_block()
    {
        std::mem::forget(block);
    }
}

/// Lets a sequence that has drawn go on from anything.
pub(super) fn beyond_prompt(scheduler: &Scheduler, options: &mut MatchOptions) {
    if scheduler.fault == Some(Fault::BeyondOwnPrompt) {
        (options.limit_tokens, options.exact_only) = (usize::MAX, false);
    }
}
