//! Leaving a tier: states before blocks, the least worthy first.
//!
//! With recurrent layers a checkpoint's slot goes, and with it the blocks up to where another
//! checkpoint of the tier still needs them. Without, a path loses its last blocks, about a
//! kilotoken at most at a time. What is lost in every tier stays as a ghost.

use state_pool::{BLOCK_LEN, StatePool, Tier};

use super::radix::{NodeId, floor_to_block};
use super::{MissReason, PrefixTree, release_all};
use crate::policy::{Candidate, UnitBytes, worth};

/// What goes at once from the end of a path without recurrent layers.
const TRIMMED_TOKENS: usize = 16 * BLOCK_LEN;

impl PrefixTree {
    /// Evicts the least worthy checkpoint of the pool's tier. False if none may go: those whose
    /// units others hold as well, or whose copy to the host is on its way, are passed over.
    ///
    /// A tier's eviction may free no unit of a kind that is missing: ask the pool again.
    pub fn evict_one(&mut self, pool: &mut StatePool) -> bool {
        let least = self.least_worthy(pool, |_| true);
        if let Some(id) = least {
            self.evict(pool, id);
        }
        least.is_some()
    }

    /// Evicts until so many units fit into the pool above a watermark of free pages. False if
    /// they do not fit although nothing more may go; what was evicted by then is gone.
    pub fn free(
        &mut self,
        pool: &mut StatePool,
        watermark_pages: usize,
        blocks: usize,
        slots: usize,
    ) -> bool {
        while !pool.fits_above(watermark_pages, blocks, slots) {
            if !self.evict_one(pool) {
                return false;
            }
        }
        true
    }

    pub fn room_for(&mut self, pool: &mut StatePool, watermark_pages: usize, _saved: usize, _blocks: usize) -> bool {
        while !pool.fits_above(watermark_pages, 0, 1) {
            if !self.evict_one(pool) { return false; }
        }
        true
    }

    /// The checkpoint of the pool's tier that goes first, of those that may go and are asked for.
    pub(super) fn least_worthy(
        &self,
        pool: &StatePool,
        is_asked_for: impl Fn(NodeId) -> bool,
    ) -> Option<NodeId> {
        let layout = pool.layout();
        let sizes = UnitBytes { slot_bytes: layout.slot_bytes, block_bytes: layout.block_bytes };
        let may_go = self.nodes.ids().filter(|id| is_asked_for(*id) && self.may_go(pool, *id));
        may_go.min_by_key(|id| (worth(&self.candidate(pool.tier(), *id), sizes), *id))
    }

    /// True if the pool's tier has a state behind a node that nobody else holds: no sequence that
    /// resumed and still reads it, no copy on its way.
    fn may_go(&self, pool: &StatePool, id: NodeId) -> bool {
        let held = self.nodes[id].value.held(pool.tier());
        if self.options.is_recurrent {
            return held.slot.as_ref().is_some_and(|slot| pool.is_sole(slot));
        }
        let is_last = self.children_in(pool.tier(), id) == 0;
        is_last && held.blocks.last().is_some_and(|block| pool.is_sole(block))
    }

    fn candidate(&self, tier: Tier, id: NodeId) -> Candidate {
        let value = &self.nodes[id].value;
        let mut candidate = Candidate {
            last_used: value.last_used,
            is_spent: value.is_spent,
            saved_tokens: 0,
            slots: usize::from(self.options.is_recurrent),
            blocks: 0,
        };
        let mut is_freed = self.children_in(tier, id) == 0;
        for above in self.nodes.path_up(id) {
            let node = &self.nodes[above];
            let held = node.value.held(tier);
            if above != id {
                if held.slot.is_some() || !self.options.is_recurrent {
                    break;
                }
                is_freed &= self.children_in(tier, above) == 1;
            }
            candidate.saved_tokens += node.tokens.len();
            candidate.blocks += if is_freed { held.blocks.len() } else { 0 };
        }
        candidate
    }

    /// How many children hold units in a tier, counted up to two.
    fn children_in(&self, tier: Tier, id: NodeId) -> usize {
        let holds = |id: &NodeId| !self.nodes[*id].value.held(tier).blocks.is_empty();
        self.nodes[id].children().filter(holds).take(2).count()
    }

    pub(super) fn evict(&mut self, pool: &mut StatePool, id: NodeId) {
        if !self.is_elsewhere(pool.tier(), id) {
            let (salt, tokens) = self.nodes.prefix_of(id);
            let lineage = self.nodes[id].lineage;
            self.ghosts.remember(salt, &tokens, lineage, MissReason::Evicted);
        }
        match pool.tier() {
            Tier::Device => self.counts.device.evicted += 1,
            Tier::Host | Tier::Disk => self.counts.host.evicted += 1,
        }
        if self.options.is_recurrent {
            let slot = self.nodes[id].value.held_mut(pool.tier()).slot.take();
            release_all(pool, slot);
            self.prune(pool, id);
        } else {
            let kept = floor_to_block(self.nodes[id].tokens.len().saturating_sub(TRIMMED_TOKENS));
            if kept > 0 {
                self.nodes.split(id, kept);
            }
            self.release_node(pool, id);
        }
    }

    /// True if another tier than this one has the state behind a node.
    fn is_elsewhere(&self, tier: Tier, id: NodeId) -> bool {
        let other = if tier == Tier::Device { Tier::Host } else { Tier::Device };
        self.has_state(other, id)
    }

    /// Gives back the blocks in the pool's tier that no checkpoint there needs, from a node up.
    pub(super) fn prune(&mut self, pool: &mut StatePool, id: NodeId) {
        let path: Vec<NodeId> = self.nodes.path_up(id).collect();
        for id in path {
            let has_slot = self.nodes[id].value.held(pool.tier()).slot.is_some();
            if has_slot || self.children_in(pool.tier(), id) > 0 {
                return;
            }
            self.release_node(pool, id);
        }
    }
}
