//! What a replay says to the scheduler's prefix cache and hears of it: the one file of this room
//! that knows it.

use crate::scheduler::{Refused, Scheduler, SequenceId};

/// Submits a prompt of which one answer of `max_tokens` tokens is wanted.
pub(super) fn submit(
    scheduler: &mut Scheduler,
    tokens: &[u32],
    max_tokens: usize,
) -> Result<SequenceId, Refused> {
    let ids = scheduler.submit(tokens, max_tokens, 1, None)?;
    Ok(ids[0])
}

/// Ends a sequence that has its answer.
pub(super) fn finish(scheduler: &mut Scheduler, id: SequenceId) {
    scheduler.end(id);
}
