//! Where snapshots are wanted, and who makes room for whom.

use checkpoints::{Match, Placement, Prefix, TreeOptions};
use state_pool::{SequenceState, Tier};

use crate::support::{House, hybrid, part, run};

const NOTHING: Placement = Placement {
    junctions: false,
    branch: false,
    guard: false,
    prompt_end: false,
    spread: false,
    every: None,
};

fn wanted(house: &House, tokens: &[u32], marks: &[usize], placement: &Placement) -> Vec<usize> {
    let found = house.look_up(tokens);
    house.tree.wanted(None, tokens, &found, marks, placement)
}

/// Resumes once and lets go, as a sequence that went on does.
fn resume_once(house: &mut House, tokens: &[u32]) {
    let usable = house.look_up(tokens).usable.expect("a state");
    house.resume(&usable, tokens).release(&mut house.device);
}

#[test]
fn a_long_cold_prompt_leaves_states_in_between_a_guard_and_its_end() {
    let house = hybrid();
    let tokens = run(0, 10_100);
    let positions = wanted(&house, &tokens, &[], &Placement::default());
    assert_eq!(positions, [4_096, 9_536, 10_048], "8,192 is too near the end");
    assert_eq!(wanted(&house, &run(0, 300), &[], &Placement::default()), [256]);
    assert_eq!(wanted(&house, &run(0, 63), &[], &Placement::default()), [0; 0]);
    house.finish();
}

#[test]
fn marks_and_every_are_floored_to_the_grid_and_lie_above_what_is_resumed_from() {
    let mut house = hybrid();
    house.keep(None, &run(0, 128), 128);
    let placement = Placement { every: Some(100), ..NOTHING };
    let marks = [0, 100, 130, 195, 196, 400, 401, 9_000];
    assert_eq!(wanted(&house, &run(0, 400), &marks, &placement), [192, 256, 384]);
    house.finish();
}

#[test]
fn a_branch_is_wanted_where_the_match_ends_and_no_state_lies() {
    let mut house = hybrid();
    house.keep(None, &run(0, 640), 640);
    let branch = Placement { branch: true, ..NOTHING };
    assert_eq!(wanted(&house, &part(300, 9_000, 500), &[], &branch), [256]);
    assert_eq!(wanted(&house, &run(0, 700), &[], &branch), [0; 0], "the state lies there");
    house.finish();
}

#[test]
fn without_recurrent_layers_no_snapshot_is_wanted() {
    let options = TreeOptions { is_recurrent: false, grid_tokens: 1, max_ghost_tokens: 1 << 20 };
    let house = House::new(options, 40);
    let all = Placement { branch: true, every: Some(64), ..Placement::default() };
    let none: [usize; 0] = [];
    assert_eq!(house.tree.wanted(None, &run(0, 900), &Match::default(), &[64], &all), none);
    house.finish();
}

#[test]
fn a_snapshot_takes_the_slot_of_what_is_worth_less_and_of_nothing_else() {
    let mut house = House::new(TreeOptions::default(), 6);
    house.keep(None, &run(0, 128), 128);
    house.keep(None, &run(5_000, 384), 384);
    let fill = SequenceState::allocate(&mut house.device, 64).expect("the last page");
    assert!(!house.device.fits(0, 1));
    assert!(!house.tree.room_for(&mut house.device, 0, 64, 1), "worth less than both");
    assert_eq!(house.tree.stats().device.evicted, 0);
    assert!(!house.tree.room_for(&mut house.device, 2, 9_000, 0), "two are worth less, not three");
    assert_eq!(house.tree.stats().device.evicted, 0);
    assert!(house.tree.room_for(&mut house.device, 0, 256, 4));
    assert_eq!((house.position(&run(0, 200)), house.position(&run(5_000, 400))), (0, 384));
    assert!(house.device.fits(0, 1));
    fill.release(&mut house.device);
    house.finish();
}

#[test]
fn no_more_goes_for_a_snapshot_than_it_takes() {
    let mut house = House::new(TreeOptions::default(), 4);
    house.keep(None, &run(0, 192), 192);
    house.keep(None, &run(5_000, 192), 192);
    assert!(house.tree.room_for(&mut house.device, 1, 9_000, 0));
    assert_eq!((house.tree.stats().device.evicted, house.device.free_pages()), (1, 2));
    house.finish();
}

#[test]
fn a_state_that_is_held_is_passed_over_and_can_be_handed_over() {
    let mut house = hybrid();
    house.keep(None, &run(0, 128), 128);
    let usable = house.look_up(&run(0, 200)).usable.expect("the state");
    let state = house.resume(&usable, &run(0, 200));
    assert!(!house.evict_one(Tier::Device), "others hold it");
    assert!(house.tree.hand_over(&mut house.device, state.slot().id()));
    assert!(!house.tree.hand_over(&mut house.device, state.slot().id()), "it is gone");
    assert_eq!((house.position(&run(0, 200)), house.device.stats().slots.held), (0, 1));
    assert!(state.is_slot_sole(&house.device));
    house.check();
    state.release(&mut house.device);
    house.finish();
}

/// A sequence that cannot have what it needs whatever goes: the cache is not emptied for it.
#[test]
fn what_would_not_fit_whatever_goes_is_known_before() {
    let mut house = hybrid();
    house.keep(None, &run(0, 192), 192);
    house.keep(None, &run(9_000, 192), 192);
    let held = house.compute(&run(50_000, 64 * 80)).expect("room for eighty blocks");
    let pages = house.device.stats().pages;
    assert!(!house.tree.could_free(&house.device, 0, 0, pages - 4));
    assert!(house.tree.could_free(&house.device, 0, 0, 4));
    held.release(&mut house.device);
    assert!(house.tree.could_free(&house.device, 0, 0, pages));
    house.finish();
}

/// What is not to be used again goes in both tiers, with all that lies below it; what lies above
/// stays.
#[test]
fn what_is_discarded_goes_with_all_that_grew_from_it() {
    let mut house = hybrid();
    house.keep(None, &run(0, 128), 128);
    house.keep(None, &run(0, 256), 256);
    house.keep(None, &run(0, 400), 384);
    house.keep(None, &part(128, 7_000, 256), 256);
    let demotion = house.demote().expect("a checkpoint");
    house.end_demotion(demotion, true);
    let pools = (&mut house.device, &mut house.host);
    assert_eq!(house.tree.discard(pools, None, &run(0, 256), 192), 2);
    house.check();
    assert_eq!((house.position(&run(0, 500)), house.position(&part(128, 7_000, 300))), (128, 256));
    house.finish();
}

#[test]
fn a_first_resume_spends_the_short_rest_of_the_path_and_a_second_takes_it_back() {
    let mut house = hybrid();
    house.keep(None, &run(9_000, 128), 128);
    house.keep(None, &run(0, 128), 128);
    house.keep(None, &run(0, 200), 192);
    resume_once(&mut house, &part(128, 7_000, 300));
    assert!(house.evict_one(Tier::Device) && house.evict_one(Tier::Device));
    assert_eq!((house.position(&run(0, 300)), house.position(&run(9_000, 300))), (0, 128));
    house.keep(None, &run(0, 128), 128);
    resume_once(&mut house, &run(0, 300));
    resume_once(&mut house, &run(0, 300));
    assert!(house.evict_one(Tier::Device));
    assert_eq!((house.position(&run(0, 300)), house.position(&run(9_000, 300))), (128, 0));
    house.finish();
}

/// The ghost of one that passed before tells that more will.
#[test]
fn a_state_that_a_ghost_passes_outlives_its_equal_and_is_not_spent_by_a_resume() {
    for is_passed in [true, false] {
        let mut house = hybrid();
        let ghost = if is_passed { run(0, 256) } else { run(3_000, 256) };
        house.tree.note_left_out(Prefix {
            salt: None,
            tokens: &ghost,
            exact_tokens: 256,
            histories: &[],
        });
        house.keep(None, &run(0, 128), 128);
        house.keep(None, &run(9_000, 128), 128);
        resume_once(&mut house, &run(0, 300));
        assert!(house.evict_one(Tier::Device));
        assert_eq!(house.position(&run(0, 300)) > 0, is_passed);
        house.finish();
    }
}

#[test]
fn a_demotion_stops_when_what_goes_first_is_clean_or_spent() {
    let mut house = hybrid();
    house.keep(None, &run(0, 128), 128);
    house.keep(None, &run(5_000, 384), 384);
    house.keep(None, &run(9_000, 128), 128);
    resume_once(&mut house, &run(9_000, 300));
    let one = house.device.layout().slot_bytes + 2 * house.device.layout().block_bytes;
    let demote = |house: &mut House, bytes| {
        let demotion = house.tree.demote(&mut house.device, &mut house.host, bytes);
        demotion.expect("room on the host")
    };
    assert!(demote(&mut house, one).is_none(), "the spent one covers it");
    let first = demote(&mut house, one + 1).expect("the least worthy that is not spent");
    assert_eq!(first.source_blocks.len(), 2);
    assert!(demote(&mut house, 2 * one).is_none(), "its copy is on its way");
    house.end_demotion(first, true);
    assert!(demote(&mut house, 2 * one).is_none(), "it is clean");
    let second = demote(&mut house, usize::MAX).expect("the last");
    assert_eq!(second.source_blocks.len(), 6);
    house.end_demotion(second, true);
    assert!(demote(&mut house, usize::MAX).is_none(), "a spent state is not copied");
    house.finish();
}

#[test]
fn on_a_full_host_a_copy_takes_the_room_of_what_is_worth_less_and_never_goes_in_circles() {
    let mut house = hybrid();
    let parked = SequenceState::allocate(&mut house.host, 36 * 3 * 64).expect("room");
    house.keep(None, &run(0, 128), 128);
    let first = house.demote().expect("the only one");
    house.end_demotion(first, true);
    house.keep(None, &run(5_000, 192), 192);
    let second = house.demote().expect("the worthier one");
    house.end_demotion(second, true);
    let stats = house.tree.stats();
    assert_eq!((stats.host.slots, stats.host.evicted), (1, 1));
    let demotion = house.tree.demote(&mut house.device, &mut house.host, usize::MAX);
    let demotion = demotion.expect("nothing is asked of the host");
    assert!(demotion.is_none(), "the host had its copy and evicted it");
    house.check();
    parked.release(&mut house.host);
    house.finish();
}
