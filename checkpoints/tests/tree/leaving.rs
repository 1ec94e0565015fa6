//! The rules by which states leave a tier: eviction, demotion and the way back.

use checkpoints::{MissReason, Prefix, Room, TreeOptions};
use state_pool::{SequenceState, Tier};

use crate::support::{House, hybrid, miss, part, run};

#[test]
fn an_evicted_state_leaves_its_blocks_to_deeper_ones_and_a_ghost() {
    let mut house = hybrid();
    house.keep(None, &run(0, 64), 64);
    house.keep(None, &run(0, 320), 320);
    house.keep(None, &part(64, 9_000, 320), 320);
    let before = house.tree.stats().device;
    assert!(house.evict_one(Tier::Device), "the upper one saves least per byte");
    let after = house.tree.stats().device;
    assert_eq!((after.slots, after.blocks, after.evicted), (before.slots - 1, before.blocks, 1));
    let found = house.look_up(&part(64, 5_000, 320));
    assert_eq!((found.matched_tokens, found.usable), (64, None));
    assert_eq!(found.miss, Some(MissReason::Evicted));
    while house.evict_one(Tier::Device) {
        house.check();
    }
    let stats = house.tree.stats();
    assert_eq!((stats.device.blocks, stats.nodes, stats.ghost_tokens), (0, 0, 576));
    assert_eq!(miss(&house, &run(0, 330)), Some(MissReason::Evicted));
    assert_eq!(house.tree.junctions(None, &part(200, 7_000, 300)), [64, 192]);
    house.finish();
}

#[test]
fn blocks_of_no_checkpoint_go_with_its_slot() {
    let mut house = hybrid();
    house.keep(None, &run(0, 640), 640);
    let blocks = house.device.stats().blocks.held;
    assert!(house.evict_one(Tier::Device) && !house.evict_one(Tier::Device));
    assert_eq!((blocks, house.device.stats().blocks.held), (10, 0));
    house.finish();
}

#[test]
fn a_spent_state_is_the_first_to_go_unless_another_resumes_from_it() {
    for resumes in [1, 2] {
        let mut house = hybrid();
        house.keep(None, &run(5_000, 151), 128);
        house.keep(None, &run(0, 151), 128);
        for _ in 0..resumes {
            let usable = house.look_up(&run(0, 200)).usable.expect("the turn's end");
            house.resume(&usable, &run(0, 200)).release(&mut house.device);
        }
        assert!(house.evict_one(Tier::Device));
        let is_gone = house.position(&run(0, 200)) == 0;
        assert_eq!(is_gone, resumes == 1, "{resumes} resumes");
        house.finish();
    }
}

/// The node outlives its slot for the sake of a deeper one, and must not remember its first life.
#[test]
fn a_state_that_is_taken_again_is_not_spent() {
    let mut house = hybrid();
    house.keep(None, &run(0, 128), 128);
    let usable = house.look_up(&run(0, 200)).usable.expect("the state");
    house.resume(&usable, &run(0, 200)).release(&mut house.device);
    house.keep(None, &run(0, 256), 256);
    assert!(house.evict_one(Tier::Device));
    assert_eq!((house.position(&run(0, 128)), house.position(&run(0, 256))), (0, 256));
    house.keep(None, &run(0, 128), 128);
    assert!(house.evict_one(Tier::Device), "the deeper one saves less per byte");
    assert_eq!((house.position(&run(0, 128)), house.position(&run(0, 256))), (128, 128));
    house.finish();
}

#[test]
fn what_others_hold_is_not_evicted() {
    let mut house = hybrid();
    house.keep(None, &run(0, 151), 128);
    let usable = house.look_up(&run(0, 151)).usable.expect("the state");
    let state = house.resume(&usable, &run(0, 151));
    assert!(!house.evict_one(Tier::Device));
    state.release(&mut house.device);
    assert!(house.evict_one(Tier::Device));
    house.finish();
}

#[test]
fn freeing_stops_when_it_fits_and_says_when_it_cannot() {
    let mut house = House::new(TreeOptions::default(), 6);
    house.keep(None, &run(0, 128), 128);
    house.keep(None, &run(5_000, 128), 128);
    // Two slots, two pages of blocks, one of them with room for two more.
    assert!(house.tree.free(&mut house.device, 0, 2, 2), "it fits already");
    assert_eq!(house.tree.stats().device.evicted, 0);
    assert!(house.tree.free(&mut house.device, 0, 0, 3));
    assert_eq!(house.tree.stats().device.evicted, 1);
    assert!(!house.tree.free(&mut house.device, 0, 0, 7));
    assert_eq!(house.tree.stats().device.slots, 0);
    house.finish();
}

#[test]
fn a_demoted_checkpoint_stays_and_comes_back_from_the_host() {
    let mut house = hybrid();
    house.keep(None, &run(0, 151), 128);
    let demotion = house.demote().expect("one checkpoint");
    assert!(!house.evict_one(Tier::Device), "its copy is on its way");
    assert!(house.demote().is_none());
    house.end_demotion(demotion, true);
    let stats = house.tree.stats();
    assert_eq!((stats.device.blocks, stats.host.blocks, stats.demoted), (3, 3, 1));
    assert_eq!(house.look_up(&run(0, 200)).usable.map(|usable| usable.tier), Some(Tier::Device));

    assert!(house.evict_one(Tier::Device), "it frees its units at once");
    assert_eq!(house.device.stats().free_pages, 40);
    assert_eq!(house.tree.stats().ghost_tokens, 0, "it is not lost");
    let found = house.look_up(&run(0, 200));
    let usable = found.usable.expect("the copy");
    assert_eq!((usable.position, usable.tier, found.miss), (151, Tier::Host, None));
    let state = house.resume(&usable, &run(0, 200));
    assert!(!house.evict_one(Tier::Device));
    house.donate(
        Prefix { salt: None, tokens: &run(0, 151), exact_tokens: 128, histories: &[] },
        state,
    );
    house.check();
    let stats = house.tree.stats();
    assert_eq!((stats.device.blocks, stats.host.blocks, stats.promoted), (3, 3, 1));
    house.finish();
}

/// The device still has the blocks of the system prompt for another chat.
#[test]
fn a_promotion_shares_the_blocks_that_the_device_still_has() {
    let mut house = hybrid();
    house.keep(None, &run(0, 256), 256);
    let demotion = house.demote().expect("the checkpoint");
    house.end_demotion(demotion, true);
    house.keep(None, &part(128, 9_000, 256), 256);
    let usable = house.look_up(&run(0, 256)).usable.expect("the older one");
    house.resume(&usable, &run(0, 256)).release(&mut house.device);
    assert!(house.evict_one(Tier::Device), "the spent one");
    let usable = house.look_up(&run(0, 256)).usable.expect("the copy");
    assert_eq!(usable.tier, Tier::Host);
    let source = house.tree.hold(&usable, &mut house.host).expect("a state");
    let shared = house.tree.share_blocks(&usable, &mut house.device);
    assert_eq!((source.table().len(), shared.len()), (4, 2));
    assert!(!house.evict_one(Tier::Host), "its units are read");
    source.release(&mut house.host);
    shared.into_iter().for_each(|block| assert!(!house.device.release(block)));
    house.finish();
}

#[test]
fn a_copy_that_fails_or_comes_too_late_is_given_back() {
    let mut house = hybrid();
    house.keep(None, &run(0, 128), 128);
    let demotion = house.demote().expect("the checkpoint");
    house.end_demotion(demotion, false);
    assert!(house.demote().is_none(), "not for nothing again");
    house.keep(None, &run(0, 128), 128);
    let demotion = house.demote().expect("again, since it was of use again");
    house.tree.clear(&mut house.device);
    house.end_demotion(demotion, true);
    let stats = house.tree.stats();
    assert_eq!((stats.demoted, stats.demotions_failed, stats.host.blocks), (0, 2, 0));
    house.finish();
}

#[test]
fn room_without_loss_is_made_of_what_has_a_copy_and_stops_before_what_has_none() {
    let mut house = House::new(TreeOptions::default(), 4);
    house.keep(None, &run(0, 64), 64);
    let demotion = house.demote().expect("the first");
    house.keep(None, &run(500, 64), 64);
    let make =
        |house: &mut House, slots| house.tree.free_without_loss(&mut house.device, 0, 0, slots);
    assert_eq!(make(&mut house, 1), Room::Made);
    assert_eq!(make(&mut house, 2), Room::Lossy, "one is on its way, the other has no copy");
    house.end_demotion(demotion, true);
    assert_eq!(make(&mut house, 2), Room::Made);
    assert_eq!((house.tree.stats().device.slots, house.position(&run(500, 64))), (1, 64));
    assert_eq!(make(&mut house, 4), Room::Lossy, "the other");
    let used = house.look_up(&run(500, 64)).usable.expect("it is there");
    let held = house.tree.hold(&used, &mut house.device).expect("a share");
    assert_eq!(make(&mut house, 4), Room::Lacking, "somebody reads it");
    held.release(&mut house.device);
    house.finish();
}

/// The copy of a deeper checkpoint goes on from blocks that the host evicts meanwhile.
#[test]
fn a_copy_whose_beginning_the_host_lost_does_not_count() {
    let mut house = hybrid();
    house.keep(None, &run(0, 128), 128);
    let upper = house.demote().expect("the checkpoint");
    house.end_demotion(upper, true);
    house.keep(None, &run(0, 256), 256);
    let lower = house.demote().expect("the other");
    assert_eq!(lower.source_blocks.len(), 2);
    assert!(house.evict_one(Tier::Host));
    house.end_demotion(lower, true);
    house.check();
    assert_eq!(house.tree.stats().demotions_failed, 1);
    house.finish();
}

#[test]
fn a_full_host_refuses_a_demotion_and_touches_nothing() {
    let mut house = hybrid();
    house.keep(None, &run(0, 128), 128);
    let parked = SequenceState::allocate(&mut house.host, 38 * 3 * 64).expect("room");
    assert!(house.tree.demote(&mut house.device, &mut house.host, usize::MAX).is_err());
    assert!(house.evict_one(Tier::Device));
    parked.release(&mut house.host);
    house.finish();
}
