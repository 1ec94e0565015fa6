//! What a replay says to the scheduler's prefix cache and hears of it: the one file of this room
//! that knows it.

use checkpoints::Placement;
use serde::Serialize;

use super::policy::Policy;
use super::setup::Setup;
use crate::config::MAX_GHOST_TOKENS;
use crate::scheduler::{End, Prompt, Refused, Reuse, Scheduler, SequenceId};

/// What the cache did in a replay. Field names are the keys of the JSON form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct CacheFigures {
    /// Tokens of prompts that the tree knew.
    pub matched_tokens: usize,
    /// Of these, what was computed again.
    pub replayed_tokens: usize,
    /// States that the tree took.
    pub snapshots: usize,
    /// States that found no slot.
    pub left_out: usize,
    /// Checkpoints evicted from the device.
    pub evicted: usize,
    /// Checkpoints evicted from the host.
    pub host_evicted: usize,
    /// Checkpoints copied to the host.
    pub demoted: usize,
    /// Sequences that got a copy of a state on the host.
    pub promoted: usize,
}

/// The cache's rules under a policy.
pub(super) fn rules(setup: &Setup) -> Reuse {
    let (placement, keep_turn_ends) = match setup.policy {
        Policy::Default => (Placement::default(), true),
        Policy::Fixed { every, end, branch } => {
            let (junctions, guard, spread) = (false, false, false);
            (Placement { junctions, branch, guard, prompt_end: end, spread, every }, false)
        }
    };
    Reuse {
        exact_only: false,
        placement,
        keep_turn_ends,
        max_ghost_tokens: MAX_GHOST_TOKENS,
        grid_tokens: setup.state_grid,
    }
}

/// Submits a prompt of which one answer of `max_tokens` tokens is wanted.
pub(super) fn submit(
    scheduler: &mut Scheduler,
    tokens: &[u32],
    max_tokens: usize,
) -> Result<SequenceId, Refused> {
    Ok(scheduler.submit(&Prompt::new(tokens, max_tokens))?[0])
}

impl CacheFigures {
    /// Counts a sequence that has its answer, and ends it.
    pub(super) fn finish(&mut self, scheduler: &mut Scheduler, id: SequenceId) {
        let figures = scheduler.sequence(id).expect("it has just run").reuse();
        self.matched_tokens += figures.matched_tokens;
        self.replayed_tokens += figures.replayed_tokens;
        scheduler.end(id, End::Finished);
    }

    /// Takes the counts of the scheduler's tree.
    pub(super) fn read(&mut self, scheduler: &Scheduler) {
        let Some(tree) = scheduler.tree_stats() else { return };
        (self.snapshots, self.left_out) = (tree.inserted, tree.left_out);
        (self.evicted, self.host_evicted) = (tree.device.evicted, tree.host.evicted);
        (self.demoted, self.promoted) = (tree.demoted, tree.promoted);
    }
}
