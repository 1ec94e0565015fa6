//! Page sizes, and the published models' numbers.

use super::*;
use crate::handle::Id;

/// Kimi-Linear-48B in bf16: 20 KDA layers, their windows, a hidden row; 7 MLA layers.
const KIMI_LINEAR: TierSizes = TierSizes {
    slot_bytes: 41_943_040 + 1_474_560 + 4_608,
    block_bytes: 64 * 8_064,
    packed_bytes: 0,
    memory_bytes: 35_000_000_000,
    max_zero_byte_slots: 0,
};

fn layout(slot_bytes: usize, block_bytes: usize, memory_bytes: usize) -> PoolLayout {
    sizes(slot_bytes, block_bytes, memory_bytes).expect("the sizes have a layout")
}

fn sizes(
    slot_bytes: usize,
    block_bytes: usize,
    memory_bytes: usize,
) -> Result<PoolLayout, LayoutError> {
    let max_zero_byte_slots = if slot_bytes == 0 { 4 } else { 0 };
    PoolLayout::new(TierSizes {
        slot_bytes,
        block_bytes,
        packed_bytes: 0,
        memory_bytes,
        max_zero_byte_slots,
    })
}

#[test]
fn kimi_linear_has_the_pages_of_the_design() {
    let layout = PoolLayout::new(KIMI_LINEAR).expect("it fits");
    assert_eq!(layout.block_bytes, 516_096);
    assert_eq!((layout.page_bytes, layout.pages), (43_425_792, 805));
    assert_eq!((layout.slots_per_page, layout.blocks_per_page), (1, 84));
    assert!(layout.block_loss() < 0.002 && layout.slot_loss() < 0.0001);
    assert_eq!(layout.slot_offset(Id::new(804)), 804 * 43_425_792);
    assert_eq!(layout.block_offset(Id::new(84 + 83)), 43_425_792 + 83 * 516_096);
    assert!(layout.arena_bytes() <= 35_000_000_000);
    assert_eq!(layout.max_tokens(), 804 * 84 * 64);
}

#[test]
fn kimi_linear_holds_the_sequences_of_the_design() {
    let layout = PoolLayout::new(KIMI_LINEAR).expect("it fits");
    let watermark = layout.pages * 2 / 100;
    let fit = |tokens| (layout.max_sequences(tokens, 0), layout.max_sequences(tokens, watermark));
    assert_eq!(fit(4_000), (460, 450));
    assert_eq!(fit(8_000), (323, 317));
    assert_eq!(fit(32_000), (115, 113));
    assert_eq!(layout.max_sequences(4_000, 806), 0);
    assert_eq!(layout.max_sequences(usize::MAX, 0), 0);
}

/// The rule, said again with a plain search over candidates.
fn page_by_search(slot: usize, block: usize) -> usize {
    let page = |slots: usize| (slot * slots).next_multiple_of(4096);
    let loss = |page: usize| (page % block) as f64 / page as f64;
    let holding: Vec<usize> = (1..=16).map(page).filter(|page| *page >= block).collect();
    if let Some(good) = holding.iter().find(|page| loss(**page) < 0.05) {
        return *good;
    }
    let least = holding.iter().copied().min_by(|a, b| loss(*a).total_cmp(&loss(*b)));
    least.unwrap_or_else(|| (1..).map(page).find(|page| *page >= block).expect("pages grow"))
}

#[test]
fn pages_follow_the_rule_for_all_small_sizes() {
    let slots = (1..80).map(|n| n * 64).chain((1..80).map(|n| n * 1_024));
    for slot in slots {
        for block in (1..60).map(|n| n * 1_536).chain([64, 300_000, 1_000_000]) {
            let expected = page_by_search(slot, block);
            assert_eq!(
                choose_page_bytes(slot, block),
                Some(expected),
                "slot {slot}, block {block}"
            );
        }
    }
}

#[test]
fn each_arm_of_the_rule_is_reached() {
    // Two slots hold three blocks exactly; one slot would lose a third.
    assert_eq!(layout(3 * 4096, 2 * 4096, 1 << 20).page_bytes, 6 * 4096);
    // No multiple loses under 5 %: eleven slots lose 8.8 %, sixteen lose least with 6.0 %.
    let poor = layout(4096, 5 * 4096 + 64, 1 << 20);
    assert_eq!((poor.page_bytes, poor.blocks_per_page), (16 * 4096, 3));
    // Sixteen slots hold no block.
    let large = layout(4096, 20 * 4096 + 1, 1 << 20);
    assert_eq!((large.page_bytes, large.slots_per_page), (21 * 4096, 21));
    // A slot smaller than a page's alignment fills the page all the same.
    assert_eq!(layout(1_000, 4_096, 1 << 20).slots_per_page, 4);
}

#[test]
fn without_slots_a_page_is_a_block() {
    let layout = layout(0, 1_000, 10_500);
    assert_eq!((layout.page_bytes, layout.pages, layout.blocks_per_page), (1_000, 10, 1));
    assert_eq!((layout.slots_per_page, layout.max_slots()), (0, 4));
    assert_eq!((layout.slot_loss(), layout.block_loss()), (0.0, 0.0));
    assert_eq!((layout.slot_offset(Id::new(3)), layout.block_offset(Id::new(3))), (0, 3_000));
    assert_eq!((layout.max_sequences(1, 0), layout.max_sequences(256, 0)), (4, 2));
    assert_eq!(layout.max_tokens(), 640);
}

#[test]
fn without_blocks_only_slots_take_pages() {
    let layout = layout(4_096, 0, 10 * 4_096);
    assert_eq!((layout.page_bytes, layout.pages, layout.slots_per_page), (4_096, 10, 1));
    assert_eq!((layout.block_loss(), layout.block_offset(Id::new(9))), (0.0, 0));
    assert_eq!(layout.max_sequences(1_000_000, 1), 9);
}

#[test]
fn slots_of_one_page_do_not_overlap_and_stay_on_it() {
    let layout = layout(3 * 64, 5 * 64, 1 << 14);
    for index in 0..layout.max_slots() {
        let start = layout.slot_offset(Id::new(index as u32));
        let next = layout.slots_per_page * (start / layout.page_bytes + 1);
        assert_eq!(start / layout.page_bytes, index / layout.slots_per_page);
        assert!(start % layout.page_bytes + layout.slot_bytes <= layout.page_bytes);
        assert!(index < next);
    }
}

#[test]
fn packed_slots_change_neither_pages_nor_offsets_of_the_others() {
    // Kimi-Linear's S in 8 bits with a scale per head and key channel; windows and row as they are.
    let packed_bytes = 20 * (32 * 128 * (128 + 4)) + 1_474_560 + 4_608;
    let with = PoolLayout::new(TierSizes { packed_bytes, ..KIMI_LINEAR }).expect("it fits");
    let without = PoolLayout::new(KIMI_LINEAR).expect("it fits");
    assert_eq!((with.packed_per_page, with.max_packed()), (3, 3 * 805));
    assert_eq!((without.packed_per_page, without.max_packed()), (0, 0));
    assert_eq!(PoolLayout { packed_bytes: 0, packed_per_page: 0, ..with.clone() }, without);
    assert_eq!(with.packed_offset(Id::new(3 * 7 + 2)), 7 * 43_425_792 + 2 * packed_bytes);
    assert_eq!(with.without_memory().max_packed(), 0);
}

#[test]
fn packed_slots_of_one_page_do_not_overlap_and_stay_on_it() {
    for packed_bytes in [1, 64, 128, 192] {
        let sizes = TierSizes {
            slot_bytes: 192,
            block_bytes: 320,
            packed_bytes,
            memory_bytes: 1 << 14,
            max_zero_byte_slots: 0,
        };
        let layout = PoolLayout::new(sizes).expect("a layout");
        let starts = (0..layout.max_packed()).map(|i| layout.packed_offset(Id::new(i as u32)));
        let starts: Vec<usize> = starts.collect();
        assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= packed_bytes));
        let on_page = |start: &usize| start % layout.page_bytes + packed_bytes <= layout.page_bytes;
        assert!(starts.iter().all(on_page) && starts.len() >= layout.max_slots());
        assert!(starts.iter().all(|start| start + packed_bytes <= layout.arena_bytes()));
    }
}

#[test]
fn a_packed_slot_larger_than_a_slot_is_refused_by_name() {
    for (slot_bytes, packed_bytes) in [(4_096, 4_097), (0, 1)] {
        let sizes = TierSizes { slot_bytes, packed_bytes, ..KIMI_LINEAR };
        let sizes = TierSizes { max_zero_byte_slots: 1, ..sizes };
        let error = PoolLayout::new(sizes).expect_err("it is no packed slot");
        assert_eq!(error, LayoutError::PackedTooLarge { packed_bytes, slot_bytes });
        let named = format!("packed_bytes is {packed_bytes}, allowed: at most the {slot_bytes}");
        assert!(error.to_string().starts_with(&named), "{error}");
    }
    // More packed slots than ids on one page.
    let sizes = TierSizes { slot_bytes: 1 << 40, packed_bytes: 1, ..KIMI_LINEAR };
    let sizes = TierSizes { memory_bytes: 1 << 50, ..sizes };
    assert!(matches!(PoolLayout::new(sizes), Err(LayoutError::Unaddressable { .. })));
}

#[test]
#[should_panic(expected = "slot 10 of 10 slots")]
fn an_id_of_another_layout_has_no_offset() {
    layout(4_096, 0, 10 * 4_096).slot_offset(Id::new(10));
}

#[test]
fn errors_name_the_value_that_works() {
    let error = sizes(8_192, 4_096, 16_383).expect_err("a slot and a block need two pages");
    assert_eq!(error, LayoutError::TooSmall { memory_bytes: 16_383, needed_bytes: 16_384 });
    assert!(error.to_string().contains("16384"));
    assert_eq!(layout(8_192, 4_096, 16_384).max_tokens(), 128);

    let Err(LayoutError::TooLarge { max_bytes, .. }) = sizes(0, 64, usize::MAX) else {
        panic!("more units than ids");
    };
    assert_eq!(layout(0, 64, max_bytes).pages, u32::MAX as usize);
    assert!(sizes(0, 64, max_bytes + 1).is_err());
}

#[test]
fn absurd_sizes_are_errors_and_never_overflow() {
    assert_eq!(sizes(0, 0, 1), Err(LayoutError::NoUnits));
    let none = TierSizes {
        slot_bytes: 0,
        block_bytes: 64,
        packed_bytes: 0,
        memory_bytes: 640,
        max_zero_byte_slots: 0,
    };
    assert!(matches!(PoolLayout::new(none), Err(LayoutError::ZeroByteSlots { .. })));
    let sizes_of_note = [0, 1, 63, 4_095, 4_096, 1 << 31, 1 << 62, usize::MAX - 4_096, usize::MAX];
    for slot in sizes_of_note {
        for block in sizes_of_note {
            for memory in sizes_of_note {
                let Ok(layout) = sizes(slot, block, memory) else { continue };
                assert!(layout.arena_bytes() <= memory);
                assert!(layout.pages_for(1, 1).is_some());
                assert!(layout.max_sequences(1, 0) >= 1 && layout.max_tokens() >= 1);
                let _ =
                    (layout.max_sequences(usize::MAX, usize::MAX), layout.pages_for(usize::MAX, 0));
            }
        }
    }
}
