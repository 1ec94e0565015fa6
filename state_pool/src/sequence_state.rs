//! What a running sequence holds: a table of blocks, a slot, and how many tokens they stand for.
//!
//! ```text
//!  len 151      |<- 64 ->|<- 64 ->|<- 23 ->|
//!  table        [   b0   ,   b1   ,   b2      ,   b3   ]     b3 is there for tokens to come
//!  slot         the recurrent state after token 150
//! ```
//!
//! A state belongs to the pool it was taken from and never spans tiers. Dropping a live one is
//! caught by its handles.

use crate::handle::{BlockHandle, BlockId, SlotHandle};
use crate::layout::{BLOCK_LEN, blocks_for};
use crate::pool::{Allocation, PoolError, StatePool};

/// The blocks of a sequence in the order of its tokens.
#[derive(Debug, Default)]
#[must_use = "the blocks must be kept or released"]
pub struct BlockTable {
    blocks: Vec<BlockHandle>,
}

impl From<Vec<BlockHandle>> for BlockTable {
    fn from(blocks: Vec<BlockHandle>) -> BlockTable {
        BlockTable { blocks }
    }
}

impl BlockTable {
    /// Blocks in the table.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// True if there is no block in the table.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// The tokens these blocks have room for.
    pub fn capacity_tokens(&self) -> usize {
        self.blocks.len().saturating_mul(BLOCK_LEN)
    }

    /// The handles, first tokens first.
    pub fn as_slice(&self) -> &[BlockHandle] {
        &self.blocks
    }

    /// The handles themselves, first tokens first.
    #[must_use = "the handles must be kept or released"]
    pub fn into_vec(self) -> Vec<BlockHandle> {
        self.blocks
    }

    /// The blocks' ids, first tokens first.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = BlockId> + '_ {
        self.blocks.iter().map(BlockHandle::id)
    }

    /// Shares the first `blocks` blocks.
    ///
    /// # Panics
    ///
    /// If there are fewer.
    pub fn share_first(&self, pool: &mut StatePool, blocks: usize) -> BlockTable {
        let shares = self.blocks[..blocks].iter().map(|block| pool.share(block));
        BlockTable { blocks: shares.collect() }
    }

    /// Gives all blocks back.
    pub fn release(self, pool: &mut StatePool) {
        for block in self.blocks {
            pool.release(block);
        }
    }
}

/// All units a sequence holds in one tier. Move-only, as its handles are.
#[derive(Debug)]
#[must_use = "a state must be kept or released"]
pub struct SequenceState {
    table: BlockTable,
    slot: SlotHandle,
    len: usize,
}

impl SequenceState {
    /// A state of no computed tokens with a slot and the blocks of `tokens` tokens to come.
    ///
    /// # Errors
    ///
    /// [`PoolError::NoRoom`] if they do not all fit; then nothing is taken.
    pub fn allocate(pool: &mut StatePool, tokens: usize) -> Result<SequenceState, PoolError> {
        let Allocation { blocks, mut slots } = pool.allocate(blocks_for(tokens), 1)?;
        let slot = slots.pop().expect("a transaction gives what was asked for");
        Ok(SequenceState { table: BlockTable::from(blocks), slot, len: 0 })
    }

    /// A state made of units from elsewhere: shares of a checkpoint, or what a transfer filled.
    ///
    /// # Panics
    ///
    /// If `len` tokens do not fit the table.
    pub fn from_parts(table: BlockTable, slot: SlotHandle, len: usize) -> SequenceState {
        assert!(len <= table.capacity_tokens(), "{len} tokens in {} blocks", table.len());
        SequenceState { table, slot, len }
    }

    /// The units and the computed tokens, to be given to another holder.
    pub fn into_parts(self) -> (BlockTable, SlotHandle, usize) {
        (self.table, self.slot, self.len)
    }

    /// Tokens computed.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if no token is computed.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The blocks, those for tokens to come too.
    pub fn table(&self) -> &BlockTable {
        &self.table
    }

    /// The slot.
    pub fn slot(&self) -> &SlotHandle {
        &self.slot
    }

    /// The blocks still missing for `to_len` tokens in all.
    pub fn missing_blocks(&self, to_len: usize) -> usize {
        blocks_for(to_len).saturating_sub(self.table.len())
    }

    /// Takes the blocks still missing for `to_len` tokens in all. Computes nothing: `len` stays.
    ///
    /// # Errors
    ///
    /// [`PoolError::NoRoom`] if they do not all fit; then nothing is taken.
    pub fn grow(&mut self, pool: &mut StatePool, to_len: usize) -> Result<(), PoolError> {
        let missing = self.missing_blocks(to_len);
        if missing > 1 && !pool.fits(missing, 0) {
            return Err(pool.no_room(missing, 0));
        }
        for _ in 0..missing {
            self.table.blocks.push(pool.alloc_block()?);
        }
        Ok(())
    }

    /// Makes room in the table for the blocks of `tokens` tokens, so that growing up to there takes
    /// no memory of the program.
    pub fn reserve(&mut self, tokens: usize) {
        let more = blocks_for(tokens).saturating_sub(self.table.len());
        self.table.blocks.reserve_exact(more);
    }

    /// Counts `tokens` more tokens as computed.
    ///
    /// # Panics
    ///
    /// If the table has no room for them.
    pub fn advance(&mut self, tokens: usize) {
        let room = self.table.capacity_tokens() - self.len;
        assert!(tokens <= room, "{tokens} tokens where {room} have room");
        self.len += tokens;
    }

    /// True if the slot may be written; else [`renew_slot`](SequenceState::renew_slot) first.
    pub fn is_slot_sole(&self, pool: &StatePool) -> bool {
        pool.is_sole(&self.slot)
    }

    /// Indices of the blocks that tokens `len..to_len` go to and that are shared. Each must be
    /// renewed before it is written. The first of them holds computed rows, to be copied, if
    /// `len` lies inside it.
    pub fn shared_blocks_to_write(
        &self,
        pool: &StatePool,
        to_len: usize,
    ) -> impl Iterator<Item = usize> {
        let blocks = self.len / BLOCK_LEN..blocks_for(to_len).min(self.table.len());
        blocks.filter(|index| !pool.is_sole(&self.table.blocks[*index]))
    }

    /// Takes a fresh slot and returns the old handle: the step reads the old slot and writes the
    /// fresh one, so the old handle is to be released when the step is committed.
    ///
    /// # Errors
    ///
    /// [`PoolError::NoRoom`] if no slot is free; then the state keeps its slot.
    pub fn renew_slot(&mut self, pool: &mut StatePool) -> Result<SlotHandle, PoolError> {
        let fresh = pool.alloc_slot()?;
        Ok(std::mem::replace(&mut self.slot, fresh))
    }

    /// Takes a fresh block in place of the one at `index` of the table and returns the old handle:
    /// the source of a copy, to be released when that copy is committed.
    ///
    /// # Errors
    ///
    /// [`PoolError::NoRoom`] if no block is free; then the table stays as it is.
    ///
    /// # Panics
    ///
    /// If the table has no such block.
    pub fn renew_block(
        &mut self,
        pool: &mut StatePool,
        index: usize,
    ) -> Result<BlockHandle, PoolError> {
        assert!(index < self.table.len(), "block {index} of {}", self.table.len());
        let fresh = pool.alloc_block()?;
        Ok(std::mem::replace(&mut self.table.blocks[index], fresh))
    }

    /// A second state of the same tokens that shares every unit, the blocks for tokens to come
    /// too.
    pub fn share(&self, pool: &mut StatePool) -> SequenceState {
        self.share_blocks(pool, self.table.len())
    }

    /// A second state of the same tokens that shares the slot and the blocks with computed rows.
    /// Blocks for tokens to come stay with this one: nobody has to read them.
    pub fn fork(&self, pool: &mut StatePool) -> SequenceState {
        self.share_blocks(pool, blocks_for(self.len))
    }

    fn share_blocks(&self, pool: &mut StatePool, blocks: usize) -> SequenceState {
        let table = self.table.share_first(pool, blocks);
        SequenceState { table, slot: pool.share(&self.slot), len: self.len }
    }

    /// Gives all units back.
    pub fn release(self, pool: &mut StatePool) {
        self.table.release(pool);
        pool.release(self.slot);
    }

    /// Gives all units back that were taken in vain: see [`StatePool::put_back`].
    pub fn put_back(self, pool: &mut StatePool) {
        for block in self.table.into_vec() {
            pool.put_back(block);
        }
        pool.put_back(self.slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handle::Tier;
    use crate::layout::{PoolLayout, TierSizes};

    /// Pages of three blocks or one slot.
    fn pool(pages: usize) -> StatePool {
        let sizes = TierSizes {
            slot_bytes: 3 * 4096,
            block_bytes: 4096,
            packed_bytes: 0,
            memory_bytes: pages * 3 * 4096,
            max_zero_byte_slots: 0,
        };
        StatePool::new(Tier::Device, PoolLayout::new(sizes).expect("a layout"))
    }

    #[test]
    fn a_state_grows_by_whole_blocks_or_not_at_all() {
        let mut pool = pool(2);
        let mut state = SequenceState::allocate(&mut pool, 64).expect("room");
        assert_eq!((state.table().len(), state.len(), state.missing_blocks(65)), (1, 0, 1));
        assert_eq!((state.missing_blocks(64), state.missing_blocks(0)), (0, 0));
        assert!(state.grow(&mut pool, 193).is_err());
        assert_eq!((state.table().len(), pool.stats().blocks.held), (1, 1));
        state.grow(&mut pool, 192).expect("three blocks");
        state.grow(&mut pool, 10).expect("nothing to do");
        state.advance(192);
        assert_eq!((state.len(), state.table().capacity_tokens()), (192, 192));
        assert!(SequenceState::allocate(&mut pool, 0).is_err(), "no page is left for a slot");
        state.release(&mut pool);
        pool.check();
        assert_eq!(pool.free_pages(), 2);
    }

    /// Both write on after a fork: the slot is renewed, the tail copied, full blocks stay shared.
    #[test]
    fn a_fork_shares_until_it_writes() {
        let mut pool = pool(6);
        let mut first = SequenceState::allocate(&mut pool, 200).expect("room");
        first.advance(151);
        let mut second = first.fork(&mut pool);
        assert_eq!((second.len(), second.table().len(), first.table().len()), (151, 3, 4));
        let to_write = |state: &SequenceState, pool: &StatePool| {
            state.shared_blocks_to_write(pool, 200).collect::<Vec<_>>()
        };
        assert_eq!((to_write(&first, &pool), to_write(&second, &pool)), (vec![2], vec![2]));

        let old_slot = second.renew_slot(&mut pool).expect("a slot");
        let old_block = second.renew_block(&mut pool, 2).expect("a block");
        assert_eq!(old_slot.id(), first.slot().id());
        assert_eq!(old_block.id(), first.table().as_slice()[2].id());
        assert!(!first.is_slot_sole(&pool), "the old slot is read until the commit");
        pool.release(old_slot);
        pool.release(old_block);
        assert!(first.is_slot_sole(&pool) && second.is_slot_sole(&pool));
        assert_eq!((to_write(&first, &pool), to_write(&second, &pool)), (vec![], vec![]));
        assert_eq!(
            first.table().ids().zip(second.table().ids()).filter(|(a, b)| a == b).count(),
            2
        );
        first.release(&mut pool);
        second.release(&mut pool);
        pool.check();
        assert_eq!(pool.free_pages(), 6);
    }

    #[test]
    fn a_share_takes_the_blocks_to_come_too() {
        let mut pool = pool(4);
        let mut state = SequenceState::allocate(&mut pool, 192).expect("room");
        state.advance(64);
        let shared = state.share(&mut pool);
        assert_eq!(shared.table().len(), 3);
        assert_eq!(state.shared_blocks_to_write(&pool, 192).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(state.shared_blocks_to_write(&pool, 64).count(), 0);
        let (table, slot, len) = shared.into_parts();
        SequenceState::from_parts(table, slot, len).release(&mut pool);
        state.release(&mut pool);
        pool.check();
    }

    #[test]
    fn a_full_pool_leaves_slot_and_block_in_place() {
        let mut pool = pool(2);
        let mut state = SequenceState::allocate(&mut pool, 192).expect("room");
        let before = (state.slot().id(), state.table().as_slice()[0].id());
        assert!(state.renew_slot(&mut pool).is_err() && state.renew_block(&mut pool, 0).is_err());
        assert_eq!((state.slot().id(), state.table().as_slice()[0].id()), before);
        state.release(&mut pool);
    }

    #[test]
    #[should_panic(expected = "1 tokens where 0 have room")]
    fn tokens_without_a_block_cannot_be_computed() {
        let mut pool = pool(2);
        let mut state = SequenceState::allocate(&mut pool, 64).expect("room");
        state.advance(64);
        state.advance(1);
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "was dropped without release")]
    fn dropping_a_live_state_panics() {
        let mut pool = pool(4);
        drop(SequenceState::allocate(&mut pool, 192).expect("room"));
    }
}
