//! How a tier's memory is cut into pages, and where each unit lies.
//!
//! ```text
//!  arena   |          page 0           |          page 1           | ...
//!  slots   | slot 0       | slot 1     |
//!  blocks                              | b6 | b7 | b8 | b9 | 10 | 11 |
//!  packed slots                        | p4  | p5  | p6  | p7  |    |   if page 1 holds these
//! ```
//!
//! A page starts at a multiple of the page's bytes and holds slots, blocks or packed slots, one
//! behind the other; what is left at its end is lost. Its size follows from slot and block; packed
//! slots take what it has. Units are numbered as if every page held their kind, so an id gives its
//! page by a division. A slot or block of zero bytes lies on no page.

use thiserror::Error;

use crate::handle::{BlockId, PackedId, SlotId};

/// Tokens in a block.
pub const BLOCK_LEN: usize = 64;

/// Pages are multiples of this many bytes where the page size is ours to choose.
const PAGE_ALIGN_BYTES: usize = 4096;
/// The most slots a page is made of to lose less of it.
const MAX_SLOTS_MULTIPLE: usize = 16;
/// A page that loses less than one part in so many is good enough.
const GOOD_LOSS_PART: u128 = 20;
/// Ids are `u32`.
const MAX_UNITS: usize = u32::MAX as usize;

/// What a layout is computed from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TierSizes {
    /// Bytes of a slot; 0 for a model without recurrent layers.
    pub slot_bytes: usize,
    /// Bytes of a block; 0 for a model without attention layers.
    pub block_bytes: usize,
    /// Bytes of a packed slot, at most those of a slot; 0 if the tier has none.
    pub packed_bytes: usize,
    /// Bytes the tier's arena may take.
    pub memory_bytes: usize,
    /// The most slots held at once if `slot_bytes` is 0 (no memory bounds them); else unused.
    pub max_zero_byte_slots: usize,
}

/// Pages of one tier. Computed once from [`TierSizes`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolLayout {
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Bytes of a packed slot; 0 if the tier has none.
    pub packed_bytes: usize,
    /// Bytes of a page.
    pub page_bytes: usize,
    /// Pages in the arena.
    pub pages: usize,
    /// Slots a page holds; 0 if slots have zero bytes.
    pub slots_per_page: usize,
    /// Blocks a page holds; 0 if blocks have zero bytes.
    pub blocks_per_page: usize,
    /// Packed slots a page holds; 0 if the tier has none.
    pub packed_per_page: usize,
    /// The most slots held at once if slots have zero bytes; else 0.
    pub max_zero_byte_slots: usize,
}

/// Why sizes give no layout.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// The memory does not take the pages one sequence needs.
    #[error(
        "a memory budget of {memory_bytes} bytes holds no sequence; the smallest budget that \
         does is {needed_bytes} bytes"
    )]
    TooSmall {
        /// Bytes given.
        memory_bytes: usize,
        /// Bytes that would hold one slot and one block.
        needed_bytes: usize,
    },
    /// The memory holds more units than there are ids.
    #[error(
        "a memory budget of {memory_bytes} bytes holds more units than can be numbered; the \
         largest budget that works is {max_bytes} bytes"
    )]
    TooLarge {
        /// Bytes given.
        memory_bytes: usize,
        /// The most bytes that can be numbered.
        max_bytes: usize,
    },
    /// No page for these units can be addressed.
    #[error(
        "no addressable memory holds pages for a slot of {slot_bytes} bytes, a block of \
         {block_bytes} bytes and a packed slot of {packed_bytes} bytes"
    )]
    Unaddressable {
        /// Bytes of a slot.
        slot_bytes: usize,
        /// Bytes of a block.
        block_bytes: usize,
        /// Bytes of a packed slot; 0 if there are none.
        packed_bytes: usize,
    },
    /// A packed slot is larger than the slot it stands for, so a page may not hold it.
    #[error(
        "packed_bytes is {packed_bytes}, allowed: at most the {slot_bytes} bytes of the slot that \
         is packed"
    )]
    PackedTooLarge {
        /// Bytes of a packed slot.
        packed_bytes: usize,
        /// Bytes of a slot.
        slot_bytes: usize,
    },
    /// The model remembers nothing, so there is nothing to account for.
    #[error("neither slots nor blocks have bytes; a model remembers at least one of them")]
    NoUnits,
    /// Slots have zero bytes and their maximum is zero or cannot be numbered.
    #[error("slots of zero bytes need a maximum of 1 to {max} slots, not {max_zero_byte_slots}")]
    ZeroByteSlots {
        /// The maximum given.
        max_zero_byte_slots: usize,
        /// The most that can be numbered.
        max: usize,
    },
}

impl PoolLayout {
    /// Cuts a tier's memory into pages.
    ///
    /// # Errors
    ///
    /// When the memory holds no sequence, or more units than can be numbered, or the sizes
    /// themselves cannot be served.
    pub fn new(sizes: TierSizes) -> Result<PoolLayout, LayoutError> {
        let TierSizes { slot_bytes, block_bytes, packed_bytes, memory_bytes, .. } = sizes;
        let max_zero_byte_slots = sizes.max_zero_byte_slots;
        if slot_bytes == 0 && block_bytes == 0 {
            return Err(LayoutError::NoUnits);
        }
        if slot_bytes == 0 && !(1..=MAX_UNITS).contains(&max_zero_byte_slots) {
            return Err(LayoutError::ZeroByteSlots { max_zero_byte_slots, max: MAX_UNITS });
        }
        if packed_bytes > slot_bytes {
            return Err(LayoutError::PackedTooLarge { packed_bytes, slot_bytes });
        }
        let unaddressable = LayoutError::Unaddressable { slot_bytes, block_bytes, packed_bytes };
        // A slot and a block never lie on one page.
        let needed_pages = [slot_bytes, block_bytes].iter().filter(|bytes| **bytes > 0).count();
        let page_bytes = choose_page_bytes(slot_bytes, block_bytes);
        let needed_bytes = page_bytes.and_then(|page_bytes| page_bytes.checked_mul(needed_pages));
        let (Some(page_bytes), Some(needed_bytes)) = (page_bytes, needed_bytes) else {
            return Err(unaddressable);
        };
        if memory_bytes < needed_bytes {
            return Err(LayoutError::TooSmall { memory_bytes, needed_bytes });
        }
        let pages = memory_bytes / page_bytes;
        let slots_per_page = page_bytes.checked_div(slot_bytes).unwrap_or(0);
        let blocks_per_page = page_bytes.checked_div(block_bytes).unwrap_or(0);
        let packed_per_page = page_bytes.checked_div(packed_bytes).unwrap_or(0);
        let max_pages = MAX_UNITS / slots_per_page.max(blocks_per_page).max(packed_per_page);
        if max_pages < needed_pages {
            return Err(unaddressable);
        }
        if pages > max_pages {
            // At most this many bytes, since more pages than that fit the memory given.
            let max_bytes = max_pages * page_bytes + (page_bytes - 1);
            return Err(LayoutError::TooLarge { memory_bytes, max_bytes });
        }
        Ok(PoolLayout {
            slot_bytes,
            block_bytes,
            packed_bytes,
            page_bytes,
            pages,
            slots_per_page,
            blocks_per_page,
            packed_per_page,
            max_zero_byte_slots: if slot_bytes == 0 { max_zero_byte_slots } else { 0 },
        })
    }

    /// The same units in a tier without memory, which holds none of them.
    pub fn without_memory(&self) -> PoolLayout {
        PoolLayout { pages: 0, max_zero_byte_slots: 0, ..self.clone() }
    }

    /// Bytes of all pages together: what the arena must have.
    pub fn arena_bytes(&self) -> usize {
        self.pages * self.page_bytes
    }

    /// The most slots there can be, when all pages hold them.
    pub fn max_slots(&self) -> usize {
        if self.slot_bytes == 0 {
            self.max_zero_byte_slots
        } else {
            self.pages * self.slots_per_page
        }
    }

    /// The most blocks there can be, when all pages hold them.
    pub fn max_blocks(&self) -> usize {
        if self.block_bytes == 0 { MAX_UNITS } else { self.pages * self.blocks_per_page }
    }

    /// The most packed slots there can be, when all pages hold them; 0 if the tier has none.
    pub fn max_packed(&self) -> usize {
        self.pages * self.packed_per_page
    }

    /// The byte offset of a slot in the arena; 0 if slots have zero bytes.
    ///
    /// # Panics
    ///
    /// If the id is not one of this layout.
    pub fn slot_offset(&self, slot: SlotId) -> usize {
        assert!(slot.index() < self.max_slots(), "{slot} of {} slots", self.max_slots());
        self.offset(slot.index(), self.slots_per_page, self.slot_bytes)
    }

    /// The byte offset of a block in the arena; 0 if blocks have zero bytes.
    ///
    /// # Panics
    ///
    /// If the id is not one of this layout.
    pub fn block_offset(&self, block: BlockId) -> usize {
        assert!(block.index() < self.max_blocks(), "{block} of {} blocks", self.max_blocks());
        self.offset(block.index(), self.blocks_per_page, self.block_bytes)
    }

    /// The byte offset of a packed slot in the arena.
    ///
    /// # Panics
    ///
    /// If the id is not one of this layout.
    pub fn packed_offset(&self, packed: PackedId) -> usize {
        assert!(packed.index() < self.max_packed(), "{packed} of {}", self.max_packed());
        self.offset(packed.index(), self.packed_per_page, self.packed_bytes)
    }

    fn offset(&self, index: usize, per_page: usize, unit_bytes: usize) -> usize {
        if unit_bytes == 0 {
            return 0;
        }
        index / per_page * self.page_bytes + index % per_page * unit_bytes
    }

    /// The fraction of a page that is lost when it is filled with slots; 0 if they have no bytes.
    pub fn slot_loss(&self) -> f64 {
        self.loss(self.slots_per_page * self.slot_bytes)
    }

    /// The fraction of a page that is lost when it is filled with blocks; 0 if they have no bytes.
    pub fn block_loss(&self) -> f64 {
        self.loss(self.blocks_per_page * self.block_bytes)
    }

    fn loss(&self, filled_bytes: usize) -> f64 {
        if filled_bytes == 0 {
            return 0.0;
        }
        (self.page_bytes - filled_bytes) as f64 / self.page_bytes as f64
    }

    /// The pages an empty pool takes for so many units; none if it cannot hold them.
    pub fn pages_for(&self, blocks: usize, slots: usize) -> Option<usize> {
        if blocks > self.max_blocks() || slots > self.max_slots() {
            return None;
        }
        let pages_of =
            |units: usize, per_page| if per_page == 0 { 0 } else { units.div_ceil(per_page) };
        let pages = pages_of(blocks, self.blocks_per_page) + pages_of(slots, self.slots_per_page);
        (pages <= self.pages).then_some(pages)
    }

    /// How many sequences of `tokens` tokens an empty pool holds while `spare_pages` pages stay
    /// free. Each takes one slot and the blocks of its tokens and shares nothing.
    pub fn max_sequences(&self, tokens: usize, spare_pages: usize) -> usize {
        let blocks_each = blocks_for(tokens);
        let Some(pages) = self.pages.checked_sub(spare_pages) else { return 0 };
        let fit = |sequences: usize| {
            sequences
                .checked_mul(blocks_each)
                .and_then(|blocks| self.pages_for(blocks, sequences))
                .is_some_and(|needed| needed <= pages)
        };
        let (mut fitting, mut too_many) = (0, self.max_slots() + 1);
        while too_many - fitting > 1 {
            let middle = fitting + (too_many - fitting) / 2;
            if fit(middle) { fitting = middle } else { too_many = middle }
        }
        fitting
    }

    /// The tokens of the longest sequence an empty pool holds.
    pub fn max_tokens(&self) -> usize {
        if self.block_bytes == 0 {
            return MAX_UNITS.saturating_mul(BLOCK_LEN);
        }
        let block_pages = self.pages.saturating_sub(usize::from(self.slot_bytes > 0));
        (block_pages * self.blocks_per_page).saturating_mul(BLOCK_LEN)
    }
}

/// The blocks that `tokens` tokens take.
pub(crate) fn blocks_for(tokens: usize) -> usize {
    tokens.div_ceil(BLOCK_LEN)
}

/// The page for these units; none if it cannot be addressed.
///
/// The smallest multiple of the slot, at most [`MAX_SLOTS_MULTIPLE`], that loses little when
/// filled with blocks; else the one that loses least; else the smallest that holds a block.
/// Without slots a page is a block; without blocks the loss is that of slots.
fn choose_page_bytes(slot_bytes: usize, block_bytes: usize) -> Option<usize> {
    if slot_bytes == 0 {
        return Some(block_bytes);
    }
    let unit_bytes = if block_bytes == 0 { slot_bytes } else { block_bytes };
    let lost = |page: usize| (page % unit_bytes) as u128;
    let loses_less =
        |page: usize, than: usize| lost(page) * (than as u128) < lost(than) * page as u128;
    let mut best: Option<usize> = None;
    for slots in 1..=MAX_SLOTS_MULTIPLE {
        let Some(page) = page_of_slots(slot_bytes, slots) else { break };
        if page < unit_bytes {
            continue;
        }
        if lost(page) * GOOD_LOSS_PART < page as u128 {
            return Some(page);
        }
        if best.is_none_or(|best| loses_less(page, best)) {
            best = Some(page);
        }
    }
    best.or_else(|| smallest_page_with(slot_bytes, block_bytes))
}

/// So many slots, rounded up to a page's alignment.
fn page_of_slots(slot_bytes: usize, slots: usize) -> Option<usize> {
    slot_bytes.checked_mul(slots)?.checked_next_multiple_of(PAGE_ALIGN_BYTES)
}

/// The smallest page of whole slots that holds a block, however many slots that takes.
fn smallest_page_with(slot_bytes: usize, block_bytes: usize) -> Option<usize> {
    let aligned = block_bytes.checked_next_multiple_of(PAGE_ALIGN_BYTES)?;
    // The fewest slots that reach into the block's last 4 KiB; rounding up does the rest.
    let slots = aligned.checked_sub(PAGE_ALIGN_BYTES)? / slot_bytes + 1;
    page_of_slots(slot_bytes, slots)
}

#[cfg(test)]
mod tests;
