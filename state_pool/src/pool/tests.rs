//! Transactions, shares and pages that change kind.

use super::*;
use crate::layout::TierSizes;

/// Pages of three blocks, one slot or two packed slots.
fn pool(tier: Tier, pages: usize) -> StatePool {
    let sizes = TierSizes {
        slot_bytes: 3 * 4096,
        block_bytes: 4096,
        packed_bytes: 6080,
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
    let expected = PoolError::NoRoom {
        tier: Tier::Device,
        blocks: 2,
        slots: 0,
        free_blocks: 1,
        free_slots: 0,
    };
    assert_eq!((error, pool.stats()), (expected, before));
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
            packed_bytes: slot_bytes / 2,
            memory_bytes: 1 << 20,
            max_zero_byte_slots: 4,
        };
        let layout = PoolLayout::new(sizes).expect("a layout").without_memory();
        assert_eq!((layout.arena_bytes(), layout.max_slots()), (0, 0));
        assert_eq!(layout.max_sequences(1, 0), 0);
        let mut pool = StatePool::new(Tier::Host, layout);
        assert!(!pool.fits(0, 1) && !pool.fits(1, 1) && pool.alloc_slot().is_err());
        assert!(!pool.fits_packed(0) && pool.alloc_packed().is_err());
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
    assert!(pool.alloc_slot().is_err() && pool.alloc_packed().is_err());
    assert_eq!(pool.stats().blocks.pages, 2);
    release_all(&mut pool, blocks);
    let packed: Vec<_> = (0..4).map(|_| pool.alloc_packed().expect("two a page")).collect();
    assert!(pool.alloc_packed().is_err() && pool.alloc_block().is_err());
    assert_eq!((pool.stats().packed.pages, pool.held_packed().count()), (2, 4));
    packed.into_iter().for_each(|packed| assert!(pool.release(packed)));
    pool.check();
    assert_eq!((pool.free_pages(), pool.free_packed()), (2, 4));
}

#[test]
fn a_packed_slot_and_its_blocks_are_taken_together_or_not_at_all() {
    let mut pool = pool(Tier::Host, 3);
    assert_eq!((pool.pages_needed_packed(3), pool.pages_needed_packed(4)), (Some(2), Some(3)));
    let (blocks, first) = pool.allocate_packed(4).expect("three pages");
    assert_eq!((blocks.len(), pool.free_pages()), (4, 0));
    // The second packed slot finds a place beside the first, and two blocks beside the fourth.
    assert_eq!(pool.pages_needed_packed(2), Some(0));
    let (more, second) = pool.allocate_packed(2).expect("open places");
    let before = pool.stats();
    let error = pool.allocate_packed(0).expect_err("all is full");
    let expected =
        PoolError::NoRoomPacked { tier: Tier::Host, blocks: 0, free_blocks: 0, free_packed: 0 };
    assert_eq!((error, pool.stats()), (expected, before));
    assert!(error.to_string().starts_with("the host tier has no room for 0 blocks and a packed"));
    blocks.into_iter().chain(more).for_each(|block| assert!(pool.release(block)));
    let share = pool.share(&second);
    assert!(!pool.release(second) && pool.is_sole(&share));
    assert!(pool.release(first) && pool.release(share));
    assert!(pool.fits_packed_above(1, 3) && !pool.fits_packed_above(1, 4));
    pool.check();
}

#[test]
fn a_tier_without_packed_slots_gives_none() {
    let sizes = TierSizes {
        slot_bytes: 4096,
        block_bytes: 4096,
        packed_bytes: 0,
        memory_bytes: 4 * 4096,
        max_zero_byte_slots: 0,
    };
    let mut pool = StatePool::new(Tier::Device, PoolLayout::new(sizes).expect("a layout"));
    assert_eq!((pool.free_packed(), pool.pages_needed_packed(1)), (0, None));
    assert!(!pool.fits_packed(0) && pool.alloc_packed().is_err());
    assert!(pool.allocate_packed(1).is_err());
    pool.check();
    assert_eq!(pool.free_pages(), 4);
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

/// Who was refused may fit again when a unit is free, and when the one holder left may free it.
#[test]
fn a_unit_left_to_nobody_or_to_one_holder_counts_as_given_up() {
    let mut pool = pool(Tier::Device, 2);
    let first = pool.alloc_block().expect("room");
    let (second, third) = (pool.share(&first), pool.share(&first));
    let in_vain = pool.share(&first);
    pool.put_back(in_vain);
    let counted = [first, second, third].map(|handle| {
        pool.release(handle);
        pool.given_up()
    });
    assert_eq!(counted, [0, 1, 2]);
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
