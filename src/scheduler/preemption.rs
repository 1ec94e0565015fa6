//! Who leaves the device, and how.

use std::ops::Range;

use checkpoints::PrefixTree;
use state_pool::{BLOCK_LEN, BlockHandle, BlockTable, SequenceState, Tier};

use super::audit::Audited;
use super::plan::{Direction, SlotCopy, Transfer, TransferId};
use super::prompt::End;
use super::sequence::{Place, Sequence, SequenceId};
use super::{InFlight, Lack, Planning, Scheduler, blocks_for};
use crate::config::Preempt;

/// A sequence that came back less than this many tokens ago leaves only when no other helps.
const FRESH_TOKENS: usize = 64;

/// Failed transfers in a row after which a sequence is computed again.
const MOST_FAILED_TRANSFERS: u32 = 3;

impl Scheduler {
    /// Makes room for what `id` lacks. True when it is worth asking the pool again in this plan:
    /// otherwise the sequence sits out, while a victim leaves or a transfer frees its units.
    pub(super) fn make_room(&mut self, id: SequenceId, lack: &Lack, step: &mut Planning) -> bool {
        if self.take_space(lack) {
            return true;
        }
        if self.is_one_leaving() || !self.demotions.is_empty() {
            return false;
        }
        let Some(victim) = self.victim(|_| true, lack) else {
            // Sharers of one slot that hold each other up while nobody else will free one: the
            // tree hands its share over, and all but the lowest drop theirs.
            let alone = step.plan.spans.is_empty() && self.in_flight.is_empty();
            let slot = self.sequences[&id].state().expect("it runs").slot().id();
            return lack.slots > 0 && alone && (self.hand_over(slot) || self.drop_sharers(id));
        };
        let freed = self.preempt(victim, lack, step);
        freed && victim != id
    }

    /// Pushes out one running sequence of a higher number, if that frees what is lacking.
    pub(super) fn push_out_above(&mut self, number: i32, lack: &Lack, step: &mut Planning) {
        if !self.is_one_leaving()
            && let Some(victim) = self.victim(|sequence| sequence.priority > number, lack)
        {
            self.preempt(victim, lack, step);
        }
    }

    fn is_one_leaving(&self) -> bool {
        self.in_flight.iter().any(|transfer| transfer.direction == Direction::Out)
    }

    /// The sequence to leave: of the highest number; of these one that just came back only when no
    /// other helps; then with the fewest tokens computed, then the newest. Only one that `may`;
    /// none that this plan computes; none that frees nothing of what is lacking.
    fn victim(&self, may: impl Fn(&Sequence) -> bool, lack: &Lack) -> Option<SequenceId> {
        let helps = |sequence: &&Sequence| {
            may(sequence)
                && sequence.planned_in != self.stats.steps
                && (lack.places > 0 || self.frees(sequence, lack))
        };
        let rank = |sequence: &&Sequence| {
            let back = sequence.returned_at.map_or(usize::MAX, |at| sequence.computed() - at);
            let computed = sequence.computed().saturating_sub(sequence.origin.position);
            (sequence.priority, back >= FRESH_TOKENS, std::cmp::Reverse(computed), sequence.id)
        };
        let running = self.running.iter().map(|id| &self.sequences[id]);
        running.filter(helps).max_by_key(rank).map(|sequence| sequence.id)
    }

    /// Whether the sequence alone holds a unit of a kind that is lacking.
    fn frees(&self, sequence: &Sequence, lack: &Lack) -> bool {
        let Some(state) = sequence.state() else { return false };
        let slot = lack.slots > 0 && state.is_slot_sole(&self.device);
        let sole = |block| self.device.is_sole(block);
        slot || lack.blocks > 0 && state.table().as_slice().iter().any(sole)
    }

    /// Parks or drops a running sequence, for somebody who lacks that. True when its units are free
    /// at once.
    fn preempt(&mut self, id: SequenceId, lack: &Lack, step: &mut Planning) -> bool {
        let sequence = &self.sequences[&id];
        let len = sequence.computed();
        if len > 0 {
            self.stats.preempted_for_blocks += u64::from(lack.blocks > 0);
            self.stats.preempted_for_slots += u64::from(lack.slots > 0);
            self.stats.preempted_for_places += u64::from(lack.places > 0);
            self.stats.preempted_tokens += len as u64;
        }
        let swap = match self.limits.preempt {
            _ if len == 0 || sequence.failed_transfers >= MOST_FAILED_TRANSFERS => false,
            Preempt::Recompute => false,
            Preempt::Swap => true,
            Preempt::Auto => {
                let blocks = blocks_for(len) - self.known_blocks_in(sequence, Tier::Host).0;
                let state = self.look_up(id).usable.map_or(0, |usable| usable.position);
                let running = self.running.len();
                self.limits.cost.prefers_swap(state.min(len)..len, blocks, running)
            }
        };
        if swap && self.start_parking(id, step) {
            return false;
        }
        self.stats.host_full += u64::from(swap);
        self.drop_state(id);
        true
    }

    /// Parks a sequence that runs and has computed something, if the host has room for it.
    pub(super) fn park_now(&mut self, id: SequenceId, step: &mut Planning) {
        let runs = |sequence: &Sequence| sequence.state().is_some_and(|state| !state.is_empty());
        if self.sequences.get(&id).is_some_and(runs) {
            self.start_parking(id, step);
        }
    }

    /// Gives the state of a sequence that runs and has computed something up.
    pub(super) fn drop_now(&mut self, id: SequenceId) {
        let runs = |sequence: &Sequence| sequence.state().is_some_and(|state| !state.is_empty());
        if self.sequences.get(&id).is_some_and(runs) {
            self.drop_state(id);
        }
    }

    /// Exact blocks of the prompt that another choice of the same request has in `tier`, and which
    /// choice: they have the bits of `sequence`'s own and are shared instead of copied.
    fn sibling_blocks(&self, sequence: &Sequence, tier: Tier) -> (usize, Option<SequenceId>) {
        let exact = |sequence: &Sequence| sequence.exact_tokens().len() / BLOCK_LEN;
        let own = exact(sequence);
        let others = sequence.siblings.clone().map(SequenceId);
        let others = others.filter(|id| *id != sequence.id && own > 0);
        let settled = others.filter_map(|id| {
            let other = self.sequences.get(&id)?;
            other.place.settled(tier)?;
            Some((own.min(exact(other)), Some(id)))
        });
        settled
            .max_by_key(|(blocks, _)| *blocks)
            .filter(|(blocks, _)| *blocks > 0)
            .unwrap_or((0, None))
    }

    /// How many of a sequence's first blocks are in a tier with the bits of its own, and which
    /// choice of its request has them; with none, the tree has.
    fn known_blocks_in(&self, sequence: &Sequence, tier: Tier) -> (usize, Option<SequenceId>) {
        let (blocks, sibling) = self.sibling_blocks(sequence, tier);
        let exact =
            |tree: &PrefixTree| tree.exact_blocks(tier, sequence.salt(), sequence.exact_tokens());
        let in_tree = self.tree.as_ref().map_or(0, exact);
        if in_tree > blocks { (in_tree, None) } else { (blocks, sibling) }
    }

    /// Shares of these blocks.
    pub(super) fn share_known_blocks(&mut self, id: SequenceId, tier: Tier) -> Vec<BlockHandle> {
        let sequence = &self.sequences[&id];
        let (count, sibling) = self.known_blocks_in(sequence, tier);
        let pool = if tier == Tier::Device { &mut self.device } else { &mut self.host };
        match (sibling, &self.tree) {
            (Some(sibling), _) => {
                let state = self.sequences[&sibling].place.settled(tier);
                let table = state.expect("it has the blocks").table();
                table.share_first(pool, count).into_vec()
            }
            (None, Some(tree)) => {
                let (salt, tokens) = (sequence.salt(), sequence.exact_tokens());
                tree.share_exact_blocks(pool, salt, tokens, count)
            }
            (None, None) => Vec::new(),
        }
    }

    /// Starts the copy of a running sequence to the host, unless that has no room for it. Blocks
    /// for tokens to come are free at once.
    fn start_parking(&mut self, id: SequenceId, step: &mut Planning) -> bool {
        let len = self.sequences[&id].computed();
        let shared = self.share_known_blocks(id, Tier::Host);
        let brought = shared.len();
        let Some(host) = self.fresh_state(Tier::Host, 0, (len, len), shared) else {
            return false;
        };
        self.running.retain(|running| *running != id);
        let place = std::mem::replace(&mut self.sequence_mut(id).place, Place::Waiting);
        let Place::Device(device) = place else { unreachable!("a victim is on the device") };
        let (table, slot, _) = device.into_parts();
        let mut blocks = table.into_vec();
        for unused in blocks.split_off(blocks_for(len)) {
            self.device.release(unused);
        }
        let device = SequenceState::from_parts(blocks.into(), slot, len);
        self.start_transfer(id, Direction::Out, (&device, &host), brought, step);
        self.sequence_mut(id).place = Place::Leaving { device, host };
        true
    }

    /// Plans the copy of all computed units of a sequence but the first `shared` blocks.
    pub(super) fn start_transfer(
        &mut self,
        sequence: SequenceId,
        direction: Direction,
        (source, target): (&SequenceState, &SequenceState),
        shared: usize,
        step: &mut Planning,
    ) {
        let blocks = (source.table(), target.table());
        let slot = SlotCopy::Plain(source.slot().id(), target.slot().id());
        self.start_copy(sequence, direction, blocks, shared..blocks_for(source.len()), slot, step);
    }

    /// Plans the copy of some of a sequence's blocks, and of a slot.
    pub(super) fn start_copy(
        &mut self,
        sequence: SequenceId,
        direction: Direction,
        (source, target): (&BlockTable, &BlockTable),
        copied: Range<usize>,
        slot: SlotCopy,
        step: &mut Planning,
    ) {
        self.next_transfer += 1;
        let id = TransferId(self.next_transfer);
        let blocks = source.ids().zip(target.ids()).take(copied.end).skip(copied.start);
        let blocks = blocks.collect();
        step.plan.transfers.push(Transfer { id, direction, blocks, slot: Some(slot) });
        let bytes = self.copied_bytes(step.plan.transfers.last().expect("it was just planned"));
        self.in_flight.push(InFlight { id, sequence, direction, bytes });
    }

    /// Gives up a running sequence's state: it waits, and is computed again.
    pub(super) fn drop_state(&mut self, id: SequenceId) {
        self.running.retain(|running| *running != id);
        let sequence = self.sequences.get_mut(&id).expect("a victim is known");
        let Place::Device(state) = std::mem::replace(&mut sequence.place, Place::Waiting) else {
            unreachable!("a victim is on the device")
        };
        sequence.counters.preemptions += 1;
        sequence.starts_over(state.len());
        self.start_waiting(id);
        self.stats.recomputed += u64::from(!state.is_empty());
        state.release(&mut self.device);
    }

    /// All sharers of the slot of `id` that this plan does not compute, but the lowest, drop their
    /// shares. True when `id` is that one, and so may write in place.
    fn drop_sharers(&mut self, id: SequenceId) -> bool {
        let slot = self.sequences[&id].state().expect("it runs").slot().id();
        let shares = |other: &SequenceId| {
            let other = &self.sequences[other];
            let state = other.state();
            state.is_some_and(|state| state.slot().id() == slot)
                && other.planned_in != self.stats.steps
        };
        let mut sharers: Vec<SequenceId> = self.running.iter().copied().filter(shares).collect();
        sharers.sort_unstable();
        for sharer in sharers.iter().skip(1) {
            self.drop_state(*sharer);
        }
        sharers.len() > 1 && sharers[0] == id
    }

    /// A finished transfer gives its source back and its sequence its new place.
    pub(super) fn transfer_done(&mut self, id: TransferId) {
        if self.end_demotion(id, true) {
            return;
        }
        let InFlight { sequence: id, bytes, .. } = self.take_in_flight(id);
        let sequence = self.sequences.get_mut(&id).expect("a sequence in flight is known");
        if let Place::Promoting { .. } = sequence.place {
            self.stats.promoted_bytes += bytes;
        } else {
            self.stats.swapped_bytes += bytes;
            sequence.counters.swapped_bytes += bytes;
        }
        (sequence.failed_transfers, sequence.distrusts_host) = (0, false);
        match std::mem::replace(&mut sequence.place, Place::Waiting) {
            Place::Leaving { device, host } => {
                device.release(&mut self.device);
                sequence.counters.preemptions += 1;
                self.stats.parked += 1;
                self.parked.insert(sequence.parked_rank());
                sequence.place = Place::Host(host);
            }
            Place::Returning { host, device } => {
                host.release(&mut self.host);
                self.stats.returned += 1;
                self.stats.returned_bytes += bytes;
                sequence.returned_at = Some(device.len());
                sequence.place = Place::Device(device);
                self.start_running(id);
                self.start_audit(id, Audited::Return(id));
            }
            Place::Promoting { blocks, slot, device } => {
                blocks.release(&mut self.host);
                slot.release(&mut self.host);
                sequence.returned_at = Some(device.len());
                sequence.place = Place::Device(device);
                self.start_running(id);
                self.start_audit(id, Audited::Return(id));
            }
            other => unreachable!("a sequence in flight is not {other:?}"),
        }
        self.end_if_cancelled(id);
    }

    /// A failed transfer releases its targets: an outgoing sequence stays on the device, a
    /// returning one on the host. After three failures in a row the one is computed again when it
    /// has to leave the next time, the other at once.
    pub(super) fn transfer_failed(&mut self, id: TransferId) {
        self.stats.failed_transfers += 1;
        if self.end_demotion(id, false) {
            return;
        }
        let id = self.take_in_flight(id).sequence;
        let sequence = self.sequences.get_mut(&id).expect("a sequence in flight is known");
        sequence.failed_transfers += 1;
        let rank = (sequence.priority, id);
        match std::mem::replace(&mut sequence.place, Place::Waiting) {
            Place::Leaving { device, host } => {
                host.release(&mut self.host);
                sequence.place = Place::Device(device);
                self.start_running(id);
            }
            Place::Returning { host, device } => {
                device.release(&mut self.device);
                if sequence.failed_transfers < MOST_FAILED_TRANSFERS {
                    sequence.place = Place::Host(host);
                    self.parked.insert(rank);
                } else {
                    sequence.distrusts_host = true;
                    sequence.starts_over(host.len());
                    self.stats.recomputed += 1;
                    host.release(&mut self.host);
                    self.start_waiting(id);
                }
            }
            Place::Promoting { blocks, slot, device } => {
                blocks.release(&mut self.host);
                slot.release(&mut self.host);
                device.release(&mut self.device);
                if let Some(figures) = sequence.did_not_resume() {
                    self.stats.matched_tokens -= figures.matched_tokens as u64;
                    self.stats.cached_tokens -= figures.cached_tokens as u64;
                    self.stats.host_cached_tokens -= figures.cached_tokens as u64;
                    self.stats.admitted_tokens -= sequence.prompt_len as u64;
                }
                sequence.distrusts_host = sequence.failed_transfers >= MOST_FAILED_TRANSFERS;
                self.start_waiting(id);
            }
            other => unreachable!("a sequence in flight is not {other:?}"),
        }
        self.end_if_cancelled(id);
    }

    fn take_in_flight(&mut self, id: TransferId) -> InFlight {
        let index = self.in_flight.iter().position(|transfer| transfer.id == id);
        self.in_flight.swap_remove(index.expect("only planned transfers are reported"))
    }

    fn end_if_cancelled(&mut self, id: SequenceId) {
        if self.sequences[&id].cancelled {
            self.end(id, End::Cancelled);
        }
    }
}
