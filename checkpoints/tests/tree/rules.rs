//! The rules by which prefixes enter the tree and are found, by name. What must hold whatever
//! happens is in `model.rs`.

use checkpoints::{History, Lineage, MatchOptions, MissReason, Prefix};
use state_pool::Tier;

use crate::support::{hybrid, miss, part, run};

fn exact_only() -> MatchOptions {
    MatchOptions { exact_only: true, ..MatchOptions::default() }
}

#[test]
fn a_state_behind_the_whole_prompt_is_a_hit() {
    let mut house = hybrid();
    house.keep(None, &run(0, 128), 128);
    let found = house.look_up(&run(0, 128));
    assert_eq!((found.matched_tokens, found.miss), (128, None));
    let usable = found.usable.expect("the state");
    assert_eq!((usable.position, usable.lineage, usable.tier), (128, Lineage::Exact, Tier::Device));
    house.resume(&usable, &run(0, 128)).release(&mut house.device);
    house.finish();
}

#[test]
fn tokens_match_deeper_than_the_states_and_the_reason_is_told() {
    let mut house = hybrid();
    house.keep(None, &run(0, 128), 128);
    house.keep(None, &run(0, 400), 384);
    let asked = part(300, 9_000, 350);
    let found = house.look_up(&asked);
    assert_eq!(found.matched_tokens, 300, "a match may end inside a node and inside a block");
    assert_eq!(found.usable.map(|usable| usable.position), Some(128));
    assert_eq!(found.miss, Some(MissReason::NeverTaken));
    assert_eq!(miss(&house, &part(140, 9_000, 350)), None, "no grid position lies in between");
    assert_eq!(house.look_up(&run(7, 10)).matched_tokens, 0);
    house.finish();
}

#[test]
fn salts_never_meet() {
    let mut house = hybrid();
    house.keep(Some("a"), &run(0, 128), 128);
    for salt in [None, Some("b")] {
        let found = house.tree.match_prefix(salt, &run(0, 128), MatchOptions::default());
        assert_eq!((found.matched_tokens, found.usable, found.miss), (0, None, None));
        assert_eq!(house.tree.junctions(salt, &part(64, 9, 128)), [0; 0]);
    }
    assert!(house.tree.match_prefix(Some("a"), &run(0, 128), exact_only()).usable.is_some());
    assert_eq!(house.tree.junctions(Some("a"), &part(64, 9, 128)), [64]);
    house.finish();
}

#[test]
fn paths_that_part_inside_a_block_each_own_their_copy_of_it() {
    let mut house = hybrid();
    house.keep(None, &run(0, 192), 192);
    house.keep(None, &part(150, 9_000, 192), 192);
    assert_eq!(house.tree.stats().device.blocks, 2 + 1 + 1);
    assert_eq!(house.tree.stats().nodes, 3);
    assert_eq!(house.look_up(&part(150, 70, 192)).matched_tokens, 150);
    house.finish();
}

/// A turn ends at 151; the next goes on from there in a copy of the tail block.
#[test]
fn a_turn_end_is_resumed_at_its_very_token() {
    let mut house = hybrid();
    house.keep(None, &run(0, 151), 128);
    let usable = house.look_up(&run(0, 300)).usable.expect("the turn's end");
    assert_eq!((usable.position, usable.lineage), (151, Lineage::NonExact));
    let state = house.resume(&usable, &run(0, 300));
    assert_eq!(state.shared_blocks_to_write(&house.device, 300).collect::<Vec<_>>(), [2]);
    let state = house.go_on(state, &run(0, 300)).expect("room");
    house.donate(
        Prefix { salt: None, tokens: &run(0, 300), exact_tokens: 128, histories: &[] },
        state,
    );
    house.check();
    assert_eq!((house.position(&run(0, 200)), house.position(&run(0, 310))), (151, 300));
    // Blocks 0 and 1, the tail, its copy and two more.
    assert_eq!(house.tree.stats().device.blocks, 2 + 1 + 3);
    house.finish();
}

#[test]
fn equal_tokens_share_nodes_within_a_lineage_and_stand_side_by_side_otherwise() {
    let mut house = hybrid();
    house.keep(None, &run(0, 192), 192);
    house.keep(None, &run(0, 192), 192);
    let stats = house.tree.stats();
    assert_eq!((stats.device.blocks, stats.device.slots), (3, 1));
    assert_eq!((stats.inserted, stats.duplicates), (1, 1));
    house.keep(None, &run(0, 192), 64);
    let stats = house.tree.stats();
    assert_eq!((stats.device.blocks, stats.device.slots), (5, 2), "two blocks of other bits");
    assert_eq!(house.device.stats().blocks.handles, 5);
    let usable = house.look_up(&run(0, 200)).usable.expect("two states");
    assert_eq!(usable.lineage, Lineage::Exact, "the exact one on a tie");
    house.finish();
}

#[test]
fn exact_only_passes_over_what_is_not() {
    let mut house = hybrid();
    house.keep(None, &run(0, 128), 128);
    house.keep(None, &run(0, 151), 128);
    let found = house.tree.match_prefix(None, &run(0, 200), exact_only());
    assert_eq!(found.usable.map(|usable| usable.position), Some(128));
    assert_eq!((found.matched_tokens, found.miss), (151, Some(MissReason::NotExact)));
    house.finish();
}

/// The border of the lineages is what a sequence that goes on has to keep; only what lies before
/// it has the bits of a cold run, and a parked sequence may share only that.
#[test]
fn a_state_tells_how_many_of_its_tokens_are_exact() {
    let mut house = hybrid();
    house.keep(None, &run(0, 192), 192);
    house.keep(None, &run(0, 301), 128);
    let border = |tokens: usize| {
        house.look_up(&run(0, tokens)).usable.map(|usable| (usable.position, usable.exact_tokens))
    };
    assert_eq!((border(200), border(301)), (Some((192, 192)), Some((301, 128))));
    let exact = |tokens: &[u32]| house.tree.exact_blocks(Tier::Device, None, tokens);
    assert_eq!((exact(&run(0, 301)), exact(&run(0, 150)), exact(&run(9, 64))), (3, 2, 0));
    assert_eq!(house.tree.exact_blocks(Tier::Host, None, &run(0, 301)), 0);
    let shared = house.tree.share_exact_blocks(&mut house.device, None, &run(0, 301), 2);
    assert_eq!(shared.len(), 2);
    shared.into_iter().for_each(|block| assert!(!house.device.release(block)));
    house.finish();
}

#[test]
fn a_state_on_the_host_is_passed_over_where_copies_fail() {
    let mut house = hybrid();
    house.keep(None, &run(0, 128), 128);
    let demotion = house.demote().expect("the checkpoint");
    house.end_demotion(demotion, true);
    assert!(house.evict_one(Tier::Device));
    let options = MatchOptions { device_only: true, ..MatchOptions::default() };
    assert_eq!(house.tree.match_prefix(None, &run(0, 150), options).usable, None);
    assert_eq!(house.position(&run(0, 150)), 128);
    house.finish();
}

#[test]
fn a_recompute_uses_nothing_beyond_its_limit() {
    let mut house = hybrid();
    house.keep(None, &run(0, 128), 128);
    house.keep(None, &run(0, 256), 256);
    let options = MatchOptions { limit_tokens: 192, ..MatchOptions::default() };
    let found = house.tree.match_prefix(None, &run(0, 300), options);
    assert_eq!(found.usable.map(|usable| usable.position), Some(128));
    assert_eq!((found.matched_tokens, found.miss), (256, Some(MissReason::NeverTaken)));
    house.finish();
}

#[test]
fn a_snapshot_that_was_left_out_is_the_reason() {
    let mut house = hybrid();
    house.keep(None, &run(0, 400), 384);
    house.tree.note_left_out(Prefix {
        salt: None,
        tokens: &run(0, 256),
        exact_tokens: 256,
        histories: &[],
    });
    assert_eq!(miss(&house, &part(300, 9_000, 400)), Some(MissReason::NoSlot));
    assert_eq!(house.tree.stats().left_out, 1);
    house.finish();
}

#[test]
#[should_panic(expected = "65 exact tokens")]
fn exact_tokens_end_on_a_block_border() {
    let mut house = hybrid();
    house.keep(None, &run(0, 100), 65);
}

/// The same tokens, once generated and once read as a prompt that went on from a turn's end: the
/// state of the one does not go with the rows of the other.
#[test]
fn a_state_is_not_kept_behind_rows_of_another_history() {
    let mut house = hybrid();
    let tokens = run(0, 300);
    let generated = [(128, History::EXACT.past_border(140))];
    let asked = [(128, generated[0].1), (255, generated[0].1.resumed_at(255))];
    let mut keep = |len: usize, histories: &[(usize, History)]| {
        let state = house.compute(&tokens[..len]).expect("room");
        let (salt, exact_tokens) = (None, 128);
        house.donate(Prefix { salt, tokens: &tokens[..len], exact_tokens, histories }, state);
        house.check();
        house.tree.stats().of_other_history
    };
    assert_eq!(keep(300, &generated), 0);
    assert_eq!(keep(256, &asked), 1, "token 255 is another");
    assert_eq!(keep(192, &asked), 1, "all tokens before are the same");
    assert_eq!(keep(256, &generated), 1);
    assert_eq!([200, 260, 300].map(|len| house.position(&tokens[..len])), [192, 256, 300]);
    let usable = house.look_up(&tokens).usable.expect("the end");
    assert_eq!(house.tree.histories(&usable), generated);
    house.finish();
}
