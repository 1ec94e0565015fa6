//! Who comes onto the device: parked sequences first, then waiting ones.

use std::ops::Bound;

use checkpoints::{Match, MissReason, PrefixTree, Usable};
use state_pool::{BLOCK_LEN, SequenceState, Tier};

use super::audit::Audited;
use super::plan::{Direction, Form};
use super::queue::Rank;
use super::sequence::{HostSlot, Place, SequenceId};
use super::{Blocked, Lack, Planning, Scheduler, blocks_for};
use crate::config::Batching;

/// Waiting sequences that are looked at in a step beyond one that does not fit.
const LOOK_AHEAD: usize = 4;

/// Sequences that may pass a waiting one that does not fit, until it is admitted.
const MOST_SKIPS: usize = 32;

/// What became of a waiting sequence that was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Admission {
    /// It has its units, or they are on their way.
    Admitted,
    /// It waits for a snapshot of one that runs, and holds nobody up.
    Follows,
    /// Its units are held by checkpoints that are being copied to the host.
    Awaits,
    /// Its units are not there.
    Refused,
}

impl Scheduler {
    /// Takes in sequences of a lower number than `below`, all without it: parked ones first, then
    /// waiting ones. Nobody, while one that runs lacks a unit.
    pub(super) fn take_in(&mut self, below: Option<i32>, step: &mut Planning) {
        if step.lacking == 0 {
            let is_in = |priority: i32| below.is_none_or(|below| priority < below);
            self.bring_back(&is_in, step);
            let others_may_come = self.admit(&is_in, step) || !self.followers.is_empty();
            // A batch takes nobody in any more once nobody else could have come in.
            self.is_closed |= self.limits.batching == Batching::Static
                && self.on_device() > 0
                && below.is_none()
                && !others_may_come;
        }
    }

    /// Parked sequences return in order of priority, the oldest first; the first that does not fit
    /// holds up those behind it. None returns before a waiting one of a lower number.
    fn bring_back(&mut self, is_in: &dyn Fn(i32) -> bool, step: &mut Planning) {
        while let Some(rank) = self.parked.first().copied().filter(|rank| is_in(rank.0)) {
            let behind = self.waiting.first().is_some_and(|waiting| waiting.priority < rank.0);
            if behind || self.lacks_place() || !self.start_return(rank.1, step) {
                return;
            }
            self.parked.remove(&rank);
        }
    }

    /// Starts the copy of a parked sequence to the device, unless that has no room for it.
    fn start_return(&mut self, id: SequenceId, step: &mut Planning) -> bool {
        let sequence = &self.sequences[&id];
        let (tokens, len) = (sequence.tokens.len(), sequence.computed());
        let shared = self.share_known_blocks(id, Tier::Device);
        let brought = shared.len();
        let lack = Lack { blocks: blocks_for(tokens) - brought, slots: 1, places: 0 };
        if !self.make_space_without_loss(0, lack.blocks, 1, step) {
            self.blocked.add(Blocked::of(&self.device, 0, &lack));
            for block in shared {
                self.device.put_back(block);
            }
            return false;
        }
        let Some(device) = self.fresh_state(Tier::Device, 0, (tokens, len), shared) else {
            self.blocked.add(Blocked::of(&self.device, 0, &lack));
            return false;
        };
        let place = std::mem::replace(&mut self.sequence_mut(id).place, Place::Waiting);
        let Place::Host(host) = place else { unreachable!("a parked sequence is on the host") };
        self.start_transfer(id, Direction::In, (&host, &device), brought, step);
        self.sequence_mut(id).place = Place::Returning { host, device };
        true
    }

    /// Waiting sequences come in order of priority, then of arrival. One that does not fit may be
    /// passed by a bounded number of smaller ones of its own number. None passes a parked one of
    /// its number. True when more may come in the steps to come, though nobody leaves.
    fn admit(&mut self, is_in: &dyn Fn(i32) -> bool, step: &mut Planning) -> bool {
        if self.is_closed {
            return false;
        }
        let mut others_may_come = false;
        let parked = self.parked.first().map(|rank| rank.0);
        let mut blocked: Option<i32> = None;
        let mut passed_over = 0;
        let mut after = Bound::Unbounded;
        let mut only_long = None;
        while let Some(rank) = self.next_waiting(after, only_long) {
            let held_up = parked.is_some_and(|parked| parked <= rank.priority)
                || blocked.is_some_and(|blocked| blocked < rank.priority);
            if held_up || !is_in(rank.priority) || self.lacks_place() {
                break;
            }
            if !self.has_budget(rank.id, step) {
                return true;
            }
            if self.leaves_place_to_long(rank.id) {
                only_long = Some(rank.priority);
                continue;
            }
            match self.try_admit(rank, step) {
                Admission::Follows => continue,
                Admission::Admitted => {
                    self.skipped = if blocked.is_some() { self.skipped + 1 } else { 0 };
                    self.run(rank.id, Form::Chunk, step);
                    self.run(rank.id, Form::Step, step);
                    continue;
                }
                Admission::Awaits => others_may_come = true,
                Admission::Refused => {}
            }
            (blocked, after) = (Some(rank.priority), Bound::Excluded(rank));
            passed_over += 1;
            if passed_over > LOOK_AHEAD || self.skipped >= MOST_SKIPS {
                break;
            }
        }
        others_may_come
    }

    /// Who is looked at behind `after`; only long prompts up to a number, if there is one.
    fn next_waiting(&self, after: Bound<Rank>, only_long: Option<i32>) -> Option<Rank> {
        let Some(priority) = only_long else { return self.waiting.next(after) };
        self.waiting.next_long(after).filter(|rank| rank.priority <= priority)
    }

    /// Whether a short prompt may not have one of the places that are left, since as many are kept
    /// for long ones and one of these waits that ranks no later by its number.
    fn leaves_place_to_long(&self, id: SequenceId) -> bool {
        let Some(reserve) = self.limits.reserve_long else { return false };
        let sequence = &self.sequences[&id];
        let first = self.waiting.next_long(Bound::Unbounded);
        if sequence.ticket.is_long || first.is_none_or(|long| long.priority > sequence.priority) {
            return false;
        }
        let is_long = |id: &&SequenceId| self.sequences[*id].ticket.is_long;
        let long = self.running.iter().filter(is_long).count();
        // One place at least is for all.
        let most = self.max_num_seqs().saturating_sub(1);
        let places = reserve.places.saturating_sub(long).min(most);
        self.max_num_seqs().saturating_sub(self.on_device()) <= places
    }

    /// Sequences that may hold device memory at once, now.
    fn max_num_seqs(&self) -> usize {
        self.caps.max_num_seqs.unwrap_or(usize::MAX).min(self.limits.max_num_seqs)
    }

    /// Whether the step has tokens for one more.
    fn has_budget(&self, id: SequenceId, step: &Planning) -> bool {
        let budget = step.budget.for_form(Form::Chunk);
        self.sequences[&id].next_rows(budget, self.limits.grid) > 0
    }

    /// Whether one more sequence may hold device memory.
    fn has_place(&self) -> bool {
        self.on_device() < self.max_num_seqs()
    }

    /// Whether one that wants onto the device finds no place, which is noted.
    fn lacks_place(&mut self) -> bool {
        let lacks = !self.has_place();
        self.blocked.places |= lacks;
        lacks
    }

    /// Pages that admission leaves free.
    pub(super) fn watermark(&self) -> usize {
        if self.on_device() == 0 { 0 } else { self.limits.watermark_pages }
    }

    /// Blocks of a sequence's known tokens.
    pub(super) fn known_blocks(&self, id: SequenceId) -> usize {
        blocks_for(self.sequences[&id].tokens.len())
    }

    /// Takes all units of a waiting sequence's known tokens, or none: those of the deepest state it
    /// may go on from as shares, or as a copy from the host, the others fresh.
    fn try_admit(&mut self, rank: Rank, step: &mut Planning) -> Admission {
        let id = rank.id;
        let moment = (self.device.given_up(), self.tree.as_ref().map_or(0, PrefixTree::uses));
        if let Some((at, blocked)) = self.sequences[&id].refused_at
            && at == moment
        {
            self.blocked.add(blocked);
            return Admission::Refused;
        }
        let mut found = self.look_up(id);
        if self.follow(rank, &found) {
            return Admission::Follows;
        }
        if !self.make_space_for_prompt(id, &mut found, step) {
            self.note_blocked(id, &found);
            return Admission::Awaits;
        }
        let known = self.tree.as_ref().zip(found.usable);
        let mut histories = known.map_or_else(Vec::new, |(tree, usable)| tree.histories(&usable));
        let mut place = match &found.usable {
            Some(usable) if usable.tier == Tier::Host => self.start_promotion(id, usable, step),
            Some(usable) => self.resume(id, usable).map(Place::Device),
            None => self.start_cold(id).map(Place::Device),
        };
        // When nobody will give units back, a state that takes too much to go on from is let be.
        let nobody_will = self.on_device() == 0 && self.demotions.is_empty();
        if place.is_none() && found.usable.is_some() && nobody_will {
            (found.usable, found.miss) = (None, Some(MissReason::Evicted));
            histories.clear();
            place = self.start_cold(id).map(Place::Device);
        }
        let Some(place) = place else {
            let blocked = self.note_blocked(id, &found);
            // When nobody holds anything that will be given back, it is looked at in every step.
            self.sequence_mut(id).refused_at = (self.on_device() > 0).then_some((moment, blocked));
            #[cfg(feature = "faults")]
            super::faults::keep_unit(self);
            return Admission::Refused;
        };
        self.waiting.remove(rank, self.sequences[&id].ticket);
        self.forget_ghost(id);
        if let (Some(tree), Some(usable)) = (&mut self.tree, &found.usable) {
            tree.note_resumed(usable);
        }
        let sequence = self.sequences.get_mut(&id).expect("it was in the queue");
        if sequence.resumes(&found, histories) {
            let reuse = sequence.reuse;
            self.stats.admitted_tokens += sequence.prompt_len as u64;
            self.stats.matched_tokens += reuse.matched_tokens as u64;
            self.stats.cached_tokens += reuse.cached_tokens as u64;
            if matches!(place, Place::Promoting { .. }) {
                self.stats.host_cached_tokens += reuse.cached_tokens as u64;
            }
        }
        // Steps to come take no memory of the program.
        sequence.tokens.reserve_exact(sequence.max_len - sequence.tokens.len());
        sequence.place = place;
        sequence.ticket = sequence.ticket.first();
        let is_mixed = sequence.is_mixed;
        self.stats.replayed_otherwise += u64::from(is_mixed);
        self.set_wanted(id, &found);
        if self.sequences[&id].state().is_some() {
            self.start_running(id);
            self.start_audit(id, Audited::Checkpoint);
        }
        Admission::Admitted
    }

    /// Notes which units a sequence that was refused did not find, with what was found for it.
    fn note_blocked(&mut self, id: SequenceId, found: &Match) -> Blocked {
        let there = found.usable.filter(|usable| usable.tier == Tier::Device);
        let blocks = self.known_blocks(id) - there.map_or(0, |usable| usable.position / BLOCK_LEN);
        let lack = Lack { blocks, slots: usize::from(self.limits.is_recurrent()), places: 0 };
        let blocked = Blocked::of(&self.device, self.watermark(), &lack);
        self.blocked.add(blocked);
        blocked
    }

    fn start_cold(&mut self, id: SequenceId) -> Option<SequenceState> {
        let (tokens, max_len) = (self.sequences[&id].tokens.len(), self.sequences[&id].max_len);
        let watermark = self.watermark();
        let mut state = self.fresh_state(Tier::Device, watermark, (tokens, 0), Vec::new())?;
        state.reserve(max_len);
        Some(state)
    }

    /// Shares of a state on the device, and fresh units for what follows it. When nothing runs that
    /// will give units back, the tree hands the state over.
    fn resume(&mut self, id: SequenceId, usable: &Usable) -> Option<SequenceState> {
        let (tokens, max_len) = (self.sequences[&id].tokens.len(), self.sequences[&id].max_len);
        let tree = self.tree.as_ref().expect("what is usable is in the tree");
        let mut state = tree.hold(usable, &mut self.device).ok()?;
        #[cfg(feature = "faults")]
        {
            state = super::faults::at_match(self, id, state);
        }
        // The tail block is written on, and so is the slot: copies of both are to come.
        let watermark = self.watermark();
        let full = usable.position / BLOCK_LEN;
        let slots = usize::from(self.limits.is_recurrent());
        let mut fits = self.make_space(Tier::Device, watermark, blocks_for(tokens) - full, slots);
        if !fits && self.on_device() == 0 && self.demotions.is_empty() {
            self.hand_over(state.slot().id());
            let missing = state.missing_blocks(tokens);
            fits = self.device.fits(missing, 0) && state.is_slot_sole(&self.device);
        }
        if !fits {
            state.put_back(&mut self.device);
            return None;
        }
        state.reserve(max_len);
        state.grow(&mut self.device, tokens).expect("room was made");
        Some(state)
    }

    /// Starts the copy of a checkpoint on the host, but for the blocks that the device has.
    fn start_promotion(
        &mut self,
        id: SequenceId,
        usable: &Usable,
        step: &mut Planning,
    ) -> Option<Place> {
        let tokens = self.sequences[&id].tokens.len();
        let tree = self.tree.as_ref().expect("what is usable is in the tree");
        let (blocks, slot) = if usable.is_packed {
            let (blocks, slot) = tree.hold_packed(usable, &mut self.host);
            (blocks, HostSlot::Packed(slot))
        } else {
            let (blocks, slot, _) = tree.hold(usable, &mut self.host).ok()?.into_parts();
            (blocks, HostSlot::Plain(slot))
        };
        let mut shared = tree.share_blocks(usable, &mut self.device);
        // A tail block is written on: it is copied from the host.
        for tail in shared.split_off(shared.len().min(usable.position / BLOCK_LEN)) {
            self.device.put_back(tail);
        }
        let (watermark, lens) = (self.watermark(), (tokens, usable.position));
        let copied = shared.len()..blocks.len();
        let Some(device) = self.fresh_state(Tier::Device, watermark, lens, shared) else {
            blocks.release(&mut self.host);
            slot.release(&mut self.host);
            return None;
        };
        let copy = slot.copy_to(device.slot().id());
        self.start_copy(id, Direction::In, (&blocks, device.table()), copied, copy, step);
        Some(Place::Promoting { blocks, slot, device })
    }

    /// Under `priority` the first sequence that is not on the device pushes out a running one of a
    /// strictly higher number, when it lacks a place or memory.
    pub(super) fn make_way(&mut self, step: &mut Planning) {
        // Who waits for the end of a batch is helped by nobody's leaving.
        let waiting = self.waiting.first().filter(|_| !self.is_closed);
        let parked = self.parked.first();
        let (first, watermark) = match (parked, waiting) {
            (_, Some(waiting)) if parked.is_none_or(|parked| waiting.priority < parked.0) => {
                ((waiting.priority, waiting.id), self.watermark())
            }
            (Some(parked), _) => (*parked, 0),
            (None, _) => return,
        };
        let all = self.known_blocks(first.1);
        if self.has_place() && self.device.fits_above(watermark, all, 1) {
            return;
        }
        // What it can go on from it need not take; a parked one shares less, and asks for all.
        let shared = match self.sequences[&first.1].place {
            Place::Waiting => self.look_up(first.1).usable.filter(|at| at.tier == Tier::Device),
            _ => None,
        };
        let shared = shared.map_or(0, |usable| usable.position / BLOCK_LEN);
        let blocks = all - shared;
        let could_free = |tree: &PrefixTree| tree.could_free(&self.device, watermark, blocks, 1);
        let has_units = self.device.fits_above(watermark, blocks, 1)
            || self.tree.as_ref().is_some_and(could_free);
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
