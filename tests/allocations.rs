//! The control plane's step takes no memory once it runs, whoever waits. A file of its own, since
//! the allocator is counted for the whole program.

#[path = "support/control.rs"]
mod control;

use std::alloc::System;
use std::time::Duration;

use deltapool::scheduler::{End, Prompt, Scheduler, SequenceId, StepReport};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const RUNNING: usize = 64;

#[test]
fn a_step_allocates_nothing_in_steady_state() {
    for waiting in [0, 100_000] {
        let mut scheduler = control::scheduler(RUNNING, 2_000);
        for _ in 0..RUNNING + waiting {
            scheduler.submit(&Prompt::new(&[1; 100], 1_900)).expect("it fits");
        }
        control::until_all_decode(&mut scheduler, RUNNING);
        // Followers draw their first token of a prompt: one step more, and the lists of a plan have
        // the size they keep.
        control::until_all_decode(&mut scheduler, RUNNING);
        let mut report = StepReport::default();
        // The harness of the tests shares the allocator and may take some memory meanwhile, so one
        // round without is asked for.
        let rounds: Vec<usize> = (0..3).map(|_| allocations(&mut scheduler, &mut report)).collect();
        assert!(rounds.contains(&0), "{rounds:?} allocations with {waiting} waiting");
        while !scheduler.is_idle() {
            let ids: Vec<_> = (0..(RUNNING + waiting) as u64).collect();
            ids.into_iter().for_each(|id| scheduler.end(SequenceId(id), End::Cancelled));
        }
    }
}

/// What plan and commit take in 192 steps, in which every sequence takes three blocks.
fn allocations(scheduler: &mut Scheduler, report: &mut StepReport) -> usize {
    let (mut allocations, mut blocks) = (0, 0);
    for _ in 0..192 {
        let held = scheduler.device().stats().blocks.held;
        let region = Region::new(ALLOCATOR);
        let plan = scheduler.plan(Duration::ZERO);
        let planned = region.change();
        control::answer(&plan, report);
        let region = Region::new(ALLOCATOR);
        scheduler.commit(plan, report);
        let committed = region.change();
        for change in [planned, committed] {
            allocations += change.allocations + change.reallocations;
        }
        blocks += scheduler.device().stats().blocks.held - held;
    }
    assert_eq!(blocks, RUNNING * 3);
    allocations
}
