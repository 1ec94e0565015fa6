//! Leaving a tier: states before blocks, the least worthy first.
//!
//! With recurrent layers a checkpoint's slot goes, and with it the blocks up to where another
//! checkpoint of the tier still needs them. Without, a path loses its last blocks, about a
//! kilotoken at most at a time. What is lost in every tier stays as a ghost.

use state_pool::{BLOCK_LEN, PackedHandle, SlotHandle, StatePool, Tier, UnitStats};

use super::radix::{NodeId, floor_to_block};
use super::ranking::{Ranked, sizes};
use super::{MissReason, PrefixTree, SoleUnits, release_all};
use crate::policy::{Candidate, value, worth};

/// What goes at once from the end of a path without recurrent layers.
const TRIMMED_TOKENS: usize = 16 * BLOCK_LEN;

/// What came of making room without a loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// It is there.
    Made,
    /// It is not, and the next to go has no copy.
    Lossy,
    /// It is not, and nothing may go.
    Lacking,
}

impl PrefixTree {
    /// Evicts the least worthy checkpoint of the pool's tier. False if none may go: those whose
    /// units others hold as well, or whose copy to the host is on its way, are passed over.
    ///
    /// A tier's eviction may free no unit of a kind that is missing: ask the pool again.
    pub fn evict_one(&mut self, pool: &mut StatePool) -> bool {
        let least = self.least_worthy(pool);
        if let Some(least) = least {
            self.evict(pool, least.id);
        }
        least.is_some()
    }

    /// Evicts until so many units fit into the pool above a watermark of free pages. False if
    /// they do not fit although nothing more may go; what was evicted by then is gone: see
    /// [`could_free`](PrefixTree::could_free).
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

    /// As [`free`](PrefixTree::free), but stops before a checkpoint that would be lost for good
    /// and may get a copy on the host first, and then says [`Room::Lossy`].
    pub fn free_without_loss(
        &mut self,
        pool: &mut StatePool,
        watermark_pages: usize,
        blocks: usize,
        slots: usize,
    ) -> Room {
        while !pool.fits_above(watermark_pages, blocks, slots) {
            match self.least_worthy(pool) {
                None => return Room::Lacking,
                Some(Ranked { id, worth, .. }) if !self.is_clean(id, worth) => return Room::Lossy,
                Some(least) => self.evict(pool, least.id),
            }
        }
        Room::Made
    }

    /// False if so many units would not fit if all that may go was gone, however well the rest was
    /// packed. A scan of the nodes, unless the tree has them even if every share is one of its.
    pub fn could_free(
        &self,
        pool: &StatePool,
        watermark_pages: usize,
        blocks: usize,
        slots: usize,
    ) -> bool {
        self.could_free_units(pool, watermark_pages, (blocks, slots, 0))
    }

    /// As [`could_free`](PrefixTree::could_free), for blocks, slots and packed slots.
    pub(super) fn could_free_units(
        &self,
        pool: &StatePool,
        watermark_pages: usize,
        (blocks, slots, packed): (usize, usize, usize),
    ) -> bool {
        let (stats, layout) = (pool.stats(), pool.layout());
        let pages = |units: usize, per_page: usize| match per_page {
            0 => 0,
            per_page => units.div_ceil(per_page),
        };
        let fits = |free_blocks: usize, free_slots: usize, free_packed: usize| {
            let blocks = stats.blocks.held.saturating_sub(free_blocks) + blocks;
            let slots = stats.slots.held.saturating_sub(free_slots) + slots;
            let packed = stats.packed.held.saturating_sub(free_packed) + packed;
            let needed = pages(blocks, layout.blocks_per_page)
                + pages(slots, layout.slots_per_page)
                + pages(packed, layout.packed_per_page);
            needed + watermark_pages <= layout.pages
        };
        let shares = |unit: UnitStats| unit.handles - unit.held;
        let least = |held: usize, unit| held.saturating_sub(shares(unit));
        let blocks_held = self.blocks[pool.tier() as usize];
        let states = self.slots(pool.tier());
        let (slots_held, packed_held) =
            if layout.packed_per_page > 0 { (0, states) } else { (states, 0) };
        if fits(
            least(blocks_held, stats.blocks),
            least(slots_held, stats.slots),
            least(packed_held, stats.packed),
        ) {
            return true;
        }
        let sole = self.sole_units(pool);
        fits(sole.blocks, sole.slots, sole.packed)
    }

    /// The units of a tier that nobody but the tree holds: what would be free without it. A scan of
    /// the nodes.
    pub fn sole_units(&self, pool: &StatePool) -> SoleUnits {
        let mut sole = SoleUnits::default();
        for id in self.nodes.ids() {
            let held = self.nodes[id].value.held(pool.tier());
            // Who shares a path shares it from the first block on.
            let shared = held.blocks.partition_point(|block| !pool.is_sole(block));
            sole.blocks += held.blocks.len() - shared;
            sole.slots += usize::from(held.slot.as_ref().is_some_and(|slot| pool.is_sole(slot)));
            sole.packed += usize::from(held.packed.as_ref().is_some_and(|slot| pool.is_sole(slot)));
        }
        sole
    }

    /// True if a slot is free above the watermark, if need be after evicting checkpoints that are
    /// worth less than a new one, which saves `saved_tokens` tokens and owns `blocks` blocks.
    /// Evicts nothing if that does not free one.
    pub fn room_for(
        &mut self,
        pool: &mut StatePool,
        watermark_pages: usize,
        saved_tokens: usize,
        blocks: usize,
    ) -> bool {
        if pool.fits_above(watermark_pages, 0, 1) {
            return true;
        }
        let fresh = Candidate { saved_tokens, slots: 1, blocks, ..Candidate::default() };
        let fresh = worth(value(&fresh, sizes(pool)), self.clock, self.clock);
        let Some(missing) = missing_slots(pool, watermark_pages) else { return false };
        let may_go = |tree: &PrefixTree, id| tree.may_go(pool, id);
        let mut ranking = self.rank(pool, may_go);
        let mut least = Vec::new();
        while least.len() < missing {
            match ranking.next(self, pool, may_go) {
                Some(next) if next.worth < fresh => least.push(next.id),
                _ => return false,
            }
        }
        for id in least {
            if pool.fits_above(watermark_pages, 0, 1) {
                break;
            }
            self.evict(pool, id);
        }
        pool.fits_above(watermark_pages, 0, 1)
    }

    /// The checkpoint of the pool's tier that goes first, of those that may go.
    pub(super) fn least_worthy(&mut self, pool: &StatePool) -> Option<Ranked> {
        let may_go = |tree: &PrefixTree, id| tree.may_go(pool, id);
        self.rank(pool, may_go).next(self, pool, may_go)
    }

    /// True if the pool's tier has a state behind a node that nobody else holds: no sequence that
    /// resumed and still reads it, no copy on its way.
    pub(super) fn may_go(&self, pool: &StatePool, id: NodeId) -> bool {
        let held = self.nodes[id].value.held(pool.tier());
        if self.options.is_recurrent {
            let is_sole = |slot: &SlotHandle| pool.is_sole(slot);
            let is_sole_packed = |slot: &PackedHandle| pool.is_sole(slot);
            return held.slot.as_ref().is_some_and(is_sole)
                || held.packed.as_ref().is_some_and(is_sole_packed);
        }
        let is_last = self.children_in(pool.tier(), id) == 0;
        is_last && held.blocks.last().is_some_and(|block| pool.is_sole(block))
    }

    pub(super) fn evict(&mut self, pool: &mut StatePool, id: NodeId) {
        if !self.is_elsewhere(pool.tier(), id) {
            let (salt, tokens) = self.nodes.prefix_of(id);
            let lineage = self.nodes[id].lineage;
            self.ghosts.remember(salt, &tokens, lineage, MissReason::Evicted);
            self.counts.lost += 1;
        }
        self.nodes[id].value.is_refused = pool.tier() == Tier::Host;
        match pool.tier() {
            Tier::Device => self.counts.device.evicted += 1,
            Tier::Host | Tier::Disk => self.counts.host.evicted += 1,
        }
        if self.options.is_recurrent {
            let held = self.nodes[id].value.held_mut(pool.tier());
            let (slot, packed) = (held.slot.take(), held.packed.take());
            release_all(pool, packed);
            release_all(pool, slot);
            self.set_place(pool.tier(), id, None);
            self.place_around(pool, id);
            self.prune(pool, id);
        } else {
            let kept = floor_to_block(self.nodes[id].tokens.len().saturating_sub(TRIMMED_TOKENS));
            if kept > 0 {
                self.nodes.split(id, kept);
            }
            let parent = self.nodes[id].parent.expect("a root holds nothing");
            self.release_node(pool, id);
            if self.nodes.get(parent).is_some_and(|node| node.parent.is_some()) {
                self.place(pool, parent);
            }
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
            let has_slot = self.nodes[id].value.held(pool.tier()).has_slot();
            if has_slot || self.children_in(pool.tier(), id) > 0 {
                self.place(pool, id);
                return;
            }
            self.release_node(pool, id);
        }
    }
}

/// How many evictions give a slot above the watermark for certain. None if no number does: with
/// several slots to a page, one that goes may free no page.
fn missing_slots(pool: &StatePool, watermark_pages: usize) -> Option<usize> {
    let (free_pages, one) = (pool.free_pages(), pool.layout().slots_per_page == 1);
    let is_short = free_pages < watermark_pages;
    match one {
        true => Some((watermark_pages + 1).saturating_sub(free_pages)),
        false => (!is_short).then_some(1),
    }
}
