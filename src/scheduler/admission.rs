//! Who comes onto the device: parked sequences first, then waiting ones.

use std::ops::Bound;

use state_pool::{SequenceState, Tier};

use super::plan::{Direction, Form};
use super::sequence::{Place, SequenceId};
use super::{Lack, Planning, Rank, Scheduler, blocks_for, fresh_state};

/// Waiting sequences that are looked at in a step beyond one that does not fit.
const LOOK_AHEAD: usize = 4;

/// Sequences that may pass a waiting one that does not fit, until it is admitted.
const MOST_SKIPS: usize = 32;

impl Scheduler {
    /// Takes in sequences of a lower number than `below`, all without it: parked ones first, then
    /// waiting ones. Nobody, while one that runs lacks a unit.
    pub(super) fn take_in(&mut self, below: Option<i32>, step: &mut Planning) {
        if step.lacking == 0 {
            let is_in = |rank: &Rank| below.is_none_or(|below| rank.0 < below);
            self.bring_back(&is_in, step);
            self.admit(&is_in, step);
        }
    }

    /// Parked sequences return in order of priority, the oldest first; the first that does not fit
    /// holds up those behind it. None returns before a waiting one of a lower number.
    fn bring_back(&mut self, is_in: &dyn Fn(&Rank) -> bool, step: &mut Planning) {
        while let Some(rank) = self.parked.first().copied().filter(is_in) {
            let behind = self.waiting.first().is_some_and(|waiting| waiting.0 < rank.0);
            if behind || !self.has_place() || !self.start_return(rank.1, step) {
                return;
            }
            self.parked.remove(&rank);
        }
    }

    /// Starts the copy of a parked sequence to the device, unless that has no room for it.
    fn start_return(&mut self, id: SequenceId, step: &mut Planning) -> bool {
        let sequence = &self.sequences[&id];
        let (tokens, len) = (sequence.tokens.len(), sequence.computed());
        let (shared, sibling) = self.sibling_blocks(sequence, Tier::Device);
        let sibling = sibling.and_then(|id| self.sequences[&id].place.settled(Tier::Device));
        let Some(device) = fresh_state(&mut self.device, tokens, len, shared, sibling) else {
            return false;
        };
        let place = std::mem::replace(&mut self.sequence_mut(id).place, Place::Waiting);
        let Place::Host(host) = place else { unreachable!("a parked sequence is on the host") };
        self.start_transfer(id, Direction::In, (&host, &device), shared, step);
        self.sequence_mut(id).place = Place::Returning { host, device };
        true
    }

    /// Waiting sequences come in order of priority, then of arrival. One that does not fit may be
    /// passed by a bounded number of smaller ones of its own number. None passes a parked one of
    /// its number.
    fn admit(&mut self, is_in: &dyn Fn(&Rank) -> bool, step: &mut Planning) {
        let parked = self.parked.first().map(|rank| rank.0);
        let mut blocked: Option<i32> = None;
        let mut passed_over = 0;
        let mut after = Bound::Unbounded;
        while let Some(rank) = self.waiting.range((after, Bound::Unbounded)).next().copied() {
            let held_up = parked.is_some_and(|parked| parked <= rank.0)
                || blocked.is_some_and(|blocked| blocked < rank.0);
            if held_up || !is_in(&rank) || !self.has_budget(rank.1, step) || !self.has_place() {
                break;
            }
            if self.try_admit(rank) {
                self.skipped = if blocked.is_some() { self.skipped + 1 } else { 0 };
                self.run(rank.1, Form::Chunk, step);
                self.run(rank.1, Form::Step, step);
                continue;
            }
            (blocked, after) = (Some(rank.0), Bound::Excluded(rank));
            passed_over += 1;
            if passed_over > LOOK_AHEAD || self.skipped >= MOST_SKIPS {
                break;
            }
        }
    }

    /// Whether the step has tokens for one more.
    fn has_budget(&self, id: SequenceId, step: &Planning) -> bool {
        let budget = step.budget.for_form(Form::Chunk);
        self.sequences[&id].next_rows(budget, self.limits.grid) > 0
    }

    /// Whether one more sequence may hold device memory.
    fn has_place(&self) -> bool {
        self.on_device() < self.limits.max_num_seqs
    }

    /// Whether the units of a waiting sequence's known tokens are there, above the watermark.
    fn has_units(&self, id: SequenceId) -> bool {
        let watermark = if self.on_device() == 0 { 0 } else { self.limits.watermark_pages };
        self.device.fits_above(watermark, self.known_blocks(id), 1)
    }

    /// Blocks of a sequence's known tokens.
    fn known_blocks(&self, id: SequenceId) -> usize {
        blocks_for(self.sequences[&id].tokens.len())
    }

    /// Takes all units of a waiting sequence's known tokens, or none.
    fn try_admit(&mut self, rank: Rank) -> bool {
        if !self.has_units(rank.1) {
            #[cfg(feature = "faults")]
            super::faults::keep_unit(self);
            return false;
        }
        let tokens = self.sequences[&rank.1].tokens.len();
        let mut state = SequenceState::allocate(&mut self.device, tokens).expect("it fits");
        let sequence = self.sequence_mut(rank.1);
        // Steps to come take no memory of the program.
        sequence.tokens.reserve_exact(sequence.max_len - tokens);
        state.reserve(sequence.max_len);
        sequence.place = Place::Device(state);
        self.waiting.remove(&rank);
        self.start_running(rank.1);
        true
    }

    /// Under `priority` the first sequence that is not on the device pushes out a running one of a
    /// strictly higher number, when it lacks a place or memory.
    pub(super) fn make_way(&mut self, step: &mut Planning) {
        let (parked, waiting) = (self.parked.first(), self.waiting.first());
        let (first, has_units) = match (parked, waiting) {
            (_, Some(waiting)) if parked.is_none_or(|parked| waiting.0 < parked.0) => {
                (*waiting, self.has_units(waiting.1))
            }
            (Some(parked), _) => (*parked, self.device.fits(self.known_blocks(parked.1), 1)),
            (None, _) => return,
        };
        let blocks = self.known_blocks(first.1);
        let lack = Lack { blocks, slots: 1, places: usize::from(!self.has_place()) };
        if lack.places > 0 || !has_units {
            self.push_out_above(first.0, &lack, step);
        }
    }

    /// Adds a sequence to those that run: behind all of its and of lower numbers, so that these
    /// have their units before it has.
    pub(super) fn start_running(&mut self, id: SequenceId) {
        let priority = self.sequences[&id].priority;
        let behind = |other: &SequenceId| self.sequences[other].priority <= priority;
        let at = self.running.partition_point(behind);
        self.running.insert(at, id);
    }

    /// Sequences that hold device memory.
    pub(super) fn on_device(&self) -> usize {
        self.running.len() + self.in_flight.len()
    }
}
