//! What a scheduler has done, and what is where.

use checkpoints::PrefixTree;
use state_pool::{StatePool, UnitStats};

use super::sequence::Sequence;
use super::{Lack, Scheduler};

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
    /// Preemptions because somebody lacked a block.
    pub preempted_for_blocks: u64,
    /// Because somebody lacked a slot.
    pub preempted_for_slots: u64,
    /// Because somebody of a lower number lacked a place.
    pub preempted_for_places: u64,
    /// Tokens that those who were pushed out had computed.
    pub preempted_tokens: u64,
    /// Transfers that failed.
    pub failed_transfers: u64,
    /// Bytes of sequences copied between the tiers.
    pub swapped_bytes: u64,
    /// Of these, bytes that came back from the host.
    pub returned_bytes: u64,
    /// Blocks copied inside the device tier, since they were shared and about to be written.
    pub copied_blocks: u64,
    /// Steps in which a sequence did not come onto the device for want of a block.
    pub blocked_for_blocks: u64,
    /// Steps in which one did not for want of a slot.
    pub blocked_for_slots: u64,
    /// Steps in which one did not since as many as may were there.
    pub blocked_for_places: u64,
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
    /// Of these, tokens behind a state that came from the host.
    pub host_cached_tokens: u64,
    /// Tokens of the prompts admitted, each counted once.
    pub admitted_tokens: u64,
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
    /// Of these, sequences that wait for a snapshot of one that runs.
    pub following: usize,
    /// Sequences on the host.
    pub parked: usize,
    /// Sequences between the two.
    pub in_flight: usize,
    /// Prompt tokens to be computed: of prompts that wait, what nothing that was kept when they
    /// came covers; of those that run, what is left.
    pub prompt_backlog: usize,
}

/// What a sequence that wanted onto the device in a step did not find there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Blocked {
    /// Blocks.
    pub blocks: bool,
    /// A slot.
    pub slots: bool,
    /// A place among the sequences that may hold device memory at once.
    pub places: bool,
}

impl Blocked {
    /// What a pool lacks of `lack` above a watermark. Where each kind alone would fit, they want
    /// the same page, and both lack.
    pub(super) fn of(pool: &StatePool, watermark: usize, lack: &Lack) -> Blocked {
        let blocks = !pool.fits_above(watermark, lack.blocks, 0);
        let slots = !pool.fits_above(watermark, 0, lack.slots);
        let neither = !blocks && !slots;
        Blocked { blocks: blocks || neither, slots: slots || neither, places: false }
    }

    /// Adds what another one did not find.
    pub(super) fn add(&mut self, other: Blocked) {
        self.blocks |= other.blocks;
        self.slots |= other.slots;
        self.places |= other.places;
    }
}

/// Who holds the units of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolUse {
    /// Its blocks.
    pub blocks: UnitUse,
    /// Its slots.
    pub slots: UnitUse,
    /// Its packed slots.
    pub packed: UnitUse,
}

/// Who holds the units of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UnitUse {
    /// Units that sequences hold, alone or with the tree, or that are being copied.
    pub used: usize,
    /// Units that the prefix tree alone holds: they are given up when their place is wanted.
    pub cached: usize,
    /// Units that could be taken now, if none of another kind is: kinds share the free pages.
    pub free: usize,
}

impl UnitUse {
    fn of(units: UnitStats, cached: usize, free: usize) -> UnitUse {
        UnitUse { used: units.held - cached, cached, free }
    }

    /// The part that sequences hold of what they could, from 0 to 1.
    pub fn usage(&self) -> f64 {
        let total = self.used + self.cached + self.free;
        if total == 0 { 0.0 } else { self.used as f64 / total as f64 }
    }
}

impl Scheduler {
    /// Who holds what of the device and of the host. A scan of the tree's nodes.
    pub fn pool_use(&self) -> (PoolUse, PoolUse) {
        (pool_use(&self.device, self.tree.as_ref()), pool_use(&self.host, self.tree.as_ref()))
    }

    /// The sequences that are somewhere: those that run, then those between the tiers, on the host,
    /// and in the queue.
    pub fn by_place(&self) -> impl Iterator<Item = &Sequence> {
        let moving = self.in_flight.iter().map(|transfer| transfer.sequence);
        let parked = self.parked.iter().map(|rank| rank.1);
        let waiting = self.waiting.iter().map(|rank| rank.id);
        let following = self.followers.iter().map(|follower| follower.rank().id);
        let on_device = self.running.iter().copied().chain(moving);
        let all = on_device.chain(parked).chain(waiting).chain(following);
        all.map(|id| &self.sequences[&id])
    }

    /// What kept a sequence off the device in the last step.
    pub fn blocked(&self) -> Blocked {
        self.blocked
    }

    /// Counts what kept a sequence off the device in this step.
    pub(super) fn count_blocked(&mut self) {
        self.stats.blocked_for_blocks += u64::from(self.blocked.blocks);
        self.stats.blocked_for_slots += u64::from(self.blocked.slots);
        self.stats.blocked_for_places += u64::from(self.blocked.places);
    }
}

fn pool_use(pool: &StatePool, tree: Option<&PrefixTree>) -> PoolUse {
    let (stats, sole) = (pool.stats(), tree.map(|tree| tree.sole_units(pool)).unwrap_or_default());
    PoolUse {
        blocks: UnitUse::of(stats.blocks, sole.blocks, pool.free_blocks()),
        slots: UnitUse::of(stats.slots, sole.slots, pool.free_slots()),
        packed: UnitUse::of(stats.packed, sole.packed, pool.free_packed()),
    }
}
