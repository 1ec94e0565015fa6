//! The rules of prefixes without units: prompts that wait, and what is remembered.

use checkpoints::{MissReason, Prefix, TreeOptions};

use crate::support::{House, hybrid, miss, part, run};

#[test]
fn a_burst_learns_its_junctions_before_the_first_prefill() {
    let mut house = hybrid();
    let prompts = [part(300, 1_000, 500), part(300, 2_000, 500), part(130, 3_000, 500)];
    assert_eq!(house.tree.junctions(None, &prompts[0]), [0; 0]);
    for prompt in &prompts {
        assert!(house.tree.add_waiting(None, prompt));
    }
    assert_eq!(house.tree.junctions(None, &prompts[0]), [128, 256]);
    assert_eq!(house.tree.junctions(None, &prompts[2]), [128]);
    assert!(house.tree.add_waiting(None, &run(0, 200)), "a prefix of the first two");
    assert_eq!(house.tree.junctions(None, &prompts[0]), [128, 192, 256]);
    assert!(house.tree.remove_waiting(None, &run(0, 200)));
    assert!(!house.tree.remove_waiting(None, &run(0, 200)));
    for prompt in &prompts {
        assert!(house.tree.remove_waiting(None, prompt));
    }
    assert_eq!(house.tree.stats().ghost_tokens, 0);
    house.finish();
}

#[test]
fn equal_prompts_wait_as_often_as_they_were_added() {
    let mut house = hybrid();
    assert!(
        house.tree.add_waiting(None, &run(0, 100)) && house.tree.add_waiting(None, &run(0, 100))
    );
    assert_eq!(house.tree.stats().ghost_tokens, 100);
    assert!(house.tree.remove_waiting(None, &run(0, 100)));
    assert_eq!(house.tree.junctions(None, &part(64, 9, 100)), [64]);
    assert!(house.tree.remove_waiting(None, &run(0, 100)));
    assert!(!house.tree.remove_waiting(None, &run(0, 100)));
    house.finish();
}

#[test]
fn ghosts_are_bounded_and_the_oldest_memory_goes_first() {
    let mut house = House::new(TreeOptions { max_ghost_tokens: 400, ..TreeOptions::default() }, 40);
    for first in [0, 1_000] {
        let tokens = run(first, 150);
        house.tree.note_left_out(Prefix {
            salt: None,
            tokens: &tokens,
            exact_tokens: 0,
            histories: &[],
        });
    }
    assert!(house.tree.add_waiting(None, &run(2_000, 200)));
    assert_eq!(house.tree.stats().ghost_tokens, 350);
    assert_eq!(miss(&house, &run(0, 200)), None);
    assert_eq!(miss(&house, &run(1_000, 200)), Some(MissReason::NoSlot));
    assert!(!house.tree.add_waiting(None, &run(3_000, 201)), "those that wait are not dropped");
    assert_eq!(house.tree.stats().ghost_tokens, 200);
    assert!(house.tree.remove_waiting(None, &run(2_000, 200)));
    house.finish();
}

/// The way of a burst: the ghost goes, the state of the junction stays.
#[test]
fn the_first_of_a_burst_keeps_the_state_that_the_second_resumes_from() {
    let mut house = hybrid();
    let prompts = [part(300, 1_000, 500), part(300, 2_000, 500)];
    prompts.iter().for_each(|prompt| assert!(house.tree.add_waiting(None, prompt)));
    let junctions = house.tree.junctions(None, &prompts[0]);
    assert!(house.tree.remove_waiting(None, &prompts[0]));
    for position in junctions {
        house.keep(None, &prompts[0][..position], position);
    }
    let found = house.look_up(&prompts[1]);
    assert_eq!((found.usable.map(|usable| usable.position), found.miss), (Some(256), None));
    assert!(house.tree.remove_waiting(None, &prompts[1]));
    house.finish();
}
