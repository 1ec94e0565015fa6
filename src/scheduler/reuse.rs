//! Prefix reuse: what a sequence need not compute, who waits for whom, and what the tree is given.
//!
//! ```text
//! submit            a ghost in the tree; who runs and shares the prompt is to leave a snapshot
//! admission         the deepest state, held; or wait for one that a running sequence will leave
//! plan, last        slots for snapshots that spans pass over, from what nobody needs; they enter
//!                   the tree, held by the plan until its commit
//! end               the state itself enters the tree
//! ```

use std::cmp::Reverse;

use checkpoints::{Lineage, Match, Prefix, PrefixTree, common_tokens};
use state_pool::{BLOCK_LEN, SequenceState, StatePool};

#[cfg(feature = "faults")]
use super::faults::Fault;
use super::limits::Reuse;
use super::plan::Form;
use super::prompt::End;
use super::queue::Rank;
use super::sequence::{Sequence, SequenceId};
use super::{Planning, Scheduler, blocks_for};

/// Sequences that wait for a snapshot of one that runs.
#[derive(Debug)]
pub(super) struct Follower {
    rank: Rank,
    leader: SequenceId,
    /// The snapshot's position.
    position: usize,
}

impl Follower {
    /// Its place in the queue.
    pub(super) fn rank(&self) -> Rank {
        self.rank
    }
}

impl Scheduler {
    /// The rules of reuse, if there is any.
    fn reuse(&self) -> Option<(&PrefixTree, &Reuse)> {
        Some((self.tree.as_ref()?, self.limits.reuse.as_ref()?))
    }

    /// Tells the tree of a prompt that waits, and whoever runs and has its beginning to leave a
    /// snapshot where the two part.
    pub(super) fn announce(&mut self, id: SequenceId) {
        let Some(tree) = &mut self.tree else { return };
        let newcomer = self.sequences.get_mut(&id).expect("it was just submitted");
        newcomer.is_noted = tree.add_waiting(newcomer.cache_salt.as_deref(), &newcomer.tokens);
        let newcomer = &self.sequences[&id];
        let reuse = self.limits.reuse.as_ref().expect("a tree has rules");
        if !reuse.placement.junctions {
            return;
        }
        let grid = if self.limits.is_recurrent() { reuse.grid_tokens } else { BLOCK_LEN };
        let parting = |other: &SequenceId| {
            let other = &self.sequences[other];
            let end = other.prompt_len;
            let runs = other.computed() < end && other.salt() == newcomer.salt();
            let common =
                if runs { common_tokens(&other.tokens[..end], &newcomer.tokens) } else { 0 };
            let position = common - common % grid;
            (position > other.computed()).then_some((other.id, position))
        };
        let partings: Vec<_> = self.running.iter().filter_map(parting).collect();
        for (id, position) in partings {
            let wanted = &mut self.sequence_mut(id).wanted;
            if let Err(at) = wanted.binary_search(&position) {
                wanted.insert(at, position);
            }
        }
    }

    /// Takes a prompt out of the ghosts and of the backlog: it waits no more.
    pub(super) fn forget_ghost(&mut self, id: SequenceId) {
        let sequence = self.sequences.get_mut(&id).expect("it is known");
        self.waiting_tokens -= std::mem::take(&mut sequence.backlog);
        if std::mem::take(&mut sequence.is_noted) {
            let tree = self.tree.as_mut().expect("who is noted is noted in the tree");
            let prompt = &sequence.tokens[..sequence.prompt_len];
            tree.remove_waiting(sequence.cache_salt.as_deref(), prompt);
        }
    }

    /// What the tree knows of a waiting sequence's tokens.
    pub(super) fn look_up(&self, id: SequenceId) -> Match {
        let Some((tree, reuse)) = self.reuse() else { return Match::default() };
        let sequence = &self.sequences[&id];
        #[allow(unused_mut, reason = "a fault is planted below")]
        let mut options = sequence.match_options(reuse.exact_only);
        #[cfg(feature = "faults")]
        super::faults::beyond_prompt(self, &mut options);
        tree.match_prefix(sequence.salt(), &sequence.tokens, options)
    }

    /// A waiting sequence leaves the queue while one that runs and ranks no later is about to leave
    /// a snapshot that it can use, deeper than what there is (DESIGN.md rule 11).
    pub(super) fn follow(&mut self, rank: Rank, found: &Match) -> bool {
        let Some((_, reuse)) = self.reuse() else { return false };
        let follower = &self.sequences[&rank.id];
        let options = follower.match_options(reuse.exact_only);
        let there = found.usable.map_or(0, |usable| usable.position);
        let leads = |id: &SequenceId| {
            let leader = &self.sequences[id];
            let advances = leader.rank() <= rank && self.advances(leader);
            let is_exact = leader.origin.lineage == Lineage::Exact;
            if !advances || options.exact_only && !is_exact || leader.salt() != follower.salt() {
                return None;
            }
            leader.wanted.last().filter(|last| **last > there)?;
            let prompt = &leader.tokens[..leader.prompt_len];
            let common = common_tokens(prompt, &follower.tokens).min(options.limit_tokens);
            let position = leader.wanted.iter().rev().find(|position| **position <= common)?;
            (*position > there).then_some((*position, Reverse(leader.id)))
        };
        let Some((position, leader)) = self.running.iter().filter_map(leads).max() else {
            return false;
        };
        self.waiting.remove(rank, follower.ticket);
        self.stats.followed += 1;
        self.followers.push(Follower { rank, leader: leader.0, position });
        true
    }

    /// Whether this step or the last computes something of a sequence.
    fn advances(&self, sequence: &Sequence) -> bool {
        sequence.planned_in + 1 >= self.stats.steps
    }

    /// Followers whose snapshot is there, or will not be soon, are back in the queue.
    pub(super) fn release_followers(&mut self) {
        let mut followers = std::mem::take(&mut self.followers);
        followers.retain(|follower| {
            let leader = self.sequences.get(&follower.leader);
            #[cfg(feature = "faults")]
            if leader.is_none() && self.fault == Some(Fault::LeaderForgotten) {
                return true;
            }
            let leads = leader.is_some_and(|leader| {
                leader.state().is_some()
                    && self.advances(leader)
                    && leader.wanted.binary_search(&follower.position).is_ok()
            });
            if !leads {
                self.start_waiting(follower.rank.id);
            }
            leads
        });
        self.followers = followers;
    }

    /// A follower that ends.
    pub(super) fn forget_follower(&mut self, id: SequenceId) {
        self.followers.retain(|follower| follower.rank.id != id);
    }

    /// Where a sequence that is admitted is to leave snapshots.
    pub(super) fn set_wanted(&mut self, id: SequenceId, found: &Match) {
        let Some((tree, reuse)) = self.reuse() else { return };
        let sequence = &self.sequences[&id];
        let prompt = &sequence.tokens[..sequence.prompt_len];
        let mut wanted =
            tree.wanted(sequence.salt(), prompt, found, &sequence.marks, &reuse.placement);
        // Without states the blocks themselves are kept, as soon as they are all there.
        let blocks = prompt.len() / BLOCK_LEN * BLOCK_LEN;
        if !self.limits.is_recurrent() && blocks > sequence.origin.position {
            wanted.push(blocks);
        }
        self.sequence_mut(id).wanted = wanted;
    }

    /// Gives snapshots that this plan's spans pass over their slots, from what is free or held by
    /// a checkpoint of less worth; one that gets none is left out. They enter the tree here, so
    /// that the next one is weighed beside them; until its commit the plan holds what is not
    /// computed yet, and nobody is admitted any more in it.
    pub(super) fn plan_snapshots(&mut self, step: &mut Planning) {
        let Some(tree) = &mut self.tree else { return };
        let is_recurrent = self.limits.is_recurrent();
        for span in step.plan.spans.iter_mut().filter(|span| span.form == Form::Chunk) {
            // A shadow leaves nothing.
            let Some(sequence) = self.sequences.get_mut(&span.sequence) else { continue };
            let passed = sequence.wanted.partition_point(|at| *at <= span.start + span.rows);
            let wanted: Vec<usize> = sequence.wanted.drain(..passed).collect();
            for position in wanted {
                let saved = position - sequence.last_kept;
                let mut shared = None;
                if is_recurrent {
                    // Above no watermark: a checkpoint goes when its place is wanted.
                    if !tree.room_for(&mut self.device, 0, saved, blocks_for(saved)) {
                        tree.note_left_out(sequence.prefix(position));
                        continue;
                    }
                    let slot = self.device.alloc_slot().expect("room was made");
                    span.snapshots.push((position - span.start, slot.id()));
                    shared = Some(self.device.share(&slot));
                    step.plan.kept.push(slot);
                }
                sequence.last_kept = position;
                sequence.reuse.kept_tokens = position;
                let state = sequence.state().expect("it is planned");
                let (prefix, blocks) = (sequence.prefix(position), state.table().as_slice());
                tree.insert(&mut self.device, prefix, blocks, shared);
            }
        }
    }

    /// Gives the tree the state of a sequence that ends, or the pool its units.
    pub(super) fn keep_end(&mut self, sequence: &Sequence, state: SequenceState, end: End) {
        let keeps = self.limits.reuse.as_ref().is_some_and(|reuse| reuse.keep_turn_ends);
        let Some(tree) = self.tree.as_mut() else { return state.release(&mut self.device) };
        match end {
            End::Finished | End::Cancelled if keeps && sequence.may_keep(state.len()) => {
                #[allow(unused_mut, reason = "a fault is planted below")]
                let mut len = state.len();
                #[cfg(feature = "faults")]
                if self.fault == Some(Fault::KeyedOneOff) {
                    len = (len - 1).max(1);
                }
                let (prefix, is_recurrent) = (sequence.prefix(len), self.limits.is_recurrent());
                keep_state(tree, &mut self.device, prefix, state, is_recurrent);
                return;
            }
            End::Finished | End::Cancelled => {}
            End::Cut => self.stats.turn_ends_left_out += 1,
            End::Failed => {
                // What it went on from may be at fault as well.
                let from = sequence.origin.position.saturating_sub(1);
                let pools = (&mut self.device, &mut self.host);
                tree.discard(pools, sequence.salt(), &sequence.tokens, from);
            }
        }
        state.release(&mut self.device);
    }

    /// Gives all that is kept for reuse back. What is being copied stays until it has arrived.
    pub fn clear_prefix_cache(&mut self) {
        if let Some(audit) = self.audit.take() {
            self.release_audit(audit);
        }
        if let Some(tree) = &mut self.tree {
            tree.clear(&mut self.device);
            tree.clear(&mut self.host);
        }
    }
}

/// Donates all units of a state that nobody writes any more.
fn keep_state(
    tree: &mut PrefixTree,
    pool: &mut StatePool,
    prefix: Prefix<'_>,
    state: SequenceState,
    is_recurrent: bool,
) {
    let (table, slot, _) = state.into_parts();
    let slot = match is_recurrent {
        true => Some(slot),
        false => {
            pool.release(slot);
            None
        }
    };
    tree.insert(pool, prefix, table.as_slice(), slot);
    table.release(pool);
}
