//! Who comes onto the device: parked sequences first, then waiting ones.

use state_pool::SequenceState;

use super::plan::{Direction, Form};
use super::preemption::transfer;
use super::sequence::{Place, SequenceId};
use super::{InFlight, Lack, Planning, Policy, Rank, Scheduler, blocks_for, fresh_state};

/// Waiting sequences that are looked at in a step beyond one that does not fit.
const LOOK_AHEAD: usize = 4;

/// Sequences that may pass a waiting one that does not fit, until it is admitted.
const MOST_SKIPS: usize = 32;

impl Scheduler {
    /// Parked sequences return in order of class, the oldest first; the first that does not fit
    /// holds up those behind it.
    pub(super) fn bring_back(&mut self, step: &mut Planning) {
        while let Some(rank) = self.parked.first().copied() {
            let id = rank.1;
            let sequence = &self.sequences[&id];
            let (tokens, len) = (sequence.tokens.len(), sequence.computed());
            if self.on_device() >= self.limits.max_num_seqs
                || !self.device.fits(blocks_for(tokens), 1)
            {
                return;
            }
            self.parked.remove(&rank);
            let device = fresh_state(&mut self.device, tokens, len).expect("it fits");
            let sequence = self.sequences.get_mut(&id).expect("a parked sequence is known");
            let Place::Host(host) = std::mem::replace(&mut sequence.place, Place::Waiting) else {
                unreachable!("a parked sequence is on the host")
            };
            let transfer_id = self.next_transfer();
            let copy = transfer(transfer_id, Direction::In, &host, &device);
            step.plan.transfers.push(copy);
            let direction = Direction::In;
            self.in_flight.push(InFlight { id: transfer_id, sequence: id, direction });
            let sequence = self.sequences.get_mut(&id).expect("a parked sequence is known");
            sequence.counters.swapped_bytes += self.limits.cost.bytes(blocks_for(len));
            sequence.place = Place::Returning { host, device };
        }
    }

    /// Waiting sequences come in order of class, then of arrival. One that does not fit may be
    /// passed by a bounded number of smaller ones. None passes a parked one of its class.
    pub(super) fn admit(&mut self, step: &mut Planning) {
        let parked_class = self.parked.first().map(|rank| rank.0);
        let mut blocked = 0;
        let mut after: Option<Rank> = None;
        loop {
            let next = match after {
                None => self.waiting.first().copied(),
                Some(rank) => {
                    let beyond = (std::ops::Bound::Excluded(rank), std::ops::Bound::Unbounded);
                    self.waiting.range(beyond).next().copied()
                }
            };
            let Some(rank) = next else { break };
            if parked_class.is_some_and(|class| class <= rank.0) || !self.may_start(rank.1, step) {
                break;
            }
            if self.try_admit(rank) {
                self.skipped = if blocked > 0 { self.skipped + 1 } else { 0 };
                self.run(rank.1, Form::Chunk, step);
                self.run(rank.1, Form::Step, step);
                continue;
            }
            if blocked == 0 && self.limits.policy == Policy::Priority {
                self.push_out_for(rank, step);
            }
            blocked += 1;
            if blocked > LOOK_AHEAD || self.skipped >= MOST_SKIPS {
                break;
            }
            after = Some(rank);
        }
    }

    /// Whether the step has tokens and the device a place for one more.
    fn may_start(&self, id: SequenceId, step: &Planning) -> bool {
        let sequence = &self.sequences[&id];
        let budget = step.budget.for_form(Form::Chunk);
        self.on_device() < self.limits.max_num_seqs
            && sequence.next_rows(budget, self.limits.grid) > 0
    }

    /// Takes all units of a waiting sequence's known tokens, above the watermark, or none.
    fn try_admit(&mut self, rank: Rank) -> bool {
        let tokens = self.sequences[&rank.1].tokens.len();
        let watermark = if self.on_device() == 0 { 0 } else { self.limits.watermark_pages };
        if !self.device.fits_above(watermark, blocks_for(tokens), 1) {
            return false;
        }
        let state = SequenceState::allocate(&mut self.device, tokens).expect("it fits");
        let sequence = self.sequences.get_mut(&rank.1).expect("a waiting sequence is known");
        sequence.place = Place::Device(state);
        self.waiting.remove(&rank);
        self.running.push(rank.1);
        true
    }

    /// Under `priority` a waiting sequence pushes out running ones of a strictly higher number.
    fn push_out_for(&mut self, rank: Rank, step: &mut Planning) {
        let lower = |scheduler: &Scheduler| {
            let classes = scheduler.running.iter().map(|id| scheduler.sequences[id].priority);
            classes.max().is_some_and(|class| class > rank.0)
        };
        if lower(self) {
            let blocks = blocks_for(self.sequences[&rank.1].tokens.len());
            let lack = Lack { blocks, slots: 1, fork: false };
            self.push_out_above(rank.0, &lack, step);
        }
    }

    /// Sequences that hold device memory.
    pub(super) fn on_device(&self) -> usize {
        self.running.len() + self.in_flight.len()
    }
}
