//! The rules of models without recurrent layers: blocks are all there is.

use checkpoints::{MissReason, Prefix, TreeOptions};
use state_pool::Tier;

use crate::support::{House, miss, part, run};

const ATTENTION_ONLY: TreeOptions =
    TreeOptions { is_recurrent: false, grid_tokens: 1, max_ghost_tokens: 1 << 20 };

#[test]
fn without_recurrent_layers_any_position_can_be_resumed_from_but_the_last_token() {
    let mut house = House::new(ATTENTION_ONLY, 60);
    house.keep(None, &run(0, 300), 256);
    assert_eq!(house.tree.stats().device.slots, 0);
    for (asked, position) in [
        (run(0, 300), 299),
        (run(0, 301), 300),
        (run(0, 100), 99),
        (part(150, 9_000, 200), 150),
        (part(3, 9_000, 200), 3),
        (run(0, 1), 0),
    ] {
        let found = house.look_up(&asked);
        assert_eq!(
            (found.usable.map_or(0, |usable| usable.position), found.miss),
            (position, None)
        );
        if let Some(usable) = found.usable {
            let state = house.resume(&usable, &asked);
            let state = house.go_on(state, &asked).expect("room");
            house.donate(Prefix { salt: None, tokens: &asked, exact_tokens: 0 }, state);
            house.check();
        }
    }
    assert_eq!(house.tree.junctions(None, &part(64, 9_000, 200)), [0; 0]);
    house.finish();
}

#[test]
fn a_coarser_grid_floors_the_position_without_recurrent_layers() {
    let mut house = House::new(TreeOptions { grid_tokens: 64, ..ATTENTION_ONLY }, 60);
    house.keep(None, &run(0, 300), 256);
    assert_eq!((house.position(&run(0, 256)), house.position(&run(0, 400))), (192, 256));
    house.finish();
}

#[test]
fn without_recurrent_layers_a_path_is_evicted_from_its_end() {
    let mut house = House::new(ATTENTION_ONLY, 80);
    house.keep(None, &run(0, 2_000), 0);
    assert!(house.evict_one(Tier::Device));
    house.check();
    assert_eq!(house.position(&run(0, 2_000)), 960);
    assert_eq!(miss(&house, &run(0, 2_001)), Some(MissReason::Evicted));
    assert!(house.evict_one(Tier::Device) && !house.evict_one(Tier::Device));
    assert_eq!(house.device.stats().blocks.held, 0);
    house.finish();
}
