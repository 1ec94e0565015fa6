//! Test number one: the real scheduler, pools, plan and `lower`, over a model whose next token is a
//! hash of its whole memory.
//!
//! A slot is an order-sensitive hash of the tokens it has absorbed, each mixed with its form and
//! with the start of its chunk modulo 64; a block row is its token, its form and, for prompt rows,
//! whether it lay below the prompt's last cell border. The next token is a hash of the slot and of
//! all rows through the table. Units that are free are poisoned after every step; transfers finish
//! after random delays, copy at their start or only at their end, or fail. Any aliasing, stale
//! copy, lost slot, wrong length, wrong cut or early free changes a token.

#[path = "support/seeds.rs"]
mod seeds;
#[path = "simulation/world.rs"]
mod world;

use seeds::seeds;
use world::{Events, Fault, World};

/// Runs seeds and adds up in how many of them each event happened.
fn run(seeds: std::ops::Range<u64>, long: bool, fault: Option<Fault>) -> Result<Events, String> {
    let mut total = Events::default();
    for seed in seeds {
        let events = World::new(seed, long, fault).run()?;
        total.add(&events);
    }
    Ok(total)
}

#[test]
fn short_seeds_give_every_sequence_the_tokens_it_has_alone() {
    let range = seeds(20_000);
    let count = range.end - range.start;
    let events = run(range, false, None).unwrap_or_else(|fault| panic!("{fault}"));
    println!("{count} seeds: {events:?}");
    if count >= 1_000 {
        for (name, seeds) in events.named() {
            assert!(seeds * 100 >= count, "{name} in {seeds} of {count} seeds only");
        }
    }
}

#[test]
fn long_seeds_give_every_sequence_the_tokens_it_has_alone() {
    let events = run(seeds(1_000), true, None).unwrap_or_else(|fault| panic!("{fault}"));
    println!("{events:?}");
}

/// Each planted fault is caught within some seeds: the test can fail.
#[test]
fn planted_faults_are_caught() {
    caught(&Fault::OUTSIDE);
}

/// Those that sit in the scheduler: `cargo test --features faults`.
#[cfg(feature = "faults")]
#[test]
fn faults_within_the_scheduler_are_caught() {
    caught(&Fault::WITHIN);
}

fn caught(faults: &[Fault]) {
    for fault in faults {
        let caught = std::panic::catch_unwind(|| run(0..3_000, false, Some(*fault)));
        assert!(!matches!(caught, Ok(Ok(_))), "{fault:?} was not caught");
    }
}
