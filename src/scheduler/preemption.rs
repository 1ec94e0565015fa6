//! Who leaves the device, and how.

use state_pool::SequenceState;

use super::plan::{Direction, Transfer, TransferId};
use super::sequence::{Place, Sequence, SequenceId};
use super::{InFlight, Lack, Planning, Preempt, Scheduler, blocks_for, fresh_state};

/// A sequence that came back less than this many tokens ago leaves only when no other helps.
const FRESH_TOKENS: usize = 64;

/// Failed returns after which a sequence is computed again.
const MOST_FAILED_RETURNS: u32 = 3;

impl Scheduler {
    /// Makes room for what `id` lacks. True when it is worth asking the pool again in this plan:
    /// otherwise the sequence sits out, while a victim leaves or a transfer frees its units.
    pub(super) fn make_room(&mut self, id: SequenceId, lack: &Lack, step: &mut Planning) -> bool {
        if self.in_flight.iter().any(|transfer| transfer.direction == Direction::Out) {
            return false;
        }
        let Some(victim) = self.victim(i32::MIN, lack, step) else {
            // Sharers of one slot that hold each other up: all but the lowest drop their shares.
            return lack.fork && self.drop_sharers(id, step);
        };
        let freed = self.preempt(victim, step);
        freed && victim != id
    }

    /// Pushes out one running sequence of a class above `class`, if that frees what is lacking.
    pub(super) fn push_out_above(&mut self, class: i32, lack: &Lack, step: &mut Planning) {
        let leaving = self.in_flight.iter().any(|t| t.direction == Direction::Out);
        if !leaving && let Some(victim) = self.victim(class.saturating_add(1), lack, step) {
            self.preempt(victim, step);
        }
    }

    /// The sequence to leave: of the highest number, then with the fewest tokens computed, then
    /// the newest; of class `least` or above; none that this plan computes; none that frees
    /// nothing of what is lacking; one that just came back only when no other helps.
    fn victim(&self, least: i32, lack: &Lack, step: &Planning) -> Option<SequenceId> {
        let helps = |sequence: &&Sequence| {
            sequence.priority >= least && !step.has(sequence.id) && self.frees(sequence, lack)
        };
        let rank = |sequence: &&Sequence| {
            let back = sequence.returned_at.map_or(usize::MAX, |at| sequence.computed() - at);
            (
                back >= FRESH_TOKENS,
                sequence.priority,
                std::cmp::Reverse(sequence.computed()),
                sequence.id,
            )
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

    /// Parks or drops a running sequence. True when its units are free at once.
    pub(super) fn preempt(&mut self, id: SequenceId, step: &mut Planning) -> bool {
        self.running.retain(|running| *running != id);
        let sequence = self.sequences.get_mut(&id).expect("a victim is known");
        sequence.counters.preemptions += 1;
        let len = sequence.computed();
        let swap = match self.limits.preempt {
            _ if len == 0 => false,
            Preempt::Recompute => false,
            Preempt::Swap => true,
            Preempt::Auto => self.limits.cost.prefers_swap(len, blocks_for(len)),
        };
        if swap {
            if self.host.fits(blocks_for(len), 1) {
                self.park(id, len, step);
                return false;
            }
            self.stats.host_full += 1;
        }
        self.drop_state(id);
        true
    }

    /// Starts the copy of a sequence to the host. Blocks for tokens to come are free at once.
    fn park(&mut self, id: SequenceId, len: usize, step: &mut Planning) {
        let transfer_id = self.next_transfer();
        let host = fresh_state(&mut self.host, len, len).expect("it fits");
        let sequence = self.sequences.get_mut(&id).expect("a victim is known");
        let Place::Device(device) = std::mem::replace(&mut sequence.place, Place::Waiting) else {
            unreachable!("a victim is on the device")
        };
        let (table, slot, _) = device.into_parts();
        let mut blocks = table.into_vec();
        for unused in blocks.split_off(blocks_for(len)) {
            self.device.release(unused);
        }
        let device = SequenceState::from_parts(blocks.into(), slot, len);
        step.plan.transfers.push(transfer(transfer_id, Direction::Out, &device, &host));
        let direction = Direction::Out;
        self.in_flight.push(InFlight { id: transfer_id, sequence: id, direction });
        sequence.counters.swapped_bytes += self.limits.cost.bytes(blocks_for(len));
        sequence.place = Place::Leaving { device, host };
    }

    /// Gives up a running sequence's state: it waits, and is computed again.
    fn drop_state(&mut self, id: SequenceId) {
        let sequence = self.sequences.get_mut(&id).expect("a victim is known");
        let Place::Device(state) = std::mem::replace(&mut sequence.place, Place::Waiting) else {
            unreachable!("a victim is on the device")
        };
        sequence.counters.recomputed_tokens += state.len() as u64;
        self.waiting.insert((sequence.priority, id));
        self.stats.recomputed += u64::from(!state.is_empty());
        state.release(&mut self.device);
    }

    /// All sharers of the slot of `id` that this plan does not compute, but the lowest, drop their
    /// shares. True when `id` is that one, and so may write in place.
    fn drop_sharers(&mut self, id: SequenceId, step: &mut Planning) -> bool {
        let slot = self.sequences[&id].state().expect("it runs").slot().id();
        let shares = |other: &SequenceId| {
            let state = self.sequences[other].state();
            state.is_some_and(|state| state.slot().id() == slot) && !step.has(*other)
        };
        let mut sharers: Vec<SequenceId> = self.running.iter().copied().filter(shares).collect();
        sharers.sort_unstable();
        for sharer in sharers.iter().skip(1) {
            self.running.retain(|running| running != sharer);
            self.drop_state(*sharer);
        }
        sharers.len() > 1 && sharers[0] == id
    }

    /// A finished transfer gives its source back and its sequence its new place.
    pub(super) fn transfer_done(&mut self, id: TransferId) {
        let id = self.take_in_flight(id);
        let sequence = self.sequences.get_mut(&id).expect("a sequence in flight is known");
        match std::mem::replace(&mut sequence.place, Place::Waiting) {
            Place::Leaving { device, host } => {
                device.release(&mut self.device);
                self.stats.parked += 1;
                self.parked.insert((sequence.priority, id));
                sequence.place = Place::Host(host);
            }
            Place::Returning { host, device } => {
                host.release(&mut self.host);
                self.stats.returned += 1;
                sequence.returned_at = Some(device.len());
                sequence.failed_returns = 0;
                sequence.place = Place::Device(device);
                self.running.push(id);
            }
            other => unreachable!("a sequence in flight is not {other:?}"),
        }
        self.end_if_cancelled(id);
    }

    /// A failed transfer releases its targets: an outgoing sequence stays on the device, a
    /// returning one stays on the host, and after three failures it is computed again.
    pub(super) fn transfer_failed(&mut self, id: TransferId) {
        let id = self.take_in_flight(id);
        self.stats.failed_transfers += 1;
        let sequence = self.sequences.get_mut(&id).expect("a sequence in flight is known");
        let rank = (sequence.priority, id);
        match std::mem::replace(&mut sequence.place, Place::Waiting) {
            Place::Leaving { device, host } => {
                host.release(&mut self.host);
                sequence.place = Place::Device(device);
                self.running.push(id);
            }
            Place::Returning { host, device } => {
                device.release(&mut self.device);
                sequence.failed_returns += 1;
                if sequence.failed_returns < MOST_FAILED_RETURNS {
                    sequence.place = Place::Host(host);
                    self.parked.insert(rank);
                } else {
                    sequence.failed_returns = 0;
                    sequence.counters.recomputed_tokens += host.len() as u64;
                    self.stats.recomputed += 1;
                    host.release(&mut self.host);
                    self.waiting.insert(rank);
                }
            }
            other => unreachable!("a sequence in flight is not {other:?}"),
        }
        self.end_if_cancelled(id);
    }

    fn take_in_flight(&mut self, id: TransferId) -> SequenceId {
        let index = self.in_flight.iter().position(|transfer| transfer.id == id);
        self.in_flight.swap_remove(index.expect("only planned transfers are reported")).sequence
    }

    fn end_if_cancelled(&mut self, id: SequenceId) {
        if self.sequences[&id].cancelled {
            self.end(id);
        }
    }

    pub(super) fn next_transfer(&mut self) -> TransferId {
        self.next_transfer += 1;
        TransferId(self.next_transfer)
    }
}

/// The copy of all computed units of `source` to the first units of `target`.
pub(super) fn transfer(
    id: TransferId,
    direction: Direction,
    source: &SequenceState,
    target: &SequenceState,
) -> Transfer {
    let used = blocks_for(source.len());
    let blocks = source.table().ids().take(used).zip(target.table().ids()).collect();
    Transfer { id, direction, blocks, slot: (source.slot().id(), target.slot().id()) }
}
