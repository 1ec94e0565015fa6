//! The rules of models without recurrent layers: blocks are all there is.

use checkpoints::{MissReason, Prefix, TreeOptions};
use state_pool::Tier;

use crate::model::Random;
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
            house.donate(
                Prefix { salt: None, tokens: &asked, exact_tokens: 0, histories: &[] },
                state,
            );
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

/// Random histories: what is matched is what the kept paths have in common with the prompt, less
/// only after an eviction, and every block that is shared holds what its tokens say.
#[test]
fn random_histories_without_recurrent_layers_match_what_was_kept() {
    let counts = (0..SEEDS).map(|seed| {
        let outcome = std::panic::catch_unwind(|| history(seed));
        outcome.unwrap_or_else(|_| panic!("seed {seed} failed; see the panic above"))
    });
    let (resumed, evicted) = counts.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    assert!(resumed > 4_000 && evicted > 4_000, "{resumed} resumed, {evicted} evicted");
}

const SEEDS: u64 = 500;

/// Resumes and evictions seen.
fn history(seed: u64) -> (usize, usize) {
    let mut random = Random::new(seed);
    let mut house = House::new(ATTENTION_ONLY, 16 + random.below(40));
    let mut kept: Vec<Vec<u32>> = vec![vec![]];
    let mut counts = (0, 0);
    for _ in 0..50 {
        let path = &kept[random.below(kept.len())];
        let mut asked = path[..random.below(path.len() + 1)].to_vec();
        asked.extend(run(random.below(3) as u32, 1 + random.below(200)));
        asked.truncate(800);
        while !house.device.fits(asked.len().div_ceil(64) + 1, 2) && house.evict_one(Tier::Device) {
            counts.1 += 1;
        }
        let found = house.look_up(&asked);
        let most = kept.iter().map(|path| common(path, &asked)).max().expect("one is there");
        let position = found.usable.map_or(0, |usable| usable.position);
        assert!(found.matched_tokens == most || counts.1 > 0 && found.matched_tokens < most);
        assert_eq!(position, found.matched_tokens.min(asked.len() - 1));
        let state = match found.usable {
            Some(usable) => {
                counts.0 += 1;
                let state = house.resume(&usable, &asked);
                house.go_on(state, &asked)
            }
            None => house.compute(&asked),
        };
        let Some(state) = state else { continue };
        let exact_tokens = random.below(asked.len() / 64 + 1) * 64;
        house.donate(Prefix { salt: None, tokens: &asked, exact_tokens, histories: &[] }, state);
        kept.push(asked);
        house.check();
        let handles = house.device.stats().blocks.handles;
        assert_eq!(handles, house.tree.stats().device.blocks);
    }
    house.finish();
    counts
}

fn common(left: &[u32], right: &[u32]) -> usize {
    left.iter().zip(right).take_while(|(left, right)| left == right).count()
}
