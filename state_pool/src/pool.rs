//! The pool of one tier: slots, blocks and packed slots on pages of one arena, with no fixed ratio.
//!
//! A page is free or holds units of one kind. Units are placed on the fullest page of their kind
//! (of equally full ones on the lowest), and when all are full on the lowest free page. A page
//! that empties is free again for any kind.

use std::collections::BTreeSet;

use thiserror::Error;

use crate::handle::{
    Block, BlockHandle, BlockId, Handle, Kind, Packed, PackedHandle, PackedId, Slot, SlotHandle,
    SlotId, Tier,
};
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
    packed: Units<Packed>,
    given_up: u64,
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
    /// The free places do not suffice for a packed slot, or for it and its blocks.
    #[error(
        "the {tier} tier has no room for {blocks} blocks and a packed slot now: it has room for \
         {free_blocks} blocks if it takes no packed slot, or for {free_packed} packed slots if it \
         takes no block"
    )]
    NoRoomPacked {
        /// The tier asked.
        tier: Tier,
        /// Blocks asked for beside the packed slot.
        blocks: usize,
        /// Blocks that would be given if no packed slot was asked for.
        free_blocks: usize,
        /// Packed slots that would be given if no block was asked for.
        free_packed: usize,
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
    /// The pool's packed slots.
    pub packed: UnitStats,
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
        // Without packed slots there are none to give, as if all of them were held.
        let packed = match layout.packed_per_page {
            0 => Units::of_zero_bytes(0),
            per_page => Units::on_pages(layout.pages, per_page),
        };
        // A layout numbers all its units, and so its pages, with a u32.
        let free_pages = (0..layout.pages as u32).collect();
        StatePool { tier, layout, free_pages, blocks, slots, packed, given_up: 0 }
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

    /// The most blocks that could be taken now, if nothing else is.
    pub fn free_blocks(&self) -> usize {
        self.blocks.free(self.free_pages.len())
    }

    /// The most slots that could be taken now, if nothing else is.
    pub fn free_slots(&self) -> usize {
        self.slots.free(self.free_pages.len())
    }

    /// The most packed slots that could be taken now, if nothing else is.
    pub fn free_packed(&self) -> usize {
        self.packed.free(self.free_pages.len())
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
        self.has_pages_above(watermark_pages, self.pages_needed(blocks, slots))
    }

    /// The free pages that so many blocks and one packed slot would take, as
    /// [`pages_needed`](StatePool::pages_needed) counts them; none if the tier has no packed slots.
    pub fn pages_needed_packed(&self, blocks: usize) -> Option<usize> {
        let pages = self.blocks.pages_needed(blocks)?;
        Some(pages.saturating_add(self.packed.pages_needed(1)?))
    }

    /// True exactly if [`allocate_packed`](StatePool::allocate_packed) would give so many blocks.
    pub fn fits_packed(&self, blocks: usize) -> bool {
        self.fits_packed_above(0, blocks)
    }

    /// True if so many blocks and one packed slot fit and at least `watermark_pages` pages are
    /// free afterwards.
    pub fn fits_packed_above(&self, watermark_pages: usize, blocks: usize) -> bool {
        self.has_pages_above(watermark_pages, self.pages_needed_packed(blocks))
    }

    fn has_pages_above(&self, watermark_pages: usize, needed: Option<usize>) -> bool {
        let spendable = self.free_pages.len().checked_sub(watermark_pages);
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

    /// Takes so many blocks and one packed slot, or nothing.
    ///
    /// # Errors
    ///
    /// [`PoolError::NoRoomPacked`] if they do not all fit, or the tier has no packed slots.
    pub fn allocate_packed(
        &mut self,
        blocks: usize,
    ) -> Result<(Vec<BlockHandle>, PackedHandle), PoolError> {
        if !self.fits_packed(blocks) {
            return Err(self.no_room_packed(blocks));
        }
        let blocks = (0..blocks).map(|_| self.take::<Block>().expect("fits_packed() is exact"));
        let blocks = blocks.collect();
        Ok((blocks, self.take().expect("fits_packed() is exact")))
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

    /// Takes one packed slot.
    ///
    /// # Errors
    ///
    /// [`PoolError::NoRoomPacked`] if none is free, or the tier has no packed slots.
    pub fn alloc_packed(&mut self) -> Result<PackedHandle, PoolError> {
        self.take().ok_or_else(|| self.no_room_packed(0))
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

    fn no_room_packed(&self, blocks: usize) -> PoolError {
        let (free_blocks, free_packed) = (self.free_blocks(), self.free_packed());
        PoolError::NoRoomPacked { tier: self.tier, blocks, free_blocks, free_packed }
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

    /// Names of the packed slots that are held, in no order: for tests that watch what is free.
    pub fn held_packed(&self) -> impl Iterator<Item = PackedId> {
        self.packed.held()
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
        let left = units.release(handle, free_pages);
        self.given_up += u64::from(left <= 1);
        left == 0
    }

    /// As [`release`](StatePool::release), for a share that was taken in vain: where others still
    /// hold the unit, nothing has changed, and nothing counts as given up.
    ///
    /// # Panics
    ///
    /// If the handle is of another tier.
    pub fn put_back<K: Kind>(&mut self, share: Handle<K>) {
        self.assert_ours(&share);
        let (units, free_pages) = K::units_mut(self);
        let left = units.release(share, free_pages);
        self.given_up += u64::from(left == 0);
    }

    /// How often a handle came back and left its unit free, or to a sole holder, who may now free
    /// it: while this stays, what did not fit does not.
    pub fn given_up(&self) -> u64 {
        self.given_up
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
            packed: self.packed.stats(),
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
        let kinds = [stats.blocks, stats.slots, stats.packed];
        let used: usize = kinds.iter().map(|units| units.pages).sum();
        assert_eq!(stats.free_pages + used, stats.pages);
        assert!(kinds.iter().all(|units| units.held <= units.handles));
    }

    /// Scans every page and unit and asserts that free and held ones add up to all of them.
    ///
    /// # Panics
    ///
    /// If the accounts do not add up, which is a fault of this crate.
    pub fn check(&self) {
        self.blocks.check();
        self.slots.check();
        self.packed.check();
        for page in 0..self.layout.pages as u32 {
            let uses = [
                self.blocks.holds_page(page),
                self.slots.holds_page(page),
                self.packed.holds_page(page),
                self.free_pages.contains(&page),
            ];
            let count = uses.into_iter().filter(|is_so| *is_so).count();
            assert_eq!(count, 1, "page {page} has blocks, slots, packed slots, is free: {uses:?}");
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

impl Kept for Packed {
    fn units(pool: &StatePool) -> &Units<Packed> {
        &pool.packed
    }

    fn units_mut(pool: &mut StatePool) -> (&mut Units<Packed>, &mut BTreeSet<u32>) {
        (&mut pool.packed, &mut pool.free_pages)
    }
}

#[cfg(test)]
mod tests;
