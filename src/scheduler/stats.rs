//! What a scheduler has done, and what is where.

/// Counts since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SchedulerStats {
    /// Steps planned.
    pub steps: u64,
    /// Prompt tokens computed, those of replayed prompts too.
    pub prompt_tokens: u64,
    /// Generated tokens computed, replayed ones too.
    pub generated_tokens: u64,
    /// Sequences parked on the host.
    pub parked: u64,
    /// Sequences that came back from it.
    pub returned: u64,
    /// Preemptions that dropped the state instead.
    pub recomputed: u64,
    /// Of those, because the host was full.
    pub host_full: u64,
    /// Transfers that failed.
    pub failed_transfers: u64,
    /// Bytes of sequences copied between the tiers.
    pub swapped_bytes: u64,
    /// Steps in which a fork found no free slot.
    pub forks_without_slot: u64,
    /// Steps in which two sequences or more lacked a unit.
    pub lacking_together: u64,
    /// Slots held beside the one of their sequence, each for one step: a fork's first, or that of
    /// a sequence that resumed.
    pub second_slots: u64,
    /// Of the prompts admitted, tokens that the tree had.
    pub matched_tokens: u64,
    /// Of these, tokens that were not computed.
    pub cached_tokens: u64,
    /// Prompts of which nothing was computed: the state behind all of it was there.
    pub full_hits: u64,
    /// Times a prompt waited for the snapshot of one that ran.
    pub followed: u64,
    /// States that the tree gave up to the sequence that resumed from them.
    pub handed_over: u64,
    /// Turn ends that were not kept, since their text ends inside a token.
    pub turn_ends_left_out: u64,
    /// Bytes of checkpoints copied to the host.
    pub demoted_bytes: u64,
    /// Bytes of checkpoints copied from the host, for sequences that went on from them.
    pub promoted_bytes: u64,
    /// Audits that came to a verdict.
    pub audits: u64,
    /// Of those, how many found other bits: a fault of this program or of the machine.
    pub audits_that_differ: u64,
    /// The layer in which the first of those differed; the number of layers for the last hidden
    /// row.
    pub first_differing_layer: Option<usize>,
    /// Sequences whose answer had begun on a state that is gone, and went on from another.
    pub replayed_otherwise: u64,
}

/// What is where, now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Occupancy {
    /// Sequences on the device.
    pub running: usize,
    /// Sequences that wait, or are computed again from the start.
    pub waiting: usize,
    /// Sequences on the host.
    pub parked: usize,
    /// Sequences between the two.
    pub in_flight: usize,
    /// Prompt tokens to be computed: of prompts that wait, what nothing that was kept when they
    /// came covers; of those that run, what is left.
    pub prompt_backlog: usize,
}
