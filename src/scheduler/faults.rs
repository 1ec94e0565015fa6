//! Faults for the simulation to catch, each what a careless scheduler would do. Built with the
//! feature `faults` alone.

use state_pool::SequenceState;

use super::{Scheduler, StepPlan};

/// A fault that cannot be planted from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// What a step reads for the last time is free before the step has run.
    FreeAtPlan,
    /// A refused admission keeps a block.
    RefusedKeepsUnit,
    /// A sequence that is cancelled while it waits for a slot of its own keeps its share.
    CancelledKeepsShare,
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

/// Loses a block.
pub(super) fn keep_unit(scheduler: &mut Scheduler) {
    if scheduler.fault == Some(Fault::RefusedKeepsUnit)
        && let Ok(block) = scheduler.device.alloc_block()
    {
        std::mem::forget(block);
    }
}
