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
    /// Parked sequences return in order of class, the oldest first; the first that does not fit
    /// holds up those behind it. None returns before a waiting one of a lower number.
    pub(super) fn bring_back(&mut self, step: &mut Planning) {
        let waiting_class = self.waiting.first().map_or(i32::MAX, |rank| rank.0);
        while let Some(rank) = self.parked.first().copied() {
            if rank.0 > waiting_class || !self.has_place() || !self.start_return(rank.1, step) {
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

    /// Waiting sequences come in order of class, then of arrival. One that does not fit may be
    /// passed by a bounded number of smaller ones. None passes a parked one of its class.
    pub(super) fn admit(&mut self, step: &mut Planning) {
        let parked_class = self.parked.first().map_or(i64::MAX, |rank| i64::from(rank.0));
        let mut blocked = 0;
        let mut after = Bound::Unbounded;
        while let Some(rank) = self.waiting.range((after, Bound::Unbounded)).next().copied() {
            if parked_class <= i64::from(rank.0) || !self.has_budget(rank.1, step) {
                break;
            }
            if self.has_place() && self.try_admit(rank) {
                self.skipped = if blocked > 0 { self.skipped + 1 } else { 0 };
                self.run(rank.1, Form::Chunk, step);
                self.run(rank.1, Form::Step, step);
                continue;
            }
            blocked += 1;
            if blocked > LOOK_AHEAD || self.skipped >= MOST_SKIPS || !self.has_place() {
                break;
            }
            after = Bound::Excluded(rank);
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

    /// Takes all units of a waiting sequence's known tokens, above the watermark, or none.
    fn try_admit(&mut self, rank: Rank) -> bool {
        let sequence = &self.sequences[&rank.1];
        let tokens = sequence.tokens.len();
        let watermark = if self.on_device() == 0 { 0 } else { self.limits.watermark_pages };
        if !self.device.fits_above(watermark, blocks_for(tokens), 1) {
            #[cfg(feature = "faults")]
            super::faults::keep_unit(self);
            return false;
        }
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
        let first = match (parked, waiting) {
            (Some(parked), Some(waiting)) if waiting.0 < parked.0 => waiting,
            (Some(first), _) | (None, Some(first)) => first,
            (None, None) => return,
        };
        let (class, blocks) = (first.0, blocks_for(self.sequences[&first.1].tokens.len()));
        let lack = Lack { blocks, slots: 1, places: usize::from(!self.has_place()) };
        if lack.places > 0 || !self.device.fits(blocks, 1) {
            self.push_out_above(class, &lack, step);
        }
    }

    /// Adds a sequence to those that run: behind all of its class and of lower numbers, so that
    /// these have their units before it has.
    pub(super) fn start_running(&mut self, id: SequenceId) {
        let class = self.sequences[&id].priority;
        let behind = |other: &SequenceId| self.sequences[other].priority <= class;
        let at = self.running.partition_point(behind);
        self.running.insert(at, id);
    }

    /// Sequences that hold device memory.
    pub(super) fn on_device(&self) -> usize {
        self.running.len() + self.in_flight.len()
    }
}
