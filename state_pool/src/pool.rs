//! The dual pool of one tier: slots and blocks on pages of one arena, with no fixed ratio.
//!
//! A page is free or holds units of one kind. Units are placed on the fullest page of their kind
//! (of equally full ones on the lowest), and when all are full on the lowest free page. A page
//! that empties is free again for either kind.

use std::collections::BTreeSet;

use thiserror::Error;

use crate::handle::{Block, BlockHandle, BlockId, Handle, Kind, Slot, SlotHandle, SlotId, Tier};
use crate::layout::PoolLayout;
use crate::units::{UnitStats, Units};

/// Mints and takes back the handles of one tier.
#[derive(Debug)]
pub struct StatePool {
    tier: Tier,
    layout: PoolLayout,
    free_pages: BTreeSet<u32>,
    blocks: Units<Block>,
    slots: Units<Slot>,
}

/// Why a pool did not give units; nothing was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum PoolError {
    /// The free places do not suffice now.
    #[error(
        "the {tier} tier has no room for {blocks} blocks and {slots} slots now: it has room for \
         {free_blocks} blocks if it takes no slot, or for {free_slots} slots if it takes no block"
    )]
    NoRoom {
        /// The tier asked.
        tier: Tier,
        /// Blocks asked for.
        blocks: usize,
        /// Slots asked for.
        slots: usize,
        /// Blocks that would be given if no slot was asked for.
        free_blocks: usize,
        /// Slots that would be given if no block was asked for.
        free_slots: usize,
    },
}

/// What one transaction gave.
#[derive(Debug)]
#[must_use = "the handles must be kept or released"]
pub struct Allocation {
    /// As many blocks as were asked for.
    pub blocks: Vec<BlockHandle>,
    /// As many slots as were asked for.
    pub slots: Vec<SlotHandle>,
}

/// Counts of a pool at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolStats {
    /// Pages of the arena.
    pub pages: usize,
    /// Pages that hold nothing.
    pub free_pages: usize,
    /// The pool's blocks.
    pub blocks: UnitStats,
    /// The pool's slots.
    pub slots: UnitStats,
}

impl StatePool {
    /// A pool in which everything is free.
    pub fn new(tier: Tier, layout: PoolLayout) -> StatePool {
        let blocks = match layout.blocks_per_page {
            0 => Units::of_zero_bytes(layout.max_blocks()),
            per_page => Units::on_pages(layout.pages, per_page),
        };
        let slots = match layout.slots_per_page {
            0 => Units::of_zero_bytes(layout.max_slots()),
            per_page => Units::on_pages(layout.pages, per_page),
        };
        // A layout numbers all its units, and so its pages, with a u32.
        let free_pages = (0..layout.pages as u32).collect();
        StatePool { tier, layout, free_pages, blocks, slots }
    }

    /// The tier this pool accounts for.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Sizes and offsets of this pool's units.
    pub fn layout(&self) -> &PoolLayout {
        &self.layout
    }

    /// Pages that hold nothing.
    pub fn free_pages(&self) -> usize {
        self.free_pages.len()
    }

    /// The most blocks that could be taken now, if no slot is.
    pub fn free_blocks(&self) -> usize {
        self.blocks.free(self.free_pages.len())
    }

    /// The most slots that could be taken now, if no block is.
    pub fn free_slots(&self) -> usize {
        self.slots.free(self.free_pages.len())
    }

    /// The free pages that so many units would take beside the free places on pages of their
    /// kind; none if units of zero bytes would pass their limit. May be more than are free.
    pub fn pages_needed(&self, blocks: usize, slots: usize) -> Option<usize> {
        let pages = self.blocks.pages_needed(blocks)?;
        Some(pages.saturating_add(self.slots.pages_needed(slots)?))
    }

    /// True exactly if [`allocate`](StatePool::allocate) would give so many units.
    pub fn fits(&self, blocks: usize, slots: usize) -> bool {
        self.fits_above(0, blocks, slots)
    }

    /// True if so many units fit and at least `watermark_pages` pages are free afterwards.
    ///
    /// With fewer free pages than that already, nothing fits, not even on open pages.
    pub fn fits_above(&self, watermark_pages: usize, blocks: usize, slots: usize) -> bool {
        let spendable = self.free_pages.len().checked_sub(watermark_pages);
        let needed = self.pages_needed(blocks, slots);
        matches!((needed, spendable), (Some(needed), Some(spendable)) if needed <= spendable)
    }

    /// Takes so many units, or none.
    ///
    /// # Errors
    ///
    /// [`PoolError::NoRoom`] if they do not all fit.
    pub fn allocate(&mut self, blocks: usize, slots: usize) -> Result<Allocation, PoolError> {
        if !self.fits(blocks, slots) {
            return Err(self.no_room(blocks, slots));
        }
        let blocks = (0..blocks).map(|_| self.take::<Block>().expect("fits() is exact"));
        let blocks = blocks.collect();
        let slots = (0..slots).map(|_| self.take::<Slot>().expect("fits() is exact"));
        Ok(Allocation { blocks, slots: slots.collect() })
    }

    /// Takes one block.
    ///
    /// # Errors
    ///
    /// [`PoolError::NoRoom`] if none is free.
    pub fn alloc_block(&mut self) -> Result<BlockHandle, PoolError> {
        self.take().ok_or_else(|| self.no_room(1, 0))
    }

    /// Takes one slot.
    ///
    /// # Errors
    ///
    /// [`PoolError::NoRoom`] if none is free.
    pub fn alloc_slot(&mut self) -> Result<SlotHandle, PoolError> {
        self.take().ok_or_else(|| self.no_room(0, 1))
    }

    fn take<K: Kind>(&mut self) -> Option<Handle<K>> {
        let tier = self.tier;
        let (units, free_pages) = K::units_mut(self);
        units.alloc(tier, free_pages)
    }

    pub(crate) fn no_room(&self, blocks: usize, slots: usize) -> PoolError {
        let (free_blocks, free_slots) = (self.free_blocks(), self.free_slots());
        PoolError::NoRoom { tier: self.tier, blocks, slots, free_blocks, free_slots }
    }

    /// Another handle of a unit: from now on nobody may write it.
    ///
    /// # Panics
    ///
    /// If the handle is of another tier.
    pub fn share<K: Kind>(&mut self, handle: &Handle<K>) -> Handle<K> {
        self.assert_ours(handle);
        K::units_mut(self).0.share(handle)
    }

    /// Names of the slots that are held, in no order: for tests that watch what is free.
    pub fn held_slots(&self) -> impl Iterator<Item = SlotId> {
        self.slots.held()
    }

    /// Names of the blocks that are held, in no order: for tests that watch what is free.
    pub fn held_blocks(&self) -> impl Iterator<Item = BlockId> {
        self.blocks.held()
    }

    /// True if this handle is the unit's only one: its holder may write the unit.
    ///
    /// # Panics
    ///
    /// If the handle is of another tier.
    pub fn is_sole<K: Kind>(&self, handle: &Handle<K>) -> bool {
        self.assert_ours(handle);
        K::units(self).handles_of(handle) == 1
    }

    /// Takes a handle back. True if it was the last one: the unit is free and may be given out
    /// by the next call.
    ///
    /// # Panics
    ///
    /// If the handle is of another tier.
    pub fn release<K: Kind>(&mut self, handle: Handle<K>) -> bool {
        self.assert_ours(&handle);
        let (units, free_pages) = K::units_mut(self);
        units.release(handle, free_pages)
    }

    fn assert_ours<K: Kind>(&self, handle: &Handle<K>) {
        assert_eq!(handle.tier(), self.tier, "{handle:?} given to the pool of another tier");
    }

    /// The counts of this moment, in constant time.
    pub fn stats(&self) -> PoolStats {
        PoolStats {
            pages: self.layout.pages,
            free_pages: self.free_pages.len(),
            blocks: self.blocks.stats(),
            slots: self.slots.stats(),
        }
    }

    /// Asserts in constant time that the counted pages add up to all of them; see
    /// [`check`](StatePool::check) for the scan.
    ///
    /// # Panics
    ///
    /// If they do not, which is a fault of this crate.
    pub fn check_counts(&self) {
        let stats = self.stats();
        assert_eq!(stats.free_pages + stats.blocks.pages + stats.slots.pages, stats.pages);
        assert!(
            stats.blocks.held <= stats.blocks.handles && stats.slots.held <= stats.slots.handles
        );
    }

    /// Scans every page and unit and asserts that free and held ones add up to all of them.
    ///
    /// # Panics
    ///
    /// If the accounts do not add up, which is a fault of this crate.
    pub fn check(&self) {
        self.blocks.check();
        self.slots.check();
        for page in 0..self.layout.pages as u32 {
            let has_blocks = self.blocks.holds_page(page);
            let has_slots = self.slots.holds_page(page);
            let uses = [has_blocks, has_slots, self.free_pages.contains(&page)];
            let count = uses.into_iter().filter(|is_so| *is_so).count();
            assert_eq!(count, 1, "page {page} has blocks, has slots, is free: {uses:?}");
        }
        self.check_counts();
    }
}

/// Finds the places of a kind in a pool. Not nameable outside, so there are no other kinds.
pub trait Kept: Sized {
    /// The places of this kind.
    fn units(pool: &StatePool) -> &Units<Self>
    where
        Self: Kind;
    /// The places of this kind, and the free pages.
    fn units_mut(pool: &mut StatePool) -> (&mut Units<Self>, &mut BTreeSet<u32>)
    where
        Self: Kind;
}

impl Kept for Block {
    fn units(pool: &StatePool) -> &Units<Block> {
        &pool.blocks
    }

    fn units_mut(pool: &mut StatePool) -> (&mut Units<Block>, &mut BTreeSet<u32>) {
        (&mut pool.blocks, &mut pool.free_pages)
    }
}

impl Kept for Slot {
    fn units(pool: &StatePool) -> &Units<Slot> {
        &pool.slots
    }

    fn units_mut(pool: &mut StatePool) -> (&mut Units<Slot>, &mut BTreeSet<u32>) {
        (&mut pool.slots, &mut pool.free_pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::TierSizes;

    /// Pages of three blocks or one slot.
    fn pool(tier: Tier, pages: usize) -> StatePool {
        let sizes = TierSizes {
            slot_bytes: 3 * 4096,
            block_bytes: 4096,
            memory_bytes: pages * 3 * 4096,
            max_zero_byte_slots: 0,
        };
        StatePool::new(tier, PoolLayout::new(sizes).expect("a layout"))
    }

    fn release_all(pool: &mut StatePool, units: Allocation) {
        units.blocks.into_iter().for_each(|block| assert!(pool.release(block)));
        units.slots.into_iter().for_each(|slot| assert!(pool.release(slot)));
        pool.check();
    }

    #[test]
    fn a_refused_transaction_touches_nothing() {
        let mut pool = pool(Tier::Device, 2);
        let held = pool.allocate(2, 1).expect("two pages");
        let before = pool.stats();
        let error = pool.allocate(2, 0).expect_err("one place is left");
        let PoolError::NoRoom { free_blocks, free_slots, .. } = error;
        assert_eq!((free_blocks, free_slots, pool.stats()), (1, 0, before));
        assert!(error.to_string().starts_with("the device tier has no room for 2 blocks"));
        assert!(pool.fits(1, 0) && !pool.fits(1, 1) && !pool.fits(usize::MAX, usize::MAX));
        assert!(pool.alloc_slot().is_err());
        release_all(&mut pool, held);
    }

    #[test]
    fn a_tier_without_memory_holds_nothing() {
        for (slot_bytes, block_bytes) in [(3 * 4096, 4096), (0, 4096), (4096, 0)] {
            let sizes = TierSizes {
                slot_bytes,
                block_bytes,
                memory_bytes: 1 << 20,
                max_zero_byte_slots: 4,
            };
            let layout = PoolLayout::new(sizes).expect("a layout").without_memory();
            assert_eq!((layout.arena_bytes(), layout.max_slots()), (0, 0));
            assert_eq!(layout.max_sequences(1, 0), 0);
            let mut pool = StatePool::new(Tier::Host, layout);
            assert!(!pool.fits(0, 1) && !pool.fits(1, 1) && pool.alloc_slot().is_err());
            pool.check();
        }
    }

    #[test]
    fn an_empty_page_changes_kind() {
        let mut pool = pool(Tier::Device, 2);
        let slots = pool.allocate(0, 2).expect("all slots");
        assert!(pool.alloc_block().is_err());
        release_all(&mut pool, slots);
        let blocks = pool.allocate(6, 0).expect("all blocks");
        assert!(pool.alloc_slot().is_err());
        assert_eq!(pool.stats().blocks.pages, 2);
        release_all(&mut pool, blocks);
    }

    #[test]
    fn the_watermark_counts_free_pages_that_stay() {
        let mut pool = pool(Tier::Device, 4);
        assert!(pool.fits_above(1, 6, 1) && !pool.fits_above(1, 7, 1));
        let block = pool.alloc_block().expect("a page");
        assert!(pool.fits_above(3, 2, 0) && !pool.fits_above(3, 3, 0));
        assert!(!pool.fits_above(4, 1, 0), "below the watermark open places are not given");
        assert!(pool.release(block));
    }

    #[test]
    fn a_shared_unit_is_free_when_its_last_handle_is_released() {
        let mut pool = pool(Tier::Host, 2);
        let first = pool.alloc_slot().expect("a slot");
        let second = pool.share(&first);
        assert_eq!(first.id(), second.id());
        assert!(!pool.is_sole(&first) && !pool.is_sole(&second));
        assert_eq!((pool.stats().slots.held, pool.stats().slots.handles), (1, 2));
        assert!(!pool.release(first));
        assert!(pool.is_sole(&second));
        assert!(pool.release(second));
        pool.check();
    }

    #[test]
    fn stranded_pages_are_those_that_packing_would_free() {
        let mut pool = pool(Tier::Device, 3);
        let mut held = pool.allocate(7, 0).expect("three pages");
        // One block stays on each page; packed they would take one page.
        for index in [5, 4, 2, 1] {
            assert!(pool.release(held.blocks.remove(index)));
        }
        assert_eq!((pool.free_pages(), pool.stats().blocks.stranded_pages), (0, 2));
        assert_eq!((pool.free_blocks(), pool.free_slots()), (6, 0));
        release_all(&mut pool, held);
    }

    #[test]
    #[should_panic(expected = "handle of host slot 0 given to the pool of another tier")]
    fn a_handle_of_another_tier_is_refused() {
        let slot = pool(Tier::Host, 2).alloc_slot().expect("a slot");
        pool(Tier::Device, 2).release(slot);
    }
}
